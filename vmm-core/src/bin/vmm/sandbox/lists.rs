//! Which system calls the threads of each kind may make, and with which arguments.
//!
//! `tests/seccomp/used.txt` has what the end-to-end suite was seen to use; a test compares it with these lists in both
//! directions. Nothing here opens a path, makes a socket, a process or executable memory, or reads another process.

use devices::thread::ThreadKind;
use libc::{c_long, c_ulong};

/// A system call that is allowed.
#[derive(Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its number.
    pub call: c_long,
    /// With which arguments.
    pub arguments: Arguments,
}

/// What is checked of the arguments: the lower 32 bits of one of them, counted from 0.
#[derive(Debug, PartialEq, Eq)]
pub enum Arguments {
    /// Nothing.
    Any,
    /// It is one of these values.
    OneOf(u8, &'static [u64]),
    /// Its lower 16 bits are one of these values: type and number of an ioctl, without the size of its argument.
    Low16(u8, &'static [u64]),
    /// None of these bits is set.
    Without(u8, u64),
}

use Arguments::{Any, Low16, OneOf, Without};

const fn any(call: c_long) -> Entry {
    Entry { call, arguments: Any }
}

const fn with(call: c_long, arguments: Arguments) -> Entry {
    Entry { call, arguments }
}

/// What this kind of thread may do. Threads of the kind `Main` have the lists of all others besides.
pub fn of(kind: ThreadKind) -> Vec<&'static [Entry]> {
    match kind {
        ThreadKind::Main => vec![EVERY, FILES, STORAGE, INTERRUPTS, MAIN],
        ThreadKind::Control => vec![EVERY, SOCKETS, CONTROL],
        ThreadKind::Vcpu => vec![VCPU, INTERRUPTS, EVERY],
        ThreadKind::Worker => vec![EVERY, FILES, STORAGE, INTERRUPTS, WORKER],
        ThreadKind::Storage => vec![EVERY, FILES, STORAGE],
        ThreadKind::Serial => vec![EVERY, FILES, SOCKETS, SERIAL],
        ThreadKind::Helper => vec![EVERY, FILES, STORAGE, INTERRUPTS, HELPER],
    }
}

const PROT_EXEC: u64 = libc::PROT_EXEC as u64;

/// The allocator, locks, clocks, the beginning and the end of a thread, log lines, and the report of a failure.
static EVERY: &[Entry] = &[
    any(libc::SYS_read),
    any(libc::SYS_write),
    any(libc::SYS_close),
    any(libc::SYS_futex),
    with(libc::SYS_mmap, Without(2, PROT_EXEC)),
    with(libc::SYS_mprotect, Without(2, PROT_EXEC)),
    any(libc::SYS_munmap),
    any(libc::SYS_mremap),
    any(libc::SYS_brk),
    with(
        libc::SYS_madvise,
        OneOf(2, &[libc::MADV_DONTNEED as u64, libc::MADV_FREE as u64]),
    ),
    any(libc::SYS_sched_yield),
    any(libc::SYS_sched_getaffinity),
    any(libc::SYS_getrandom),
    any(libc::SYS_clock_gettime),
    any(libc::SYS_gettimeofday),
    any(libc::SYS_nanosleep),
    any(libc::SYS_clock_nanosleep),
    any(libc::SYS_restart_syscall),
    any(libc::SYS_getpid),
    any(libc::SYS_gettid),
    any(libc::SYS_rt_sigprocmask),
    any(libc::SYS_rt_sigreturn),
    any(libc::SYS_sigaltstack),
    any(libc::SYS_set_robust_list),
    any(libc::SYS_rseq),
    any(libc::SYS_exit),
    any(libc::SYS_exit_group),
    // The exit record.
    any(libc::SYS_pwrite64),
    // abort(3), after which nothing runs.
    with(libc::SYS_tgkill, OneOf(2, &[libc::SIGABRT as u64])),
    with(
        libc::SYS_prctl,
        OneOf(
            0,
            &[
                libc::PR_SET_NAME as u64,
                libc::PR_GET_NAME as u64,
                // Set already; seccompiler sets it before each filter.
                libc::PR_SET_NO_NEW_PRIVS as u64,
            ],
        ),
    ),
    // Takes rights away only.
    with(
        libc::SYS_seccomp,
        OneOf(0, &[libc::SECCOMP_SET_MODE_FILTER as u64]),
    ),
    // The terminal of `vmm run` gets its modes back when the process ends, also by a panic.
    with(
        libc::SYS_ioctl,
        OneOf(1, &[libc::TCGETS, libc::TCSETS, libc::TCGETS2, libc::TCSETS2]),
    ),
    // The check of debug builds that what is closed is open, and copies of descriptors.
    with(
        libc::SYS_fcntl,
        OneOf(
            1,
            &[
                libc::F_GETFD as u64,
                libc::F_GETFL as u64,
                libc::F_DUPFD_CLOEXEC as u64,
            ],
        ),
    ),
];

/// Positioned access to files that are open.
static FILES: &[Entry] = &[
    any(libc::SYS_readv),
    any(libc::SYS_writev),
    any(libc::SYS_pread64),
    any(libc::SYS_lseek),
    any(libc::SYS_fstat),
    // std asks with an empty path. A path leads nowhere: Landlock does not forbid to look, the mode of files does.
    with(libc::SYS_statx, OneOf(2, EMPTY_PATH)),
    with(libc::SYS_newfstatat, OneOf(3, EMPTY_PATH)),
    any(libc::SYS_ftruncate),
    any(libc::SYS_fsync),
    any(libc::SYS_fdatasync),
];

/// AT_EMPTY_PATH, with what may be added to it (AT_STATX_SYNC_AS_STAT is 0).
const EMPTY_PATH: &[u64] = &[libc::AT_EMPTY_PATH as u64];

/// Requests to images.
static STORAGE: &[Entry] = &[
    any(libc::SYS_preadv),
    any(libc::SYS_preadv2),
    any(libc::SYS_pwritev),
    any(libc::SYS_pwritev2),
    any(libc::SYS_fallocate),
    any(libc::SYS_sync_file_range),
    any(libc::SYS_poll),
    any(libc::SYS_ppoll),
    any(libc::SYS_eventfd2),
    with(
        libc::SYS_ioctl,
        Low16(
            1,
            &[
                BLKSSZGET,
                BLKDISCARD,
                BLKIOOPT,
                BLKPBSZGET,
                BLKZEROOUT,
                BLKGETSIZE64,
            ],
        ),
    ),
    with(
        libc::SYS_fcntl,
        OneOf(
            1,
            &[
                libc::F_SETFL as u64,
                libc::F_OFD_SETLK as u64,
                libc::F_OFD_GETLK as u64,
            ],
        ),
    ),
    any(libc::SYS_io_uring_enter),
    any(libc::SYS_io_uring_register),
];

// linux/fs.h: _IO(0x12, n) and _IOR(0x12, n, size_t).
const BLKSSZGET: u64 = 0x1268;
const BLKGETSIZE64: u64 = 0x1272;
const BLKDISCARD: u64 = 0x1277;
const BLKIOOPT: u64 = 0x1279;
const BLKPBSZGET: u64 = 0x127b;
const BLKZEROOUT: u64 = 0x127f;

/// What a pool of threads takes, beside what its threads do.
const THREADS: c_ulong = (libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID) as c_ulong;

/// A thread, and nothing else.
const NEW_THREAD: Entry = with(libc::SYS_clone, OneOf(0, &[THREADS]));
/// What glibc tries first. A filter of all threads has it fail with ENOSYS.
const NEW_THREAD_TRIED: Entry = any(libc::SYS_clone3);

/// KVM's number of an ioctl (linux/kvm.h), with its type.
const fn kvm(number: u64) -> u64 {
    0xae00 | number
}

/// Interrupts, from whatever thread a device raises them on or the guest sets them up.
static INTERRUPTS: &[Entry] = &[
    with(
        libc::SYS_ioctl,
        Low16(
            1,
            &[
                kvm(0x61), // KVM_IRQ_LINE
                kvm(0x6a), // KVM_SET_GSI_ROUTING
                kvm(0x76), // KVM_IRQFD
                kvm(0xa5), // KVM_SIGNAL_MSI
            ],
        ),
    ),
    any(libc::SYS_eventfd2),
];

/// Runs the guest, and carries out what the guest does to registers.
static VCPU: &[Entry] = &[with(
    libc::SYS_ioctl,
    Low16(
        1,
        &[
            kvm(0x80), // KVM_RUN
            kvm(0x03), // KVM_CHECK_EXTENSION
            kvm(0x79), // KVM_IOEVENTFD, when a BAR is moved
            kvm(0x81), // KVM_GET_REGS
            kvm(0x82), // KVM_SET_REGS
            kvm(0x83), // KVM_GET_SREGS
            kvm(0x84), // KVM_SET_SREGS
            kvm(0x88), // KVM_GET_MSRS
            kvm(0x89), // KVM_SET_MSRS
            kvm(0x8c), // KVM_GET_FPU
            kvm(0x8d), // KVM_SET_FPU
            kvm(0x8e), // KVM_GET_LAPIC
            kvm(0x8f), // KVM_SET_LAPIC
            kvm(0x90), // KVM_SET_CPUID2
            kvm(0x91), // KVM_GET_CPUID2
            kvm(0x98), // KVM_GET_MP_STATE
            kvm(0x99), // KVM_SET_MP_STATE
            kvm(0x9c), // KVM_X86_SETUP_MCE
            kvm(0x9f), // KVM_GET_VCPU_EVENTS
            kvm(0xa0), // KVM_SET_VCPU_EVENTS
            kvm(0xa1), // KVM_GET_DEBUGREGS
            kvm(0xa2), // KVM_SET_DEBUGREGS, KVM_SET_TSC_KHZ
            kvm(0xa3), // KVM_GET_TSC_KHZ
            kvm(0xa4), // KVM_GET_XSAVE
            kvm(0xa5), // KVM_SET_XSAVE
            kvm(0xa6), // KVM_GET_XCRS
            kvm(0xa7), // KVM_SET_XCRS
            kvm(0xad), // KVM_KVMCLOCK_CTRL
            kvm(0xbe), // KVM_GET_NESTED_STATE
            kvm(0xbf), // KVM_SET_NESTED_STATE
            kvm(0xcc), // KVM_GET_SREGS2
            kvm(0xcd), // KVM_SET_SREGS2
            kvm(0xcf), // KVM_GET_XSAVE2
            kvm(0xe1), // KVM_SET_DEVICE_ATTR, the TSC's offset
            kvm(0xe2), // KVM_GET_DEVICE_ATTR
            kvm(0xe3), // KVM_HAS_DEVICE_ATTR
        ],
    ),
)];

/// Queues of devices.
static WORKER: &[Entry] = &[
    any(libc::SYS_epoll_create1),
    any(libc::SYS_epoll_ctl),
    any(libc::SYS_epoll_wait),
    any(libc::SYS_epoll_pwait),
    any(libc::SYS_timerfd_create),
    any(libc::SYS_timerfd_settime),
    any(libc::SYS_getrusage),
    with(
        libc::SYS_ioctl,
        Low16(1, &[TUNGETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ]),
    ),
    NEW_THREAD,
    NEW_THREAD_TRIED,
];

// linux/if_tun.h: _IOR('T', 210, unsigned int), _IOW('T', 208, unsigned int), _IOW('T', 216, int).
const TUNSETOFFLOAD: u64 = 0x54d0;
const TUNGETIFF: u64 = 0x54d2;
const TUNSETVNETHDRSZ: u64 = 0x54d8;

/// Clients of sockets that listen already.
static SOCKETS: &[Entry] = &[
    any(libc::SYS_accept4),
    any(libc::SYS_recvfrom),
    any(libc::SYS_recvmsg),
    any(libc::SYS_sendto),
    any(libc::SYS_sendmsg),
    any(libc::SYS_shutdown),
    with(libc::SYS_ioctl, OneOf(1, &[libc::FIONBIO])),
];

/// Waits for its clients.
static CONTROL: &[Entry] = &[any(libc::SYS_poll), any(libc::SYS_ppoll)];

/// Waits for its clients, and keeps the log.
static SERIAL: &[Entry] = &[
    any(libc::SYS_epoll_ctl),
    any(libc::SYS_epoll_wait),
    any(libc::SYS_epoll_pwait),
    with(libc::SYS_fcntl, OneOf(1, &[libc::F_SETFL as u64])),
];

/// Guest memory, images that are opened and closed.
static HELPER: &[Entry] = &[
    with(libc::SYS_madvise, OneOf(2, &[libc::MADV_POPULATE_WRITE as u64])),
    any(libc::SYS_io_uring_setup),
    any(libc::SYS_epoll_create1),
    any(libc::SYS_epoll_ctl),
    NEW_THREAD,
    NEW_THREAD_TRIED,
];

/// Builds the machine, and stops vCPUs.
static MAIN: &[Entry] = &[
    any(libc::SYS_io_uring_setup),
    any(libc::SYS_memfd_create),
    any(libc::SYS_mbind),
    with(libc::SYS_fcntl, OneOf(1, &[libc::F_ADD_SEALS as u64])),
    with(
        libc::SYS_madvise,
        OneOf(
            2,
            &[
                libc::MADV_HUGEPAGE as u64,
                libc::MADV_DONTDUMP as u64,
                libc::MADV_MERGEABLE as u64,
                libc::MADV_POPULATE_WRITE as u64,
            ],
        ),
    ),
    with(
        libc::SYS_ioctl,
        Low16(
            1,
            &[
                kvm(0x00), // KVM_GET_API_VERSION
                kvm(0x01), // KVM_CREATE_VM
                kvm(0x02), // KVM_GET_MSR_INDEX_LIST
                kvm(0x04), // KVM_GET_VCPU_MMAP_SIZE
                kvm(0x05), // KVM_GET_SUPPORTED_CPUID
                kvm(0x0a), // KVM_GET_MSR_FEATURE_INDEX_LIST
                kvm(0x41), // KVM_CREATE_VCPU
                kvm(0x42), // KVM_GET_DIRTY_LOG
                kvm(0x46), // KVM_SET_USER_MEMORY_REGION
                kvm(0x47), // KVM_SET_TSS_ADDR
                kvm(0x48), // KVM_SET_IDENTITY_MAP_ADDR
                kvm(0x49), // KVM_SET_USER_MEMORY_REGION2
                kvm(0x60), // KVM_CREATE_IRQCHIP
                kvm(0x62), // KVM_GET_IRQCHIP
                kvm(0x63), // KVM_SET_IRQCHIP
                kvm(0x77), // KVM_CREATE_PIT2
                kvm(0x78), // KVM_SET_BOOT_CPU_ID
                kvm(0x7b), // KVM_SET_CLOCK
                kvm(0x7c), // KVM_GET_CLOCK
                kvm(0x9f), // KVM_GET_PIT2
                kvm(0xa0), // KVM_SET_PIT2
                kvm(0xa3), // KVM_ENABLE_CAP
                kvm(0xc0), // KVM_CLEAR_DIRTY_LOG
                kvm(0xc6), // KVM_X86_SET_MSR_FILTER
                kvm(0xc7), // KVM_RESET_DIRTY_RINGS
                kvm(0xce), // KVM_GET_STATS_FD
            ],
        ),
    ),
    // The first signal for kicks is registered when vCPUs are made. An action can't be more than one of our functions.
    any(libc::SYS_rt_sigaction),
    // Kicks vCPUs: SIGRTMIN as glibc counts it.
    with(libc::SYS_tgkill, OneOf(2, &[KICK])),
];

/// The kernel's 32 and 33 are glibc's own.
const KICK: u64 = 34;

#[cfg(test)]
mod tests {
    use super::*;

