//! Restores a VM from a snapshot.

use std::{fs::File, path::PathBuf, sync::Arc};

use tokio::{sync::oneshot, task::spawn_blocking};
use vmmd_api::v1;
use vmmd_host::{
    failure::{Failure, Kind},
    fault, text,
};
use vmmd_objects::context::Context;
use vmmd_spec::{name::Name, nic::Mac};
use vmmd_store::{Hardware, SnapshotRecord};

use super::{Held, disks, failed, folder};
use crate::{
    disk,
    host::Host,
    registry::vms::command::{self, Command, Life, Restore},
    vm::create_as,
};

/// Restores a VM; returns when it runs. A VM that was created for it is deleted when the restore fails.
pub async fn restore(
    host: &Arc<Host>,
    request: v1::RestoreVmRequest,
    context: &Context,
) -> Result<v1::Vm, Failure> {
    // Prevents the deletion of the snapshot before the VM runs.
    let held = Held::new(host, &request.snapshot)?;
    let record = &held.record;
    let name = match request.vm.as_str() {
        "" => record.vm_name.clone(),
        name => name.to_owned(),
    };
    let fresh = match request.identity() {
        v1::RestoreIdentity::Fresh => true,
        v1::RestoreIdentity::Same => false,
        // An unknown number reads as unspecified.
        v1::RestoreIdentity::Unspecified if request.identity == 0 => false,
        v1::RestoreIdentity::Unspecified => {
            return Err(Failure::field(
                "identity",
                format_args!("is not known to this vmmd"),
            ));
        }
    };
    if fresh && request.share_addresses {
        return Err(Failure::field(
            "share_addresses",
            "a fresh VM has addresses of its own",
        ));
    }
    // Machine of a VM that is not the snapshot's own.
    let machine = if fresh { Machine::Booted } else { Machine::OfVm };
    let by_this = host.requests.made(context, "RestoreVm");
    let there = host.vms.get(&name).filter(|entry| {
        let uid = entry.uid.as_bytes().as_slice();
        uid == record.vm_uid || Some(uid) == by_this.as_deref()
    });
    match there.map(|entry| entry.uid.as_bytes().as_slice() == record.vm_uid) {
        Some(true) if fresh => {
            let message = format!("there is a VM \"{name}\" already: a fresh one needs a name of its own");
            Err(Failure::new(Kind::Exists, "VM_EXISTS", message))
        }
        Some(true) => {
            let on_demand = request.on_demand;
            start(host, record, &name, Machine::OfSnapshot, on_demand, context).await
        }
        // An earlier daemon has created the VM for this request.
        Some(false) => start(host, record, &name, machine, request.on_demand, context).await,
        None => {
            let new = New {
                name: &name,
                machine,
                share_addresses: request.share_addresses,
            };
            make_and_start(host, record, &new, request.on_demand, context).await
        }
    }
}

/// Which machine is started.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Machine {
    /// The spec is that of the snapshot, independent of the VM's present spec.
    OfSnapshot,
    /// Its spec is the VM's, which was created like the snapshot's, with other disks.
    OfVm,
    /// It is the VM's, with addresses of its own, and boots: nothing of the snapshot's memory is in it.
    Booted,
}

/// A VM that is not there yet.
struct New<'a> {
    name: &'a str,
    machine: Machine,
    /// Its NICs may have addresses that another VM has.
    share_addresses: bool,
}

/// Creates a VM and its disks and starts it. They are deleted when that fails.
async fn make_and_start(
    host: &Arc<Host>,
    record: &SnapshotRecord,
    new: &New<'_>,
    on_demand: bool,
    context: &Context,
) -> Result<v1::Vm, Failure> {
    let name = new.name;
    if let Err(error) = Name::try_from(name) {
        let problem = format_args!("{error}, is \"{}\"", text::brief(name));
        return Err(Failure::field("vm", problem));
    }
    let mut spec = record.vm_spec.clone().unwrap_or_default();
    let (made, result) = disks::make(host, &folder(host), record, name, &mut spec).await;
    fault::point(&host.config.run_dir, "restore");
    let result = match result {
        Ok(()) => make(host, record, spec, new, context).await,
        Err(failure) => Err(failure),
    };
    let result = match result {
        Ok(()) => {
            let kept = disk::keep(host, &made).await;
            if kept.is_err() {
                delete(host, name, context).await;
            }
            kept
        }
        Err(failure) => Err(failure),
    };
    let started = match result {
        Ok(()) => {
            fault::hold(&host.config.run_dir, "restore-made").await;
            let started = start(host, record, name, new.machine, on_demand, context).await;
            if started.is_err() {
                delete(host, name, context).await;
            }
            started
        }
        Err(failure) => Err(failure),
    };
    if started.is_err() {
        for disk in made {
            if let Err(failure) = disk::delete(host, &disk, &Context::default()).await {
                tracing::error!(disk, %failure, "delete a disk that was made for a VM of a snapshot");
            }
        }
    }
    started
}

