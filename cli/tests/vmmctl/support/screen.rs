//! The screen of a running VM: an RFB server with a picture of 4 x 3 pixels that records pressed
//! keys.

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status, Streaming};
use vmmd_api::v1::{self, VmPhase, vnc_request::Message};

use super::{Answer, Events, State};

/// Red, green and blue of the pixels, row after row.
pub const PICTURE: [[u8; 3]; 12] = {
    let mut picture = [[0; 3]; 12];
    let mut at: u8 = 0;
    while at < 12 {
        picture[at as usize] = [at, 100, 200];
        at += 1;
    }
    picture
};

/// Received bytes of the client, and the channel for data to the client.
struct Peer {
    input: Streaming<v1::VncRequest>,
    buffer: Vec<u8>,
    output: mpsc::Sender<Result<v1::VncResponse, Status>>,
}

impl Peer {
    async fn take(&mut self, length: usize) -> Option<Vec<u8>> {
        while self.buffer.len() < length {
            match self.input.message().await.ok()??.message? {
                Message::Data(bytes) => self.buffer.extend(bytes),
                Message::Open(_) => return None,
            }
        }
        let rest = self.buffer.split_off(length);
        Some(std::mem::replace(&mut self.buffer, rest))
    }

    async fn put(&mut self, data: &[u8]) -> Option<()> {
        // In small pieces, as a network may bring them.
        for piece in data.chunks(7) {
            let data = piece.to_vec();
            self.output.send(Ok(v1::VncResponse { data })).await.ok()?;
        }
        Some(())
    }
}

impl State {
    pub(super) async fn screen(
        &self,
        mut input: Streaming<v1::VncRequest>,
    ) -> Answer<Events<v1::VncResponse>> {
        let first = input.message().await?.and_then(|request| request.message);
        let Some(Message::Open(open)) = first else {
            return Err(Status::invalid_argument("the first message must be `open`"));
        };
        let vm = self.find(&open.name)?;
        if vm.status.unwrap_or_default().phase() != VmPhase::Running {
            return Err(Status::failed_precondition(
                "the VM is not running: start it first",
            ));
        }
        let (output, receiver) = mpsc::channel(4);
        let peer = Peer {
            input,
            buffer: Vec::new(),
            output,
        };
        let state = self.clone();
        tokio::spawn(async move {
            state.serve_screen(peer, open.view_only).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn serve_screen(&self, mut peer: Peer, view_only: bool) -> Option<()> {
        peer.put(b"RFB 003.008\n").await?;
        assert_eq!(peer.take(12).await?, b"RFB 003.008\n");
        peer.put(&[1, 1]).await?;
        assert_eq!(peer.take(1).await?, [1]);
        peer.put(&[0; 4]).await?;
        assert_eq!(peer.take(1).await?, [1], "others may stay");
        let mut init = vec![
            0, 4, 0, 3, 32, 24, 0, 1, 0, 255, 0, 255, 0, 255, 16, 8, 0, 0, 0, 0,
        ];
        init.extend([0, 0, 0, 2, b'v', b'm']);
        peer.put(&init).await?;
        loop {
            match peer.take(1).await?[0] {
                0 => drop(peer.take(19).await?),
                2 => {
                    let count = peer.take(3).await?[2];
                    peer.take(usize::from(count) * 4).await?;
                }
                3 => {
                    assert_eq!(peer.take(9).await?, [0, 0, 0, 0, 0, 0, 4, 0, 3]);
                    self.called(format!("picture, view only: {view_only}"));
                    // Two rectangles: the first row, and the others.
                    peer.put(&[0, 0, 0, 2]).await?;
                    for (y, height) in [(0, 1), (1, 2)] {
                        peer.put(&[0, 0, 0, y, 0, 4, 0, height, 0, 0, 0, 0]).await?;
                        let begin = usize::from(y) * 4;
                        for [red, green, blue] in &PICTURE[begin..begin + usize::from(height) * 4] {
                            peer.put(&[0, *red, *green, *blue]).await?;
                        }
                    }
                }
                4 => {
                    let rest = peer.take(7).await?;
                    let keysym = u32::from_be_bytes([rest[3], rest[4], rest[5], rest[6]]);
                    let how = if rest[0] == 1 { "press" } else { "release" };
                    self.called(format!("{how} {keysym:#x}"));
                }
                248 => {
                    let head = peer.take(8).await?;
                    let payload = peer.take(head[7].into()).await?;
                    // The announcement, and the answer.
                    peer.put(&[248, 0, 0, 0, 0x80, 0, 0, 0, 0]).await?;
                    peer.put(&[248, 0, 0, 0, 0, 0, 0, 1, head[7]]).await?;
                    peer.put(&payload).await?;
                }
                other => panic!("message {other}"),
            }
        }
    }
}
