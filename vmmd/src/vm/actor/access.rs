//! Passwords and SSH keys of users of the guest: `spec.accessCredentials`.
//!
//! The agent sets all of them when it opens its channel, and after a change of the spec. The record has
//! the keys that the guest may have because of the spec, so that keys of others stay. It has a key
//! before the agent adds the key, and until the agent has removed it. Attempts that fail are repeated
//! [`ATTEMPTS`] times. The next opening of the channel and the next change begin again.

use std::sync::Arc;

use tokio::time::{Duration, Instant};
use vmmd_api::v1::{EventSeverity, VmPhase};
use vmmd_host::failure::Failure;
use vmmd_store::AccessKeysRecord;

use super::{Actor, plug::Outcome};
use crate::{guest::Agent, vm::access_keys};

/// Most attempts in a row.
const ATTEMPTS: u32 = 8;
/// Time to the second attempt. Each further one takes twice as long.
const FIRST: Duration = Duration::from_secs(1);
/// Time to the next look at a VM that is being migrated.
const LEAVING: Duration = Duration::from_secs(10);
/// A guest decides how often its channel is opened: the agent is asked at most this often for that.
const PACE: Duration = Duration::from_secs(1);

/// Attempts to set passwords and keys.
#[derive(Debug, Default)]
pub(super) struct Access {
    /// Number of the last reason to set them: the result of an attempt for an earlier one is late.
    number: u64,
    /// Attempts for this reason.
    attempts: u32,
    /// Time of the last attempt.
    last: Option<Instant>,
    /// Time of the next attempt.
    pub due: Option<Instant>,
    /// An attempt is under way.
    is_asking: bool,
}

impl Actor {
    /// There is a reason to set passwords and keys: another spec, or a guest that may lack them.
    pub(super) fn set_access(&mut self) {
        let access = &mut self.access;
        access.number = access.number.wrapping_add(1);
        (access.attempts, access.due) = (0, None);
        if let Some(instance) = &mut self.instance {
            instance.agent.access = None;
        }
        self.set_access_when_possible();
        self.publish();
    }

    /// The guest runs, or its agent has opened its channel.
    pub(super) fn set_access_when_possible(&mut self) {
        let agent = self.instance.as_ref().map(|instance| &instance.agent);
        let is_set = agent.is_none_or(|agent| !agent.open || matches!(agent.access, Some(Ok(()))));
        let is_empty = self.spec.access.is_empty() && self.record.access_keys.is_empty();
        if is_set || is_empty || self.view.phase != VmPhase::Running {
            return;
        }
        let now = Instant::now();
        let earliest = self.access.last.map_or(now, |last| last + PACE);
        self.access.attempts = 0;
        self.access.due = Some(now.max(earliest));
    }

    /// An attempt is due.
    pub(super) async fn attempt_access(&mut self) {
        self.access.due = None;
        let is_open = self.instance.as_ref().is_some_and(|instance| instance.agent.open);
        if self.access.is_asking || !is_open || self.view.phase != VmPhase::Running {
            return;
        }
        if self.handover().is_under_way() {
            // The target sets them, or this node after a migration that failed.
            self.access.due = Some(Instant::now() + LEAVING);
            return;
        }
        let Some(entry) = self.host.vms.find(self.uid) else {
            return;
        };
        self.access.last = Some(Instant::now());
        self.access.attempts += 1;
        if let Err(failure) = self.note_access_keys().await {
            return self.access_failed(failure);
        }
        self.access.is_asking = true;
        let (host, number) = (Arc::clone(&self.host), self.access.number);
        let (users, noted) = (self.spec.access.clone(), self.record.access_keys.clone());
        self.disks.tasks.spawn(async move {
            let result = Agent::new(&host, &entry).set_access(&users, &noted).await;
            Outcome::Access(number, result)
        });
    }

    /// Notes durably which keys the guest may have from now on.
    async fn note_access_keys(&mut self) -> Result<(), Failure> {
        let noted = access_keys::joined(self.record.access_keys.clone(), self.keys_of_spec());
        if !access_keys::fit(&noted) {
            let message = "too many keys are to be removed from the guest: wait until its agent has removed the earlier ones";
            return Err(Failure::precondition("TOO_MANY_KEYS", message));
        }
        self.write_access_keys(noted).await
    }

    async fn write_access_keys(&mut self, keys: Vec<AccessKeysRecord>) -> Result<(), Failure> {
        let before = std::mem::replace(&mut self.record.access_keys, keys);
        if before == self.record.access_keys || self.persist().await {
            return Ok(());
        }
        self.record.access_keys = before;
        Err(Failure::internal(
            "the keys could not be noted in the store of vmmd",
        ))
    }

    /// The end of an attempt.
    pub(super) async fn on_access(&mut self, number: u64, result: Result<(), Failure>) {
        self.access.is_asking = false;
        if number != self.access.number {
            return self.set_access_when_possible();
        }
        let result = match result {
            Ok(()) => self.write_access_keys(self.keys_of_spec()).await,
            failed => failed,
        };
        if let Err(failure) = result {
            return self.access_failed(failure);
        }
        if let Some(instance) = &mut self.instance {
            instance.agent.access = Some(Ok(()));
            self.publish();
        }
    }

    fn keys_of_spec(&self) -> Vec<AccessKeysRecord> {
        self.record
            .spec
            .as_ref()
            .map(access_keys::of_spec)
            .unwrap_or_default()
    }

    fn access_failed(&mut self, failure: Failure) {
        let Some(instance) = self.instance.as_mut().filter(|instance| instance.agent.open) else {
            return;
        };
        let is_new = !matches!(instance.agent.access, Some(Err(_)));
        if is_new {
            let message = format!(
                "passwords and SSH keys could not be set in the guest: {}",
                failure.message
            );
            self.tell(EventSeverity::Warning, "AccessCredentialsFailed", &message);
        }
        if let Some(instance) = &mut self.instance {
            instance.agent.access = Some(Err(failure));
        }
        let attempts = self.access.attempts;
        if attempts < ATTEMPTS {
            let pause = FIRST.saturating_mul(1 << attempts.saturating_sub(1));
            self.access.due = Some(Instant::now() + pause);
        }
        self.publish();
    }
}
