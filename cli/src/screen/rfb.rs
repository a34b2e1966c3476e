//! A small RFB client (RFC 6143) over the API's stream: enough for a picture and for keys.

use std::time::Duration;

use ::rfb::handshake::{VERSION, minor_version};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use vmmd_api::v1::{VncOpen, VncRequest, VncResponse, vnc_request::Message};

use crate::{
    client::{Client, about_vm},
    failure::{Code, Failure, Result},
};

/// Messages that may wait for the daemon.
const QUEUE: usize = 8;
/// How long the guest may take to take keys.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most pixels of a picture that is taken from a server.
const MAX_PIXELS: usize = 64 << 20;

/// A picture.
pub struct Picture {
    /// Columns.
    pub width: u16,
    /// Rows.
    pub height: u16,
    /// Three bytes for each pixel.
    pub rgb: Vec<u8>,
}

/// The open stream.
pub struct Stream {
    /// To the server.
    pub requests: mpsc::Sender<VncRequest>,
    /// From the server.
    pub responses: Streaming<VncResponse>,
}

impl Stream {
    /// Opens the screen of the VM with that name.
    pub async fn open(client: &Client, name: &str, view_only: bool) -> Result<Self> {
        let (requests, queue) = mpsc::channel(QUEUE);
        let open = VncOpen {
            name: name.to_owned(),
            view_only,
        };
        let open = VncRequest {
            message: Some(Message::Open(open)),
        };
        requests
            .try_send(open)
            .map_err(|error| Failure::new(Code::Other, error.to_string()))?;
        let answer = client.vms.clone().vnc(ReceiverStream::new(queue)).await;
        let responses = answer
            .map_err(|status| about_vm(status.into(), name))?
            .into_inner();
        Ok(Self { requests, responses })
    }
}

/// A client that is through with its handshake.
pub struct Rfb {
    stream: Stream,
    input: Vec<u8>,
    width: u16,
    height: u16,
}

impl Rfb {
    /// Connects to the screen of the VM with that name, beside others.
    pub async fn open(client: &Client, name: &str, view_only: bool) -> Result<Self> {
        let mut rfb = Self::greet(Stream::open(client, name, view_only).await?).await?;
        rfb.send(&[1]).await?;
        let [a, b, c, d] = rfb.read().await?;
        (rfb.width, rfb.height) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
        rfb.take(16).await?;
        let name = u32::from_be_bytes(rfb.read().await?);
        rfb.take(bounded(name, 4096)?).await?;
        Ok(rfb)
    }

    /// The handshake up to ClientInit.
    async fn greet(stream: Stream) -> Result<Self> {
        let mut rfb = Self {
            stream,
            input: Vec::new(),
            width: 0,
            height: 0,
        };
        if minor_version(&rfb.read::<12>().await?) != Some(8) {
            return Err(unexpected());
        }
        rfb.send(VERSION).await?;
        let [count] = rfb.read().await?;
        let types = rfb.take(count.into()).await?;
        // Security type None: the API has authenticated the client.
        if !types.contains(&1) {
            return Err(unexpected());
        }
        rfb.send(&[1]).await?;
        if rfb.read::<4>().await? != [0; 4] {
            return Err(unexpected());
        }
        Ok(rfb)
    }

    /// A stream after the handshake, with the bytes that the server sent after it.
    pub async fn greeted(stream: Stream) -> Result<(Stream, Vec<u8>)> {
        let Self { stream, input, .. } = Self::greet(stream).await?;
        Ok((stream, input))
    }

    /// The screen as it is.
    pub async fn picture(&mut self) -> Result<Picture> {
        let (width, height) = (self.width, self.height);
        let [w0, w1] = width.to_be_bytes();
        let [h0, h1] = height.to_be_bytes();
        // 0x00RRGGBB in big-endian order; Raw; all of it.
        self.send(&[
            0, 0, 0, 0, 32, 24, 1, 1, 0, 255, 0, 255, 0, 255, 16, 8, 0, 0, 0, 0,
        ])
        .await?;
        self.send(&[2, 0, 0, 1, 0, 0, 0, 0]).await?;
        self.send(&[3, 0, 0, 0, 0, 0, w0, w1, h0, h1]).await?;
        let pixels = usize::from(width) * usize::from(height);
        if pixels > MAX_PIXELS {
            return Err(unexpected());
        }
        let mut rgb = vec![0; pixels * 3];
        if self.read::<2>().await? != [0, 0] {
            return Err(unexpected());
        }
        let rectangles = u16::from_be_bytes(self.read().await?);
        for _ in 0..rectangles {
            self.rectangle(&mut rgb).await?;
        }
        Ok(Picture { width, height, rgb })
    }

