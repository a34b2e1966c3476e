//! The node, whose changes are written down and change nothing.

use tonic::{Request, Response, Status};
use vmmd_api::v1::{self, node_service_server::NodeService};

use super::{Answer, Events, State};

#[tonic::async_trait]
impl NodeService for State {
    async fn get_node(&self, _: Request<v1::GetNodeRequest>) -> Answer<v1::GetNodeResponse> {
        let status = v1::NodeStatus {
            version: "9.9.9".into(),
            cpus: 4,
            memory_bytes: 8 << 30,
            ..Default::default()
        };
        let node = v1::Node {
            status: Some(status),
            ..named()
        };
        Ok(Response::new(v1::GetNodeResponse { node: Some(node) }))
    }

    type WatchNodeStream = Events<v1::WatchNodeResponse>;

    async fn watch_node(&self, _: Request<v1::WatchNodeRequest>) -> Answer<Self::WatchNodeStream> {
        Err(Status::unimplemented("vmmctl does not watch it"))
    }

    async fn update_node_labels(
        &self,
        request: Request<v1::UpdateNodeLabelsRequest>,
    ) -> Answer<v1::UpdateNodeLabelsResponse> {
        self.once(request.get_ref())?;
        let v1::UpdateNodeLabelsRequest { set, remove, .. } = request.into_inner();
        self.calls
            .lock()
            .unwrap()
            .push(format!("label {set:?} {remove:?}"));
        let node = Some(named());
        Ok(Response::new(v1::UpdateNodeLabelsResponse { node }))
    }

    /// More than 4 GiB do not fit.
    async fn check_placement(
        &self,
        request: Request<v1::CheckPlacementRequest>,
    ) -> Answer<v1::CheckPlacementResponse> {
        let spec = request.into_inner().vm.unwrap().spec.unwrap();
        let fits = spec.memory.unwrap().size_bytes <= 4 << 30;
        let problem = |reason: &str, message: &str| v1::PlacementProblem {
            reason: reason.into(),
            message: message.into(),
            ..Default::default()
        };
        let problems = vec![
            problem("NODE_CORDONED", "the node is cordoned"),
            problem("INSUFFICIENT_MEMORY", "not enough memory"),
        ];
        Ok(Response::new(v1::CheckPlacementResponse {
            fits,
            problems: if fits { Vec::new() } else { problems },
        }))
    }

    async fn cordon_node(&self, request: Request<v1::CordonNodeRequest>) -> Answer<v1::CordonNodeResponse> {
        self.once(request.get_ref())?;
        let reason = request.into_inner().reason;
        self.calls.lock().unwrap().push(format!("cordon {reason}"));
        let node = Some(named());
        Ok(Response::new(v1::CordonNodeResponse { node }))
    }

    async fn uncordon_node(
        &self,
        request: Request<v1::UncordonNodeRequest>,
    ) -> Answer<v1::UncordonNodeResponse> {
        self.once(request.get_ref())?;
        self.calls.lock().unwrap().push("uncordon".into());
        let node = Some(named());
        Ok(Response::new(v1::UncordonNodeResponse { node }))
    }

    async fn drain_node(&self, request: Request<v1::DrainNodeRequest>) -> Answer<v1::DrainNodeResponse> {
        self.once(request.get_ref())?;
        let request = request.into_inner();
        let grace = request.grace_period.unwrap_or_default().seconds;
        self.calls
            .lock()
            .unwrap()
            .push(format!("drain {} {grace}", request.reason));
        let operation = Some(v1::Operation {
            id: "1234".into(),
            ..Default::default()
        });
        Ok(Response::new(v1::DrainNodeResponse { operation }))
    }
}

fn named() -> v1::Node {
    let metadata = v1::ObjectMetadata {
        name: "node-1".into(),
        ..Default::default()
    };
    v1::Node {
        metadata: Some(metadata),
        ..Default::default()
    }
}
