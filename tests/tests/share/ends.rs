//! Ends of the components that a share needs, and changes of the shares of a VM.

use serde_json::json;
use vmmd_tests::Case;
use vmmd_tests::vm::Vm;

use crate::{Srv, server, until, with_shares};

#[test]
fn share_is_attached_detached_and_attached_again() {
    let case = Case::new("share-plug");
    let srv = Srv::new(&case, &["data"]);
    let node = case.node();
    let spec = with_shares(&case, &[]).set("/memory/backing", json!("MEMORY_BACKING_SHARED"));
    let (vm, mut console) = Vm::boot(&case, "", &spec);
    for round in ["first", "second"] {
        vm.ctl_with("share add", &format!("{}/data", srv.path));
        assert_eq!(vm.field("/status/shares/0/phase"), "SHARE_PHASE_SERVED");
        let pid = server(&vm);
        let read = console.run(&format!(
            "until mount -t virtiofs data /mnt 2>/dev/null; do usleep 100000; done; \
                     echo {round} >/mnt/round; sync; cat /mnt/round"
        ));
        assert_eq!(read, format!("{round}\n"));
        assert_eq!(srv.sh("cat data/round"), format!("{round}\n"));
        if round == "first" {
            console.run("umount /mnt");
        }
        vm.ctl_with("share rm", "data");
        assert_eq!(vm.ctl("share ls").lines().count(), 1);
        until(node, &format!("[ ! -d /proc/{pid} ]"));
        if round == "second" {
            // The existing mount fails without a hang.
            let said =
                console.run("! timeout 60 cat /mnt/round 2>/tmp/error; cat /tmp/error; umount -l /mnt");
            assert!(said.contains("not connected"), "{said}");
        }
        console.run("! mount -t virtiofs data /mnt 2>/dev/null");
    }
    let uid = vm.field("/metadata/uid");
    until(
        node,
        &format!("[ -z \"$(find /run/vmmd/vms/{uid} -name 'share*')\" ]"),
    );
    let failures = node.sh(&format!(
        "vmmctl events | grep -w {} | grep -c ShareFailed; true",
        vm.name()
    ));
    assert_eq!(failures, "0\n");
}

/// Tests that need the node to themselves.
mod exclusive {
    use super::*;

