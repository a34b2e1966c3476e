//! Reconciliation at the daemon's start: for each record, finds the current state of the VM.
//!
//! All VMs are reconciled at once, so that an unresponsive VM does not delay the others. Files and
//! cgroups without a record are removed, unless a process lives there; such a process stays and is
//! reported.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use tokio::task::{JoinSet, spawn_blocking};
use uuid::Uuid;
use vm_lifecycle::{
    exit::{Evidence, classify, count, phase},
    pause::{EXPIRED, WATCHDOG_EXPIRED},
    policy::Occasion,
};
use vmm_protocol::vmm::{PauseReason, State, Status};
use vmmd_api::v1::{ExitReason, ExitStatus, VmPhase};
use vmmd_host::{capacity::Demand, clock, lock, text};
use vmmd_objects::event::{Draft, Object};
use vmmd_spec::vm::VmSpec;
use vmmd_store::{InstanceRecord, Unreadable, VmRecord};

use super::unusable::{self, Why};
use crate::{
    host::Host,
    paths::{self, LogDir, NonVolatileDir, RuntimeDir},
    share::{Keepers, Run},
    vm::{
        actor::{Actor, without_disk},
        api::describe::{DISK_ERROR, MIGRATING, SNAPSHOT, View},
        instance::{Found, Instance, exit_record, find, users_of_processes},
        machine::change,
        start::{clean_up, rollback},
    },
};

/// Brings all VMs of the store under control.
pub async fn reconcile(host: &Arc<Host>, records: Vec<VmRecord>, unreadable: Vec<Unreadable>) {
    let users: BTreeSet<_> = records
        .iter()
        .filter_map(|record| Some(record.instance.as_ref()?.user))
        .collect();
    for user in users_of_processes().filter(|user| !users.contains(user)) {
        host.ledger.set_aside(user);
    }
    let mut known = BTreeSet::new();
    let (mut tasks, mut under_way) = (JoinSet::new(), HashMap::new());
    for record in records {
        let Ok(uid) = Uuid::from_slice(&record.uid) else {
            tracing::error!(vm = record.name, "record without a valid uid ignored");
            continue;
        };
        known.insert(uid);
        let task = tasks.spawn(restore(Arc::clone(host), uid, record.clone()));
        under_way.insert(task.id(), (uid, record));
    }
    known.extend(
        unreadable
            .iter()
            .filter_map(|bad| Uuid::from_slice(&bad.uid).ok()),
    );
    while let Some(result) = tasks.join_next_with_id().await {
        if let Err(error) = result {
            tracing::error!(%error, "a VM could not be restored");
            if let Some((uid, record)) = under_way.remove(&error.id()) {
                unusable::not_restored(host, uid, record);
            }
        }
    }
    // Behind the others, which have their names for certain.
    for bad in unreadable {
        if let Ok(uid) = Uuid::from_slice(&bad.uid) {
            take_unreadable(host, uid, bad).await;
        }
    }
    let host = Arc::clone(host);
    let removed = spawn_blocking(move || remove_leftovers(&host, &known)).await;
    if let Ok(Err(error)) = removed {
        tracing::warn!(%error, "look for what no VM owns");
    }
}

/// A VM of whose record no more than the key can be relied on. A process that it may have keeps its user id: that is no other
/// VM's, and was set aside. The process is taken over if it holds the VM's lock and has the user id of the record, so that it can be ended.
async fn take_unreadable(host: &Arc<Host>, uid: Uuid, bad: Unreadable) {
    let name = if bad.name.is_empty() || host.vms.get(&bad.name).is_some() {
        let uid = uid.simple().to_string();
        format!("unreadable-{}", uid.get(..8).unwrap_or_default())
    } else {
        bad.name
    };
    let lives = lock::is_held(&RuntimeDir::of(&host.config, uid).lock()).unwrap_or(false);
    let user = bad.user.filter(|user| lives && host.config.vm_uids.has(*user));
    let record = VmRecord {
        uid: bad.uid,
        name,
        instance: user.map(|user| InstanceRecord {
            user,
            ..InstanceRecord::default()
        }),
        ..VmRecord::default()
    };
    unusable::take_over(host, uid, record, Why::Record(bad.error)).await;
}

