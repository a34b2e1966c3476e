//! What the networks need of the daemon.

use std::sync::Arc;

use vmmd_host::{cgroup, ledger::Ledger};
use vmmd_objects::{event::Events, request::Requests};
use vmmd_store::Store;

use super::{Links, Networks};
use crate::{config::Config, registry::vms::Vms};

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Ports<'a> {
    /// What the daemon was told.
    pub config: &'a Config,
    /// Durable state.
    pub store: &'a Store,
    /// Requests with an id.
    pub requests: &'a Requests,
    /// Where what happens is told.
    pub events: &'a Events,
    /// Where helpers have their user ids from.
    pub ledger: &'a Arc<Ledger>,
    /// Where the helpers' cgroup goes.
    pub cgroups: Option<&'a cgroup::Parent>,
    /// Network interfaces of the node.
    pub links: &'a Links,
    /// The networks themselves.
    pub networks: &'a Networks,
    /// Who uses the networks.
    pub vms: &'a Vms,
}
