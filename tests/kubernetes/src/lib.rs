//! A Kubernetes control plane made of Debian's programs (`build.sh`), and machines with a real kubelet, for the tests of
//! `vmmd-kube`. All of it runs as the test's processes, in a temporary folder.
#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a test may fail loudly"
)]

pub mod api;
mod certificates;
pub mod cluster;
pub mod machine;
pub mod program;

use std::time::{Duration, Instant};

use tokio::time::sleep;

/// Polls `found` until it returns a value. The awaited states depend on many programs without a
/// common event, so polling is required. Fails after `patience` with the last error of `found`.
pub async fn eventually<T>(
    what: &str,
    patience: Duration,
    mut found: impl AsyncFnMut() -> Result<T, String>,
) -> T {
    let end = Instant::now() + patience;
    loop {
        match found().await {
            Ok(found) => return found,
            Err(lacks) if Instant::now() >= end => panic!("{what}: not within {patience:?}: {lacks}"),
            Err(_) => sleep(Duration::from_millis(200)).await,
        }
    }
}
