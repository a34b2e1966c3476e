//! `delete`: VMs by name, by label or of a manifest; disks.

use std::collections::BTreeSet;

use vmmd_api::v1;

use super::{act, confirm, objects};
use crate::{
    args::{DeleteDisk, DeleteVm, Targets},
    client::{Client, Query},
    failure::{Code, Failure, Result},
    manifest::{Document, Object},
};

/// Names that are spelled out in a question at most.
const MAX_NAMES: usize = 10;

/// Deletes VMs, and with `--with-disks` their disks.
pub async fn vms(client: &Client, args: &DeleteVm) -> Result<(), Vec<Failure>> {
    let targets = Targets {
        names: args.doomed.names.clone(),
        selectors: args.doomed.selectors.clone(),
        all: args.doomed.all,
    };
    let names = act::names(client, &targets, |_| true).await.map_err(super::one)?;
    if names.is_empty() {
        eprintln!("There are no VMs to delete.");
        return Ok(());
    }
    let disks = if args.with_disks {
        disks_of(client, &names, args.ignore_not_found).await?
    } else {
        Vec::new()
    };
    if args.doomed.all || !disks.is_empty() {
        let mut text = format!("this deletes {}", listed("vm", &names));
        if !disks.is_empty() {
            text += &format!(" and {} with what is on them", listed("disk", &disks));
        }
        confirm::ask(args.yes, &text).map_err(super::one)?;
    }
    act::each(client, names, &verb(args)).await?;
    objects::delete_all::<v1::Disk>(client, &disks, args.ignore_not_found).await
}

/// Deletes the VMs of manifests, then their disks. Disks go in reverse order, as later ones may be
/// overlays of earlier ones.
pub async fn files(client: &Client, documents: &[Document], args: &DeleteVm) -> Result<(), Vec<Failure>> {
    let name = |document: &Document| document.name().to_owned();
    let (vms, disks): (Vec<_>, Vec<_>) = documents
        .iter()
        .partition(|document| matches!(document.object, Object::Vm(_)));
    let disks: Vec<_> = disks.into_iter().rev().map(name).collect();
    if !disks.is_empty() {
        let text = format!("this deletes {} with what is on them", listed("disk", &disks));
        confirm::ask(args.yes, &text).map_err(super::one)?;
    }
    act::each(client, vms.into_iter().map(name).collect(), &verb(args)).await?;
    objects::delete_all::<v1::Disk>(client, &disks, args.ignore_not_found).await
}

/// Deletes disks that vmmd keeps.
pub async fn disks(client: &Client, args: &DeleteDisk) -> Result<(), Vec<Failure>> {
    let client = &client.with_timeout(args.timeout.timeout);
    let unused = match args.all {
        true => unused(client).await.map_err(super::one)?,
        false => Vec::new(),
    };
    let names = if args.all { &unused } else { &args.names };
    if names.is_empty() {
        eprintln!("There are no disks to delete.");
        return Ok(());
    }
    let text = format!("this deletes {} with what is on them", listed("disk", names));
    confirm::ask(args.yes, &text).map_err(super::one)?;
    objects::delete_all::<v1::Disk>(client, names, args.ignore_not_found).await
}

/// The names of disks that nothing uses.
async fn unused(client: &Client) -> Result<Vec<String>> {
    let unused = client
        .objects::<v1::Disk>(&Query::default())
        .await?
        .into_iter()
        .filter(is_unused);
    Ok(unused.filter_map(|disk| Some(disk.metadata?.name)).collect())
}

fn is_unused(disk: &v1::Disk) -> bool {
    let status = disk.status.clone().unwrap_or_default();
    status.used_by.is_empty() && status.overlays.is_empty()
}

fn verb(args: &DeleteVm) -> act::Verb {
    act::Verb::Delete {
        force: args.force,
        ignore_not_found: args.ignore_not_found,
        no_wait: args.no_wait,
    }
}

/// The disks that vmmd keeps and that the specs of these VMs name.
async fn disks_of(
    client: &Client,
    vms: &[String],
    ignore_not_found: bool,
) -> Result<Vec<String>, Vec<Failure>> {
    let (mut disks, mut failures) = (BTreeSet::new(), Vec::new());
    for name in vms {
        match client.get(name).await {
            Ok(vm) => {
                let kept = vm
                    .spec
                    .unwrap_or_default()
                    .disks
                    .into_iter()
                    .map(|disk| disk.disk().to_owned());
                disks.extend(kept.filter(|name| !name.is_empty()));
            }
            Err(failure) if ignore_not_found && failure.code == Code::NotFound => {}
            Err(failure) => failures.push(failure),
        }
    }
    super::all(failures)?;
    Ok(disks.into_iter().collect())
}

/// `vm/a, vm/b and 3 more`.
fn listed(kind: &str, names: &[String]) -> String {
    let shown: Vec<_> = names
        .iter()
        .take(MAX_NAMES)
        .map(|name| format!("{kind}/{name}"))
        .collect();
    match names.len().saturating_sub(MAX_NAMES) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_of_a_vm_or_below_an_overlay_is_used() {
        let disk = |used_by: &[&str], overlays: &[&str]| v1::Disk {
            status: Some(v1::VolumeStatus {
                used_by: used_by.iter().map(|name| (*name).to_owned()).collect(),
                overlays: overlays.iter().map(|name| (*name).to_owned()).collect(),
                ..Default::default()
            }),
            ..Default::default()
        };
        assert!(is_unused(&disk(&[], &[])));
        assert!(!is_unused(&disk(&["web"], &[])) && !is_unused(&disk(&[], &["web-root"])));
    }
}
