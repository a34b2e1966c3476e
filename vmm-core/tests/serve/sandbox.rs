//! What holds a `vmm` in, seen from outside, and tried from inside: debug builds do a forbidden deed when the environment
//! variable `VMM_ATTEMPT` names it (`vmm-core/src/bin/vmm/sys/attempt.rs`).

use std::fs;

use proto::vmm::{ExitKind, Hello, request::Op, response::Result as Answer};
use proto::wire;
use rstest::rstest;

use super::{boot, guest, process::Vmm};

#[test]
fn every_thread_has_filters_and_no_new_privileges() {
    let vmm = Vmm::start();
    let mut client = vmm.client();
    boot(
        &mut client,
        &guest::program(&[guest::PRINT_HI, guest::HALT].concat()),
    );
    let image = tempfile::tempfile().unwrap();
    image.set_len(1 << 20).unwrap();
    client.attach(&image, "root", 10);
    vmm.wait_for_serial("hi");
    let expected = ["blk-root-q0", "control", "rng", "serial", "vcpu-0", "vmm"];
    // A thread names itself when it begins, and the one that opened the image ends by itself. KVM's recovery of huge pages
    // is the kernel's.
    let threads = vmm.thread_statuses_when(|threads| {
        let mut names: Vec<&str> = threads.iter().map(|thread| thread["Name"].as_str()).collect();
        names.retain(|name| !name.starts_with("kvm-"));
        names.sort_unstable();
        names == expected
    });
    for thread in &threads {
        assert_eq!(thread["Seccomp"], "2", "{thread:?}");
        assert_eq!(thread["NoNewPrivs"], "1", "{thread:?}");
        // The one that refuses clone3, the main thread's, and the kind's own.
        let filters = if !expected.contains(&thread["Name"].as_str()) {
            continue;
        } else if thread["Name"] == "vmm" {
            "2"
        } else {
            "3"
        };
        assert_eq!(thread["Seccomp_filters"], filters, "{thread:?}");
    }
}

#[test]
fn the_daemon_is_told_what_holds_the_process_in() {
    let vmm = Vmm::start();
    let hello = Op::Hello(Hello {
        major: wire::MAJOR,
        minor: wire::MINOR,
    });
    let answer = vmm.connect().ask(hello);
    let Answer::Hello(reply) = answer else {
        panic!("{answer:?}");
    };
    assert!(reply.features.iter().any(|name| name == "seccomp"), "{reply:?}");
    // Whether the kernel has Landlock is the kernel's affair; if it has, it is used.
    let has_landlock =
        fs::read_to_string("/proc/kallsyms").is_ok_and(|names| names.contains("landlock_restrict_self"));
    let told = reply.features.iter().any(|name| name.starts_with("landlock"));
    assert!(told || !has_landlock, "{reply:?}");
}

/// What somebody would do who took a thread over, and the system call that it is.
const DEEDS: [(&str, libc::c_long); 22] = [
    ("open", libc::SYS_open),
    ("openat", libc::SYS_openat),
    ("socket", libc::SYS_socket),
    ("unix-socket", libc::SYS_socket),
    ("netlink", libc::SYS_socket),
    ("fork", libc::SYS_fork),
    ("vfork", libc::SYS_vfork),
    ("clone-process", libc::SYS_clone),
    ("execve", libc::SYS_execve),
    ("ptrace", libc::SYS_ptrace),
    ("process_vm_readv", libc::SYS_process_vm_readv),
    ("kill", libc::SYS_kill),
    ("tgkill", libc::SYS_tgkill),
    ("mount", libc::SYS_mount),
    ("unshare", libc::SYS_unshare),
    ("setns", libc::SYS_setns),
    ("bpf", libc::SYS_bpf),
    ("userfaultfd", libc::SYS_userfaultfd),
    ("mmap-exec", libc::SYS_mmap),
    ("mprotect-exec", libc::SYS_mprotect),
    ("tiocsti", libc::SYS_ioctl),
    ("dumpable", libc::SYS_prctl),
];

/// Allowed to the main thread, which builds the machine, but not to these.
const OF_MAIN: [(&str, libc::c_long); 3] = [
    ("io_uring_setup", libc::SYS_io_uring_setup),
    ("kvm-create", libc::SYS_ioctl),
    ("signal-handler", libc::SYS_rt_sigaction),
];

