//! Input of a console's client.

use std::{sync::Arc, time::Duration};

use tokio::{io::AsyncWriteExt, net::unix::OwnedWriteHalf, time::sleep};
use tonic::Streaming;
use uuid::Uuid;
use vmm_protocol::vmm::{ResizeConsole, SendBreak, request::Op};
use vmmd_api::v1::{
    ConsoleRequest, ConsoleSize, ConsoleTakenOver, ConsoleWriter, console_request, console_response::Message,
};
use vmmd_host::{failure::Failure, text};

use super::{Gone, Sender, response};
use crate::{
    host::Host,
    registry::consoles::{Device, Permit},
};

/// Largest message of input in bytes.
const MAX_INPUT: usize = 4 << 10;
/// Time that a guest has to read the input of a client that has left.
const LINGER: Duration = Duration::from_secs(5);

/// Task that passes a client's input to the port.
pub(super) struct Typing {
    pub(super) host: Arc<Host>,
    pub(super) uid: Uuid,
    pub(super) device: Device,
    /// Permit of a client that may type, until another client takes the console over.
    pub(super) permit: Option<Permit>,
    pub(super) sender: Sender,
}

impl Typing {
    /// Passes the client's input to the port. Returns when a client that may type has ended its
    /// requests and all its input was passed on, even if the client has left.
    pub(super) async fn run(mut self, mut input: Streaming<ConsoleRequest>, mut writer: OwnedWriteHalf) {
        let only_reads = self.permit.is_none();
        loop {
            let request = tokio::select! {
                request = input.message() => request,
                by = lost(&mut self.permit) => {
                    if self.taken_over(by).await.is_err() {
                        return;
                    }
                    continue;
                }
            };
            let Ok(Some(request)) = request else { break };
            let outcome = match request.message {
                Some(console_request::Message::Size(size)) => self.resize(size).await,
                Some(console_request::Message::Open(_)) | None => {
                    Err(Failure::field("input", "must follow after `open`"))
                }
                Some(_) if only_reads => Err(Failure::field("input", "this console was opened to read only")),
                // Another client has taken the console over, and this client was notified.
                Some(_) if self.permit.is_none() => Ok(()),
                Some(console_request::Message::Input(bytes)) if bytes.len() <= MAX_INPUT => {
                    tokio::select! {
                        written = writer.write_all(&bytes) => {
                            if written.is_err() {
                                // The `vmm` has closed the console: the task that reads its output
                                // notices this and reports the reason.
                                self.permit = None;
                                return self.sender.closed().await;
                            }
                        }
                        // The unwritten rest of the input is dropped.
                        by = lost(&mut self.permit) => {
                            if self.taken_over(by).await.is_err() {
                                return;
                            }
                        }
                        () = left(&self.sender) => return,
                    }
                    Ok(())
                }
                Some(console_request::Message::Input(_)) => {
                    Err(Failure::field("input", "at most 4096 bytes a message"))
                }
                Some(console_request::Message::SendBreak(_)) => self.send_break().await,
            };
            if let Err(failure) = outcome {
                // The client may have gone.
                let _gone = self.sender.send(Err(failure.into())).await;
                return;
            }
        }
        // The console is free for others from here on.
        self.permit = None;
        if only_reads {
            self.sender.closed().await;
        }
    }

    /// Notifies the client that another client has taken over the console.
    async fn taken_over(&mut self, by: Option<ConsoleWriter>) -> Result<(), Gone> {
        self.permit = None;
        let message = Message::TakenOver(ConsoleTakenOver { by });
        self.sender.send(Ok(response(message))).await.map_err(|_| Gone)
    }

    async fn send_break(&self) -> Result<(), Failure> {
        if self.device != Device::Serial {
            return Err(Failure::field("sendBreak", "only a serial line has breaks"));
        }
        self.ask(Op::SendBreak(SendBreak {})).await
    }

    /// Best effort: sends the new size to the guest.
    async fn resize(&self, ConsoleSize { columns, rows }: ConsoleSize) -> Result<(), Failure> {
        if columns > u16::MAX.into() || rows > u16::MAX.into() {
            return Err(Failure::field("size", "at most 65535 each way"));
        }
        if self.device == Device::Virtio {
            let size = ResizeConsole { columns, rows };
            if let Err(failure) = self.ask(Op::ResizeConsole(size)).await {
                tracing::debug!(%failure, "tell a guest the size of its console");
            }
        }
        Ok(())
    }

    async fn ask(&self, op: Op) -> Result<(), Failure> {
        let asked = self.host.clients.ask(self.uid, op, &[]).await?;
        asked.map_err(|refusal| Failure::precondition("NOT_RUNNING", text::brief(&refusal.message)))
    }
}

/// Resolves [`LINGER`] after the client has left.
async fn left(sender: &Sender) {
    sender.closed().await;
    sleep(LINGER).await;
}

/// Returns the client that took the console over, once the permit is lost. Pending forever without
/// a permit.
async fn lost(permit: &mut Option<Permit>) -> Option<ConsoleWriter> {
    match permit {
        Some(permit) => (&mut permit.lost).await.ok(),
        None => std::future::pending().await,
    }
}
