//! Lets the guest run after a migration: on the node that has received it, or on the one where it stays.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use vm_lifecycle::policy::Occasion;
use vmm_protocol::vmm::{ErrorKind, Resume, request::Op};
use vmmd_api::v1::ExitReason;

use super::Actor;
use crate::{
    control::Error,
    registry::vms::command::{HandoverRequest, hand_over},
};

/// How long a machine may take to resume.
const RESUME: Duration = Duration::from_secs(20);
/// Waits between two tries. The other side gives its disks away when it hears that it is to, or ends.
const FIRST_WAIT: Duration = Duration::from_millis(5);
const LAST_WAIT: Duration = Duration::from_secs(1);
/// After so long the VM's status says why its guest does not run, and an event does.
const QUIET: Duration = Duration::from_secs(1);

impl Actor {
    /// Lets the machine run, if there is one, and tries again until it does. Without a connection to the `vmm`,
    /// [`Self::on_connected`] calls this again.
    pub(super) fn let_run(&mut self) {
        let Ok(client) = self.running_client() else {
            if self.instance.is_none() {
                let reason = self.record.exit_reason().unwrap_or(ExitReason::Lost);
                self.plan(Occasion::Ended(reason), 0);
            }
            return;
        };
        self.resuming = true;
        let (host, name, uid) = (self.host.clone(), self.record.name.clone(), self.uid);
        tokio::spawn(async move {
            let began = Instant::now();
            let mut wait = FIRST_WAIT;
            let mut told = false;
            loop {
                let resumed = timeout(RESUME, client.request(Op::Resume(Resume {}), &[])).await;
                let (reason, why) = match resumed {
                    Ok(Ok(_)) => {
                        let _ = hand_over(&host.vms, (&name, uid), HandoverRequest::Runs).await;
                        return;
                    }
                    // The run has ended, or the connection is made again: that lets the machine run.
                    Ok(Err(error)) if error.is_lost() => return,
                    Ok(Err(Error::Refused(refusal))) if refusal.kind() == ErrorKind::InUse => {
                        ("DiskInUse", refusal.message.clone())
                    }
                    Ok(Err(error)) => ("ResumeFailed", vmmd_host::text::chain(&error)),
                    Err(_) => ("ResumeFailed", format!("no answer within {} s", RESUME.as_secs())),
                };
                if !told && began.elapsed() > QUIET {
                    told = true;
                    let why = format!("the guest can't run yet, which is tried again every second: {why}");
                    tracing::warn!(vm = name, why, "resume a VM after a migration");
                    let waits = HandoverRequest::Waits { reason, why };
                    let _ = hand_over(&host.vms, (&name, uid), waits).await;
                }
                tokio::select! {
                    () = sleep(wait) => {}
                    () = host.stopping.cancelled() => return,
                }
                wait = (wait * 2).min(LAST_WAIT);
            }
        });
    }
}