    async fn rectangle(&mut self, rgb: &mut [u8]) -> Result<()> {
        let [x0, x1, y0, y1, w0, w1, h0, h1, encoding @ ..] = self.read::<12>().await?;
        let field = |high, low| usize::from(u16::from_be_bytes([high, low]));
        let (x, y, width, height) = (field(x0, x1), field(y0, y1), field(w0, w1), field(h0, h1));
        let whole = usize::from(self.width);
        if encoding != [0; 4] || x + width > whole || y + height > usize::from(self.height) {
            return Err(unexpected());
        }
        for row in y..y + height {
            let raw = self.take(width * 4).await?;
            let begin = (row * whole + x) * 3;
            let target = rgb.get_mut(begin..begin + width * 3).ok_or_else(unexpected)?;
            for (pixel, raw) in target.chunks_exact_mut(3).zip(raw.chunks_exact(4)) {
                pixel.copy_from_slice(raw.get(1..).ok_or_else(unexpected)?);
            }
        }
        Ok(())
    }

    /// Presses or releases a key.
    pub async fn key(&mut self, keysym: u32, down: bool) -> Result<()> {
        let [a, b, c, d] = keysym.to_be_bytes();
        self.send(&[4, down.into(), 0, 0, a, b, c, d]).await
    }

    /// Waits until the guest has taken all keys: the server answers a fence (BlockBefore) behind them.
    pub async fn keys_taken(&mut self) -> Result<()> {
        match timeout(PATIENCE, self.fence()).await {
            Ok(answered) => answered,
            Err(_) => {
                let message =
                    "the guest has not taken all keys in 10 s: it may be paused, or read no keyboard now";
                Err(Failure::new(Code::Timeout, message))
            }
        }
    }

    async fn fence(&mut self) -> Result<()> {
        // SetEncodings: Fence. The server announces it with one of its own, the first time; then comes the answer.
        self.send(&[2, 0, 0, 1, 0xff, 0xff, 0xfe, 0xc8]).await?;
        self.send(&[248, 0, 0, 0, 0x80, 0, 0, 1, 1, 7]).await?;
        loop {
            let [kind, _, _, _, flags, _, _, _, length] = self.read::<9>().await?;
            if kind != 248 {
                return Err(unexpected());
            }
            self.take(length.into()).await?;
            if flags & 0x80 == 0 {
                return Ok(());
            }
        }
    }

    async fn send(&mut self, bytes: &[u8]) -> Result<()> {
        let request = VncRequest {
            message: Some(Message::Data(bytes.to_vec())),
        };
        match self.stream.requests.send(request).await {
            Ok(()) => Ok(()),
            Err(_) => Err(self.ended().await),
        }
    }

    async fn read<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.take(N).await?.try_into().map_err(|_| unexpected())
    }

    async fn take(&mut self, length: usize) -> Result<Vec<u8>> {
        while self.input.len() < length {
            match self.stream.responses.message().await {
                Ok(Some(response)) => self.input.extend(response.data),
                Ok(None) => return Err(closed()),
                Err(status) => return Err(Failure::from(status)),
            }
        }
        let rest = self.input.split_off(length);
        Ok(std::mem::replace(&mut self.input, rest))
    }

    /// Why the stream has ended.
    async fn ended(&mut self) -> Failure {
        match self.stream.responses.message().await {
            Err(status) => status.into(),
            Ok(_) => closed(),
        }
    }
}

fn bounded(length: u32, most: usize) -> Result<usize> {
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    if length > most {
        return Err(unexpected());
    }
    Ok(length)
}

fn closed() -> Failure {
    Failure::new(Code::Unavailable, "the VM's screen was closed")
}

fn unexpected() -> Failure {
    Failure::new(Code::Other, "the VM's screen does not speak RFB as expected")
}
