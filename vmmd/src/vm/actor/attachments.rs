//! State of a VM's plugged disks, and the operations under way on them.

use std::{collections::BTreeMap, future, sync::Arc};

use tokio::{
    sync::Mutex,
    task::{AbortHandle, JoinSet},
    time::Instant,
};
use vmmd_api::v1::AttachmentPhase;

use super::{plug::Outcome, update::LiveChanges};
use crate::registry::vms::command::Reply;

/// The disks of one VM, and the tasks that plug, unplug or change them.
#[derive(Debug, Default)]
pub struct Attachments {
    by_name: BTreeMap<String, Attachment>,
    /// Ends with the actor.
    pub(super) tasks: JoinSet<Outcome>,
    /// Errors of disks in this run.
    pub(super) errors: Errors,
    /// Other changes of the machine.
    pub(in crate::vm) live: LiveChanges,
    /// Held while the files of a VM without a process are changed: a start waits for that.
    pub(super) offline: Arc<Mutex<()>>,
    /// Generation of the attachments. An answer from an older generation is stale.
    changes: u64,
}

/// A disk.
#[derive(Debug)]
pub struct Attachment {
    /// How far it is in the machine.
    pub phase: AttachmentPhase,
    /// Why the last attach or detach failed.
    pub message: String,
    /// 0 when not known.
    pub capacity: u64,
    /// An attach or detach under way.
    pub(super) plug: Option<Plug>,
}

/// An attach or detach under way.
#[derive(Debug)]
pub(super) struct Plug {
    /// Which.
    pub kind: PlugKind,
    /// Distinguishes it from one that it has replaced.
    pub serial: u64,
    /// Callers that wait for the result.
    pub waiters: Vec<Reply>,
    /// Ends its task.
    pub task: AbortHandle,
}

/// Kind of a hot-plug operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlugKind {
    /// Adds the disk.
    Attach,
    /// Takes it away.
    Detach {
        /// When the guest's time is over.
        deadline: Instant,
        /// Whether it is taken away then.
        force: bool,
    },
}

/// Errors that the `vmm` has reported of disks since the run began, or since the guest was resumed after one.
#[derive(Debug, Default)]
pub struct Errors {
    /// How many.
    pub count: u64,
    /// The last one, with the disk's name.
    pub last: String,
}

impl Attachment {
    pub(super) fn new(phase: AttachmentPhase, message: impl Into<String>) -> Self {
        Self {
            phase,
            message: message.into(),
            capacity: 0,
            plug: None,
        }
    }
}

impl Attachments {
    /// The disk of this name, if anything is known of it.
    pub fn get(&self, name: &str) -> Option<&Attachment> {
        self.by_name.get(name)
    }

    /// See [`Errors`].
    pub fn errors(&self) -> &Errors {
        &self.errors
    }

    pub(super) fn get_mut(&mut self, name: &str) -> Option<&mut Attachment> {
        self.by_name.get_mut(name)
    }

    pub(super) fn entry(&mut self, name: &str) -> &mut Attachment {
        self.by_name
            .entry(name.to_owned())
            .or_insert_with(|| Attachment::new(AttachmentPhase::Attached, ""))
    }

    pub(super) fn remove(&mut self, name: &str) {
        self.changes += 1;
        self.by_name.remove(name);
    }

    pub(super) fn plug(&mut self, name: &str) -> Option<&mut Plug> {
        self.by_name.get_mut(name)?.plug.as_mut()
    }

    /// Whether an attach of this disk is under way.
    pub(super) fn is_attaching(&self, name: &str) -> bool {
        let plug = self.by_name.get(name).and_then(|known| known.plug.as_ref());
        plug.is_some_and(|plug| plug.kind == PlugKind::Attach)
    }

    /// Takes the plug with this serial number; `None` when another has replaced it, or it is settled.
    pub(super) fn take_plug(&mut self, name: &str, serial: u64) -> Option<Plug> {
        let place = &mut self.by_name.get_mut(name)?.plug;
        let plug = place.take_if(|plug| plug.serial == serial)?;
        self.changes += 1;
        Some(plug)
    }

    /// All plugs under way, with the names of their disks; they are ended.
    pub(super) fn end_plugs(&mut self) -> Vec<(String, Plug)> {
        let mut ended = Vec::new();
        for (name, attachment) in &mut self.by_name {
            if let Some(plug) = attachment.plug.take() {
                plug.task.abort();
                ended.push((name.clone(), plug));
            }
        }
        ended
    }

    /// Forgets everything: a run begins or has ended.
    pub(super) fn clear(&mut self) {
        self.changes += 1;
        self.by_name.clear();
        self.live.clear();
        self.errors = Errors::default();
    }

    /// A number that no other plug has.
    pub(super) fn serial(&mut self) -> u64 {
        self.changes += 1;
        self.changes
    }

    /// How many changes there have been.
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    /// Waits for a task to be done; forever when there is none.
    pub(super) async fn next(&mut self) -> Outcome {
        loop {
            match self.tasks.join_next().await {
                None => return future::pending().await,
                Some(Ok(outcome)) => return outcome,
                // The actor aborted the task and has settled its plug.
                Some(Err(error)) if error.is_cancelled() => {}
                Some(Err(error)) => tracing::error!(%error, "a task of a disk"),
            }
        }
    }
}

impl Errors {
    /// Notes an error; true when it is worth telling: a new one, or one more power of two of the same.
    pub(super) fn note(&mut self, text: &str) -> bool {
        let new = text != self.last;
        text.clone_into(&mut self.last);
        self.count = self.count.saturating_add(1);
        new || self.count.is_power_of_two()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_the_same_error_is_told_a_few_times() {
        let mut errors = Errors::default();
        let told = (0..1000).filter(|_| errors.note("disk root: no space")).count();
        assert_eq!((told, errors.count), (10, 1000));
        assert!(errors.note("disk data: no space"));
        assert_eq!(errors.last, "disk data: no space");
    }
}
