//! Hints to the processor about guest memory that is read or written soon.
#![allow(unsafe_code)]

use super::GuestSlice;

/// Prefetches the cache line at the beginning of a slice of guest memory for writing, in the
/// background.
#[inline]
pub fn to_change(slice: &GuestSlice<'_>) {
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
pub fn to_read(slice: &GuestSlice<'_>) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let place = slice.ptr_guard();
        // SAFETY: it is a hint, which reads and writes nothing and cannot fault, wherever it points.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(place.as_ptr().cast()) };
    }
}
