//! Shows how far an operation is, until it has ended: one line that changes on a terminal, lines elsewhere.

use std::io::{IsTerminal, Write, stderr};

use prost::Message as _;
use proto::v1::{self, OperationPhase};

use crate::{
    client::Client,
    command::operation,
    failure::{Failure, Result},
    manifest::quantity,
};

/// Percent between two lines, where lines are printed.
const STEP: u32 = 10;

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
                // Of what was there before, nothing stays.
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
        }
    }
    line
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
        assert_eq!(line(&operation), "downloading: 30Mi of 300Mi, 4Mi/s");
    }
}
