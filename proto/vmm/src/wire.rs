//! Framing of the private protocol: a 4-byte little-endian length, then one encoded [`Message`], with file
//! descriptors attached to the frame's first bytes (SCM_RIGHTS): up to 253 to the last that are sent with descriptors, and
//! 253 to each one before.
//!
//! Blocking and non-blocking sockets are both served: [`Sending::send`] and [`Receiver::read`] do one system call each and
//! leave waiting to the caller.

use std::{
    collections::VecDeque,
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use prost::Message as _;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::vmm::Message;

/// Version of the protocol spoken by this build. A `vmm` serves every minor version of its major one.
pub const MAJOR: u32 = 1;
/// See [`MAJOR`].
pub const MINOR: u32 = 15;
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
    #[error("control socket")]
    Io(#[from] io::Error),
}

/// Encodes a message with its length in front.
pub fn encode(message: &Message) -> Result<Vec<u8>, Error> {
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
pub fn send_all(socket: impl AsFd, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
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

/// Assembles messages from received bytes.
#[derive(Debug, Default)]
pub struct Receiver {
    limits: Limits,
    buffer: Vec<u8>,
    /// Descriptors with the position in `buffer` of the last byte that came with them.
    fds: VecDeque<(usize, OwnedFd)>,
}

impl Receiver {
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
    pub fn next_message(&mut self) -> Result<Option<(Message, Vec<OwnedFd>)>, Error> {
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
        let message = Message::decode(body)?;
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

/// More than the depth to which [`Message`] is nested: message, response, machine, disk, operation.
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
pub fn receive(socket: impl AsFd, receiver: &mut Receiver) -> Result<Option<(Message, Vec<OwnedFd>)>, Error> {
    loop {
        if let Some(message) = receiver.next_message()? {
            return Ok(Some(message));
        }
        if receiver.read(&socket)? == Read::Closed {
            return Ok(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::unix::net::UnixStream};

    use super::*;
    use crate::vmm::{Hello, Request, message::Kind, request::Op};

    fn hello(id: u64) -> Message {
        let op = Some(Op::Hello(Hello {
            major: MAJOR,
            minor: MINOR,
        }));
        Message {
            kind: Some(Kind::Request(Request {
                id,
                op,
                ..Default::default()
            })),
        }
    }

    #[test]
    fn messages_and_their_descriptors_arrive_whole_and_in_order() {
        let (a, b) = UnixStream::pair().unwrap();
        let file = tempfile_like();
        send_all(&a, &hello(1), &[file.as_fd(), a.as_fd()]).unwrap();
        send_all(&a, &hello(2), &[]).unwrap();
        drop(a);
        let mut receiver = Receiver::new();
        let (first, fds) = receive(&b, &mut receiver).unwrap().unwrap();
        assert_eq!((first, fds.len()), (hello(1), 2));
        drop(fds);
        let (second, fds) = receive(&b, &mut receiver).unwrap().unwrap();
        assert_eq!((second, fds.len()), (hello(2), 0));
        assert!(receive(&b, &mut receiver).unwrap().is_none());
    }

    #[test]
    fn limited_receiver_refuses_many_fields_before_decoding() {
        use crate::vmm::{DiskStats, DiskStatsReply, Response, response::Result as Outcome};
        let limits = Limits {
            frame_bytes: MAX_FRAME,
            fields: 1000,
            fds: 0,
        };
        let reply = |disks: usize| Message {
            kind: Some(Kind::Response(Response {
                id: 1,
                result: Some(Outcome::DiskStats(DiskStatsReply {
                    disks: vec![DiskStats::default(); disks],
                })),
            })),
        };
        let received = |frame: &[u8]| {
            let (a, b) = UnixStream::pair().unwrap();
            let sent = std::thread::spawn({
                let frame = frame.to_vec();
                move || {
                    let _refused_early = (&a).write_all(&frame);
                }
            });
            let result = receive(&b, &mut Receiver::limited(limits));
            drop(b);
            sent.join().unwrap();
            result
        };
        // Message, response, id and reply are fields too.
        assert!(received(&encode(&reply(996)).unwrap()).is_ok());
        let many = encode(&reply(400_000)).unwrap();
        assert!(matches!(received(&many), Err(Error::TooManyFields(1000))));
        // Hidden behind a group that a decoder skips.
        let mut hidden = vec![0xfb, 0x01, 0xfc, 0x01];
        hidden.extend_from_slice(&many[4..]);
        let mut frame = u32::try_from(hidden.len()).unwrap().to_le_bytes().to_vec();
        frame.extend_from_slice(&hidden);
        assert!(Message::decode(hidden.as_slice()).is_ok());
        assert!(matches!(received(&frame), Err(Error::TooManyFields(1000))));
    }

    #[test]
    fn a_limited_receiver_holds_no_descriptors() {
        let (a, b) = UnixStream::pair().unwrap();
        send_all(&a, &hello(1), &[a.as_fd()]).unwrap();
        let limits = Limits {
            fds: 0,
            ..Limits::TRUSTED
        };
        let result = receive(&b, &mut Receiver::limited(limits));
        assert!(matches!(result, Err(Error::TooManyFds)));
    }

    #[test]
    fn descriptors_stay_with_their_message() {
        for ahead in 0..3_u64 {
            let (a, b) = UnixStream::pair().unwrap();
            for id in 0..ahead {
                send_all(&a, &hello(1 + id), &[]).unwrap();
            }
            send_all(&a, &hello(100), &[a.as_fd()]).unwrap();
            send_all(&a, &hello(101), &[]).unwrap();
            send_all(&a, &hello(102), &[a.as_fd(), a.as_fd()]).unwrap();
            let mut receiver = Receiver::new();
            let mut counts = Vec::new();
            for _ in 0..ahead + 3 {
                let (_, fds) = receive(&b, &mut receiver).unwrap().unwrap();
                counts.push(fds.len());
            }
            let expected = [vec![0; usize::try_from(ahead).unwrap()], vec![1, 0, 2]].concat();
            assert_eq!(counts, expected);
        }
    }

    #[test]
    fn maximum_of_descriptors_arrives_in_order() {
        let file = tempfile_like();
        for count in [1, 252, 253, 254, 506, 507, MAX_FDS] {
            let (a, b) = UnixStream::pair().unwrap();
            let copies: Vec<OwnedFd> = (0..count).map(|_| file.try_clone().unwrap()).collect();
            let mut fds: Vec<BorrowedFd<'_>> = copies.iter().map(AsFd::as_fd).collect();
            *fds.last_mut().unwrap() = a.as_fd();
            send_all(&a, &hello(1), &[a.as_fd()]).unwrap();
            send_all(&a, &hello(2), &fds).unwrap();
            send_all(&a, &hello(3), &[]).unwrap();
            let mut receiver = Receiver::new();
            let mut counts = Vec::new();
            for id in 1..=3 {
                let (message, received) = receive(&b, &mut receiver).unwrap().unwrap();
                assert_eq!(message, hello(id));
                if id == 2 {
                    let kind = |fd: &OwnedFd| {
                        rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(fd).unwrap().st_mode)
                    };
                    let sockets = received.iter().map(|fd| kind(fd) == rustix::fs::FileType::Socket);
                    let last: Vec<bool> = (1..=count).map(|number| number == count).collect();
                    assert_eq!(sockets.collect::<Vec<_>>(), last);
                }
                counts.push(received.len());
            }
            assert_eq!(counts, [1, count, 0]);
        }
        let fds = vec![file.as_fd(); MAX_FDS + 1];
        assert!(matches!(Sending::new(b"x", &fds), Err(Error::TooManyFds)));
    }

    #[test]
    fn a_long_message_in_pieces_keeps_its_descriptors() {
        let (a, b) = UnixStream::pair().unwrap();
        let reply = crate::vmm::HelloReply {
            build: "x".repeat(MAX_FRAME - 100),
            ..Default::default()
        };
        let response = crate::vmm::Response {
            id: 2,
            result: Some(crate::vmm::response::Result::Hello(reply)),
        };
        let long = Message {
            kind: Some(Kind::Response(response)),
        };
        let sender = std::thread::spawn(move || {
            send_all(&a, &hello(1), &[]).unwrap();
            send_all(&a, &long, &[a.as_fd()]).unwrap();
            send_all(&a, &hello(3), &[]).unwrap();
        });
        let mut receiver = Receiver::new();
        for expected in [0, 1, 0] {
            let (_, fds) = receive(&b, &mut receiver).unwrap().unwrap();
            assert_eq!(fds.len(), expected);
        }
        sender.join().unwrap();
    }

    #[test]
    fn garbage_is_an_error_and_never_a_large_allocation() {
        for bytes in [&[0xff; 8][..], &[0, 0, 0, 0, 1], &[2, 0, 0, 0, 0xff, 0xff]] {
            let (mut a, b) = UnixStream::pair().unwrap();
            a.write_all(bytes).unwrap();
            assert!(receive(&b, &mut Receiver::new()).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn a_connection_closed_in_the_middle_of_a_message_is_an_error() {
        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(&encode(&hello(1)).unwrap()[..5]).unwrap();
        drop(a);
        assert!(matches!(receive(&b, &mut Receiver::new()), Err(Error::Truncated)));
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_the_receiver_panic(bytes: Vec<u8>) {
            let mut receiver = Receiver { buffer: bytes, ..Receiver::new() };
            while let Ok(Some(_)) = receiver.next_message() {}
        }
    }

    fn tempfile_like() -> OwnedFd {
        rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
    }
}
