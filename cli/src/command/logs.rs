//! `logs`: the output of a guest or the log of its vmm.

use std::{
    collections::VecDeque,
    io::{self, Write as _},
    time::Duration,
};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use vmmd_api::v1::{self, VmLog, console_request, console_response};

use crate::{
    args::observe::Logs,
    client::{Client, QUICK, about_vm, call, over_restarts},
    console::Seen,
    failure::{Code, Failure, Result},
    output::{clean::Cleaner, write_failed},
};

/// Prints a log.
pub async fn logs(client: &Client, args: &Logs) -> Result<()> {
    let mut printer = Printer::new(args);
    if args.follow {
        return follow(client, args, &mut printer).await;
    }
    let mut stream = open(client, args, false).await?;
    let mut all = History::new(args);
    while let Some(message) = stream.message().await.map_err(|status| failed(status, args))? {
        if let Some(now) = all.add(&message.data) {
            printer.print(&now)?;
        }
    }
    printer.print(&all.end())
}

fn failed(status: tonic::Status, args: &Logs) -> Failure {
    about_vm(status.into(), &args.name)
}

/// Opens a log file.
async fn open(client: &Client, args: &Logs, follow: bool) -> Result<tonic::Streaming<v1::GetVmLogsResponse>> {
    let request = v1::GetVmLogsRequest {
        name: args.name.clone(),
        log: if args.vmm { VmLog::Vmm } else { VmLog::Serial }.into(),
        previous: args.previous,
        follow,
        tail_bytes: None,
    };
    let opened = call(QUICK, client.vms.clone().get_vm_logs(request)).await;
    opened.map_err(|failure| about_vm(failure, &args.name))
}

/// Prints existing and new output until the run ends or the user ends it.
async fn follow(client: &Client, args: &Logs, printer: &mut Printer) -> Result<()> {
    over_restarts(true, async |tries: &mut u32| {
        let before = printer.printed;
        let followed = if args.vmm {
            follow_vmm(client, args, printer).await
        } else {
            follow_serial(client, args, printer).await
        };
        if printer.printed != before {
            *tries = 0;
        }
        followed
    })
    .await
}

/// Follows a vmm's log: the content of the file, then new lines.
async fn follow_vmm(client: &Client, args: &Logs, printer: &mut Printer) -> Result<()> {
    let mut stream = open(client, args, false).await?;
    let mut there = Vec::new();
    while let Some(message) = stream.message().await.map_err(|status| failed(status, args))? {
        there.extend(message.data);
    }
    printer.replay(&there, args)?;
    let mut known = there.len();
    let mut stream = open(client, args, true).await?;
    while let Some(message) = stream.message().await.map_err(|status| failed(status, args))? {
        let skip = known.min(message.data.len());
        known -= skip;
        printer.add(message.data.get(skip..).unwrap_or_default())?;
    }
    Err(Failure::new(Code::Unavailable, "vmmd ended the log"))
}

/// Follows the console without input: the kept output, then new output.
async fn follow_serial(client: &Client, args: &Logs, printer: &mut Printer) -> Result<()> {
    let open = v1::ConsoleOpen {
        name: args.name.clone(),
        access: v1::ConsoleAccess::ReadOnly.into(),
        ..v1::ConsoleOpen::default()
    };
    let (requests, queue) = mpsc::channel(1);
    let open = v1::ConsoleRequest {
        message: Some(console_request::Message::Open(open)),
    };
    // The queue is empty.
    let _ = requests.try_send(open);
    let opened = call(QUICK, client.vms.clone().console(ReceiverStream::new(queue))).await;
    let mut stream = opened.map_err(|failure| about_vm(failure, &args.name))?;
    let (mut kept, mut missing) = (Vec::new(), 0);
    while let Some(message) = stream.message().await.map_err(|status| failed(status, args))? {
        match message.message {
            Some(console_response::Message::Opened(opened)) => missing = opened.replay_bytes,
            Some(console_response::Message::Output(bytes)) if missing > 0 => {
                missing = missing.saturating_sub(bytes.len() as u64);
                kept.extend(bytes);
                if missing == 0 {
                    printer.replay(&std::mem::take(&mut kept), args)?;
                }
            }
            Some(console_response::Message::Output(bytes)) => printer.add(&bytes)?,
            Some(console_response::Message::Closed(_)) => return printer.replay(&kept, args),
            Some(console_response::Message::TakenOver(_)) | None => {}
        }
    }
    drop(requests);
    Err(Failure::new(Code::Unavailable, "vmmd ended the console"))
}

/// Prints output and records the end of the printed part.
struct Printer {
    clean: Option<Cleaner>,
    seen: Seen,
    /// Number of printed bytes.
    printed: usize,
}

