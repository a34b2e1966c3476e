//! System calls as entries with their arguments, and the lists that several programs share. No call here opens a path, makes a
//! socket, a process or executable memory, or reaches into another process.

use libc::{c_long, c_ulong};

/// A system call that is allowed.
#[derive(Debug, PartialEq, Eq)]
pub struct Entry {
    /// The name of its constant in libc.
    symbol: &'static str,
    /// Its number.
    pub call: c_long,
    /// With which arguments.
    pub arguments: Arguments,
    /// Why it is allowed although no test was seen to use it; `None` when one was.
    pub unseen: Option<&'static str>,
}

impl Entry {
    /// An entry for the call with this constant and this number; [`entry!`](crate::entry) takes both from one name.
    pub const fn new(symbol: &'static str, call: c_long, arguments: Arguments) -> Self {
        Self {
            symbol,
            call,
            arguments,
            unseen: None,
        }
    }

    /// As the kernel calls it.
    pub fn name(&self) -> &'static str {
        self.symbol.trim_start_matches("SYS_")
    }

    /// States why the call is allowed without a test that uses it.
    #[must_use]
    pub const fn unseen(self, why: &'static str) -> Self {
        Self {
            unseen: Some(why),
            ..self
        }
    }
}

/// Check of the arguments: compares the lower 32 bits of one of them, counted from 0. The kernel
/// uses only these bits of the checked arguments, except for the flags of mmap(2) and mprotect(2),
/// whose upper bits have no meaning.
#[derive(Debug, PartialEq, Eq)]
pub enum Arguments {
    /// Nothing.
    Any,
    /// It is one of these values.
    OneOf(u8, &'static [u64]),
    /// It is one of these values, and the first argument is the id of this process.
    ToSelf(u8, &'static [u64]),
    /// Its lower 16 bits are one of these values: type and number of an ioctl, without the size of its argument.
    Low16(u8, &'static [u64]),
    /// All of these bits are clear.
    Without(u8, u64),
}

use Arguments::{Low16, OneOf, ToSelf, Without};

/// An [`Entry`] for a call by the name of its constant in libc, with any arguments or with a check of them.
#[macro_export]
macro_rules! entry {
    ($call:ident) => {
        $crate::entry!($call, $crate::lists::Arguments::Any)
    };
    ($call:ident, $arguments:expr) => {
        $crate::lists::Entry::new(stringify!($call), ::libc::$call, $arguments)
    };
}

const PROT_EXEC: u64 = libc::PROT_EXEC as u64;

/// The allocator, locks, clocks, the beginning and the end of a thread, log lines, and the report of a failure.
pub static EVERY: &[Entry] = &[
    entry!(SYS_read),
    entry!(SYS_write),
    entry!(SYS_close),
    entry!(SYS_futex),
    entry!(SYS_mmap, Without(2, PROT_EXEC)),
    entry!(SYS_mprotect, Without(2, PROT_EXEC)),
    entry!(SYS_munmap),
    entry!(SYS_mremap),
    entry!(SYS_brk),
    entry!(SYS_madvise, OneOf(2, &[libc::MADV_DONTNEED as u64])),
    entry!(SYS_sched_yield),
    entry!(SYS_sched_getaffinity),
    entry!(SYS_getrandom),
    entry!(SYS_clock_gettime),
    entry!(SYS_restart_syscall).unseen("a wait with a time limit goes on after SIGSTOP and SIGCONT"),
    entry!(SYS_getpid),
    entry!(SYS_gettid),
    entry!(SYS_rt_sigprocmask),
    entry!(SYS_rt_sigreturn),
    entry!(SYS_sigaltstack),
    entry!(SYS_exit),
    entry!(SYS_exit_group),
    // The exit record.
    entry!(SYS_pwrite64),
    // The record of a fatal signal names the thread.
    entry!(SYS_prctl, OneOf(0, &[libc::PR_GET_NAME as u64])),
    entry!(SYS_tgkill, ToSelf(2, &[libc::SIGABRT as u64])).unseen("abort(3), after which nothing runs"),
    // Set already; seccompiler sets it before each filter.
    entry!(SYS_prctl, OneOf(0, &[libc::PR_SET_NO_NEW_PRIVS as u64])),
    // Takes rights away only.
    entry!(SYS_seccomp, OneOf(0, &[libc::SECCOMP_SET_MODE_FILTER as u64])),
    // The terminal of `vmm run` gets its modes back when the process ends, also by a panic.
    entry!(SYS_ioctl, OneOf(1, &[libc::TCGETS, libc::TCGETS2, libc::TCSETS2])),
    // The check of debug builds that a descriptor is open before it is closed.
    entry!(SYS_fcntl, OneOf(1, &[libc::F_GETFD as u64])),
];

/// Images that are opened and closed.
pub static IMAGES: &[Entry] = &[
    entry!(SYS_fstat),
    // How buffers of O_DIRECT have to be aligned. Landlock does not forbid to ask with a path; an empty one leads nowhere, but
    // no filter sees it.
    entry!(SYS_statx, OneOf(2, &[libc::AT_EMPTY_PATH as u64])),
    entry!(SYS_pread64),
    entry!(SYS_ftruncate),
    entry!(SYS_fallocate),
    entry!(SYS_fdatasync),
    entry!(SYS_preadv).unseen(TABLES),
    entry!(SYS_pwritev2).unseen(TABLES),
    entry!(
        SYS_fcntl,
        OneOf(
            1,
            &[
                libc::F_GETFL as u64,
                libc::F_SETFL as u64,
                libc::F_DUPFD_CLOEXEC as u64,
                libc::F_OFD_SETLK as u64,
            ]
        )
    ),
    entry!(
        SYS_ioctl,
        Low16(1, &[BLKSSZGET, BLKIOOPT, BLKPBSZGET, BLKGETSIZE64])
    ),
];

const TABLES: &str = "tables of a qcow2 image that is past the page cache";

// linux/fs.h: _IO(0x12, n) and _IOR(0x12, n, size_t).
const BLKSSZGET: u64 = 0x1268;
const BLKGETSIZE64: u64 = 0x1272;
const BLKIOOPT: u64 = 0x1279;
const BLKPBSZGET: u64 = 0x127b;

const FLAGS: c_ulong = (libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID) as c_ulong;

/// Creation of a thread but of no process, and the calls of a new thread before it has its own
/// filter.
pub static THREADS: &[Entry] = &[
    entry!(SYS_clone, OneOf(0, &[FLAGS])),
    // glibc tries this call first. A filter for all threads makes the call fail with ENOSYS.
    entry!(SYS_clone3),
    entry!(SYS_set_robust_list),
    entry!(SYS_rseq),
    entry!(SYS_prctl, OneOf(0, &[libc::PR_SET_NAME as u64])),
];

/// Reads a snapshot: what of it is data, and how long it is.
pub static SPARSE: &[Entry] = &[entry!(
    SYS_lseek,
    OneOf(
        2,
        &[
            libc::SEEK_END as u64,
            libc::SEEK_DATA as u64,
            libc::SEEK_HOLE as u64,
        ]
    )
)];