/// Takes a VM over as its record and its process are.
pub async fn restore(host: Arc<Host>, uid: Uuid, mut record: VmRecord) {
    for disk in record.spec.iter_mut().flat_map(|spec| &mut spec.disks) {
        // As an attach of the same disk has it.
        host.disks.fill_in(disk);
    }
    let spec = match record.spec.as_ref().map(VmSpec::try_from) {
        Some(Ok(spec)) => spec,
        problem => {
            let problem = match problem {
                Some(Err(violations)) => violations.to_string(),
                _ => "there is none".to_owned(),
            };
            return unusable::take_over(&host, uid, record, Why::Spec(problem)).await;
        }
    };
    if let (Some(run), Some(parent)) = (&record.instance, &host.cgroups)
        && !run.cgroup.is_empty()
    {
        parent.place(uid, Some(run.cgroup.clone().into()));
    }
    if let Some(run) = &mut record.instance {
        run.spec = run.spec.take().or_else(|| record.spec.clone());
        run.hardware = run.hardware.take().or_else(|| record.hardware.clone());
    }
    change::hold_disks(&host, &record);
    let Some(run) = record.instance.clone() else {
        tidy(&host, uid).await;
        take_up_images(&host, &mut record, None).await;
        let view = stopped_view(&record);
        let occasion = Some((found_down(&host, &record), 0));
        return Actor::spawn(&host, uid, record, spec, view, None, occasion);
    };
    let of_run = run.spec.as_ref().and_then(|spec| VmSpec::try_from(spec).ok());
    let demand = Demand::of(of_run.as_ref().unwrap_or(&spec));
    let found = find(&host, uid, run.user, &record.name, demand).await;
    match found {
        Ok(Found::Alive(mut instance, hello)) => {
            let status = hello.map(|hello| hello.status.unwrap_or_default());
            let state = status.as_ref().map(Status::state);
            if state == Some(State::Empty) {
                abandon(&host, uid, &mut record, *instance).await;
                take_up_images(&host, &mut record, Some(false)).await;
                repaired(
                    &host,
                    Object::Vm(record.name.clone(), uid),
                    "the last daemon ended while it started the VM: its process was ended, the VM is stopped",
                );
                let view = stopped_view(&record);
                let occasion = Some((Occasion::Ended(ExitReason::StartFailed), 0));
                return Actor::spawn(&host, uid, record, spec, view, None, occasion);
            }
            tracing::info!(
                vm = record.name,
                pid = instance.process.pid(),
                "attached to a running vmm"
            );
            if state.is_some() {
                take_up_images(&host, &mut record, Some(true)).await;
            }
            let machine = of_run.as_ref().unwrap_or(&spec);
            let run = Run {
                uid,
                vm: &record.name,
                vmm: &instance.process,
            };
            instance.shares = Keepers::adopt(&host, &run, machine);
            let (watching, name) = (Arc::clone(&host), record.name.clone());
            let watched = spawn_blocking(move || {
                watching.logs.watch(uid, &name, LogDir::of(&watching.config, uid));
            });
            if let Err(error) = watched.await {
                tracing::error!(vm = record.name, %error, "watch the logs of a running VM");
            }
            let view = match status {
                Some(status) if status.state() == State::Paused => paused_view(&status),
                _ => View::new(VmPhase::Running, "Running", ""),
            };
            Actor::spawn(&host, uid, record, spec, view, Some(*instance), None);
        }
        Ok(Found::Ended) => {
            let spec = give_up_attaching(&host, &mut record, spec);
            let reason = close(&host, uid, &mut record, &run).await;
            take_up_images(&host, &mut record, None).await;
            let view = stopped_view(&record);
            let occasion = if run.boot_id == host.boot_id {
                Occasion::Ended(reason)
            } else {
                Occasion::NodeBoot(Some(reason))
            };
            // When it ended is not known to the millisecond, but when that was found is later.
            let ended_ms = view.phase_ms;
            let ran_ms = ended_ms.saturating_sub(run.started_ms);
            // The wall clock may have been set meanwhile.
            let elapsed = clock::elapsed_ms(run.started_since_boot).filter(|_| run.boot_id == host.boot_id);
            let ran_ms = elapsed.map_or(ran_ms, |elapsed| ran_ms.min(elapsed));
            Actor::spawn(&host, uid, record, spec, view, None, Some((occasion, ran_ms)));
        }
        Err(error) => {
            tracing::error!(vm = record.name, %error, "a vmm that lives can't be found");
            let why = Why::Unreachable(text::words(&error));
            unusable::spawn(&host, uid, record, why, None);
        }
    }
}

