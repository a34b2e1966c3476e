//! A guest moves between two daemons with local disks. Writes during the copy of the disks are
//! present at the target.

use serde_json::json;
use vmmd_tests::Case;
use vmmd_tests::node::Kernel;
use vmmd_tests::two_daemons::traveller::{SMALL, Traveller};
use vmmd_tests::two_daemons::{self, Daemon};
use vmmd_tests::vm::VmSpec;

/// The guest's disks: of the node it is on, with their size there.
const DISKS: [(&str, &str, &str); 2] = [("plain", "raw", "vda"), ("tables", "qcow2", "vdb")];
/// Number of pieces of 64 KiB per disk that the guest writes repeatedly, in turn. The guest keeps a
/// copy of each in memory.
const PIECES: u32 = 12;
/// Number of moves. Each second one brings the guest back.
fn moves() -> u32 {
    if vmmd_tests::long() { 20 } else { 1 }
}

/// Writes pieces to both disks without end, until there is a file `stop`. A piece is remembered when the disk has said that it has it.
fn writer() -> String {
    let each = DISKS.map(|(_, _, disk)| {
        format!(
            "head -c 65536 /dev/urandom >/run/new && dd if=/run/new of=/dev/{disk} bs=64k seek=$((5*i)) oflag=direct 2>/dev/null && \
             mv /run/new /run/{disk}.$i || echo $i of {disk} >>/run/failed"
        )
    });
    format!(
        "{{ (n=0; while [ ! -e /run/stop ]; do i=$((n%{PIECES})); {}; n=$((n+1)); echo $n >/run/wrote.new; mv /run/wrote.new /run/wrote; sleep 0.3; done; rm /run/stop) >/dev/null 2>&1 & }}",
        each.join("; ")
    )
}

/// Script that succeeds when each disk has the content that the guest remembers.
fn verify() -> String {
    let each = DISKS.map(|(_, _, disk)| {
        format!(
            "for i in $(seq 0 {}); do [ ! -e /run/{disk}.$i ] || \
             dd if=/dev/{disk} bs=64k skip=$((5*i)) count=1 iflag=direct 2>/dev/null | cmp - /run/{disk}.$i || exit 1; done",
            PIECES - 1
        )
    });
    format!("({}) && [ ! -e /run/failed ]", each.join("; "))
}

/// Bytes that a disk takes on the node, and its size.
fn takes(daemon: &Daemon<'_>, disk: &str) -> (u64, u64) {
    let shown = daemon.ctl(&format!("get disk {disk} -o json"));
    let shown: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
    let number = |place: &str| {
        let value = shown.pointer(place).unwrap_or_else(|| panic!("{place}: {shown}"));
        value
            .as_str()
            .map_or_else(|| value.as_u64(), |text| text.parse().ok())
    };
    let allocated = number("/status/allocatedBytes").expect("a number");
    (allocated, number("/spec/sizeBytes").expect("a number"))
}

#[test]
fn disk_writes_during_a_move_are_at_the_target() {
    let case = Case::new("migration-disks");
    let daemons = two_daemons::pair(&case, 9);
    for (name, format, _) in DISKS {
        daemons[0].ctl(&format!("create disk {name} --size 256Mi --format {format}"));
    }
    let disks = DISKS.map(|(name, _, _)| json!({"name": name, "disk": name}));
    let spec = VmSpec::busybox(Kernel::Cloud612)
        .memory_mib(128)
        .cmdline(SMALL)
        .set("/disks", json!(disks));
    let mut guest = Traveller::boot(case.name(), &daemons, &spec);
    for number in 1..=moves() {
        println!("move {number}");
        guest.console.run(&writer());
        guest
            .console
            .run("until [ \"$(cat /run/wrote 2>/dev/null)\" -gt 3 ] 2>/dev/null; do sleep 0.05; done");
        guest.moves();
        let more = "wrote=$(cat /run/wrote); until [ $(cat /run/wrote) -gt $wrote ]; do sleep 0.05; done; \
                    touch /run/stop; while [ -e /run/stop ]; do sleep 0.05; done";
        guest.console.run(more);
        if let Err(error) = guest.console.try_run(&verify()) {
            let home = guest.home();
            // Counters of the queues and vCPUs twice, and the tasks that wait in the guest: which of them stands still?
            let stats = format!("stats {}", case.name());
            let tasks = format!(
                "(echo w; sleep 5) | timeout 10 {}",
                home.command(&format!("console {} --no-replay --send-break", case.name()))
            );
            let seen = [
                home.try_ctl(&stats),
                case.node().try_sh(&tasks),
                home.try_ctl(&stats),
            ];
            panic!("the disks have what was written: {error:?}\n{seen:#?}");
        }
        let left = guest.away().ctl("get disk -o name");
        assert_eq!(left.trim(), "", "a disk is where its VM is");
        for (name, _, _) in DISKS {
            let (allocated, size) = takes(guest.home(), name);
            println!("{name} takes {allocated} of {size} bytes");
            assert_eq!(size, 256 << 20);
            assert!(
                allocated < 16 << 20,
                "{name} takes {allocated} bytes: it was sparse"
            );
        }
    }
    guest.has_no_complaint();
    let home = guest.home();
    home.ctl(&format!("delete vm {} --force --yes", case.name()));
    for (name, _, _) in DISKS {
        home.ctl(&format!("delete disk {name} --yes"));
    }
}
