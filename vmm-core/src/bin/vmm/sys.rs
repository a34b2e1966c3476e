//! System calls that no library in the tree wraps safely.

#![allow(unsafe_code)]

pub mod fatal;

use std::{
    ffi::c_int,
    io,
    os::fd::{FromRawFd, OwnedFd, RawFd},
};

/// Closes every descriptor but standard input, output and error and `keep`.
pub fn close_others(keep: &[RawFd]) -> io::Result<()> {
    let mut keep = keep.to_vec();
    keep.sort_unstable();
    let mut first = 3;
    for fd in keep.into_iter().chain([RawFd::MAX]) {
        if first < fd {
            close_range(first, fd - 1)?;
        }
        first = fd.saturating_add(1);
    }
    Ok(())
}

fn close_range(first: RawFd, last: RawFd) -> io::Result<()> {
    // SAFETY: called when the process begins. Only standard streams and the kept descriptors were
    // opened before, so no object owns a closed descriptor.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Keeps the process's own memory small: one heap for all threads, which gives memory back early, and threads with
/// small stacks. To be called before there is a second thread.
pub fn keep_memory_small() {
    /// Bytes of address space for each thread; none of them needs a tenth of it.
    const STACK_SIZE: &str = "262144";
    const PARAMETERS: [(c_int, c_int); 3] = [
        (libc::M_ARENA_MAX, 1),
        (libc::M_TRIM_THRESHOLD, 64 << 10),
        (libc::M_MMAP_THRESHOLD, 64 << 10),
    ];
    for (parameter, value) in PARAMETERS {
        // SAFETY: sets a parameter of the allocator.
        unsafe { libc::mallopt(parameter, value) };
    }
    // SAFETY: there is no other thread that could read the environment meanwhile.
    unsafe { std::env::set_var("RUST_MIN_STACK", STACK_SIZE) };
}

/// Blocks the signals that ask a process to end, in this thread and all that it makes; they can be read from the
/// descriptor instead, as `signalfd_siginfo` each.
pub fn termination_signals() -> io::Result<OwnedFd> {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `set` is room for a set, which is initialised here.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        // SAFETY: the set was initialised above, the number is a signal's.
        unsafe { libc::sigaddset(set.as_mut_ptr(), signal) };
    }
    // SAFETY: the set is initialised; the previous one is not asked for.
    let error = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut()) };
    if error != 0 {
        return Err(io::Error::from_raw_os_error(error));
    }
    // SAFETY: the set is initialised; -1 asks for a new descriptor.
    let fd = unsafe { libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Moves this process to a network namespace of its own, which is empty. One that is not root's takes a namespace of users first.
/// To be called before there is a second thread.
pub fn leave_network(root: bool) -> io::Result<()> {
    let users = if root { 0 } else { libc::CLONE_NEWUSER };
    // SAFETY: takes flags only. No table of descriptors is shared, and there is no other thread.
    if unsafe { libc::unshare(libc::CLONE_NEWNET | users) } < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Makes `uid` and `gid` those of the whole process, without supplementary groups.
pub fn become_user(uid: u32, gid: u32) -> io::Result<()> {
    let check = |result: c_int| {
        if result < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    };
    // SAFETY: an empty list needs no memory.
    check(unsafe { libc::setgroups(0, std::ptr::null()) })?;
    // SAFETY: takes numbers only.
    check(unsafe { libc::setresgid(gid, gid, gid) })?;
    // SAFETY: takes numbers only.
    check(unsafe { libc::setresuid(uid, uid, uid) })
}

/// linux/sockios.h
const SIOCBRADDIF: libc::c_ulong = 0x89a2;
/// linux/if.h
const IFF_UP: libc::c_short = 1;

/// Whether there is a network interface of that name.
pub fn interface_exists(name: &str) -> bool {
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::DGRAM,
        None,
    );
    socket.is_ok_and(|socket| rustix::net::netdevice::name_to_index(&socket, name).is_ok())
}

/// Makes the interface `tap` a port of `bridge`, and sets both up.
pub fn attach_to_bridge(tap: &str, bridge: &str) -> io::Result<()> {
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::DGRAM,
        None,
    )?;
    let index = rustix::net::netdevice::name_to_index(&socket, tap)?;
    let mut request = interface_request(bridge)?;
    request.ifr_ifru.ifru_ifindex = c_int::try_from(index).unwrap_or(-1);
    interface_ioctl(&socket, SIOCBRADDIF, &mut request)?;
    let mut request = interface_request(tap)?;
    interface_ioctl(&socket, libc::SIOCGIFFLAGS, &mut request)?;
    // SAFETY: SIOCGIFFLAGS has filled this member.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    request.ifr_ifru.ifru_flags = flags | IFF_UP;
    interface_ioctl(&socket, libc::SIOCSIFFLAGS, &mut request)
}

fn interface_request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: all of its members are integers, byte arrays or a union of such: zeroes are values of it.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let room = request.ifr_name.len() - 1;
    if name.len() > room {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (place, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *place = libc::c_char::from_ne_bytes([byte]);
    }
    Ok(request)
}

fn interface_ioctl(socket: &OwnedFd, operation: libc::c_ulong, request: &mut libc::ifreq) -> io::Result<()> {
    // SAFETY: the operations used here take an `ifreq`, which lives over the call.
    let result = unsafe { libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(socket), operation, request) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// The descriptor of an eventfd.
pub fn into_file(event: vmm_sys_util::eventfd::EventFd) -> std::fs::File {
    // SAFETY: `into_raw_fd` gives the ownership of an open descriptor away.
    unsafe { std::fs::File::from_raw_fd(std::os::fd::IntoRawFd::into_raw_fd(event)) }
}
