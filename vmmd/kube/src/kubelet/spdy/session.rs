//! Input of a client as events: the state of the client's side of a session, without I/O.
//!
//! Bytes are processed as they arrive. The session keeps at most the beginning of a frame, a
//! control frame of at most [`MAX_CONTROL`] bytes, zlib's window and the numbers of [`MAX_STREAMS`]
//! streams; the bytes of data frames pass through.

use std::collections::BTreeSet;

use super::{
    frame::{Control, HEAD, Head, Reset},
    headers::{Headers, Inflater},
};

/// Bytes of a control frame at most.
pub const MAX_CONTROL: usize = 16 << 10;
/// Streams that the client has not ended, at most; more are refused.
pub const MAX_STREAMS: usize = 256;

/// Violation that ends a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Not ours.
    #[error("a frame is of version {0} of SPDY")]
    Version(u16),
    /// More than a control frame may have.
    #[error("a control frame has {0} bytes")]
    TooLong(usize),
    /// Another length than frames of this kind have.
    #[error("a control frame of kind {0} has another length")]
    Length(u16),
    /// Nobody was asked.
    #[error("SYN_REPLY without a stream of this side")]
    Reply,
    /// Not what zlib makes.
    #[error("headers can't be inflated")]
    Compression,
    /// See the limits of the module `headers`.
    #[error("too many headers")]
    TooManyHeaders,
    /// See the draft.
    #[error("a block of headers is not well-formed")]
    Header,
}

/// What has happened.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A new stream.
    Opened { stream: u32, headers: Headers },
    /// Bytes of a stream that is open; never none.
    Data { stream: u32, bytes: &'a [u8] },
    /// The client sends no more on this stream.
    Finished { stream: u32 },
    /// The client does not want this stream any more.
    Reset { stream: u32 },
    /// This side is to reset a stream that it was never told of.
    Refuse { stream: u32, why: Reset },
    /// This side is to send the same.
    Ping { id: u32 },
    /// The client opens no more streams.
    GoAway,
}

#[derive(Debug)]
enum Expected {
    /// The beginning of a frame, of which there are so many bytes.
    Head([u8; HEAD], usize),
    /// The payload of a control frame.
    Control {
        kind: u16,
        fin: bool,
        one_way: bool,
        length: usize,
    },
    /// So many bytes of data.
    Data { stream: u32, fin: bool, left: usize },
}

/// The client's side.
#[derive(Debug)]
pub struct Session {
    expected: Expected,
    payload: Vec<u8>,
    inflater: Inflater,
    /// The highest number of a stream so far.
    last: u32,
    /// Streams that the client has not ended.
    open: BTreeSet<u32>,
    /// Told with the next call: a stream that was opened with its end.
    ended: Option<u32>,
}

impl Session {
    pub fn new() -> Self {
        Self {
            expected: Expected::Head([0; HEAD], 0),
            payload: Vec::new(),
            inflater: Inflater::new(),
            last: 0,
            open: BTreeSet::new(),
            ended: None,
        }
    }

