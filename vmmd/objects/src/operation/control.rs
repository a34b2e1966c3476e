//! Work of an operation: its cancel signal and its progress reports.

use std::{io, pin::pin};

use tokio_util::sync::CancellationToken;
use vmmd_host::failure::{Failure, Kind};

use super::{Handle, Progress, Reporter};

/// Cancel signal and progress reports of blocking work.
#[derive(Clone, Debug, Default)]
pub struct Control {
    cancel: CancellationToken,
    /// Reporter of the operation; without one there are no progress reports.
    reporter: Option<Reporter>,
    /// It says nothing of numbers of bytes.
    silent: bool,
}

impl Control {
    /// One for a part of the work that says nothing of numbers of bytes.
    pub fn silent(&self) -> Self {
        Self {
            silent: true,
            ..self.clone()
        }
    }

    /// Is cancelled when the work is not wanted any more.
    pub fn cancel(&self) -> &CancellationToken {
        &self.cancel
    }

    /// Notes how far the work is, in bytes.
    pub fn progress(&self, done: u64, total: u64) {
        if let Some(reporter) = self.reporter.as_ref().filter(|_| !self.silent) {
            reporter.advance(Progress::bytes(done, total));
        }
    }

    /// Shows the present step of the work.
    pub fn say(&self, message: &str) {
        if let Some(reporter) = &self.reporter {
            reporter.say(message);
        }
    }

    /// An error when the work is not wanted any more.
    pub fn wanted(&self) -> io::Result<()> {
        match self.cancel.is_cancelled() {
            true => Err(io::Error::new(io::ErrorKind::Interrupted, "cancelled")),
            false => Ok(()),
        }
    }
}

/// Runs the work of an operation. The work reports progress to the operation. A cancel of the
/// operation, or the end of the daemon (`stopping`), cancels the work. Cancelled work must end on its own.
pub async fn follow<T, F: Future<Output = T>>(
    stopping: &CancellationToken,
    handle: &Handle,
    message: &str,
    work: impl FnOnce(Control) -> F,
) -> T {
    let cancel = stopping.child_token();
    handle.progress(Progress::bytes(0, 0), message);
    let control = Control {
        cancel: cancel.clone(),
        reporter: Some(handle.reporter()),
        silent: false,
    };
    let mut work = pin!(work(control));
    tokio::select! {
        result = &mut work => return result,
        () = handle.token().cancelled() => cancel.cancel(),
    }
    work.await
}

/// Why work has ended that was not wanted any more.
pub fn cancelled(stopping: &CancellationToken) -> Failure {
    if stopping.is_cancelled() {
        return Failure::stopping();
    }
    Failure::new(Kind::Aborted, "CANCELLED", "the operation was cancelled")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_ends_when_it_is_not_wanted() {
        let control = Control::default();
        assert!(control.wanted().is_ok());
        control.cancel().cancel();
        assert_eq!(control.wanted().unwrap_err().kind(), io::ErrorKind::Interrupted);
    }
}