/// Ends a restore of the last daemon; `ran`: whether the machine has run with the copies of the snapshot's disks, `None` when unknown. After an error
/// the next start tries again.
pub async fn take_up_images(host: &Arc<Host>, record: &mut VmRecord, ran: Option<bool>) {
    if record.replacing.is_none() {
        return;
    }
    if let Err(failure) = rollback::take_up(host, record, ran).await {
        tracing::error!(vm = record.name, %failure, "end the restore of a VM");
        return;
    }
    if let Err(error) = host.store.put(record).await {
        tracing::error!(vm = record.name, %error, "the VM's record could not be written");
    }
}

/// Returns the occasion for the run policy of a VM without a process.
fn found_down(host: &Host, record: &VmRecord) -> Occasion {
    let last = record.exit_reason();
    let waited = record.restart.as_ref();
    if waited.is_some_and(|restart| restart.boot_id != host.boot_id) {
        Occasion::NodeBoot(last)
    } else {
        Occasion::DaemonStart(last)
    }
}

/// Removes from the spec the disks that were being attached when the last daemon ended. No client
/// received a success for them, and the machine has ended since.
fn give_up_attaching(host: &Host, record: &mut VmRecord, mut spec: VmSpec) -> VmSpec {
    let attaching = record.instance.clone().unwrap_or_default().attaching;
    for name in attaching {
        let mut changed = record.clone();
        if let Ok(without) = without_disk(&mut changed, &name) {
            (*record, spec) = (changed, without);
            let object = Object::Vm(
                record.name.clone(),
                Uuid::from_slice(&record.uid).unwrap_or_default(),
            );
            let message =
                format!("the last daemon ended while it attached disk \"{name}\": it is not attached");
            repaired(host, object, message);
        }
    }
    spec
}

/// Emits an event for a repaired inconsistency.
fn repaired(host: &Host, object: Object, message: impl Into<String>) {
    host.events.emit(Draft::normal(object, "Repaired", message));
}

fn paused_view(status: &Status) -> View {
    match status.pause_reason() {
        PauseReason::DiskError => View::new(VmPhase::Paused, DISK_ERROR, status.pause_message.clone()),
        PauseReason::Migration => {
            View::new(VmPhase::Paused, MIGRATING, "its memory was sent to another node")
        }
        PauseReason::Watchdog => View::new(VmPhase::Paused, WATCHDOG_EXPIRED, EXPIRED),
        PauseReason::Snapshot => View::new(VmPhase::Paused, SNAPSHOT, "a snapshot is written"),
        _ => View::new(VmPhase::Paused, "Paused", ""),
    }
}

/// Removes what an earlier daemon did not come to remove after a run.
async fn tidy(host: &Arc<Host>, uid: Uuid) {
    let host = Arc::clone(host);
    let tidied = spawn_blocking(move || {
        if lock::is_held(&RuntimeDir::of(&host.config, uid).lock())? {
            return Err(std::io::Error::other("a process lives where none should"));
        }
        clean_up(&host, uid)
    });
    if let Ok(Err(error)) = tidied.await {
        tracing::warn!(%uid, %error, "tidy up after an earlier run");
    }
}

/// Ends a process that the last daemon had forked but not told what to be.
async fn abandon(host: &Arc<Host>, uid: Uuid, record: &mut VmRecord, mut instance: Instance) {
    instance.process.kill();
    instance.ended().await;
    let exit = ExitStatus {
        reason: ExitReason::StartFailed.into(),
        message: "the daemon ended while it started the VM".to_owned(),
        time: text::timestamp(text::now_ms()),
    };
    finish(host, uid, record, exit).await;
}

