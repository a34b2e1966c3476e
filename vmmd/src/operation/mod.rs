//! What takes long on the node, and how far it is: one registry for all operations.
//!
//! Who does the work has a [`Handle`] and ends the operation with it. Everybody else looks, watches or cancels here
//! and never waits for the work; a cancel is a wish that the owner hears through the handle's token:
//!
//! ```text
//!   Pending ──progress──▶ InProgress ──complete, fail──▶ Completed, Failed
//!                              │  cancel or deadline: the token is cancelled
//!                              └──────────────cancelled──────────▶ Cancelled
//! ```
//!
//! Always: an operation ends once; one whose handle is dropped has failed; after [`Handle::commit`] nobody can wish for
//! its cancel any more.

mod registry;

use std::{
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use proto::v1::{self, OperationKind, OperationPhase};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use self::registry::Shared;
use crate::{
    context::Context,
    failure::{Failure, Kind},
    text,
};

/// All operations of the node.
#[derive(Debug, Default)]
pub struct Operations {
    shared: Arc<Shared>,
}

/// Why an operation is to end early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Somebody asked for it.
    Request,
    /// Its time is over.
    Deadline,
}

/// An operation in the hands of who carries it out.
#[derive(Debug)]
pub struct Handle {
    shared: Arc<Shared>,
    id: String,
    context: Context,
    token: CancellationToken,
    state: Arc<watch::Sender<v1::Operation>>,
    outcome: Arc<OnceLock<Outcome>>,
}

/// What came of an operation: the VM as it was then, if it is about one.
type Outcome = Result<Option<Arc<v1::Vm>>, Failure>;

/// An operation in the hands of who waits for it.
#[derive(Clone, Debug)]
pub struct Pending {
    state: watch::Receiver<v1::Operation>,
    outcome: Arc<OnceLock<Outcome>>,
}

const GIVEN_UP: &str = "the daemon gave the operation up; its log says more";

/// True when nothing follows any more.
pub fn has_ended(operation: &v1::Operation) -> bool {
    matches!(
        operation.phase(),
        OperationPhase::Completed | OperationPhase::Failed | OperationPhase::Cancelled
    )
}

/// There is no operation with this id, or not any more.
pub fn not_found(id: &str) -> Failure {
    let message = format!(
        "there is no operation \"{}\"; one that has ended is known for an hour",
        text::brief(id)
    );
    Failure::new(Kind::NotFound, "OPERATION_NOT_FOUND", message)
}

impl Operations {
    /// Notes an operation that begins: of a VM, by name and uid, or of the node. After `deadline` it is cancelled.
    pub fn begin(
        &self,
        kind: OperationKind,
        vm: Option<(&str, Uuid)>,
        context: &Context,
        deadline: Option<Duration>,
    ) -> Handle {
        let ends = deadline.map(|deadline| {
            let wait = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
            text::now_ms().saturating_add(wait)
        });
        let (vm, vm_uid) = vm.map_or_else(Default::default, |(name, uid)| (name.to_owned(), uid.to_string()));
        let operation = v1::Operation {
            id: Uuid::new_v4().to_string(),
            kind: kind.into(),
            vm,
            vm_uid,
            phase: OperationPhase::Pending.into(),
            create_time: text::timestamp(text::now_ms()),
            deadline: ends.and_then(text::timestamp),
            request_id: context.request_id.clone(),
            initiator: context.initiator.to_string(),
            ..Default::default()
        };
        let id = operation.id.clone();
        let (token, state) = self.shared.insert(operation, Instant::now());
        if let Some(deadline) = deadline {
            let (shared, id, mut state) = (Arc::clone(&self.shared), id.clone(), state.subscribe());
            tokio::spawn(async move {
                let ended = tokio::time::timeout(deadline, state.wait_for(has_ended)).await;
                if ended.is_err() {
                    let _ = shared.cancel(&id, Cause::Deadline);
                }
            });
        }
        Handle {
            shared: Arc::clone(&self.shared),
            id,
            context: context.clone(),
            token,
            state,
            outcome: Arc::default(),
        }
    }

    /// An operation as it is.
    pub fn get(&self, id: &str) -> Result<v1::Operation, Failure> {
        Ok(self.watch(id)?.borrow().clone())
    }

    /// Operations, the newest first: only those of `vm` unless it is empty, only those that have not ended if `active`.
    pub fn list(&self, vm: &str, active: bool) -> Vec<v1::Operation> {
        let mut all = self.shared.list(Instant::now());
        all.retain(|operation| (vm.is_empty() || operation.vm == vm) && !(active && has_ended(operation)));
        all
    }

