//! The guest images under QEMU in the node: what does not boot there is not our VMM's fault.

use vmmd_tests::Case;
use vmmd_tests::node::Kernel;
use vmmd_tests::wait::Deadline;

/// Boots a busybox guest that powers itself off, and returns what it printed.
fn boot(topic: &str, machine: &str, kernel: &str, initrd: &str, arguments: &str) -> String {
    let case = Case::new(topic).expect("node");
    let mut guest = case
        .node()
        .stream(&format!(
            "timeout 100 qemu-system-x86_64 -accel kvm -cpu host -M {machine} -smp 1 -m 256 -nodefaults -no-user-config \
             -display none -serial stdio -no-reboot -device virtio-rng-pci -kernel {kernel} -initrd {initrd} \
             -append 'console=ttyS0 quiet panic=-1 {arguments}' 2>&1; echo QEMU-EXIT $?"
        ))
        .expect("start QEMU");
    let text = guest
        .until("QEMU-EXIT 0\n", Deadline::seconds(110))
        .expect("the guest ends");
    for marker in ["GUEST-INIT", "GUEST-READY uptime="] {
        assert!(text.contains(marker), "no {marker} in:\n{text}");
    }
    text
}

#[test]
fn every_kernel_boots_to_its_init_and_powers_off() {
    for kernel in Kernel::ALL {
        let guests = vmmd_tests::Guests;
        let text = boot(
            kernel.name(),
            "q35",
            &guests.vmlinuz(kernel),
            &guests.initrd(kernel),
            "guest.after=poweroff",
        );
        assert!(text.contains("reboot: Power down"), "{text}");
    }
}

#[test]
fn the_elf_kernel_boots_by_its_pvh_entry_runs_a_script_and_reboots() {
    let guests = vmmd_tests::Guests;
    // echo "sum=$((40 + 2))"; test -c /dev/hwrng; exit 7
    let script = "ZWNobyAic3VtPSQoKDQwICsgMikpIjsgdGVzdCAtYyAvZGV2L2h3cm5nICYmIGVjaG8gcm5nOyBleGl0IDc=";
    let text = boot(
        "pvh",
        "q35",
        &guests.vmlinux(Kernel::Cloud612),
        &guests.initrd(Kernel::Cloud612),
        &format!("guest.run={script} guest.after=reboot"),
    );
    for expected in ["sum=42", "rng", "GUEST-RUN-EXIT 7", "reboot: Restarting system"] {
        assert!(text.contains(expected), "no {expected} in:\n{text}");
    }
}

#[test]
fn the_small_machine_that_ours_is_measured_against_boots_the_same_image() {
    let guests = vmmd_tests::Guests;
    let kernel = Kernel::Cloud612;
    boot(
        "microvm",
        "microvm,pcie=on,acpi=on",
        &guests.vmlinuz(kernel),
        &guests.initrd(kernel),
        "guest.after=poweroff",
    );
}

#[test]
fn the_power_button_is_heard_by_every_busybox_guest() {
    for kernel in Kernel::ALL {
        let case = Case::new("button").expect("node");
        let guests = case.node().guests();
        let monitor = format!("{}/monitor", case.folder().expect("folder"));
        let mut guest = case
            .node()
            .stream(&format!(
                "timeout 100 qemu-system-x86_64 -accel kvm -cpu host -M q35 -m 256 -nodefaults -no-user-config \
                 -display none -serial stdio -monitor unix:{monitor},server=on,wait=off -kernel {} -initrd {} \
                 -append 'console=ttyS0 quiet panic=-1' 2>&1; echo QEMU-EXIT $?",
                guests.vmlinuz(kernel),
                guests.initrd(kernel)
            ))
            .expect("start QEMU");
        let deadline = Deadline::seconds(100);
        guest.until("guest# ", deadline).expect("the shell");
        case.node()
            .sh(&format!("echo system_powerdown | socat - UNIX-CONNECT:{monitor}"))
            .expect("press");
        guest
            .until("GUEST-POWER-BUTTON", deadline)
            .expect("the guest hears it");
        guest
            .until("QEMU-EXIT 0", deadline)
            .expect("the guest powers off");
    }
}
