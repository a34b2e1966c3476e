//! Bodies of calls. A request body has a deadline. The end of a response body goes to the audit
//! log.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::HeaderMap;
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt;
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Sleep, sleep},
};
use tonic::{Code, Status, body::Body, codegen::Bytes};
use vmmd_host::failure::{Failure, Kind};

use super::{
    Place,
    audit::Record,
    rule::{MAX_OFFER, Rule},
};

/// Compressed flag and length (gRPC over HTTP/2, "Length-Prefixed-Message").
const PREFIX: usize = 5;
/// Most of a message that is looked at, in bytes; a larger one is refused.
const MAX_LOOK: usize = MAX_OFFER + PREFIX;

/// A request's body. It fails when its message, or of a stream the first one, has not arrived in time, and when a message is too large.
#[derive(Debug)]
pub struct Arrival {
    inner: Body,
    /// Runs until what must arrive has.
    deadline: Option<Pin<Box<Sleep>>>,
    /// Only the first message must arrive in time.
    stream: bool,
    first: First,
    sizes: Sizes,
    record: Option<Arc<Record>>,
}

impl Arrival {
    /// The body of a call with this rule; `record` gets the first message.
    pub fn new(inner: Body, limit: Duration, rule: &Rule, record: Option<Arc<Record>>) -> Self {
        Self {
            inner,
            deadline: Some(Box::pin(sleep(limit))),
            stream: rule.stream,
            first: First::default(),
            sizes: Sizes::new(rule.largest),
            record,
        }
    }

    fn seen(&mut self, bytes: &[u8]) {
        if !self.first.add(bytes) {
            return;
        }
        if self.stream {
            self.deadline = None;
        }
        if let Some(record) = self.record.take() {
            record.arrived(self.first.message());
        }
        self.first = First::Done;
    }
}

