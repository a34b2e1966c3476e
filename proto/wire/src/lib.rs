//! Framing of the private protocols `vmm.v1` and `vmmd.pod.v1`: a 4-byte little-endian length, then one encoded message, with
//! file descriptors attached to the frame's first bytes (SCM_RIGHTS): up to 253 to the last that are sent with descriptors, and
//! 253 to each one before.
//!
//! Blocking and non-blocking sockets are both served: [`Sending::send`] and [`Receiver::read`] do one system call each and
//! leave waiting to the caller.

use std::{
    collections::VecDeque,
    io,
    marker::PhantomData,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use prost::Message;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Longest encoded message in bytes.
pub const MAX_FRAME: usize = 1 << 20;
/// Most file descriptors with one frame.
pub const MAX_FDS: usize = 768;
/// Most file descriptors that go with one system call (Linux' SCM_MAX_FD).
const FDS_PER_CALL: usize = 253;

/// Reason why a connection is not usable any more.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The frame's length is 0 or above [`Limits::frame_bytes`].
    #[error("frame of {0} bytes, which is empty or too long")]
    FrameLength(usize),
    /// The bytes are no message.
    #[error("undecodable message")]
    Decode(#[from] prost::DecodeError),
    /// More descriptors than one message may carry.
    #[error("too many file descriptors with one message")]
    TooManyFds,
    /// More fields than the receiver decodes.
    #[error("message with more than {0} fields")]
    TooManyFields(usize),
    /// The peer closed the connection in the middle of a frame.
    #[error("connection closed in the middle of a message")]
    Truncated,
    /// The socket failed.
    #[error("socket")]
    Io(#[from] io::Error),
}

/// Encodes a message with its length in front.
pub fn encode(message: &impl Message) -> Result<Vec<u8>, Error> {
    let length = message.encoded_len();
    if length == 0 || length > MAX_FRAME {
        return Err(Error::FrameLength(length));
    }
    let mut frame = Vec::with_capacity(4 + length);
    #[allow(clippy::cast_possible_truncation, reason = "at most MAX_FRAME")]
    frame.extend_from_slice(&(length as u32).to_le_bytes());
    message.encode_raw(&mut frame);
    Ok(frame)
}

/// Unsent rest of one frame and its descriptors.
#[derive(Debug)]
pub struct Sending<'a> {
    frame: &'a [u8],
    fds: &'a [BorrowedFd<'a>],
}

impl<'a> Sending<'a> {
    /// All of `frame`, with `fds`: at most [`MAX_FDS`].
    pub fn new(frame: &'a [u8], fds: &'a [BorrowedFd<'a>]) -> Result<Self, Error> {
        if fds.len() > MAX_FDS {
            return Err(Error::TooManyFds);
        }
        Ok(Self { frame, fds })
    }

    /// Bytes of the frame that are not sent yet.
    pub fn left(&self) -> usize {
        self.frame.len()
    }

    /// Whether all of it is sent.
    pub fn is_done(&self) -> bool {
        self.frame.is_empty()
    }

    /// Does one send: the rest of the frame with the rest of its descriptors, as much as the socket takes; or, while there
    /// are more descriptors than one call takes, a byte with as many.
    pub fn send(&mut self, socket: impl AsFd) -> io::Result<()> {
        let (fds, left) = self.fds.split_at(self.fds.len().min(FDS_PER_CALL));
        let bytes = if left.is_empty() {
            self.frame
        } else {
            self.frame.get(..1).unwrap_or_default()
        };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_PER_CALL))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        let sent = rustix::io::retry_on_intr(|| {
            sendmsg(
                &socket,
                &[io::IoSlice::new(bytes)],
                &mut ancillary,
                SendFlags::NOSIGNAL,
            )
        })?;
        self.frame = self.frame.get(sent..).unwrap_or_default();
        self.fds = left;
        Ok(())
    }
}

/// Sends a whole message over a blocking socket.
pub fn send_all(socket: impl AsFd, message: &impl Message, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
    let frame = encode(message)?;
    let mut sending = Sending::new(&frame, fds)?;
    while !sending.is_done() {
        sending.send(&socket)?;
    }
    Ok(())
}

/// What [`Receiver::read`] found.
#[derive(Debug, PartialEq, Eq)]
pub enum Read {
    /// Something came; ask [`Receiver::next_message`].
    Data,
    /// The peer closed the connection.
    Closed,
}

/// Limits of a receiver. Beyond a limit the connection becomes unusable.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Longest encoded message in bytes, at most [`MAX_FRAME`].
    pub frame_bytes: usize,
    /// Most fields of one message, those of nested messages included. A field of two bytes can become a structure of
    /// hundreds of bytes: the number of fields, not the length of the frame, bounds the memory that decoding takes.
    pub fields: usize,
    /// Most file descriptors that are held for one message, at most [`MAX_FDS`].
    pub fds: usize,
}

impl Limits {
    /// For a peer that is trusted: as much as the protocol allows.
    pub const TRUSTED: Self = Self {
        frame_bytes: MAX_FRAME,
        fields: usize::MAX,
        fds: MAX_FDS,
    };
}

impl Default for Limits {
    fn default() -> Self {
        Self::TRUSTED
    }
}

/// Assembles messages of the type `M` from received bytes.
#[derive(Debug)]
pub struct Receiver<M> {
    limits: Limits,
    buffer: Vec<u8>,
    /// Descriptors with the position in `buffer` of the last byte that came with them.
    fds: VecDeque<(usize, OwnedFd)>,
    message: PhantomData<fn() -> M>,
}

