//! Unmodified Debian kernels boot to a shell on machines of any size, and see the specified
//! machine.

use std::fs::File;

use rstest::rstest;
use vmmd_tests::node::Kernel;
use vmmd_tests::vm::{BOOT, Vm, VmSpec};
use vmmd_tests::{Case, Guests, long, paths};

/// Script that prints the guest's size and the complaints of its kernel: one `name=value` per line.
const SIZE: &str = r#"
echo "nproc=$(nproc)"
echo "mem_mib=$(($(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo) / 1024))"
dmesg | grep -i -E 'firmware bug|BUG:|ACPI.*error|WARNING: ' | sed 's/^/error=/'
"#;

/// Script that prints further properties of the guest.
const FACTS: &str = r#"
for device in /sys/bus/pci/devices/*; do
    driver=$(readlink $device/driver); driver=${driver##*/}
    echo "pci=${device##*/} $(cat $device/vendor):$(cat $device/device) $(cat $device/class) driver=$driver"
done
echo "sockets=$(cat /sys/devices/system/cpu/cpu*/topology/physical_package_id | sort -u | wc -l)"
echo "clock=$(cat /sys/devices/system/clocksource/clocksource0/current_clocksource)"
echo "hypervisor=$(grep -c -w hypervisor /proc/cpuinfo)"
echo "uuid=$(cat /sys/class/dmi/id/product_uuid)"
echo "rng=$(cat /sys/class/misc/hw_random/rng_current)"
echo "pat=$(dmesg | sed -n 's/.*x86\/PAT: Configuration .0-7.: *//p')"
echo "mtrr=$(grep -c uncachable /proc/mtrr)"
echo "rtc=$(cat /sys/class/rtc/rtc0/name)"
echo "tsc_adjust=$(grep -c -w tsc_adjust /proc/cpuinfo)"
"#;

/// Number of processors and MiB of memory of the smallest and the largest machine.
const SMALL: (u32, u64) = (1, 256);
const LARGE: (u32, u64) = (4, 12 * 1024);

fn fact<'text>(text: &'text str, name: &str) -> Vec<&'text str> {
    let prefix = format!("{name}=");
    text.lines()
        .filter_map(|line| line.trim_end().strip_prefix(&prefix))
        .collect()
}

fn machine(kernel: Kernel, image: &str, (cores, memory_mib): (u32, u64)) -> VmSpec {
    VmSpec::new(image, Some(Guests.initrd(kernel)))
        .cmdline(kernel.arguments())
        .cores(cores)
        .memory_mib(memory_mib)
}

/// The guest found all processors and all memory, and its kernel complained of nothing.
fn has_its_size(text: &str, (cores, memory_mib): (u32, u64)) {
    assert_eq!(fact(text, "nproc"), [cores.to_string()], "{text}");
    let mem: u64 = fact(text, "mem_mib")[0].parse().expect("a number");
    // The kernel keeps some for itself: its image, its page structures (1.6 %), its initial RAM disk.
    assert!(
        mem <= memory_mib && mem >= memory_mib * 93 / 100 - 40,
        "{mem} MiB of {memory_mib}"
    );
    // The XSAVE of an emulated node is inconsistent for guests: those of QEMU in it say the same.
    let mut errors = fact(text, "error");
    errors.retain(|error| !error.contains("arch/x86/kernel/fpu/xstate.c"));
    assert!(errors.is_empty(), "{errors:#?}");
}

/// Lock for a machine of more than half the node's memory. The node has room for only one, so a
/// test waits until the other machine is gone.
fn room((_, memory_mib): (u32, u64)) -> Option<File> {
    let lock = || File::create(paths::test_node_dir().join(".large-guest.lock"));
    (memory_mib > 8 * 1024).then(|| {
        let file = lock().expect("create the lock file");
        file.lock().expect("wait for another large guest");
        file
    })
}

