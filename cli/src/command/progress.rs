//! Shows how far an operation is, until it has ended: one line that changes on a terminal, lines elsewhere.

use std::{
    io::{IsTerminal, Write, stderr},
    time::{Duration, Instant},
};

use prost::Message as _;
use vmmd_api::v1::{self, OperationPhase};

use crate::{
    client::Client,
    command::operation,
    failure::{Failure, Result},
    manifest::quantity,
};

/// Percent between two lines, where lines are printed.
const STEP: u32 = 10;
/// Time between two lines of a transfer on a terminal.
const REDRAW: Duration = Duration::from_millis(100);

/// Waits for the end of an operation, and fails as it does.
pub async fn follow(client: &Client, operation: &v1::Operation, quiet: bool) -> Result<()> {
    let mut shown = Shown {
        terminal: stderr().is_terminal(),
        quiet,
        last: None,
    };
    let ended = operation::follow(client, &operation.id, |now| {
        shown.show(now);
        Ok(())
    });
    let ended = ended.await?;
    match ended.phase() {
        OperationPhase::Completed => Ok(()),
        _ => Err(failure(&ended)),
    }
}

/// Shows how many bytes this program has sent or received, as [`follow`] shows an operation.
#[derive(Debug)]
pub struct Transfer {
    shown: Shown,
    operation: v1::Operation,
    began: Instant,
    /// When a line was shown on a terminal.
    drawn: Option<Instant>,
}

impl Transfer {
    /// Creates a progress display for `total` bytes, 0 when unknown.
    pub fn new(message: &str, total: u64, quiet: bool) -> Self {
        let progress = v1::OperationProgress {
            total,
            unit: v1::ProgressUnit::Bytes.into(),
            ..Default::default()
        };
        Self {
            shown: Shown {
                terminal: stderr().is_terminal(),
                quiet,
                last: None,
            },
            operation: v1::Operation {
                message: message.to_owned(),
                progress: Some(progress),
                ..Default::default()
            },
            began: Instant::now(),
            drawn: None,
        }
    }

    /// So many more have gone over.
    pub fn add(&mut self, bytes: usize) {
        let took = self.began.elapsed().as_millis().max(1);
        let Some(progress) = &mut self.operation.progress else {
            return;
        };
        progress.done = progress.done.saturating_add(bytes as u64);
        // About how many there are may be too few.
        let done = u128::from(progress.done.min(progress.total)) * 100;
        let percent = done.checked_div(u128::from(progress.total)).unwrap_or(0);
        progress.percent = u32::try_from(percent).unwrap_or(0);
        let rate = u128::from(progress.done) * 1000 / took;
        progress.per_second = u64::try_from(rate).unwrap_or(u64::MAX);
        let soon = self.drawn.is_some_and(|drawn| drawn.elapsed() < REDRAW);
        if !(soon && self.shown.terminal) {
            self.shown.show(&self.operation);
            self.drawn = Some(Instant::now());
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.operation.phase = OperationPhase::Completed.into();
        self.shown.show(&self.operation);
    }
}

#[derive(Debug)]
struct Shown {
    terminal: bool,
    quiet: bool,
    /// Message and tens of percent of the last line.
    last: Option<(String, u32)>,
}

impl Shown {
    fn show(&mut self, operation: &v1::Operation) {
        if self.quiet {
            return;
        }
        if operation::has_ended(operation) {
            if self.terminal && self.last.is_some() {
                // Clears the progress line.
                eprint!("\r\x1b[K");
            }
            return;
        }
        let line = line(operation);
        let now = (
            operation.message.clone(),
            operation.progress.as_ref().map_or(0, |progress| progress.percent) / STEP,
        );
        if self.terminal {
            eprint!("\r\x1b[K{line}");
            let _ = stderr().flush();
        } else if self.last.as_ref() != Some(&now) {
            eprintln!("{line}");
        }
        self.last = Some(now);
    }
}

/// `downloading: 12Mi of 300Mi, 4Mi/s`.
fn line(operation: &v1::Operation) -> String {
    let progress = operation.progress.unwrap_or_default();
    let mut line = operation.message.clone();
    if progress.unit() == v1::ProgressUnit::Bytes && progress.done > 0 {
        line += &format!(": {}", rounded(progress.done));
        if progress.total > 0 {
            line += &format!(" of {}", rounded(progress.total));
        }
        if progress.per_second > 0 {
            line += &format!(", {}/s", rounded(progress.per_second));
            if let Some(left) = left(&progress) {
                line += &format!(", {left} left");
            }
        }
    }
    line
}

/// How long the rest takes at this rate, when that is longer than a moment: `2m5s`.
fn left(progress: &v1::OperationProgress) -> Option<String> {
    let bytes = progress.total.checked_sub(progress.done)?;
    let seconds = bytes.checked_div(progress.per_second)?;
    match seconds {
        0 => None,
        1..60 => Some(format!("{seconds}s")),
        60..3600 => Some(format!("{}m{}s", seconds / 60, seconds % 60)),
        _ => Some(format!("{}h{}m", seconds / 3600, seconds / 60 % 60)),
    }
}

/// Whole MiB, from one of them on.
fn rounded(bytes: u64) -> String {
    const MIB: u64 = 1 << 20;
    quantity::show(if bytes >= MIB { bytes / MIB * MIB } else { bytes })
}

/// Why an operation has failed, as the call that waits for it would say it.
fn failure(operation: &v1::Operation) -> Failure {
    let error = operation.error.clone().unwrap_or_default();
    let code = tonic::Code::from(error.code);
    let details = error.encode_to_vec();
    tonic::Status::with_details(code, error.message, details.into()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_is_done_how_much_and_how_fast() {
        let mut operation = v1::Operation {
            message: "downloading".into(),
            ..Default::default()
        };
        assert_eq!(line(&operation), "downloading");
        operation.progress = Some(v1::OperationProgress {
            percent: 10,
            done: (30 << 20) + 5,
            total: 300 << 20,
            unit: v1::ProgressUnit::Bytes.into(),
            per_second: 4 << 20,
        });
        assert_eq!(line(&operation), "downloading: 30Mi of 300Mi, 4Mi/s, 1m7s left");
        let mut progress = operation.progress.unwrap();
        (progress.done, progress.per_second) = (300 << 20, 4 << 20);
        assert_eq!(left(&progress), None, "it is there");
        // About how many there are may be too few.
        progress.done += 1;
        assert_eq!(left(&progress), None);
        progress.total += 40 << 30;
        assert_eq!(left(&progress).unwrap(), "2h50m");
    }
}