impl http_body::Body for Arrival {
    type Data = <Body as http_body::Body>::Data;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Status>>> {
        match Pin::new(&mut self.inner).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(bytes) = frame.data_ref() {
                    if let Err(size) = self.sizes.add(bytes) {
                        return Poll::Ready(Some(Err(self.sizes.refuse(size))));
                    }
                    self.seen(bytes);
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(end) => {
                self.deadline = None;
                Poll::Ready(end)
            }
            Poll::Pending => {
                let Some(deadline) = &mut self.deadline else {
                    return Poll::Pending;
                };
                if deadline.as_mut().poll(context).is_pending() {
                    return Poll::Pending;
                }
                self.deadline = None;
                let message = "the request did not arrive whole in time; send it at once";
                let failure = Failure::new(Kind::Deadline, "REQUEST_INCOMPLETE", message);
                Poll::Ready(Some(Err(failure.into())))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// The sizes of a body's messages, which the prefix of each message has.
#[derive(Debug)]
struct Sizes {
    largest: usize,
    prefix: Vec<u8>,
    /// Bytes of the present message that have not come.
    left: usize,
}

impl Sizes {
    fn new(largest: usize) -> Self {
        Self {
            largest,
            prefix: Vec::new(),
            left: 0,
        }
    }

    /// Fails with the size of a message that is too large, before any of it is kept.
    fn add(&mut self, mut bytes: &[u8]) -> Result<(), usize> {
        while !bytes.is_empty() {
            let skipped = self.left.min(bytes.len());
            self.left -= skipped;
            bytes = bytes.get(skipped..).unwrap_or_default();
            let missing = PREFIX.saturating_sub(self.prefix.len()).min(bytes.len());
            let (prefix, rest) = bytes.split_at(missing);
            self.prefix.extend_from_slice(prefix);
            bytes = rest;
            if self.prefix.len() == PREFIX {
                let length = self.prefix.iter().skip(1);
                let length = length.fold(0_usize, |length, byte| length << 8 | usize::from(*byte));
                if length > self.largest {
                    return Err(length);
                }
                (self.left, self.prefix) = (length, Vec::new());
            }
        }
        Ok(())
    }

    fn refuse(&self, size: usize) -> Status {
        Status::out_of_range(format!(
            "the message of this call has {size} bytes, and {} is the most that there may be: send less",
            self.largest
        ))
    }
}

/// The first message of a body.
#[derive(Debug)]
enum First {
    /// Incomplete, with the bytes received so far.
    Coming(Vec<u8>),
    /// It has been looked at.
    Done,
}

impl Default for First {
    fn default() -> Self {
        Self::Coming(Vec::new())
    }
}

impl First {
    /// True when it is complete now.
    fn add(&mut self, bytes: &[u8]) -> bool {
        let Self::Coming(come) = self else { return false };
        let room = MAX_LOOK.saturating_sub(come.len());
        come.extend_from_slice(bytes.get(..room).unwrap_or(bytes));
        let Some((_, length)) = come.get(..PREFIX).and_then(|prefix| prefix.split_first()) else {
            return false;
        };
        let length = length
            .iter()
            .fold(0_usize, |length, byte| length << 8 | usize::from(*byte));
        come.len() - PREFIX >= length || come.len() >= MAX_LOOK
    }

    fn message(&self) -> &[u8] {
        match self {
            Self::Coming(come) => come.get(PREFIX..).unwrap_or_default(),
            Self::Done => &[],
        }
    }
}

/// A response's body. Its trailers end `record` with the code of the call.
pub fn recorded(body: Body, record: Arc<Record>) -> Body {
    Body::new(body.inspect_frame(move |frame| {
        if let Some(code) = frame.trailers_ref().and_then(code) {
            record.end(code);
        }
    }))
}

/// The body of a stream, which has `place` until it ends.
pub fn placed(body: Body, place: Place) -> Body {
    Body::new(body.inspect_frame(move |_| {
        let _held = &place;
    }))
}

/// Bytes with a turn.
struct Held {
    bytes: Bytes,
    _turn: Arc<OwnedSemaphorePermit>,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// The body of a read's answer. Its bytes have the client's turn until they have been sent: a client that reads no answers gets no
/// further ones.
pub fn turned(body: Body, turn: OwnedSemaphorePermit) -> Body {
    let turn = Arc::new(turn);
    Body::new(body.map_frame(move |frame| {
        frame.map_data(|bytes| {
            Bytes::from_owner(Held {
                bytes,
                _turn: Arc::clone(&turn),
            })
        })
    }))
}

/// How the call has ended, by the headers or trailers of its response.
pub fn code(headers: &HeaderMap) -> Option<Code> {
    Some(Code::from_bytes(headers.get("grpc-status")?.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_above_the_limit_is_found_however_its_bytes_come() {
        let bytes = b"\0\0\0\0\x04abcd\0\0\0\0\0\0\0\0\x01\x05abcd";
        for size in 1..=bytes.len() {
            let mut sizes = Sizes::new(0x104);
            let mut chunks = bytes.chunks(size);
            assert_eq!(
                chunks.find_map(|chunk| sizes.add(chunk).err()),
                Some(0x105),
                "{size}"
            );
            let mut sizes = Sizes::new(0x105);
            assert!(bytes.chunks(size).all(|chunk| sizes.add(chunk).is_ok()), "{size}");
        }
    }

    #[test]
    fn the_first_message_is_found_however_its_bytes_come() {
        let bytes = b"\0\0\0\0\x04\x0a\x02ab\0\0\0\0\x01x";
        for size in 1..=bytes.len() {
            let mut first = First::default();
            let done = bytes.chunks(size).position(|chunk| first.add(chunk)).unwrap();
            assert!(first.message().starts_with(b"\x0a\x02ab"), "{size}");
            assert!((done + 1) * size >= 9 && done * size < 9, "{size}");
        }
        assert!(First::default().add(&[0; 5]), "an empty message");
        let mut endless = First::default();
        assert!(!endless.add(&[0xff; 1000]));
        assert!(endless.add(&vec![0; MAX_LOOK]));
        assert_eq!(endless.message().len(), MAX_LOOK - PREFIX);
    }
}
