//! `kubectl port-forward`: connections to ports of the guest, over pairs of streams of `portforward.k8s.io`.
//!
//! For each connection the client opens two streams: one for data, and one for what went wrong, which says nothing when all went well. vmmd
//! connects to the address that it has given the guest.

use std::{collections::BTreeMap, time::Duration};

use futures::stream;
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tonic::Streaming;
use vmmd_api::v1::{self, port_forward_request};

use super::spdy::{Acceptor, Closed, Input, Output, Stream};
use crate::daemon::{CALL, Daemon, within};

/// Protocol of the streams.
pub const PROTOCOL: &str = "portforward.k8s.io";
/// Limit on simultaneous connections of a session, including connections that lack a stream.
const MAX_PAIRS: usize = 100;
/// How long the second stream of a connection may take.
const STREAMS: Duration = Duration::from_secs(30);
/// Messages that wait for vmmd.
const QUEUE: usize = 4;

/// Which of a connection's streams it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Data,
    Error,
}

/// Headers of a stream.
#[derive(Debug, PartialEq, Eq)]
struct Headers {
    kind: Kind,
    port: u16,
    /// The same for both streams of a connection.
    request: String,
}

impl Headers {
    fn of(stream: &Stream) -> Option<Self> {
        let header = |name| stream.header(name);
        Self::parse(
            stream.id(),
            header("streamtype")?,
            header("port")?,
            header("requestid"),
        )
    }

    /// Clients that send no number of a request open the stream for data right after the one for errors.
    fn parse(id: u32, kind: &str, port: &str, request: Option<&str>) -> Option<Self> {
        let (kind, first) = match kind {
            "error" => (Kind::Error, id),
            "data" => (Kind::Data, id.saturating_sub(2)),
            _ => return None,
        };
        let port = port.parse().ok().filter(|port| *port != 0)?;
        let request = request.map_or_else(|| first.to_string(), str::to_owned);
        Some(Self { kind, port, request })
    }
}

/// A connection that lacks a stream.
struct Half {
    kind: Kind,
    port: u16,
    input: Input,
    output: Output,
    until: Instant,
}

/// Serves the session of a client, until that goes.
pub async fn serve(daemon: Daemon, vm: String, mut acceptor: Acceptor) {
    let mut halves: BTreeMap<String, Half> = BTreeMap::new();
    let mut connections = JoinSet::new();
    loop {
        let next = halves.values().map(|half| half.until).min();
        let stream = tokio::select! {
            stream = acceptor.next() => stream,
            Some(_) = connections.join_next() => continue,
            () = until(next) => {
                let now = Instant::now();
                let late = halves.iter().filter(|(_, half)| half.until <= now);
                let late: Vec<_> = late.map(|(request, _)| request.clone()).collect();
                for half in late.iter().filter_map(|request| halves.remove(request)) {
                    half.output.cancel().await;
                }
                continue;
            }
        };
        let Some(headers) = Headers::of(&stream) else {
            stream.refuse().await;
            continue;
        };
        let Some(half) = halves.remove(&headers.request) else {
            if halves.len() + connections.len() >= MAX_PAIRS {
                stream.refuse().await;
            } else if let Ok((input, output)) = stream.accept().await {
                let half = Half {
                    kind: headers.kind,
                    port: headers.port,
                    input,
                    output,
                    until: Instant::now() + STREAMS,
                };
                halves.insert(headers.request, half);
            }
            continue;
        };
        if half.kind == headers.kind || half.port != headers.port {
            stream.refuse().await;
            halves.insert(headers.request, half);
            continue;
        }
        let Ok((input, output)) = stream.accept().await else {
            return;
        };
        let (input, output, error) = match headers.kind {
            Kind::Data => (input, output, half.output),
            Kind::Error => (half.input, half.output, output),
        };
        let (daemon, vm) = (daemon.clone(), vm.clone());
        connections.spawn(async move {
            let result = forward(daemon, vm, headers.port, input, &output).await;
            let _gone = finish(result, output, error).await;
        });
    }
}

async fn until(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// A connection to the guest, from its begin to its end.
async fn forward(
    daemon: Daemon,
    vm: String,
    port: u16,
    mut input: Input,
    output: &Output,
) -> Result<(), tonic::Status> {
    let (requests, answers) = open(&daemon, vm, port).await?;
    let pass_in = async move {
        while let Some(data) = input.read().await {
            let message = port_forward_request::Message::Data(data);
            if requests.send(request(message)).await.is_err() {
                break;
            }
        }
        // The guest receives the end of the input. Its own data continues.
        drop(requests);
        std::future::pending::<()>().await;
    };
    tokio::select! {
        result = pass_out(answers, output) => result,
        () = pass_in => Ok(()),
        () = output.was_reset() => Ok(()),
    }
}

async fn pass_out(
    mut answers: Streaming<v1::PortForwardResponse>,
    output: &Output,
) -> Result<(), tonic::Status> {
    while let Some(answer) = answers.message().await? {
        if output.write(&answer.data).await.is_err() {
            break;
        }
    }
    Ok(())
}

/// Says what went wrong, if anything did. The client waits for the ends of both streams.
async fn finish(result: Result<(), tonic::Status>, output: Output, error: Output) -> Result<(), Closed> {
    if let Err(status) = result {
        error.write(status.message().as_bytes()).await?;
    }
    output.finish().await?;
    error.finish().await
}

type Connection = (
    mpsc::Sender<v1::PortForwardRequest>,
    Streaming<v1::PortForwardResponse>,
);

async fn open(daemon: &Daemon, vm: String, port: u16) -> Result<Connection, tonic::Status> {
    let (requests, queue) = mpsc::channel(QUEUE);
    let open = v1::PortForwardOpen {
        name: vm,
        port: port.into(),
        nic: String::new(),
    };
    // It is empty.
    let _ = requests.try_send(request(port_forward_request::Message::Open(open)));
    let queue = stream::unfold(queue, |mut queue| async move {
        let request = queue.recv().await?;
        Some((request, queue))
    });
    let answers = within(CALL, daemon.vms.clone().port_forward(queue)).await?;
    Ok((requests, answers))
}

fn request(message: port_forward_request::Message) -> v1::PortForwardRequest {
    v1::PortForwardRequest {
        message: Some(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_says_which_connection_it_is_of() {
        let of = |kind, port, request: &str| Headers {
            kind,
            port,
            request: request.to_owned(),
        };
        let parse = Headers::parse;
        assert_eq!(parse(1, "error", "80", Some("7")), Some(of(Kind::Error, 80, "7")));
        assert_eq!(
            parse(3, "data", "65535", Some("7")),
            Some(of(Kind::Data, 65535, "7"))
        );
        assert_eq!(parse(5, "error", "80", None), Some(of(Kind::Error, 80, "5")));
        assert_eq!(parse(7, "data", "80", None), Some(of(Kind::Data, 80, "5")));
        for (kind, port) in [
            ("other", "80"),
            ("data", "0"),
            ("data", "65536"),
            ("data", "-1"),
            ("data", ""),
        ] {
            assert_eq!(parse(1, kind, port, Some("1")), None, "{kind} {port}");
        }
    }
}
