//! The Debian package in the node: upgrade with running VMs, a downgrade, removal and purge. The last test leaves it installed.

use vmmd_tests::node::{INSTALL, Kernel, PACKAGE, Packages};
use vmmd_tests::vm::{Vm, VmSpec};
use vmmd_tests::{Case, Node, long};

fn running(case: &Case) -> Vm<'_> {
    let vm = Vm::start(case, "", &VmSpec::busybox(Kernel::Cloud612));
    vm.booted();
    vm
}

fn failed_units(node: &Node) -> String {
    node.sh("systemctl list-units --failed --plain --no-legend 'vmmd*'")
}

#[test]
fn upgrade_keeps_vms_running_and_downgrade_is_refused() {
    let case = Case::new("upgrade");
    let node = case.node();
    let packages = Packages::new(node).expect("a package was built");
    let vm = running(&case);
    let pid = vm.pid();
    let daemon = node.sh("systemctl show -P MainPID vmmd");
    let newer = packages.upgrade().expect("upgrade");
    let phase = vm.phase();
    assert_eq!((phase.as_str(), vm.pid()), ("RUNNING", pid));
    assert_ne!(node.sh("systemctl show -P MainPID vmmd"), daemon);
    vm.ctl("pause");
    vm.ctl("resume");

    let refused = node.ssh(&format!("{INSTALL} {PACKAGE}")).expect("downgrade");
    assert_ne!(refused.status.code(), Some(0));
    for part in ["is older than the installed", "VMMD_DOWNGRADE=yes"] {
        assert!(refused.stderr.contains(part), "{}", refused.stderr);
    }
    let stays = packages.version().expect("version");
    assert_eq!(stays, newer, "the newer version stays");
    assert_eq!(vm.phase(), "RUNNING");
    assert_eq!(vm.pid(), pid);
    assert_eq!(failed_units(node), "");
}

#[test]
fn removal_stops_guests_and_purge_leaves_nothing() {
    let case = Case::new("purge");
    let node = case.node();
    let packages = Packages::new(node).expect("a package was built");
    let both = [("up", "true"), ("down", "systemctl stop vmmd")];
    // Without the daemon is the harder one.
    for &(daemon, stop) in if long() { &both[..] } else { &both[1..] } {
        let vm = running(&case);
        node.sh(stop);
        node.sh("vmmd init-certs --dir /etc/vmmd/tls --server-name node >/dev/null 2>&1 || true");
        let said = node.ssh("dpkg -r vmmd").expect("remove");
        assert!(said.success(), "{}{}", said.stdout, said.stderr);
        let all = format!("{}{}", said.stdout, said.stderr);
        assert!(
            all.contains("stopping 1 virtual machine"),
            "with vmmd {daemon}: {all}"
        );
        assert_eq!(node.sh("pgrep -x 'vmm|vmmd' || true"), "");
        assert_eq!(failed_units(node), "", "with vmmd {daemon}");
        // The guest powered off on its own: it was not killed.
        let serial = node.sh("cat /var/log/vmmd/vms/*/serial.log");
        assert!(
            serial.contains("GUEST-POWER-BUTTON"),
            "with vmmd {daemon}: {serial}"
        );
        // It is purged where it was removed the last time.
        if daemon == "up" {
            node.sh(&format!("{INSTALL} {PACKAGE}"));
            vm.ctl("delete --force");
        }
    }
    node.sh("test -e /etc/vmmd/tls/ca.key");
    let kept = "/var/lib/vmmd/disks/kept.qcow2 /var/lib/vmmd/images/below.raw";
    node.sh(&format!(
        "mkdir -p /var/lib/vmmd/disks /var/lib/vmmd/images && touch {kept}"
    ));
    node.sh("dpkg -P vmmd");
    node.sh(&format!("ls {kept}"));
    let state = node.sh("ls /var/lib/vmmd && rm -r /var/lib/vmmd");
    assert_eq!(state, "disks\nimages\n");
    let left = node
        .sh("ls -d /etc/vmmd /var/log/vmmd /run/vmmd 2>/dev/null; find /etc/systemd/system -name '*vmmd*'; find /var/lib -name '*.key'");
    assert_eq!(left, "");
    assert_eq!(failed_units(node), "");
    drop(packages);
    assert_eq!(node.sh("systemctl is-active vmmd").trim(), "active");
}

#[test]
fn units_are_as_closed_as_their_work_allows() {
    let case = Case::new("units");
    // The servers of shares use chroot(2), and DHCP for IPv6 needs a packet socket: 2 points each.
    for (unit, exposure) in [("vmmd", 51), ("vmmd-vms", 20), ("vmmd-guests", 47)] {
        case.node()
            .try_sh(&format!(
                "systemd-analyze security --no-pager --threshold={exposure} {unit}.service >/dev/null"
            ))
            .unwrap_or_else(|error| panic!("{unit}: {error:#}"));
    }
    let refused = case
        .node()
        .sh("nsenter -m -t $(systemctl show -P MainPID vmmd) touch /sys/kernel/mm/vmmd-was-here /usr/vmmd-was-here 2>&1 || true");
    assert_eq!(refused.matches("Read-only").count(), 2, "{refused}");
}
