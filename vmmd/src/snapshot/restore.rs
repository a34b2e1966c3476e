//! Has a VM go on from a snapshot.

use std::{fs::File, sync::Arc};

use proto::{
    model::{
        name::Name,
        vm::{API_VERSION, KIND},
    },
    v1,
};
use tokio::{sync::oneshot, task::spawn_blocking};

use super::{failed, folder};
use crate::{
    context::Context,
    failure::{Failure, Kind},
    host::Host,
    store::SnapshotRecord,
    text,
    vm::{Command, Life, Restore, admission, create_as},
};

/// Does what is asked for; returns when the VM runs. A VM that was made for it is gone again when that fails.
pub async fn restore(
    host: &Arc<Host>,
    request: v1::RestoreVmRequest,
    context: &Context,
) -> Result<v1::Vm, Failure> {
    let record = host.snapshots.get(&request.snapshot)?;
    let name = match request.vm.as_str() {
        "" => record.vm_name.clone(),
        name => name.to_owned(),
    };
    let by_this = host.requests.made_by_restore(context);
    let own = host.table.get(&name).filter(|entry| {
        let uid = entry.uid.as_bytes().as_slice();
        uid == record.vm_uid || Some(uid) == by_this.as_deref()
    });
    let made = match own {
        Some(entry) => entry.uid.as_bytes().as_slice() != record.vm_uid,
        None => {
            make(host, &record, &name, context).await?;
            true
        }
    };
    let started = start(host, &record, &name, request.on_demand, context).await;
    if started.is_err() && made {
        let gone = ask(
            host,
            &name,
            admission::Request::Delete { force: true },
            None,
            context,
        )
        .await;
        if let Err(failure) = gone {
            tracing::error!(vm = name, %failure, "delete a VM that did not go on from a snapshot");
        }
    }
    started
}

/// Makes a VM like that of the snapshot.
async fn make(
    host: &Arc<Host>,
    record: &SnapshotRecord,
    name: &str,
    context: &Context,
) -> Result<(), Failure> {
    if let Err(error) = Name::try_from(name) {
        return Err(Failure::field(
            "vm",
            format_args!("{error}, is \"{}\"", text::brief(name)),
        ));
    }
    let hardware = record.vm_hardware.clone().unwrap_or_default();
    if !hardware.nics.is_empty() && host.table.find(super::vm_uid(record)).is_some() {
        let message = format!(
            "the snapshot has NICs, whose addresses VM \"{}\" has too: restore into that VM, or delete it first",
            record.vm_name
        );
        return Err(Failure::precondition("NIC_ADDRESS_IN_USE", message));
    }
    let wire = v1::Vm {
        api_version: API_VERSION.to_owned(),
        kind: KIND.to_owned(),
        metadata: Some(v1::ObjectMetadata {
            name: name.to_owned(),
            labels: record.labels.clone(),
            ..Default::default()
        }),
        spec: record.vm_spec.clone(),
        status: None,
    };
    create_as(Arc::clone(host), wire, hardware, context).await?;
    Ok(())
}

async fn start(
    host: &Arc<Host>,
    record: &SnapshotRecord,
    name: &str,
    on_demand: bool,
    context: &Context,
) -> Result<v1::Vm, Failure> {
    let path = folder(host).path(record);
    let opened = spawn_blocking(move || File::open(path)).await;
    let opened = opened.unwrap_or_else(|error| Err(std::io::Error::other(error)));
    let file = opened.map_err(|error| failed("open the snapshot's file", &error))?;
    let restore = Restore {
        file: Arc::new(file.into()),
        on_demand,
        bytes: record.size_bytes,
    };
    ask(host, name, admission::Request::Start, Some(restore), context).await
}

/// Asks the VM's actor and waits for the end of what follows.
async fn ask(
    host: &Arc<Host>,
    name: &str,
    request: admission::Request,
    restore: Option<Restore>,
    context: &Context,
) -> Result<v1::Vm, Failure> {
    let entry = host.table.get(name).ok_or_else(|| Failure::no_vm(name))?;
    let (reply, answer) = oneshot::channel();
    let mut life = Life::new(context.clone(), request, reply);
    life.restore = restore;
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
