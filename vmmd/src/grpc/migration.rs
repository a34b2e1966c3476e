//! `vmmd.v1.MigrationService`, and `vmmd.v1.PeerService` for other daemons.

use std::sync::Arc;

use proto::{
    handover::Resolution,
    v1::{
        self, MigrationResolution, migration_service_server::MigrationService,
        peer_service_server::PeerService,
    },
};
use tonic::{Request, Response, Status, Streaming};

use super::period::timeout;
use crate::{
    context::Context,
    failure::Failure,
    host::Host,
    migration,
    registry::vms::command::{HandoverRequest, hand_over},
    request::once,
};

/// Both services.
#[derive(Clone, Debug)]
pub struct Migrations {
    host: Arc<Host>,
}

impl Migrations {
    /// Of the VMs of `host`.
    pub fn new(host: Arc<Host>) -> Self {
        Self { host }
    }
}

#[tonic::async_trait]
impl MigrationService for Migrations {
    async fn migrate_vm(
        &self,
        request: Request<v1::MigrateVmRequest>,
    ) -> Result<Response<v1::MigrateVmResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let downtime = timeout(request.downtime_limit)?;
            let deadline = timeout(request.timeout)?;
            let operation = migration::migrate(&host, request, downtime, deadline, &context).await?;
            Ok(v1::MigrateVmResponse {
                operation: Some(operation),
            })
        })
        .await
    }

    async fn resolve_migration(
        &self,
        request: Request<v1::ResolveMigrationRequest>,
    ) -> Result<Response<v1::ResolveMigrationResponse>, Status> {
        let request = request.into_inner();
        let resolution = match request.resolution() {
            MigrationResolution::Run => Resolution::Run,
            MigrationResolution::Drop => Resolution::Drop,
            MigrationResolution::Unspecified => {
                return Err(Failure::field("resolution", "must be RUN or DROP").into());
            }
        };
        let resolve = HandoverRequest::Resolve(resolution);
        hand_over(&self.host.vms, &request.name, resolve).await?;
        Ok(Response::new(v1::ResolveMigrationResponse {}))
    }
}

#[tonic::async_trait]
impl PeerService for Migrations {
    async fn offer_vm(
        &self,
        request: Request<v1::OfferVmRequest>,
    ) -> Result<Response<v1::OfferVmResponse>, Status> {
        let context = Context::daemon();
        let answer = migration::offer(&self.host, request.into_inner(), &context).await?;
        Ok(Response::new(answer))
    }

    async fn receive_vm(
        &self,
        request: Request<Streaming<v1::ReceiveVmRequest>>,
    ) -> Result<Response<v1::ReceiveVmResponse>, Status> {
        let (host, parts) = (Arc::clone(&self.host), request.into_inner());
        // In a task of its own, which cleans up when the source goes away.
        let receive = async move { migration::receive(&host, parts, &Context::daemon()).await };
        let received = tokio::spawn(receive).await;
        received.map_err(|error| Failure::internal(error.to_string()))??;
        Ok(Response::new(v1::ReceiveVmResponse {}))
    }

    async fn settle_vm(
        &self,
        request: Request<v1::SettleVmRequest>,
    ) -> Result<Response<v1::SettleVmResponse>, Status> {
        Ok(Response::new(
            migration::settle(&self.host, request.into_inner()).await?,
        ))
    }
}
