//! VMs are moved to other nodes.

use vmmd_api::v1::{self, MigrationPolicy, MigrationResolution};

use super::operation;
use crate::{
    args::migration::{Migrate, MigrateVerb, Policy, Resolve},
    client::{self, Client, WORK, about_vm, empty_answer, send},
    failure::{Code, Failure, Result},
    output,
};

/// Runs the command.
pub async fn run(client: &Client, args: Migrate) -> Result<()> {
    match args.what {
        Some(MigrateVerb::Cancel { name }) => cancel(client, &name).await,
        Some(MigrateVerb::Resolve(args)) => resolve(client, &args).await,
        None => migrate(client, args).await,
    }
}

async fn migrate(client: &Client, args: Migrate) -> Result<()> {
    let (name, to) = (args.name.unwrap_or_default(), args.to.unwrap_or_default());
    let period = |given: Option<std::time::Duration>| {
        given.map(|given| vmmd_api::well_known::Duration {
            seconds: i64::try_from(given.as_secs()).unwrap_or(i64::MAX),
            nanos: i32::try_from(given.subsec_nanos()).unwrap_or(0),
        })
    };
    let request = v1::MigrateVmRequest {
        name: name.clone(),
        target: to.clone(),
        downtime_limit: period(args.downtime_limit),
        force: args.force,
        policy: args.policy.map_or(MigrationPolicy::Unspecified, wire).into(),
        bytes_per_second: args.bandwidth.unwrap_or_default(),
        timeout: period(args.timeout),
        ..Default::default()
    };
    let response = send!(client.limit(WORK), client.migrations, migrate_vm, request).await;
    let begun = response
        .map_err(|failure| about_vm(failure, &name))?
        .operation
        .ok_or_else(empty_answer)?;
    if args.detach {
        return output::line(format!("operation/{} begun", begun.id));
    }
    finish(client, &begun.id).await?;
    output::line(format!("vm/{name} migrated to {to}"))
}

fn wire(policy: Policy) -> MigrationPolicy {
    match policy {
        Policy::AlwaysSafe => MigrationPolicy::AlwaysSafe,
        Policy::PreferSafe => MigrationPolicy::PreferSafe,
        Policy::PreferForced => MigrationPolicy::PreferForced,
        Policy::AlwaysForced => MigrationPolicy::AlwaysForced,
    }
}

/// Moves a VM without limits, and waits for the end.
pub async fn move_to(client: &Client, name: &str, to: &str) -> Result<()> {
    let request = v1::MigrateVmRequest {
        name: name.to_owned(),
        target: to.to_owned(),
        ..Default::default()
    };
    let response = send!(client.limit(WORK), client.migrations, migrate_vm, request).await;
    let begun = response
        .map_err(|failure| about_vm(failure, name))?
        .operation
        .ok_or_else(empty_answer)?;
    let moved = finish(client, &begun.id).await;
    moved.map_err(|failure| about_vm(failure, name))?;
    output::line(format!("vm/{name} migrated to {to}"))
}

/// Waits for the end of a migration, and says how far it is.
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
    let filter = v1::OperationFilter {
        target: Some(client::reference("Vm", name)),
        active: true,
        ..Default::default()
    };
    let mut under_way = client.operations(filter).await?.into_iter();
    let Some(found) = under_way.find(|operation| operation.r#type == "vm.migrate") else {
        let message = "no migration of it is under way";
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
        let message = "no migration of it waits for a decision";
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
