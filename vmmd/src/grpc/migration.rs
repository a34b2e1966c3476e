//! `vmmd.v1.MigrationService`, and `vmmd.v1.PeerService` for other daemons.

use std::sync::Arc;

use tonic::{Request, Response, Status, Streaming};
use vm_lifecycle::handover::Resolution;
use vmmd_api::v1::{
    self, MigrationResolution, migration_service_server::MigrationService, peer_service_server::PeerService,
};
use vmmd_host::failure::Failure;
use vmmd_objects::{
    context::{Context, Initiator},
    request::{once, to_completion},
};

use super::period::timeout;
use crate::{
    host::Host,
    migration,
    registry::vms::command::{HandoverRequest, hand_over_to},
};

/// Both services.
#[derive(Clone, Debug)]
pub struct Migrations {
    host: Arc<Host>,
}

impl Migrations {
    /// Migrations of the VMs of `host`.
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
        once(&self.host, request, |host, request, context| async move {
            let resolution = match request.resolution() {
                MigrationResolution::Run => Resolution::Run,
                MigrationResolution::Drop => Resolution::Drop,
                MigrationResolution::Unspecified => {
                    return Err(Failure::field("resolution", "must be RUN or DROP").into());
                }
            };
            let wanted = "must be that of the VM whose migration waits: a request that comes late must not decide about another one";
            if context.preconditions.uid.is_empty() {
                return Err(Failure::field("preconditions.uid", wanted).into());
            }
            if request.migration == 0 {
                return Err(Failure::field("migration", wanted).into());
            }
            let name = request.name.as_str();
            let entry = host.vms.get(name).ok_or_else(|| Failure::no_vm(name))?;
            let resolve = HandoverRequest::Resolve {
                migration: request.migration,
                resolution,
                context,
            };
            hand_over_to(&entry.mailbox, name, resolve).await?;
            Ok(v1::ResolveMigrationResponse {})
        })
        .await
    }
}

/// Who calls: migrations are bound to the node that has offered them.
fn caller<T>(request: &Request<T>) -> String {
    let initiator = request.extensions().get::<Initiator>();
    initiator.cloned().unwrap_or_default().to_string()
}

#[tonic::async_trait]
impl PeerService for Migrations {
    async fn offer_vm(
        &self,
        request: Request<v1::OfferVmRequest>,
    ) -> Result<Response<v1::OfferVmResponse>, Status> {
        let context = Context::daemon();
        let answer = migration::offer(&self.host, caller(&request), request.into_inner(), &context).await?;
        Ok(Response::new(answer))
    }

    async fn receive_vm(
        &self,
        request: Request<Streaming<v1::ReceiveVmRequest>>,
    ) -> Result<Response<v1::ReceiveVmResponse>, Status> {
        let (host, from) = (Arc::clone(&self.host), caller(&request));
        let parts = request.into_inner();
        // In a task of its own, which cleans up when the source goes away.
        let receive = async move { migration::receive(&host, from, parts, &Context::daemon()).await };
        to_completion(receive).await?;
        Ok(Response::new(v1::ReceiveVmResponse {}))
    }

    async fn settle_vm(
        &self,
        request: Request<v1::SettleVmRequest>,
    ) -> Result<Response<v1::SettleVmResponse>, Status> {
        let from = caller(&request);
        let answer = migration::settle(&self.host, from, request.into_inner()).await?;
        Ok(Response::new(answer))
    }
}
