//! The test node itself: what vmmd and its tests find there.

use std::net::TcpListener;

use vmmd_tests::node::Kernel;
use vmmd_tests::wait::Deadline;
use vmmd_tests::{Case, Node};

#[test]
fn the_node_has_what_a_hypervisor_needs() {
    let node = Node::get().expect("node");
    node.sh("test -c /dev/kvm && test -c /dev/vhost-net && test -c /dev/net/tun && test -c /dev/userfaultfd");
    let controllers = node.sh("cat /sys/fs/cgroup/cgroup.controllers");
    for controller in ["cpuset", "cpu", "io", "memory", "hugetlb", "pids"] {
        assert!(
            controllers.split_whitespace().any(|word| word == controller),
            "{controller} in {controllers}"
        );
    }
    let lsm = node.sh("cat /sys/kernel/security/lsm");
    assert!(lsm.contains("landlock"), "{lsm}");
}

#[test]
fn one_idle_vm_is_kept_open_for_the_nodes_life() {
    let node = Node::get().expect("node");
    let held =
        node.sh("for fd in /proc/$(systemctl show -P MainPID kvm-idle-vm)/fd/*; do readlink $fd; done");
    assert!(held.contains("anon_inode:kvm-vm"), "{held}");
}

#[test]
fn the_node_reaches_nothing_outside_not_even_its_host() {
    let node = Node::get().expect("node");
    // 10.0.2.2 would be this machine's loopback interface in a user network that is not restricted.
    let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
    let port = listener.local_addr().expect("address").port();
    let output = node
        .ssh(&format!("curl -s -m 3 telnet://10.0.2.2:{port} </dev/null"))
        .expect("ssh");
    // 7: refused; 28: no answer in time.
    assert!(
        matches!(output.status.code(), Some(7 | 28)),
        "curl ended with {}",
        output.status
    );
}

#[test]
fn files_go_in_and_out_with_their_mode() {
    use std::os::unix::fs::PermissionsExt;
    let case = Case::new("copy");
    let dir = tempfile::tempdir().expect("folder");
    let (there, back) = (dir.path().join("there"), dir.path().join("back"));
    std::fs::write(&there, [0u8, 255, 10, 13].repeat(50_000)).expect("write");
    std::fs::set_permissions(&there, std::fs::Permissions::from_mode(0o750)).expect("mode");
    let remote = format!("{}/file", case.folder());
    case.node().copy_in(&there, &remote).expect("copy in");
    assert_eq!(case.node().sh(&format!("stat -c %a {remote}")).trim(), "750");
    case.node().copy_out(&remote, &back).expect("copy out");
    assert_eq!(
        std::fs::read(&there).expect("there"),
        std::fs::read(&back).expect("back")
    );
}

#[test]
fn a_file_in_the_node_is_followed_from_before_it_exists() {
    let case = Case::new("follow");
    let file = format!("{}/file", case.folder());
    let mut stream = case.node().follow(&file);
    case.node().sh(&format!("echo one >> {file}; echo two >> {file}"));
    stream.until("one\n", Deadline::seconds(30));
    stream.until("two\n", Deadline::seconds(30));
}

#[test]
fn every_guest_file_is_in_the_node() {
    let node = Node::get().expect("node");
    let guests = node.guests();
    let mut files = vec![
        guests.debian_disk(),
        guests.debian_vmlinuz(),
        guests.debian_initrd(),
    ];
    for kernel in Kernel::ALL {
        files.extend([
            guests.vmlinuz(kernel),
            guests.vmlinux(kernel),
            guests.initrd(kernel),
        ]);
    }
    node.sh(&format!(
        "for file in {}; do test -s $file || {{ echo $file >&2; exit 1; }}; done",
        files.join(" ")
    ));
}
