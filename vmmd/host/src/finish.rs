//! The last job of a thread that takes jobs from a queue.

use std::{
    sync::mpsc::{SyncSender, sync_channel},
    thread,
    time::Duration,
};

/// Waits until a thread has done all jobs in its queue and then the `last` one, which answers by the channel that it gets. Gives up when
/// that takes longer than `limit`; the queue may be full, and the thread may be stuck.
pub fn finish<J: Send + 'static>(
    jobs: SyncSender<J>,
    last: impl FnOnce(SyncSender<()>) -> J,
    limit: Duration,
) -> bool {
    let (reply, done) = sync_channel(1);
    let job = last(reply);
    // A full queue has no way to wait for room within a limit.
    let sending = thread::Builder::new()
        .name("finish".into())
        .spawn(move || jobs.send(job));
    sending.is_ok() && done.recv_timeout(limit).is_ok()
}
