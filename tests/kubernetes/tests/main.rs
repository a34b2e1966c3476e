//! `vmmd-kube` under a real control plane. All tests need root, as the daemon does; none needs KVM.
#![allow(clippy::unwrap_used, reason = "a test may fail loudly")]

#[cfg(feature = "nightly")]
mod faults;
#[cfg(feature = "nightly")]
mod migration;
#[cfg(feature = "nightly")]
mod placement;
mod pods;
mod smoke;
#[cfg(feature = "nightly")]
mod sources;
#[cfg(feature = "nightly")]
mod verbs;
