//! Guests boot through the firmware of the node's distribution.

use rstest::rstest;
use serde_json::json;
use vmmd_tests::storage::{Disk, Format};
use vmmd_tests::vm::{Console, Vm, VmSpec};
use vmmd_tests::{Case, Guests};

/// How long firmware, boot loader and guest may take in a slow node, in seconds.
const BOOT: u64 = 300;

/// A variable of UEFI, as a file of the guest's efivarfs.
const VARIABLE: &str = "/sys/firmware/efi/efivars/Kept-0d6a3a0e-3d2c-4b1f-9c58-1e5b7a4f2d33";
/// Mounts efivarfs.
const MOUNT: &str = "mount -t efivarfs efivarfs /sys/firmware/efi/efivars";
/// PCR 0 of a TPM: the code of the firmware.
const PCR: &str = "cat /sys/class/tpm/tpm0/pcr-sha256/0";
/// Prints the kernel's list of the tables that firmware has installed. Linux reads the whole log in
/// its EFI stub, which this boot loader does not use.
const TABLES: &str = "dmesg | grep TPMFinalLog=";
/// Prints the kernel's messages about wrong firmware.
const COMPLAINTS: &str = "dmesg | grep -i -E 'firmware bug|firmware warn|BUG:|ACPI.*error|WARNING: ' | grep -v arch/x86/kernel/fpu/xstate.c || true";

/// A disk without a boot loader, and one with it.
fn disks(case: &Case) -> (Disk, Disk) {
    let boot = format!("{}/boot.raw", case.folder());
    case.node()
        .sh(&format!("cp --sparse=always {} {boot}", Guests.boot_disk()));
    let empty = case.image("empty", Format::Raw, 8);
    let disk = |name, path: &str| Disk::new(name, Format::Raw, path);
    (disk("empty", &empty), disk("boot", &boot))
}

fn booted(console: &mut Console) {
    console.until("GUEST-READY", BOOT);
}

fn knows_its_machine(vm: &Vm<'_>, console: &mut Console) {
    let uuid = console.run("cat /sys/class/dmi/id/product_uuid");
    assert_eq!(uuid.trim(), vm.field("/metadata/uid"));
    assert_eq!(console.run(COMPLAINTS).trim(), "");
}

#[test]
fn uefi_boots_the_second_disk_and_keeps_variables() {
    let case = Case::new("uefi");
    let (empty, boot) = disks(&case);
    // The boot disk has an EFI system partition, and the first disk nothing to boot.
    let spec = VmSpec::firmware("AUTO")
        .memory_mib(512)
        .set("/clock", json!({"timezone": "Etc/GMT-5"}))
        .set("/tpm", json!({}))
        .set(
            "/smbios",
            json!({"serial": "SN-4711", "product": "Appliance 3", "assetTag": "rack-7"}),
        )
        .with_disk(empty)
        .with_disk(boot);
    let vm = Vm::start(&case, "", &spec);
    let mut console = vm.console();
    booted(&mut console);
    knows_its_machine(&vm, &mut console);
    let identity = console.run("cd /sys/class/dmi/id && cat product_serial product_name chassis_asset_tag");
    assert_eq!(
        identity.lines().collect::<Vec<_>>(),
        ["SN-4711", "Appliance 3", "rack-7"]
    );
    // The sign of such a name is that of POSIX: five hours east of Greenwich. Linux sets its own clock by this one.
    let clock = |text: String| text.trim().parse::<i64>().expect("seconds");
    let shown = clock(console.run("cat /sys/class/rtc/rtc0/since_epoch"));
    let ahead = shown - clock(vm.node().sh("date +%s"));
    assert!((17_900..18_100).contains(&ahead), "{ahead} s ahead");
    // The firmware has measured itself, and offers its log of that.
    console.run("test -c /dev/tpm0");
    let measured = console.run(PCR);
    assert!(measured.trim().len() == 64 && measured.trim().bytes().any(|digit| digit != b'0'));
    console.run(TABLES);
    // The disks are those of the spec, in their order.
    console.run("test $(cat /sys/block/vda/size) = 16384 && test $(cat /sys/block/vdb/size) = 131072");
    // The first four bytes are attributes: kept without power, for the boot loader and the guest.
    console.run(&format!(
        "{MOUNT} && printf '\\007\\000\\000\\000kept' >{VARIABLE}"
    ));
    vm.node().sh(&format!("kill -9 {}", vm.pid()));
    vm.wait_end(60);
    vm.ctl("start");
    let mut console = vm.console();
    booted(&mut console);
    let kept = format!("{MOUNT} && tail -c 4 {VARIABLE}");
    assert_eq!(console.run(&kept).trim(), "kept");

    let snapshot = format!("{}-snapshot", case.name());
    vm.node().sh(&format!(
        "vmmctl snapshot create {snapshot} --vm {} --paused",
        vm.name()
    ));
    case.at_end(format!("vmmctl snapshot rm {snapshot}"));
    vm.ctl("stop --force");
    let clone = format!("{}-clone", case.name());
    case.at_end(format!(
        "vmmctl delete --force --with-disks --yes --ignore-not-found {clone}"
    ));
    vm.node().sh(&format!("vmmctl clone {snapshot} {clone}"));
    let mut console = Console::open(&case, &format!("vmmctl console {clone}"));
    console.attached_again();
    assert_eq!(console.run(PCR), measured);
    // The memory of the original, then firmware, boot loader and kernel again.
    console.type_line("reboot");
    booted(&mut console);
    assert_eq!(console.run(&kept).trim(), "kept");
    console.type_line("poweroff");
    vm.node()
        .sh(&format!("vmmctl wait {clone} --for phase=Stopped --timeout 60s"));
}

