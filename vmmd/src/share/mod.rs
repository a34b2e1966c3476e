//! Directories of the node that guests mount: what is shared, and the processes that serve it.
//!
//! Each share of a running VM is served by a `virtiofsd` of its own, which the daemon starts before the `vmm` and hands a
//! connection to, or before it plugs the share into a running machine. It runs in the VM's cgroup and in namespaces of its own (users, processes, network), with its root in the shared directory,
//! as a user that is never the node's root. It ends when its `vmm` does: that closes the connection. [`keeper`] makes it anew when it
//! ends before.

mod keeper;
mod process;

use std::sync::Arc;

use proto::model::{share::Share, vm::VmSpec};
use tokio::task::spawn_blocking;

pub use self::{
    keeper::{Keepers, Run},
    process::{Serving, Unkept, serve},
};
use crate::{
    capacity::placement::Problem,
    failure::Failure,
    files::share::{NOT_USABLE, open},
    host::Host,
};

/// What is wrong with the directories of a spec that are there, but for those that `had` shares too. One that is not there yet may come until the
/// start.
pub async fn check(host: &Arc<Host>, spec: &VmSpec, had: Option<&VmSpec>) -> Result<Vec<Problem>, Failure> {
    let had: Vec<_> = had.iter().flat_map(|had| &had.shares).cloned().collect();
    let numbered = spec.shares.iter().cloned().enumerate();
    let fresh: Vec<_> = numbered.filter(|(_, share)| !had.contains(share)).collect();
    if fresh.is_empty() {
        return Ok(Vec::new());
    }
    let host = Arc::clone(host);
    let looked = spawn_blocking(move || {
        let problem = |(index, share): (usize, Share)| {
            let failure = open(&share, &host.config.roots.shares).err()?;
            (failure.reason != NOT_USABLE).then(|| Problem::of(failure, format!("spec.shares[{index}]")))
        };
        fresh.into_iter().filter_map(problem).collect()
    });
    looked.await.map_err(|error| Failure::internal(error.to_string()))
}
