//! A `vmm` of the daemon, seen from outside: its user, its permissions, its open files, and its end
//! after a forbidden action of one of its threads.

use rstest::rstest;
use vmmd_tests::Case;
use vmmd_tests::node::Kernel;
use vmmd_tests::storage::Format;
use vmmd_tests::vm::{Vm, VmSpec};

#[test]
fn vmm_has_own_uid_no_capabilities_and_few_descriptors() {
    let case = Case::new("sandbox");
    let node = case.node();
    let bridge = case.bridge();
    let folder = case.folder();
    node.sh(&format!("truncate -s 16M {folder}/a.raw {folder}/b.raw"));
    let spec = |disk: &str| {
        let path = format!("{folder}/{disk}.raw");
        VmSpec::busybox(Kernel::Cloud612)
            .disk("data", &path, false)
            .nic("eth0", &bridge)
    };
    let first = Vm::start(&case, "a", &spec("a"));
    let second = Vm::start(&case, "b", &spec("b"));
    first.booted();
    second.booted();

    let mut uids = Vec::new();
    let network = |pid: u32| {
        let link = node.sh(&format!("readlink /proc/{pid}/ns/net"));
        link.trim().to_owned()
    };
    let mut networks = vec![network(1)];
    for vm in [&first, &second] {
        let pid = vm.pid();
        let own = network(pid);
        assert!(!networks.contains(&own), "{own} is not its own: {networks:?}");
        networks.push(own);
        let status = node.sh(&format!("cat /proc/{pid}/status"));
        let field = |name: &str| {
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix(&format!("{name}:")));
            line.unwrap_or_else(|| panic!("no {name} in {status}"))
                .split_whitespace()
                .collect::<Vec<_>>()
        };
        let uid = field("Uid");
        assert!(uid.iter().all(|id| id == &uid[0]) && uid[0] != "0", "{uid:?}");
        let gid = field("Gid");
        assert!(gid.iter().all(|id| id == &gid[0]) && gid[0] != "0", "{gid:?}");
        assert!(field("Groups").is_empty(), "{status}");
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(field(set), ["0000000000000000"], "{set}");
        }
        threads_are_limited(node, pid);
        uids.push(uid[0].to_owned());
        assert_eq!(
            node.sh(&format!("cat /proc/{pid}/environ")),
            "",
            "its environment is empty"
        );
        descriptors(node, pid, &folder);
        let limits = node.sh(&format!("cat /proc/{pid}/limits"));
        let core = limits
            .lines()
            .find(|line| line.starts_with("Max core file size"))
            .expect("a limit");
        let words: Vec<&str> = core.split_whitespace().collect();
        assert_eq!(words[4..6], ["0", "0"], "no core dump has a guest's memory");
    }
    assert_ne!(uids[0], uids[1], "each has its own uid");
    node.sh(&format!("cat /proc/{}/cgroup", first.pid()));
    drop((first, second));
}

/// Checks for every thread: its user, no capabilities, no new privileges, and three system call
/// filters (two for the main thread, which has no filter for a kind of thread). The filters that
/// the daemon has from its unit and passes on come on top.
fn threads_are_limited(node: &vmmd_tests::Node, pid: u32) {
    let daemons = "awk '/^Seccomp_filters:/ { print $2 }' /proc/$(systemctl show -p MainPID --value vmmd.service)/status";
    let text = node.sh(daemons);
    let inherited: u32 = text.trim().parse().expect("a number of filters");
    let user = node.sh(&format!("awk '/^Uid:/ {{ print $2 }}' /proc/{pid}/status"));
    let user = user.trim();
    let fields = "Name|Uid|CapEff|CapPrm|CapBnd|NoNewPrivs|Seccomp|Seccomp_filters";
    let threads = node
        .sh(&format!(
            "for task in /proc/{pid}/task/*; do grep -E '^({fields}):' $task/status | cut -f2- | paste -sd ' '; done"
        ));
    // KVM's recovery of huge pages is a thread of the kernel's in this process.
    for thread in threads.lines().filter(|thread| !thread.starts_with("kvm-")) {
        let own = if thread.starts_with("vmm ") { 2 } else { 3 };
        let none = "0000000000000000";
        let users = format!("{user}\t{user}\t{user}\t{user}");
        let expected = format!(" {users} {none} {none} {none} 1 2 {}", inherited + own);
        assert!(thread.ends_with(&expected), "{thread}, expected{expected}");
    }
    for name in ["vmm", "control", "serial", "vcpu-0", "blk-data-q0", "rng"] {
        assert!(
            threads.lines().any(|thread| thread.starts_with(name)),
            "{name}: {threads}"
        );
    }
}

