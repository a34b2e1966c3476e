//! The steps of the demonstration, in their order.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use super::place::{FAR_ADDRESS, GATEWAY, NETWORK};
use super::{Steps, picture};
use crate::vm::Console;

/// How long the guest may take to boot in a slow node, in seconds.
const BOOT: u64 = 120;
/// The kernel's command line, as on the image.
const CMDLINE: &str = include_str!("../../guest/demo/overlay/etc/kernel/cmdline").trim_ascii();
/// How many pixels the greeting and the messages of the kernel have at least.
const TEXT: usize = 1000;

/// Everything.
pub fn tour(steps: &mut Steps<'_>) -> Result<()> {
    start(steps)?;
    console(steps)?;
    ssh(steps)?;
    screen(steps)?;
    disk(steps)?;
    snapshot(steps)?;
    migrate(steps)?;
    stop(steps)
}

/// A VM, and the caller at its console.
pub fn shell(steps: &mut Steps<'_>) -> Result<()> {
    start(steps)?;
    steps.say("The VM's console is yours: ^] leaves it, and ends the demonstration")?;
    let mut console = steps.place.terminal("vmmctl console web");
    let status = console.status().context("start vmmctl")?;
    ensure!(status.success(), "vmmctl console ended with {status}");
    steps.command("Stop the VM", "vmmctl stop web").map(drop)
}

fn start(steps: &mut Steps<'_>) -> Result<()> {
    let folder = steps.place.guest();
    steps.command(
        "Import an image",
        &format!("vmmctl create image tiny {folder}/tiny.qcow2"),
    )?;
    steps.command(
        "Make a network",
        &format!("vmmctl create network lan --cidr {NETWORK}"),
    )?;
    // The guest's kernel is a file beside its image.
    let run = format!(
        "vmmctl run tiny --name web --memory 128Mi --network lan --display --wait \
         --kernel {folder}/vmlinuz --initrd {folder}/initrd --cmdline '{CMDLINE}'"
    );
    let output = steps.command("Run a VM of the image until its SSH server answers", &run)?;
    Steps::expect(&output, "answers on port 22")
}

fn console(steps: &mut Steps<'_>) -> Result<()> {
    steps.say("The serial console: what the guest has printed, and a command in it")?;
    let mut console = Console::spawn(&mut steps.place.command("vmmctl console web"))?;
    steps.timed("vmmctl console web", |_| console.try_until("guest# ", BOOT))?;
    let ping = format!("ping -c 3 {GATEWAY}");
    steps.timed(&format!("{ping}    (in the guest)"), |_| console.try_run(&ping))?;
    Ok(())
}

/// `vmmctl ssh` with a command for the guest.
fn in_guest(steps: &Steps<'_>, options: &str, command: &str) -> Result<String> {
    let key = steps.place.key()?;
    Ok(format!("vmmctl {options}ssh {key}root@web -- '{command}'"))
}

fn ssh(steps: &mut Steps<'_>) -> Result<()> {
    let command = in_guest(steps, "", "uname -sr; uptime; ip -4 addr show eth0")?;
    let output = steps.command("Log in by SSH", &command)?;
    Steps::expect(&output, "Linux 6.12")
}

fn screen(steps: &mut Steps<'_>) -> Result<()> {
    steps.command("Take a picture of the screen", "vmmctl screenshot web screen.png")?;
    steps.place.fetch("screen.png", &picture())?;
    let light = light_pixels(&picture())?;
    ensure!(
        light > TEXT,
        "{} shows no text: it has {light} light pixels",
        picture().display()
    );
    println!("     the picture: {}", picture().display());
    Ok(())
}

/// Pixels of a picture that are not black or nearly so.
fn light_pixels(png: &Path) -> Result<usize> {
    let file = File::open(png).with_context(|| format!("open {}", png.display()))?;
    let mut reader = png::Decoder::new(BufReader::new(file)).read_info()?;
    let mut bytes = vec![0; reader.output_buffer_size().context("a picture that fits")?];
    let frame = reader.next_frame(&mut bytes)?;
    if (frame.color_type, frame.bit_depth) != (png::ColorType::Rgb, png::BitDepth::Eight) {
        bail!("{} is not 8-bit RGB", png.display());
    }
    Ok(bytes
        .chunks_exact(3)
        .filter(|rgb| rgb.iter().any(|byte| *byte > 127))
        .count())
}

fn disk(steps: &mut Steps<'_>) -> Result<()> {
    steps.command(
        "Plug a disk into the running guest",
        "vmmctl create disk data --size 64Mi",
    )?;
    steps.more("vmmctl attach web --disk data")?;
    // /dev/vdb has the data of cloud-init, which each VM of `vmmctl run` gets.
    let use_it = "mke2fs /dev/vdc >/dev/null && mount /dev/vdc /mnt && echo kept >/mnt/note && df -h /mnt";
    let output = steps.more(&in_guest(steps, "", use_it)?)?;
    Steps::expect(&output, "/dev/vdc")
}

fn snapshot(steps: &mut Steps<'_>) -> Result<()> {
    steps.command(
        "Take a snapshot of memory and disks, lose a file, and restore the VM",
        "vmmctl create snapshot web-1 --vm web --paused",
    )?;
    steps.more(&in_guest(
        steps,
        "",
        "rm /mnt/note; ls /mnt; echo seconds since the boot: $(cat /run/count)",
    )?)?;
    steps.more("vmmctl stop web --force && vmmctl restore web-1")?;
    let output = steps.more(&in_guest(
        steps,
        "",
        "cat /mnt/note; echo seconds since the boot: $(cat /run/count)",
    )?)?;
    Steps::expect(&output, "kept")
}

fn migrate(steps: &mut Steps<'_>) -> Result<()> {
    let far = format!("{} ", steps.place.far());
    steps.command(
        "Move the running VM to another daemon, with its disks",
        &format!("vmmctl {far}create network lan --cidr {NETWORK}"),
    )?;
    // The restored VM runs until it is moved, and continues there.
    steps.more(&format!(
        "vmmctl migrate vm web --to {FAR_ADDRESS} --downtime-limit 5s --force"
    ))?;
    let output = steps.more(&format!("vmmctl get vm; vmmctl {far}get vm"))?;
    Steps::expect(&output, "Running")?;
    let command = in_guest(
        steps,
        &far,
        "cat /mnt/note; echo seconds since the boot: $(cat /run/count)",
    )?;
    let output = steps.more(&command)?;
    Steps::expect(&output, "kept")
}

fn stop(steps: &mut Steps<'_>) -> Result<()> {
    let far = steps.place.far();
    let output = steps.command(
        "Press the power button: the guest powers off",
        &format!("vmmctl {far} stop web --grace 120s && vmmctl {far} get vm web"),
    )?;
    Steps::expect(&output, "Stopped")
}
