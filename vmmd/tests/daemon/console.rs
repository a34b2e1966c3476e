//! The serial console.

use std::{fs, thread, time::Duration};

use tokio::{runtime::Builder, sync::mpsc, time::timeout};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::{Code, Status, Streaming, transport::Channel};
use vmmd_api::v1::{
    ConsoleAccess, ConsoleBreak, ConsoleDevice, ConsoleOpen, ConsoleRequest, ConsoleResponse, ConsoleSize,
    ConsoleWriter, VmPhase, console_request::Message as Input, console_response::Message,
    vm_service_client::VmServiceClient,
};

use crate::harness::{Daemon, assert_refused, assert_says, connect};

/// A client with a console open.
pub struct Client {
    sender: mpsc::Sender<ConsoleRequest>,
    output: Streaming<ConsoleResponse>,
    pub replay: u64,
    pub writers: Vec<ConsoleWriter>,
}

impl Client {
    pub async fn open(daemon: &Daemon, name: &str) -> Self {
        Self::try_open(daemon, name, false).await.unwrap()
    }

    pub async fn try_open(daemon: &Daemon, name: &str, no_replay: bool) -> Result<Self, Status> {
        let open = ConsoleOpen {
            name: name.into(),
            no_replay,
            ..ConsoleOpen::default()
        };
        Self::with(daemon, open).await
    }

    pub async fn with(daemon: &Daemon, open: ConsoleOpen) -> Result<Self, Status> {
        Self::over(daemon.client(), open).await
    }

    /// Over a connection to the daemon.
    async fn over(mut vms: VmServiceClient<Channel>, open: ConsoleOpen) -> Result<Self, Status> {
        let (sender, receiver) = mpsc::channel(4);
        let open = Input::Open(open);
        sender.send(ConsoleRequest { message: Some(open) }).await.unwrap();
        let mut output = vms.console(ReceiverStream::new(receiver)).await?.into_inner();
        let first = output.next().await.unwrap()?.message;
        let Some(Message::Opened(opened)) = first else {
            panic!("{first:?} came first")
        };
        Ok(Self {
            sender,
            output,
            replay: opened.replay_bytes,
            writers: opened.writers,
        })
    }

    pub async fn send(&mut self, message: Input) {
        let message = Some(message);
        self.sender.send(ConsoleRequest { message }).await.unwrap();
    }

    /// Reads until another client takes the console over.
    pub async fn loses(&mut self) -> ConsoleWriter {
        loop {
            match self.output.next().await.unwrap().unwrap().message {
                Some(Message::TakenOver(taken)) => return taken.by.unwrap(),
                Some(Message::Output(_)) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Reads until the stream ends with an error.
    pub async fn fails(mut self) -> Status {
        loop {
            if let Err(status) = self.output.next().await.unwrap() {
                return status;
            }
        }
    }

    pub async fn type_in(&mut self, text: &str) {
        self.send(Input::Input(text.as_bytes().to_vec())).await;
    }

    /// Ends its requests.
    pub fn no_more_requests(mut self) -> Self {
        self.sender = mpsc::channel(1).0;
        self
    }

    /// Makes the guest read no more of this console, and types until no more is taken.
    pub async fn fill_a_deaf_guest(&mut self) {
        self.type_in("deaf\n").await;
        self.expect("deaf\r\n").await;
        while timeout(Duration::from_millis(500), self.type_in(&"x".repeat(4096)))
            .await
            .is_ok()
        {}
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
async fn earlier_output_is_replayed_and_input_reaches_the_guest() {
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

/// Sockets that the daemon has open.
fn sockets(daemon: &Daemon) -> usize {
    let fds = fs::read_dir(format!("/proc/{}/fd", daemon.pid().as_raw_nonzero())).unwrap();
    let targets = fds.filter_map(|fd| fs::read_link(fd.unwrap().path()).ok());
    targets
        .filter(|target| target.to_string_lossy().starts_with("socket:"))
        .count()
}

/// Waits until the daemon has no more sockets open than that.
async fn closes_down_to(daemon: &Daemon, count: usize) {
    let closed = timeout(Duration::from_secs(20), async {
        while sockets(daemon) > count {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    closed
        .await
        .unwrap_or_else(|_| panic!("{} sockets instead of {count}", sockets(daemon)));
}

#[tokio::test]
async fn who_leaves_a_console_makes_room_for_another() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let before = sockets(&daemon);
    // More than the 16 clients that the `vmm` serves at once.
    for _ in 0..5 {
        let mut clients = Vec::new();
        for _ in 0..8 {
            clients.push(Client::open(&daemon, "web").await);
        }
        drop(clients);
        closes_down_to(&daemon, before).await;
    }
    let mut last = Client::open(&daemon, "web").await;
    last.type_in("typed\n").await;
    last.expect("typed\r\n").await;
}

#[tokio::test]
async fn writer_stream_ends_after_its_input_reader_stream_continues() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let reader = Client::with(&daemon, open_as(ConsoleAccess::ReadOnly, false));
    let mut reader = reader.await.unwrap().no_more_requests();
    let mut client = Client::open(&daemon, "web").await;
    client.type_in("the last\n").await;
    let (seen, reason) = client.no_more_requests().finish().await;
    assert!(seen.starts_with("booted web\r\n"), "{seen}");
    assert_eq!(reason, "");
    reader.expect("the last\r\n").await;
}

#[tokio::test]
async fn one_client_too_many_is_refused_and_the_writer_continues() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let mut holder = Client::with(&daemon, open_as(ConsoleAccess::Exclusive, false))
        .await
        .unwrap();
    let mut readers = Vec::new();
    for _ in 0..15 {
        let reader = Client::with(&daemon, open_as(ConsoleAccess::ReadOnly, false)).await;
        readers.push(reader.unwrap());
    }
    for open in [
        open_as(ConsoleAccess::Exclusive, true),
        open_as(ConsoleAccess::ReadOnly, false),
    ] {
        let refused = Client::with(&daemon, open).await.err().unwrap();
        assert_refused(&refused, Code::ResourceExhausted, "TOO_MANY_CONSOLES");
    }
    holder.type_in("still here\n").await;
    holder.expect("still here\r\n").await;
}

#[tokio::test]
async fn who_leaves_a_guest_that_reads_nothing_makes_room_too() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let before = sockets(&daemon);
    // It ends as a program does, with its connection: what this holds for the daemon, a client that stays can't take back.
    let folder = daemon.folder.path().to_owned();
    let program = thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let vms = VmServiceClient::new(connect(&folder).await);
            let open = open_as(ConsoleAccess::Shared, false);
            let mut client = Client::over(vms, open).await.unwrap();
            client.fill_a_deaf_guest().await;
        });
    });
    program.join().unwrap();
    closes_down_to(&daemon, before).await;
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
    assert_refused(&refused, Code::NotFound, "VM_NOT_FOUND");
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
    assert_eq!(console.fails().await.code(), Code::InvalidArgument);
}

fn open_as(access: ConsoleAccess, force: bool) -> ConsoleOpen {
    ConsoleOpen {
        name: "web".into(),
        access: access.into(),
        force,
        ..ConsoleOpen::default()
    }
}

#[tokio::test]
async fn exclusive_console_is_readable_and_can_be_taken_by_force() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let mut first = Client::with(&daemon, open_as(ConsoleAccess::Exclusive, false))
        .await
        .unwrap();
    let refused = Client::with(&daemon, open_as(ConsoleAccess::Shared, false)).await;
    let refused = refused.err().unwrap();
    assert_refused(&refused, Code::FailedPrecondition, "CONSOLE_HELD");
    assert_says(&refused, "uid 0, for ");

