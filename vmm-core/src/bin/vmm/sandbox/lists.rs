//! Lists of the system calls and arguments that each kind of thread may use.
//!
//! `tests/seccomp/used.txt` records the calls that tests used. Each entry is in that file or states
//! its reason ([`Entry::unseen`]); a test checks both. No call here opens a path, makes a socket, a
//! process or executable memory, or reaches into another process.

use libc::c_long;
use vmm_base::thread::ThreadKind;
use vmm_sandbox::{
    entry,
    lists::{
        Arguments::{Low16, OneOf, ToSelf},
        EVERY, Entry, IMAGES, SPARSE, THREADS,
    },
};

/// Returns the lists of this kind of thread. The main thread's filter includes the lists of all
/// other kinds too.
pub fn of(kind: ThreadKind) -> Vec<&'static [Entry]> {
    match kind {
        ThreadKind::Main => vec![EVERY, IMAGES, SPARSE, THREADS, MAIN],
        ThreadKind::Control => vec![EVERY, CONTROL],
        ThreadKind::Vcpu => vec![VCPU, EVERY],
        // Makes the threads of the kind `Storage`.
        ThreadKind::Worker => vec![EVERY, THREADS, STORAGE, WORKER],
        ThreadKind::Delegate => vec![EVERY, DELEGATE],
        ThreadKind::Vhost => vec![EVERY, WORKER, VHOST],
        ThreadKind::Storage => vec![EVERY, STORAGE],
        ThreadKind::Serial => vec![EVERY, SERIAL],
        ThreadKind::Screen => vec![EVERY, SCREEN],
        ThreadKind::Helper => vec![EVERY, IMAGES, SPARSE, HELPER],
        // Reads the disks that go along with a machine.
        ThreadKind::Snapshot => vec![EVERY, SNAPSHOT, STORAGE, SPARSE],
    }
}

/// The name of a call that is on a list. Allocates nothing.
pub fn name_of(call: c_long) -> Option<&'static str> {
    let lists = [
        EVERY, IMAGES, SPARSE, STORAGE, THREADS, VCPU, WORKER, DELEGATE, VHOST, CONTROL, SERIAL, SCREEN,
        HELPER, SNAPSHOT, MAIN,
    ];
    let mut entries = lists.into_iter().flatten();
    entries.find(|entry| entry.call == call).map(Entry::name)
}

// linux/fs.h: _IO(0x12, 119).
const BLKDISCARD: u64 = 0x1277;

/// Requests to images, carried out by waiting for them.
static STORAGE: &[Entry] = &[
    entry!(SYS_fstat),
    entry!(SYS_pread64),
    entry!(SYS_preadv),
    entry!(SYS_pwritev2),
    entry!(SYS_ftruncate).unseen("a qcow2 image that ends within a cluster grows"),
    entry!(SYS_fallocate),
    entry!(SYS_fdatasync),
    entry!(SYS_ioctl, Low16(1, &[BLKDISCARD])),
];

/// KVM's number of an ioctl (linux/kvm.h), with its type.
const fn kvm(number: u64) -> u64 {
    0xae00 | number
}

