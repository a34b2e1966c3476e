//! What ties the daemon to systemd: readiness, the watchdog and the journal.

use std::{
    env,
    io::{self, IsTerminal},
    time::Duration,
};

use sd_notify::NotifyState;
use tokio::time::interval;
use tracing_subscriber::{EnvFilter, layer::SubscriberExt, util::SubscriberInitExt};

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

/// Tells systemd twice per watchdog period that the daemon's tasks still run; returns at once without a watchdog.
pub async fn watchdog() {
    let Some(period) = sd_notify::watchdog_enabled() else {
        return;
    };
    let mut ticks = interval((period / 2).max(Duration::from_millis(1)));
    loop {
        ticks.tick().await;
        notify(NotifyState::Watchdog);
    }
}

fn notify(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::debug!(%error, "notify systemd");
    }
}
