//! Long-running work on the node and its progress: one registry for all operations.
//!
//! The owner of the work has a [`Handle`] and ends the operation with it. All other parts of the
//! daemon read, watch or cancel here and never wait for the work. A cancel is a request that the
//! owner receives through the handle's token:
//!
//! ```text
//!   Pending ──progress──▶ InProgress ──complete, fail──▶ Completed, Failed
//!                              │  cancel or deadline: the token is cancelled
//!                              └──────────────cancelled──────────▶ Cancelled
//! ```
//!
//! Invariants: an operation ends once; an operation fails when its handle is dropped; after
//! [`Handle::commit`] no cancel is possible.
//!
//! The store has an operation from its begin until an hour after its end ([`vmmd_store`]
//! describes the cost). Unfinished operations of an earlier daemon are *left*: the owner of the
//! object takes the handles ([`Operations::left`]) and either continues the work or ends the
//! operations according to the state that it finds. The rest fails.

mod control;
mod kind;
mod progress;
mod registry;

use std::{
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

use prost::Message as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;
use vmmd_api::{
    rpc,
    v1::{self, OperationPhase},
};

use self::registry::Shared;
pub use self::{
    control::{Control, cancelled, follow},
    kind::Type,
    progress::Progress,
    registry::{Change, Position},
};
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};
use vmmd_store::{OperationRecord, Store};

use crate::{context::Context, event::Object};

/// Metadata of an operation.
pub use vmmd_api::v1::operation::Metadata;
/// Result of an operation, for clients.
pub use vmmd_api::v1::operation::Result as Detail;

/// All operations of the node.
#[derive(Debug)]
pub struct Operations {
    shared: Arc<Shared>,
    left: Mutex<Vec<Handle>>,
}

/// Why an operation is to end early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Somebody asked for it.
    Request,
    /// Its time is over.
    Deadline,
}

/// Progress reports of an operation, for a part of its work.
#[derive(Clone, Debug)]
pub struct Reporter {
    shared: Arc<Shared>,
    id: Uuid,
}

/// An operation, for its owner.
#[derive(Debug)]
pub struct Handle {
    reporter: Reporter,
    id: String,
    context: Box<Context>,
    token: CancellationToken,
    state: Arc<watch::Sender<Arc<v1::Operation>>>,
    outcome: Arc<OnceLock<Outcome>>,
}

/// Outcome of an operation: for a VM, its state at the end of the operation.
type Outcome = Result<Option<Arc<v1::Vm>>, Failure>;

/// An operation, for its waiters.
#[derive(Clone, Debug)]
pub struct Pending {
    state: watch::Receiver<Arc<v1::Operation>>,
    outcome: Arc<OnceLock<Outcome>>,
}

/// An object that is being made or changed, or was made before by the same request.
#[derive(Debug)]
pub struct Begun {
    /// UUID of the object.
    pub uid: Vec<u8>,
    /// The operation; `None` when nothing is left to do.
    pub pending: Option<Pending>,
}

const GIVEN_UP: &str = "the daemon gave the operation up; its log says more";
/// Longest message in bytes: a sentence.
const LONGEST_MESSAGE: usize = 1024;

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

/// The failure of an operation that the end of an earlier daemon has interrupted.
pub fn interrupted(message: impl Into<String>) -> Failure {
    Failure::new(Kind::Aborted, "DAEMON_RESTARTED", message)
}

