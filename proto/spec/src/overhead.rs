//! Memory of the node that a `vmm` uses beside its guest's RAM. The value is no estimate of the
//! usual consumption (some MiB, see the benchmarks) but a bound that ordinary work never reaches:
//! beyond it the kernel kills the VM.

use super::{
    disk::DEFAULT_QUEUES,
    disk::{Format, Source},
    share::Share,
    vm::{Nic, VmSpec},
};

const MIB: u64 = 1 << 20;

/// The process at rest (4 MiB measured as PSS beyond guest RAM), the addition for clients and a
/// console (6.5 MiB: the history and untaken output), and the kernel's allocations for the process
/// and its KVM machine: sixteen times the measured value.
const PROCESS: u64 = 64 * MIB;

/// Page tables take 1/512 of RAM each: those of the process, those of KVM (EPT or NPT), and half as much again when both hold
/// small pages beside huge ones. The dirty log takes three bits a page: 1/10,000. Together 1/128 of RAM, doubled.
const PAGE_TABLES: u64 = 64;

/// A vCPU: KVM's state of it with AMX (some 50 KiB), the thread's stacks, its bounce pages.
const VCPU: u64 = 2 * MIB;

/// A queue of a disk: 256 requests of up to 1,024 segments at 16 bytes (4 MiB), 16 threads with a stack of 128 KiB and an
/// aligned buffer of 256 KiB each (6 MiB) where there is no io_uring, and the rings.
const QUEUE: u64 = 12 * MIB;

/// A disk in QCOW format: 160 cached tables of one cluster, which is 2 MiB at most (320 MiB; 10 MiB with the usual 64 KiB,
/// and that for each of up to 16 images below an overlay), 16 MiB of staged changes, the L1 and refcount tables
/// (40 MiB at most).
const QCOW2: u64 = 384 * MIB;

/// A NIC: frames of 64 KiB on their way in and out, and the tap's queue in the kernel.
const NIC: u64 = 4 * MIB;

/// A screen: the framebuffer and the server's copy of it (36 MiB each), the host's memory for the
/// guest's pictures (128 MiB at most), the memory that a guest without a driver draws into (64 MiB
/// at most), and 32 clients with compressors and an encoded piece of the picture (2 MiB each); and
/// room for a quarter more.
const DISPLAY: u64 = 410 * MIB;

/// The channel to an agent: its worker, and 1 MiB that its client has not taken.
const AGENT: u64 = 2 * MIB;
/// A TPM: swtpm, which has some 6 MiB.
const TPM: u64 = 32 * MIB;
/// A socket device: its worker, and 256 connections with 64 KiB that their clients have not taken. A connection needs a
/// client on the host.
const VSOCK: u64 = 18 * MIB;
/// A virtio-console: its history of 1.25 MiB, and 5 MiB that clients have not taken of it.
const CONSOLE: u64 = 8 * MIB;
/// A share: the process that serves it, with its state of the files that the guest knows. The
/// process has 2.4 MiB as PSS after its start (measured); the rest is an allowance, for the default
/// maximum number of files of a share.
const SHARE: u64 = 128 * MIB;
/// A file that the guest knows: its state in the process and the kernel (a descriptor, an inode, a
/// name). An allowance.
const KNOWN_FILE: u64 = 2 << 10;

/// Processes and threads beside those of vCPUs, disks and NICs.
const TASKS: u64 = 64;
/// Threads of a disk's queue: its own, 16 of the pool or those of io_uring, whose number grows with
/// the number of processors.
const QUEUE_TASKS: u64 = 128;
/// Of a NIC.
const NIC_TASKS: u64 = 4;
/// Of a screen: graphics adapter, keyboard, tablet and server.
const DISPLAY_TASKS: u64 = 4;
/// Of a virtio-console: its worker and its server.
const CONSOLE_TASKS: u64 = 2;
/// Of a share: its process with a thread for its queues, and the thread of the `vmm` that gives it the queues; and as many again.
const SHARE_TASKS: u64 = 8;

/// Of a TPM: its worker, and swtpm.
const TPM_TASKS: u64 = 2;

/// In bytes, without the guest's RAM.
pub fn memory(spec: &VmSpec) -> u64 {
    // One whose format the spec does not say may be of either.
    let qcow2 = spec.disks.iter().filter(|disk| match &disk.source {
        Source::Path { format, .. } | Source::Pod { format, .. } => *format == Format::Qcow2,
        Source::Disk { format, .. } => *format != Some(Format::Raw),
        Source::Seed | Source::Empty => false,
    });
    [
        PROCESS,
        spec.memory_bytes / PAGE_TABLES,
        VCPU * u64::from(spec.topology.cores()),
        QUEUE * queues(spec),
        QCOW2 * count(qcow2),
        NIC * nics(&spec.nics),
        DISPLAY * count(spec.display.iter()),
        CONSOLE * u64::from(spec.virtio_console),
        AGENT * u64::from(spec.guest_agent),
        TPM * u64::from(spec.tpm),
        VSOCK * count(spec.vsock.iter()),
        spec.shares.iter().map(share).sum(),
    ]
    .into_iter()
    .fold(0, u64::saturating_add)
}

/// Processes and threads.
pub fn tasks(spec: &VmSpec) -> u64 {
    TASKS
        + u64::from(spec.topology.cores())
        + QUEUE_TASKS * queues(spec)
        + NIC_TASKS * nics(&spec.nics)
        + DISPLAY_TASKS * count(spec.display.iter())
        + CONSOLE_TASKS * u64::from(spec.virtio_console)
        + u64::from(spec.guest_agent)
        + TPM_TASKS * u64::from(spec.tpm)
        + count(spec.vsock.iter())
        + SHARE_TASKS * count(spec.shares.iter())
}

fn share(share: &Share) -> u64 {
    SHARE.max(u64::from(share.open_files).saturating_mul(KNOWN_FILE))
}

/// Queues of all disks.
fn queues(spec: &VmSpec) -> u64 {
    let cores = spec.topology.cores();
    let of_disk = spec.disks.iter().map(|disk| match disk.queues {
        0 => u64::from(cores.clamp(1, DEFAULT_QUEUES)),
        queues => u64::from(queues),
    });
    of_disk.sum()
}

/// Pairs of queues of all NICs.
fn nics(nics: &[Nic]) -> u64 {
    nics.iter().map(|nic| u64::from(nic.queues)).sum()
}

fn count<T>(items: impl Iterator<Item = T>) -> u64 {
    items.fold(0, |count, _| count + 1)
}
