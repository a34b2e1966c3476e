//! An actor's work under way, and the news of its process.

use std::future::{self, Future};

use tokio::{
    sync::oneshot,
    task::JoinHandle,
    time::{Duration, Instant, sleep, sleep_until},
};
use tokio_util::sync::{CancellationToken, DropGuard};
use vm_lifecycle::{
    exit::Asked,
    stop::{Stage, Stopping, Then},
};
use vmm_protocol::vmm::Status;
use vmmd_api::v1::{ExitStatus, StopMetadata, StopStage};
use vmmd_host::{cgroup::LEAVING, failure::Failure, text};
use vmmd_objects::operation::{Handle, Metadata, Progress};

use crate::{
    control::{self, Notice},
    registry::vms::command::{LifeReply, Request},
    vm::{
        instance::{
            Instance, Unreaped,
            link::{Link, Session, State},
        },
        start::Started,
    },
};

/// Work under way.
#[derive(Debug, Default)]
pub enum Work {
    /// Nothing.
    #[default]
    None,
    /// A process is being made and booted.
    Start(Start),
    /// The process is to end.
    Stop(Stop),
    /// It is asked to pause, resume or reset.
    Change(Change),
}

/// A start.
#[derive(Debug)]
pub struct Start {
    /// Does it.
    pub task: JoinHandle<Result<Started, Failure>>,
    /// Says when it has failed, and its process was killed and does not die.
    pub lingers: Option<oneshot::Receiver<Unreaped>>,
    /// Ends it early.
    pub cancel: CancellationToken,
    /// Cancels the start when the actor ends, so that no unowned machine comes up.
    pub _with_actor: DropGuard,
    /// Operation of this work.
    pub operation: Handle,
    /// Its operation was cancelled.
    pub is_cancelled: bool,
    /// Stop that was requested meanwhile.
    pub stop: Option<Stop>,
}

/// A stop, from asking the guest to the end of the process.
#[derive(Debug)]
pub struct Stop {
    /// How far it is, and what follows.
    pub state: Stopping,
    /// Operation of this work.
    pub operation: Handle,
    /// Its operation was cancelled.
    pub is_cancelled: bool,
    /// The stop undoes a cancelled operation.
    pub undoes: bool,
    /// Other stops that end with this one.
    pub also: Vec<Handle>,
    /// How the run ended; unset while it has not, or when none had begun.
    pub exit: Option<ExitStatus>,
}

/// Steps of a stop, as its operation counts them: the guest's part, and the end of the process.
const STEPS: u64 = 2;

impl Stop {
    /// One that has not begun.
    pub fn new(operation: Handle, asked: Asked, then: Then) -> Self {
        Self {
            state: Stopping::new(asked, then),
            operation,
            is_cancelled: false,
            undoes: false,
            also: Vec::new(),
            exit: None,
        }
    }

    /// Reports the progress to the operation.
    pub fn tell(&self) {
        let left = self.state.deadline.filter(|_| self.state.stage == Stage::Asked);
        let left = left.map(|deadline| deadline.saturating_duration_since(Instant::now().into_std()));
        let kill_ms = left.map(|left| {
            let left = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
            text::now_ms().saturating_add(left)
        });
        let (stage, done, message) = match self.state.stage {
            Stage::Asked => (StopStage::Asked, 0, "waiting for the guest to power off"),
            Stage::Ending => (StopStage::Ending, 1, "ending the vmm process"),
            Stage::Killed => (StopStage::Killed, 1, "killing the vmm process"),
        };
        self.operation.metadata(Metadata::Stop(StopMetadata {
            stage: stage.into(),
            kill_time: kill_ms.and_then(text::timestamp),
        }));
        self.operation.progress(Progress::steps(done, STEPS), message);
    }
}

/// A pause, resume, reset or non-maskable interrupt.
#[derive(Debug)]
pub struct Change {
    /// Does it.
    pub task: JoinHandle<Result<Status, control::Error>>,
    /// Caller that waits for the result.
    pub reply: LifeReply,
    /// Which of them.
    pub request: Request,
    /// State that the `vmm` reported meanwhile: a disk may fail at the moment of a resume.
    pub said: Option<Status>,
}

