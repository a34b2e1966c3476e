//! Snapshots of a guest that has a share mounted.

use vmmd_tests::Case;
use vmmd_tests::vm::{Console, Vm};

use crate::{Srv, server, until, with_shares};

#[test]
fn open_files_of_a_share_continue_after_restore_and_clone() {
    let case = Case::new("share-saved");
    let srv = Srv::new(&case, &["data"]);
    let node = case.node();
    let (vm, mut console) = Vm::boot(&case, "", &with_shares(&case, &[srv.share("data")]));
    console.run(
        "mount -t virtiofs data /mnt && mkdir -p /mnt/a/b && echo old >/mnt/a/b/gone && exec 6</mnt/a/b/gone 7>>/mnt/log && echo one >&7",
    );
    let [snapshot, clone] = ["snapshot", "clone"].map(|kind| format!("{}-{kind}", case.name()));
    case.at_end(format!(
        "vmmctl delete --force --yes --ignore-not-found {clone}; vmmctl snapshot rm {snapshot}"
    ));
    let take = format!("vmmctl snapshot create {snapshot} --vm {}", vm.name());
    let refused = node.ssh(&take).expect("ask");
    assert!(
        !refused.success() && refused.stderr.contains("--paused"),
        "{}",
        refused.stderr
    );
    node.sh(&format!("{take} --paused"));

    // The guest continues with the same process, and the snapshot does not contain its later
    // changes of files.
    let first = server(&vm);
    console.run("echo two >&7 && echo more >/mnt/a/b/later");
    drop(console);
    vm.ctl("stop --force");
    until(node, &format!("[ ! -d /proc/{first} ]"));
    assert_eq!(srv.sh("cat data/log data/a/b/later"), "one\ntwo\nmore\n");
    srv.sh("rm data/a/b/gone && echo new >data/a/b/gone");

    node.sh(&format!("vmmctl restore {snapshot}"));
    let mut restored = vm.console();
    goes_on(&mut restored, "three");
    assert_eq!(srv.sh("cat data/log"), "one\ntwo\nthree\n");
    // Another file has the name by now. It is not taken for the one that is open.
    let read = restored.run("timeout 20 cat <&6 2>&1; echo; cat /mnt/a/b/gone 2>&1; cat /mnt/a/b/later");
    assert!(!read.lines().next().unwrap_or_default().contains("new"), "{read}");
    assert!(read.ends_with("more\n"), "{read}");

    node.sh(&format!("vmmctl clone --copy {snapshot} {clone}"));
    let mut clone = Console::open(&case, &format!("vmmctl console {clone}"));
    goes_on(&mut clone, "four");
    goes_on(&mut restored, "five");
    assert_eq!(srv.sh("cat data/log"), "one\ntwo\nthree\nfour\nfive\n");
    // A new mount behaves like any other. The guest's `timeout` checks once a second whether its
    // command has ended, and keeps the files open until then.
    restored.run(
        "exec 6<&- 7>&-; until umount /mnt 2>/dev/null; do usleep 200000; done; mount -t virtiofs data /mnt && grep -qx new /mnt/a/b/gone",
    );
}

/// Checks that the guest can write to its open file, and that the file then has the data.
fn goes_on(console: &mut Console, word: &str) {
    let command = format!("timeout 20 sh -c 'echo {word}' >&7 && sync && grep -qx {word} /mnt/log");
    console.run(&command);
}
