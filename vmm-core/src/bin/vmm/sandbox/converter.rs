//! What a process keeps that converts an image: the descriptors that it has, memory and time within bounds. It may have threads.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use rustix::process::{Resource, Rlimit, setrlimit};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch, apply_filter};
use tracing::warn;

use super::{Level, landlock, lock_down};

/// Address space in bytes: dictionaries of decompressors, tables of images, and the program.
const MEMORY: u64 = 2 << 30;
/// Processor time in seconds.
const PROCESSOR_TIME: u64 = 4 * 3600;
/// Open descriptors.
const DESCRIPTORS: u64 = 32;
/// A file may be longer than the disk that it holds, by so many bytes: tables of a qcow2 image.
const BESIDES: u64 = 1 << 30;

/// Calls that no conversion needs and that would be of use to somebody else.
const REFUSED: [libc::c_long; 33] = [
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_io_uring_setup,
    libc::SYS_bpf,
    libc::SYS_userfaultfd,
    libc::SYS_perf_event_open,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_open_by_handle_at,
    libc::SYS_ioctl,
    libc::SYS_shmget,
    libc::SYS_mq_open,
];

/// Gives up what a conversion does not need. `longest` is how many bytes the disk may have.
pub fn close_in(longest: u64) -> Result<()> {
    lock_down()?;
    for (resource, most) in [
        (Resource::As, MEMORY),
        (Resource::Cpu, PROCESSOR_TIME),
        (Resource::Nofile, DESCRIPTORS),
        (Resource::Fsize, longest.saturating_add(BESIDES)),
    ] {
        let limit = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        setrlimit(resource, limit).with_context(|| format!("limiting {resource:?}"))?;
    }
    if landlock::enforce()? == Level::None {
        warn!("the host's kernel has no Landlock: the user id alone keeps files from this process");
    }
    let filter = SeccompFilter::new(
        REFUSED
            .iter()
            .map(|call| (*call, Vec::new()))
            .collect::<BTreeMap<_, _>>(),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM.cast_unsigned()),
        TargetArch::x86_64,
    )?;
    let program = BpfProgram::try_from(filter)?;
    apply_filter(&program).context("limiting system calls")
}