#[test]
fn a_call_outside_the_list_ends_the_process_and_the_record_names_it() {
    for (deed, call) in DEEDS {
        assert_seccomp(&attempt("main", deed, false), "vmm", call);
        assert_seccomp(&attempt("control", deed, false), "control", call);
    }
}

#[rstest]
#[case("control", "control")]
#[case("vcpu", "vcpu-0")]
#[case("worker", "rng")]
#[case("serial", "serial")]
fn each_kind_of_thread_has_a_list_of_its_own(#[case] kind: &str, #[case] thread: &str) {
    for (deed, call) in DEEDS.into_iter().chain(OF_MAIN) {
        assert_seccomp(&attempt(kind, deed, kind != "control"), thread, call);
    }
}

fn assert_seccomp(record: &str, thread: &str, call: libc::c_long) {
    let start = format!("seccomp: thread {thread} made system call {call} (");
    assert!(record.starts_with(&start), "{record}, not call {call}");
}

#[rstest]
#[case("segv", "SIGSEGV in thread control at address 0x10, instruction 0x")]
#[case("bus-file", "SIGBUS in thread vmm at address 0x")]
#[case(
    "bus-guest",
    "SIGBUS in thread vmm: the host can't provide guest memory at 0x7123, instruction 0x"
)]
#[case("ill", "SIGILL in thread control at address 0x")]
#[case("abort", "SIGABRT in thread control")]
#[case("overflow", "SIGSEGV in thread control at address 0x")]
fn a_fault_of_the_process_leaves_a_record(#[case] deed: &str, #[case] expected: &str) {
    // Only the main thread can make a file to map.
    let kind = if deed.starts_with("bus") {
        "main"
    } else {
        "control"
    };
    let record = attempt(kind, deed, false);
    assert!(record.starts_with(expected), "{record}");
}

/// What the record says after `kind` of thread did `deed`, with a machine or without.
fn attempt(kind: &str, deed: &str, machine: bool) -> String {
    let mut vmm = Vmm::attempting(&format!("{kind}:{deed}"), &[]);
    if machine {
        let mut client = vmm.client();
        client.send_boot(&guest::program(guest::HALT), &proto::vmm::Boot::default());
    }
    assert_eq!(vmm.wait().code(), Some(1), "{kind} {deed}");
    let record = vmm.exit_record();
    assert_eq!(record.kind(), ExitKind::VmmError);
    record.message
}

/// Without seccomp, what Landlock forbids fails, and the process goes on.
#[rstest]
#[case("openat", libc::EACCES)]
#[case("tcp", libc::EACCES)]
fn landlock_alone_keeps_files_and_the_network_from_it(#[case] deed: &str, #[case] errno: i32) {
    let mut vmm = Vmm::attempting(&format!("control:{deed}"), &["--seccomp=off"]);
    let mut client = vmm.client();
    client.ask(Op::Stop(proto::vmm::Stop {}));
    vmm.wait();
    let said = vmm.standard_error();
    // A kernel without it, or (TCP) with an early one.
    if !said.contains("Landlock") {
        assert!(said.contains(&format!("attempt {deed}: errno {errno}")), "{said}");
    }
}

#[test]
fn clone3_is_told_to_be_missing_so_that_the_flags_of_clone_can_be_checked() {
    let mut vmm = Vmm::attempting("main:clone3", &[]);
    let mut client = vmm.client();
    client.ask(Op::Stop(proto::vmm::Stop {}));
    vmm.wait();
    let said = vmm.standard_error();
    assert!(
        said.contains(&format!("attempt clone3: errno {}", libc::ENOSYS)),
        "{said}"
    );
}

#[test]
fn with_seccomp_log_a_call_outside_the_list_is_made() {
    let mut vmm = Vmm::attempting("control:dumpable", &["--seccomp=log"]);
    let mut client = vmm.client();
    client.ask(Op::Stop(proto::vmm::Stop {}));
    assert_eq!(vmm.wait().code(), Some(0));
    let said = vmm.standard_error();
    assert!(said.contains("attempt dumpable: 0"), "{said}");
}
