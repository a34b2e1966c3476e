//! The serial log of a VM, with the options that `kubectl logs` has.

use std::pin::Pin;

use futures::{Stream, StreamExt as _, stream};
use tonic::Status;
use vmmd_api::v1::{self, console_request, console_response};

use crate::daemon::Daemon;

type Bytes = Pin<Box<dyn Stream<Item = Result<Vec<u8>, Status>> + Send>>;

/// Options of a request for logs. `sinceTime`, `sinceSeconds` and `timestamps` are ignored: a
/// guest's output has no times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Continue with new output.
    pub follow: bool,
    /// Log of the run before the last one.
    pub previous: bool,
    /// Only so many lines of what there is already.
    pub tail_lines: Option<usize>,
    /// Only so many bytes.
    pub limit_bytes: Option<usize>,
}

impl Options {
    /// Of a query.
    ///
    /// # Errors
    ///
    /// A value that is none.
    pub fn of(query: &str) -> Result<Self, String> {
        let mut options = Self::default();
        for (key, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
            let flag = || {
                value
                    .parse::<bool>()
                    .map_err(|_| format!("{key} must be true or false"))
            };
            let number = || {
                value
                    .parse::<usize>()
                    .map_err(|_| format!("{key} must be a number"))
            };
            match key {
                "follow" => options.follow = flag()?,
                "previous" => options.previous = flag()?,
                "tailLines" => options.tail_lines = Some(number()?),
                "limitBytes" => options.limit_bytes = Some(number()?),
                _ => {}
            }
        }
        Ok(options)
    }
}

/// The log of the VM with this name.
///
/// # Errors
///
/// As vmmd has.
pub async fn stream(daemon: &Daemon, name: String, options: Options) -> Result<Bytes, Status> {
    let bytes = if options.follow && !options.previous {
        console(daemon, name, options.tail_lines).await?
    } else {
        log(daemon, name, options).await?
    };
    Ok(match options.limit_bytes {
        Some(limit) => limited(bytes, limit),
        None => bytes,
    })
}

async fn log(daemon: &Daemon, name: String, options: Options) -> Result<Bytes, Status> {
    let request = v1::GetVmLogsRequest {
        name,
        log: v1::VmLog::Serial.into(),
        previous: options.previous,
        ..v1::GetVmLogsRequest::default()
    };
    let pieces = daemon.vms.clone().get_vm_logs(request).await?.into_inner();
    let pieces = pieces.map(|piece| piece.map(|piece| piece.data));
    let Some(lines) = options.tail_lines else {
        return Ok(Box::pin(pieces));
    };
    // vmmd keeps a few megabytes at most.
    let all: Vec<_> = pieces.collect().await;
    let all = all.into_iter().collect::<Result<Vec<_>, _>>()?.concat();
    let end = tail(&all, lines).to_vec();
    Ok(Box::pin(stream::iter([Ok(end)])))
}

/// Output of the console. The replay comes before new output, so that no output is missed between
/// the two.
async fn console(daemon: &Daemon, name: String, lines: Option<usize>) -> Result<Bytes, Status> {
    let open = v1::ConsoleOpen {
        name,
        access: v1::ConsoleAccess::ReadOnly.into(),
        ..v1::ConsoleOpen::default()
    };
    let open = v1::ConsoleRequest {
        message: Some(console_request::Message::Open(open)),
    };
    // The end of the requests would be the client's.
    let requests = stream::iter([open]).chain(stream::pending());
    let mut answers = daemon.vms.clone().console(requests).await?.into_inner();
    let mut replayed = Vec::new();
    let mut left = 0;
    while let Some(answer) = answers.message().await? {
        match answer.message {
            Some(console_response::Message::Opened(opened)) => {
                left = usize::try_from(opened.replay_bytes).unwrap_or(usize::MAX);
            }
            Some(console_response::Message::Output(bytes)) => {
                left = left.saturating_sub(bytes.len());
                replayed.extend(bytes);
            }
            Some(console_response::Message::Closed(_)) => break,
            _ => {}
        }
        if left == 0 {
            break;
        }
    }
    let replayed = match lines {
        Some(lines) => tail(&replayed, lines).to_vec(),
        None => replayed,
    };
    let live = answers.filter_map(|answer| async move {
        match answer.map(|answer| answer.message) {
            Ok(Some(console_response::Message::Output(bytes))) => Some(Ok(bytes)),
            Ok(_) => None,
            Err(status) => Some(Err(status)),
        }
    });
    Ok(Box::pin(stream::iter([Ok(replayed)]).chain(live)))
}

/// The last lines of a text; one that is not ended is a line too.
fn tail(text: &[u8], lines: usize) -> &[u8] {
    if lines == 0 {
        return &[];
    }
    let body = text.strip_suffix(b"\n").unwrap_or(text);
    let ends = body.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n');
    let start = ends.map(|(index, _)| index + 1).nth(lines - 1).unwrap_or(0);
    text.get(start..).unwrap_or_default()
}

fn limited(bytes: Bytes, limit: usize) -> Bytes {
    let cut = bytes.scan(limit, |left, piece| {
        let piece = piece.map(|mut piece| {
            piece.truncate(*left);
            *left -= piece.len();
            piece
        });
        let done = matches!(&piece, Ok(piece) if piece.is_empty()) && *left == 0;
        futures::future::ready((!done).then_some(piece))
    });
    Box::pin(cut)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_those_of_kubectl() {
        let options = Options::of("follow=true&tailLines=3&limitBytes=9&timestamps=false").unwrap();
        let wanted = Options {
            follow: true,
            previous: false,
            tail_lines: Some(3),
            limit_bytes: Some(9),
        };
        assert_eq!(options, wanted);
        assert!(Options::of("tailLines=x").is_err());
        assert_eq!(Options::of("").unwrap(), Options::default());
    }

    #[test]
    fn the_last_lines_are_counted_from_the_end() {
        for (text, lines, wanted) in [
            ("a\nb\nc\n", 2, "b\nc\n"),
            ("a\nb\nc", 2, "b\nc"),
            ("a\nb\n", 9, "a\nb\n"),
            ("a\n", 0, ""),
            ("", 3, ""),
            ("\n\n", 1, "\n"),
        ] {
            assert_eq!(
                tail(text.as_bytes(), lines),
                wanted.as_bytes(),
                "{text:?} {lines}"
            );
        }
    }

    #[tokio::test]
    async fn a_limit_cuts_the_log() {
        let pieces = stream::iter([Ok(b"abc".to_vec()), Ok(b"def".to_vec()), Ok(b"ghi".to_vec())]);
        let cut: Vec<_> = limited(Box::pin(pieces), 4).collect().await;
        let cut: Vec<_> = cut.into_iter().map(Result::unwrap).collect();
        assert_eq!(cut.concat(), b"abcd");
    }
}