/// Runs the guest, and emulates the guest's register accesses. Programs compare in this order, so
/// the most frequent call comes first.
static VCPU: &[Entry] = &[
    entry!(
        SYS_ioctl,
        Low16(
            1,
            &[
                kvm(0x80), // KVM_RUN
                kvm(0xa5), // KVM_SIGNAL_MSI, KVM_SET_XSAVE
                kvm(0x03), // KVM_CHECK_EXTENSION
                kvm(0x61), // KVM_IRQ_LINE
                kvm(0x79), // KVM_IOEVENTFD, when a BAR is moved
                kvm(0x81), // KVM_GET_REGS
                kvm(0x82), // KVM_SET_REGS
                kvm(0x83), // KVM_GET_SREGS
                kvm(0x84), // KVM_SET_SREGS
                kvm(0x88), // KVM_GET_MSRS
                kvm(0x89), // KVM_SET_MSRS
                kvm(0x8e), // KVM_GET_LAPIC
                kvm(0x8f), // KVM_SET_LAPIC
                kvm(0x90), // KVM_SET_CPUID2
                kvm(0x98), // KVM_GET_MP_STATE
                kvm(0x99), // KVM_SET_MP_STATE
                kvm(0x9c), // KVM_X86_SETUP_MCE
                kvm(0x9f), // KVM_GET_VCPU_EVENTS
                kvm(0xa0), // KVM_SET_VCPU_EVENTS
                kvm(0xa1), // KVM_GET_DEBUGREGS
                kvm(0xa2), // KVM_SET_DEBUGREGS, KVM_SET_TSC_KHZ
                kvm(0xa4), // KVM_GET_XSAVE
                kvm(0xa6), // KVM_GET_XCRS
                kvm(0xa7), // KVM_SET_XCRS
                kvm(0xad), // KVM_KVMCLOCK_CTRL
            ]
        )
    ),
    entry!(
        SYS_ioctl,
        Low16(
            1,
            &[
                kvm(0x7c), // KVM_GET_CLOCK
                kvm(0xa3), // KVM_GET_TSC_KHZ, KVM_ENABLE_CAP
                kvm(0xcc), // KVM_GET_SREGS2
                kvm(0xcd), // KVM_SET_SREGS2
                kvm(0xcf), // KVM_GET_XSAVE2
                kvm(0xe1), // KVM_SET_DEVICE_ATTR, the TSC's offset
                kvm(0xe2), // KVM_GET_DEVICE_ATTR
                kvm(0xe3), // KVM_HAS_DEVICE_ATTR
            ]
        )
    ),
    entry!(SYS_ioctl, Low16(1, &[kvm(0x9a)])), // KVM_NMI
    entry!(SYS_ioctl, Low16(1, &[kvm(0x9e)])) // KVM_X86_SET_MCE
        .unseen("memory of the host fails that a guest uses"),
    // KVM_SET_USER_MEMORY_REGION, KVM_GET_DIRTY_LOG, KVM_CLEAR_DIRTY_LOG
    entry!(SYS_ioctl, Low16(1, &[kvm(0x46), kvm(0x42), kvm(0xc0)]))
        .unseen("a guest moves the memory of its screen"),
    entry!(SYS_fdatasync).unseen("a guest writes a variable of its firmware"),
    // KVM_IRQFD, KVM_SET_GSI_ROUTING
    entry!(SYS_ioctl, Low16(1, &[kvm(0x76), kvm(0x6a)]))
        .unseen("a guest masks a vector whose interrupts another process raises"),
    entry!(SYS_ioctl, Low16(1, &[kvm(0xbe), kvm(0xbf)])) // KVM_GET_NESTED_STATE, KVM_SET_NESTED_STATE
        .unseen("a vCPU that is saved on a host with nested virtualization"),
];

/// Queues of devices.
static WORKER: &[Entry] = &[
    entry!(SYS_epoll_create1),
    entry!(SYS_epoll_ctl),
    entry!(SYS_epoll_wait),
    entry!(SYS_ppoll),
    entry!(SYS_timerfd_create),
    entry!(SYS_timerfd_settime),
    entry!(SYS_readv),
    entry!(SYS_writev),
    entry!(SYS_preadv2),
    entry!(SYS_io_uring_enter),
    entry!(
        SYS_io_uring_register,
        OneOf(
            1,
            &[
                IORING_UNREGISTER_FILES,
                IORING_REGISTER_ENABLE_RINGS,
                IORING_REGISTER_SYNC_CANCEL,
            ]
        )
    ),
    entry!(SYS_ioctl, Low16(1, &[kvm(0xa5)])), // KVM_SIGNAL_MSI
    entry!(SYS_ioctl, Low16(1, &[kvm(0x61)])) // KVM_IRQ_LINE
        .unseen("a guest that drives a device without MSI-X"),
    entry!(SYS_accept4).unseen("a client of a channel"),
    entry!(SYS_shutdown).unseen("a guest that ends a direction of a connection of its socket device"),
    entry!(SYS_ioctl, Low16(1, &[TUNSETOFFLOAD])),
    entry!(SYS_ioctl, Low16(1, &[TUNSETQUEUE])).unseen("a network interface with several pairs of queues"),
    entry!(
        SYS_madvise,
        OneOf(2, &[libc::MADV_HUGEPAGE as u64, libc::MADV_DONTDUMP as u64])
    )
    .unseen("a guest that was restored on demand gives memory back"),
];

/// Gives queues of a device to another process over a socket that is connected already.
static DELEGATE: &[Entry] = &[
    entry!(SYS_epoll_create1).unseen(SHARES),
    entry!(SYS_epoll_ctl).unseen(SHARES),
    entry!(SYS_epoll_wait).unseen(SHARES),
    entry!(SYS_ppoll).unseen(SHARES),
    entry!(SYS_sendmsg).unseen(SHARES),
    entry!(SYS_pipe2).unseen("a VM with a share that is saved"),
    // For an irqfd.
    entry!(SYS_eventfd2).unseen(SHARES),
    // KVM_SIGNAL_MSI, KVM_IRQ_LINE
    entry!(SYS_ioctl, Low16(1, &[kvm(0xa5), kvm(0x61)])).unseen(SHARES),
    // KVM_IRQFD, KVM_SET_GSI_ROUTING
    entry!(SYS_ioctl, Low16(1, &[kvm(0x76), kvm(0x6a)])).unseen(SHARES),
];

