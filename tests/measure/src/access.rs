//! `measure access`: touches memory for the first time, then reads it at random, one word of a random page after the other.
//! It runs in a guest, and on a host with memory that is backed as a guest's can be.

#![allow(unsafe_code)]

use std::{io, time::Duration};

use anyhow::{Context, Result};
use rustix::{
    fs::{MemfdFlags, ftruncate, memfd_create},
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous},
    param::page_size,
    time::{ClockId, clock_gettime},
};
use serde::Serialize;

use crate::memory;

/// Accesses in a round, and rounds; the median round counts.
const ACCESSES: u32 = 1 << 18;
const ROUNDS: usize = 9;

/// Backing of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Backing {
    /// Private anonymous memory with MADV_HUGEPAGE.
    Private,
    /// A memfd with MADV_HUGEPAGE, subject to the host's `shmem_enabled`.
    Shared,
    /// A memfd whose pages are collapsed into huge ones with MADV_COLLAPSE once they are there.
    Collapsed,
}

/// Costs in CPU time of this thread.
#[derive(Serialize)]
pub struct Access {
    /// The first write to each page.
    touch_us: u64,
    /// MADV_COLLAPSE.
    collapse_us: u64,
    /// Page faults of the process meanwhile.
    faults: u64,
    /// How much of it then is in huge pages, when it is at least as much as the least that a guest has.
    huge_kib: u64,
    /// A read of a word in a random page.
    read_ns: f64,
}

/// Does it with that many MiB.
pub fn run(mib: usize, backing: Backing) -> Result<Access> {
    let length = mib << 20;
    let start = map(length, backing)?;
    let (begin, before) = (cpu_time(), faults()?);
    for offset in (0..length).step_by(page_size()) {
        // SAFETY: the address is inside a writable mapping of `length` bytes, which no other code
        // uses and which is never unmapped.
        unsafe { start.wrapping_add(offset).write_volatile(1) };
    }
    let touched = cpu_time();
    if backing == Backing::Collapsed {
        // SAFETY: the call changes the pages behind the mapping, but not their contents.
        if unsafe { libc::madvise(start.cast(), length, libc::MADV_COLLAPSE) } != 0 {
            // The host has not that many huge pages: the rest stays as it is.
            let error = io::Error::last_os_error();
            if !matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EAGAIN)) {
                return Err(error).context("MADV_COLLAPSE");
            }
        }
    }
    let collapsed = cpu_time();
    let faults = faults()? - before;
    let huge_kib = memory::of(std::process::id())?.guest_huge_kib;
    let mut rounds: Vec<Duration> = (0..ROUNDS).map(|_| read(start, length)).collect();
    rounds.sort();
    Ok(Access {
        touch_us: micros(touched - begin),
        collapse_us: micros(collapsed - touched),
        faults,
        huge_kib,
        read_ns: rounds[ROUNDS / 2].as_secs_f64() * 1e9 / f64::from(ACCESSES),
    })
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// A round of reads, each of whose addresses depends on the one before.
fn read(start: *mut u8, length: usize) -> Duration {
    let pages = (length / page_size()) as u64;
    let begin = cpu_time();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..ACCESSES {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // The page by the upper bits, the word in it by the lower ones.
        let page = ((state >> 32) * pages) >> 32;
        let offset = page * page_size() as u64 + (state & (page_size() as u64 - 8));
        let word = start
            .wrapping_add(usize::try_from(offset).unwrap_or(0))
            .cast::<u64>();
        // SAFETY: aligned and inside a mapping of `length` bytes that is never unmapped.
        state ^= unsafe { word.read_volatile() };
    }
    cpu_time() - begin
}

fn map(length: usize, backing: Backing) -> io::Result<*mut u8> {
    const HUGE: usize = 2 << 20;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let none = std::ptr::null_mut();
    // SAFETY: a new mapping at an address of the kernel's choice.
    let room = unsafe {
        mmap_anonymous(
            none,
            length + HUGE,
            protection,
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    }?;
    let skip = (room as usize).wrapping_neg() % HUGE;
    let start = room.cast::<u8>().wrapping_add(skip);
    if backing != Backing::Private {
        let file = memfd_create("access", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, length as u64)?;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the call replaces a part of the mapping above, which no other code uses.
        unsafe { mmap(start.cast(), length, protection, flags, &file, 0) }?;
    }
    // A kernel without transparent huge pages refuses this; small pages do.
    // SAFETY: advice about a mapping of ours that changes nothing in it.
    let _ = unsafe { madvise(start.cast(), length, Advice::LinuxHugepage) };
    Ok(start)
}

fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// Page faults of this process that needed no file (proc(5), stat).
fn faults() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/self/stat").context("read stat")?;
    // Behind the name, which ends with the last parenthesis: state, six ids, flags, minflt.
    let rest = text.rsplit(')').next().unwrap_or_default();
    rest.split_whitespace()
        .nth(7)
        .and_then(|value| value.parse().ok())
        .context("minflt in stat")
}