impl Operations {
    /// With those of earlier daemons.
    pub fn new(store: Store, records: Vec<OperationRecord>) -> Self {
        let shared = Arc::new(Shared::new(store));
        let mut left = Vec::new();
        for record in records {
            let operation = record.decoded();
            let id = operation.as_ref().and_then(|operation| operation.id.parse().ok());
            let (Some(operation), Some(id)) = (operation, id) else {
                tracing::error!("a stored operation can't be read and is left out");
                continue;
            };
            let context = Context {
                request_id: operation.request_id.clone(),
                ..Context::daemon()
            };
            let deadline = operation.deadline.as_ref().map(text::unix_ms);
            let parts = shared.restore(id, operation, &record);
            if record.ended_ms == 0 {
                let wait = deadline.map(|end| {
                    // A clock that was set back gives no more time than there was.
                    let whole = end.saturating_sub(record.began_ms);
                    Duration::from_millis(end.saturating_sub(text::now_ms()).min(whole))
                });
                left.push(handle(&shared, id, context, parts, wait));
            }
        }
        Self {
            shared,
            left: Mutex::new(left),
        }
    }

    /// Notes an operation that begins. After `deadline` it is cancelled.
    pub fn begin(
        &self,
        kind: Type,
        target: &Object,
        context: &Context,
        deadline: Option<Duration>,
    ) -> Handle {
        let now_ms = text::now_ms();
        let ends = deadline.map(|deadline| {
            let wait = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
            now_ms.saturating_add(wait)
        });
        let id = Uuid::now_v7();
        let operation = v1::Operation {
            id: id.to_string(),
            r#type: kind.name().to_owned(),
            target: Some(target.reference()),
            phase: OperationPhase::Pending.into(),
            create_time: text::timestamp(now_ms),
            deadline: ends.and_then(text::timestamp),
            request_id: context.request_id.clone(),
            initiator: context.initiator.to_string(),
            ..Default::default()
        };
        let parts = self.shared.insert(id, operation, now_ms);
        handle(&self.shared, id, context.clone(), parts, deadline)
    }

    /// Takes the unfinished operations of an earlier daemon on this object. The holder of a handle
    /// continues the operation, or ends it.
    pub fn left(&self, target: &Object) -> Vec<Handle> {
        let reference = target.reference();
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let of_it = |handle: &mut Handle| {
            let of = handle.operation().target.clone().unwrap_or_default();
            (of.kind == reference.kind) && (of.uid == reference.uid)
        };
        left.extract_if(.., of_it).collect()
    }

    /// Ends operations of an earlier daemon that no owner has taken; `done` returns the message of an operation that was done, by its kind and the UUID of
    /// its object.
    pub fn give_up_left(&self, done: impl Fn(Type, &str) -> Option<&'static str>) {
        let left = std::mem::take(&mut *self.left.lock().unwrap_or_else(PoisonError::into_inner));
        for handle in left {
            let target = handle.operation().target.clone().unwrap_or_default();
            let done = handle.kind().and_then(|kind| done(kind, &target.uid));
            if let Some(message) = done {
                handle.complete(message);
            } else {
                let message = "the daemon was restarted and did not continue the operation: check the result, then repeat \
                               the request";
                handle.fail(&interrupted(message));
            }
        }
    }

    /// Waits until all operations that have begun are in the store. Callers use this before a
    /// client receives the id of an operation in progress. An error is only logged: the operation
    /// continues.
    pub async fn recorded(&self) {
        if let Err(error) = self.shared.record().await {
            tracing::error!(%error, "operations that have begun could not be written");
        }
    }

    /// The same before the answer to a request. An answer that is kept is written together with all that have begun: it needs no
    /// transaction before that.
    pub async fn recorded_for(&self, request: &Context) {
        if request.request_id.is_empty() {
            self.recorded().await;
        }
    }

    /// An operation as it is.
    pub fn get(&self, id: &str) -> Result<Arc<v1::Operation>, Failure> {
        Ok(Arc::clone(&self.watch(id)?.borrow()))
    }

    /// Calls `take` with operations that began before `before` (with all if `None`), newest first,
    /// until it returns false. Returns a position from which [`since`](Self::since) lists the
    /// changes after this call.
    pub fn each(&self, before: Option<Uuid>, take: impl FnMut(&Arc<v1::Operation>) -> bool) -> Position {
        self.shared.each(before, text::now_ms(), take)
    }

