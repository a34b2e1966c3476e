//! The serial console.

use std::time::Duration;

use proto::v1::{
    ConsoleOpen, ConsoleRequest, ConsoleResponse, VmPhase, console_request::Message as Input,
    console_response::Message,
};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::{Code, Status, Streaming};

use crate::harness::{Daemon, refusal};

/// A client with a console open.
pub struct Client {
    sender: mpsc::Sender<ConsoleRequest>,
    output: Streaming<ConsoleResponse>,
    pub replay: u64,
}

impl Client {
    pub async fn open(daemon: &Daemon, name: &str) -> Self {
        Self::try_open(daemon, name, false).await.unwrap()
    }

    pub async fn try_open(daemon: &Daemon, name: &str, no_replay: bool) -> Result<Self, Status> {
        let (sender, receiver) = mpsc::channel(4);
        let open = Input::Open(ConsoleOpen {
            name: name.into(),
            no_replay,
        });
        sender.send(ConsoleRequest { message: Some(open) }).await.unwrap();
        let mut output = daemon
            .client()
            .console(ReceiverStream::new(receiver))
            .await?
            .into_inner();
        let first = output.next().await.unwrap()?.message;
        let Some(Message::Opened(opened)) = first else {
            panic!("{first:?} came first")
        };
        Ok(Self {
            sender,
            output,
            replay: opened.replay_bytes,
        })
    }

    pub async fn type_in(&mut self, text: &str) {
        let message = Some(Input::Input(text.as_bytes().to_vec()));
        self.sender.send(ConsoleRequest { message }).await.unwrap();
    }

    /// Reads until `text` has come; returns all since the last call.
    pub async fn expect(&mut self, text: &str) -> String {
        let mut seen = Vec::new();
        let found = timeout(Duration::from_secs(20), async {
            while !String::from_utf8_lossy(&seen).contains(text) {
                match self.output.next().await.unwrap().unwrap().message {
                    Some(Message::Output(bytes)) => seen.extend(bytes),
                    other => panic!("{other:?} instead of {text:?}"),
                }
            }
        });
        let in_time = found.await.is_ok();
        assert!(
            in_time,
            "{text:?} did not come, but {:?}",
            String::from_utf8_lossy(&seen)
        );
        String::from_utf8(seen).unwrap()
    }

    /// Reads to the end; returns the output and the reason of the end.
    pub async fn finish(mut self) -> (String, String) {
        let mut seen = Vec::new();
        let mut reason = String::new();
        while let Some(response) = self.output.next().await {
            match response.unwrap().message {
                Some(Message::Output(bytes)) => seen.extend(bytes),
                Some(Message::Closed(closed)) => reason = closed.reason,
                other => panic!("{other:?}"),
            }
        }
        (String::from_utf8(seen).unwrap(), reason)
    }
}

#[tokio::test]
async fn what_was_printed_before_is_replayed_and_input_reaches_the_guest() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let mut first = Client::open(&daemon, "web").await;
    assert_eq!(first.replay, "booted web\r\n".len() as u64);
    assert_eq!(first.expect("web\r\n").await, "booted web\r\n");
    first.type_in("hello\n").await;
    first.expect("hello\r\n").await;
    let mut second = Client::open(&daemon, "web").await;
    second.expect("booted web\r\nhello\r\n").await;
    second.type_in("both\n").await;
    first.expect("both").await;
    second.expect("both").await;
}

#[tokio::test]
async fn the_replay_can_be_left_out() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let mut console = Client::try_open(&daemon, "web", true).await.unwrap();
    assert_eq!(console.replay, 0);
    console.type_in("only\n").await;
    assert_eq!(console.expect("only\r\n").await, "only\r\n");
}

#[tokio::test]
async fn a_reader_that_does_not_read_slows_nobody() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let _slow = Client::open(&daemon, "web").await;
    let mut quick = Client::open(&daemon, "web").await;
    quick.expect("booted").await;
    // Far more than the slow one's buffers on the way hold.
    for _ in 0..20 {
        quick.type_in("print 1000000\n").await;
    }
    // The guest has printed everything although the slow reader took nothing of it.
    quick.type_in("poweroff\n").await;
    daemon.wait_phase("web", VmPhase::Stopped).await;
}

#[tokio::test]
async fn the_stream_ends_with_the_run_and_says_why() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let mut console = Client::open(&daemon, "web").await;
    console.type_in("crash\n").await;
    let (_, reason) = console.finish().await;
    assert!(
        reason.contains("GuestCrash") && reason.contains("triple fault"),
        "{reason}"
    );
}

#[tokio::test]
async fn of_a_stopped_vm_the_log_of_the_last_run_is_shown() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let mut console = Client::open(&daemon, "web").await;
    console.type_in("first\n").await;
    console.expect("first").await;
    daemon.stop("web", None).await.unwrap();
    let (log, reason) = Client::open(&daemon, "web").await.finish().await;
    assert_eq!(log, "booted web\r\nfirst\r\n");
    assert!(reason.contains("not running"), "{reason}");
    // Only of the last one.
    daemon.start_vm("web").await.unwrap();
    daemon.stop("web", None).await.unwrap();
    assert_eq!(
        Client::open(&daemon, "web").await.finish().await.0,
        "booted web\r\n"
    );
}

#[tokio::test]
async fn a_console_of_no_vm_and_one_without_an_open_are_refused() {
    let daemon = Daemon::start().await;
    let refused = Client::try_open(&daemon, "none", false).await.err().unwrap();
    assert_eq!(refusal(&refused), (Code::NotFound, "VM_NOT_FOUND".into()));
    let requests = tokio_stream::iter([ConsoleRequest {
        message: Some(Input::Input(b"x".to_vec())),
    }]);
    let refused = daemon.client().console(requests).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn too_much_input_at_once_is_refused() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let mut console = Client::open(&daemon, "web").await;
    console.type_in(&"x".repeat(4097)).await;
    let refused = loop {
        match console.output.next().await.unwrap() {
            Ok(_) => {}
            Err(status) => break status,
        }
    };
    assert_eq!(refused.code(), Code::InvalidArgument);
}
