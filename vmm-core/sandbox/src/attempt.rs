//! Forbidden operations that a test asks for, as an attacker in control of a thread would do them.
//! Debug builds only.
//!
//! The environment variable `VMM_ATTEMPT` names the kind of thread and the operations:
//! `worker:execve,open`. The first thread of that kind runs them just before its body; `image`
//! means a `vmm-image` that is about to read an image. Each result goes to standard error, if the
//! process still runs. `vcpu:cost` is no forbidden operation: it measures the cost of the filters.

#![allow(unsafe_code)]

use std::{env, fs::File, io, os::fd::AsRawFd, ptr};

use libc::{c_long, c_ulong};

/// Runs the operations if the calling thread is of the kind `name`, which the test names. `map_guest` declares a page of this process,
/// by its address and length, to be memory of a guest.
pub fn run(name: &str, map_guest: impl Fn(usize, usize)) {
    let Ok(wanted) = env::var("VMM_ATTEMPT") else {
        return;
    };
    let Some(deeds) = wanted.strip_prefix(name).and_then(|rest| rest.strip_prefix(':')) else {
        return;
    };
    for deed in deeds.split(',') {
        match attempt(deed, &map_guest) {
            Ok(value) => eprintln!("attempt {deed}: {value}"),
            Err(error) => eprintln!("attempt {deed}: errno {}", error.raw_os_error().unwrap_or(0)),
        }
    }
}

