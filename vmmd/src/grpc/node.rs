//! `vmmd.v1.NodeService`.

use std::{fs, path::Path, sync::Arc};

use proto::v1::{
    Condition, ConditionStatus, GetNodeRequest, GetNodeResponse, Node, node_service_server::NodeService,
};
use tokio::task::spawn_blocking;
use tonic::{Request, Response, Status};

use crate::{facts, failure::Failure, host::Host, vm::files};

/// The service.
#[derive(Debug)]
pub struct Nodes {
    host: Arc<Host>,
}

impl Nodes {
    /// Over the node of `host`.
    pub fn new(host: Arc<Host>) -> Self {
        Self { host }
    }
}

#[tonic::async_trait]
impl NodeService for Nodes {
    async fn get_node(&self, _: Request<GetNodeRequest>) -> Result<Response<GetNodeResponse>, Status> {
        let vms = self.host.table.list();
        let running = vms
            .iter()
            .filter(|vm| vm.status.as_ref().is_some_and(|status| status.instance.is_some()))
            .count();
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let kvm = self.host.config.kvm_device.clone();
        let facts = spawn_blocking(move || (describe(), kvm_available(&kvm))).await;
        let (node, condition) = facts.map_err(|error| Failure::internal(error.to_string()))?;
        let node = Node {
            memory_bytes: self.host.ledger.memory(),
            memory_committed_bytes: self.host.ledger.committed(),
            vms: count(vms.len()),
            vms_running: count(running),
            conditions: vec![condition],
            ..node
        };
        Ok(Response::new(GetNodeResponse { node: Some(node) }))
    }
}

fn describe() -> Node {
    let system = rustix::system::uname();
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    Node {
        name: system.nodename().to_string_lossy().into_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        kernel_version: system.release().to_string_lossy().into_owned(),
        cpu_model: facts::cpu_model(&cpuinfo),
        cpus: facts::cpus(&cpuinfo),
        memory_available_bytes: facts::memory(&meminfo, "MemAvailable"),
        ..Node::default()
    }
}

/// The daemon has no KVM code: whether the device can be opened is what it can tell. What a `vmm` finds beyond that
/// is in the error of the start.
fn kvm_available(device: &Path) -> Condition {
    let (status, reason, message) = match files::open_kvm(device) {
        Ok(_) => (ConditionStatus::True, "DeviceUsable", String::new()),
        Err(failure) => (ConditionStatus::False, "DeviceUnusable", failure.message),
    };
    Condition {
        r#type: "KvmAvailable".to_owned(),
        status: status.into(),
        reason: reason.to_owned(),
        message,
        transition_time: None,
    }
}
