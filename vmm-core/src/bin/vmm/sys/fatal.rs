//! Signals that end the process: each leaves an exit record. Failed memory of the host that a guest used is the guest's affair
//! ([`machine_check`]).
//!
//! The handlers may interrupt anything, so that they allocate nothing and take no lock: they format into a buffer on
//! the stack and make three system calls (read the thread's name, write the record, end the process).

use std::ffi::{c_int, c_void};

use vmm_core::{kvm::machine_check, memory::locate};

use crate::{exit_code, exit_record, exit_record::Text, sandbox::lists};

/// `si_code` of a SIGSYS that a seccomp filter sent (linux/asm-generic/siginfo.h).
const SYS_SECCOMP: c_int = 1;

/// The first fields of the kernel's `siginfo` for SIGSYS (linux/asm-generic/siginfo.h, `_sigsys`).
#[repr(C)]
struct SigSys {
    signal: c_int,
    error: c_int,
    code: c_int,
    padding: c_int,
    address: *mut c_void,
    call: c_int,
    architecture: libc::c_uint,
}

/// Has SIGBUS, SIGSEGV, SIGILL, SIGFPE, SIGABRT and SIGSYS write an exit record and end the process.
///
/// A signal in the handler itself ends the process without one.
pub fn install() -> std::io::Result<()> {
    for signal in [
        libc::SIGBUS,
        libc::SIGSEGV,
        libc::SIGILL,
        libc::SIGFPE,
        libc::SIGABRT,
        libc::SIGSYS,
    ] {
        // SAFETY: all members are integers, an optional function or a set of integers: zeroes are values of them.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handle as extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) as usize;
        // On the alternative stack that std makes for each thread: the ordinary one may have overflowed.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // After a SIGBUS the process may continue, and get another one.
        if signal != libc::SIGBUS {
            action.sa_flags |= libc::SA_RESETHAND;
        }
        // SAFETY: the action is initialised. The handler has the signature that SA_SIGINFO
        // requires, and does only work that a signal handler may do.
        if unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok(())
}

extern "C" fn handle(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    if signal == libc::SIGBUS && is_the_guests(info) {
        return;
    }
    let mut text = Text::default();
    if signal == libc::SIGSYS {
        describe_call(&mut text, info, context);
    } else {
        describe_fault(&mut text, signal, info, context);
    }
    exit_record::write_failure(&text);
    // SAFETY: ends the process at once; no destructor and no exit handler runs.
    unsafe { libc::_exit(exit_code::ERROR) };
}

/// Whether the guest deals with it.
fn is_the_guests(info: *const libc::siginfo_t) -> bool {
    // SAFETY: the kernel passes a siginfo, which lives as long as the handler runs.
    let info = unsafe { &*info };
    // SAFETY: for this signal it has an address.
    let address = unsafe { info.si_addr() } as usize;
    machine_check::note(info.si_code, locate::guest_address(address))
}

fn describe_call(text: &mut Text, info: *const libc::siginfo_t, context: *const c_void) {
    // SAFETY: the kernel passes a siginfo of 128 bytes, which for SIGSYS has the fields of `SigSys`.
    let info = unsafe { &*info.cast::<SigSys>() };
    if info.code != SYS_SECCOMP {
        text.push("SIGSYS of another process");
        return;
    }
    text.push("seccomp: thread ");
    push_thread(text);
    text.push(" made system call ");
    text.push_number(u64::from(info.call.unsigned_abs()));
    text.push(" (");
    text.push(name(info.call.into()));
    text.push(") with");
    for register in [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX] {
        text.push(" ");
        text.push_hex(self::register(context, register));
    }
}

fn describe_fault(text: &mut Text, signal: c_int, info: *const libc::siginfo_t, context: *const c_void) {
    text.push(match signal {
        libc::SIGBUS => "SIGBUS",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGILL => "SIGILL",
        libc::SIGFPE => "SIGFPE",
        _ => "SIGABRT",
    });
    text.push(" in thread ");
    push_thread(text);
    if signal == libc::SIGABRT {
        return;
    }
    // SAFETY: the kernel passes a siginfo, which lives as long as the handler runs.
    let info = unsafe { &*info };
    // SAFETY: for these signals it has an address.
    let address = unsafe { info.si_addr() } as usize;
    match locate::guest_address(address) {
        Some(guest) => {
            text.push(": the host can't provide guest memory at ");
            text.push_hex(guest);
            if signal == libc::SIGBUS && matches!(info.si_code, libc::BUS_MCEERR_AR | libc::BUS_MCEERR_AO) {
                text.push(", its memory failed");
            }
        }
        None => {
            text.push(" at address ");
            text.push_hex(address as u64);
            if signal == libc::SIGBUS {
                text.push(", of a mapped file or the vmm's own memory");
            }
        }
    }
    text.push(", instruction ");
    text.push_hex(register(context, libc::REG_RIP));
}

/// The name of the thread that this runs on.
fn push_thread(text: &mut Text) {
    // TASK_COMM_LEN, with the NUL.
    let mut name = [0_u8; 16];
    // SAFETY: PR_GET_NAME writes at most 16 bytes through the pointer.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    let length = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    text.push(str::from_utf8(name.get(..length).unwrap_or_default()).unwrap_or("?"));
}

/// A general register of the interrupted thread.
fn register(context: *const c_void, register: c_int) -> u64 {
    // SAFETY: the kernel passes a ucontext to a handler with SA_SIGINFO.
    let context = unsafe { &*context.cast::<libc::ucontext_t>() };
    let index = usize::try_from(register).unwrap_or(usize::MAX);
    let value = context.uc_mcontext.gregs.get(index).copied();
    value.unwrap_or_default().cast_unsigned()
}

/// Names of calls that are useful in a record: calls typical of an attacker in control of the
/// process, and calls on lists.
fn name(call: libc::c_long) -> &'static str {
    match call {
        libc::SYS_open => "open",
        libc::SYS_openat => "openat",
        libc::SYS_openat2 => "openat2",
        libc::SYS_socket => "socket",
        libc::SYS_connect => "connect",
        libc::SYS_bind => "bind",
        libc::SYS_fork => "fork",
        libc::SYS_vfork => "vfork",
        libc::SYS_execve => "execve",
        libc::SYS_execveat => "execveat",
        libc::SYS_ptrace => "ptrace",
        libc::SYS_process_vm_readv => "process_vm_readv",
        libc::SYS_process_vm_writev => "process_vm_writev",
        libc::SYS_kill => "kill",
        libc::SYS_mount => "mount",
        libc::SYS_unshare => "unshare",
        libc::SYS_setns => "setns",
        libc::SYS_bpf => "bpf",
        libc::SYS_newfstatat => "newfstatat",
        libc::SYS_statx => "statx",
        libc::SYS_userfaultfd => "userfaultfd",
        libc::SYS_keyctl => "keyctl",
        call => lists::name_of(call).unwrap_or("on no list"),
    }
}
