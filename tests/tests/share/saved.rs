//! Snapshots of a guest that has a share mounted.

use vmmd_tests::Case;
use vmmd_tests::vm::{Console, Vm};

use crate::{Srv, booted, server, until, with_shares};

/// A snapshot and a clone of it, by their names; both are removed at the end.
struct Saved<'a> {
    case: &'a Case,
    snapshot: String,
    clone: String,
}

impl Drop for Saved<'_> {
    fn drop(&mut self) {
        // The test of leftovers reports remains of a failed test.
        let Self { snapshot, clone, .. } = self;
        let _ = self.case.node().ssh(&format!(
            "vmmctl delete --force --yes --ignore-not-found {clone}; vmmctl snapshot rm {snapshot}"
        ));
    }
}

#[test]
fn what_a_guest_has_open_of_a_share_goes_on_in_a_restored_vm_and_in_a_clone() {
    let case = Case::new("share-saved").expect("node");
    let srv = Srv::new(&case, &["data"]);
    let node = case.node();
    let vm = Vm::start(&case, "", &with_shares(&case, &[srv.share("data")])).expect("start");
    let mut console = booted(&vm);
    console
        .run(
            "mount -t virtiofs data /mnt && mkdir -p /mnt/a/b && echo old >/mnt/a/b/gone && exec 6</mnt/a/b/gone 7>>/mnt/log && echo one >&7",
            60,
        )
        .expect("files are opened");
    let saved = Saved {
        case: &case,
        snapshot: format!("{}-snapshot", case.name()),
        clone: format!("{}-clone", case.name()),
    };
    let take = format!("vmmctl snapshot create {} --vm {}", saved.snapshot, vm.name());
    let refused = node.ssh(&take).expect("ask");
    assert!(
        !refused.success() && refused.stderr.contains("--paused"),
        "{}",
        refused.stderr
    );
    node.sh(&format!("{take} --paused")).expect("snapshot");

    // The guest continues with the same process, and the snapshot does not contain its later
    // changes of files.
    let first = server(&vm);
    console
        .run("echo two >&7 && echo more >/mnt/a/b/later", 60)
        .expect("it goes on");
    drop(console);
    vm.ctl("stop --force").expect("kill");
    until(node, &format!("[ ! -d /proc/{first} ]"));
    assert_eq!(srv.sh("cat data/log data/a/b/later"), "one\ntwo\nmore\n");
    srv.sh("rm data/a/b/gone && echo new >data/a/b/gone");

    node.sh(&format!("vmmctl restore {}", saved.snapshot))
        .expect("restore");
    let mut restored = vm.console().expect("console");
    goes_on(&mut restored, "three");
    assert_eq!(srv.sh("cat data/log"), "one\ntwo\nthree\n");
    // Another file has the name by now. It is not taken for the one that is open.
    let read = restored
        .run(
            "timeout 20 cat <&6 2>&1; echo; cat /mnt/a/b/gone 2>&1; cat /mnt/a/b/later",
            60,
        )
        .expect("no process hangs");
    assert!(!read.lines().next().unwrap_or_default().contains("new"), "{read}");
    assert!(read.ends_with("more\n"), "{read}");

    node.sh(&format!("vmmctl clone --copy {} {}", saved.snapshot, saved.clone))
        .expect("clone");
    let mut clone = Console::open(&case, &format!("vmmctl console {}", saved.clone)).expect("console");
    goes_on(&mut clone, "four");
    goes_on(&mut restored, "five");
    assert_eq!(srv.sh("cat data/log"), "one\ntwo\nthree\nfour\nfive\n");
    // A new mount behaves like any other. The guest's `timeout` checks once a second whether its
    // command has ended, and keeps the files open until then.
    restored
        .run(
            "exec 6<&- 7>&-; until umount /mnt 2>/dev/null; do usleep 200000; done; mount -t virtiofs data /mnt && grep -qx new /mnt/a/b/gone",
            60,
        )
        .expect("mounted anew");
}

/// Checks that the guest can write to its open file, and that the file then has the data.
fn goes_on(console: &mut Console, word: &str) {
    let command = format!("timeout 20 sh -c 'echo {word}' >&7 && sync && grep -qx {word} /mnt/log");
    console.run(&command, 60).expect("its files are as they were");
}
