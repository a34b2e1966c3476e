//! Ends of the components that a share needs, and changes of the shares of a VM.

use serde_json::json;
use vmmd_tests::Case;
use vmmd_tests::vm::{BOOT, Vm};

use crate::{Srv, booted, server, until, with_shares};

#[test]
fn a_share_works_again_whatever_ends() {
    let case = Case::new("share-ends").expect("node");
    let srv = Srv::new(&case, &["data"]);
    let node = case.node();
    let vm = Vm::start(&case, "", &with_shares(&case, &[srv.share("data")])).expect("start");
    let mut console = booted(&vm);
    let mount = "mount -t virtiofs data /mnt";
    console
        .run(
            &format!("{mount} && echo first >/mnt/file && fsync /mnt/file 2>/dev/null; sync"),
            60,
        )
        .expect("mount");
    let first = server(&vm);

    // A pause under load.
    console
        .run(
            "(i=0; while :; do i=$((i + 1)); dd if=/dev/zero of=/mnt/load bs=64k count=16 conv=fsync 2>/dev/null || break; \
             echo $i >/tmp/rounds.new; mv /tmp/rounds.new /tmp/rounds; done) & until [ -s /tmp/rounds ]; do sleep 0.1; done",
            60,
        )
        .expect("load");
    for _ in 0..3 {
        vm.ctl("pause").expect("pause");
        node.sh("sleep 0.5").expect("a while");
        vm.ctl("resume").expect("resume");
        console
            .run(
                "a=$(cat /tmp/rounds); until [ $(cat /tmp/rounds) -gt $a ]; do sleep 0.1; done",
                60,
            )
            .expect("the load goes on");
    }
    assert_eq!(server(&vm), first);

    // The share's process is killed under load: the mount fails at once, and works after a remount.
    console.run("echo kept >/mnt/kept && sync", 60).expect("a file");
    node.sh(&format!("kill -9 {first}")).expect("kill");
    until(
        node,
        &format!(
            "[ -n \"$(vmmctl share ls {} | grep served)\" ] && ! vmmctl share ls {} | grep -qw {first}",
            vm.name(),
            vm.name()
        ),
    );
    console
        .run(
            "sleep 1; ! timeout 60 cat /mnt/kept 2>/tmp/error; cat /tmp/error",
            120,
        )
        .map(|said| assert!(said.contains("not connected"), "{said}"))
        .expect("an error, at once");
    let read = console
        .run(&format!("umount -l /mnt && {mount} && cat /mnt/kept"), 60)
        .expect("mounted anew");
    assert_eq!(read, "kept\n");
    let events = node.sh("vmmctl events").expect("events");
    assert!(
        events.contains("ShareFailed") && events.contains("ShareRestored"),
        "{events}"
    );
    let second = server(&vm);
    assert_ne!(second, first);

    // The daemon is killed. The new daemon finds the share's process, and restarts it after a later
    // kill.
    node.sh(
        "pid=$(systemctl show -P MainPID vmmd); kill -9 $pid; \
         while [ \"$(systemctl show -P MainPID vmmd)\" = $pid ] || ! systemctl is-active -q vmmd; do sleep 0.1; done",
    )
    .expect("the daemon is killed");
    assert_eq!(server(&vm), second);
    console.attached_again(60).expect("the daemon is back");
    console
        .run("echo x >/mnt/after && cat /mnt/after", 60)
        .expect("the share goes on");
    node.sh(&format!("kill -9 {second}")).expect("kill");
    until(
        node,
        &format!("vmmctl share ls {} | grep served | grep -vqw {second}", vm.name()),
    );
    let read = console
        .run(
            &format!("umount -l /mnt && {mount} && cat /mnt/kept /mnt/after"),
            60,
        )
        .expect("mounted anew");
    assert_eq!(read, "kept\nx\n");

    // The guest reboots: the share is available after the reboot.
    console.type_line("reboot").expect("reboot");
    console.until("GUEST-READY", BOOT).expect("boot");
    let read = console
        .run(&format!("{mount} && cat /mnt/kept"), 60)
        .expect("mounted after a reboot");
    assert_eq!(read, "kept\n");

    // The vmm is killed, and the VM is started again; then it is stopped, and nothing is left. That a share ends with its VM is no failure.
    let failures = || {
        let command = format!(
            "vmmctl events | grep -w {} | grep -c ShareFailed; true",
            vm.name()
        );
        node.sh(&command).expect("events")
    };
    let before = failures();
    assert_ne!(before, "0\n");
    let third = server(&vm);
    node.sh(&format!("kill -9 {}", vm.pid().expect("pid")))
        .expect("kill");
    until(node, &format!("[ ! -d /proc/{third} ]"));
    vm.wait_phase("FAILED", 60).expect("failed");
    vm.ctl("start").expect("start");
    let mut console = booted(&vm);
    let read = console
        .run(&format!("{mount} && cat /mnt/kept"), 60)
        .expect("mounted after a start");
    assert_eq!(read, "kept\n");
    let last = server(&vm);
    vm.ctl("stop --force").expect("stop");
    until(node, &format!("[ ! -d /proc/{last} ]"));
    let left = node
        .sh("grep -c /srv/ /proc/mounts; find /run/vmmd/vms -name 'share-*.sock'; true")
        .expect("look");
    assert_eq!(left, "0\n");
    assert_eq!(failures(), before);
}

