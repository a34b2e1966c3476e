//! Readiness and the watchdog of systemd.

use std::{future, time::Duration};

use sd_notify::NotifyState;
use tokio::time::{interval, timeout};
use vmmd_objects::event::{Draft, Events, Object};
use vmmd_store::Store;

/// Notifies systemd that the daemon serves requests.
pub fn ready() {
    notify(NotifyState::Ready);
}

/// Notifies systemd that the daemon stops.
pub fn stopping() {
    notify(NotifyState::Stopping);
}

/// How long a part of the daemon may take to answer when it is asked whether it works.
const PULSE: Duration = Duration::from_secs(5);

/// Whether the daemon works: its store answers, and a blocking thread is available. A full disk
/// does not count, because a restart does not help.
pub async fn works(store: &Store) -> bool {
    let asked = async {
        let thread = tokio::task::spawn_blocking(|| ());
        store.ping().await.is_ok() && thread.await.is_ok()
    };
    timeout(PULSE, asked).await.unwrap_or(false)
}

/// Emits an event for each panic of the store's thread. Ends with the store.
pub async fn tell_failures(store: Store, events: Events) {
    let mut failures = store.failures();
    while failures.changed().await.is_ok() {
        let message = "the thread of the store has failed and was restarted; the log has the cause";
        events.emit(Draft::warning(Object::Node, "StoreFailed", message));
    }
}

/// Notifies systemd twice per watchdog period while the daemon works. Never returns. Without a
/// watchdog it does nothing.
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
