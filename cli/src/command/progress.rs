//! Shows how far an operation is, until it has ended: one line that changes on a terminal, lines elsewhere.

use std::io::{IsTerminal, Write, stderr};

use prost::Message as _;
use proto::v1::{self, OperationPhase};

use crate::{
    client::{Client, RESTART, went_away},
    failure::{Failure, Result},
    manifest::quantity,
};

/// How often a watch is taken up again without a message in between.
const TRIES: u32 = 5;
/// Percent between two lines, where lines are printed.
const STEP: u32 = 10;

/// Waits for the end of an operation, and fails as it does.
pub async fn follow(client: &Client, operation: &v1::Operation, quiet: bool) -> Result<()> {
    let mut shown = Shown {
        terminal: stderr().is_terminal(),
        quiet,
        last: None,
    };
    let mut tries = 0;
    loop {
        let request = v1::WatchOperationRequest {
            id: operation.id.clone(),
        };
        let mut problem = None;
        match client.operations.clone().watch_operation(request).await {
            Ok(stream) => {
                let mut stream = stream.into_inner();
                loop {
                    match stream.message().await {
                        Ok(Some(message)) => {
                            tries = 0;
                            let operation = message.operation.unwrap_or_default();
                            if let Some(ended) = shown.show(&operation) {
                                return ended;
                            }
                        }
                        Ok(None) => break,
                        Err(status) => {
                            problem = Some(Failure::from(status));
                            break;
                        }
                    }
                }
            }
            Err(status) => problem = Some(Failure::from(status)),
        }
        tries += 1;
        match problem {
            Some(failure) if tries > TRIES || !went_away(&failure) => return Err(failure),
            _ => tokio::time::sleep(RESTART / TRIES).await,
        }
    }
}

struct Shown {
    terminal: bool,
    quiet: bool,
    /// Message and tens of percent of the last line.
    last: Option<(String, u32)>,
}

impl Shown {
    /// Returns how it has ended, when it has.
    fn show(&mut self, operation: &v1::Operation) -> Option<Result<()>> {
        let ended = match operation.phase() {
            OperationPhase::Completed => Some(Ok(())),
            OperationPhase::Failed | OperationPhase::Cancelled => Some(Err(failure(operation))),
            _ => None,
        };
        if self.quiet {
            return ended;
        }
        let line = line(operation);
        if ended.is_some() {
            if self.terminal && self.last.is_some() {
                // Of what was there before, nothing stays.
                eprint!("\r\x1b[K");
            }
            return ended;
        }
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
        ended
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