impl Printer {
    fn new(args: &Logs) -> Self {
        Self {
            clean: (!args.raw).then(Cleaner::default),
            seen: Seen::default(),
            printed: 0,
        }
    }

    /// Prints the new part of the daemon's kept output; the first time, as much of it as requested.
    fn replay(&mut self, kept: &[u8], args: &Logs) -> Result<()> {
        if self.printed > 0 {
            let new = self.seen.unseen(kept).to_vec();
            return self.add(&new);
        }
        let mut history = History::new(args);
        let now = history.add(kept).unwrap_or_default();
        self.seen.note(kept);
        self.printed += kept.len();
        self.print(&now)?;
        self.print(&history.end())
    }

    /// Prints new output.
    fn add(&mut self, bytes: &[u8]) -> Result<()> {
        self.seen.note(bytes);
        self.printed += bytes.len();
        self.print(bytes)
    }

    fn print(&mut self, bytes: &[u8]) -> Result<()> {
        let clean = self.clean.as_mut().map(|cleaner| cleaner.clean(bytes));
        let mut stdout = io::stdout().lock();
        let written = stdout
            .write_all(clean.as_deref().unwrap_or(bytes))
            .and_then(|()| stdout.flush());
        written.map_err(|error| write_failed(&error))
    }
}

/// The part of a log's past that is printed.
struct History {
    tail: Option<usize>,
    /// Time of the first line to print.
    from: Option<jiff::Timestamp>,
    lines: VecDeque<Vec<u8>>,
    /// The last line, possibly incomplete.
    open: Vec<u8>,
}

impl History {
    fn new(args: &Logs) -> Self {
        Self {
            tail: args.tail,
            from: args.since.map(before_now),
            lines: VecDeque::new(),
            open: Vec::new(),
        }
    }

    /// Adds bytes; returns the bytes that can be printed at once.
    fn add(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        if self.tail.is_none() && self.from.is_none() {
            return Some(bytes.to_vec());
        }
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.open.extend_from_slice(part);
            if part.ends_with(b"\n") {
                let line = std::mem::take(&mut self.open);
                self.line(line);
            }
        }
        None
    }

    fn line(&mut self, line: Vec<u8>) {
        if let (Some(from), Some(time)) = (self.from, time_of(&line)) {
            if time < from {
                return;
            }
            // Later lines are newer, with or without a time.
            self.from = None;
        } else if self.from.is_some() {
            return;
        }
        self.lines.push_back(line);
        if self.tail.is_some_and(|most| self.lines.len() > most) {
            self.lines.pop_front();
        }
    }

    /// The rest.
    fn end(&mut self) -> Vec<u8> {
        let open = std::mem::take(&mut self.open);
        if !open.is_empty() {
            self.line(open);
        }
        self.lines.drain(..).flatten().collect()
    }
}

fn before_now(age: Duration) -> jiff::Timestamp {
    jiff::Timestamp::now()
        .checked_sub(age)
        .unwrap_or(jiff::Timestamp::MIN)
}

/// The time with which a line begins.
fn time_of(line: &[u8]) -> Option<jiff::Timestamp> {
    let word = line.split(|byte| *byte == b' ').next()?;
    std::str::from_utf8(word).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(tail: Option<usize>, from: Option<&str>, parts: &[&str]) -> String {
        let mut history = History {
            tail,
            from: from.map(|from| from.parse().unwrap()),
            lines: VecDeque::new(),
            open: Vec::new(),
        };
        let mut now: Vec<u8> = parts
            .iter()
            .filter_map(|part| history.add(part.as_bytes()))
            .flatten()
            .collect();
        now.extend(history.end());
        String::from_utf8(now).unwrap()
    }

    #[test]
    fn history_is_cut_by_lines_and_time() {
        assert_eq!(of(None, None, &["a\nb"]), "a\nb");
        assert_eq!(of(Some(2), None, &["a\nb\n", "c\nd"]), "c\nd");
        assert_eq!(of(Some(0), None, &["a\nb\n"]), "");
        assert_eq!(of(Some(5), None, &["a", "b\n"]), "ab\n");
        let log = "2026-01-01T10:00:00Z old\n  of it\n2026-01-01T11:00:00.5Z new\n  of it\n";
        assert_eq!(
            of(None, Some("2026-01-01T10:30:00Z"), &[log]),
            "2026-01-01T11:00:00.5Z new\n  of it\n"
        );
        assert_eq!(of(Some(1), Some("2026-01-01T10:30:00Z"), &[log]), "  of it\n");
        assert_eq!(of(None, Some("2027-01-01T00:00:00Z"), &[log]), "");
    }
}
