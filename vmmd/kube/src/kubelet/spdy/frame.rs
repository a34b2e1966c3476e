//! Frames on the wire (draft-mbelshe-httpbis-spdy-00, 2.2 and 2.6). Numbers are big-endian.

use super::session::Violation;

/// Bytes before each frame's payload.
pub const HEAD: usize = 8;
const VERSION: u16 = 3;
/// The sender sends no more on this stream.
const FIN: u8 = 1;
/// The receiver is to send nothing on this stream.
const UNIDIRECTIONAL: u8 = 2;
/// A stream's number has 31 bits.
const STREAM: u32 = 0x7fff_ffff;

const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const SETTINGS: u16 = 4;
const PING: u16 = 6;
const GOAWAY: u16 = 7;
const HEADERS: u16 = 8;
const WINDOW_UPDATE: u16 = 9;

/// Why a stream is reset (2.6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reset {
    /// It breaks the rules.
    ProtocolError,
    /// The stream was not processed.
    Refused,
    /// It is not needed any more.
    Cancel,
}

/// The first eight bytes of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    Control {
        kind: u16,
        fin: bool,
        one_way: bool,
        length: usize,
    },
    Data {
        stream: u32,
        fin: bool,
        length: usize,
    },
}

impl Head {
    pub fn parse(bytes: [u8; HEAD]) -> Result<Self, Violation> {
        let [a, b, c, d, flags, high, middle, low] = bytes;
        let length = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        let fin = flags & FIN != 0;
        if a & 0x80 == 0 {
            let stream = u32::from_be_bytes([a, b, c, d]);
            return Ok(Self::Data { stream, fin, length });
        }
        match u16::from_be_bytes([a & 0x7f, b]) {
            VERSION => Ok(Self::Control {
                kind: u16::from_be_bytes([c, d]),
                fin,
                one_way: flags & UNIDIRECTIONAL != 0,
                length,
            }),
            other => Err(Violation::Version(other)),
        }
    }
}

/// The payload of a control frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control<'a> {
    /// A new stream, with compressed headers.
    SynStream {
        stream: u32,
        block: &'a [u8],
    },
    /// More headers.
    Headers {
        stream: u32,
        block: &'a [u8],
    },
    Reset {
        stream: u32,
    },
    Ping {
        id: u32,
    },
    GoAway,
    /// SETTINGS and WINDOW_UPDATE, which nothing here depends on, and kinds that the draft does not have.
    Ignored,
}

impl<'a> Control<'a> {
    pub fn parse(kind: u16, payload: &'a [u8]) -> Result<Self, Violation> {
        let short = Violation::Length(kind);
        Ok(match kind {
            SYN_STREAM => {
                let (stream, rest) = number(payload).ok_or(short)?;
                // The stream that it belongs to, its priority and slot.
                let block = rest.get(6..).ok_or(short)?;
                Self::SynStream { stream, block }
            }
            HEADERS => {
                let (stream, block) = number(payload).ok_or(short)?;
                Self::Headers { stream, block }
            }
            RST_STREAM => match number(payload) {
                Some((stream, status)) if status.len() == 4 => Self::Reset { stream },
                _ => return Err(short),
            },
            PING => match payload.first_chunk() {
                Some(id) if payload.len() == 4 => Self::Ping {
                    id: u32::from_be_bytes(*id),
                },
                _ => return Err(short),
            },
            GOAWAY => Self::GoAway,
            // It would be the answer to a stream of this side, which opens none.
            SYN_REPLY => return Err(Violation::Reply),
            SETTINGS | WINDOW_UPDATE => Self::Ignored,
            _ => Self::Ignored,
        })
    }
}

/// A stream's number, and what follows it.
fn number(payload: &[u8]) -> Option<(u32, &[u8])> {
    let (number, rest) = payload.split_first_chunk()?;
    Some((u32::from_be_bytes(*number) & STREAM, rest))
}

fn control(kind: u16, payload: &[&[u8]]) -> Vec<u8> {
    let length: usize = payload.iter().map(|part| part.len()).sum();
    let mut frame = Vec::with_capacity(HEAD + length);
    frame.extend((0x8000 | VERSION).to_be_bytes());
    frame.extend(kind.to_be_bytes());
    // No flags.
    frame.extend(u32::try_from(length).unwrap_or_default().to_be_bytes());
    for part in payload {
        frame.extend(*part);
    }
    frame
}

/// The answer to a new stream, with compressed headers.
pub fn syn_reply(stream: u32, block: &[u8]) -> Vec<u8> {
    control(SYN_REPLY, &[&stream.to_be_bytes(), block])
}

pub fn reset(stream: u32, why: Reset) -> Vec<u8> {
    let status: u32 = match why {
        Reset::ProtocolError => 1,
        Reset::Refused => 3,
        Reset::Cancel => 5,
    };
    control(RST_STREAM, &[&stream.to_be_bytes(), &status.to_be_bytes()])
}

pub fn ping(id: u32) -> Vec<u8> {
    control(PING, &[&id.to_be_bytes()])
}

/// This side ends the session, and has taken streams up to this one.
pub fn go_away(last: u32) -> Vec<u8> {
    control(GOAWAY, &[&last.to_be_bytes(), &[0; 4]])
}

/// Head of a data frame; its data is at most 16 MiB - 1.
pub fn data_head(stream: u32, fin: bool, length: usize) -> [u8; HEAD] {
    let [a, b, c, d] = (stream & STREAM).to_be_bytes();
    let [.., high, middle, low] = u32::try_from(length).unwrap_or_default().to_be_bytes();
    [a, b, c, d, u8::from(fin) * FIN, high, middle, low]
}
