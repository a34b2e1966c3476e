//! VMs are restored from snapshots: the VM itself, and others that are created from them.

use std::collections::BTreeSet;

use vmmd_tests::Case;
use vmmd_tests::node::Kernel;
use vmmd_tests::storage::{Disk, Format};
use vmmd_tests::vm::{Console, Vm, VmSpec};

/// The guests' memory: each snapshot and each restore reads and writes it.
const MEMORY_MIB: u64 = 128;

/// A guest that counts without end.
fn counting<'a>(case: &'a Case) -> (Vm<'a>, Console) {
    let (vm, mut console) = Vm::boot(
        case,
        "",
        &VmSpec::busybox(Kernel::Cloud612).memory_mib(MEMORY_MIB),
    );
    let count = "{ (n=0; while :; do n=$((n+1)); echo $n >/run/count.new; mv /run/count.new /run/count; usleep 300000; done) \
                 >/dev/null 2>&1 & }";
    console.run(count);
    console.run("until [ -s /run/count ]; do usleep 50000; done");
    (vm, console)
}

fn count(console: &mut Console) -> u64 {
    let text = console.run("cat /run/count");
    text.trim_start_matches(|letter: char| !letter.is_ascii_digit())
        .trim_end_matches(|letter: char| !letter.is_ascii_digit())
        .parse()
        .unwrap_or_else(|error| panic!("{text:?}: {error}"))
}

/// Checks that the guest's count is at least `from` and increases.
fn goes_on(console: &mut Console, from: u64) {
    let now = count(console);
    assert!(now >= from, "{now} is before {from}");
    let wait = format!("until [ $(cat /run/count) -gt {now} ]; do usleep 50000; done");
    console.run(&wait);
}

/// A snapshot, and VMs of it; gone at the end.
struct Snapshot<'a> {
    case: &'a Case,
    name: String,
    clones: Vec<String>,
}

impl<'a> Snapshot<'a> {
    fn take(case: &'a Case, vm: &Vm<'_>, options: &str) -> Self {
        let name = format!("{}-snapshot", case.name());
        let taken = case.node().sh(&format!(
            "vmmctl snapshot create {name} --vm {} {options}",
            vm.name()
        ));
        case.at_end(format!("vmmctl snapshot rm {name}"));
        println!("{}", taken.trim());
        assert_eq!(vm.phase(), "RUNNING");
        Self {
            case,
            name,
            clones: Vec::new(),
        }
    }

    /// New VMs of it, all at once.
    fn clones<const N: usize>(&mut self, suffixes: [&str; N]) -> [Console; N] {
        let names = suffixes.map(|suffix| format!("{}-{suffix}", self.case.name()));
        self.clones.extend(names.iter().cloned());
        self.case.at_end(format!(
            "vmmctl delete --force --with-disks --yes --ignore-not-found {}",
            names.join(" ")
        ));
        self.case
            .node()
            .sh(&format!("vmmctl clone {} {}", self.name, names.join(" ")));
        names.map(|name| Console::open(self.case, &format!("vmmctl console {name}")))
    }

    /// A field of each clone, by JSON pointer; each has another one.
    fn all_differ(&self, pointer: &str) -> Vec<String> {
        let field = |name: &String| {
            let text = self.case.node().sh(&format!("vmmctl get vm {name} -o json"));
            let vm: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            let field = vm
                .pointer(pointer)
                .unwrap_or_else(|| panic!("no {pointer} in {vm}"));
            field.to_string().trim_matches('"').to_owned()
        };
        let fields: Vec<_> = self.clones.iter().map(field).collect();
        let different: BTreeSet<_> = fields.iter().collect();
        assert_eq!(different.len(), self.clones.len(), "{pointer}: {fields:?}");
        fields
    }

    /// Memory that a process uses of the snapshot's file, in KiB: the total, and its proportional
    /// part of shared pages.
    fn memory(&self, pid: &str) -> (u64, u64) {
        let sum = format!(
            "awk '/^[0-9a-f]+-/ {{ of = /\\/snapshots\\/|\\.snapshot/ }} of && $1 == \"Rss:\" {{ rss += $2 }} of && $1 == \"Pss:\" {{ pss += $2 }} \
             END {{ print rss + 0, pss + 0 }}' /proc/{pid}/smaps"
        );
        let text = self.case.node().sh(&sum);
        let mut numbers = text
            .split_whitespace()
            .map(|word| word.parse().expect("a number"));
        numbers
            .next()
            .zip(numbers.next())
            .unwrap_or_else(|| panic!("{text:?}"))
    }
}

/// Tests that `make nightly` runs and `make test` does not.
mod nightly {
    use super::*;