    /// Operations that have changed since a place, in the order of their last changes; all when it is another daemon's or none.
    /// And the place after all of them.
    pub fn since(&self, position: Option<Position>) -> (Vec<Change>, Position) {
        let ours = position.filter(|position| position.nonce == self.shared.position(0).nonce);
        self.shared.since(ours.map_or(0, |position| position.revision))
    }

    /// Changes whenever an operation does.
    pub fn news(&self) -> watch::Receiver<u64> {
        self.shared.news()
    }

    /// An operation as it is and as it changes; the last change is its end.
    pub fn watch(&self, id: &str) -> Result<watch::Receiver<Arc<v1::Operation>>, Failure> {
        let watched = id
            .parse()
            .ok()
            .and_then(|id| self.shared.watch(id, text::now_ms()));
        watched.ok_or_else(|| not_found(id))
    }

    /// Requests the cancel of an operation, which its owner carries out. Does nothing when the
    /// operation has ended. Refused as NOT_CANCELLABLE after a commit.
    pub fn cancel(&self, id: &str) -> Result<watch::Receiver<Arc<v1::Operation>>, Failure> {
        let state = self.watch(id)?;
        if let Ok(id) = id.parse() {
            self.shared.cancel(id, Cause::Request)?;
        }
        Ok(state)
    }
}

/// The handle of an operation that is kept; after `deadline` it is cancelled.
fn handle(
    shared: &Arc<Shared>,
    id: Uuid,
    context: Context,
    (token, state): registry::Parts,
    deadline: Option<Duration>,
) -> Handle {
    if let Some(deadline) = deadline {
        let (shared, mut state) = (Arc::clone(shared), state.subscribe());
        tokio::spawn(async move {
            let ended = state.wait_for(|operation| has_ended(operation));
            if tokio::time::timeout(deadline, ended).await.is_err() {
                let _ = shared.cancel(id, Cause::Deadline);
            }
        });
    }
    Handle {
        reporter: Reporter {
            shared: Arc::clone(shared),
            id,
        },
        id: id.to_string(),
        context: Box::new(context),
        token,
        state,
        outcome: Arc::default(),
    }
}

impl Reporter {
    /// Reports the present step and its progress.
    pub fn progress(&self, progress: Progress, message: impl AsRef<str>) {
        let message = text::one_line(message.as_ref(), LONGEST_MESSAGE);
        self.shared.progress(self.id, progress, Some(message));
    }

    /// Shows the present step, with the same progress.
    pub fn say(&self, message: &str) {
        let message = text::one_line(message, LONGEST_MESSAGE);
        self.shared.change(self.id, |operation| {
            let changed = operation.message != message;
            operation.message = message;
            changed
        });
    }

    /// Reports progress within the present step, for example for each piece of a copy. Frequent
    /// calls are allowed.
    pub fn advance(&self, progress: Progress) {
        self.shared.progress(self.id, progress, None);
    }

    /// Sets the metadata of the operation in progress.
    pub fn metadata(&self, metadata: Metadata) {
        self.shared.change(self.id, |operation| {
            let changed = operation.metadata.as_ref() != Some(&metadata);
            operation.metadata = Some(metadata);
            changed
        });
    }
}

impl std::ops::Deref for Handle {
    type Target = Reporter;

    fn deref(&self) -> &Reporter {
        &self.reporter
    }
}