fn attempt(deed: &str, map_guest: &impl Fn(usize, usize)) -> io::Result<c_long> {
    match deed {
        "bus-file" => return touch_missing_page(&|_, _| ()),
        "bus-guest" => return touch_missing_page(map_guest),
        "tcp" => return connect(),
        "segv" => return Ok(read(ptr::without_provenance(0x10))),
        // SAFETY: ends the process; no memory is touched.
        "ill" => unsafe { std::arch::asm!("ud2", options(noreturn)) },
        "abort" => std::process::abort(),
        "panic" => panic!("a test wants it"),
        "overflow" => return Ok(overflow(0)),
        "cost" => return Ok(cost()),
        _ => {}
    }
    let (call, arguments) = call(deed);
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the calls in `call` are forbidden, or read no more than constants with a NUL and change nothing that this
    // process relies on.
    let result = unsafe { libc::syscall(call, a, b, c, d, e, f) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn call(deed: &str) -> (c_long, [c_ulong; 6]) {
    const PATH: c_ulong = 0;
    let path = |path: &'static std::ffi::CStr| path.as_ptr() as c_ulong;
    let number = |value: i32| c_ulong::from(value.cast_unsigned());
    // Whether there is such a process makes no difference: the call is not made.
    let other = 1;
    let exec = number(libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC);
    let private = number(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let (call, some): (c_long, &[c_ulong]) = match deed {
        "open" => (libc::SYS_open, &[path(c"/etc/passwd"), PATH]),
        "openat" => (libc::SYS_openat, &[number(libc::AT_FDCWD), path(c"/etc/passwd")]),
        "socket" => (
            libc::SYS_socket,
            &[number(libc::AF_INET), number(libc::SOCK_STREAM)],
        ),
        "unix-socket" => (
            libc::SYS_socket,
            &[number(libc::AF_UNIX), number(libc::SOCK_STREAM)],
        ),
        "netlink" => (
            libc::SYS_socket,
            &[number(libc::AF_NETLINK), number(libc::SOCK_RAW)],
        ),
        "connect" => (libc::SYS_connect, &[0, 0, 0]),
        "bind" => (libc::SYS_bind, &[0, 0, 0]),
        "stat" => (
            libc::SYS_newfstatat,
            &[number(libc::AT_FDCWD), path(c"/etc/passwd"), 0, 0],
        ),
        "statx" => (
            libc::SYS_statx,
            &[number(libc::AT_FDCWD), path(c"/etc/passwd"), 0, 0, 0],
        ),
        "rename" => (libc::SYS_rename, &[path(c"/tmp/a"), path(c"/tmp/b")]),
        "unlink" => (libc::SYS_unlink, &[path(c"/tmp/a")]),
        "open_by_handle_at" => (libc::SYS_open_by_handle_at, &[0, 0, 0]),
        "fork" => (libc::SYS_fork, &[]),
        "vfork" => (libc::SYS_vfork, &[]),
        "clone-process" => (libc::SYS_clone, &[number(libc::SIGCHLD)]),
        "clone-users" => (
            libc::SYS_clone,
            &[number(libc::CLONE_NEWUSER | libc::CLONE_NEWNET | libc::SIGCHLD)],
        ),
        "clone3" => (libc::SYS_clone3, &[0, 0]),
        "execve" => (libc::SYS_execve, &[path(c"/bin/true"), 0, 0]),
        "execveat" => (
            libc::SYS_execveat,
            &[0, path(c""), 0, 0, number(libc::AT_EMPTY_PATH)],
        ),
        "ptrace" => (
            libc::SYS_ptrace,
            &[number(libc::PTRACE_ATTACH.cast_signed()), other],
        ),
        "process_vm_readv" => (libc::SYS_process_vm_readv, &[other, 0, 0, 0, 0, 0]),
        "process_vm_writev" => (libc::SYS_process_vm_writev, &[other, 0, 0, 0, 0, 0]),
        "pidfd_open" => (libc::SYS_pidfd_open, &[other, 0]),
        "signal-of-others" => (libc::SYS_rt_sigqueueinfo, &[other, 0, 0]),
        "kill" => (libc::SYS_kill, &[other, 0]),
        "tgkill-other" => (libc::SYS_tgkill, &[other, other, number(libc::SIGABRT)]),
        "tgkill" => (libc::SYS_tgkill, &[other, other, number(libc::SIGTERM)]),
        "mount" => (
            libc::SYS_mount,
            &[path(c"none"), path(c"/tmp"), path(c"tmpfs"), 0, 0],
        ),
        "unshare" => (libc::SYS_unshare, &[number(libc::CLONE_NEWUSER)]),
        "setns" => (libc::SYS_setns, &[0, 0]),
        "chroot" => (libc::SYS_chroot, &[path(c"/")]),
        "setuid" => (libc::SYS_setuid, &[0]),
        "prlimit" => (libc::SYS_prlimit64, &[0, 0, 0, 0]),
        "keyctl" => (libc::SYS_keyctl, &[0, 0]),
        "perf_event_open" => (libc::SYS_perf_event_open, &[0, 0, 0, 0, 0]),
        "init_module" => (libc::SYS_init_module, &[0, 0, 0]),
        "finit_module" => (libc::SYS_finit_module, &[0, 0, 0]),
        "accept" => (libc::SYS_accept, &[0, 0, 0]),
        "sendmsg" => (libc::SYS_sendmsg, &[0, 0, 0]),
        "splice" => (libc::SYS_splice, &[0, 0, 0, 0, 0, 0]),
        "vmsplice" => (libc::SYS_vmsplice, &[0, 0, 0, 0]),
        "semget" => (libc::SYS_semget, &[0, 1, 0]),
        "msgget" => (libc::SYS_msgget, &[0, 0]),
        "mq_unlink" => (libc::SYS_mq_unlink, &[path(c"x")]),
        "fsopen" => (libc::SYS_fsopen, &[path(c"tmpfs"), 0]),
        "move_mount" => (libc::SYS_move_mount, &[0, path(c""), 0, path(c""), 0]),
        "io_uring_enter" => (libc::SYS_io_uring_enter, &[0, 0, 0, 0, 0, 0]),
        "shmget" => (libc::SYS_shmget, &[0, 4096, 0]),
        "bpf" => (libc::SYS_bpf, &[0, 0, 0]),
        "userfaultfd" => (libc::SYS_userfaultfd, &[0]),
        "io_uring_setup" => (libc::SYS_io_uring_setup, &[0, 0]),
        "ring-register" => (libc::SYS_io_uring_register, &[0, 9, 0, 0]),
        "memfd_create" => (libc::SYS_memfd_create, &[path(c"x"), 0]),
        "mmap-exec" => (libc::SYS_mmap, &[0, 4096, exec, private, number(-1), 0]),
        "mprotect-exec" => (libc::SYS_mprotect, &[0, 0, exec]),
        "tiocsti" => (libc::SYS_ioctl, &[0, libc::TIOCSTI, path(c"x")]),
        "kvm-create" => (libc::SYS_ioctl, &[0, 0xae01, 0]),
        "dumpable" => (libc::SYS_prctl, &[number(libc::PR_SET_DUMPABLE), 1]),
        "signal-handler" => (libc::SYS_rt_sigaction, &[number(libc::SIGSYS), 0, 0, 8]),
        // No such call.
        _ => (-1, &[]),
    };
    let mut arguments = [0; 6];
    for (argument, value) in arguments.iter_mut().zip(some) {
        *argument = *value;
    }
    (call, arguments)
}

/// Returns the nanoseconds of this thread per KVM_RUN on an invalid descriptor. The difference to a
/// run without filters is the cost of the filters.
fn cost() -> c_long {
    const CALLS: u32 = 1_000_000;
    const KVM_RUN: c_ulong = 0xae80;
    let now = || {
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: writes one timespec through the pointer.
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
        time
    };
    let begun = now();
    for _ in 0..CALLS {
        // SAFETY: it fails with EBADF.
        unsafe { libc::ioctl(-1, KVM_RUN, 0) };
    }
    let end = now();
    ((end.tv_sec - begun.tv_sec) * 1_000_000_000 + end.tv_nsec - begun.tv_nsec) / c_long::from(CALLS)
}

/// Connects to a closed port of this host.
fn connect() -> io::Result<c_long> {
    std::net::TcpStream::connect(("127.0.0.1", 1)).map(|_| 0)
}

/// Reads a page of a mapped file that has become shorter.
fn touch_missing_page(map_guest: &impl Fn(usize, usize)) -> io::Result<c_long> {
    const LENGTH: usize = 4096;
    let file = File::from(rustix::fs::memfd_create(
        "short",
        rustix::fs::MemfdFlags::CLOEXEC,
    )?);
    file.set_len(LENGTH as u64)?;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let page = unsafe {
        libc::mmap(
            ptr::null_mut(),
            LENGTH,
            libc::PROT_READ,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    file.set_len(0)?;
    map_guest(page as usize, LENGTH);
    Ok(read(page.cast_const().cast::<u8>().wrapping_add(0x123)))
}

fn read(address: *const u8) -> c_long {
    // SAFETY: it is the purpose of this call that the page is not there; nothing of Rust's is at the address.
    unsafe { address.read_volatile() }.into()
}

#[allow(unconditional_recursion, reason = "the stack is to overflow")]
fn overflow(depth: c_long) -> c_long {
    let room = std::hint::black_box([depth; 512]);
    overflow(depth.wrapping_add(1)).wrapping_add(room[0])
}