async fn delete(host: &Arc<Host>, name: &str, context: &Context) {
    let delete = command::Request::Delete { force: true };
    if let Err(failure) = ask(host, name, delete, None, context).await {
        tracing::error!(vm = name, %failure, "delete a VM that could not be restored from a snapshot");
    }
}

/// Creates a VM like that of the snapshot.
async fn make(
    host: &Arc<Host>,
    record: &SnapshotRecord,
    mut spec: v1::VmSpec,
    new: &New<'_>,
    context: &Context,
) -> Result<(), Failure> {
    let hardware = record.vm_hardware.clone().unwrap_or_default();
    let fresh = new.machine == Machine::Booted;
    if fresh {
        for nic in &mut spec.nics {
            // A MAC address and an address in a network are of one VM.
            nic.mac.clear();
            nic.address.clear();
        }
    }
    // The directory is the other VM's.
    spec.state_dir.clear();
    // The lock serializes the comparison of addresses until the VM exists.
    let _turn = host.snapshots.making.lock().await;
    if !fresh
        && !new.share_addresses
        && let Some(vm) = who_has(host, &hardware)
    {
        let message = format!(
            "the snapshot has NICs, whose addresses VM \"{vm}\" has too: delete it first, restore into it if it is the snapshot's own, have a fresh \
             VM, or let them share the addresses if their NICs are kept apart"
        );
        return Err(Failure::precondition("NIC_ADDRESS_IN_USE", message));
    }
    let wire = v1::Vm {
        metadata: Some(v1::ObjectMetadata {
            name: new.name.to_owned(),
            labels: record.labels.clone(),
            ..Default::default()
        }),
        spec: Some(spec),
        status: None,
    };
    create_as(Arc::clone(host), wire, (!fresh).then_some(hardware), context).await?;
    Ok(())
}

/// A VM that has one of these addresses of NICs.
fn who_has(host: &Host, hardware: &Hardware) -> Option<String> {
    let macs = hardware.nics.values().filter_map(|nic| {
        let octets = <[u8; 6]>::try_from(nic.mac.as_slice()).ok()?;
        Some(Mac::try_from(octets).ok()?.to_string())
    });
    let macs: Vec<_> = macs.collect();
    let has = |vm: &&Arc<v1::Vm>| {
        let mut nics = vm.status.iter().flat_map(|status| &status.nics);
        nics.any(|nic| macs.contains(&nic.mac))
    };
    let vms = host.vms.list();
    let vm = vms.iter().find(has)?;
    Some(vm.metadata.clone().unwrap_or_default().name)
}

async fn start(
    host: &Arc<Host>,
    record: &SnapshotRecord,
    name: &str,
    machine: Machine,
    on_demand: bool,
    context: &Context,
) -> Result<v1::Vm, Failure> {
    let file = match record.has_machine() && machine != Machine::Booted {
        true => Some(open(folder(host).path(record)).await?),
        false if machine == Machine::OfSnapshot => None,
        // Its disks are the snapshot's already.
        false => return ask(host, name, command::Request::Start, None, context).await,
    };
    let rollback = match machine {
        Machine::OfSnapshot => disks::rollback(host, &folder(host), record, name)?,
        Machine::OfVm | Machine::Booted => None,
    };
    let restore = Restore {
        on_demand: on_demand && file.is_some(),
        file: file.map(|file| Arc::new(file.into())),
        stream: false,
        bytes: record.size_bytes,
        machine: (machine == Machine::OfSnapshot).then(|| {
            let (spec, hardware) = (record.vm_spec.clone(), record.vm_hardware.clone());
            (spec.unwrap_or_default(), hardware.unwrap_or_default())
        }),
        rollback,
    };
    ask(host, name, command::Request::Start, Some(restore), context).await
}

async fn open(path: PathBuf) -> Result<File, Failure> {
    let opened = spawn_blocking(move || File::open(path)).await;
    let opened = opened.unwrap_or_else(|error| Err(std::io::Error::other(error)));
    opened.map_err(|error| failed("open the snapshot's file", &error))
}

/// Asks the VM's actor and waits for the end of what follows.
async fn ask(
    host: &Arc<Host>,
    name: &str,
    request: command::Request,
    restore: Option<Restore>,
    context: &Context,
) -> Result<v1::Vm, Failure> {
    let entry = host.vms.get(name).ok_or_else(|| Failure::no_vm(name))?;
    let (reply, answer) = oneshot::channel();
    let mut life = Life::new(context.clone(), request, reply);
    life.restore = restore.map(Box::new);
    let sent = entry.mailbox.send(Command::Life(life)).await;
    sent.map_err(|_| Failure::unavailable(name))?;
    let answer = answer.await.map_err(|_| Failure::unavailable(name))??;
    let Some(pending) = answer.pending else {
        return Ok(answer.vm.as_ref().clone());
    };
    let ended = pending.ended().await?;
    let vm =
        ended.ok_or_else(|| Failure::new(Kind::Aborted, "SUPERSEDED", "another request came in between"))?;
    Ok(vm.as_ref().clone())
}
