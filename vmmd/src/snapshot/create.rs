//! Takes a snapshot.

use std::{fs::File, os::fd::OwnedFd, pin::pin, sync::Arc, time::Duration};

use tokio::{
    sync::{OwnedMutexGuard, oneshot},
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;
use vmm_protocol::vmm::SaveReply;
use vmmd_api::v1;
use vmmd_host::{
    failure::{Failure, Kind},
    fault, sys, text,
};
use vmmd_objects::{
    context::Context,
    event::Object,
    operation::{Control, Progress, Type},
};
use vmmd_spec::{Violations, metadata};
use vmmd_store::store_failure;
use vmmd_store::{InstanceRecord, SnapshotRecord, SnapshotStage};

use super::{blocking, describe, disks, end, failed, retention};
use crate::{
    control::Client,
    files::Locks,
    guest::{self, Frozen},
    host::Host,
    registry::vms::command::{Command, Purpose, Quiet},
    vm::refused,
};

/// How long a `vmm` may take to give a snapshot up.
const GIVING_UP: Duration = Duration::from_secs(10);
/// Message for a `vmm` that does not.
const GOES_ON: &str = "nothing is kept of it, but the VM's vmm process still writes it, and may keep the VM paused until all is written";
/// Room for the state of processors and devices in bytes, about.
const DEVICES: u64 = 4 << 20;
/// Steps, as the operation counts them: the `vmm` writes the file, and the record is written.
const STEPS: u64 = 2;

/// Source of a snapshot.
enum Source {
    /// A machine, whose `vmm` writes the file.
    Machine(Client),
    /// The disks of a machine, which stands still until they are copied.
    DisksOfMachine(Client),
    /// The disks of a VM that does not run, and is not started before they are copied.
    DisksOfStopped { _held: OwnedMutexGuard<()> },
}

impl Source {
    /// Returns the source for the disks alone. A stopped VM cannot start while the source exists.
    /// With a running VM only its machine writes to the disks.
    async fn of_disks(host: &Host, vm: &str) -> Result<Self, Failure> {
        Ok(match ask(host, vm, Command::Quiet).await? {
            Quiet::Runs(client) => Self::DisksOfMachine(client),
            Quiet::Stopped(held) => Self::DisksOfStopped { _held: held },
        })
    }

    /// The machine, if there is one.
    fn client(&self) -> Option<&Client> {
        match self {
            Self::Machine(client) | Self::DisksOfMachine(client) => Some(client),
            Self::DisksOfStopped { .. } => None,
        }
    }
}

/// How a snapshot is taken.
#[derive(Clone, Copy)]
struct Mode {
    /// The VM is paused from the beginning to the end.
    paused: bool,
    /// Wanted state of the guest's file systems.
    consistency: v1::SnapshotConsistency,
}

/// Takes a snapshot; returns when it is complete and durable. `cancel` ends the attempt. An attempt that fails leaves nothing, and the VM
/// continues.
pub async fn create(
    host: &Arc<Host>,
    request: v1::CreateSnapshotRequest,
    context: &Context,
    cancel: CancellationToken,
) -> Result<v1::Snapshot, Failure> {
    if let Some(made) = host.requests.made(context, "CreateSnapshot")
        && let Some(seen) = host.snapshots.registry.find(&made)
    {
        return Ok(describe(&seen.record, host.store.key()));
    }
    let mut record = validate(&request)?;
    let disks = match record.has_machine() {
        true => None,
        false => Some(Source::of_disks(host, &record.vm_name).await?),
    };
    let stopped = matches!(disks, Some(Source::DisksOfStopped { .. }));
    find_vm(host, &mut record, (request.paused, stopped)).await?;
    fault::hold(&host.config.run_dir, "snapshot-validated").await;
    let locks = match &disks {
        // Another holder of the locks could write to the disks.
        Some(Source::DisksOfStopped { .. }) => Locks::Take,
        _ => Locks::None,
    };
    let (of, spec) = (Arc::clone(host), record.vm_spec.clone().unwrap_or_default());
    let (images, allocated) = blocking(host, move |_| {
        let images = disks::open(&of, &spec, locks)?;
        let allocated = images.allocated()?;
        Ok((images, allocated))
    })
    .await?;
    if !record.has_machine() && images.is_empty() {
        let message = format!(
            "VM \"{}\" has no disk that its guest can write to: there is nothing to copy",
            record.vm_name
        );
        return Err(Failure::precondition("SNAPSHOT_DISKS", message));
    }
    record.allocated_bytes = most(&record).saturating_add(allocated);
    record.disks = images.describe();
    record.begun = host.requests.mark(context).into_iter().collect();
    let source = match disks {
        Some(disks) => disks,
        None => Source::Machine(client(host, &record.vm_name).await?),
    };
    if record.retention.is_some() {
        // Snapshots that an earlier retention has not removed yet must not count against the
        // limits.
        retention::converge(host, Some(&record.vm_uid)).await;
    }
    host.snapshots.reserve(&record, &host.config.snapshots)?;
    let object = Object::Snapshot(record.name.clone(), super::uid(&record));
    let operation = host
        .operations
        .begin(Type::SnapshotCreate, &object, context, None);
    operation.progress(Progress::steps(0, STEPS), "writing the snapshot");
    let cancel = Cancel(cancel, operation.token().clone());
    let mode = Mode {
        paused: request.paused,
        consistency: request.consistency(),
    };
    let made = make(host, &mut record, images, source, mode, &cancel).await;
    let made = made.map(|reply| {
        record.completed_ms = text::now_ms();
        record.size_bytes = reply.file_bytes;
        record.written_bytes = reply.memory_bytes;
        record.pause_ns = reply.pause_ns;
    });
    let uid = record.uid.clone();
    let taken = end(host, record, made, operation, ("SnapshotCreated", "taken")).await?;
    fault::hold(&host.config.run_dir, "snapshot-complete").await;
    retention::apply(host, &uid).await;
    Ok(taken)
}

/// The most room that the memory of a snapshot can take, in bytes: a checksum of four bytes stands beside each page of 4 KiB.
fn most(record: &SnapshotRecord) -> u64 {
    if !record.has_machine() {
        return 0;
    }
    let memory = record.vm_spec.as_ref().and_then(|spec| spec.memory.as_ref());
    let memory = memory.map_or(0, |memory| memory.size_bytes);
    memory.saturating_add(memory / 1024).saturating_add(DEVICES)
}

/// By the request and by the operation.
struct Cancel(CancellationToken, CancellationToken);

impl Cancel {
    /// The snapshot is not wanted any more.
    fn is_cancelled(&self) -> bool {
        self.0.is_cancelled() || self.1.is_cancelled()
    }

    /// Ends with the failure when the snapshot is not wanted any more.
    async fn cancelled(&self) -> Failure {
        tokio::select! {
            () = self.0.cancelled() => {}
            () = self.1.cancelled() => {}
        }
        cancelled("nothing was made")
    }
}

fn cancelled(what_is: &str) -> Failure {
    let message = format!("the snapshot was cancelled: {what_is}");
    Failure::new(Kind::Aborted, "CANCELLED", message)
}

/// The record of the snapshot, as far as the request says it.
fn validate(request: &v1::CreateSnapshotRequest) -> Result<SnapshotRecord, Failure> {
    let mut found = Violations::default();
    let snapshot = request.snapshot.clone().unwrap_or_default();
    if snapshot.status.is_some() {
        found.add("snapshot.status", "is set by the daemon: leave it out");
    }
    let wire = snapshot.metadata.unwrap_or_default();
    metadata::refuse_given(&mut found, "snapshot.metadata", &wire);
    let metadata = metadata::Metadata::new(&mut found, "snapshot.metadata", &wire);
    let spec = snapshot.spec.unwrap_or_default();
    if spec.vm.is_empty() {
        found.add("snapshot.spec.vm", "names the VM: give it");
    }
    if v1::SnapshotKind::try_from(spec.kind).is_err() {
        found.add("snapshot.spec.kind", "is not known to this vmmd");
    }
    match v1::SnapshotConsistency::try_from(request.consistency) {
        Ok(v1::SnapshotConsistency::RequireAgent) if spec.kind() != v1::SnapshotKind::Disks => found.add(
            "consistency",
            "needs a snapshot of the disks alone (kind: DISKS; --disks-only): a guest that is restored with its memory continues",
        ),
        Ok(_) => {}
        Err(_) => found.add("consistency", "is not known to this vmmd"),
    }
    let retention = retention::parse(&mut found, request.retention.as_ref());
    let metadata = match metadata {
        Some(metadata) => found.or(metadata)?,
        None => return Err(found.into()),
    };
    Ok(SnapshotRecord {
        uid: Uuid::new_v4().as_bytes().to_vec(),
        name: metadata.name.to_string(),
        created_ms: text::now_ms(),
        labels: metadata.labels,
        annotations: metadata.annotations,
        owner: metadata.owner,
        stage: SnapshotStage::Partial.into(),
        kind: match spec.kind() {
            v1::SnapshotKind::Disks => spec.kind,
            v1::SnapshotKind::Full | v1::SnapshotKind::Unspecified => v1::SnapshotKind::Full.into(),
        },
        vm_name: spec.vm,
        retention,
        ..SnapshotRecord::default()
    })
}

/// Notes in the record which VM it is of, and what that is.
async fn find_vm(
    host: &Host,
    record: &mut SnapshotRecord,
    (paused, stopped): (bool, bool),
) -> Result<(), Failure> {
    let vm = &record.vm_name;
    let entry = host.vms.get(vm).ok_or_else(|| Failure::no_vm(vm))?;
    let uid = entry.uid.as_bytes().to_vec();
    let of = host.store.vm(&uid).await.map_err(store_failure)?;
    let of = of.ok_or_else(|| Failure::no_vm(vm))?;
    if of.replacing.is_some() {
        let message = format!(
            "the disks that VM \"{vm}\" was restored with do not have their names yet: start it, or start it again, and see what the log says"
        );
        return Err(Failure::precondition("BUSY", message));
    }
    let run = match of.instance {
        None if record.has_machine() => return Err(not_running(vm)),
        // The instance may be that of a run that has ended.
        _ if stopped => InstanceRecord::default(),
        run => run.unwrap_or_default(),
    };
    if run.may_be_frozen {
        return Err(guest::may_be_frozen(vm));
    }
    if let Some(disk) = run.attaching.first() {
        let message = format!("disk \"{disk}\" is being attached to VM \"{vm}\": wait until it is");
        return Err(Failure::precondition("BUSY", message));
    }
    // A stopped VM has no spec of a run.
    let spec = run.spec.or(of.spec).unwrap_or_default();
    if let Some(share) = spec.shares.first()
        && record.has_machine()
        && !paused
    {
        let message = format!(
            "VM \"{vm}\" has the share \"{}\", whose process writes to its memory: take the snapshot while the VM is paused (paused: true; --paused), or \
             detach the share first",
            share.name
        );
        return Err(Failure::precondition("SNAPSHOT_SHARES", message));
    }
    record.vm_uid = uid;
    record.vm_spec = Some(spec);
    record.vm_hardware = run.hardware.or(of.hardware);
    Ok(())
}

fn not_running(vm: &str) -> Failure {
    let message = format!(
        "VM \"{vm}\" does not run: start it first, or take a snapshot of its disks alone (kind: DISKS; --disks-only)"
    );
    Failure::precondition("VM_NOT_RUNNING", message)
}

/// Asks the VM's actor.
async fn ask<T>(
    host: &Host,
    vm: &str,
    command: impl FnOnce(oneshot::Sender<Result<T, Failure>>) -> Command,
) -> Result<T, Failure> {
    let entry = host.vms.get(vm).ok_or_else(|| Failure::no_vm(vm))?;
    let (reply, answer) = oneshot::channel();
    let sent = entry.mailbox.send(command(reply)).await;
    sent.map_err(|_| Failure::unavailable(vm))?;
    answer.await.map_err(|_| Failure::unavailable(vm))?
}

/// For asking the VM's `vmm`.
async fn client(host: &Host, vm: &str) -> Result<Client, Failure> {
    ask(host, vm, |reply| Command::Client(Purpose::Snapshot, reply)).await
}

async fn make(
    host: &Arc<Host>,
    record: &mut SnapshotRecord,
    images: disks::Images,
    source: Source,
    mode: Mode,
    cancel: &Cancel,
) -> Result<SaveReply, Failure> {
    host.store.put(record).await.map_err(store_failure)?;
    let images = Arc::new(images);
    let (of, prepared) = (record.clone(), Arc::clone(&images));
    let may_copy = mode.paused || source.client().is_none();
    let preparing = blocking(host, move |folder| {
        let made = folder.create(&of);
        let file = made.map_err(|error| failed("make the snapshot's file", &error))?;
        disks::prepare(&folder, &of, &prepared, may_copy)?;
        let synced = folder.sync().map(|()| file);
        synced.map_err(|error| failed("make the snapshot's file", &error))
    });
    // The wait is unconditional: a failed snapshot removes the files that this step creates.
    let file: File = preparing.await?;
    if cancel.is_cancelled() {
        return Err(cancelled("nothing was made"));
    }
    let frozen = freeze(host, record, &source, mode.consistency).await?;
    fault::hold(&host.config.run_dir, "guest-frozen").await;
    let written = match source.client() {
        Some(client) => {
            let with_memory = matches!(source, Source::Machine(_));
            let file = with_memory.then(|| file.into());
            let mode = (mode, frozen.as_ref());
            save(host, record, images, (client, file), mode, cancel).await
        }
        None => {
            drop(file);
            let control = Control::default();
            let mut copying = pin!(copy_disks(host, record, images, &control));
            let copied = tokio::select! {
                copied = &mut copying => copied,
                failure = cancel.cancelled() => {
                    control.cancel().cancel();
                    // The VM can start only after its disks are closed.
                    let _ended = copying.await;
                    Err(failure)
                }
            };
            copied.map(|()| SaveReply::default())
        }
    };
    if let Some(frozen) = frozen {
        match frozen.is_consistent() {
            true => record.consistency = v1::SnapshotConsistency::Agent.into(),
            false => record.consistency_message = THAWED_EARLY.to_owned(),
        }
        frozen.thaw().await;
    }
    let reply = written.map_err(|failure| Failure {
        message: format!("snapshot of VM \"{}\": {}", record.vm_name, failure.message),
        ..failure
    })?;
    if source.client().is_some() {
        check_devices(host, record).await?;
    }
    // A VM that does not run can be started from here on.
    drop(source);
    // The `vmm` is not trusted: the daemon reads the length itself, and no process may change the
    // file from here on.
    let of = record.clone();
    let (lengths, file_bytes, has_writer) = blocking(host, move |folder| {
        let looked = (|| {
            let lengths = disks::sync(&folder, &of)?;
            let file = File::open(folder.path(&of))?;
            Ok((lengths, file.metadata()?.len(), sys::has_writer(&file)?))
        })();
        looked.map_err(|error| failed("look at the snapshot's file", &error))
    })
    .await?;
    if has_writer == Some(true) {
        let message = format!(
            "the vmm process of VM \"{}\" keeps the snapshot open for writing",
            record.vm_name
        );
        return Err(Failure::new(Kind::Internal, "VMM_MISBEHAVES", message));
    }
    disks::note_sizes(record, &lengths);
    Ok(SaveReply { file_bytes, ..reply })
}

/// Why the file systems were not frozen when the disks were quiet.
const THAWED_EARLY: &str =
    "the guest was thawed because its disks were not quiet within 10 s after its file systems were frozen";

/// Freezes the file systems of the guest, if the request wants that. A guest that cannot be frozen
/// is an error only if the request requires it.
async fn freeze(
    host: &Arc<Host>,
    record: &mut SnapshotRecord,
    source: &Source,
    wanted: v1::SnapshotConsistency,
) -> Result<Option<Frozen>, Failure> {
    use v1::SnapshotConsistency as Consistency;
    record.consistency = Consistency::Crash.into();
    if matches!(wanted, Consistency::Unspecified | Consistency::Crash) {
        return Ok(None);
    }
    let vm = &record.vm_name;
    let frozen = match source {
        Source::DisksOfMachine(_) => match host.vms.get(vm) {
            Some(entry) => guest::freeze(host, &entry).await,
            None => Err(Failure::no_vm(vm)),
        },
        Source::DisksOfStopped { .. } => Err(Failure::precondition("NOT_RUNNING", "the VM does not run")),
        Source::Machine(_) => {
            let message = "a snapshot with memory does not need it";
            Err(Failure::precondition("SNAPSHOT_KIND", message))
        }
    };
    match frozen {
        Ok(frozen) => Ok(Some(frozen)),
        Err(failure) if wanted == Consistency::RequireAgent => Err(Failure {
            message: format!(
                "the file systems of VM \"{vm}\" are not frozen: {}",
                failure.message
            ),
            ..failure
        }),
        Err(failure) => {
            record.consistency_message = format!("the file systems were not frozen: {}", failure.message);
            Ok(None)
        }
    }
}

/// Has the `vmm` write the file, or stand still without one, and copies the disks meanwhile.
async fn save(
    host: &Arc<Host>,
    record: &SnapshotRecord,
    images: Arc<disks::Images>,
    (client, file): (&Client, Option<OwnedFd>),
    (mode, frozen): (Mode, Option<&Frozen>),
    cancel: &Cancel,
) -> Result<SaveReply, Failure> {
    let keep_paused = !images.is_empty();
    let (number, _) = super::uid(record).as_u64_pair();
    let quiet = keep_paused.then(|| host.snapshots.until_quiet(&record.vm_uid, number));
    let mut saving = pin!(async {
        let saved = match file {
            Some(file) => {
                let description = super::describe(record, host.store.key());
                let description = prost::Message::encode_to_vec(&description);
                let how = (mode.paused, keep_paused);
                client.save(file, how, number, description).await
            }
            None => client.hold_disks(number).await,
        };
        saved.map_err(|error| refused(&error))
    });
    let writing = async {
        let Some(quiet) = quiet else {
            return (&mut saving).await;
        };
        let early = tokio::select! {
            early = &mut saving => Some(early),
            // Only the `vmm` reports that the disks are quiet.
            Ok(()) = quiet => None,
        };
        match early {
            Some(Err(failure)) => Err(failure),
            Some(Ok(_)) => Err(did_not_wait()),
            None => {
                if frozen.is_some_and(|frozen| !frozen.quiet())
                    && mode.consistency == v1::SnapshotConsistency::RequireAgent
                {
                    return Err(Failure::new(Kind::Aborted, "GUEST_AGENT_SILENT", THAWED_EARLY));
                }
                fault::hold(&host.config.run_dir, "disks-quiet").await;
                let control = Control::default();
                let copied = tokio::select! {
                    copied = copy_disks(host, record, images, &control) => copied,
                    // The guest may write again.
                    early = &mut saving => return early.and(Err(did_not_wait())),
                };
                client.clone().release().await;
                let saved = (&mut saving).await;
                copied.and(saved)
            }
        }
    };
    let written = tokio::select! {
        biased;
        written = writing => Ok(written),
        failure = cancel.cancelled() => Err(failure),
    };
    let give_up = client.clone().give_up_snapshot();
    match written {
        Ok(Ok(reply)) => Ok(reply),
        Ok(Err(failure)) => {
            // Ends any pause of the VM, including one that an earlier daemon has begun.
            let _in_time = timeout(GIVING_UP, give_up).await;
            Err(failure)
        }
        Err(failure) => {
            let given_up = timeout(GIVING_UP, async { tokio::join!(saving, give_up) }).await;
            Err(given_up.map_or_else(|_| cancelled(GOES_ON), |_| failure))
        }
    }
}

fn did_not_wait() -> Failure {
    Failure::internal("the vmm process of the VM did not wait for the copies of the disks")
}

/// Refused when a device has come or gone since the record was made: the machine that was saved is not the one of the record. Later than that none does
/// before the snapshot is complete, as the `vmm` sees to.
async fn check_devices(host: &Host, record: &SnapshotRecord) -> Result<(), Failure> {
    // The actor has recorded all earlier responses. The devices of a VM that has ended since are
    // unchanged.
    if client(host, &record.vm_name).await.is_err() {
        return Ok(());
    }
    let of = host.store.vm(&record.vm_uid).await.map_err(store_failure)?;
    let has = of.and_then(|of| of.instance.and_then(|run| run.hardware).or(of.hardware));
    if has.is_none() || has == record.vm_hardware {
        return Ok(());
    }
    let message = "a disk, a NIC or a share was plugged in or taken away when it began: try again";
    Err(Failure::new(Kind::Aborted, "SNAPSHOT_VM_CHANGED", message))
}

/// Copies the disks, which have no writer. The copy ends when the caller drops the future.
async fn copy_disks(
    host: &Arc<Host>,
    record: &SnapshotRecord,
    images: Arc<disks::Images>,
    control: &Control,
) -> Result<(), Failure> {
    let _with_this = control.cancel().clone().drop_guard();
    let (of, control) = (record.clone(), control.clone());
    blocking(host, move |folder| disks::copy(&folder, &of, &images, &control)).await
}
