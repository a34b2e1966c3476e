//! Parser of client messages in a stream of bytes (RFC 6143, 7.5, and the community's extensions).
//!
//! A client may announce a message of 4 GiB. Long parts are either consumed without being stored
//! (cut text, encodings) or refused; at most [`MAX_BUFFERED`] bytes of an unfinished message are
//! stored.

use crate::{
    Rect,
    pixel::{BadFormat, PixelFormat},
};

/// Longest message that is kept until it is complete: SetDesktopSize with 255 screens.
pub const MAX_BUFFERED: usize = 8 + 255 * 16;
/// Longest payload of a fence.
pub const MAX_FENCE: usize = 64;

/// A message of a client that is through with its handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientMessage {
    /// SetPixelFormat. With it whether the client needs the colour map.
    PixelFormat(PixelFormat, bool),
    /// A SetEncodings message begins.
    EncodingsBegin,
    /// One of the encodings of the message that began, in order of preference.
    Encoding(i32),
    /// That was the last one.
    EncodingsEnd,
    /// FramebufferUpdateRequest.
    UpdateRequest {
        /// Only changed parts are requested.
        incremental: bool,
        /// Of this part.
        area: Rect,
    },
    /// KeyEvent.
    Key {
        /// Pressed, or released.
        down: bool,
        /// X11 keysym.
        keysym: u32,
    },
    /// QEMU's extended key event.
    ExtendedKey {
        /// Pressed, or released.
        down: bool,
        /// X11 keysym, 0 when unknown.
        keysym: u32,
        /// XT scancode; keys with the prefix 0xe0 have bit 7 set.
        scancode: u32,
    },
    /// PointerEvent.
    Pointer {
        /// Left, middle, right, wheel up, wheel down, wheel left, wheel right.
        buttons: u8,
        /// Column.
        x: u16,
        /// Row.
        y: u16,
    },
    /// EnableContinuousUpdates.
    ContinuousUpdates {
        /// On, or off.
        enable: bool,
        /// Of this part.
        area: Rect,
    },
    /// ClientFence.
    Fence {
        /// See [`crate::session`].
        flags: u32,
        /// At most [`MAX_FENCE`] bytes.
        payload: Vec<u8>,
    },
    /// SetDesktopSize.
    DesktopSize {
        /// Columns.
        width: u16,
        /// Rows.
        height: u16,
        /// Screens that the desktop is to have.
        screens: u8,
    },
}

/// Reason why a client's messages are invalid. The rest of the stream is unusable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadMessage {
    /// A type that was not announced.
    #[error("unknown message type {0}")]
    Type(u8),
    /// A subtype that was not announced.
    #[error("unknown QEMU message {0}")]
    Subtype(u8),
    /// A fence with a longer payload than is allowed.
    #[error("a fence of {0} bytes")]
    Fence(u8),
    /// A pixel format that makes no sense.
    #[error(transparent)]
    Format(#[from] BadFormat),
}

/// Cuts messages out of a stream.
#[derive(Debug, Default)]
pub struct Parser {
    buffer: Vec<u8>,
    /// Bytes that are to be thrown away.
    skip: u64,
    /// Encodings that are still to come of a SetEncodings message.
    encodings: u16,
    ending: bool,
}

/// Result of parsing the beginning of a buffer.
enum Found {
    /// More bytes are needed, this many in all.
    Incomplete(usize),
    /// A message.
    Message(ClientMessage),
    /// The head of a message whose other bytes, so many, have no meaning here.
    Skip(u64),
    /// The head of a SetEncodings message with that many encodings.
    Encodings(u16),
}

impl Parser {
    /// Takes bytes off the front of `input`, up to the end of a message at most. `None` when `input` is used up.
    pub fn next(&mut self, input: &mut &[u8]) -> Result<Option<ClientMessage>, BadMessage> {
        loop {
            if std::mem::take(&mut self.ending) {
                return Ok(Some(ClientMessage::EncodingsEnd));
            }
            if self.skip > 0 {
                let count = usize::try_from(self.skip).unwrap_or(usize::MAX).min(input.len());
                *input = input.get(count..).unwrap_or_default();
                self.skip = self.skip.saturating_sub(u64::try_from(count).unwrap_or(u64::MAX));
                if self.skip > 0 {
                    return Ok(None);
                }
            }
            if self.encodings > 0 {
                let Some(raw) = self
                    .gather(input, 4)
                    .and_then(|raw| raw.first_chunk::<4>().copied())
                else {
                    return Ok(None);
                };
                self.buffer.clear();
                self.encodings = self.encodings.saturating_sub(1);
                self.ending = self.encodings == 0;
                return Ok(Some(ClientMessage::Encoding(i32::from_be_bytes(raw))));
            }
            let mut wanted = 1;
            let found = loop {
                let Some(raw) = self.gather(input, wanted) else {
                    return Ok(None);
                };
                match find(raw)? {
                    Found::Incomplete(length) => wanted = length,
                    found => break found,
                }
            };
            // Exactly the message was gathered, since each step says how much is needed.
            self.buffer.clear();
            match found {
                Found::Message(message) => return Ok(Some(message)),
                Found::Skip(length) => self.skip = length,
                Found::Encodings(count) => {
                    self.encodings = count;
                    self.ending = count == 0;
                    return Ok(Some(ClientMessage::EncodingsBegin));
                }
                Found::Incomplete(_) => return Ok(None),
            }
        }
    }

