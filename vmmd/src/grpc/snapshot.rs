//! `vmmd.v1.SnapshotService`.

mod kind;

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use vmmd_api::{
    rule::Role,
    v1::{self, import_snapshot_request::Message, snapshot_service_server::SnapshotService},
};
use vmmd_host::failure::Failure;
use vmmd_objects::{
    registry::Kind as _,
    request::{once, to_completion},
};

use super::{
    filter::Filter,
    mask::Mask,
    objects::{Wanted, get, list},
};
use crate::{auth, host::Host, registry::snapshots::SnapshotKind, snapshot};

/// Path of CreateSnapshot.
const CREATE: &str = "/vmmd.v1.SnapshotService/CreateSnapshot";

/// The service.
#[derive(Debug)]
pub struct Snapshots {
    host: Arc<Host>,
}

impl Snapshots {
    /// Over the snapshots of `host`.
    pub fn new(host: Arc<Host>) -> Self {
        Self { host }
    }
}

#[tonic::async_trait]
impl SnapshotService for Snapshots {
    async fn create_snapshot(
        &self,
        request: Request<v1::CreateSnapshotRequest>,
    ) -> Result<Response<v1::CreateSnapshotResponse>, Status> {
        if request.get_ref().retention.is_some() {
            // It deletes snapshots, as an admin may.
            auth::require(&request, CREATE, Some(Role::Admin.into()))?;
        }
        once(&self.host, request, |host, request, context| async move {
            let cancel = host.stopping.child_token();
            // In a task of its own, which cleans up when the caller goes away, or the daemon ends.
            let _gone = CancellationToken::clone(&cancel).drop_guard();
            let create = async move { snapshot::create(&host, request, &context, cancel).await };
            let snapshot = to_completion(create).await?;
            Ok(v1::CreateSnapshotResponse {
                snapshot: Some(snapshot),
            })
        })
        .await
    }

    async fn get_snapshot(
        &self,
        request: Request<v1::GetSnapshotRequest>,
    ) -> Result<Response<v1::GetSnapshotResponse>, Status> {
        let snapshot = get::<SnapshotKind>(&self.host, &request.get_ref().name).await?;
        Ok(Response::new(v1::GetSnapshotResponse {
            snapshot: Some(snapshot),
        }))
    }

    async fn list_snapshots(
        &self,
        request: Request<v1::ListSnapshotsRequest>,
    ) -> Result<Response<v1::ListSnapshotsResponse>, Status> {
        let request = request.get_ref();
        let wanted = Wanted {
            filter: Filter::of_objects(SnapshotKind::NAME, None)?,
            mask: Mask::default(),
            page_size: request.page_size,
            page_token: &request.page_token,
        };
        let page = list::<SnapshotKind>(&self.host, wanted).await?;
        Ok(Response::new(v1::ListSnapshotsResponse {
            snapshots: page.objects,
            next_page_token: page.next_page_token,
        }))
    }

    async fn delete_snapshot(
        &self,
        request: Request<v1::DeleteSnapshotRequest>,
    ) -> Result<Response<v1::DeleteSnapshotResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let delete = async move { snapshot::delete(&host, &request.name, &context).await };
            to_completion(delete).await?;
            Ok(v1::DeleteSnapshotResponse {})
        })
        .await
    }

    type ExportSnapshotStream = snapshot::Stream;

    async fn export_snapshot(
        &self,
        request: Request<v1::ExportSnapshotRequest>,
    ) -> Result<Response<Self::ExportSnapshotStream>, Status> {
        let stream = snapshot::export(&self.host, &request.get_ref().name).await?;
        Ok(Response::new(stream))
    }

    async fn import_snapshot(
        &self,
        request: Request<Streaming<v1::ImportSnapshotRequest>>,
    ) -> Result<Response<v1::ImportSnapshotResponse>, Status> {
        let (metadata, extensions, mut stream) = request.into_parts();
        let first = stream.message().await?.unwrap_or_default();
        let Some(Message::Open(open)) = first.message.clone() else {
            return Err(Failure::field("open", "must be in the first message").into());
        };
        // The first message and the request id identify the request; the archive is only its
        // payload.
        let request = Request::from_parts(metadata, extensions, first);
        once(&self.host, request, |host, _, context| async move {
            let cancel = host.stopping.child_token();
            // In a task of its own, which cleans up when the caller goes away, or the daemon ends.
            let _gone = CancellationToken::clone(&cancel).drop_guard();
            let import = async move { snapshot::import(&host, open, stream, &context, cancel).await };
            let snapshot = to_completion(import).await?;
            Ok(v1::ImportSnapshotResponse {
                snapshot: Some(snapshot),
            })
        })
        .await
    }

    async fn restore_vm(
        &self,
        request: Request<v1::RestoreVmRequest>,
    ) -> Result<Response<v1::RestoreVmResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let restore = async move { snapshot::restore(&host, request, &context).await };
            let vm = to_completion(restore).await?;
            Ok(v1::RestoreVmResponse { vm: Some(vm) })
        })
        .await
    }
}
