//! Snapshots are taken, and VMs are restored from them.

pub mod archive;

use vmmd_api::v1;

use crate::{
    args::snapshot::{Clone, CreateSnapshot, Restore},
    client::{COPY, Client, about_snapshot, empty_answer, send},
    failure::{Code, Failure, Result, printable},
    output,
};

/// Takes a snapshot.
pub async fn create(client: &Client, args: &CreateSnapshot) -> Result<()> {
    let request = v1::CreateSnapshotRequest {
        snapshot: Some(v1::Snapshot {
            metadata: super::metadata(&args.name, &args.labels),
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
        consistency: args.consistency.into(),
        ..Default::default()
    };
    let response = send!(client.limit(COPY), client.snapshots, create_snapshot, request).await;
    let response = response.map_err(|failure| about_snapshot(failure, &args.name))?;
    let snapshot = response.snapshot.ok_or_else(empty_answer)?;
    let kind = snapshot.spec.clone().unwrap_or_default().kind();
    if args.disks_only && kind != v1::SnapshotKind::Disks {
        let message = format!(
            "snapshot/{} contains the memory of the VM too: this older daemon cannot take snapshots of disks only",
            args.name
        );
        let failure = Failure::new(Code::Precondition, message);
        return Err(failure.hint("`vmmctl delete snapshot` deletes it"));
    }
    check_consistency(args, &snapshot)?;
    output::line(format!(
        "snapshot/{} created ({})",
        args.name,
        output::snapshot::cost(&snapshot)
    ))
}

/// Warns of a snapshot whose file systems are not frozen as requested. An older daemon knows no
/// frozen file systems.
fn check_consistency(args: &CreateSnapshot, snapshot: &v1::Snapshot) -> Result<()> {
    use v1::SnapshotConsistency as Consistency;
    let status = snapshot.status.clone().unwrap_or_default();
    let name = &args.name;
    match (args.consistency, status.consistency()) {
        (Consistency::Agent | Consistency::RequireAgent, Consistency::Unspecified) => {
            let message = format!(
                "snapshot/{name} has file systems as after a power cut: this older daemon cannot freeze them"
            );
            let failure = Failure::new(Code::Precondition, message);
            Err(failure.hint("`vmmctl delete snapshot` deletes it"))
        }
        (Consistency::Agent, Consistency::Crash) => {
            let why = printable(&status.consistency_message);
            eprintln!("vmmctl: warning: snapshot/{name} has file systems as after a power cut: {why}");
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Returns the retention of earlier snapshots from the options, if any.
fn retention(args: &CreateSnapshot) -> Option<v1::SnapshotRetention> {
    (args.keep_last.is_some() || args.max_age.is_some()).then(|| v1::SnapshotRetention {
        keep_last: args.keep_last.unwrap_or_default(),
        max_age: args.max_age.map(Into::into),
        group: args.retention_group.clone().unwrap_or_default(),
    })
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
                output::line(line)?;
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
            failure.hint("--fresh gives the VM new addresses; --share-addresses allows equal addresses")
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
    fn clone_refused_for_addresses_names_the_options() {
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
