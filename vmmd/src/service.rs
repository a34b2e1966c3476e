//! What ties the daemon to systemd: readiness, the watchdog and the journal.

use std::{
    env, future,
    io::{self, IsTerminal},
    time::Duration,
};

use sd_notify::NotifyState;
use tokio::time::{interval, timeout};
use tracing_subscriber::{EnvFilter, layer::SubscriberExt, util::SubscriberInitExt};

use crate::{
    event::{Draft, Events, Object},
    store::Store,
};

/// Sends log messages to the journal when systemd has connected stderr to it, otherwise to stderr. What is logged is
/// chosen by `RUST_LOG`, by default `info`.
pub fn init_logging() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let registry = tracing_subscriber::registry().with(filter);
    if env::var_os("JOURNAL_STREAM").is_some()
        && let Ok(journal) = tracing_journald::layer()
    {
        registry.with(journal).init();
    } else {
        let colours = io::stderr().is_terminal();
        let stderr = tracing_subscriber::fmt::layer()
            .with_writer(io::stderr)
            .with_ansi(colours)
            .with_target(false);
        registry.with(stderr).init();
    }
}

/// Tells systemd that requests are served.
pub fn ready() {
    notify(NotifyState::Ready);
}

/// Tells systemd that the daemon ends.
pub fn stopping() {
    notify(NotifyState::Stopping);
}

/// How long a part of the daemon may take to answer when it is asked whether it works.
const PULSE: Duration = Duration::from_secs(5);

/// Whether the daemon can do its work: its store answers, and a blocking thread is to be had. A full disk is no reason to
/// restart it, and does not count.
pub async fn works(store: &Store) -> bool {
    let asked = async {
        let thread = tokio::task::spawn_blocking(|| ());
        store.ping().await.is_ok() && thread.await.is_ok()
    };
    timeout(PULSE, asked).await.unwrap_or(false)
}

/// Tells the events of a store whose thread has panicked. Ends with the store.
pub async fn tell_failures(store: Store, events: Events) {
    let mut failures = store.failures();
    while failures.changed().await.is_ok() {
        let message = "the thread of the store has failed and was made anew; the log has the cause";
        events.emit(Draft::warning(Object::Node, "StoreFailed", message));
    }
}

/// Tells systemd twice per watchdog period that the daemon works; never returns. Without a watchdog it tells nothing.
pub async fn watchdog(store: Store) {
    let Some(period) = sd_notify::watchdog_enabled() else {
        return future::pending().await;
    };
    let mut ticks = interval((period / 2).max(Duration::from_millis(1)));
    loop {
        ticks.tick().await;
        if works(&store).await {
            notify(NotifyState::Watchdog);
        } else {
            tracing::error!("the daemon does not work: systemd is to restart it; VMs run on");
        }
    }
}

fn notify(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::debug!(%error, "notify systemd");
    }
}
