//! `migrate`: VMs are moved to other nodes.

use vmmd_api::v1::{self, MigrationResolution};

use super::operation;
use crate::{
    args::migration::{Migrate, Resolve},
    client::{self, Client, WORK, about_vm, empty_answer, send},
    failure::{Code, Failure, Result},
    output,
};

/// Runs the command.
pub async fn run(client: &Client, verb: Migrate) -> Result<()> {
    match verb {
        Migrate::Vm(args) => {
            let request = v1::MigrateVmRequest {
                name: args.name,
                target: args.to,
                downtime_limit: args.downtime_limit.map(Into::into),
                force: args.force,
                policy: args.policy.unwrap_or_default().into(),
                bytes_per_second: args.bandwidth.unwrap_or_default(),
                timeout: args.timeout.map(Into::into),
                target_pod: args.target_pod.unwrap_or_default(),
                ..Default::default()
            };
            migrate(client, request, args.detach).await
        }
        Migrate::Cancel { name } => cancel(client, &name).await,
        Migrate::Resolve(args) => resolve(client, &args).await,
    }
}

/// Moves a VM. Waits for the end of the migration, unless `detach` is set.
pub async fn migrate(client: &Client, request: v1::MigrateVmRequest, detach: bool) -> Result<()> {
    let (name, to) = (request.name.clone(), request.target.clone());
    let moved = async {
        let answer = send!(client.limit(WORK), client.migrations, migrate_vm, request).await?;
        let begun = answer.operation.ok_or_else(empty_answer)?;
        if detach {
            return output::line(format!("operation/{} begun", begun.id));
        }
        finish(client, &begun.id).await?;
        output::line(format!("vm/{name} migrated to {to}"))
    };
    moved.await.map_err(|failure| about_vm(failure, &name))
}

/// Waits for the end of a migration, and prints its progress.
async fn finish(client: &Client, operation: &str) -> Result<()> {
    let mut told = String::new();
    let ended = operation::follow(client, operation, |seen| {
        if !seen.message.is_empty() && seen.message != told {
            told.clone_from(&seen.message);
            eprintln!("{told}");
        }
        Ok(())
    });
    operation::outcome(ended.await?).map(drop)
}

async fn cancel(client: &Client, name: &str) -> Result<()> {
    let mut active = client.operations(client::in_progress(name)).await?.into_iter();
    let Some(found) = active.find(|operation| operation.r#type == "vm.migrate") else {
        let message = "no migration of the VM is in progress";
        return Err(Failure::new(Code::NotFound, message).about("vm", name));
    };
    operation::cancel(client, &found.id).await
}

async fn resolve(client: &Client, args: &Resolve) -> Result<()> {
    let (resolution, done) = match args.run {
        true => (MigrationResolution::Run, "runs here"),
        false => (MigrationResolution::Drop, "is removed from this node"),
    };
    let vm = client.get(&args.name).await?;
    let migration = vm.status.and_then(|status| status.migration);
    let Some(migration) = migration.filter(|it| it.waits_for_decision) else {
        let message = "no migration of the VM waits for a decision";
        return Err(Failure::new(Code::Precondition, message).about("vm", &args.name));
    };
    let request = v1::ResolveMigrationRequest {
        name: args.name.clone(),
        resolution: resolution.into(),
        migration: args.migration.unwrap_or(migration.number),
        preconditions: Some(v1::Preconditions {
            uid: vm.metadata.unwrap_or_default().uid,
            ..Default::default()
        }),
        ..Default::default()
    };
    let response = send!(client.limit(WORK), client.migrations, resolve_migration, request).await;
    response.map_err(|failure| about_vm(failure, &args.name))?;
    output::line(format!("vm/{} {done}", args.name))
}
