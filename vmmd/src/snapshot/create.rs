//! Takes a snapshot.

use std::{fs::File, sync::Arc};

use proto::{
    model::{Violations, metadata},
    v1,
    vmm::SaveReply,
};
use tokio::{sync::oneshot, task::spawn_blocking};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{describe, failed, folder, remove, tell};
use crate::{
    context::Context,
    control::Client,
    event::Object,
    failure::{Failure, Kind},
    host::Host,
    operation::{Progress, Type},
    store::{SnapshotRecord, SnapshotStage, VmRecord},
    sys, text,
    vm::{Command, refused, store_failure},
};

/// Steps, as the operation counts them: the `vmm` writes the file, and the record is written.
const STEPS: u64 = 2;

/// Takes the snapshot that is asked for; returns when it is whole and durable. `cancel` ends the attempt; whatever fails, nothing is
/// left of it, and the VM goes on.
pub async fn create(
    host: &Arc<Host>,
    request: v1::CreateSnapshotRequest,
    context: &Context,
    cancel: CancellationToken,
) -> Result<v1::Snapshot, Failure> {
    if let Some(made) = host.requests.made_snapshot(context)
        && let Some(record) = host.snapshots.list().into_iter().find(|it| it.uid == made)
    {
        return Ok(describe(&record));
    }
    let (mut record, vm) = validate(host, &request).await?;
    record.begun = host.requests.mark(context).into_iter().collect();
    let client = client(host, &record.vm_name).await?;
    host.snapshots.reserve(&record)?;
    let object = Object::Snapshot(record.name.clone(), super::uid(&record));
    let operation = host
        .operations
        .begin(Type::SnapshotCreate, &object, context, None);
    operation.progress(Progress::steps(0, STEPS), "writing the snapshot");
    let work = make(host, &record, &vm, &client, request.paused);
    let made = tokio::select! {
        made = work => made,
        () = cancel.cancelled() => Err(cancelled()),
        () = operation.token().cancelled() => Err(cancelled()),
    };
    let noted = match made {
        Ok(reply) => {
            record.stage = SnapshotStage::Ready.into();
            record.completed_ms = text::now_ms();
            record.size_bytes = reply.file_bytes;
            record.written_bytes = reply.memory_bytes;
            record.pause_ns = reply.pause_ns;
            host.store.put_snapshot(&record).await.map_err(store_failure)
        }
        Err(failure) => Err(failure),
    };
    if let Err(failure) = noted {
        if let Err(failure) = remove(host, &record).await {
            tracing::error!(snapshot = record.name, %failure, "remove what is left of a snapshot");
            host.snapshots.forget(&record.name);
        }
        operation.fail(&failure);
        return Err(failure);
    }
    host.snapshots.settle(record.clone());
    operation.complete("the snapshot is whole");
    let message = format!("a snapshot of VM \"{}\" was taken", record.vm_name);
    tell(host, &record, "SnapshotCreated", message);
    Ok(describe(&record))
}

fn cancelled() -> Failure {
    let message = "the snapshot was cancelled: nothing was made";
    Failure::new(Kind::Aborted, "CANCELLED", message)
}

