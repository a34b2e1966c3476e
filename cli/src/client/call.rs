//! Calls with a time limit. A change is carried out once, also when its request is repeated.

use std::{future::Future, sync::PoisonError, time::Duration};

use tokio::time::Instant;
use tonic::{Response, Status};
use uuid::Uuid;
use vmmd_api::rule::Mutation;

use super::Client;
use crate::failure::{Code, Failure, Result};

/// Time limit for an answer that takes work, such as building a machine or ending a process, on a
/// loaded node.
pub const WORK: Duration = Duration::from_secs(180);
/// Time limit for the copy or preallocation of a disk. The end of the daemon is noticed at once in any case.
pub const COPY: Duration = Duration::from_secs(24 * 3600);

/// Time between two attempts to reach a daemon that went away.
pub const RESTART: Duration = Duration::from_secs(1);
/// Number of repeated requests to a daemon that went away before its answer.
const TRIES: u32 = 5;
/// Limit on successive attempts to resume a stream (a console, a watch, an operation) that deliver
/// nothing. The daemon of a busy node takes seconds to return.
pub const TRIES_TO_GO_ON: u32 = 20;

/// Reason of a failure: the answer did not come in time.
pub const NO_ANSWER: &str = "NO_ANSWER";

/// Waits for the answer of a call, at most `limit`.
pub async fn call<T>(limit: Duration, call: impl Future<Output = Result<Response<T>, Status>>) -> Result<T> {
    match tokio::time::timeout(limit, call).await {
        Ok(answer) => Ok(answer?.into_inner()),
        Err(_) => {
            let message = format!("no answer from vmmd within {} s", limit.as_secs());
            let failure = Failure {
                reason: NO_ANSWER.into(),
                ..Failure::new(Code::Timeout, message)
            };
            Err(failure.hint("`journalctl -u vmmd` on the node may show the reason"))
        }
    }
}

/// Whether the daemon was stopped or killed before it answered.
pub fn went_away(failure: &Failure) -> bool {
    failure.code == Code::Unavailable && matches!(&*failure.reason, "" | "DAEMON_STOPPING")
}

/// The failure of a watch that the daemon has ended.
pub fn watch_ended() -> Failure {
    Failure::new(Code::Unavailable, "vmmd ended the watch").hint("vmmd may be restarting: try again")
}

/// Runs `attempt` until it succeeds, and again each time that the daemon goes away. `attempt` resets the number of failed
/// attempts when it makes progress. With `notify`, the user is notified of the first failed attempt.
pub async fn over_restarts<T>(
    notify: bool,
    mut attempt: impl AsyncFnMut(&mut u32) -> Result<T>,
) -> Result<T> {
    let mut tries = 0;
    loop {
        let lost = match attempt(&mut tries).await {
            Ok(done) => return Ok(done),
            Err(failure) => failure,
        };
        if !went_away(&lost) || tries == TRIES_TO_GO_ON {
            return Err(lost);
        }
        tries += 1;
        if notify && tries == 1 {
            eprintln!("lost the connection to vmmd; continuing when vmmd is back");
        }
        tokio::time::sleep(RESTART).await;
    }
}

/// Registers the id of a change until the change ends or its caller stops waiting.
struct UnderWay<'a>(&'a Client, String);

impl<'a> UnderWay<'a> {
    fn begin(client: &'a Client, id: String) -> Self {
        let mut ids = client.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        ids.insert(id.clone());
        Self(client, id)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut ids = self.0.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        ids.remove(&self.1);
    }
}

impl Client {
    /// Sends a request for a change with a new id, and repeats it when the daemon goes away before its answer: the daemon
    /// carries out requests with one id once. `limit` bounds all attempts together.
    pub async fn change<Q: Mutation, T, F>(
        &self,
        limit: Duration,
        mut request: Q,
        send: impl Fn(Q) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let id = Uuid::now_v7().to_string();
        request.set_request_id(id.clone());
        let _under_way = UnderWay::begin(self, id);
        self.again(limit, || send(request.clone())).await
    }

    /// Makes an idempotent call, and repeats it when the daemon goes away before its answer.
    pub async fn again<T, F>(&self, limit: Duration, send: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let end = Instant::now() + limit;
        for _ in 0..TRIES {
            let left = end.saturating_duration_since(Instant::now());
            match call(left, send()).await {
                Err(failure) if went_away(&failure) && left > RESTART => {
                    tokio::time::sleep(RESTART).await;
                }
                Err(failure) if &*failure.reason == NO_ANSWER => {
                    let message = format!("no answer from vmmd within {} s", limit.as_secs());
                    return Err(Failure { message, ..failure });
                }
                answer => return answer,
            }
        }
        call(end.saturating_duration_since(Instant::now()), send()).await
    }

    /// Time limit of the user for a change, or `usual`.
    pub fn limit(&self, usual: Duration) -> Duration {
        self.timeout.unwrap_or(usual)
    }

    /// Time limit of the user for changes, if given.
    pub fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    /// Ids of the changes in progress.
    pub fn under_way(&self) -> Vec<String> {
        let ids = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        ids.iter().cloned().collect()
    }
}

/// Sends a request with [`Client::change`]: `send!(limit, client.vms, start_vm, request)`.
macro_rules! send {
    ($limit:expr, $client:ident.$service:ident, $method:ident, $request:expr) => {
        $client.change($limit, $request, |request| {
            let mut service = $client.$service.clone();
            async move { service.$method(request).await }
        })
    };
}
pub(crate) use send;