    /// The first `wanted` bytes of a message, once they are there.
    fn gather(&mut self, input: &mut &[u8], wanted: usize) -> Option<&[u8]> {
        let missing = wanted.saturating_sub(self.buffer.len());
        let (now, rest) = input.split_at_checked(missing).unwrap_or((*input, &[]));
        self.buffer.extend_from_slice(now);
        *input = rest;
        self.buffer.get(..wanted)
    }
}

/// Big-endian fields, one after the other.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    fn u8(&mut self) -> Option<u8> {
        self.bytes().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Option<u16> {
        self.bytes().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.bytes().map(u32::from_be_bytes)
    }

    fn rect(&mut self) -> Option<Rect> {
        Some(Rect::new(self.u16()?, self.u16()?, self.u16()?, self.u16()?))
    }
}

const SET_PIXEL_FORMAT: u8 = 0;
const SET_ENCODINGS: u8 = 2;
const UPDATE_REQUEST: u8 = 3;
const KEY_EVENT: u8 = 4;
const POINTER_EVENT: u8 = 5;
const CUT_TEXT: u8 = 6;
const CONTINUOUS_UPDATES: u8 = 150;
const FENCE: u8 = 248;
const SET_DESKTOP_SIZE: u8 = 251;
const QEMU: u8 = 255;
const QEMU_KEY: u8 = 0;

fn find(raw: &[u8]) -> Result<Found, BadMessage> {
    let mut fields = Fields(raw);
    let Some(kind) = fields.u8() else {
        return Ok(Found::Incomplete(1));
    };
    let length = match kind {
        SET_PIXEL_FORMAT => 20,
        SET_ENCODINGS => 4,
        UPDATE_REQUEST | CONTINUOUS_UPDATES => 10,
        KEY_EVENT | CUT_TEXT | SET_DESKTOP_SIZE => 8,
        POINTER_EVENT => 6,
        FENCE => 9,
        QEMU => 2,
        other => return Err(BadMessage::Type(other)),
    };
    if raw.len() < length {
        return Ok(Found::Incomplete(length));
    }
    body(kind, length, fields, raw)?.ok_or(BadMessage::Type(kind))
}

/// Parses the message after its type; the fixed part is complete.
fn body(kind: u8, length: usize, mut fields: Fields<'_>, raw: &[u8]) -> Result<Option<Found>, BadMessage> {
    let read = || -> Option<Result<Found, BadMessage>> {
        let message = match kind {
            SET_PIXEL_FORMAT => {
                let [_, _, _] = fields.bytes()?;
                match PixelFormat::parse(&fields.bytes()?) {
                    Ok((format, indexed)) => ClientMessage::PixelFormat(format, indexed),
                    Err(error) => return Some(Err(error.into())),
                }
            }
            SET_ENCODINGS => {
                fields.u8()?;
                return Some(Ok(Found::Encodings(fields.u16()?)));
            }
            UPDATE_REQUEST => ClientMessage::UpdateRequest {
                incremental: fields.u8()? != 0,
                area: fields.rect()?,
            },
            CONTINUOUS_UPDATES => ClientMessage::ContinuousUpdates {
                enable: fields.u8()? != 0,
                area: fields.rect()?,
            },
            KEY_EVENT => {
                let down = fields.u8()? != 0;
                fields.u16()?;
                ClientMessage::Key {
                    down,
                    keysym: fields.u32()?,
                }
            }
            POINTER_EVENT => ClientMessage::Pointer {
                buttons: fields.u8()?,
                x: fields.u16()?,
                y: fields.u16()?,
            },
            CUT_TEXT => {
                let [_, _, _] = fields.bytes()?;
                return Some(Ok(Found::Skip(fields.u32()?.into())));
            }
            FENCE => return fence(fields, length, raw),
            SET_DESKTOP_SIZE => {
                fields.u8()?;
                let (width, height, screens) = (fields.u16()?, fields.u16()?, fields.u8()?);
                let whole = length.saturating_add(usize::from(screens).saturating_mul(16));
                if raw.len() < whole {
                    return Some(Ok(Found::Incomplete(whole)));
                }
                ClientMessage::DesktopSize {
                    width,
                    height,
                    screens,
                }
            }
            _ => return qemu(fields, raw),
        };
        Some(Ok(Found::Message(message)))
    };
    read().transpose()
}

fn fence(mut fields: Fields<'_>, length: usize, raw: &[u8]) -> Option<Result<Found, BadMessage>> {
    let [_, _, _] = fields.bytes()?;
    let (flags, size) = (fields.u32()?, fields.u8()?);
    if usize::from(size) > MAX_FENCE {
        return Some(Err(BadMessage::Fence(size)));
    }
    let whole = length.saturating_add(size.into());
    let Some(payload) = raw.get(length..whole) else {
        return Some(Ok(Found::Incomplete(whole)));
    };
    let payload = payload.to_owned();
    Some(Ok(Found::Message(ClientMessage::Fence { flags, payload })))
}

fn qemu(mut fields: Fields<'_>, raw: &[u8]) -> Option<Result<Found, BadMessage>> {
    const LENGTH: usize = 12;
    let subtype = fields.u8()?;
    if subtype != QEMU_KEY {
        return Some(Err(BadMessage::Subtype(subtype)));
    }
    if raw.len() < LENGTH {
        return Some(Ok(Found::Incomplete(LENGTH)));
    }
    let message = ClientMessage::ExtendedKey {
        down: fields.u16()? != 0,
        keysym: fields.u32()?,
        scancode: fields.u32()?,
    };
    Some(Ok(Found::Message(message)))
}