impl Handle {
    /// UUID.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// What it does; `None` when a newer daemon began it.
    pub fn kind(&self) -> Option<Type> {
        Type::parse(&self.state.borrow().r#type)
    }

    /// Context of the request that began it.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Returns a reporter for a part of the work.
    pub fn reporter(&self) -> Reporter {
        self.reporter.clone()
    }

    /// Returns a waiter for its end.
    pub fn pending(&self) -> Pending {
        Pending {
            state: self.state.subscribe(),
            outcome: Arc::clone(&self.outcome),
        }
    }

    fn operation(&self) -> Arc<v1::Operation> {
        Arc::clone(&self.state.borrow())
    }

    /// Is cancelled when the operation is to end early. See [`Handle::cause`].
    pub fn token(&self) -> &CancellationToken {
        &self.token
    }

    /// Why it is to end early; `None` when it is not.
    pub fn cause(&self) -> Option<Cause> {
        self.shared.cause(self.reporter.id)
    }

    /// Prevents a later cancel. Returns false after an earlier cancel: the owner must then end the
    /// operation.
    pub fn commit(&self) -> bool {
        self.shared.commit(self.reporter.id)
    }

    /// From now on it can be cancelled again.
    pub fn reopen(&self) {
        self.shared.reopen(self.reporter.id);
    }

    /// Ends it as completed.
    pub fn complete(self, message: impl AsRef<str>) {
        self.end(OperationPhase::Completed, message.as_ref(), None, None);
    }

    /// Ends it as completed, with a result.
    pub fn complete_as(self, message: impl AsRef<str>, result: Detail) {
        self.end(OperationPhase::Completed, message.as_ref(), None, Some(result));
    }

    /// Ends it as completed, with the state of the VM.
    pub fn complete_with(self, message: impl AsRef<str>, vm: Arc<v1::Vm>, result: Option<Detail>) {
        let _ = self.outcome.set(Ok(Some(vm)));
        self.end(OperationPhase::Completed, message.as_ref(), None, result);
    }

    /// It could not be done.
    pub fn fail(self, failure: &Failure) {
        self.end_with(OperationPhase::Failed, failure);
    }

    /// Leaves it unfinished at the end of the daemon; the next daemon continues it.
    pub fn leave(self) {
        std::mem::forget(self);
    }

    /// Ends it as cancelled; `message` describes the remains.
    pub fn cancelled(self, message: impl Into<String>) {
        let failure = match self.cause().unwrap_or(Cause::Request) {
            Cause::Request => Failure::new(Kind::Aborted, "CANCELLED", message),
            Cause::Deadline => Failure::new(Kind::Deadline, "DEADLINE_EXCEEDED", message),
        };
        self.give_way(&failure);
    }

    /// It has ended early because of something else, which `failure` says.
    pub fn give_way(self, failure: &Failure) {
        self.end_with(OperationPhase::Cancelled, failure);
    }

    fn end_with(&self, phase: OperationPhase, failure: &Failure) {
        let _ = self.outcome.set(Err(failure.clone()));
        self.end(phase, &failure.message, Some(failure), None);
    }

    fn end(&self, phase: OperationPhase, message: &str, failure: Option<&Failure>, result: Option<Detail>) {
        self.shared.end(self.reporter.id, |operation| {
            operation.phase = phase.into();
            operation.message = text::one_line(message, LONGEST_MESSAGE);
            operation.error = failure.map(error);
            if phase == OperationPhase::Completed {
                operation.progress.get_or_insert_default().percent = 100;
                operation.result = result;
            }
        });
    }
}

/// As the status of a call that fails so.
fn error(failure: &Failure) -> rpc::Status {
    let status = tonic::Status::from(failure.clone());
    rpc::Status::decode(status.details()).unwrap_or_default()
}

impl Drop for Handle {
    fn drop(&mut self) {
        let failure = Failure::internal(GIVEN_UP);
        self.end(OperationPhase::Failed, GIVEN_UP, Some(&failure), None);
    }
}

impl Pending {
    /// The operation as it is.
    pub fn operation(&self) -> v1::Operation {
        v1::Operation::clone(&self.state.borrow())
    }

    /// Waits for its end. Returns the VM's state at the end, or the failure.
    pub async fn ended(mut self) -> Outcome {
        let ended = self
            .state
            .wait_for(|operation| has_ended(operation))
            .await
            .is_ok();
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