    #[test]
    fn killed_guest_and_four_clones_continue_from_a_snapshot() {
        let case = Case::new("snapshot");
        let (vm, mut console) = counting(&case);
        console.run("echo before >/root/mark");
        let from = count(&mut console);
        let mut snapshot = Snapshot::take(&case, &vm, "");
        goes_on(&mut console, from);
        console.run("echo after >/root/mark");
        drop(console);

        vm.ctl("stop --force");
        vm.node().sh(&format!("vmmctl restore {}", snapshot.name));
        let mut first = vm.console();
        goes_on(&mut first, from);
        let mark = "grep before /root/mark";
        first.run(mark);

        let mut clones = snapshot.clones(["one", "two", "three", "four"]);
        for console in &mut clones {
            goes_on(console, from);
            console.run(mark);
        }
        clones[0].run("echo mine >/root/mark");
        for console in &mut clones[1..] {
            console.run(mark);
        }
        snapshot.all_differ("/metadata/uid");
        // Memory that no VM has changed exists once.
        for pid in snapshot.all_differ("/status/instance/pid") {
            let (all, share) = snapshot.memory(&pid);
            println!("{all} KiB of the snapshot in memory, {share} KiB of them its share");
            assert!(all > 0 && share < all / 2, "{share} of {all} KiB are its own");
        }
        // Its random numbers are not those of the others.
        let told = "dmesg | grep 'crng reseeded due to virtual machine fork'";
        for console in clones.iter_mut().chain([&mut first]) {
            console.run(told);
        }
        let random = "head -c 16 /dev/urandom | md5sum";
        let random: BTreeSet<_> = clones.iter_mut().map(|console| console.run(random)).collect();
        assert_eq!(random.len(), clones.len(), "{random:?}");
    }
}

/// Writes a word at the beginning of both disks. The guest's cache is passed by, and nothing is flushed.
fn write(console: &mut Console, word: &str) {
    let command = format!(
        "for disk in vda vdb; do yes {word} | head -c 65536 | dd of=/dev/$disk oflag=direct bs=64k iflag=fullblock 2>/dev/null; done"
    );
    console.run(&command);
}

/// Both disks have nothing but this word there.
fn reads(console: &mut Console, word: &str) {
    let command = format!(
        "for disk in vda vdb; do dd if=/dev/$disk iflag=direct bs=64k count=1 2>/dev/null | sort -u | grep -qx {word} || exit 1; done"
    );
    let command = format!("({command})");
    console.run(&command);
}

/// Names and formats of a guest's disks.
const IMAGES: [(&str, Format); 2] = [("one", Format::Raw), ("two", Format::Qcow2)];

/// A guest with these disks, which has booted.
fn with_disks(case: &Case) -> (Vm<'_>, Console) {
    let mut spec = case.storage_guest(Kernel::Cloud612).memory_mib(MEMORY_MIB);
    for (name, format) in IMAGES {
        let image = case.image(name, format, 16);
        spec = spec.with_disk(Disk::new(name, format, &image));
    }
    Vm::boot(case, "", &spec)
}

#[test]
fn disk_snapshot_of_a_running_or_stopped_vm_boots() {
    let case = Case::new("snapshot-only");
    let (vm, mut console) = with_disks(&case);
    write(&mut console, "before");
    let mut snapshot = Snapshot::take(&case, &vm, "--disks-only --paused");
    reads(&mut console, "before");
    write(&mut console, "after");
    drop(console);
    vm.ctl("stop --force");
    let node = case.node();
    let of_stopped = format!("{}-stopped", snapshot.name);
    // A snapshot of a stopped VM pauses no VM and needs no `--paused`.
    node.sh(&format!(
        "vmmctl snapshot create {of_stopped} --vm {} --disks-only",
        vm.name()
    ));
    for (of, word) in [(&snapshot.name, "before"), (&of_stopped, "after")] {
        node.sh(&format!("vmmctl restore {of}"));
        let mut console = vm.booted();
        reads(&mut console, word);
        write(&mut console, "restored");
        drop(console);
        vm.ctl("stop --force");
    }
    node.sh(&format!("vmmctl snapshot rm {of_stopped}"));
    let [mut clone] = snapshot.clones(["copy"]);
    clone.booted();
    reads(&mut clone, "before");
}

#[test]
fn snapshot_holds_the_disks_for_its_vm_and_for_clones() {
    let case = Case::new("snapshot-disks");
    let (vm, mut console) = with_disks(&case);
    write(&mut console, "before");
    // The node's file system can't share blocks.
    let node = case.node();
    let refused = format!(
        "vmmctl snapshot create {}-refused --vm {}",
        case.name(),
        vm.name()
    );
    let refused = node.ssh(&refused).expect("ask");
    assert!(!refused.success());
    assert!(refused.stderr.contains("--paused"), "{}", refused.stderr);
    reads(&mut console, "before");

    let mut snapshot = Snapshot::take(&case, &vm, "--paused");
    reads(&mut console, "before");
    write(&mut console, "after");
    drop(console);
    vm.ctl("stop --force");
    node.sh(&format!("vmmctl restore {}", snapshot.name));
    let mut first = vm.console();
    reads(&mut first, "before");
    write(&mut first, "restored");

    // A snapshot from an archive has the complete content of the original.
    let (name, archive) = (&snapshot.name, format!("/tmp/{}.vmmsnapshot", snapshot.name));
    node.sh(&format!(
        "vmmctl snapshot export {name} -o {archive} && vmmctl snapshot rm {name} && vmmctl snapshot import {archive} && rm {archive}"
    ));
    let [mut clone] = snapshot.clones(["copy"]);
    reads(&mut clone, "before");
    write(&mut clone, "cloned");
    reads(&mut first, "restored");
    let disks = node.sh("vmmctl get disk -o name");
    for (name, _) in IMAGES {
        let disk = format!("{}-copy-{name}", case.name());
        assert!(disks.contains(&disk), "{disks}");
    }
}