impl<M> Default for Receiver<M> {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            buffer: Vec::new(),
            fds: VecDeque::new(),
            message: PhantomData,
        }
    }
}

impl<M: Message + Default> Receiver<M> {
    /// For a trusted peer.
    pub fn new() -> Self {
        Self::default()
    }

    /// For a peer that may send at most `limits`.
    pub fn limited(limits: Limits) -> Self {
        Self {
            limits,
            ..Self::default()
        }
    }

    /// Performs one receive. Errors of kind `WouldBlock` mean that a non-blocking socket has no
    /// data.
    pub fn read(&mut self, socket: impl AsFd) -> Result<Read, Error> {
        let mut bytes = [0; 16 << 10];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_PER_CALL))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = rustix::io::retry_on_intr(|| {
            recvmsg(
                &socket,
                &mut [io::IoSliceMut::new(&mut bytes)],
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC,
            )
        })
        .map_err(io::Error::from)?;
        let last = (self.buffer.len() + received.bytes).saturating_sub(1);
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds.map(|fd| (last, fd)));
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) || self.fds.len() > self.limits.fds {
            return Err(Error::TooManyFds);
        }
        if received.bytes == 0 {
            return if self.buffer.is_empty() {
                Ok(Read::Closed)
            } else {
                Err(Error::Truncated)
            };
        }
        self.buffer.extend_from_slice(&bytes[..received.bytes]);
        Ok(Read::Data)
    }

    /// Takes the next whole message and the descriptors that came with it.
    ///
    /// One receive may return the end of data sent without descriptors and then one piece sent with
    /// descriptors, but never data behind that piece (unix(7)). A piece belongs to one frame. So
    /// descriptors belong to the frame that contains the last byte received with them, regardless
    /// of requests under way before it.
    pub fn next_message(&mut self) -> Result<Option<(M, Vec<OwnedFd>)>, Error> {
        let Some(head) = self.buffer.first_chunk::<4>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*head) as usize;
        if length == 0 || length > self.limits.frame_bytes {
            return Err(Error::FrameLength(length));
        }
        let Some(body) = self.buffer.get(4..4 + length) else {
            return Ok(None);
        };
        if self.limits.fields < length && !has_at_most(body, self.limits.fields) {
            return Err(Error::TooManyFields(self.limits.fields));
        }
        let message = M::decode(body)?;
        let end = 4 + length;
        self.buffer.drain(..end);
        let mut own = Vec::new();
        for (last, fd) in std::mem::take(&mut self.fds) {
            match last.checked_sub(end) {
                None => own.push(fd),
                Some(last) => self.fds.push_back((last, fd)),
            }
        }
        Ok(Some((message, own)))
    }
}

/// Returns whether an encoded message has at most that many fields, nested ones included.
///
/// The encoding does not distinguish a nested message from a string or packed numbers, so every
/// value with a length counts as the fields that it could be parsed as. The result may be too high,
/// at most one field for two bytes, and never too low.
fn has_at_most(message: &[u8], fields: usize) -> bool {
    let mut left = fields;
    count_fields(message, &mut left, NESTING).is_some()
}

/// More than the depth to which messages are nested: message, response, machine, disk, operation.
const NESTING: u32 = 8;

/// Takes the fields of `message` off `left`, up to where a decoder would give up; `None` when there are more than that.
fn count_fields(mut message: &[u8], left: &mut usize, depth: u32) -> Option<()> {
    while let Some((content, rest)) = next_field(message) {
        message = rest;
        *left = left.checked_sub(1)?;
        if let (Some(content), Some(depth)) = (content, depth.checked_sub(1)) {
            count_fields(content, left, depth)?;
        }
    }
    Some(())
}

/// Splits a field off an encoded message: its content if that has a length of its own, and what follows the field. The
/// begin and the end of a group are fields without content. `None` at the end, and where no field follows.
fn next_field(message: &[u8]) -> Option<(Option<&[u8]>, &[u8])> {
    let (tag, rest) = varint(message)?;
    match tag & 7 {
        0 => Some((None, varint(rest)?.1)),
        1 => Some((None, rest.get(8..)?)),
        2 => {
            let (length, rest) = varint(rest)?;
            let (content, rest) = rest.split_at_checked(usize::try_from(length).ok()?)?;
            Some((Some(content), rest))
        }
        3 | 4 => Some((None, rest)),
        5 => Some((None, rest.get(4..)?)),
        _ => None,
    }
}

/// A variable-length integer, and what follows it.
fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0_u64;
    for (at, byte) in bytes.iter().enumerate().take(10) {
        value |= u64::from(byte & 0x7f).checked_shl(u32::try_from(at).ok()? * 7)?;
        if byte & 0x80 == 0 {
            return Some((value, bytes.get(at + 1..)?));
        }
    }
    None
}

/// Receives a whole message over a blocking socket; `None` when the peer has closed it.
pub fn receive<M: Message + Default>(
    socket: impl AsFd,
    receiver: &mut Receiver<M>,
) -> Result<Option<(M, Vec<OwnedFd>)>, Error> {
    loop {
        if let Some(message) = receiver.next_message()? {
            return Ok(Some(message));
        }
        if receiver.read(&socket)? == Read::Closed {
            return Ok(None);
        }
    }
}
