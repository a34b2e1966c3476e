//! What all VMs of the daemon share.

use std::{path::PathBuf, sync::Arc};

use tokio_util::sync::CancellationToken;

use crate::{cgroup, config::Config, ledger::Ledger, network::Links, store::Store, vm::table::Table};

/// The node as the VM actors and the services see it.
#[derive(Debug)]
pub struct Host {
    /// What the daemon was told.
    pub config: Config,
    /// The `vmm` program.
    pub vmm: PathBuf,
    /// Durable state.
    pub store: Store,
    /// What living VMs hold.
    pub ledger: Arc<Ledger>,
    /// Where their cgroups go.
    pub cgroups: Option<cgroup::Parent>,
    /// Network interfaces.
    pub links: Links,
    /// All VMs.
    pub table: Table,
    /// Of the running kernel.
    pub boot_id: String,
    /// Cancelled when the daemon ends.
    pub stopping: CancellationToken,
}