    #[test]
    fn a_share_works_again_whatever_ends() {
        let case = Case::new("share-ends");
        let srv = Srv::new(&case, &["data"]);
        let node = case.node();
        let (vm, mut console) = Vm::boot(&case, "", &with_shares(&case, &[srv.share("data")]));
        let mount = "mount -t virtiofs data /mnt";
        console.run(&format!(
            "{mount} && echo first >/mnt/file && fsync /mnt/file 2>/dev/null; sync"
        ));
        let first = server(&vm);

        // A pause under load.
        console.run(
            "(i=0; while :; do i=$((i + 1)); dd if=/dev/zero of=/mnt/load bs=64k count=16 conv=fsync 2>/dev/null || break; \
             echo $i >/tmp/rounds.new; mv /tmp/rounds.new /tmp/rounds; done) & until [ -s /tmp/rounds ]; do sleep 0.1; done",
        );
        for _ in 0..3 {
            vm.ctl("pause");
            node.sh("sleep 0.5");
            vm.ctl("resume");
            console.run("a=$(cat /tmp/rounds); until [ $(cat /tmp/rounds) -gt $a ]; do sleep 0.1; done");
        }
        assert_eq!(server(&vm), first);

        // The share's process is killed under load: the mount fails at once, and works after a remount.
        console.run("echo kept >/mnt/kept && sync");
        node.sh(&format!("kill -9 {first}"));
        until(
            node,
            &format!(
                "[ -n \"$(vmmctl share ls {} | grep served)\" ] && ! vmmctl share ls {} | grep -qw {first}",
                vm.name(),
                vm.name()
            ),
        );
        let said = console.run("sleep 1; ! timeout 60 cat /mnt/kept 2>/tmp/error; cat /tmp/error");
        assert!(said.contains("not connected"), "{said}");
        let read = console.run(&format!("umount -l /mnt && {mount} && cat /mnt/kept"));
        assert_eq!(read, "kept\n");
        let events = node.sh("vmmctl events");
        assert!(
            events.contains("ShareFailed") && events.contains("ShareRestored"),
            "{events}"
        );
        let second = server(&vm);
        assert_ne!(second, first);

        // The daemon is killed. The new daemon finds the share's process, and restarts it after a later
        // kill.
        node.wait_restarted(&node.kill_unit("vmmd"));
        assert_eq!(server(&vm), second);
        console.attached_again();
        console.run("echo x >/mnt/after && cat /mnt/after");
        node.sh(&format!("kill -9 {second}"));
        until(
            node,
            &format!("vmmctl share ls {} | grep served | grep -vqw {second}", vm.name()),
        );
        let read = console.run(&format!("umount -l /mnt && {mount} && cat /mnt/kept /mnt/after"));
        assert_eq!(read, "kept\nx\n");

        // The guest reboots: the share is available after the reboot.
        console.type_line("reboot");
        console.booted();
        let read = console.run(&format!("{mount} && cat /mnt/kept"));
        assert_eq!(read, "kept\n");

        // The vmm is killed, and the VM is started again; then it is stopped, and nothing is left. That a share ends with its VM is no failure.
        let failures = || {
            let command = format!(
                "vmmctl events | grep -w {} | grep -c ShareFailed; true",
                vm.name()
            );
            node.sh(&command)
        };
        let before = failures();
        assert_ne!(before, "0\n");
        let third = server(&vm);
        node.sh(&format!("kill -9 {}", vm.pid()));
        until(node, &format!("[ ! -d /proc/{third} ]"));
        vm.wait_phase("FAILED", 60);
        vm.ctl("start");
        let mut console = vm.booted();
        let read = console.run(&format!("{mount} && cat /mnt/kept"));
        assert_eq!(read, "kept\n");
        let last = server(&vm);
        vm.ctl("stop --force");
        until(node, &format!("[ ! -d /proc/{last} ]"));
        let left = node.sh("grep -c /srv/ /proc/mounts; find /run/vmmd/vms -name 'share-*.sock'; true");
        assert_eq!(left, "0\n");
        assert_eq!(failures(), before);
    }
}

/// Tests that `make nightly` runs and `make test` does not.
mod nightly {
    use super::*;

    #[test]
    fn shares_are_added_and_taken_away_by_vmmctl() {
        let case = Case::new("share-ctl");
        let srv = Srv::new(&case, &["data"]);
        let node = case.node();
        srv.sh("ln -s /etc out && echo fixed >data/file");
        let (vm, mut console) = Vm::boot(&case, "", &with_shares(&case, &[]));
        let mount = "mount -t virtiofs data /mnt";
        console.run(&format!("! {mount} 2>/dev/null"));
        let refused = vm.try_ctl_with("share add", &format!("{}/out", srv.path));
        assert!(
            !refused.success() && refused.stderr.contains("symbolic link"),
            "{}",
            refused.stderr
        );
        vm.ctl_with("share add", &format!("{}/data,ro --restart", srv.path));
        let mut console = vm.booted();
        let read = console.run(&format!("{mount} && ! touch /mnt/new 2>/dev/null; cat /mnt/file"));
        assert_eq!(read, "fixed\n");
        // Taken away, it is gone as soon as the guest has ejected it.
        console.run("umount /mnt");
        let last = server(&vm);
        vm.ctl_with("share rm", "data");
        assert_eq!(vm.ctl("share ls").lines().count(), 1);
        until(node, &format!("[ ! -d /proc/{last} ]"));
        console.run(&format!("! {mount} 2>/dev/null"));
    }
}