/// Every descriptor is one that a machine with one disk and one NIC needs.
fn descriptors(node: &vmmd_tests::Node, pid: u32, folder: &str) {
    let listing = node.sh(&format!("for fd in /proc/{pid}/fd/*; do readlink $fd; done"));
    let allowed = |target: &str| {
        target.starts_with("anon_inode:")
            || target.starts_with("socket:")
            || target.starts_with("/memfd:")
            || target == "/dev/null"
            || target == "/dev/kvm"
            || target == "/dev/net/tun"
            || target == "/dev/urandom"
            || target.starts_with("/var/lib/guests/linux-6.12-cloud/")
            || target.starts_with(&format!("{folder}/"))
            || target.starts_with("/run/vmmd/vms/")
            || target.starts_with("/var/log/vmmd/vms/")
            // Its own vCPU threads' times, for the statistics.
            || (target.starts_with(&format!("/proc/{pid}/task/")) && target.ends_with("/schedstat"))
    };
    let unneeded: Vec<&str> = listing.lines().filter(|target| !allowed(target)).collect();
    assert!(unneeded.is_empty(), "{unneeded:?} in\n{listing}");
    for once in ["/dev/kvm", "/dev/net/tun", &format!("{folder}/")] {
        let count = listing.lines().filter(|target| target.starts_with(once)).count();
        assert!(count <= 1, "{once} is held {count} times:\n{listing}");
    }
    // Listening sockets, the journal, and the daemon's connection; nothing that a guest's traffic could grow.
    let sockets = listing
        .lines()
        .filter(|target| target.starts_with("socket:"))
        .count();
    assert!(sockets <= 6, "{listing}");
}

/// strace(1) replaces a system call of the thread with getuid(2), which is on no list.
/// `vmm-core/tests/serve/sandbox.rs` tests the attempts of a compromised program.
#[rstest]
#[case("vcpu-0", "ioctl")]
#[case::nightly("control", "ppoll,restart_syscall")]
#[case::nightly("serial", "epoll_wait")]
#[case("blk-data-q0", "epoll_wait,io_uring_enter,futex")]
#[case::nightly("vmm", "futex,restart_syscall")]
fn forbidden_system_call_of_a_thread_ends_the_vm(#[case] thread: &str, #[case] call: &str) {
    let case = Case::new("sandbox-deed");
    let node = case.node();
    let image = case.image("data", Format::Raw, 8);
    let spec = VmSpec::busybox(Kernel::Cloud612).disk("data", &image, false);
    let vm = Vm::start(&case, "", &spec);
    let pid = vm.pid();
    let found = node.sh(&format!(
        "grep -lx {thread} /proc/{pid}/task/*/comm | cut -d/ -f5"
    ));
    node.sh(&format!(
        "timeout 60 strace -qq -o /dev/null -p {} -e inject={call}:retval=0:syscall=getuid",
        found.trim()
    ));
    vm.wait_end(60);
    assert_eq!(vm.phase(), "FAILED");
    let exit = |field: &str| vm.field(&format!("/status/lastExit/{field}"));
    assert_eq!(exit("reason"), "EXIT_REASON_VMM_ERROR");
    let expected = format!("seccomp: thread {thread} made system call 102 (");
    assert!(exit("message").starts_with(&expected), "{}", exit("message"));
}