/// Work that has ended.
#[derive(Debug)]
pub enum Done {
    /// A start.
    Started(Box<Result<Started, Failure>>),
    /// A pause or resume.
    Changed(Result<Status, control::Error>),
    /// The time for a stage of a stop.
    Deadline,
    /// The operation is to be cancelled.
    Cancelled,
    /// The process of a start that has failed was killed and does not die.
    Unreaped(Unreaped),
}

impl Work {
    /// Waits until something is done; forever when nothing is under way.
    pub async fn next(&mut self) -> Done {
        match self {
            Self::None => future::pending().await,
            Self::Start(Start {
                task,
                lingers,
                operation,
                is_cancelled,
                ..
            }) => tokio::select! {
                result = task => {
                    Done::Started(Box::new(
                        result.unwrap_or_else(|error| Err(Failure::internal(error.to_string()))),
                    ))
                }
                () = operation.token().cancelled(), if !*is_cancelled => {
                    *is_cancelled = true;
                    Done::Cancelled
                }
                what = told(lingers) => Done::Unreaped(what),
            },
            Self::Stop(stop) => tokio::select! {
                () = until(stop.state.deadline.map(Instant::from_std)) => Done::Deadline,
                () = stop.operation.token().cancelled(), if !stop.is_cancelled => {
                    stop.is_cancelled = true;
                    Done::Cancelled
                }
            },
            Self::Change(change) => {
                let result = (&mut change.task).await;
                Done::Changed(result.unwrap_or(Err(control::Error::Closed)))
            }
        }
    }
}

/// Waits for the one message, or forever without a sender. Cancel-safe.
async fn told(lingers: &mut Option<oneshot::Receiver<Unreaped>>) -> Unreaped {
    let what = match lingers {
        Some(receiver) => receiver.await.ok(),
        None => None,
    };
    *lingers = None;
    match what {
        Some(what) => what,
        None => future::pending().await,
    }
}

/// Waits until then; forever when there is no such time.
pub async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => future::pending().await,
    }
}

/// News of a process.
#[derive(Debug)]
pub enum News {
    /// The process and the rest of its cgroup have ended, with the signal if it is known.
    Ended(Option<i32>),
    /// Something of it was killed and does not die.
    Unreaped(Unreaped),
    /// It says something.
    Notice(Notice),
    /// The connection is gone.
    Disconnected,
    /// The reconnect succeeded or failed.
    Connected(Result<Session, control::Error>),
    /// A share is otherwise served than before.
    Shares,
}

/// Waits for news; forever when there is no process.
pub async fn news(instance: &mut Option<Instance>) -> News {
    let Some(instance) = instance else {
        return future::pending().await;
    };
    // Notices have priority only while the process lives: the rest of its cgroup may take long to
    // die.
    if instance.exited.is_none() {
        tokio::select! {
            biased;
            signal = instance.process.ended() => instance.exited = Some(signal),
            news = link_news(&mut instance.link) => return news,
            () = instance.shares.changed() => return News::Shares,
        }
    }
    let told = instance.lingering == Some(Unreaped::Leftovers);
    end_of_run(instance.ended(), LEAVING, told).await
}

/// Waits for the end of a run whose process has ended; says when that takes long, unless that was `told`.
async fn end_of_run(ended: impl Future<Output = Option<i32>>, patience: Duration, told: bool) -> News {
    tokio::select! {
        biased;
        signal = ended => News::Ended(signal),
        () = sleep(patience), if !told => News::Unreaped(Unreaped::Leftovers),
    }
}

async fn link_news(link: &mut Link) -> News {
    match &mut link.state {
        State::Up(_, notices) => notices.next().await.map_or(News::Disconnected, News::Notice),
        State::Connecting(task) => {
            let result = task.await;
            News::Connected(result.unwrap_or(Err(control::Error::Closed)))
        }
        State::Unreachable => future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn unreaped_run_is_reported_once_and_waited_for() {
        let news = end_of_run(future::ready(Some(9)), LEAVING, false).await;
        assert!(matches!(news, News::Ended(Some(9))));
        let news = end_of_run(future::pending(), Duration::ZERO, false).await;
        assert!(matches!(news, News::Unreaped(Unreaped::Leftovers)));
        // After this report, only the end is reported.
        let mut waiting = Box::pin(end_of_run(future::pending(), Duration::ZERO, true));
        let more = tokio::time::timeout(Duration::from_millis(10), &mut waiting).await;
        assert!(more.is_err());
    }
}