#[rstest]
#[case::nightly("DISK_BUS_VIRTIO")]
#[case::sata("DISK_BUS_SATA")]
fn bios_boots_the_first_disk_of_the_order(#[case] bus: &str) {
    let is_sata = bus == "DISK_BUS_SATA";
    let case = Case::new("bios");
    let (empty, boot) = disks(&case);
    // It tries one disk alone: that of the first position.
    let boot = boot.with("bootOrder", 1).with("bus", bus);
    let mut spec = VmSpec::firmware("BIOS")
        .memory_mib(256)
        .with_disk(empty)
        .with_disk(boot);
    if is_sata {
        let cd = format!("{}/cd.iso", case.folder());
        case.node().sh(&format!(
            "head -c 2097152 /dev/urandom >{cd}.data && genisoimage -quiet -R -o {cd} {cd}.data"
        ));
        spec = spec.with_disk(Disk::iso("cd", &cd).with("cdrom", true));
    }
    let vm = Vm::start(&case, "", &spec);
    let mut console = vm.console();
    booted(&mut console);
    knows_its_machine(&vm, &mut console);
    console.run("test ! -d /sys/firmware/efi");
    if is_sata {
        console.run("until test -b /dev/sda && test -b /dev/sr0; do usleep 50000; done");
        console.run("head -c 1048576 /dev/urandom >/run/written && dd if=/run/written of=/dev/sda bs=64k seek=1008 2>/dev/null && sync");
        console.run("echo 3 >/proc/sys/vm/drop_caches; dd if=/dev/sda bs=64k skip=1008 count=16 2>/dev/null | cmp - /run/written");
        let read = console.run("md5sum </dev/sr0");
        let expected = vm.node().sh(&format!("md5sum <{}/cd.iso", case.folder()));
        assert_eq!(read.trim(), expected.trim());
        vm.node().sh(&format!("vmmctl eject {} cd", vm.name()));
        console.run("! head -c 1 /dev/sr0 2>/dev/null");
        let other = format!("{}/other.iso", case.folder());
        vm.node().sh(&format!(
            "genisoimage -quiet -R -o {other} /etc/os-release && vmmctl insert {} cd {other}",
            vm.name()
        ));
        let read = console.run("md5sum </dev/sr0");
        let expected = vm.node().sh(&format!("md5sum <{other}"));
        assert_eq!(read.trim(), expected.trim());
        let log = console.run("dmesg | grep -E 'ata[0-9].*(error|exception|failed|reset)' || true");
        assert_eq!(log.trim(), "");
    }
    console.type_line("reboot");
    booted(&mut console);
    console.type_line("poweroff");
    vm.wait_phase("STOPPED", 60);
    assert_eq!(vm.exit_reason(), "GUEST_SHUTDOWN");
}
