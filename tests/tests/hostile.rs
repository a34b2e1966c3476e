//! A hostile guest writes nonsense to every port, register and ring, and harms only itself.

use vmmd_tests::initramfs::Extra;
use vmmd_tests::node::Kernel;
use vmmd_tests::programs;
use vmmd_tests::vm::{Console, Vm, VmSpec};
use vmmd_tests::{Case, long};

/// Distance between the accessed bytes of BARs behind the registers; a long test accesses each
/// byte. Each access leaves the guest. With more exits the emulator loses the guest more often.
const DISTANCE: u64 = 64;
/// The same of a machine that is restored all the time, of which half the time goes into that.
const RESTORED_DISTANCE: u64 = 128;

const UNBIND: &str = "for d in /sys/bus/pci/drivers/virtio-pci/0*; do echo ${d##*/} >/sys/bus/pci/drivers/virtio-pci/unbind; done";

/// A guest with the hostile program, two disks, a NIC and a channel to an agent, and its resources in the node.
struct Guest {
    spec: VmSpec,
    folder: String,
    bridge: String,
}

impl Guest {
    fn prepare(case: &Case) -> Self {
        let node = case.node();
        let folder = case.folder();
        let hostile = programs::build_static("vmmd-hostile-guest", "hostile").expect("hostile");
        let extra = [Extra::new(hostile, "bin/hostile")];
        let initrd = vmmd_tests::guest::initrd_with(Kernel::Cloud612, &extra).expect("initrd");
        node.copy_in(&initrd, &format!("{folder}/initrd"))
            .expect("copy the initrd");
        let bridge = case.bridge();
        node.sh(&format!(
            "\
             yes vmmd | head -c 1048576 >{folder}/disk.raw && cp {folder}/disk.raw {folder}/before.raw && \
             truncate -s 1M {folder}/scratch.raw"
        ));
        // Its own kernel lets it reach configuration space as a whole.
        let spec = VmSpec::quick(Kernel::Cloud612, format!("{folder}/initrd"))
            .cmdline("iomem=relaxed")
            .disk("data", &format!("{folder}/disk.raw"), true)
            .disk("scratch", &format!("{folder}/scratch.raw"), false)
            .nic("eth0", &bridge)
            .set("/guestAgent", serde_json::json!({}));
        Guest { spec, folder, bridge }
    }

    /// The kernel's own drivers work again on every device, and nothing was written that must not be.
    fn works(&self, case: &Case, console: &mut Console) {
        let (folder, bridge) = (&self.folder, &self.bridge);
        // In this order, as the names of the disks go by it.
        for device in console.run("ls -1d /sys/bus/pci/devices/*").split_whitespace() {
            let bind = format!(
                "echo {} >/sys/bus/pci/drivers/virtio-pci/bind",
                &device[device.len() - 12..]
            );
            console.run(&format!("case $(cat {device}/vendor) in 0x1af4) {bind};; esac"));
        }
        console.run("dd if=/dev/vda bs=64k 2>/dev/null | head -c 20 | grep -q vmmd");
        let write = "yes again | head -c 65536 >/dev/vdb && sync && echo 3 >/proc/sys/vm/drop_caches && \
                     yes again | head -c 65536 | cmp -n 65536 - /dev/vdb";
        console.run(write);
        console.run("dd if=/dev/hwrng of=/dev/null bs=512 count=4");
        console.run("ip link set eth0 up && ip addr add 10.78.0.2/24 dev eth0");
        let node = case.node();
        node.sh(&format!(
            "ip addr add 10.78.0.1/24 dev {bridge}; ping -c 2 -W 10 10.78.0.2"
        ));
        node.sh(&format!("cmp {folder}/disk.raw {folder}/before.raw"));
    }
}

