//! `delete`: VMs by name or by label; objects of a manifest; disks.

use std::{
    collections::BTreeSet,
    io::{self, BufRead as _, IsTerminal as _, Write as _},
};

use vmmd_api::v1;

use super::{act, objects};
use crate::{
    args::{
        Targets, Yes,
        kind::{DeleteDisk, DeleteVm},
    },
    client::{Client, Query},
    failure::{Code, Failure, Result},
    manifest::{Document, Object},
    output,
};

/// Maximum number of names in a question.
const MAX_NAMES: usize = 10;

/// Deletes VMs, and with `--with-disks` their disks; or the VMs of manifests, then their disks and networks. Disks of manifests are
/// deleted in reverse order, as later ones may be overlays of earlier ones.
pub async fn vms(client: &Client, documents: &[Document], args: &DeleteVm) -> Result<(), Vec<Failure>> {
    let (names, disks, networks) = if args.which.files.is_empty() {
        let targets = Targets {
            names: args.which.names.clone(),
            selector: args.which.selector.clone(),
            all: args.which.all,
        };
        let names = act::names(client, &targets, |_| true).await?;
        if names.is_empty() {
            eprintln!("There are no VMs to delete.");
            return Ok(());
        }
        let disks = match args.with_disks {
            true => disks_of(client, &names, args.ignore_not_found).await?,
            false => Vec::new(),
        };
        (names, disks, Vec::new())
    } else {
        let (mut vms, mut disks, mut networks) = (Vec::new(), Vec::new(), Vec::new());
        for document in documents.iter().rev() {
            let names = match document.object {
                Object::Vm(_) => &mut vms,
                Object::Disk(_) => &mut disks,
                Object::Network(_) => &mut networks,
            };
            names.push(document.name().to_owned());
        }
        vms.reverse();
        (vms, disks, networks)
    };
    let mut deleted = Vec::new();
    if !names.is_empty() && (args.which.all || args.with_disks) {
        deleted.push(listed("vm", &names));
    }
    if !disks.is_empty() {
        deleted.push(format!("{} with all their data", listed("disk", &disks)));
    }
    if args.which.all || !disks.is_empty() {
        ask(args.yes, &format!("this deletes {}", deleted.join(" and ")))?;
    }
    let verb = act::Verb::Delete {
        force: args.force,
        ignore_not_found: args.ignore_not_found,
        no_wait: args.no_wait,
    };
    act::each(client, names, &verb).await?;
    objects::delete_all::<v1::Disk>(client, &disks, args.ignore_not_found).await?;
    objects::delete_all::<v1::Network>(client, &networks, args.ignore_not_found).await
}

/// Deletes disks that vmmd manages.
pub async fn disks(client: &Client, args: &DeleteDisk) -> Result<(), Vec<Failure>> {
    let unused = match args.all {
        true => unused(client).await?,
        false => Vec::new(),
    };
    let names = if args.all { &unused } else { &args.names };
    if names.is_empty() {
        eprintln!("There are no disks to delete.");
        return Ok(());
    }
    ask(
        args.yes,
        &format!("this deletes {} with all their data", listed("disk", names)),
    )?;
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

/// The disks that vmmd manages and that the specs of these VMs name.
async fn disks_of(
    client: &Client,
    vms: &[String],
    ignore_not_found: bool,
) -> Result<Vec<String>, Vec<Failure>> {
    let (mut disks, mut failures) = (BTreeSet::new(), Vec::new());
    for name in vms {
        match client.get(name).await {
            Ok(vm) => {
                let named = vm.spec.unwrap_or_default().disks.into_iter();
                let named = named.map(|disk| disk.disk().to_owned());
                disks.extend(named.filter(|name| !name.is_empty()));
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

/// Asks for confirmation of the action that `text` describes; an error without confirmation.
fn ask(yes: Yes, text: &str) -> Result<()> {
    if yes.yes {
        return Ok(());
    }
    if !io::stdin().is_terminal() {
        return Err(Failure::new(Code::Usage, text).hint("confirm with --yes"));
    }
    let mut stderr = io::stderr().lock();
    let asked = write!(stderr, "{text}: continue? [y/N] ").and_then(|()| stderr.flush());
    asked.map_err(|error| output::write_failed(&error))?;
    let mut answer = String::new();
    let read = io::stdin().lock().read_line(&mut answer);
    read.map_err(|error| Failure::new(Code::Other, format!("cannot read the answer: {error}")))?;
    if ["y", "yes"].contains(&answer.trim().to_lowercase().as_str()) {
        Ok(())
    } else {
        Err(Failure::new(Code::Cancelled, "nothing was deleted"))
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