    /// What the node's kernel counted while the end-to-end tests ran.
    const USED: &str = include_str!("../../../../../tests/seccomp/used.txt");

    /// A line of the file: the kind, the call, and the lower 16 bits of an ioctl's command.
    fn parse(line: &str) -> (ThreadKind, c_long, Option<u64>) {
        let mut fields = line.split_whitespace();
        let name = fields.next().unwrap();
        let kind = ThreadKind::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .unwrap();
        let call = fields.next().unwrap().parse().unwrap();
        let command = fields
            .next()
            .map(|command| u64::from_str_radix(command.trim_start_matches("0x"), 16));
        (kind, call, command.map(Result::unwrap))
    }

    fn allows(kind: ThreadKind, call: c_long, command: Option<u64>) -> bool {
        let entries = of(kind).into_iter().flatten().filter(|entry| entry.call == call);
        entries
            .into_iter()
            .any(|entry| match (&entry.arguments, command) {
                (Low16(1, values), Some(command)) => values.contains(&command),
                (OneOf(1, values), Some(command)) => values.iter().any(|value| value & 0xffff == command),
                _ => true,
            })
    }

    #[test]
    fn what_the_end_to_end_tests_used_is_allowed() {
        let lines = || {
            USED.lines()
                .filter(|line| !line.starts_with('#'))
                .map(|line| (line, parse(line)))
        };
        assert!(lines().count() > 50);
        let lacking: Vec<_> = lines()
            .filter(|(_, (kind, call, command))| !allows(*kind, *call, *command))
            .map(|(line, _)| line)
            .collect();
        assert!(lacking.is_empty(), "{lacking:#?}");
        // Said, not refused: a list has to hold for hosts and failures that no test meets.
        for kind in ThreadKind::ALL {
            let used = |call| lines().any(|(_, (of, used, _))| of == kind && used == call);
            let mut unused: Vec<_> = of(kind).into_iter().flatten().map(|entry| entry.call).collect();
            unused.retain(|call| !used(*call));
            unused.sort_unstable();
            unused.dedup();
            println!("{kind}: never used: {unused:?}");
        }
    }

    #[test]
    fn no_list_has_a_call_that_opens_or_makes_what_it_must_not() {
        let forbidden = [
            libc::SYS_open,
            libc::SYS_openat,
            libc::SYS_openat2,
            libc::SYS_creat,
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_fork,
            libc::SYS_vfork,
            libc::SYS_socket,
            libc::SYS_socketpair,
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_ptrace,
            libc::SYS_process_vm_readv,
            libc::SYS_process_vm_writev,
            libc::SYS_mount,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_bpf,
            libc::SYS_kill,
        ];
        for entry in ThreadKind::ALL.into_iter().flat_map(of).flatten() {
            assert!(!forbidden.contains(&entry.call), "{entry:?}");
            let checked = [
                libc::SYS_ioctl,
                libc::SYS_mmap,
                libc::SYS_mprotect,
                libc::SYS_prctl,
                libc::SYS_clone,
                libc::SYS_tgkill,
                libc::SYS_madvise,
                libc::SYS_fcntl,
            ];
            assert!(
                !checked.contains(&entry.call) || entry.arguments != Any,
                "{entry:?}"
            );
        }
    }
}