/// Boots a guest with the hostile program, a disk, a NIC and no driver bound to the virtio devices.
fn with_guest(topic: &str, attack: impl FnOnce(&Vm<'_>, &mut Console)) {
    let case = Case::new(topic);
    let guest = Guest::prepare(&case);
    let (vm, mut console) = Vm::boot(&case, "", &guest.spec);
    console.run(UNBIND);
    let pid = vm.pid();
    attack(&vm, &mut console);
    vm.still_runs(pid);
    guest.works(&case, &mut console);
    vm.ctl("stop --grace 60s");
}

fn distance() -> u64 {
    if long() { 1 } else { DISTANCE }
}

fn phase(console: &mut Console, phase: &str, distance: u64) -> String {
    let text = console.run_within(&format!("hostile --distance {distance} {phase}"), 400);
    assert!(text.contains("HOSTILE DONE"), "{text}");
    text
}

/// The number before `unit` in each line of a guest's report that has both words.
fn counts(text: &str, word: &str, unit: &str) -> Vec<u64> {
    let lines = text.lines().filter(|line| line.contains(word));
    let number = |line: &str| line.split(unit).next()?.split_whitespace().last()?.parse().ok();
    lines
        .filter(|line| line.contains(unit))
        .filter_map(number)
        .collect()
}

/// Number of accesses of a walk over `bytes` bytes. The first 256 bytes of a page are accessed in
/// all of `widths`. In the rest of the page, one byte per `distance` is accessed, in one of the
/// widths in turn. Accesses that would exceed the range are left out.
fn accesses(bytes: u64, widths: &[u64], distance: u64) -> u64 {
    let at = |offset: u64| match offset % 4096 {
        0..256 => widths.to_vec(),
        _ if offset.is_multiple_of(distance) => {
            vec![widths[usize::try_from(offset / distance).expect("small") % widths.len()]]
        }
        _ => Vec::new(),
    };
    let fits = |offset: u64| {
        at(offset)
            .into_iter()
            .filter(move |width| offset + width <= bytes)
            .count() as u64
    };
    (0..bytes).map(fits).sum()
}

#[test]
fn nonsense_in_config_space_registers_and_rings_is_harmless() {
    with_guest("hostile", |_, console| {
        let text = phase(console, "config", 1);
        let walked = counts(&text, "HOSTILE config", " accesses walked");
        // The host bridge, two disks, the NIC, the entropy device and the balloon.
        assert!(walked.len() >= 6, "{text}");
        let whole = accesses(4096, &[1, 2, 4], 1);
        assert!(walked.iter().all(|count| *count == whole), "{text}");

        let text = phase(console, "absent", 1);
        let there = walked.len() as u64;
        let (functions, absent) = (
            counts(&text, "HOSTILE absent", " survived"),
            counts(&text, "HOSTILE absent", " accesses"),
        );
        assert_eq!(absent, [2 * (functions[0] - there)], "{text}");

        let text = phase(console, "mmio", distance());
        let (bytes, walked) = (
            counts(&text, "HOSTILE mmio", " bytes"),
            counts(&text, "HOSTILE mmio", " accesses walked"),
        );
        assert!(bytes.len() >= 5, "{text}");
        let whole: Vec<u64> = bytes
            .iter()
            .map(|bytes| accesses(*bytes, &[1, 2, 4, 8], distance()))
            .collect();
        assert_eq!(walked, whole, "{text}");

        phase(console, "rings", 1);
    });
}

/// How long the machine of the next test runs before it is thrown away and restored once more, in milliseconds.
const RESTORE_EVERY: u64 = 2500;

/// Tests that `make nightly` runs and `make test` does not.
mod nightly {
    use super::*;

    #[test]
    fn nonsense_in_every_port_is_harmless() {
        with_guest("hostile-ports", |vm, console| {
            console.type_line("hostile ports pic pit");
            let mut text = console.until("HOSTILE DONE", 400);
            console.type_line("hostile fatal-ports");
            text += &console.until("now the reset", 120);
            let walked = counts(&text, "HOSTILE", " of 196604 port accesses survived");
            assert_eq!(walked.len(), 4, "{text}");
            assert_eq!(walked.iter().sum::<u64>(), 196_604, "{text}");
            console.booted();
            assert_eq!(vm.field("/status/instance/guestResets"), "1");
            console.run(UNBIND);
        });
    }

    /// Runs `vmm run` of a development build. The attacked machine is always a restored one. It is
    /// saved at any point of the guest's activity.
    ///
    /// Its ports are not attacked: a restored TSS is busy, as on real processors. QEMU's emulation then
    /// refuses I/O to every user program of the guest (`helper_check_io` accepts type 9 only).
    #[test]
    fn nonsense_is_harmless_to_a_restored_machine() {
        let case = Case::new("hostile-restored");
        let node = case.node();
        let guest = Guest::prepare(&case);
        let folder = &guest.folder;
        // An optimized build has no such option.
        let installed = node.sh("vmm run --help").contains("--restore-every");
        let vmm = if installed {
            "vmm".to_owned()
        } else {
            let vmm = programs::development("vmm").expect("a development build");
            let there = format!("{folder}/vmm");
            node.copy_in(&vmm, &there).expect("copy the vmm");
            there
        };
        let manifest = guest.spec.manifest("hostile").to_string();
        node.sh(&format!(
            "cat >{folder}/vm.yaml <<'MANIFEST'\n{manifest}\nMANIFEST\n"
        ));
        let run = format!("{vmm} run --spec {folder}/vm.yaml --restore-every {RESTORE_EVERY}");
        // The vmm logs to a file, because the console would mix the log with the guest's output.
        let mut console = Console::open(&case, &format!("{run} 2>{folder}/log; echo vmm-exit=$?"));
        console.booted();
        console.run(UNBIND);
        let attack = std::time::Instant::now();
        for part in ["config absent", "mmio", "rings"] {
            phase(&mut console, part, if long() { 1 } else { RESTORED_DISTANCE });
        }
        let lasted = attack.elapsed();
        guest.works(&case, &mut console);
        console.type_line("reboot");
        console.booted();
        console.type_line("poweroff");
        console.until("vmm-exit=0", 60);
        let log = node.sh(&format!("cat {folder}/log"));
        let restores = counts(&log, "restored", " times");
        // A pause, a save and a restore take their time too.
        let expected = lasted.as_millis() / (10 * u128::from(RESTORE_EVERY));
        assert!(u128::from(restores[0]) > expected, "{restores:?} in {lasted:?}");
    }
}
