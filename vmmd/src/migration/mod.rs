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
//! Which side may run the VM is decided by [`proto::handover`] alone: the VM's actor keeps the record, writes it before anything is done, and
//! carries out what concerns its own `vmm`. The source is the client of all calls, and repeats what has not been answered: so the target asks
//! nothing. Memory goes over the daemons' connection, which has TLS with certificates on both sides.

#[cfg(test)]
mod fuzzing;
mod heard;
mod source;
mod target;

pub use source::migrate;
pub use target::{offer, receive, settle};

use std::{sync::Arc, time::Duration};

use proto::handover::Message;
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};
use uuid::Uuid;

use crate::{
    failure::Failure,
    host::Host,
    registry::vms::command::{Attend, HandoverRequest, hand_over, hand_over_to},
    store::HandoverStage,
};

/// Waits between two tries of what was not answered, or could not be done.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LAST_WAIT: Duration = Duration::from_secs(10);

/// Goes on with migrations as the actors of their VMs ask for it. Never ends.
pub async fn attend(host: Arc<Host>, mut left: mpsc::UnboundedReceiver<Attend>) {
    while let Some(left) = left.recv().await {
        go_on(&host, left);
    }
}

/// Goes on with what the VM's record says of a migration: repeats what could not be written and what the target has not answered, and removes
/// what is left of a VM that is the other node's.
fn go_on(host: &Arc<Host>, left: Attend) {
    let host = Arc::clone(host);
    tokio::spawn(async move {
        let Attend {
            uid,
            name,
            migration,
            target,
        } = left;
        let record = host.store.vm(uid.as_bytes()).await.ok().flatten();
        let handover = record.and_then(|record| record.handover);
        // A later migration is its own task's.
        let Some(handover) = handover.filter(|handover| handover.migration == migration) else {
            return;
        };
        let to = (name.as_str(), uid, target.as_str());
        match handover.stage() {
            HandoverStage::Migrating => {
                source::take_back(&host, (&name, uid), None).await;
                source::repeat(&host, to, None, Message::Abort(migration)).await;
            }
            HandoverStage::Owner if !handover.peer.is_empty() => {
                source::repeat(&host, to, None, Message::Abort(migration)).await;
            }
            HandoverStage::Given => {
                let answered = source::repeat(&host, to, None, Message::Commit(migration)).await;
                if answered {
                    Moving { name, uid, migration }.expires(&host, false).await;
                }
            }
            HandoverStage::Gone | HandoverStage::Idle => {
                Moving { name, uid, migration }.expires(&host, false).await;
            }
            _ => {}
        }
    });
}

/// Asks the VM's actor, and returns what it says to the other daemon.
async fn ask(host: &Host, vm: &str, request: HandoverRequest) -> Result<Vec<Message>, Failure> {
    hand_over(&host.vms, vm, request).await
}

/// A VM of a migration.
#[derive(Clone, Debug)]
struct Moving {
    name: String,
    uid: Uuid,
    migration: u64,
}

impl Moving {
    /// Removes what the migration leaves here, and returns when it is gone, or at once when it is to stay: `unless_begun` while it is being
    /// received. A full file system may delay that. Cancel-safe.
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

    /// The same, for at most so long; afterwards it goes on by itself. False when it is not done by then.
    async fn expires_within(&self, host: &Arc<Host>, limit: Duration) -> bool {
        let (host, moving) = (Arc::clone(host), self.clone());
        let removal = tokio::spawn(async move { moving.expires(&host, false).await });
        timeout(limit, removal).await.is_ok()
    }
}
