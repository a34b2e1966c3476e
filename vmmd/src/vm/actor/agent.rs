//! The agent in the guest: the state of its channel, and its description of the guest.

use std::sync::Arc;

use tokio::time::{Duration, Instant};
use vmm_protocol::machine::AGENT_CHANNEL;
use vmmd_api::v1::{self, VmPhase};
use vmmd_host::failure::Failure;
use vmmd_store::store_failure;

use super::{Actor, plug::Outcome};
use crate::guest::{self, Agent};

/// When the agent is asked about the guest, after it has opened its channel. The network of a guest
/// is often up later than its agent.
const LOOKS: [Duration; 3] = [Duration::ZERO, Duration::from_secs(10), Duration::from_secs(60)];
/// A guest decides how often its channel is opened: the agent is asked at most this often for that.
const PACE: Duration = Duration::from_secs(1);

/// When an agent is asked.
#[derive(Debug, Default)]
pub(super) struct Looks {
    /// When the channel was opened last.
    opened: Option<Instant>,
    /// Number of the questions since then.
    count: usize,
    /// Time of the last question.
    last: Option<Instant>,
    /// Time of the next question.
    pub due: Option<Instant>,
    /// A question is not answered.
    is_asking: bool,
}

impl Actor {
    /// The `vmm` says which channels programs of the guest have open.
    pub(super) fn on_channels(&mut self, open: &[String]) {
        let Some(instance) = &mut self.instance else {
            return;
        };
        if instance.open_channels != open {
            instance.open_channels = open.to_vec();
            self.publish_counts();
        }
        let open = open.iter().any(|name| name == AGENT_CHANNEL);
        let Some(instance) = &mut self.instance else {
            return;
        };
        if std::mem::replace(&mut instance.agent.open, open) == open {
            return;
        }
        (instance.agent.guest, instance.agent.access) = (None, None);
        match open {
            true => {
                self.look_at_guest();
                self.set_access_when_possible();
            }
            false => (self.looks.due, self.access.due) = (None, None),
        }
        self.publish_counts();
    }

    /// Begins the questions about the guest, if its agent has its channel open and has not answered.
    /// A guest that does not run cannot answer: this is called again when it runs.
    pub(super) fn look_at_guest(&mut self) {
        let agent = self.instance.as_ref().map(|instance| &instance.agent);
        let is_known = agent.is_none_or(|agent| !agent.open || matches!(agent.guest, Some(Ok(_))));
        if is_known || self.view.phase != VmPhase::Running {
            return;
        }
        let now = Instant::now();
        let earliest = self.looks.last.map_or(now, |last| last + PACE);
        self.looks.opened = Some(now);
        self.looks.count = 0;
        self.looks.due = Some(now.max(earliest));
    }

    /// A question is due.
    pub(super) fn ask_about_guest(&mut self) {
        self.looks.due = None;
        if self.looks.is_asking || self.view.phase != VmPhase::Running {
            return;
        }
        let Some(entry) = self.host.vms.find(self.uid) else {
            return;
        };
        self.looks.is_asking = true;
        self.looks.last = Some(Instant::now());
        self.looks.count = self.looks.count.saturating_add(1);
        let host = Arc::clone(&self.host);
        self.disks
            .tasks
            .spawn(async move { Outcome::Guest(Agent::new(&host, &entry).info().await.map(Box::new)) });
    }

    /// The answer to a question of the actor.
    pub(super) fn on_looked_at_guest(&mut self, guest: Result<Box<v1::GuestInfo>, Failure>) {
        self.looks.is_asking = false;
        let next = LOOKS.get(self.looks.count);
        let next = self.looks.opened.zip(next).map(|(opened, after)| opened + *after);
        if self.has_agent() && self.looks.due.is_none() {
            self.looks.due = next;
        }
        self.on_guest(guest);
    }

    /// An agent has described its guest, or has not answered.
    pub(super) fn on_guest(&mut self, guest: Result<Box<v1::GuestInfo>, Failure>) {
        let Some(instance) = self.instance.as_mut().filter(|instance| instance.agent.open) else {
            return;
        };
        instance.agent.guest = Some(guest);
        self.publish();
    }

    /// Notes durably whether the file systems of the guest may be frozen.
    pub(super) async fn note_frozen(&mut self, may_be_frozen: bool) -> Result<(), Failure> {
        let is_leaving = self.handover().is_under_way();
        let Some(run) = self.record.instance.as_mut().filter(|_| self.instance.is_some()) else {
            return match may_be_frozen {
                true => Err(Failure::precondition("NOT_RUNNING", "the VM does not run")),
                // The guest has ended.
                false => Ok(()),
            };
        };
        if may_be_frozen && is_leaving {
            let message = "the VM is being migrated: wait until the migration has ended";
            return Err(Failure::precondition("BUSY", message));
        }
        let before = std::mem::replace(&mut run.may_be_frozen, may_be_frozen);
        if before == may_be_frozen {
            return Ok(());
        }
        let written = self.host.store.put(&self.record).await.map_err(store_failure);
        if written.is_err()
            && let Some(run) = &mut self.record.instance
        {
            run.may_be_frozen = true;
        }
        written
    }

    /// Thaws a guest that an earlier daemon has left frozen.
    pub(super) fn thaw_left(&self) {
        if self.instance.is_some() && self.may_be_frozen() {
            let (host, uid) = (Arc::clone(&self.host), self.uid);
            tokio::spawn(async move { guest::thaw(&host, uid).await });
        }
    }

    /// Refuses an action on a guest with frozen file systems.
    pub(super) fn check_thawed(&self) -> Result<(), Failure> {
        match self.may_be_frozen() {
            true => Err(guest::may_be_frozen(&self.record.name)),
            false => Ok(()),
        }
    }

    /// Has the agent power off a guest that ignores its power button.
    pub(super) fn shut_down_late(&self) {
        if self.has_agent() {
            tokio::spawn(guest::shut_down_late(Arc::clone(&self.host), self.uid));
        }
    }

    fn may_be_frozen(&self) -> bool {
        self.record.instance.as_ref().is_some_and(|run| run.may_be_frozen)
    }

    fn has_agent(&self) -> bool {
        self.instance.as_ref().is_some_and(|instance| instance.agent.open)
    }
}
