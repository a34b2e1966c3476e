//! Connections by the socket devices of VMs.

use std::fs;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};
use vmmd_api::v1::{
    self, ConnectVsockRequest, ConnectVsockResponse, VsockOpen, VsockSpec, connect_vsock_request::Message,
};

use crate::{
    harness::{Daemon, assert_refused, assert_says, uid},
    verbs::within,
};

type Connection = (mpsc::Sender<ConnectVsockRequest>, Streaming<ConnectVsockResponse>);

fn request(message: Message) -> ConnectVsockRequest {
    ConnectVsockRequest {
        message: Some(message),
    }
}

async fn open(daemon: &Daemon, port: u32, accept: bool) -> Result<Connection, Status> {
    let (sender, receiver) = mpsc::channel(4);
    let open = VsockOpen {
        name: "web".into(),
        port,
        accept,
    };
    sender.send(request(Message::Open(open))).await.unwrap();
    let output = daemon
        .client()
        .connect_vsock(ReceiverStream::new(receiver))
        .await?;
    Ok((sender, output.into_inner()))
}

async fn daemon() -> (Daemon, v1::Vm) {
    let daemon = Daemon::start().await;
    let vm = daemon
        .run_with("web", "", |spec| spec.vsock = Some(VsockSpec::default()))
        .await;
    (daemon, vm)
}

#[tokio::test]
async fn client_and_guest_connect_in_both_directions() {
    let (daemon, _) = daemon().await;
    for accept in [false, true] {
        let (sender, mut output) = open(&daemon, 7, accept).await.unwrap();
        let data = Message::Data(b"hello".to_vec());
        sender.send(request(data)).await.unwrap();
        assert_eq!(output.message().await.unwrap().unwrap().data, b"hello");
        // The end of the client's data is passed on, and the guest then ends its own.
        drop(sender);
        assert!(output.message().await.unwrap().is_none());
        let refused = open(&daemon, 8, accept).await.unwrap_err();
        assert_refused(&refused, Code::FailedPrecondition, "PORT_UNREACHABLE");
    }
    let invalid = open(&daemon, u32::MAX, false).await.unwrap_err();
    assert_eq!(invalid.code(), Code::InvalidArgument, "{invalid}");
}

#[tokio::test]
async fn client_that_leaves_gives_up_its_place() {
    let (daemon, vm) = daemon().await;
    let log = daemon.path(&format!("log/vms/{}/vmm.log", uid(&vm)));
    let waiting = open(&daemon, 9, true);
    let seen = async || {
        let log = fs::read_to_string(&log).unwrap();
        log.contains("waits at 9").then_some(())
    };
    tokio::select! {
        answered = waiting => panic!("{answered:?}"),
        () = within(seen) => {}
    }
    within(async || {
        let log = fs::read_to_string(&log).unwrap();
        log.contains("accept 9 has ended").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_vm_without_a_socket_device_refuses_connections() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let refused = open(&daemon, 7, false).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NO_VSOCK");
    assert_says(&refused, "give it a `vsock`");
    // The run does not have the device that the spec has by now.
    daemon
        .change("web", |spec| spec.vsock = Some(VsockSpec::default()))
        .await
        .unwrap();
    let refused = open(&daemon, 7, false).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NO_VSOCK");
    assert_says(&refused, "restart the VM");
    daemon.stop("web", None).await.unwrap();
    let refused = open(&daemon, 7, false).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NOT_RUNNING");
}
