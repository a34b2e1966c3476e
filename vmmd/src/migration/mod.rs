//! Live migration between daemons.
//!
//! ```text
//!  source                                            target
//!    │ OfferVm: spec, addresses, processors            │ checks; a VM that nobody can start, `Idle`
//!    │ ReceiveVm: what the vmm writes ───────────────▶ │ its vmm receives it, and stays paused
//!    │ SettleVm: Prepare ────────────────────────────▶ │ `Prepared`, durable
//!    │ `Given`, durable: no way back  ◀────────── Ready │
//!    │ SettleVm: Commit, until it is answered ───────▶ │ `Owned`, durable; the guest runs
//!    │ `Gone`, durable; its vmm is ended  ◀──── Running │
//! ```
//!
//! Which side may run the VM is decided by [`vm_lifecycle::handover`] alone: the VM's actor keeps the record, writes it before anything is done, and
//! carries out what concerns its own `vmm`. The actor alone decides which message is sent: a read of the store after a failed write proves
//! nothing. The source is the client of all calls and repeats each until it is answered, so the target asks nothing. Memory goes over the daemons' connection, which has TLS with certificates on both sides.

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod peer_message;
mod source;
mod target;

pub use source::migrate;
pub use target::{offer, receive, settle};

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};
use uuid::Uuid;
use vm_lifecycle::handover::Message;
use vmmd_host::failure::Failure;

use crate::{
    host::Host,
    registry::vms::command::{HandoverRequest, ResumeMigration, hand_over, hand_over_to},
};

/// First wait before a retry of an unanswered or failed step.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LAST_WAIT: Duration = Duration::from_secs(10);
/// The longest wait before a target is asked again to confirm that a migration is over: nothing waits for that, and the target may be gone for good.
const LAST_ABORT_WAIT: Duration = Duration::from_secs(60);

/// Continues with migrations as the actors of their VMs, and the store, say. Never ends.
pub async fn attend(host: Arc<Host>, mut left: mpsc::UnboundedReceiver<ResumeMigration>) {
    while let Some(left) = left.recv().await {
        match left {
            ResumeMigration::Left {
                uid,
                name,
                migration,
                target,
            } => {
                let moving = Moving { name, uid, migration };
                tokio::spawn(go_on(Arc::clone(&host), moving, target));
            }
            // Otherwise its target is asked already.
            ResumeMigration::Abort { abort, was_read } => {
                if host.aborts.note(&abort) {
                    tokio::spawn(source::abort(Arc::clone(&host), abort, was_read));
                }
            }
        }
    }
}

/// Continues a migration from the VM's record: repeats failed writes and unanswered messages, and removes the rest of a VM that is on the other node.
async fn go_on(host: Arc<Host>, moving: Moving, target: String) {
    let migration = moving.migration;
    let mut wait = FIRST_WAIT;
    while let Err(failure) = moving.ask(&host, HandoverRequest::Resume { migration }).await {
        if host.vms.find(moving.uid).is_none() {
            return;
        }
        tracing::warn!(vm = moving.name, %failure, "continue with a migration");
        tokio::select! {
            () = sleep(wait) => {}
            () = host.stopping.cancelled() => return,
        }
        wait = (wait * 2).min(LAST_WAIT);
    }
    source::commit(&host, &moving, &target, None).await;
    moving.expires(&host, false).await;
}

/// A VM of a migration.
#[derive(Clone, Debug)]
struct Moving {
    name: String,
    uid: Uuid,
    migration: u64,
}

impl Moving {
    /// Asks the VM's actor; returns the messages to the other daemon.
    async fn ask(&self, host: &Host, request: HandoverRequest) -> Result<Vec<Message>, Failure> {
        hand_over(&host.vms, (&self.name, self.uid), request).await
    }

    /// Removes the local remains of the migration and returns when they are gone. Returns at once
    /// when they must stay: with `unless_begun` while the reception is in progress. A full file
    /// system may delay the removal. Cancel-safe.
    async fn expires(&self, host: &Host, unless_begun: bool) {
        let mut wait = FIRST_WAIT;
        while let Some(vm) = host.vms.find(self.uid) {
            let request = HandoverRequest::Expire {
                migration: self.migration,
                unless_begun,
            };
            let said = hand_over_to(&vm.mailbox, &self.name, request).await;
            match &said {
                Ok(said) if said.is_empty() => return,
                Ok(_) => {}
                Err(failure) => tracing::debug!(vm = self.name, %failure, "remove what a migration leaves"),
            }
            tokio::select! {
                () = vm.mailbox.closed(), if said.is_ok() => {}
                () = host.stopping.cancelled() => return,
                () = sleep(wait) => wait = (wait * 2).min(LAST_WAIT),
            }
        }
    }

    /// The same with a time limit. Returns false when the limit ends first; the removal then
    /// continues in the background.
    async fn expires_within(&self, host: &Arc<Host>, limit: Duration) -> bool {
        let (host, moving) = (Arc::clone(host), self.clone());
        let removal = tokio::spawn(async move { moving.expires(&host, false).await });
        timeout(limit, removal).await.is_ok()
    }
}
