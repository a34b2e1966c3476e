//! Snapshots are taken, listed and deleted, and VMs are restored from them.

mod archive;

use proto::v1;

use crate::{
    args::{
        Output,
        snapshot::{Clone, CreateSnapshot, ListSnapshots, Restore, Snapshot},
    },
    client::{COPY, Client, QUICK, WORK, about_snapshot, call, empty_answer, send},
    failure::{Code, Failure, Result},
    manifest::{emit, schema},
    output::{
        self,
        format::{self, Document, Layout},
    },
};

/// Runs the command.
pub async fn run(client: &Client, what: Snapshot) -> Result<(), Vec<Failure>> {
    match what {
        Snapshot::Create(args) => {
            let client = client.with_timeout(args.timeout.timeout);
            create(&client, &args).await.map_err(super::one)
        }
        Snapshot::Ls(args) => list(client, &args).await.map_err(super::one),
        Snapshot::Describe(args) => describe(client, &args.names).await,
        Snapshot::Rm(args) => delete(client, &args.names).await,
        Snapshot::Export(args) => archive::export(client, &args).await.map_err(super::one),
        Snapshot::Import(args) => {
            let client = client.with_timeout(args.timeout.timeout);
            archive::import(&client, &args).await.map_err(super::one)
        }
    }
}

async fn create(client: &Client, args: &CreateSnapshot) -> Result<()> {
    let labels = args
        .labels
        .iter()
        .map(|label| (label.key.clone(), label.value.clone()));
    let request = v1::CreateSnapshotRequest {
        snapshot: Some(v1::Snapshot {
            metadata: Some(v1::ObjectMetadata {
                name: args.name.clone(),
                labels: labels.collect(),
                ..Default::default()
            }),
            spec: Some(v1::SnapshotSpec {
                vm: args.vm.clone(),
                kind: match args.disks_only {
                    true => v1::SnapshotKind::Disks.into(),
                    false => v1::SnapshotKind::Full.into(),
                },
            }),
            status: None,
        }),
        paused: args.paused,
        retention: retention(args),
        ..Default::default()
    };
    let response = send!(client.limit(COPY), client.snapshots, create_snapshot, request).await;
    let response = response.map_err(|failure| about_snapshot(failure, &args.name))?;
    let snapshot = response.snapshot.ok_or_else(empty_answer)?;
    let kind = snapshot.spec.clone().unwrap_or_default().kind();
    if args.disks_only && kind != v1::SnapshotKind::Disks {
        let message = format!(
            "snapshot/{} was created with the VM's memory too: the daemon is of an older version, which knows no snapshots of disks alone",
            args.name
        );
        let failure = Failure::new(Code::Precondition, message);
        return Err(failure.hint("delete it, unless you want it: `vmmctl snapshot rm`"));
    }
    output::line(format!(
        "snapshot/{} created ({})",
        args.name,
        output::snapshot::cost(&snapshot)
    ))
}

/// Returns the retention of earlier snapshots from the options, if any.
fn retention(args: &CreateSnapshot) -> Option<v1::SnapshotRetention> {
    (args.keep_last.is_some() || args.max_age.is_some()).then(|| v1::SnapshotRetention {
        keep_last: args.keep_last.unwrap_or_default(),
        max_age: args.max_age.map(|age| proto::well_known::Duration {
            seconds: i64::try_from(age.as_secs()).unwrap_or(i64::MAX),
            nanos: 0,
        }),
        group: args.retention_group.clone().unwrap_or_default(),
    })
}

/// `snapshot ls`.
pub async fn list(client: &Client, args: &ListSnapshots) -> Result<()> {
    let snapshots = client.list_snapshots().await?;
    if let Some(output) = args.output.as_ref().filter(|output| **output != Output::Wide) {
        let layout = Layout {
            list: true,
            no_headers: args.no_headers,
            ..Layout::default()
        };
        let documents = snapshots.iter().map(document).collect::<Result<Vec<_>>>()?;
        return format::documents(&documents, output, layout);
    }
    if snapshots.is_empty() {
        eprintln!("There are no snapshots.");
        return Ok(());
    }
    let now = jiff::Timestamp::now();
    let rows: Vec<_> = snapshots
        .iter()
        .map(|snapshot| output::snapshot::row(snapshot, now))
        .collect();
    output::print(&output::snapshot::table().whole(&rows, !args.no_headers))
}