const SHARES: &str = "a VM with a share";

/// Gives queues of a network interface to the kernel and takes them back.
static VHOST: &[Entry] = &[
    entry!(
        SYS_ioctl,
        Low16(
            1,
            &[
                vhost(0x00), // VHOST_SET_FEATURES
                vhost(0x03), // VHOST_SET_MEM_TABLE
                vhost(0x10), // VHOST_SET_VRING_NUM
                vhost(0x11), // VHOST_SET_VRING_ADDR
                vhost(0x12), // VHOST_SET_VRING_BASE, VHOST_GET_VRING_BASE
                vhost(0x20), // VHOST_SET_VRING_KICK
                vhost(0x21), // VHOST_SET_VRING_CALL
                vhost(0x22), // VHOST_SET_VRING_ERR
                vhost(0x30), // VHOST_NET_SET_BACKEND
            ]
        )
    )
    .unseen(VHOST_NET),
    // For an irqfd.
    entry!(SYS_eventfd2).unseen(VHOST_NET),
    // KVM_IRQFD, KVM_SET_GSI_ROUTING
    entry!(SYS_ioctl, Low16(1, &[kvm(0x76), kvm(0x6a)])).unseen(VHOST_NET),
];

const VHOST_NET: &str = "a NIC with the backend VHOST";

/// The number of an ioctl of linux/vhost.h, with its type.
const fn vhost(number: u64) -> u64 {
    0xaf00 | number
}

// linux/io_uring.h.
const IORING_REGISTER_FILES: u64 = 2;
const IORING_UNREGISTER_FILES: u64 = 3;
const IORING_REGISTER_EVENTFD: u64 = 4;
const IORING_REGISTER_RESTRICTIONS: u64 = 11;
const IORING_REGISTER_ENABLE_RINGS: u64 = 12;
const IORING_REGISTER_SYNC_CANCEL: u64 = 24;

// linux/if_tun.h: _IOW('T', 208, unsigned int), _IOR('T', 210, unsigned int), _IOW('T', 216, int), _IOW('T', 217, int).
const TUNSETOFFLOAD: u64 = 0x54d0;
const TUNGETIFF: u64 = 0x54d2;
const TUNSETVNETHDRSZ: u64 = 0x54d8;
const TUNSETQUEUE: u64 = 0x54d9;

/// Waits for its clients, whose socket listens already.
static CONTROL: &[Entry] = &[
    entry!(SYS_accept4),
    entry!(SYS_recvmsg),
    entry!(SYS_sendmsg),
    entry!(SYS_ppoll),
    entry!(SYS_ioctl, OneOf(1, &[libc::FIONBIO])),
];

/// Waits for its clients, whose socket listens already, and keeps the log.
static SERIAL: &[Entry] = &[
    entry!(SYS_accept4),
    entry!(SYS_epoll_ctl),
    entry!(SYS_epoll_wait),
    entry!(SYS_pread64),
    entry!(SYS_ftruncate),
];

/// Waits for its clients, whose sockets listen already.
static SCREEN: &[Entry] = &[
    entry!(SYS_accept4).unseen(CLIENTS),
    entry!(SYS_epoll_ctl).unseen(CLIENTS),
    entry!(SYS_epoll_wait).unseen(CLIENTS),
    // KVM_SIGNAL_MSI, KVM_IRQ_LINE
    entry!(SYS_ioctl, Low16(1, &[kvm(0xa5), kvm(0x61)])).unseen("a client asks for another size"),
    // KVM_GET_DIRTY_LOG, KVM_CLEAR_DIRTY_LOG
    entry!(SYS_ioctl, Low16(1, &[kvm(0x42), kvm(0xc0)])).unseen(CLIENTS),
];

const CLIENTS: &str = "a client looks at the screen";

/// Guest memory. Helper threads also have `IMAGES`, because an image may need writes before it is
/// closed.
static HELPER: &[Entry] = &[entry!(SYS_madvise, OneOf(2, &[libc::MADV_POPULATE_WRITE as u64]))];

