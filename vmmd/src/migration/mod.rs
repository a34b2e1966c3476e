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

pub use source::{attend, migrate};
pub use target::{offer, receive, settle};

use proto::handover::Message;
use tokio::sync::oneshot;

use crate::{
    failure::Failure,
    host::Host,
    registry::vms::command::{Command, HandoverRequest},
};

/// What daemons say to each other.
pub const PROTOCOL: u32 = 1;

/// Asks the VM's actor, and returns what it says to the other daemon.
pub async fn ask(host: &Host, vm: &str, request: HandoverRequest) -> Result<Vec<Message>, Failure> {
    let entry = host.vms.get(vm).ok_or_else(|| Failure::no_vm(vm))?;
    let (reply, answer) = oneshot::channel();
    let sent = entry
        .mailbox
        .send(Command::Handover(Box::new(request), reply))
        .await;
    sent.map_err(|_| Failure::unavailable(vm))?;
    answer.await.map_err(|_| Failure::unavailable(vm))?
}
