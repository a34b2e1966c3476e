//! Consoles and ports of the mock's guests.

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use vmmd_api::v1::{self, console_request, console_response, port_forward_request};

use super::vmmd::Events;

/// Prints two earlier lines, and one new line; a client that only reads then sees the end of the
/// run. The guest answers input in capitals, prints the size of the terminal, and powers off on
/// request.
pub fn console(
    open: &v1::ConsoleOpen,
    requests: Streaming<v1::ConsoleRequest>,
) -> Events<v1::ConsoleResponse> {
    let replayed = if open.no_replay { "" } else { "one\ntwo\n" };
    let mut first = vec![console_response::Message::Opened(v1::ConsoleOpened {
        replay_bytes: replayed.len() as u64,
        writers: Vec::new(),
    })];
    for text in [replayed, "three\n"].into_iter().filter(|text| !text.is_empty()) {
        first.push(console_response::Message::Output(text.into()));
    }
    if open.device() == v1::ConsoleDevice::Virtio {
        first.push(console_response::Message::Output(b"hvc0\n".to_vec()));
    }
    let types = open.access() != v1::ConsoleAccess::ReadOnly;
    if !types {
        first.push(closed("nobody types"));
    }
    let (send, receive) = mpsc::channel(16);
    tokio::spawn(async move {
        for message in first {
            let _ = send.send(Ok(answer(message))).await;
        }
        if types {
            converse(requests, send).await;
        }
    });
    Box::pin(ReceiverStream::new(receive))
}

fn answer(message: console_response::Message) -> v1::ConsoleResponse {
    v1::ConsoleResponse {
        message: Some(message),
    }
}

fn closed(reason: &str) -> console_response::Message {
    console_response::Message::Closed(v1::ConsoleClosed {
        reason: reason.to_owned(),
    })
}

async fn converse(
    mut requests: Streaming<v1::ConsoleRequest>,
    send: mpsc::Sender<Result<v1::ConsoleResponse, Status>>,
) {
    while let Ok(Some(request)) = requests.message().await {
        let said = match request.message {
            Some(console_request::Message::Input(bytes)) if bytes == b"poweroff\n" => {
                closed("the guest powered off")
            }
            Some(console_request::Message::Input(bytes)) => {
                console_response::Message::Output(bytes.to_ascii_uppercase())
            }
            Some(console_request::Message::Size(size)) => {
                let text = format!("{}x{}\n", size.columns, size.rows);
                console_response::Message::Output(text.into_bytes())
            }
            _ => continue,
        };
        let ends = matches!(said, console_response::Message::Closed(_));
        if send.send(Ok(answer(said))).await.is_err() || ends {
            return;
        }
    }
}

/// The guest's ports are those of this machine.
pub async fn port_forward(
    mut requests: Streaming<v1::PortForwardRequest>,
) -> Result<Events<v1::PortForwardResponse>, Status> {
    let first = requests.message().await?.and_then(|first| first.message);
    let Some(port_forward_request::Message::Open(open)) = first else {
        return Err(Status::invalid_argument("the first message is open"));
    };
    let port = u16::try_from(open.port).unwrap();
    let Ok(connection) = TcpStream::connect(("127.0.0.1", port)).await else {
        let problem = format!("nothing listens on port {port} of the guest");
        return Err(Status::failed_precondition(problem));
    };
    let (mut reader, mut writer) = connection.into_split();
    tokio::spawn(async move {
        while let Ok(Some(request)) = requests.message().await {
            let Some(port_forward_request::Message::Data(data)) = request.message else {
                return;
            };
            assert!(data.len() <= 64 << 10, "{} bytes", data.len());
            if writer.write_all(&data).await.is_err() {
                return;
            }
        }
        let _ = writer.shutdown().await;
    });
    let (send, receive) = mpsc::channel(4);
    tokio::spawn(async move {
        let mut buffer = vec![0; 32 << 10];
        while let Ok(count @ 1..) = reader.read(&mut buffer).await {
            let data = buffer[..count].to_vec();
            if send.send(Ok(v1::PortForwardResponse { data })).await.is_err() {
                return;
            }
        }
    });
    Ok(Box::pin(ReceiverStream::new(receive)))
}
