//! A VM's screen from end to end: the guest finds it, and vmmctl reaches it through the daemon.

use super::glyphs;
use super::picture::Picture;
use super::served::Served;
use rstest::rstest;
use serde_json::json;
use vmmd_tests::node::Kernel;
use vmmd_tests::vm::{Console, Vm, VmSpec};
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
    let text = vm.node().sh(&read);
    let bytes: Vec<u32> = text
        .split_whitespace()
        .map(|byte| byte.parse().expect("a byte"))
        .collect();
    let number = |bytes: &[u32]| bytes.iter().fold(0, |number, byte| number << 8 | byte);
    format!("{}x{}", number(&bytes[..4]), number(&bytes[4..]))
}

#[test]
fn vmmctl_reads_and_types_on_a_screen_also_when_paused() {
    let case = Case::new("screen");
    let (vm, mut console) = Vm::boot(&case, "", &with_screen());
    // virtio 1.3, 4.1.2.1: 0x1040 and the type: 16 is a GPU, 18 an input device.
    let devices = console.run("cat /sys/bus/pci/devices/*/device");
    assert_eq!(
        ["0x1050", "0x1052"].map(|id| devices.matches(id).count()),
        [1, 2],
        "{devices}"
    );

    let picture = format!("{}/screen.png", case.folder());
    vm.ctl_with("screenshot", &picture);
    assert_eq!(png_size(&vm, &picture), "1024x768");
    vm.ctl("pause");
    let paused = format!("{picture}.paused.png");
    vm.ctl_with("screenshot", &paused);
    assert_eq!(png_size(&vm, &paused), "1024x768");
    vm.ctl("resume");
    vm.ctl_with("send-key", "ctrl+alt+f2");
    vm.ctl_with("type", "'echo hello' --enter");

    // Any viewer, at an address that vmmctl prints.
    let served = Served::start(&case, &vm);
    let (_, port) = served.address.rsplit_once(':').expect("a port");
    let greeting = vm.node().sh(&format!(
        "timeout 60 bash -c 'exec 3<>/dev/tcp/127.0.0.1/{port}; head -c 12 <&3'"
    ));
    assert_eq!(greeting, GREETING);
    let process = &served.process;
    let ended = format!("kill -INT {process} && timeout 60 tail --pid {process} -f /dev/null");
    vm.node().sh(&ended);
}

/// The picture on the screen, as `vmmctl screenshot` has it.
fn picture(case: &Case, vm: &Vm<'_>) -> Picture {
    let path = format!("{}/text.png", case.folder());
    vm.ctl_with("screenshot", &path);
    let folder = tempfile::tempdir().expect("a folder");
    let copy = folder.path().join("text.png");
    vm.node().copy_out(&path, &copy).expect("the PNG");
    Picture::read(&copy)
}

/// Cloud kernels have no driver for the adapter, and one for a plain framebuffer; their keyboard is the i8042's.
#[rstest]
#[case::nightly_debian_11(Kernel::Cloud510)]
#[case::debian_12(Kernel::Cloud61)]
#[case::nightly_backports(Kernel::Cloud612)]
fn text_console_without_a_driver_is_on_the_screen(#[case] kernel: Kernel) {
    let case = Case::new("screen-text");
    // A bzImage, because the entry path of an ELF does not report screens.
    let spec = VmSpec::new(Guests.vmlinuz(kernel), Some(Guests.initrd(kernel)))
        .cmdline(kernel.arguments())
        .set("/display", json!({ "width": 1024, "height": 768 }));
    let (vm, mut console) = Vm::boot(&case, "", &spec);
    has_its_text_console_on_the_screen(&case, &vm, &mut console);
}

/// Other kernels have a driver for virtio's display and one for its keyboard, whose text console takes the place of the one that the kernel began with.
#[test]
fn text_console_with_a_driver_is_on_the_screen() {
    let case = Case::new("screen-driver");
    let spec = case
        .screen_guest(Kernel::Generic612)
        .set("/display", json!({ "width": 1024, "height": 768 }));
    let (vm, mut console) = Vm::boot(&case, "", &spec);
    let drivers = console.run("cat /proc/fb; cat /sys/class/input/input*/name");
    for driver in ["virtio_gpudrmfb", "vmmd keyboard"] {
        assert!(drivers.contains(driver), "{drivers}");
    }
    has_its_text_console_on_the_screen(&case, &vm, &mut console);
}

/// Checks that the screenshot shows the guest's drawing, and that the guest receives typed input.
fn has_its_text_console_on_the_screen(case: &Case, vm: &Vm<'_>, console: &mut Console) {
    let alphabet: String = glyphs::alphabet().collect();
    let quoted = alphabet.replace('\'', "'\\''");
    // Cursor off, the screen cleared, the alphabet in the first row, something that only this guest knows in the third.
    let draw = format!(
        "printf '\\033[?25l\\033[2J\\033[H%s\\n\\n%s %s\\n' '{quoted}' \"$(uname -r)\" \"$(cat /proc/sys/kernel/random/boot_id)\" > /dev/tty1"
    );
    console.run(&draw);
    let wanted = console.run("echo $(uname -r) $(cat /proc/sys/kernel/random/boot_id)");
    let font = comes_to_show(case, vm, |picture| {
        let font = picture.learn(0)?;
        // Earlier content is gone: the picture is current.
        (picture.text(&font, 1).is_empty() && picture.text(&font, 2) == wanted.trim()).then_some(font)
    });

    // A typed line is echoed on the screen, and a reader of the terminal receives it.
    let read = "head -n 1 < /dev/tty1 > /tmp/typed & sleep 1";
    console.run(read);
    vm.ctl_with("type", "'Hello, {Guest}: 3 < 4!' --enter");
    let typed = console.run("until [ -s /tmp/typed ]; do usleep 100000; done; cat /tmp/typed");
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