    /// An operation as it is and as it changes; the last change is its end.
    pub fn watch(&self, id: &str) -> Result<watch::Receiver<v1::Operation>, Failure> {
        self.shared.watch(id, Instant::now()).ok_or_else(|| not_found(id))
    }

    /// Wishes an operation's end; it comes as its owner can bring it about. Done already when it has ended; refused as
    /// NOT_CANCELLABLE when it is beyond that.
    pub fn cancel(&self, id: &str) -> Result<watch::Receiver<v1::Operation>, Failure> {
        let state = self.watch(id)?;
        self.shared.cancel(id, Cause::Request)?;
        Ok(state)
    }
}

impl Handle {
    /// UUID.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// What led to it.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// For those who want to know its end.
    pub fn pending(&self) -> Pending {
        Pending {
            state: self.state.subscribe(),
            outcome: Arc::clone(&self.outcome),
        }
    }

    /// It is under way: what it does now, and how far it is, 0 to 100.
    pub fn progress(&self, percent: u32, message: impl Into<String>) {
        let message = message.into();
        self.state.send_modify(|operation| {
            operation.phase = OperationPhase::InProgress.into();
            operation.progress_percent = percent.min(100);
            operation.message = message;
        });
    }

    /// Is cancelled when the operation is to end early. See [`Handle::cause`].
    pub fn token(&self) -> &CancellationToken {
        &self.token
    }

    /// Why it is to end early; `None` when it is not.
    pub fn cause(&self) -> Option<Cause> {
        self.shared.cause(&self.id)
    }

    /// From now on it can't be cancelled. False when that was wished for before: then it is to be obeyed.
    pub fn commit(&self) -> bool {
        self.shared.commit(&self.id)
    }

    /// From now on it can be cancelled again.
    pub fn reopen(&self) {
        self.shared.reopen(&self.id);
    }

    /// It has done what it was to do.
    pub fn complete(self, message: impl Into<String>) {
        self.end(OperationPhase::Completed, message.into(), None);
    }

    /// It has done what it was to do, and the VM is so now.
    pub fn complete_with(self, message: impl Into<String>, vm: Arc<v1::Vm>) {
        let _ = self.outcome.set(Ok(Some(vm)));
        self.complete(message);
    }

    /// It could not be done.
    pub fn fail(self, failure: &Failure) {
        let _ = self.outcome.set(Err(failure.clone()));
        let error = v1::OperationError {
            reason: failure.reason.to_owned(),
            message: failure.message.clone(),
        };
        self.end(OperationPhase::Failed, failure.message.clone(), Some(error));
    }

    /// It has ended early, as was wished for; `message` says what it leaves behind.
    pub fn cancelled(self, message: impl Into<String>) {
        let failure = match self.cause().unwrap_or(Cause::Request) {
            Cause::Request => Failure::new(Kind::Aborted, "CANCELLED", message),
            Cause::Deadline => Failure::new(Kind::Deadline, "DEADLINE_EXCEEDED", message),
        };
        self.give_way(&failure);
    }

    /// It has ended early because of something else, which `failure` says.
    pub fn give_way(self, failure: &Failure) {
        let _ = self.outcome.set(Err(failure.clone()));
        let error = v1::OperationError {
            reason: failure.reason.to_owned(),
            message: failure.message.clone(),
        };
        self.end(OperationPhase::Cancelled, failure.message.clone(), Some(error));
    }

    fn end(&self, phase: OperationPhase, message: String, error: Option<v1::OperationError>) {
        let changed = self.state.send_if_modified(|operation| {
            if has_ended(operation) {
                return false;
            }
            operation.phase = phase.into();
            operation.message = message;
            operation.error = error;
            operation.end_time = text::timestamp(text::now_ms());
            if phase == OperationPhase::Completed {
                operation.progress_percent = 100;
            }
            true
        });
        if changed {
            self.shared.ended(&self.id, Instant::now());
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let error = v1::OperationError {
            reason: "INTERNAL".to_owned(),
            message: GIVEN_UP.to_owned(),
        };
        self.end(OperationPhase::Failed, error.message.clone(), Some(error));
    }
}

impl Pending {
    /// The operation as it is.
    pub fn operation(&self) -> v1::Operation {
        self.state.borrow().clone()
    }

    /// Waits for its end. The VM as it was then, or why it failed.
    pub async fn ended(mut self) -> Outcome {
        let ended = self.state.wait_for(has_ended).await.is_ok();
        let outcome = self.outcome.get().cloned();
        match outcome {
            Some(outcome) => outcome,
            None if ended && self.operation().phase() == OperationPhase::Completed => Ok(None),
            None => Err(Failure::new(Kind::Unavailable, "OPERATION_GIVEN_UP", GIVEN_UP)),
        }
    }
}

#[cfg(test)]
mod tests;
