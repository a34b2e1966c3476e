//! The node that a mock describes.

use tokio_stream::StreamExt as _;
use tonic::{Request, Response, Status};
use vmmd_api::v1::{self, ConditionStatus, node_service_server::NodeService};

use super::vmmd::{Answer, Events, State, lock, unused};

#[tonic::async_trait]
impl NodeService for State {
    async fn get_node(&self, _: Request<v1::GetNodeRequest>) -> Answer<v1::GetNodeResponse> {
        Ok(Response::new(v1::GetNodeResponse {
            node: Some(self.described()),
        }))
    }

    type WatchNodeStream = Events<v1::WatchNodeResponse>;

    async fn watch_node(&self, _: Request<v1::WatchNodeRequest>) -> Answer<Self::WatchNodeStream> {
        let first = tokio_stream::iter([Ok::<_, Status>(v1::WatchNodeResponse {
            node: Some(self.described()),
        })]);
        Ok(Response::new(Box::pin(first.chain(tokio_stream::pending()))))
    }

    async fn update_node_labels(
        &self,
        _: Request<v1::UpdateNodeLabelsRequest>,
    ) -> Answer<v1::UpdateNodeLabelsResponse> {
        unused()
    }

    async fn check_placement(
        &self,
        _: Request<v1::CheckPlacementRequest>,
    ) -> Answer<v1::CheckPlacementResponse> {
        unused()
    }

    async fn cordon_node(&self, _: Request<v1::CordonNodeRequest>) -> Answer<v1::CordonNodeResponse> {
        unused()
    }

    async fn uncordon_node(&self, _: Request<v1::UncordonNodeRequest>) -> Answer<v1::UncordonNodeResponse> {
        unused()
    }

    async fn drain_node(&self, _: Request<v1::DrainNodeRequest>) -> Answer<v1::DrainNodeResponse> {
        unused()
    }
}

impl State {
    fn described(&self) -> v1::Node {
        let mut node = node();
        node.spec.get_or_insert_default().cordoned = *lock(&self.cordoned);
        let status = node.status.get_or_insert_default();
        status.cpu_models = ["host", "x86-64-v2", "x86-64-v3"].map(str::to_owned).to_vec();
        if *lock(&self.no_kvm) {
            let condition = v1::Condition {
                r#type: "KvmAvailable".to_owned(),
                status: ConditionStatus::False.into(),
                message: "/dev/kvm is missing".to_owned(),
                ..v1::Condition::default()
            };
            node.status.as_mut().unwrap().conditions.push(condition);
        }
        node
    }
}

fn node() -> v1::Node {
    let has = v1::Resources {
        cpu_millis: 8000,
        memory_bytes: 8 << 30,
        ..v1::Resources::default()
    };
    let status = v1::NodeStatus {
        version: "1.2.3".to_owned(),
        capacity: Some(has),
        allocatable: Some(has),
        ..v1::NodeStatus::default()
    };
    v1::Node {
        status: Some(status),
        ..v1::Node::default()
    }
}