/// The record of what is asked for, and the VM's.
async fn validate(
    host: &Host,
    request: &v1::CreateSnapshotRequest,
) -> Result<(SnapshotRecord, VmRecord), Failure> {
    let mut found = Violations::default();
    let snapshot = request.snapshot.clone().unwrap_or_default();
    if snapshot.status.is_some() {
        found.add("snapshot.status", "is set by the daemon: leave it out");
    }
    let wire = snapshot.metadata.unwrap_or_default();
    metadata::refuse_given(&mut found, "snapshot.metadata", &wire);
    let metadata = metadata::Metadata::new(&mut found, "snapshot.metadata", &wire);
    let vm = snapshot.spec.unwrap_or_default().vm;
    if vm.is_empty() {
        found.add("snapshot.spec.vm", "names the VM: give it");
    }
    let metadata = match metadata {
        Some(metadata) => found.or(metadata)?,
        None => return Err(found.into()),
    };
    let uid = host
        .table
        .get(&vm)
        .ok_or_else(|| Failure::no_vm(&vm))?
        .uid
        .as_bytes()
        .to_vec();
    let of = host.store.vm(&uid).await.map_err(store_failure)?;
    let of = of.ok_or_else(|| Failure::no_vm(&vm))?;
    let run = of.instance.clone().ok_or_else(|| not_running(&vm))?;
    // What an earlier daemon has started without saying so has the VM's own.
    let spec = run.spec.or_else(|| of.spec.clone()).unwrap_or_default();
    let disks = spec.disks.iter().filter(|disk| !disk.read_only);
    let disks: Vec<_> = disks.map(|disk| format!("\"{}\"", disk.name)).collect();
    if !disks.is_empty() {
        let message = format!(
            "VM \"{vm}\" has disks that its guest can write to ({}): this vmmd takes snapshots only of VMs without such disks",
            disks.join(", ")
        );
        return Err(Failure::precondition("SNAPSHOT_DISKS", message));
    }
    let record = SnapshotRecord {
        uid: Uuid::new_v4().as_bytes().to_vec(),
        name: metadata.name.to_string(),
        created_ms: text::now_ms(),
        labels: metadata.labels,
        annotations: metadata.annotations,
        owner: metadata.owner,
        stage: SnapshotStage::Partial.into(),
        vm_name: vm,
        vm_uid: uid,
        vm_spec: Some(spec),
        vm_hardware: run.hardware.or_else(|| of.hardware.clone()),
        ..SnapshotRecord::default()
    };
    Ok((record, of))
}

fn not_running(vm: &str) -> Failure {
    let message = format!("VM \"{vm}\" does not run: start it first");
    Failure::precondition("VM_NOT_RUNNING", message)
}

/// For asking the VM's `vmm`.
async fn client(host: &Host, vm: &str) -> Result<Client, Failure> {
    let entry = host.table.get(vm).ok_or_else(|| Failure::no_vm(vm))?;
    let (reply, answer) = oneshot::channel();
    let sent = entry.mailbox.send(Command::Client(reply)).await;
    sent.map_err(|_| Failure::unavailable(vm))?;
    answer.await.map_err(|_| Failure::unavailable(vm))?
}

async fn make(
    host: &Arc<Host>,
    record: &SnapshotRecord,
    vm: &VmRecord,
    client: &Client,
    paused: bool,
) -> Result<SaveReply, Failure> {
    host.store.put_snapshot(record).await.map_err(store_failure)?;
    let (folder, of) = (folder(host), record.clone());
    let made = spawn_blocking(move || {
        let file = folder.create(&of)?;
        folder.sync().map(|()| file)
    });
    let made = made
        .await
        .unwrap_or_else(|error| Err(std::io::Error::other(error)));
    let file: File = made.map_err(|error| failed("make the snapshot's file", &error))?;
    let description = prost::Message::encode_to_vec(&super::describe(record));
    let saved = client.save(file.into(), paused, description).await;
    let reply = saved.map_err(|error| {
        let failure = refused(&error);
        Failure {
            message: format!("snapshot of VM \"{}\": {}", vm.name, failure.message),
            ..failure
        }
    })?;
    // The length is what the daemon sees, not what the `vmm` says; and what others go on from is nobody's to change any more.
    let (folder, of) = (super::folder(host), record.clone());
    let looked = spawn_blocking(move || {
        let file = File::open(folder.path(&of))?;
        Ok((file.metadata()?.len(), sys::has_writer(&file)?))
    });
    let looked = looked
        .await
        .unwrap_or_else(|error| Err(std::io::Error::other(error)));
    let (file_bytes, has_writer) = looked.map_err(|error| failed("look at the snapshot's file", &error))?;
    if has_writer == Some(true) {
        let message = format!(
            "the vmm process of VM \"{}\" keeps the snapshot open for writing",
            vm.name
        );
        return Err(Failure::new(Kind::Internal, "VMM_MISBEHAVES", message));
    }
    Ok(SaveReply { file_bytes, ..reply })
}