fn boots(topic: &str, kernel: Kernel, image: &str, size: (u32, u64)) {
    let (cores, _) = size;
    let _room = room(size);
    let case = Case::new(topic);
    let spec = machine(kernel, image, size).script(&format!("{FACTS}{SIZE}"));
    let vm = Vm::start(&case, "", &spec);
    let mut console = vm.console();
    let text = console.until("GUEST-RUN-EXIT 0", BOOT);

    has_its_size(&text, size);
    assert_eq!(fact(&text, "sockets"), ["1"], "{text}");
    assert_eq!(fact(&text, "clock"), ["kvm-clock"], "{text}");
    assert_eq!(fact(&text, "hypervisor"), [cores.to_string()], "{text}");
    assert_eq!(fact(&text, "uuid"), [vm.field("/metadata/uid")], "{text}");
    let pci = fact(&text, "pci");
    assert!(
        pci[0].starts_with("0000:00:00.0 0x8086:0x0d57 0x060000"),
        "{pci:?}"
    );
    assert!(
        pci.iter()
            .any(|line| line.contains("0x1af4:0x1044") && line.ends_with("driver=virtio-pci")),
        "{pci:?}"
    );
    assert!(fact(&text, "rng")[0].starts_with("virtio_rng"), "{text}");
    // Kernels before 6.2 have a page attribute table only where the MTRRs are on.
    let pat = fact(&text, "pat")[0];
    assert_eq!(
        pat.split_whitespace().collect::<Vec<_>>(),
        ["WB", "WC", "UC-", "UC", "WB", "WP", "UC-", "WT"],
        "{text}"
    );
    assert_eq!(fact(&text, "mtrr"), ["1"], "the MMIO hole is uncachable: {text}");
    assert!(fact(&text, "rtc")[0].starts_with("rtc_cmos"), "{text}");
    assert_eq!(fact(&text, "tsc_adjust"), [cores.to_string()], "{text}");
    console.run("true");
    vm.ctl("stop --grace 60s");
    assert_eq!(vm.exit_reason(), "STOPPED");
}

/// The smallest and the largest machine, with all there is to check. The sizes between are in the next test.
/// `Cloud612` in the smallest size is the guest of most other tests.
#[rstest]
#[case(Kernel::Cloud510, LARGE)]
#[case(Kernel::Cloud61, SMALL)]
#[case(Kernel::Generic612, LARGE)]
#[case::nightly(Kernel::Cloud510, SMALL)]
#[case::nightly(Kernel::Cloud61, LARGE)]
#[case::nightly(Kernel::Generic61, SMALL)]
#[case::nightly(Kernel::Generic61, LARGE)]
#[case::nightly(Kernel::Cloud612, SMALL)]
#[case::nightly(Kernel::Cloud612, LARGE)]
#[case::nightly(Kernel::Generic612, SMALL)]
fn an_unmodified_kernel_boots_to_a_shell(#[case] kernel: Kernel, #[case] size: (u32, u64)) {
    let (cores, memory_mib) = size;
    let topic = format!("boot-{cores}c-{memory_mib}m");
    boots(&topic, kernel, &Guests.vmlinuz(kernel), size);
}

#[test]
fn an_elf_kernel_boots_by_its_pvh_entry() {
    let kernel = Kernel::Cloud612;
    boots("boot-pvh", kernel, &Guests.vmlinux(kernel), (2, 256));
}

#[test]
fn memory_that_is_shared_is_a_memfd_and_boots_as_well() {
    let case = Case::new("boot-shared");
    let vm = Vm::start(&case, "", &VmSpec::busybox(Kernel::Cloud612).shared_memory());
    vm.booted();
    let maps = case.node().sh(&format!("cat /proc/{}/maps", vm.pid()));
    assert!(maps.contains("/memfd:"), "{maps}");
}

/// 64 in the long form, which takes an emulated node three minutes.
#[test]
fn more_cores_than_a_socket_has_are_several_sockets() {
    let (cores, sockets) = if long() { (64, 4) } else { (18, 2) };
    let case = Case::new("boot-sockets");
    let spec = VmSpec::busybox(Kernel::Cloud612)
        .cores(cores)
        .memory_mib(1024)
        .script(&format!("{FACTS}{SIZE}"));
    let vm = Vm::start(&case, "", &spec);
    let text = vm.console().until("GUEST-RUN-EXIT 0", 3 * BOOT);
    assert_eq!(
        (fact(&text, "nproc"), fact(&text, "sockets")),
        (
            vec![cores.to_string().as_str()],
            vec![sockets.to_string().as_str()]
        ),
        "{text}"
    );
}

/// Tests that `make nightly` runs and `make test` does not.
mod nightly {
    use super::*;

    /// With the test before, every kernel boots with each number of processors and each size of memory.
    #[rstest]
    fn kernel_boots_with_many_cores_or_much_memory(
        #[values(
            Kernel::Cloud510,
            Kernel::Cloud61,
            Kernel::Generic61,
            Kernel::Cloud612,
            Kernel::Generic612
        )]
        kernel: Kernel,
        #[values((4, 256), (1, 12 * 1024))] size: (u32, u64),
    ) {
        let _room = room(size);
        let case = Case::new(&format!("boot-{}c-{}m", size.0, size.1));
        let spec = machine(kernel, &Guests.vmlinuz(kernel), size).script(SIZE);
        let vm = Vm::start(&case, "", &spec);
        let mut console = vm.console();
        let text = console.until("GUEST-RUN-EXIT 0", BOOT);
        has_its_size(&text, size);
    }
}
