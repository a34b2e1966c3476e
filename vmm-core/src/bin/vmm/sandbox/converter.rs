//! The sandbox of `vmm image`, which reads images of unknown origin. The process keeps its descriptors and may make threads. A
//! conversion also has limits of memory, time and files.

use anyhow::{Context, Result};
use rustix::process::{Resource, Rlimit, setrlimit};
use seccompiler::apply_filter;
use tracing::warn;

use super::{
    Level, bpf, landlock,
    lists::{Entry, of_images},
    lock_down,
    seccomp::no_clone3,
};

/// Address space in bytes: dictionaries of decompressors, tables of images, and the program.
const MEMORY: u64 = 2 << 30;
/// Processor time in seconds.
const PROCESSOR_TIME: u64 = 4 * 3600;
/// Open descriptors.
const DESCRIPTORS: u64 = 32;
/// A file may be longer than the disk that it holds, by so many bytes: tables of a qcow2 image.
const BESIDES: u64 = 1 << 30;

/// A call outside the list fails with EPERM.
pub(super) const OTHERWISE: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM.cast_unsigned();

/// Sets the limits of a conversion. `longest` is how many bytes the disk may have.
pub fn limit(longest: u64) -> Result<()> {
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
    Ok(())
}

/// Gives up all paths, and all system calls that images do not need.
pub fn close_in() -> Result<()> {
    lock_down()?;
    if landlock::enforce()? == Level::None {
        warn!(
            "the host's kernel has no Landlock: the user id and seccomp alone keep files from this process"
        );
    }
    apply_filter(&no_clone3()?).context("limiting clone3")?;
    apply_filter(&bpf::program(&entries(), OTHERWISE)?).context("limiting system calls")?;
    #[cfg(debug_assertions)]
    crate::sys::attempt::run_as("image");
    Ok(())
}

/// The calls that such a process may make.
pub(super) fn entries() -> Vec<&'static Entry> {
    of_images().into_iter().flatten().collect()
}
