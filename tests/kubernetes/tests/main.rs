//! `vmmd-kube` under a real control plane. All tests need root, as the daemon does; none needs KVM.
#![allow(clippy::unwrap_used, reason = "a test may fail loudly")]

mod pods;
