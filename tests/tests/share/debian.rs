//! A whole Debian with shares.

use serde_json::json;
use vmmd_tests::Case;
use vmmd_tests::vm::{Vm, VmSpec};

use crate::{Srv, mapped, until};

/// Tests that `make nightly` runs and `make test` does not.
mod nightly {
    use super::*;

    #[test]
    fn a_whole_debian_mounts_its_shares_by_its_fstab() {
        let case = Case::new("share-debian");
        let srv = Srv::new(&case, &["data"]);
        let node = case.node();
        srv.sh("mkdir mapped && chown 100000:100000 mapped && chmod 755 mapped");
        let bridge = case.bridge();
        node.sh(&format!("ip addr add 10.78.0.1/24 dev {bridge}"));
        let disk = case.debian_disk();
        // Exactly as in docs/src/shares.md: systemd loads the required modules.
        srv.sh(&format!(
            "mkdir root && mount -o loop {disk} root && mkdir -p root/data root/mapped && \
             for tag in data mapped; do echo \"$tag /$tag virtiofs defaults,nofail 0 0\"; done >>root/etc/fstab && umount root"
        ));
        let guests = node.guests();
        let spec = VmSpec::new(guests.debian_vmlinuz(), Some(guests.debian_initrd()))
            .memory_mib(512)
            .disk("root", &disk, false)
            .nic("eth0", &bridge)
            .set("/shares", json!([srv.share("data"), mapped(&srv, "mapped")]))
            .cmdline(
                "norandmaps root=/dev/vda rw ip=10.78.0.2::10.78.0.1:255.255.255.0::eth0:off net.ifnames=0",
            );
        let vm = Vm::start(&case, "", &spec);
        vm.console().until("login:", 300);
        // With `nofail` nothing in the guest waits for the mounts, and its SSH server may begin after the prompt.
        until(
            node,
            "ssh root@10.78.0.2 'mountpoint -q /data && mountpoint -q /mapped' 2>/dev/null",
        );
        let run = |command: &str| node.sh(&format!("ssh root@10.78.0.2 \"{command}\""));
        assert_eq!(
            run("findmnt -nlt virtiofs -o SOURCE,TARGET | tr -s ' ' | sort"),
            "data /data\nmapped /mapped\n"
        );
        run(
            "cp -a /etc/systemd /data/copy && diff -r --no-dereference /etc/systemd /data/copy && echo kept >/data/kept && sync /data/kept",
        );
        assert_eq!(
            srv.sh("cat data/kept; find data ! -uid 1234 -o ! -gid 1235"),
            "kept\n"
        );
        // Each user of the guest is one of the node's.
        run("mkdir /mapped/home && chown 1000:1001 /mapped/home && chmod 700 /mapped/home");
        let user = "setpriv --reuid=1000 --regid=1001 --clear-groups";
        run(&format!("{user} sh -c 'echo mine >/mapped/home/file'"));
        run(&format!(
            "! {user} sh -c 'echo x >/mapped/not-allowed' 2>/dev/null"
        ));
        assert_eq!(
            srv.sh("stat -c %u:%g mapped/home mapped/home/file"),
            "101000:101001\n101000:101001\n"
        );
        vm.ctl("stop --grace 120s");
        assert_eq!(vm.exit_reason(), "STOPPED");
    }
}