fn document(snapshot: &v1::Snapshot) -> Result<Document> {
    let name = snapshot.metadata.clone().unwrap_or_default().name;
    Ok(Document {
        title: format!("snapshot/{name}"),
        json: emit::json(snapshot)?,
        schema: schema::SNAPSHOT,
    })
}

async fn describe(client: &Client, names: &[String]) -> Result<(), Vec<Failure>> {
    let (mut texts, mut failures) = (Vec::new(), Vec::new());
    let now = jiff::Timestamp::now();
    for name in names {
        let request = v1::GetSnapshotRequest { name: name.clone() };
        match call(QUICK, client.snapshots.clone().get_snapshot(request)).await {
            Ok(response) => {
                let snapshot = response.snapshot.unwrap_or_default();
                texts.push(output::snapshot::describe(&snapshot, now));
            }
            Err(failure) => failures.push(about_snapshot(failure, name)),
        }
    }
    output::print(&texts.join("\n")).map_err(super::one)?;
    super::all(failures)
}

async fn delete(client: &Client, names: &[String]) -> Result<(), Vec<Failure>> {
    let mut failures = Vec::new();
    for name in names {
        let request = v1::DeleteSnapshotRequest {
            name: name.clone(),
            ..Default::default()
        };
        match send!(client.limit(WORK), client.snapshots, delete_snapshot, request).await {
            Ok(_) => output::line(format!("snapshot/{name} deleted")).map_err(super::one)?,
            Err(failure) => failures.push(about_snapshot(failure, name)),
        }
    }
    super::all(failures)
}

/// Restores a VM from a snapshot.
pub async fn restore(client: &Client, args: &Restore) -> Result<()> {
    let request = v1::RestoreVmRequest {
        snapshot: args.snapshot.clone(),
        vm: args.vm.clone().unwrap_or_default(),
        on_demand: args.on_demand,
        identity: identity(args.fresh),
        share_addresses: args.share_addresses,
        ..Default::default()
    };
    let name = restored(client, request).await?;
    output::line(format!("vm/{name} restored from snapshot/{}", args.snapshot))
}

/// Creates VMs from a snapshot, one after another.
pub async fn clone(client: &Client, args: &Clone) -> Result<(), Vec<Failure>> {
    let mut failures = Vec::new();
    for vm in &args.vms {
        let request = v1::RestoreVmRequest {
            snapshot: args.snapshot.clone(),
            vm: vm.clone(),
            on_demand: !args.copy,
            identity: identity(args.fresh),
            share_addresses: args.share_addresses,
            ..Default::default()
        };
        match restored(client, request).await {
            Ok(name) => {
                let line = format!("vm/{name} cloned from snapshot/{}", args.snapshot);
                output::line(line).map_err(super::one)?;
            }
            Err(failure) => failures.push(failure),
        }
    }
    super::all(failures)
}

fn identity(fresh: bool) -> i32 {
    let identity = match fresh {
        true => v1::RestoreIdentity::Fresh,
        false => v1::RestoreIdentity::Same,
    };
    identity.into()
}

/// Names the options for a VM that cannot have the addresses of the snapshot.
fn with_options(failure: Failure) -> Failure {
    match &*failure.reason {
        "NIC_ADDRESS_IN_USE" => {
            failure.hint("--fresh is a VM with addresses of its own; --share-addresses lets both have them")
        }
        _ => failure,
    }
}

/// Restores a VM; returns its name.
async fn restored(client: &Client, request: v1::RestoreVmRequest) -> Result<String> {
    let snapshot = request.snapshot.clone();
    let response = send!(client.limit(COPY), client.snapshots, restore_vm, request).await;
    let response = response.map_err(|failure| about_snapshot(with_options(failure), &snapshot))?;
    let vm = response.vm.ok_or_else(empty_answer)?;
    Ok(vm.metadata.unwrap_or_default().name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clone_refused_because_of_addresses_names_the_options() {
        let refused = |reason: &str| {
            let failure = Failure {
                reason: reason.into(),
                ..Failure::new(Code::Precondition, "VM \"web\" has the address")
            };
            about_snapshot(with_options(failure), "one").to_string()
        };
        let said = refused("NIC_ADDRESS_IN_USE");
        assert!(
            said.contains("; --fresh") && said.contains("--share-addresses"),
            "{said}"
        );
        assert!(!refused("SNAPSHOT_DISKS").contains("--fresh"));
        assert!(refused("SNAPSHOT_DISKS").contains("`--paused`"));
    }
}