/// Writes a snapshot of a machine that runs.
static SNAPSHOT: &[Entry] = &[
    entry!(SYS_pread64),
    entry!(SYS_fsync),
    entry!(SYS_ioctl, Low16(1, &[kvm(0x42), kvm(0xc0)])), // KVM_GET_DIRTY_LOG, KVM_CLEAR_DIRTY_LOG
];

/// Builds the machine, and stops vCPUs.
static MAIN: &[Entry] = &[
    entry!(SYS_epoll_create1),
    entry!(SYS_epoll_ctl),
    entry!(SYS_eventfd2),
    entry!(SYS_fsync),
    entry!(SYS_io_uring_setup),
    entry!(
        SYS_io_uring_register,
        OneOf(
            1,
            &[
                IORING_REGISTER_FILES,
                IORING_REGISTER_EVENTFD,
                IORING_REGISTER_RESTRICTIONS,
            ]
        )
    ),
    entry!(SYS_memfd_create),
    entry!(SYS_ppoll).unseen("several clients of a socket device whose guest has no driver"),
    entry!(SYS_mbind),
    entry!(SYS_fcntl, OneOf(1, &[libc::F_ADD_SEALS as u64])),
    entry!(
        SYS_madvise,
        OneOf(
            2,
            &[
                libc::MADV_HUGEPAGE as u64,
                libc::MADV_DONTDUMP as u64,
                libc::MADV_MERGEABLE as u64,
                libc::MADV_POPULATE_WRITE as u64,
            ]
        )
    ),
    entry!(SYS_ioctl, Low16(1, &[TUNGETIFF, TUNSETVNETHDRSZ])),
    // VHOST_GET_FEATURES, VHOST_SET_OWNER
    entry!(SYS_ioctl, Low16(1, &[vhost(0x00), vhost(0x01)])).unseen(VHOST_NET),
    entry!(
        SYS_ioctl,
        Low16(
            1,
            &[
                kvm(0x00), // KVM_GET_API_VERSION
                kvm(0x01), // KVM_CREATE_VM
                kvm(0x02), // KVM_GET_MSR_INDEX_LIST
                kvm(0x03), // KVM_CHECK_EXTENSION
                kvm(0x04), // KVM_GET_VCPU_MMAP_SIZE
                kvm(0x05), // KVM_GET_SUPPORTED_CPUID
                kvm(0x41), // KVM_CREATE_VCPU
                kvm(0x46), // KVM_SET_USER_MEMORY_REGION
                kvm(0x47), // KVM_SET_TSS_ADDR
                kvm(0x48), // KVM_SET_IDENTITY_MAP_ADDR
                kvm(0x60), // KVM_CREATE_IRQCHIP
                kvm(0x61), // KVM_IRQ_LINE
                kvm(0x62), // KVM_GET_IRQCHIP
                kvm(0x63), // KVM_SET_IRQCHIP
                kvm(0x76), // KVM_IRQFD
                kvm(0x7b), // KVM_SET_CLOCK
                kvm(0x7c), // KVM_GET_CLOCK
                kvm(0xa3), // KVM_ENABLE_CAP
                kvm(0xce), // KVM_GET_STATS_FD
            ]
        )
    ),
    // KVM_CREATE_PIT2, KVM_GET_PIT2, KVM_SET_PIT2
    entry!(SYS_ioctl, Low16(1, &[kvm(0x77), kvm(0x9f), kvm(0xa0)]))
        .unseen("a machine with a PIT in the kernel"),
    entry!(SYS_ioctl, Low16(1, &[kvm(0x88)])) // KVM_GET_MSRS of the host
        .unseen("a guest of an Intel processor with IA32_ARCH_CAPABILITIES"),
    entry!(SYS_ioctl, Low16(1, &[kvm(0xc1)])) // KVM_GET_SUPPORTED_HV_CPUID
        .unseen("a guest that expects Hyper-V"),
    entry!(SYS_ioctl, Low16(1, &[kvm(0x42)])), // KVM_GET_DIRTY_LOG
    entry!(SYS_ioctl, Low16(1, &[kvm(0xc0)])) // KVM_CLEAR_DIRTY_LOG
        .unseen("pages that a guest has changed just before it is paused for a snapshot"),
    // The first signal for kicks is registered when vCPUs are created. An action can only be one of
    // this program's functions.
    entry!(SYS_rt_sigaction),
    // Kicks vCPUs: SIGRTMIN as glibc counts it.
    entry!(SYS_tgkill, ToSelf(2, &[KICK])),
];

/// The kernel's 32 and 33 are glibc's own.
const KICK: u64 = 34;
