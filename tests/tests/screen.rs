//! A VM's screen from end to end: the guest finds it, and vmmctl reaches it through the daemon.

#[path = "screen/glyphs.rs"]
mod glyphs;
#[path = "screen/picture.rs"]
mod picture;
#[path = "screen/served.rs"]
mod served;

use picture::Picture;
use rstest::rstest;
use serde_json::json;
use served::Served;
use vmmd_tests::node::Kernel;
use vmmd_tests::vm::{BOOT, Console, Vm, VmSpec};
use vmmd_tests::wait::Deadline;
use vmmd_tests::{Case, Guests};

/// Start of the protocol in its newest version (RFC 6143, 7.1.1).
const GREETING: &str = "RFB 003.008\n";

fn with_screen() -> VmSpec {
    VmSpec::busybox(Kernel::Cloud612).set("/display", json!({ "width": 1024, "height": 768 }))
}

/// Width and height that a PNG in the node says (its IHDR chunk: PNG, 11.2.2).
fn png_size(vm: &Vm<'_>, path: &str) -> String {
    let read = format!("head -c 8 {path} | grep -aq PNG && od -An -tu1 -j16 -N8 {path}");
    let text = vm.node().sh(&read).expect("a PNG");
    let bytes: Vec<u32> = text
        .split_whitespace()
        .map(|byte| byte.parse().expect("a byte"))
        .collect();
    let number = |bytes: &[u32]| bytes.iter().fold(0, |number, byte| number << 8 | byte);
    format!("{}x{}", number(&bytes[..4]), number(&bytes[4..]))
}

#[test]
fn a_guest_finds_its_screen_and_vmmctl_looks_and_types_also_while_it_is_paused() {
    let case = Case::new("screen").expect("node");
    let vm = Vm::start(&case, "", &with_screen()).expect("start");
    let mut console = vm.console().expect("console");
    console.until("GUEST-READY", BOOT).expect("boot");
    // virtio 1.3, 4.1.2.1: 0x1040 and the type: 16 is a GPU, 18 an input device.
    let devices = console
        .run("cat /sys/bus/pci/devices/*/device", 60)
        .expect("PCI devices");
    assert_eq!(
        ["0x1050", "0x1052"].map(|id| devices.matches(id).count()),
        [1, 2],
        "{devices}"
    );

    let picture = format!("{}/screen.png", case.folder().expect("folder"));
    vm.ctl_with("screenshot", &picture).expect("screenshot");
    assert_eq!(png_size(&vm, &picture), "1024x768");
    vm.ctl("pause").expect("pause");
    let paused = format!("{picture}.paused.png");
    vm.ctl_with("screenshot", &paused)
        .expect("screenshot of a paused VM");
    assert_eq!(png_size(&vm, &paused), "1024x768");
    vm.ctl("resume").expect("resume");
    vm.ctl_with("send-key", "ctrl+alt+f2").expect("keys");
    vm.ctl_with("type", "'echo hello' --enter").expect("text");

    // Any viewer, at an address that vmmctl prints.
    let served = Served::start(&case, &vm);
    let (_, port) = served.address.rsplit_once(':').expect("a port");
    let greeting = vm
        .node()
        .sh(&format!(
            "timeout 60 bash -c 'exec 3<>/dev/tcp/127.0.0.1/{port}; head -c 12 <&3'"
        ))
        .expect("a connection");
    assert_eq!(greeting, GREETING);
    let process = &served.process;
    let ended = format!("kill -INT {process} && timeout 60 tail --pid {process} -f /dev/null");
    vm.node().sh(&ended).expect("^C ends it");
}

/// The picture on the screen, as `vmmctl screenshot` has it.
fn picture(case: &Case, vm: &Vm<'_>) -> Picture {
    let path = format!("{}/text.png", case.folder().expect("folder"));
    vm.ctl_with("screenshot", &path).expect("screenshot");
    let folder = tempfile::tempdir().expect("a folder");
    let copy = folder.path().join("text.png");
    vm.node().copy_out(&path, &copy).expect("the PNG");
    Picture::read(&copy)
}

