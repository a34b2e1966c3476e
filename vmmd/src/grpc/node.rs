//! `vmmd.v1.NodeService`.

use std::{
    fs,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use proto::v1::{
    self as v1, Condition, ConditionStatus, GetNodeRequest, GetNodeResponse, Node,
    node_service_server::NodeService,
};
use tokio::task::spawn_blocking;
use tonic::{Request, Response, Status};

use crate::{facts, failure::Failure, host::Host, text, vm::files};

/// The service.
#[derive(Debug)]
pub struct Nodes {
    host: Arc<Host>,
    kvm: Arc<Since>,
}

impl Nodes {
    /// Over the node of `host`. Looks at its conditions, which are seen since then.
    pub fn new(host: Arc<Host>) -> Self {
        let kvm = Arc::<Since>::default();
        kvm.note(kvm_available(&host.config.kvm_device), text::now_ms());
        Self { host, kvm }
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
        let (device, kvm) = (self.host.config.kvm_device.clone(), Arc::clone(&self.kvm));
        let facts = spawn_blocking(move || {
            let condition = kvm.note(kvm_available(&device), text::now_ms());
            (describe(), condition)
        })
        .await;
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

    async fn update_node_labels(
        &self,
        _: Request<v1::UpdateNodeLabelsRequest>,
    ) -> Result<Response<v1::UpdateNodeLabelsResponse>, Status> {
        Err(Failure::unimplemented("set labels").into())
    }

    async fn check_placement(
        &self,
        _: Request<v1::CheckPlacementRequest>,
    ) -> Result<Response<v1::CheckPlacementResponse>, Status> {
        Err(Failure::unimplemented("check placements").into())
    }

    async fn cordon_node(
        &self,
        _: Request<v1::CordonNodeRequest>,
    ) -> Result<Response<v1::CordonNodeResponse>, Status> {
        Err(Failure::unimplemented("cordon the node").into())
    }

    async fn uncordon_node(
        &self,
        _: Request<v1::UncordonNodeRequest>,
    ) -> Result<Response<v1::UncordonNodeResponse>, Status> {
        Err(Failure::unimplemented("uncordon the node").into())
    }

    async fn drain_node(
        &self,
        _: Request<v1::DrainNodeRequest>,
    ) -> Result<Response<v1::DrainNodeResponse>, Status> {
        Err(Failure::unimplemented("drain the node").into())
    }
}

/// What a condition was when it was last looked at, and since when, in milliseconds of Unix time.
#[derive(Debug, Default)]
struct Since(Mutex<Option<(ConditionStatus, u64)>>);

impl Since {
    /// The condition as it is `now_ms`, with the time at which its status was first seen.
    fn note(&self, condition: Condition, now_ms: u64) -> Condition {
        let status = condition.status();
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let since = match *last {
            Some((known, since)) if known == status => since,
            _ => now_ms,
        };
        *last = Some((status, since));
        Condition {
            transition_time: text::timestamp(since),
            ..condition
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_has_its_time_until_its_status_changes() {
        let since = Since::default();
        let seen = |status: ConditionStatus, message: &str, now_ms| {
            let condition = Condition {
                status: status.into(),
                message: message.to_owned(),
                ..Default::default()
            };
            let noted = since.note(condition, now_ms);
            assert_eq!((noted.status(), noted.message.as_str()), (status, message));
            noted.transition_time
        };
        assert_eq!(seen(ConditionStatus::False, "a", 1000), text::timestamp(1000));
        assert_eq!(seen(ConditionStatus::False, "b", 2000), text::timestamp(1000));
        assert_eq!(seen(ConditionStatus::True, "", 3000), text::timestamp(3000));
        assert_eq!(seen(ConditionStatus::True, "", 4000), text::timestamp(3000));
        assert_eq!(seen(ConditionStatus::False, "a", 5000), text::timestamp(5000));
    }
}