#[test]
fn shares_are_added_and_taken_away_by_vmmctl() {
    let case = Case::new("share-ctl").expect("node");
    let srv = Srv::new(&case, &["data"]);
    let node = case.node();
    srv.sh("ln -s /etc out && echo fixed >data/file");
    let vm = Vm::start(&case, "", &with_shares(&case, &[])).expect("start");
    let mut console = booted(&vm);
    let mount = "mount -t virtiofs data /mnt";
    console
        .run(&format!("! {mount} 2>/dev/null"), 30)
        .expect("no share yet");
    let refused = vm
        .try_ctl_with("share add", &format!("{}/out", srv.path))
        .expect("ssh");
    assert!(
        !refused.success() && refused.stderr.contains("symbolic link"),
        "{}",
        refused.stderr
    );
    vm.ctl_with("share add", &format!("{}/data,ro --restart", srv.path))
        .expect("add");
    let mut console = booted(&vm);
    let read = console
        .run(
            &format!("{mount} && ! touch /mnt/new 2>/dev/null; cat /mnt/file"),
            30,
        )
        .expect("mount");
    assert_eq!(read, "fixed\n");
    // Taken away, it is gone as soon as the guest has ejected it.
    console.run("umount /mnt", 30).expect("unmount");
    let last = server(&vm);
    vm.ctl_with("share rm", "data").expect("take away");
    assert_eq!(vm.ctl("share ls").expect("list").lines().count(), 1);
    until(node, &format!("[ ! -d /proc/{last} ]"));
    console
        .run(&format!("! {mount} 2>/dev/null"), 30)
        .expect("no share any more");
}

#[test]
fn a_share_is_attached_and_detached_while_the_guest_runs_and_comes_again() {
    let case = Case::new("share-plug").expect("node");
    let srv = Srv::new(&case, &["data"]);
    let node = case.node();
    let spec = with_shares(&case, &[]).set("/memory/backing", json!("MEMORY_BACKING_SHARED"));
    let vm = Vm::start(&case, "", &spec).expect("start");
    let mut console = booted(&vm);
    for round in ["first", "second"] {
        vm.ctl_with("share add", &format!("{}/data", srv.path))
            .expect("attach");
        assert_eq!(
            vm.field("/status/shares/0/phase").expect("phase"),
            "SHARE_PHASE_SERVED"
        );
        let pid = server(&vm);
        let read = console
            .run(
                &format!(
                    "until mount -t virtiofs data /mnt 2>/dev/null; do usleep 100000; done; \
                     echo {round} >/mnt/round; sync; cat /mnt/round"
                ),
                60,
            )
            .expect("mounted");
        assert_eq!(read, format!("{round}\n"));
        assert_eq!(srv.sh("cat data/round"), format!("{round}\n"));
        if round == "first" {
            console.run("umount /mnt", 30).expect("unmount");
        }
        vm.ctl_with("share rm", "data").expect("detach");
        assert_eq!(vm.ctl("share ls").expect("list").lines().count(), 1);
        until(node, &format!("[ ! -d /proc/{pid} ]"));
        if round == "second" {
            // The existing mount fails without a hang.
            console
                .run(
                    "! timeout 60 cat /mnt/round 2>/tmp/error; cat /tmp/error; umount -l /mnt",
                    120,
                )
                .map(|said| assert!(said.contains("not connected"), "{said}"))
                .expect("an error, at once");
        }
        console
            .run("! mount -t virtiofs data /mnt 2>/dev/null", 30)
            .expect("no share any more");
    }
    let uid = vm.field("/metadata/uid").expect("uid");
    until(
        node,
        &format!("[ -z \"$(find /run/vmmd/vms/{uid} -name 'share*')\" ]"),
    );
    let failures = node
        .sh(&format!(
            "vmmctl events | grep -w {} | grep -c ShareFailed; true",
            vm.name()
        ))
        .expect("events");
    assert_eq!(failures, "0\n");
}
