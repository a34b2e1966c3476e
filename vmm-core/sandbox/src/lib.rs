//! Restrictions that `vmm` and `vmm-image` put on themselves: Landlock, seccomp filters, and the end of further rights.
//!
//! This crate owns the system calls that both programs need ([`lists`]), the compiler from lists to filters ([`bpf`]), Landlock without
//! rules ([`landlock`]) and the calls that take rights away ([`process`]). Each program owns the lists of its own threads, and the order
//! in which it gives rights up: `sandbox.rs` of `vmm`, `confine.rs` of `vmm-image`.
//!
//! It must never link KVM, devices or a parser of untrusted data, and never widen what a process may do.
//!
//! A reader starts with [`lists::Entry`] and [`bpf::program`]. `docs/src/security.md` has the same lists as tables, which tests compare.

#[cfg(debug_assertions)]
pub mod attempt;
pub mod bpf;
pub mod landlock;
pub mod lists;
pub mod process;
#[cfg(any(test, feature = "testing"))]
#[allow(
    clippy::missing_panics_doc,
    clippy::unwrap_used,
    reason = "a test may fail loudly"
)]
pub mod testing;