/// Cloud kernels have no driver for the adapter, and one for a plain framebuffer; their keyboard is the i8042's.
#[rstest]
#[case::debian_11(Kernel::Cloud510)]
#[case::debian_12(Kernel::Cloud61)]
#[case::backports(Kernel::Cloud612)]
fn the_text_console_of_a_kernel_without_a_driver_is_on_the_screen(#[case] kernel: Kernel) {
    let case = Case::new("screen-text").expect("node");
    // A bzImage, because the entry path of an ELF does not report screens.
    let spec = VmSpec::new(Guests.vmlinuz(kernel), Some(Guests.initrd(kernel)))
        .cmdline(kernel.arguments())
        .set("/display", json!({ "width": 1024, "height": 768 }));
    let (vm, mut console) = booted(&case, &spec);
    has_its_text_console_on_the_screen(&case, &vm, &mut console);
}

/// Other kernels have a driver for virtio's display and one for its keyboard, whose text console takes the place of the one that the kernel began with.
#[test]
fn the_text_console_of_a_kernel_with_a_driver_is_on_the_screen() {
    let case = Case::new("screen-driver").expect("node");
    let spec = case
        .screen_guest(Kernel::Generic612)
        .expect("initramfs")
        .set("/display", json!({ "width": 1024, "height": 768 }));
    let (vm, mut console) = booted(&case, &spec);
    let drivers = console
        .run("cat /proc/fb; cat /sys/class/input/input*/name", 60)
        .expect("drivers");
    for driver in ["virtio_gpudrmfb", "vmmd keyboard"] {
        assert!(drivers.contains(driver), "{drivers}");
    }
    has_its_text_console_on_the_screen(&case, &vm, &mut console);
}

fn booted<'case>(case: &'case Case, spec: &VmSpec) -> (Vm<'case>, Console) {
    let vm = Vm::start(case, "", spec).expect("start");
    let mut console = vm.console().expect("console");
    console.until("GUEST-READY", BOOT).expect("boot");
    (vm, console)
}

/// Checks that the screenshot shows the guest's drawing, and that the guest receives typed input.
fn has_its_text_console_on_the_screen(case: &Case, vm: &Vm<'_>, console: &mut Console) {
    let alphabet: String = glyphs::alphabet().collect();
    let quoted = alphabet.replace('\'', "'\\''");
    // Cursor off, the screen cleared, the alphabet in the first row, something that only this guest knows in the third.
    let draw = format!(
        "printf '\\033[?25l\\033[2J\\033[H%s\\n\\n%s %s\\n' '{quoted}' \"$(uname -r)\" \"$(cat /proc/sys/kernel/random/boot_id)\" > /dev/tty1"
    );
    console.run(&draw, 60).expect("the guest draws");
    let wanted = console
        .run("echo $(uname -r) $(cat /proc/sys/kernel/random/boot_id)", 60)
        .expect("the same text by serial");
    let font = comes_to_show(case, vm, |picture| {
        let font = picture.learn(0)?;
        // Earlier content is gone: the picture is current.
        (picture.text(&font, 1).is_empty() && picture.text(&font, 2) == wanted.trim()).then_some(font)
    });

    // A typed line is echoed on the screen, and a reader of the terminal receives it.
    let read = "head -n 1 < /dev/tty1 > /tmp/typed & sleep 1";
    console.run(read, 60).expect("a reader");
    vm.ctl_with("type", "'Hello, {Guest}: 3 < 4!' --enter")
        .expect("text");
    let typed = console
        .run(
            "until [ -s /tmp/typed ]; do usleep 100000; done; cat /tmp/typed",
            60,
        )
        .expect("the line");
    assert_eq!(typed.trim(), "Hello, {Guest}: 3 < 4!");
    comes_to_show(case, vm, |picture| {
        (picture.text(&font, 3) == typed.trim()).then_some(())
    });
}

/// Polls the screen until it shows the `wanted` content. A driver sends a drawing with a delay, and
/// no event reports it.
fn comes_to_show<T>(case: &Case, vm: &Vm<'_>, wanted: impl Fn(&Picture) -> Option<T>) -> T {
    let deadline = Deadline::seconds(90);
    loop {
        let picture = picture(case, vm);
        assert_eq!(picture.size(), (1024, 768));
        if let Some(found) = wanted(&picture) {
            return found;
        }
        assert!(!deadline.passed(), "it is not on the screen");
    }
}

#[test]
fn a_vm_without_a_screen_says_how_it_gets_one() {
    let case = Case::new("no-screen").expect("node");
    let vm = Vm::create(&case, "", &VmSpec::busybox(Kernel::Cloud612)).expect("create");
    let output = vm
        .try_ctl_with("screenshot", "/dev/null")
        .expect("the node answers");
    assert!(!output.success());
    assert!(output.stderr.contains("give it a `display`"), "{}", output.stderr);
}
