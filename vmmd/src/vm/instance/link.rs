//! Connection to a `vmm`. A lost connection is re-established at growing intervals as long as the
//! process lives.

use std::time::Duration;

use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};
use vmm_protocol::vmm::HelloReply;

use crate::{
    control::{self, Client, Notices},
    paths::RuntimeDir,
};

/// After a connection is lost, how long the process is expected to end before another one is reported as failed.
pub const DYING: Duration = Duration::from_secs(1);
/// The first wait after a connection that failed, or that broke soon; each is twice the one before.
const FIRST: Duration = Duration::from_millis(100);
/// The longest.
const LONGEST: Duration = Duration::from_secs(10);
/// A connection that held as long is a good one: the next wait is none again.
const GOOD: Duration = Duration::from_secs(60);

/// The connection of one run.
#[derive(Debug)]
pub struct Link {
    pub state: State,
    /// Connections in a row that failed or broke soon.
    failures: u32,
    /// When it was made.
    since: Option<Instant>,
}

/// How a connection is.
#[derive(Debug)]
pub enum State {
    /// It answers.
    Up(Client, Notices),
    /// The `vmm` has not answered yet, or the connection was lost and a reconnect is under way.
    Connecting(JoinHandle<Result<Session, control::Error>>),
    /// Its socket was removed: there is no way to talk to it.
    Unreachable,
}

/// A connection on which both sides have said hello.
#[derive(Debug)]
pub struct Session {
    /// For requests.
    pub client: Client,
    /// Unsolicited notices of the `vmm`.
    pub notices: Notices,
    /// What it said.
    pub hello: HelloReply,
}

impl From<State> for Link {
    fn from(state: State) -> Self {
        let since = matches!(state, State::Up(..)).then(Instant::now);
        Self {
            state,
            failures: 0,
            since,
        }
    }
}

impl Link {
    /// It answers.
    pub fn up(&mut self, client: Client, notices: Notices) {
        self.state = State::Up(client, notices);
        self.since = Some(Instant::now());
    }

    /// It was lost, or could not be made: another one is tried.
    pub fn retry(&mut self, runtime: RuntimeDir) {
        let held = self.since.take().map(|since| since.elapsed());
        let wait = wait(self.failures, held);
        self.failures = if held.is_some_and(|held| held >= GOOD) {
            1
        } else {
            self.failures.saturating_add(1)
        };
        self.state = State::Connecting(tokio::spawn(reconnect(runtime, wait)));
    }

    /// For asking, while it answers.
    pub fn client(&self) -> Option<Client> {
        match &self.state {
            State::Up(client, _) => Some(client.clone()),
            State::Connecting(_) | State::Unreachable => None,
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let State::Connecting(task) = &self.state {
            task.abort();
        }
    }
}

/// How long to wait before the next connection, after so many in a row that were no good; the last one held for `held`.
fn wait(failures: u32, held: Option<Duration>) -> Duration {
    if failures == 0 || held.is_some_and(|held| held >= GOOD) {
        return Duration::ZERO;
    }
    FIRST
        .saturating_mul(2_u32.saturating_pow(failures - 1))
        .min(LONGEST)
}

/// Connects and says hello; waits as long as the process lives.
pub async fn connect(runtime: RuntimeDir) -> Result<Session, control::Error> {
    let (client, notices) = Client::connect(&runtime.control()).await?;
    greet(client, notices).await
}

/// Says hello.
pub async fn greet(client: Client, notices: Notices) -> Result<Session, control::Error> {
    let hello = client.hello().await?;
    Ok(Session {
        client,
        notices,
        hello,
    })
}

/// Connects again. After a failure the process is probably about to end, so the result is delayed
/// to let the news of the end arrive first.
async fn reconnect(runtime: RuntimeDir, wait: Duration) -> Result<Session, control::Error> {
    sleep(wait).await;
    let result = connect(runtime).await;
    if result.is_err() {
        sleep(DYING).await;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_try_is_at_once_and_others_wait_ever_longer() {
        let millis = |failures, held| wait(failures, held).as_millis();
        let short = Some(Duration::from_secs(1));
        let waits: Vec<_> = (0..9).map(|failures| millis(failures, short)).collect();
        assert_eq!(waits, [0, 100, 200, 400, 800, 1600, 3200, 6400, 10_000]);
        assert_eq!(millis(u32::MAX, None), 10_000);
        assert_eq!(millis(5, Some(GOOD)), 0);
    }
}
