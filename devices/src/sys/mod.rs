//! System calls that no safe library has: vectored I/O straight into guest memory, open-file-description locks, taps, vhost.
//!
//! The functions here are safe to call with any arguments; everything unsafe of block and net devices is in here.
#![allow(unsafe_code)]

pub mod blockdev;
#[cfg(test)]
pub mod cachestat;
pub mod event;
pub mod file;
mod iovecs;
pub mod lock;
pub mod ring;
pub mod tap;
pub mod vhost;

pub use iovecs::Iovecs;

use crate::ram::GuestSlice;

/// Prefetches the cache line at the beginning of a slice of guest memory for writing, in the
/// background.
#[inline]
pub fn fetch_to_change(slice: &GuestSlice<'_>) {
    #[cfg(target_arch = "x86_64")]
    {
        let place = slice.ptr_guard_mut();
        // The intrinsic asks for a copy that may only be read, unless it is compiled for processors that all know this one.
        // SAFETY: it is a hint, which reads and writes nothing and cannot fault, wherever it points; a processor that does
        // not know it does nothing (Intel SDM 2B, PREFETCHW).
        unsafe {
            std::arch::asm!("prefetchw [{}]", in(reg) place.as_ptr(), options(nostack, preserves_flags, readonly));
        }
    }
}

/// The same, to be read.
#[inline]
pub fn fetch_to_read(slice: &GuestSlice<'_>) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let place = slice.ptr_guard();
        // SAFETY: it is a hint, which reads and writes nothing and cannot fault, wherever it points.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(place.as_ptr().cast()) };
    }
}