    let mut reader = Client::with(&daemon, open_as(ConsoleAccess::ReadOnly, false))
        .await
        .unwrap();
    let held: Vec<_> = reader
        .writers
        .iter()
        .map(|writer| (writer.name.as_str(), writer.access()))
        .collect();
    assert_eq!(held, [("uid 0", ConsoleAccess::Exclusive)]);

    let mut second = Client::with(&daemon, open_as(ConsoleAccess::Exclusive, true))
        .await
        .unwrap();
    assert_eq!(first.loses().await.name, "uid 0");
    first.type_in("lost\n").await;
    second.type_in("typed\n").await;
    for client in [&mut first, &mut second, &mut reader] {
        let seen = client.expect("typed\r\n").await;
        assert!(!seen.contains("lost"), "{seen}");
    }
    reader.type_in("x").await;
    assert_eq!(reader.fails().await.code(), Code::InvalidArgument);
    // A client that leaves releases the console; the daemon may notice a moment later.
    drop(second);
    let again = async {
        while Client::with(&daemon, open_as(ConsoleAccess::Shared, false))
            .await
            .is_err()
        {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(20), again).await.unwrap();
}

#[tokio::test]
async fn lost_console_is_reported_and_unread_input_is_bounded() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let mut first = Client::open(&daemon, "web").await;
    first.fill_a_deaf_guest().await;
    let mut second = Client::with(&daemon, open_as(ConsoleAccess::Exclusive, true))
        .await
        .unwrap();
    let loses = timeout(Duration::from_secs(20), first.loses());
    assert_eq!(loses.await.unwrap().access(), ConsoleAccess::Exclusive);
    second.type_in("hear\n").await;
    let seen = second.expect(" bytes waited").await;
    let waited = seen.lines().find_map(|line| line.strip_suffix(" bytes waited"));
    let waited: usize = waited.unwrap().parse().unwrap();
    assert!((1..=16 << 10).contains(&waited), "{waited}");
}

#[tokio::test]
async fn break_reaches_the_serial_port_and_a_wrong_size_is_refused() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let mut console = Client::open(&daemon, "web").await;
    console.send(Input::SendBreak(ConsoleBreak {})).await;
    console.expect("a break\r\n").await;
    // A serial line has no size.
    let size = ConsoleSize {
        columns: 80,
        rows: 25,
    };
    console.send(Input::Size(size)).await;
    console.type_in("on\n").await;
    console.expect("on\r\n").await;
    let wide = ConsoleSize {
        columns: 65_536,
        rows: 1,
    };
    console.send(Input::Size(wide)).await;
    assert_eq!(console.fails().await.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn virtio_console_is_separate_and_knows_the_terminal_size() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let open = |name: &str| ConsoleOpen {
        name: name.into(),
        device: ConsoleDevice::Virtio.into(),
        ..ConsoleOpen::default()
    };
    let refused = Client::with(&daemon, open("web")).await.err().unwrap();
    assert_refused(&refused, Code::FailedPrecondition, "NO_CONSOLE");

    daemon
        .run_with("two", "", |spec| {
            spec.virtio_console = Some(vmmd_api::v1::VirtioConsoleSpec {});
        })
        .await;
    let mut hvc = Client::with(&daemon, open("two")).await.unwrap();
    hvc.expect("hvc of two\r\n").await;
    hvc.type_in("quiet\n").await;
    hvc.expect("QUIET\n").await;
    let size = ConsoleSize {
        columns: 132,
        rows: 43,
    };
    hvc.send(Input::Size(size)).await;
    let mut serial = Client::open(&daemon, "two").await;
    serial.expect("a terminal of 132x43\r\n").await;
    hvc.send(Input::SendBreak(ConsoleBreak {})).await;
    assert_eq!(hvc.fails().await.code(), Code::InvalidArgument);
}
