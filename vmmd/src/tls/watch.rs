//! Notices that the files of certificates have changed.

use std::{collections::BTreeSet, io, os::fd::OwnedFd, path::Path, sync::Arc, time::Duration};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::{io::unix::AsyncFd, signal::unix::Signal, task::spawn_blocking, time::sleep};
use vmmd_api::v1::EventSeverity;
use vmmd_host::{sys, text};
use vmmd_objects::{
    context::Context,
    event::{Draft, Events, Object},
};

use super::Certificates;

/// A certificate and its key are two files: how long to wait for the second one after the first.
const SETTLE: Duration = Duration::from_millis(300);

/// Loads `certificates` when their files change or a `hangup` arrives, and emits an event with the
/// result. Never ends.
pub async fn watch(events: Events, certificates: Arc<Certificates>, mut hangup: Signal) {
    let changes = folders(&certificates.files());
    let mut changes = changes
        .inspect_err(|error| {
            tracing::warn!(%error, "changed certificates are not noticed: `systemctl reload vmmd` loads them");
        })
        .ok();
    loop {
        tokio::select! {
            changed = changed(&mut changes) => if let Err(error) = changed {
                tracing::warn!(%error, "watch the folder of the certificates");
                changes = None;
                continue;
            },
            Some(()) = hangup.recv() => {}
        }
        reload(&events, &certificates).await;
    }
}

/// Loads `certificates`, and emits an event with the result.
pub async fn reload(events: &Events, certificates: &Arc<Certificates>) {
    let loading = Arc::clone(certificates);
    let loaded = spawn_blocking(move || loading.reload()).await;
    let (severity, reason, message) = match loaded {
        Ok(Ok(false)) | Err(_) => return,
        Ok(Ok(true)) => {
            let mut message = "new connections over TCP use the certificates that were loaded".to_owned();
            let end = certificates.ends().into_iter().map(|(_, end)| end).min();
            if let Some(end) = end.and_then(|end| jiff::Timestamp::from_second(end).ok()) {
                message += &format!("; the first of them ends on {}", end.strftime("%Y-%m-%d"));
            }
            (EventSeverity::Normal, "CertificatesLoaded", message)
        }
        Ok(Err(error)) => {
            let error = text::chain(&error);
            tracing::error!(files = ?certificates.files(), "load the certificates: {error}");
            let then = match certificates.current() {
                Some(_) => "the ones before are still used",
                None => "there are no connections over TCP",
            };
            let message = format!("certificates can't be loaded: {error}; {then}");
            (EventSeverity::Warning, "CertificatesUnusable", message)
        }
    };
    let draft = Draft {
        severity,
        ..Draft::normal(Object::Node, reason, message)
    };
    events.emit(draft.of(Context::daemon()));
}

/// Watches the folders, since files are replaced by others of the same name. All must be there.
fn folders(files: &[&Path]) -> io::Result<AsyncFd<OwnedFd>> {
    let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    let folders: BTreeSet<_> = files.iter().filter_map(|file| file.parent()).collect();
    let events = WatchFlags::CLOSE_WRITE | WatchFlags::MOVED_TO | WatchFlags::CREATE;
    for folder in folders {
        inotify::add_watch(&inotify, folder, events | WatchFlags::ONLYDIR)?;
    }
    sys::watch(inotify)
}

/// Waits for a change and for the quiet after it.
async fn changed(changes: &mut Option<AsyncFd<OwnedFd>>) -> io::Result<()> {
    let Some(changes) = changes else {
        return std::future::pending().await;
    };
    changes.readable().await?.retain_ready();
    sleep(SETTLE).await;
    let mut events = [0; 4096];
    loop {
        let mut ready = changes.readable().await?;
        match ready.try_io(|inotify| Ok(rustix::io::read(inotify, &mut events)?)) {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return Err(error),
            // All have been read.
            Err(_) => return Ok(()),
        }
    }
}
