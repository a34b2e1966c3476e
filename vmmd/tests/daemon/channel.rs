//! Channels to programs of guests.

use std::fs;

use tokio::{io::copy, net::UnixListener, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};
use vmmd_api::v1::{
    self, ChannelOpen, ConnectChannelRequest, ConnectChannelResponse, connect_channel_request::Message,
};

use crate::{
    harness::{Daemon, assert_refused, assert_says, uid},
    policies,
    verbs::within,
};

type Connection = (
    mpsc::Sender<ConnectChannelRequest>,
    Streaming<ConnectChannelResponse>,
);

async fn open(daemon: &Daemon, channel: &str) -> Result<Connection, Status> {
    let (sender, receiver) = mpsc::channel(4);
    let open = ChannelOpen {
        name: "web".into(),
        channel: channel.into(),
    };
    sender.send(request(Message::Open(open))).await.unwrap();
    let answer = daemon
        .client()
        .connect_channel(ReceiverStream::new(receiver))
        .await?;
    Ok((sender, answer.into_inner()))
}

fn request(message: Message) -> ConnectChannelRequest {
    ConnectChannelRequest {
        message: Some(message),
    }
}

fn with(names: &[&str]) -> Vec<v1::ChannelSpec> {
    let spec = |name: &&str| v1::ChannelSpec {
        name: (*name).to_owned(),
    };
    names.iter().map(spec).collect()
}

/// A program of the guest that echoes its input, in place of the mock's socket.
fn echo(daemon: &Daemon, vm: &v1::Vm) {
    let folder = daemon.path(&format!("run/vms/{}", uid(vm)));
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_channel = |path: &std::path::PathBuf| path.to_string_lossy().contains("/channel-");
    let sockets: Vec<_> = files.filter(is_channel).collect();
    let [socket] = sockets.as_slice() else {
        panic!("{sockets:?}");
    };
    fs::remove_file(socket).unwrap();
    let listener = UnixListener::bind(socket).unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let (mut reader, mut writer) = stream.split();
            let _ended = copy(&mut reader, &mut writer).await;
        }
    });
}

#[tokio::test]
async fn one_client_at_a_time_has_a_channel() {
    let daemon = Daemon::start().await;
    let vm = daemon
        .run_with("web", "", |spec| spec.channels = with(&["com.example.0"]))
        .await;
    echo(&daemon, &vm);
    let (sender, mut output) = open(&daemon, "com.example.0").await.unwrap();
    sender
        .send(request(Message::Data(b"hello".to_vec())))
        .await
        .unwrap();
    assert_eq!(output.message().await.unwrap().unwrap().data, b"hello");
    let refused = open(&daemon, "com.example.0").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "CHANNEL_IN_USE");
    drop((sender, output));
    within(async || open(&daemon, "com.example.0").await.ok()).await;

    let state = |vm: &v1::Vm| vm.status.clone().unwrap().channels;
    assert!(!state(&vm)[0].open);
    policies::end(&daemon, &vm, "open com.example.0");
    daemon.wait("web", |status| status.channels[0].open).await;
    policies::end(&daemon, &vm, "close");
    daemon.wait("web", |status| !status.channels[0].open).await;
}

#[tokio::test]
async fn a_channel_that_a_vm_does_not_have_is_refused() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let refused = open(&daemon, "a").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NO_CHANNEL");
    assert_says(&refused, "give it one in `channels`");
    // The run does not have the channel that the spec has by now.
    let vm = daemon
        .change("web", |spec| spec.channels = with(&["a"]))
        .await
        .unwrap();
    let pending = &vm.status.unwrap().pending_changes;
    assert_eq!(pending[0].path, "spec.channels[a]");
    let refused = open(&daemon, "a").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NO_CHANNEL");
    assert_says(&refused, "restart the VM");
    daemon.stop("web", None).await.unwrap();
    let refused = open(&daemon, "a").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NOT_RUNNING");
}