/// Notes the end of a run that came while no daemon was there, and returns how it was.
async fn close(host: &Arc<Host>, uid: Uuid, record: &mut VmRecord, run: &InstanceRecord) -> ExitReason {
    let blocking = Arc::clone(host);
    let found = spawn_blocking(move || {
        let group = blocking.cgroups.as_ref().map(|parent| parent.group(uid));
        let record = exit_record(&RuntimeDir::of(&blocking.config, uid).exit());
        (record, group.is_some_and(|group| group.oom_killed()))
    });
    let (exit_record, oom_killed) = found.await.unwrap_or_default();
    let node_restarted = run.boot_id != host.boot_id;
    let evidence = Evidence {
        record: exit_record,
        oom_killed,
        node_restarted,
        now_ms: text::now_ms(),
        ..Evidence::default()
    };
    let exit = classify(&evidence).status;
    let reason = exit.reason();
    finish(host, uid, record, exit).await;
    reason
}

async fn finish(host: &Arc<Host>, uid: Uuid, record: &mut VmRecord, exit: ExitStatus) {
    let (phase, word) = phase(exit.reason());
    let object = Object::Vm(record.name.clone(), uid);
    let message = match exit.message.as_str() {
        "" => "the VM ended while the daemon was not there",
        message => message,
    };
    host.events.emit(match phase {
        VmPhase::Failed => Draft::warning(object, word, message),
        _ => Draft::normal(object, word, message),
    });
    count(record.counts.get_or_insert_default(), exit.reason());
    record.instance = None;
    record.last_exit = Some(exit);
    // The disks that only the machine had are free.
    change::hold_disks(host, record);
    match host.store.put(record).await {
        Ok(()) => {
            let host = Arc::clone(host);
            if let Ok(Err(error)) = spawn_blocking(move || clean_up(&host, uid)).await {
                tracing::warn!(vm = record.name, %error, "clean up after a run");
            }
        }
        Err(error) => tracing::error!(vm = record.name, %error, "the VM's record could not be written"),
    }
}

fn stopped_view(record: &VmRecord) -> View {
    match &record.last_exit {
        Some(exit) => {
            let (phase, reason) = phase(exit.reason());
            let mut view = View::new(phase, reason, exit.message.clone());
            if let Some(time) = &exit.time {
                view.phase_ms = text::unix_ms(time);
            }
            view
        }
        None => View::new(VmPhase::Stopped, "Created", ""),
    }
}

fn unknown_process(host: &Host, uid: Uuid) {
    let message = format!(
        "a vmm process runs for a VM {uid} that this node does not know: vmmd does not touch it; end it if it is not needed"
    );
    host.events
        .emit(Draft::warning(Object::Node, "UnknownProcess", message));
}

fn remove_leftovers(host: &Host, known: &BTreeSet<Uuid>) -> std::io::Result<()> {
    let foreign = |uid: &Uuid| !known.contains(uid);
    let mut alive = BTreeSet::new();
    for uid in paths::list(&host.config.run_dir)?.into_iter().filter(foreign) {
        let runtime = RuntimeDir::of(&host.config, uid);
        if lock::is_held(&runtime.lock())? {
            unknown_process(host, uid);
            alive.insert(uid);
        } else {
            runtime.remove()?;
            let message = format!("the runtime files of a VM {uid} that is no more were removed");
            repaired(host, Object::Node, message);
        }
    }
    if let Some(parent) = &host.cgroups {
        for uid in parent.list()?.into_iter().filter(foreign) {
            if alive.contains(&uid) {
                continue;
            }
            // One whose files were removed, unless it ends just now.
            if let Err(error) = parent.group(uid).remove() {
                tracing::warn!(%uid, %error, "remove a cgroup");
                unknown_process(host, uid);
                alive.insert(uid);
            } else {
                let message = format!("the cgroup of a VM {uid} that is no more was removed");
                repaired(host, Object::Node, message);
            }
        }
    }
    for uid in paths::list(&host.config.log_dir)?.into_iter().filter(foreign) {
        if !alive.contains(&uid) {
            LogDir::of(&host.config, uid).remove()?;
            let message = format!("the logs of a VM {uid} that is no more were removed");
            repaired(host, Object::Node, message);
        }
    }
    for uid in paths::list(&host.config.state_dir)?.into_iter().filter(foreign) {
        if !alive.contains(&uid) {
            NonVolatileDir::of(&host.config, uid).remove()?;
            let message = format!("the non-volatile memory of a VM {uid} that is no more was removed");
            repaired(host, Object::Node, message);
        }
    }
    Ok(())
}
