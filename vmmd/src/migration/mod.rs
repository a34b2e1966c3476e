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

mod source;
mod target;

pub use source::migrate;
pub use target::{offer, receive, settle};

use std::{sync::Arc, time::Duration};

use proto::handover::Message;
use tokio::{sync::mpsc, time::sleep};
use uuid::Uuid;

use crate::{
    failure::Failure,
    host::Host,
    registry::vms::command::{Attend, HandoverRequest, hand_over, hand_over_to},
};

/// What daemons say to each other.
pub const PROTOCOL: u32 = 1;
/// Waits between two tries of what was not answered, or could not be done.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LAST_WAIT: Duration = Duration::from_secs(10);

/// Goes on with migrations as the actors of their VMs ask for it. Never ends.
pub async fn attend(host: Arc<Host>, mut left: mpsc::UnboundedReceiver<Attend>) {
    while let Some(Attend { uid, name, target }) = left.recv().await {
        source::attend(&host, uid, name, target);
    }
}

/// Asks the VM's actor, and returns what it says to the other daemon.
async fn ask(host: &Host, vm: &str, request: HandoverRequest) -> Result<Vec<Message>, Failure> {
    hand_over(&host.vms, vm, request).await
}

/// Asks the VM's actor for its removal until it is gone, since a full file system may delay that. Ends at once when the answer says that the VM
/// `stays`. Only that actor is asked: the VM may come again in a later migration. Cancel-safe.
async fn until_gone(
    host: &Host,
    (uid, name): (Uuid, &str),
    request: impl Fn() -> HandoverRequest,
    stays: impl Fn(&[Message]) -> bool,
) {
    let Some(entry) = host.vms.find(uid) else {
        return;
    };
    let mut wait = FIRST_WAIT;
    loop {
        match hand_over_to(&entry.mailbox, name, request()).await {
            Ok(said) if stays(&said) => return,
            Ok(_) => {}
            Err(failure) => tracing::debug!(vm = name, %failure, "remove what a migration leaves"),
        }
        tokio::select! {
            () = entry.mailbox.closed() => return,
            () = host.stopping.cancelled() => return,
            () = sleep(wait) => {}
        }
        wait = (wait * 2).min(LAST_WAIT);
    }
}
