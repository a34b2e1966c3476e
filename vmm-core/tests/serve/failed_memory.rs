//! SIGBUS for failed memory of the host, in a process with its filters. The kernel lets no other program send the signal with
//! `BUS_MCEERR_*` (kernel/signal.c, `do_rt_tgsigqueueinfo`), and few kernels can fail memory on request (`MADV_HWPOISON`). So a tracer
//! replaces the signal's information (ptrace(2)); the handler and everything after it are as with failed memory.

use std::{fs, os::unix::fs::FileExt};

use libc::{BUS_MCEERR_AO, BUS_MCEERR_AR};
use vmm_protocol::vmm::{ExitKind, GetStatus, State, request::Op};

use super::{booted, guest, process::Vmm, state};

/// RAM of the guests here in bytes, and where their code is.
const RAM: u64 = 128 << 20;
const CODE: u64 = 0x20_0000;

/// The kernel's `siginfo` for SIGBUS (linux/asm-generic/siginfo.h, the fields of a fault), 128 bytes.
#[repr(C)]
struct SigFault {
    signal: i32,
    error: i32,
    code: i32,
    padding: i32,
    address: u64,
    rest: [u64; 13],
}

/// The id of the process's thread with this name.
fn thread(vmm: &Vmm, name: &str) -> i32 {
    let threads = vmm.thread_statuses_when(|threads| threads.iter().any(|thread| thread["Name"] == name));
    let found = threads.iter().find(|thread| thread["Name"] == name);
    found.unwrap()["Pid"].parse().unwrap()
}

/// Where the process has the guest's RAM: the mapping in which the guest's code is.
fn ram(vmm: &Vmm) -> u64 {
    let folder = format!("/proc/{}", vmm.pid());
    let memory = fs::File::open(format!("{folder}/mem")).unwrap();
    let maps = fs::read_to_string(format!("{folder}/maps")).unwrap();
    let ranges = maps.lines().filter_map(|line| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        Some((number(start)?, number(end)?))
    });
    let code = guest::program(guest::AWAIT_FAILED_MEMORY);
    let code = &code[code.len() - guest::AWAIT_FAILED_MEMORY.len() - 5..];
    let mut found = ranges.filter(|(start, end)| {
        let mut there = vec![0; code.len()];
        end - start >= RAM && memory.read_exact_at(&mut there, start + CODE).is_ok() && there == code
    });
    found.next().expect("the guest's RAM").0
}

/// Has a thread get a SIGBUS with this code and address.
#[allow(unsafe_code)]
fn send_bus_error(vmm: &Vmm, thread: i32, code: i32, address: u64) {
    let (none, signal) = (std::ptr::null_mut::<libc::c_void>(), libc::SIGBUS);
    let done = |what: &str, result: i64| {
        assert!(result >= 0, "{what}: {}", std::io::Error::last_os_error());
    };
    // SAFETY: takes numbers only.
    done("seize", unsafe {
        libc::ptrace(libc::PTRACE_SEIZE, thread, none, none)
    });
    // SAFETY: takes numbers only.
    done("tgkill", unsafe {
        libc::syscall(libc::SYS_tgkill, vmm.pid(), thread, signal)
    });
    loop {
        let mut status = 0;
        // SAFETY: the status is written to an own variable.
        let waited = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) };
        done("waitpid", waited.into());
        assert!(libc::WIFSTOPPED(status), "{status:#x}");
        match libc::WSTOPSIG(status) {
            stopped if stopped == signal => break,
            // The signal by which the process wakes its own threads.
            // SAFETY: takes numbers only.
            other => done("cont", unsafe {
                libc::ptrace(libc::PTRACE_CONT, thread, none, i64::from(other))
            }),
        }
    }
    let mut information = SigFault {
        signal,
        error: 0,
        code,
        padding: 0,
        address,
        rest: [0; 13],
    };
    let pointer = &raw mut information;
    // SAFETY: the structure is as long as a siginfo and initialised.
    done("setsiginfo", unsafe {
        libc::ptrace(libc::PTRACE_SETSIGINFO, thread, none, pointer)
    });
    // SAFETY: takes numbers only.
    done("detach", unsafe {
        libc::ptrace(libc::PTRACE_DETACH, thread, none, i64::from(signal))
    });
}

#[test]
fn failed_memory_that_the_guest_uses_is_its_machine_check() {
    let (mut vmm, mut client) = booted(&[guest::AWAIT_FAILED_MEMORY]);
    vmm.wait_for_serial("r");
    let (vcpu, ram) = (thread(&vmm, "vcpu-0"), ram(&vmm));
    // Memory that nobody has used: nothing happens, on any thread.
    send_bus_error(&vmm, vcpu, BUS_MCEERR_AO, ram + 0x30_7000);
    send_bus_error(&vmm, thread(&vmm, "control"), BUS_MCEERR_AO, ram + 0x30_8000);
    assert_eq!(state(&client.ask(Op::GetStatus(GetStatus {}))), State::Running);
    send_bus_error(&vmm, vcpu, BUS_MCEERR_AR, ram + 0x30_5000);
    // The guest's handler prints the address, a letter for each four bits, and powers off.
    assert_eq!(client.wait_for_end().kind(), ExitKind::PowerOff);
    assert_eq!(vmm.wait().code(), Some(0));
    assert_eq!(vmm.serial_log(), "raadafaaa");
}

#[test]
fn failed_memory_that_the_process_uses_ends_it_with_a_record() {
    let (mut vmm, _client) = booted(&[guest::AWAIT_FAILED_MEMORY]);
    vmm.wait_for_serial("r");
    let ram = ram(&vmm);
    send_bus_error(&vmm, thread(&vmm, "control"), BUS_MCEERR_AR, ram + 0x30_5000);
    assert_eq!(vmm.wait().code(), Some(1));
    let record = vmm.exit_record();
    assert_eq!(record.kind(), ExitKind::VmmError);
    let begin =
        "SIGBUS in thread control: the host can't provide guest memory at 0x305000, its memory failed";
    assert!(record.message.starts_with(begin), "{}", record.message);
}
