//! The sandbox of a `vmm`, checked from outside and from inside. Debug builds do a forbidden
//! operation that the environment variable `VMM_ATTEMPT` names
//! (`vmm-core/src/bin/vmm/sys/attempt.rs`).

use std::fs;

use rstest::rstest;
use vmm_protocol::vmm::{ExitKind, Hello, request::Op, response::Result as Answer};
use vmm_protocol::wire;

use super::{booted, guest, process::Vmm};

#[test]
fn every_thread_has_filters_and_no_new_privileges() {
    let (vmm, mut client) = booted(&[guest::PRINT_HI, guest::HALT]);
    let image = tempfile::tempfile().unwrap();
    image.set_len(1 << 20).unwrap();
    client.attach(&image, "root", 10);
    vmm.wait_for_serial("hi");
    let expected = ["blk-root-q0", "control", "rng", "serial", "vcpu-0", "vmm"];
    // The filter that refuses clone3, the main thread's, and that of the thread's kind.
    let filters = |name: &str| if name == "vmm" { "2" } else { "3" };
    // A thread gets its name just before its filter, and the thread that opened the image ends on
    // its own. The kernel owns the thread for KVM's recovery of huge pages.
    let threads = vmm.thread_statuses_when(|threads| {
        let ours = threads
            .iter()
            .filter(|thread| !thread["Name"].starts_with("kvm-"));
        let mut ours: Vec<_> = ours
            .map(|thread| (thread["Name"].as_str(), thread["Seccomp_filters"].as_str()))
            .collect();
        ours.sort_unstable();
        ours == expected.map(|name| (name, filters(name)))
    });
    for thread in &threads {
        assert_eq!(thread["Seccomp"], "2", "{thread:?}");
        assert_eq!(thread["NoNewPrivs"], "1", "{thread:?}");
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

/// Operations of an attacker in control of a thread, and their system calls.
const DEEDS: [(&str, libc::c_long); 42] = [
    ("open", libc::SYS_open),
    ("openat", libc::SYS_openat),
    ("open_by_handle_at", libc::SYS_open_by_handle_at),
    ("stat", libc::SYS_newfstatat),
    ("statx", libc::SYS_statx),
    ("rename", libc::SYS_rename),
    ("unlink", libc::SYS_unlink),
    ("chroot", libc::SYS_chroot),
    ("mount", libc::SYS_mount),
    ("socket", libc::SYS_socket),
    ("unix-socket", libc::SYS_socket),
    ("netlink", libc::SYS_socket),
    ("connect", libc::SYS_connect),
    ("bind", libc::SYS_bind),
    ("fork", libc::SYS_fork),
    ("vfork", libc::SYS_vfork),
    ("clone-process", libc::SYS_clone),
    ("execve", libc::SYS_execve),
    ("execveat", libc::SYS_execveat),
    ("ptrace", libc::SYS_ptrace),
    ("process_vm_readv", libc::SYS_process_vm_readv),
    ("process_vm_writev", libc::SYS_process_vm_writev),
    ("pidfd_open", libc::SYS_pidfd_open),
    ("kill", libc::SYS_kill),
    ("tgkill", libc::SYS_tgkill),
    ("tgkill-other", libc::SYS_tgkill),
    ("unshare", libc::SYS_unshare),
    ("setns", libc::SYS_setns),
    ("setuid", libc::SYS_setuid),
    ("prlimit", libc::SYS_prlimit64),
    ("keyctl", libc::SYS_keyctl),
    ("bpf", libc::SYS_bpf),
    ("perf_event_open", libc::SYS_perf_event_open),
    ("init_module", libc::SYS_init_module),
    ("shmget", libc::SYS_shmget),
    ("userfaultfd", libc::SYS_userfaultfd),
    ("ring-register", libc::SYS_io_uring_register),
    ("mmap-exec", libc::SYS_mmap),
    ("mprotect-exec", libc::SYS_mprotect),
    ("tiocsti", libc::SYS_ioctl),
    ("dumpable", libc::SYS_prctl),
    ("signal-of-others", libc::SYS_rt_sigqueueinfo),
];

/// Allowed to the main thread, which builds the machine, but not to these.
const OF_MAIN: [(&str, libc::c_long); 4] = [
    ("io_uring_setup", libc::SYS_io_uring_setup),
    ("memfd_create", libc::SYS_memfd_create),
    ("kvm-create", libc::SYS_ioctl),
    ("signal-handler", libc::SYS_rt_sigaction),
];

/// Each attempt is a process of its own; some at a time.
const AT_A_TIME: usize = 4;

#[rstest]
#[case("main", "vmm")]
#[case("control", "control")]
#[case("vcpu", "vcpu-0")]
#[case("worker", "rng")]
#[case("storage", "blk-pool")]
#[case("serial", "serial")]
#[case("helper", "loader")]
fn forbidden_call_ends_the_process_with_a_record(#[case] kind: &str, #[case] thread: &str) {
    let machine = !matches!(kind, "main" | "control");
    let mut deeds = DEEDS.to_vec();
    if kind != "main" {
        deeds.extend(OF_MAIN);
    }
    for deeds in deeds.chunks(AT_A_TIME) {
        let started: Vec<_> = deeds.iter().map(|(deed, _)| begin(kind, deed, machine)).collect();
        for (mut vmm, (deed, call)) in started.into_iter().zip(deeds) {
            let record = end(&mut vmm, &format!("{kind} {deed}"));
            let start = format!("seccomp: thread {thread} made system call {call} (");
            assert!(record.starts_with(&start), "{record}, not {deed}, call {call}");
        }
    }
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
#[case("panic", "panic in the vmm at ")]
#[case("overflow", "SIGSEGV in thread control at address 0x")]
fn a_fault_of_the_process_leaves_a_record(#[case] deed: &str, #[case] expected: &str) {
    // Only the main thread can make a file to map.
    let kind = if deed.starts_with("bus") {
        "main"
    } else {
        "control"
    };
    let record = attempt(kind, deed);
    assert!(record.starts_with(expected), "{record}");
}

/// Message of the record after `kind` of thread did `deed`, without a machine.
fn attempt(kind: &str, deed: &str) -> String {
    end(&mut begin(kind, deed, false), deed)
}

/// Starts a process in which `kind` of thread is to do `deed`.
fn begin(kind: &str, deed: &str, machine: bool) -> Vmm {
    let vmm = Vmm::attempting(&format!("{kind}:{deed}"), &[]);
    if machine {
        let mut client = vmm.client();
        client.send_boot(&guest::program(guest::HALT), &vmm_protocol::vmm::Boot::default());
    }
    vmm
}

/// Message of the record after the end of the process.
fn end(vmm: &mut Vmm, deed: &str) -> String {
    assert_eq!(vmm.wait().code(), Some(1), "{deed}");
    let record = vmm.exit_record();
    assert_eq!(record.kind(), ExitKind::VmmError, "{deed}");
    record.message
}

/// Without seccomp, Landlock alone makes forbidden calls fail, and the process continues.
#[rstest]
#[case("openat", libc::EACCES)]
#[case("tcp", libc::EACCES)]
fn landlock_alone_keeps_files_and_the_network_from_it(#[case] deed: &str, #[case] errno: i32) {
    let mut vmm = Vmm::attempting(&format!("control:{deed}"), &["--seccomp=off"]);
    let mut client = vmm.client();
    client.ask(Op::Stop(vmm_protocol::vmm::Stop {}));
    vmm.wait();
    let said = vmm.standard_error();
    // A kernel without it, or (TCP) with an early one.
    if !said.contains("Landlock") {
        assert!(said.contains(&format!("attempt {deed}: errno {errno}")), "{said}");
    }
}

#[test]
fn clone3_is_missing_so_that_clone_flags_are_checked() {
    let mut vmm = Vmm::attempting("main:clone3", &[]);
    let mut client = vmm.client();
    client.ask(Op::Stop(vmm_protocol::vmm::Stop {}));
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
    client.ask(Op::Stop(vmm_protocol::vmm::Stop {}));
    assert_eq!(vmm.wait().code(), Some(0));
    let said = vmm.standard_error();
    assert!(said.contains("attempt dumpable: 0"), "{said}");
}
