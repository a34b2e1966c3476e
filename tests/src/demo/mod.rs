//! The demonstration: one Debian VM from its manifest to a ping and a graceful stop, told in a dozen lines.

mod place;
pub mod ready;

use std::io::Write;

use anyhow::{Context, Result, ensure};

use crate::vm::{Console, VmSpec};
use crate::wait::Deadline;
use place::Place;

const NAME: &str = "demo";
const BRIDGE: &str = "demo0";
/// A whole Debian takes about a minute to boot in an emulated node.
const BOOT: u64 = 400;
const PROMPT: &str = "root@";

/// Numbers the steps of the demonstration.
struct Steps(u32);

impl Steps {
    fn say(&mut self, what: &str) {
        self.0 += 1;
        println!("\n[{:2}] {what}", self.0);
    }
}

/// Runs it; with `shell` it ends on the VM's console in the caller's hands.
pub fn run(shell: bool) -> Result<()> {
    let mut steps = Steps(0);
    let place = Place::choose(|what| steps.say(what))?;
    let result = show(&place, &mut steps, shell);
    place.end()?;
    result
}

fn show(place: &Place, steps: &mut Steps, shell: bool) -> Result<()> {
    let folder = place.folder();
    let guests = place.guests();
    steps.say("A copy of the Debian disk, and a bridge with the address 10.80.0.1");
    place.sh(&format!(
        "mkdir -p {folder} && cp --sparse=always {guests}/disk.raw {folder}/root.raw && \
         {{ ip link show {BRIDGE} >/dev/null 2>&1 || ip link add {BRIDGE} type bridge; }} && \
         ip addr replace 10.80.0.1/24 dev {BRIDGE} && ip link set {BRIDGE} up"
    ))?;
    let spec = VmSpec::new(format!("{guests}/vmlinuz"), Some(format!("{guests}/initrd")))
        .cores(2)
        .memory_mib(512)
        .disk("root", &format!("{folder}/root.raw"), false)
        .nic("eth0", BRIDGE)
        .cmdline("root=/dev/vda rw net.ifnames=0 ip=10.80.0.2::10.80.0.1:255.255.255.0::eth0:off");
    let manifest = serde_json::to_string_pretty(&spec.manifest(NAME))?;
    steps.say(&format!(
        "vmmctl apply --start -f {folder}/demo.yaml, which says:"
    ));
    print_indented(&manifest);
    place.sh(&format!(
        "cat >{folder}/demo.yaml <<'MANIFEST'\n{manifest}\nMANIFEST\n"
    ))?;
    print_indented(&place.sh(&format!("vmmctl apply --start -f {folder}/demo.yaml"))?);
    if shell {
        steps.say("The VM's console: log in as root, password vmmd. ^] leaves, and ends the demonstration.");
        let status = place
            .terminal(&format!("vmmctl console {NAME}"))
            .status()
            .context("start vmmctl")?;
        ensure!(status.success(), "vmmctl console ended with {status}");
    } else {
        tour(place, steps)?;
    }
    steps.say("vmmctl stop: the power button is pressed, systemd in the guest powers off");
    print_indented(&place.sh(&format!(
        "vmmctl stop --grace 120s {NAME} && vmmctl get vm {NAME}"
    ))?);
    place.sh(&format!(
        "vmmctl delete {NAME} && rm -rf {folder} && ip link del {BRIDGE}"
    ))?;
    steps.say("The VM, its disk copy and the bridge are deleted. That was vmmd.");
    Ok(())
}

fn tour(place: &Place, steps: &mut Steps) -> Result<()> {
    steps.say("vmmctl console: the guest's boot, as its serial console has it");
    let mut console = Console::spawn(&mut place.command(&format!("vmmctl console {NAME}")))?;
    print_indented(&console.try_until("login: ", BOOT)?);
    steps.say("Log in");
    console.try_type_line("root")?;
    console.try_until("Password:", 60)?;
    console.try_type_line("vmmd")?;
    console.try_until(PROMPT, 120)?;
    for (what, command) in [
        ("uname -a", "uname -a"),
        ("the disk", "lsblk -o NAME,SIZE,TYPE,SERIAL,MOUNTPOINTS"),
        ("the address", "ip -brief address"),
        (
            "a ping over the network, from the guest to the bridge",
            "ping -c 3 10.80.0.1",
        ),
    ] {
        steps.say(what);
        print_indented(&console.try_run(command)?);
    }
    steps.say("vmmctl get vm -o wide, vmmctl node");
    print_indented(&place.sh("vmmctl get vm -o wide && vmmctl node")?);
    Ok(())
}

fn print_indented(text: &str) {
    let mut out = std::io::stdout().lock();
    for line in text.lines() {
        let line: String = line.chars().filter(|letter| !letter.is_control()).collect();
        // A closed pipe ends the program at the next println.
        let _ = writeln!(out, "     {line}");
    }
}

impl Place {
    /// Runs a shell command there, which must end with 0, and returns its standard output.
    fn sh(&self, command: &str) -> Result<String> {
        let output = crate::run::output(&mut self.command(command), Deadline::seconds(300))?;
        ensure!(
            output.success(),
            "`{command}` ended with {}:\n{}{}",
            output.status,
            output.stdout,
            output.stderr
        );
        Ok(output.stdout)
    }
}