    /// How many streams the client has not ended.
    #[cfg_attr(not(test), allow(dead_code, reason = "what tests and fuzzing look at"))]
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// Returns the next event in these bytes, and removes the bytes that it has read; `None` when
    /// they are used up.
    ///
    /// # Errors
    ///
    /// Fails when the client has broken the rules. Its further bytes cannot be understood.
    pub fn next<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<Event<'a>>, Violation> {
        if let Some(stream) = self.ended.take() {
            self.open.remove(&stream);
            return Ok(Some(Event::Finished { stream }));
        }
        loop {
            let event = match &mut self.expected {
                Expected::Head(bytes, have) => {
                    let taken = take(input, HEAD - *have);
                    if let Some(room) = bytes.get_mut(*have..*have + taken.len()) {
                        room.copy_from_slice(taken);
                    }
                    *have += taken.len();
                    if *have < HEAD {
                        return Ok(None);
                    }
                    let head = Head::parse(*bytes)?;
                    self.begin(head)?
                }
                Expected::Control {
                    kind,
                    fin,
                    one_way,
                    length,
                } => {
                    let (kind, fin, one_way, length) = (*kind, *fin, *one_way, *length);
                    self.payload.extend(take(input, length - self.payload.len()));
                    if self.payload.len() < length {
                        return Ok(None);
                    }
                    self.expected = Expected::Head([0; HEAD], 0);
                    let payload = std::mem::take(&mut self.payload);
                    self.control(Control::parse(kind, &payload)?, fin, one_way)?
                }
                Expected::Data { stream, fin, left } => {
                    let (stream, fin) = (*stream, *fin);
                    let bytes = take(input, *left);
                    *left -= bytes.len();
                    let whole = *left == 0;
                    if whole {
                        self.expected = Expected::Head([0; HEAD], 0);
                    } else if bytes.is_empty() {
                        return Ok(None);
                    }
                    self.data(stream, fin && whole, bytes)
                }
            };
            if event.is_some() {
                return Ok(event);
            }
        }
    }

    fn begin(&mut self, head: Head) -> Result<Option<Event<'static>>, Violation> {
        self.expected = match head {
            Head::Control { length, .. } if length > MAX_CONTROL => return Err(Violation::TooLong(length)),
            Head::Control {
                kind,
                fin,
                one_way,
                length,
            } => Expected::Control {
                kind,
                fin,
                one_way,
                length,
            },
            Head::Data { stream, fin, length } => Expected::Data {
                stream,
                fin,
                left: length,
            },
        };
        Ok(None)
    }

    /// Data of streams that are not open is passed over: the client may not know yet that this side has reset one.
    fn data<'a>(&mut self, stream: u32, ends: bool, bytes: &'a [u8]) -> Option<Event<'a>> {
        if !self.open.contains(&stream) {
            return None;
        }
        if bytes.is_empty() {
            return (ends && self.open.remove(&stream)).then_some(Event::Finished { stream });
        }
        if ends {
            self.ended = Some(stream);
        }
        Some(Event::Data { stream, bytes })
    }

    fn control(
        &mut self,
        control: Control<'_>,
        fin: bool,
        one_way: bool,
    ) -> Result<Option<Event<'static>>, Violation> {
        Ok(match control {
            Control::SynStream { stream, block } => {
                // Later blocks depend on it, regardless of the stream.
                let headers = self.inflater.headers(block)?;
                Some(self.opened(stream, headers, fin, one_way))
            }
            Control::Headers { stream, block } => {
                self.inflater.headers(block)?;
                (fin && self.open.remove(&stream)).then_some(Event::Finished { stream })
            }
            // Also of one that the client has ended: this side may still send on it.
            Control::Reset { stream } if stream % 2 == 1 && stream <= self.last => {
                self.open.remove(&stream);
                Some(Event::Reset { stream })
            }
            Control::Reset { .. } => None,
            // Even ones are answers to those of this side, which sends none.
            Control::Ping { id } => (id % 2 == 1).then_some(Event::Ping { id }),
            Control::GoAway => Some(Event::GoAway),
            Control::Ignored => None,
        })
    }

    fn opened(&mut self, stream: u32, headers: Headers, fin: bool, one_way: bool) -> Event<'static> {
        // A one-way stream could not carry an answer.
        if stream.is_multiple_of(2) || stream <= self.last || one_way {
            let why = Reset::ProtocolError;
            return Event::Refuse { stream, why };
        }
        self.last = stream;
        if self.open.len() >= MAX_STREAMS {
            let why = Reset::Refused;
            return Event::Refuse { stream, why };
        }
        self.open.insert(stream);
        if fin {
            self.ended = Some(stream);
        }
        Event::Opened { stream, headers }
    }
}

/// Takes as much away as there is, at most so many.
fn take<'a>(input: &mut &'a [u8], most: usize) -> &'a [u8] {
    let (taken, rest) = input.split_at(most.min(input.len()));
    *input = rest;
    taken
}
