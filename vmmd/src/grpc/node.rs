//! `vmmd.v1.NodeService`.

use std::{sync::Arc, time::Duration};

use tonic::{Request, Response, Status};
use vmmd_api::v1::{self, GetNodeRequest, GetNodeResponse, node_service_server::NodeService};
use vmmd_host::failure::Failure;
use vmmd_objects::request::{once, to_completion};
use vmmd_spec::vm::Manifest;

use super::watch_node;
use crate::{
    host::Host,
    node::{
        check::{self, Question},
        describe, drain, operate,
    },
};

/// The service.
#[derive(Debug)]
pub struct Nodes {
    host: Arc<Host>,
    /// For `GetNode`.
    asked: watch_node::Shared,
    /// For watchers.
    watched: Arc<watch_node::Shared>,
}

impl Nodes {
    /// Over the node of `host`.
    pub fn new(host: Arc<Host>) -> Self {
        Self {
            host,
            asked: watch_node::Shared::new(Duration::ZERO),
            watched: Arc::new(watch_node::Shared::new(watch_node::TOGETHER)),
        }
    }
}

#[tonic::async_trait]
impl NodeService for Nodes {
    async fn get_node(&self, _: Request<GetNodeRequest>) -> Result<Response<GetNodeResponse>, Status> {
        let node = self.asked.get(|| describe(&self.host)).await?;
        Ok(Response::new(GetNodeResponse { node: Some(node) }))
    }

    type WatchNodeStream = watch_node::Stream;

    async fn watch_node(
        &self,
        _: Request<v1::WatchNodeRequest>,
    ) -> Result<Response<Self::WatchNodeStream>, Status> {
        Ok(Response::new(watch_node::watch(
            Arc::clone(&self.host),
            Arc::clone(&self.watched),
        )))
    }

    async fn update_node_labels(
        &self,
        request: Request<v1::UpdateNodeLabelsRequest>,
    ) -> Result<Response<v1::UpdateNodeLabelsResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let v1::UpdateNodeLabelsRequest { set, remove, .. } = request;
            let of = Arc::clone(&host);
            to_completion(async move { operate::label(&of, set, remove, &context).await }).await?;
            let node = Some(describe(&host).await?);
            Ok(v1::UpdateNodeLabelsResponse { node })
        })
        .await
    }

    async fn check_placement(
        &self,
        request: Request<v1::CheckPlacementRequest>,
    ) -> Result<Response<v1::CheckPlacementResponse>, Status> {
        let vm = request.into_inner().vm;
        let mut vm = vm.ok_or_else(|| Failure::field("vm", "must be given"))?;
        // A VM as GetVm gives it may be asked about too.
        vm.status = None;
        for disk in vm.spec.iter_mut().flat_map(|spec| &mut spec.disks) {
            self.host.disks.fill_in(disk);
        }
        let manifest = Manifest::try_from(&vm).map_err(Failure::from)?;
        let problems = check::problems(&self.host, &manifest, Question::Start).await?;
        let problems: Vec<_> = problems
            .into_iter()
            .map(|problem| v1::PlacementProblem {
                reason: problem.reason.to_owned(),
                message: problem.message,
                field: problem.field,
            })
            .collect();
        Ok(Response::new(v1::CheckPlacementResponse {
            fits: problems.is_empty(),
            problems,
        }))
    }

    async fn cordon_node(
        &self,
        request: Request<v1::CordonNodeRequest>,
    ) -> Result<Response<v1::CordonNodeResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let v1::CordonNodeRequest { reason, .. } = request;
            let of = Arc::clone(&host);
            to_completion(async move { operate::cordon(&of, reason, &context).await }).await?;
            let node = Some(describe(&host).await?);
            Ok(v1::CordonNodeResponse { node })
        })
        .await
    }

    async fn uncordon_node(
        &self,
        request: Request<v1::UncordonNodeRequest>,
    ) -> Result<Response<v1::UncordonNodeResponse>, Status> {
        once(
            &self.host,
            request,
            |host, _: v1::UncordonNodeRequest, context| async move {
                let of = Arc::clone(&host);
                to_completion(async move { operate::uncordon(&of, &context).await }).await?;
                let node = Some(describe(&host).await?);
                Ok(v1::UncordonNodeResponse { node })
            },
        )
        .await
    }

    async fn drain_node(
        &self,
        request: Request<v1::DrainNodeRequest>,
    ) -> Result<Response<v1::DrainNodeResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let v1::DrainNodeRequest {
                reason,
                grace_period,
                timeout,
                no_wait,
                ..
            } = request;
            let grace = super::period::grace(grace_period, false)?.unwrap_or_default();
            let deadline = super::period::timeout(timeout)?;
            let of = Arc::clone(&host);
            let begun =
                to_completion(async move { drain::drain(&of, reason, grace, deadline, context).await });
            let pending = begun.await?;
            if !no_wait {
                tokio::select! {
                    ended = pending.clone().ended() => drop(ended?),
                    () = host.stopping.cancelled() => return Err(Failure::stopping().into()),
                }
            } else {
                host.operations.recorded().await;
            }
            Ok(v1::DrainNodeResponse {
                operation: Some(pending.operation()),
            })
        })
        .await
    }
}
