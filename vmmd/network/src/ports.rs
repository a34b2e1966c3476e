//! The parts of the daemon that the networks work with.

use std::{fmt::Debug, path::Path, sync::Arc};

use uuid::Uuid;
use vmmd_api::v1;
use vmmd_host::{cgroup, failure::Failure, ledger::Ledger};
use vmmd_objects::{event::Events, request::Requests};
use vmmd_store::Store;

use super::{Links, Networks, PodNetwork};

/// The VMs of the node.
pub trait Users: Debug + Sync {
    /// The present state of each VM.
    fn vms(&self) -> Vec<Arc<v1::Vm>>;
    /// The present state of the VM with this UUID.
    fn vm(&self, uid: Uuid) -> Option<Arc<v1::Vm>>;
}

/// The pods of the node whose launchers are connected.
pub trait Pods: Debug + Sync {
    /// The network of the pod that has a VM. Refused as `POD_NOT_CONNECTED` while the launcher of the pod is not connected.
    fn network(&self, vm: Uuid) -> Result<PodNetwork, Failure>;
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Ports<'a> {
    /// The daemon's runtime folder.
    pub run_dir: &'a Path,
    /// The program `vmmd-netd`.
    pub netd: &'a Path,
    /// Durable state.
    pub store: &'a Store,
    /// Requests with an id.
    pub requests: &'a Requests,
    /// History of events.
    pub events: &'a Events,
    /// Source of the helpers' user ids.
    pub ledger: &'a Arc<Ledger>,
    /// Parent of the helpers' cgroup.
    pub cgroups: Option<&'a cgroup::Parent>,
    /// Ports of the node that VMs may publish, as "80" and "8000-8010"; all when empty.
    pub publishable: &'a [String],
    /// Subnets that may be behind guests, as "10.64.0.0/10"; all when empty.
    pub routable: &'a [String],
    /// Addresses that NICs may have as floating addresses, as "192.0.2.64/26"; none when empty.
    pub floatable: &'a [String],
    /// How long an address stays with its NIC after its release, in milliseconds.
    pub retention_ms: u64,
    /// Network interfaces of the node.
    pub links: &'a Links,
    /// The networks themselves.
    pub networks: &'a Networks,
    /// Users of the networks.
    pub vms: &'a dyn Users,
    /// Pods that have VMs.
    pub pods: &'a dyn Pods,
}
