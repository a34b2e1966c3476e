//! The guest images under QEMU in the node: what does not boot there is not our VMM's fault.

use vmmd_tests::node::{Kernel, Stream};
use vmmd_tests::wait::Deadline;
use vmmd_tests::{Case, Guests, long};

/// Starts a guest whose serial console is the returned stream; QEMU's exit status follows.
fn boot(case: &Case, kernel: &str, initrd: &str, arguments: &str, options: &str) -> Stream {
    case.node()
        .stream(&format!(
            "timeout 100 qemu-system-x86_64 -accel kvm -cpu host -M q35 -smp 1 -m 256 -nodefaults -no-user-config \
             -display none -serial stdio {options} -device virtio-rng-pci -kernel {kernel} -initrd {initrd} \
             -append 'console=ttyS0 quiet panic=-1 {arguments}' 2>&1; echo QEMU-EXIT $?"
        ))
        .expect("start QEMU")
}

/// One kernel, or all of them in the long form: each boots under `vmm` in `boot.rs`, and 5.10 under QEMU in `old_kernel.rs`.
#[test]
fn kernels_boot_to_a_shell_under_qemu_and_hear_the_power_button() {
    let kernels = if long() {
        &Kernel::ALL[..]
    } else {
        &[Kernel::Generic61]
    };
    for kernel in kernels.iter().copied() {
        let case = Case::new(kernel.name()).expect("node");
        let monitor = format!("{}/monitor", case.folder().expect("folder"));
        let mut guest = boot(
            &case,
            &Guests.vmlinuz(kernel),
            &Guests.initrd(kernel),
            kernel.arguments(),
            &format!("-monitor unix:{monitor},server=on,wait=off"),
        );
        let deadline = Deadline::seconds(100);
        for marker in ["GUEST-INIT", "GUEST-READY uptime=", "guest# "] {
            guest.until(marker, deadline).expect("boot");
        }
        case.node()
            .sh(&format!("echo system_powerdown | socat - UNIX-CONNECT:{monitor}"))
            .expect("press the button");
        for marker in ["GUEST-POWER-BUTTON", "reboot: Power down", "QEMU-EXIT 0\n"] {
            guest.until(marker, deadline).expect("power off");
        }
    }
}

#[test]
fn the_elf_kernel_boots_by_its_pvh_entry_runs_a_script_and_reboots() {
    // echo "sum=$((40 + 2))"; test -c /dev/hwrng && echo rng; exit 7
    let script = "ZWNobyAic3VtPSQoKDQwICsgMikpIjsgdGVzdCAtYyAvZGV2L2h3cm5nICYmIGVjaG8gcm5nOyBleGl0IDc=";
    let case = Case::new("pvh").expect("node");
    let mut guest = boot(
        &case,
        &Guests.vmlinux(Kernel::Cloud612),
        &Guests.initrd(Kernel::Cloud612),
        &format!("guest.run={script} guest.after=reboot"),
        "-no-reboot",
    );
    let deadline = Deadline::seconds(100);
    for expected in [
        "sum=42",
        "rng",
        "GUEST-RUN-EXIT 7",
        "reboot: Restarting system",
        "QEMU-EXIT 0\n",
    ] {
        guest.until(expected, deadline).expect("the guest's output");
    }
}
