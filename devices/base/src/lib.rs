//! Shared base of devices and disk images: guest memory, threads, and the system calls of I/O.
//!
//! This crate owns the type of guest memory with its dirty bitmap ([`GuestMemory`], [`dirty`]), buffers of requests in
//! it ([`ram`]), and the only function that makes threads ([`thread`]). It also owns the system calls that no safe
//! library has ([`sys`]): vectored I/O into guest memory, io_uring, locks of images. All `unsafe` code of these is in `ram::prefetch`
//! and `sys`.
//!
//! It must never know a device, an image format, a hypervisor or a message of the protocol. Its functions are on the
//! path of each request: a function that is called for each buffer is `#[inline]` or generic.
//!
//! A reader starts with [`GuestMemory`], then [`sys::Iovecs`] and [`sys::ring`].

pub mod dirty;
pub mod ram;
pub mod sys;
pub mod thread;

/// Guest memory type of the whole project. Writes through it are marked in the bitmap that live
/// migration reads (KVM's dirty log does not see the VMM's own writes); the marking costs nothing
/// without a migration.
pub type GuestMemory = vm_memory::GuestMemoryMmap<dirty::DirtyBitmap>;

/// A test needs `what`, which this host does not have. Where continuous integration runs (`CI` is set) that fails the test; a
/// developer's machine may lack it, and the test says so and returns.
#[cfg(any(test, feature = "testing"))]
#[allow(clippy::needless_pass_by_value, reason = "given to map_err")]
pub fn lacking(what: &str, error: impl std::fmt::Display) {
    assert!(
        std::env::var_os("CI").is_none(),
        "this host has no {what}: {error}"
    );
    eprintln!("not tested, this host has no {what}: {error}");
}
