//! File systems of a guest that are frozen for a snapshot of its disks.
//!
//! ```text
//!  noted in the VM's record ──▶ guest-fsfreeze-freeze ──▶ (frozen) ──▶ guest-fsfreeze-thaw ──▶ note removed
//! ```
//!
//! A guest never stays frozen. A task of its own thaws the guest: when the [`Frozen`] is dropped,
//! and at the latest after [`LIMIT`] while the guest runs. It repeats the request until the agent
//! has answered. The next daemon finds the note and continues.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep, timeout},
};
use uuid::Uuid;
use vmmd_api::v1::{self, VmPhase};
use vmmd_host::{failure::Failure, fault};
use vmmd_objects::event::{Draft, Object};

use super::{Agent, Session};
use crate::{
    host::Host,
    registry::vms::{Entry, command::Command},
};

/// Longest time for which a running guest is frozen.
const LIMIT: Duration = Duration::from_secs(10);
/// How long a caller waits until its guest is thawed.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time between two requests to thaw: the first one, and the longest one.
const FIRST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(30);
/// After this time the daemon makes no more requests to thaw a guest. Its next start tries again.
const GIVE_UP: Duration = Duration::from_secs(600);

/// A guest whose file systems are frozen.
#[derive(Debug)]
pub struct Frozen {
    /// Set by the first one of the disks' quiet and the end of the time.
    is_decided: Arc<AtomicBool>,
    is_consistent: AtomicBool,
    /// Dropped to thaw.
    release: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<()>,
}

impl Frozen {
    /// The guest is paused, and its disks are quiet. Returns whether its file systems are still
    /// frozen; then they stay so until [`Self::thaw`].
    pub fn quiet(&self) -> bool {
        let in_time = !self.is_decided.swap(true, Ordering::SeqCst);
        self.is_consistent.store(in_time, Ordering::SeqCst);
        in_time
    }

    /// Whether the file systems were frozen when the disks were quiet.
    pub fn is_consistent(&self) -> bool {
        self.is_consistent.load(Ordering::SeqCst)
    }

    /// Thaws the guest, and waits a while for that.
    pub async fn thaw(self) {
        drop(self.release);
        let _in_time = timeout(PATIENCE, self.task).await;
    }
}

/// Freezes the file systems of the guest of a running VM.
pub async fn freeze(host: &Arc<Host>, entry: &Entry) -> Result<Frozen, Failure> {
    let session = Agent::of(host, entry)?.session().await?;
    note(entry, true).await?;
    fault::hold(&host.config.run_dir, "freeze-noted").await;
    let (release, released) = oneshot::channel();
    let (sender, frozen) = oneshot::channel();
    let is_decided = Arc::<AtomicBool>::default();
    let decided = Arc::clone(&is_decided);
    let (of, uid) = (Arc::clone(host), entry.uid);
    let task = tokio::spawn(async move {
        let mut session = session;
        let count: Result<u64, _> = session.ask("guest-fsfreeze-freeze", json!({})).await;
        let _ = sender.send(count);
        tokio::select! {
            _ = released => {}
            () = until_late(&of, &decided) => {}
        }
        fault::hold(&of.config.run_dir, "guest-thaws").await;
        if thaw_by(&mut session).await.is_err() {
            drop(session);
            return thaw(&of, uid).await;
        }
        drop(session);
        thawed(&of, uid).await;
    });
    let frozen_by = Frozen {
        is_decided,
        is_consistent: AtomicBool::new(false),
        release,
        task,
    };
    match frozen.await.unwrap_or_else(|_| Err(super::silent())) {
        Ok(0) => {
            frozen_by.thaw().await;
            let message = "the guest's agent has frozen no file system";
            Err(Failure::precondition("GUEST_AGENT_ERROR", message))
        }
        Ok(_) => Ok(frozen_by),
        Err(failure) => {
            // The agent may freeze the guest later than it should have answered.
            frozen_by.thaw().await;
            Err(failure)
        }
    }
}

/// Refusal while the file systems of a guest may be frozen.
pub fn may_be_frozen(vm: &str) -> Failure {
    let message =
        format!("the file systems of VM \"{vm}\" are frozen for a snapshot: wait until they are thawed");
    Failure::precondition("BUSY", message)
}

/// Ends when the guest was frozen for too long while it ran.
async fn until_late(host: &Host, is_decided: &AtomicBool) {
    sleep(fault::patience(&host.config.run_dir, "freeze-limit", LIMIT)).await;
    if is_decided.swap(true, Ordering::SeqCst) {
        // The guest is paused, and is thawed after the pause.
        std::future::pending::<()>().await;
    }
}

async fn thaw_by(session: &mut Session) -> Result<(), Failure> {
    match session.ask::<Value>("guest-fsfreeze-thaw", json!({})).await {
        Ok(_) => Ok(()),
        // An agent that cannot thaw cannot freeze.
        Err(failure) if failure.reason == "GUEST_AGENT_UNSUPPORTED" => Ok(()),
        Err(failure) => Err(failure),
    }
}

/// Thaws the guest of a VM that may be frozen: as soon as it runs, and again until its agent has
/// answered.
pub async fn thaw(host: &Arc<Host>, uid: Uuid) {
    let (began, mut pause) = (Instant::now(), FIRST);
    loop {
        let Some(entry) = host.vms.find(uid) else {
            return;
        };
        if !runs(&entry).await {
            return;
        }
        let failure = match thaw_once(host, &entry).await {
            Ok(()) => return thawed(host, uid).await,
            Err(failure) => failure,
        };
        tracing::debug!(%uid, %failure, "thaw a guest");
        if began.elapsed() > GIVE_UP {
            let message = format!(
                "the file systems of the guest may be frozen since a snapshot: run `fsfreeze -u` in it, or reset it ({})",
                failure.message
            );
            let vm = Arc::clone(&entry.state.borrow());
            let name = vm.metadata.as_ref().map_or("", |metadata| &metadata.name);
            let object = Object::Vm(name.to_owned(), uid);
            host.events.emit(Draft::warning(object, "GuestFrozen", message));
            return;
        }
        sleep(pause).await;
        pause = pause.saturating_mul(2).min(LONGEST);
    }
}

async fn thaw_once(host: &Host, entry: &Entry) -> Result<(), Failure> {
    let mut session = Agent::of(host, entry)?.session().await?;
    thaw_by(&mut session).await
}

/// Waits until the VM runs; false when its run has ended.
async fn runs(entry: &Entry) -> bool {
    let mut state = entry.state.clone();
    let is_settled = |vm: &Arc<v1::Vm>| {
        let status = vm.status.as_ref();
        status.is_none_or(|status| status.instance.is_none() || status.phase() == VmPhase::Running)
    };
    let settled = state.wait_for(is_settled).await;
    settled.is_ok_and(|vm| vm.status.as_ref().is_some_and(|status| status.instance.is_some()))
}

/// The guest is not frozen any more.
async fn thawed(host: &Host, uid: Uuid) {
    if let Some(entry) = host.vms.find(uid)
        && let Err(failure) = note(&entry, false).await
    {
        tracing::warn!(%uid, %failure, "note that a guest is not frozen any more");
    }
}

/// Notes durably whether the guest may be frozen.
async fn note(entry: &Entry, may_be_frozen: bool) -> Result<(), Failure> {
    let (reply, noted) = oneshot::channel();
    let sent = entry.mailbox.send(Command::Frozen(may_be_frozen, reply)).await;
    let gone = || Failure::internal("the VM is gone");
    sent.map_err(|_| gone())?;
    noted.await.map_err(|_| gone())?
}
