//! Migrations, which end when somebody watches them. The node `full` refuses all VMs.

use tonic::{Code, Request, Response};
use vmmd_api::v1::{self, migration_service_server::MigrationService};

use super::{Answer, State, refusal};

#[tonic::async_trait]
impl MigrationService for State {
    async fn migrate_vm(&self, request: Request<v1::MigrateVmRequest>) -> Answer<v1::MigrateVmResponse> {
        let v1::MigrateVmRequest { name, target, .. } = request.into_inner();
        self.called(format!("migrate {name} to {target}"));
        if target.starts_with("full:") {
            let message = format!("the other node: VM \"{name}\" does not fit");
            return Err(refusal(Code::FailedPrecondition, "MIGRATION_REFUSED", message));
        }
        let id = format!("0197c1f0-8a5e-7b63-9c0e-{:012}", self.calls().len());
        self.operation(&id, &name);
        let operation = self.find_operation(&id)?;
        Ok(Response::new(v1::MigrateVmResponse {
            operation: Some(operation),
        }))
    }

    async fn resolve_migration(
        &self,
        request: Request<v1::ResolveMigrationRequest>,
    ) -> Answer<v1::ResolveMigrationResponse> {
        let request = request.into_inner();
        let resolution = request.resolution().as_str_name();
        let uid = request.preconditions.unwrap_or_default().uid;
        let migration = request.migration;
        self.called(format!("resolve {} {resolution} {migration} {uid}", request.name));
        Ok(Response::new(v1::ResolveMigrationResponse {}))
    }
}
