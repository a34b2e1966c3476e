//! One connection: what its two ends have agreed on, and its bytes on their way to the host.
//!
//! Bytes for the guest stay in the host's socket until the guest has credit and a buffer for them.
//! Bytes for the host are written to its socket at once. [`Connection`] keeps bytes for a full socket,
//! at most [`BUFFER`]: the credit of the guest.

use std::{collections::VecDeque, io, mem};

use rustix::{
    io::Errno,
    net::{Shutdown, shutdown},
};
use vmm_base::{GuestMemory, sys::Iovecs};
use zerocopy::IntoBytes as _;

use super::packet::{HEADER, Header, NO_MORE, NO_RECEIVE, NO_SEND, Ports, op};
use crate::virtio::{chain::Chain, session::EventSet, stream::Stream};

/// Bytes of a connection that wait for the host's end, at most.
pub(super) const BUFFER: u32 = 64 << 10;

/// Largest packet with data for the guest: as of Linux (VIRTIO_VSOCK_MAX_PKT_BUF_SIZE).
const MAX_DATA: u32 = 64 << 10;

/// Byte that the host's end receives when the connection is established, before all data.
const ESTABLISHED: [u8; 1] = [0];

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The host waits for a connection of the guest. The guest's port is not known.
    Listening,
    /// The guest has yet to accept the host's request.
    Requested,
    /// Established.
    Open,
}

/// The guest has violated the protocol, or the host's end is gone: the connection is to be reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Broken;

/// A connection, or one end of it that waits.
#[derive(Debug)]
pub(super) struct Connection {
    pub ports: Ports,
    pub stage: Stage,
    /// The host's end.
    pub stream: Stream,
    /// The connection is in the list of those with packets for the guest.
    pub queued: bool,
    /// The connection has a packet for the guest, and the guest has no buffer.
    pub stalled: bool,
    /// A request or a response has to be sent to the guest, or was sent.
    handshake: Handshake,
    /// Bytes that wait for the host's end.
    output: VecDeque<u8>,
    /// The host's end takes no more bytes: they are dropped.
    discards: bool,
    /// The host's end sends no more bytes.
    ended: bool,
    /// Flags of SHUTDOWN that the guest has sent.
    guest_shutdown: u32,
    /// Flags of SHUTDOWN that the guest has received.
    sent_shutdown: u32,
    /// The host's end was notified of the end of the guest's data.
    passed_end: bool,
    /// The guest has to be told its credit.
    owes_credit: bool,
    /// The guest was asked for credit, and has not given any since.
    asked_credit: bool,
    /// The guest's buffer, and how many bytes it has passed on.
    guest_buffer: u32,
    guest_passed: u32,
    /// Bytes sent to the guest; wraps.
    sent: u32,
    /// Bytes passed to the host's end; wraps. `told` is the number that the guest knows.
    passed: u32,
    told: u32,
}

/// The first packet to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Handshake {
    Due,
    Sent,
}

impl Connection {
    /// An end of the host that connects ([`Stage::Requested`]) or waits ([`Stage::Listening`]).
    pub(super) fn new(ports: Ports, stage: Stage, stream: Stream) -> Self {
        Self {
            ports,
            stage,
            stream,
            queued: false,
            stalled: false,
            handshake: Handshake::Due,
            output: VecDeque::new(),
            discards: false,
            ended: false,
            guest_shutdown: 0,
            sent_shutdown: 0,
            passed_end: false,
            owes_credit: false,
            asked_credit: false,
            guest_buffer: 0,
            guest_passed: 0,
            sent: 0,
            passed: 0,
            told: 0,
        }
    }

    /// Whether the guest knows the connection.
    pub(super) fn is_known(&self) -> bool {
        self.stage == Stage::Open || self.handshake == Handshake::Sent
    }

    /// Establishes the connection, and notifies the host's end.
    pub(super) fn establish(&mut self) -> Result<(), Broken> {
        // The socket is empty.
        let written = rustix::io::retry_on_intr(|| rustix::io::write(&self.stream, &ESTABLISHED));
        if written != Ok(1) {
            return Err(Broken);
        }
        self.stage = Stage::Open;
        Ok(())
    }

    /// Takes the guest's credit from the header of a packet.
    pub(super) fn take_credit(&mut self, header: &Header) {
        self.guest_buffer = header.buf_alloc.get();
        self.guest_passed = header.fwd_cnt.get();
        self.asked_credit &= self.credit() == 0;
    }

    /// Bytes that the guest has room for. A guest that lies gets no more than its own buffers hold.
    fn credit(&self) -> u32 {
        let under_way = self.sent.wrapping_sub(self.guest_passed);
        self.guest_buffer.saturating_sub(under_way)
    }

    /// The guest has to be told its credit.
    pub(super) fn owe_credit(&mut self) {
        self.owes_credit = true;
    }

    /// Takes the data of a packet: `length` bytes behind the header.
    pub(super) fn receive(
        &mut self,
        memory: &GuestMemory,
        chain: &Chain,
        length: u32,
        buffers: &mut Iovecs,
    ) -> Result<(), Broken> {
        let fits = chain
            .readable_len()
            .checked_sub(HEADER)
            .is_some_and(|room| length <= room);
        let has_credit = (length as usize).saturating_add(self.output.len()) <= BUFFER as usize;
        if !fits || !has_credit || self.guest_shutdown & NO_SEND != 0 {
            return Err(Broken);
        }
        let mut done = 0;
        if self.discards {
            done = length;
        } else if self.output.is_empty() && length > 0 {
            buffers.clear();
            buffers
                .append(chain.readable(), HEADER, length)
                .map_err(|_| Broken)?;
            match buffers.send(&self.stream, &[]) {
                Ok(count) => done = u32::try_from(count).map_err(|_| Broken)?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => {
                    self.discards = true;
                    done = length;
                }
            }
        }
        self.passed = self.passed.wrapping_add(done);
        let left = length.saturating_sub(done);
        if left > 0 {
            let mut rest = vec![0; left as usize];
            let offset = HEADER.saturating_add(done);
            chain.read(memory, offset, &mut rest).map_err(|_| Broken)?;
            self.output.extend(rest);
        }
        self.announce_credit();
        Ok(())
    }

    /// Writes what waits, as far as the host's end takes it.
    pub(super) fn flush(&mut self) {
        while !self.output.is_empty() {
            let (waiting, _) = self.output.as_slices();
            match rustix::io::write(&self.stream, waiting) {
                Ok(count) => {
                    self.output.drain(..count.min(self.output.len()));
                    self.passed = self.passed.wrapping_add(u32::try_from(count).unwrap_or(0));
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => {
                    self.discards = true;
                    let count = mem::take(&mut self.output).len();
                    self.passed = self.passed.wrapping_add(u32::try_from(count).unwrap_or(0));
                }
            }
        }
        if self.output.is_empty() {
            // Memory for data of a slow host is not kept.
            self.output = VecDeque::new();
        }
        self.announce_credit();
    }

    /// The guest learns its credit when it knows of less than half of the buffer. Each packet has it too.
    fn announce_credit(&mut self) {
        let waiting = u32::try_from(self.output.len()).unwrap_or(BUFFER);
        let unknown = self.passed.wrapping_sub(self.told);
        if unknown > 0 && waiting.saturating_add(unknown) >= BUFFER / 2 {
            self.owes_credit = true;
        }
    }

    /// The guest has shut its end down, for one or both directions.
    pub(super) fn shut_down(&mut self, flags: u32) {
        self.guest_shutdown |= flags & NO_MORE;
        if self.guest_shutdown & NO_RECEIVE != 0 && !self.ended {
            self.ended = true;
            // The host's next write fails. A socket whose other end is closed needs no notice.
            let _closed = shutdown(&self.stream, Shutdown::Read);
        }
    }

    /// Passes the end of the guest's data on, when all data is passed on. Says whether that ends the
    /// connection.
    pub(super) fn finish(&mut self) -> bool {
        if self.guest_shutdown & NO_SEND == 0 || !self.output.is_empty() {
            return false;
        }
        if !mem::replace(&mut self.passed_end, true) {
            let _closed = shutdown(&self.stream, Shutdown::Write);
        }
        self.guest_shutdown == NO_MORE
    }

    /// Whether there is a packet for the guest, beside data that [`events`](Self::events) announce.
    pub(super) fn has_packet(&self) -> bool {
        let handshake = self.stage != Stage::Listening && self.handshake == Handshake::Due;
        let data = match self.credit() {
            0 => !self.asked_credit,
            _ => self.stream.is_hung_up(),
        };
        let shutdown = self.shutdown() & !self.sent_shutdown != 0;
        handshake || self.owes_credit || shutdown || self.reads() && data
    }

    /// The events of the socket that matter now.
    pub(super) fn events(&self) -> EventSet {
        let mut events = EventSet::empty();
        if self.reads() && !self.stalled && self.credit() > 0 {
            events |= EventSet::IN;
        }
        if !self.output.is_empty() {
            events |= EventSet::OUT;
        }
        events
    }

    /// Data of the host's end is to be sent.
    fn reads(&self) -> bool {
        self.stage == Stage::Open && !self.ended
    }

    /// Writes the next packet for the guest into `chain`, which has room for a header and a byte of
    /// data at least. Gives the packet's length; `None` when there is no packet.
    pub(super) fn send(
        &mut self,
        memory: &GuestMemory,
        chain: &Chain,
        guest_cid: u64,
        buffers: &mut Iovecs,
    ) -> Result<Option<u32>, Broken> {
        let Some((op, flags, length)) = self.next_packet(memory, chain, buffers)? else {
            return Ok(None);
        };
        self.owes_credit = false;
        self.told = self.passed;
        let header = Header {
            len: length.into(),
            op: op.into(),
            flags: flags.into(),
            buf_alloc: BUFFER.into(),
            fwd_cnt: self.passed.into(),
            ..Header::reset(guest_cid, self.ports)
        };
        chain.write(memory, 0, header.as_bytes()).map_err(|_| Broken)?;
        Ok(Some(HEADER.saturating_add(length)))
    }

    /// Operation, flags and length of the next packet. Its data is in `chain` already.
    fn next_packet(
        &mut self,
        memory: &GuestMemory,
        chain: &Chain,
        buffers: &mut Iovecs,
    ) -> Result<Option<(u16, u32, u32)>, Broken> {
        match (self.stage, self.handshake) {
            (Stage::Listening, _) | (Stage::Requested, Handshake::Sent) => return Ok(None),
            (Stage::Requested, Handshake::Due) => {
                self.handshake = Handshake::Sent;
                return Ok(Some((op::REQUEST, 0, 0)));
            }
            (Stage::Open, Handshake::Due) => {
                self.handshake = Handshake::Sent;
                return Ok(Some((op::RESPONSE, 0, 0)));
            }
            (Stage::Open, Handshake::Sent) => {}
        }
        if self.reads() {
            let room = chain.writable_len().saturating_sub(HEADER);
            let most = room.min(MAX_DATA).min(self.credit());
            if most > 0 {
                let count = self.read(memory, chain, most, buffers)?;
                if count > 0 {
                    return Ok(Some((op::RW, 0, count)));
                }
            } else if !mem::replace(&mut self.asked_credit, true) {
                return Ok(Some((op::CREDIT_REQUEST, 0, 0)));
            }
        }
        let shutdown = self.shutdown();
        if shutdown & !self.sent_shutdown != 0 {
            self.sent_shutdown |= shutdown;
            return Ok(Some((op::SHUTDOWN, self.sent_shutdown, 0)));
        }
        Ok(self.owes_credit.then_some((op::CREDIT_UPDATE, 0, 0)))
    }

    /// Flags of SHUTDOWN for the host's end.
    fn shutdown(&self) -> u32 {
        match (self.ended, self.stream.is_hung_up()) {
            (false, _) => 0,
            (true, false) if self.guest_shutdown & NO_RECEIVE != 0 => 0,
            (true, false) => NO_SEND,
            (true, true) => NO_MORE,
        }
    }

    /// Reads data of the host's end into `chain`, behind the header. 0 when there is none.
    fn read(
        &mut self,
        memory: &GuestMemory,
        chain: &Chain,
        most: u32,
        buffers: &mut Iovecs,
    ) -> Result<u32, Broken> {
        buffers.clear();
        buffers
            .append(chain.writable(), HEADER, most)
            .map_err(|_| Broken)?;
        match buffers.receive(&self.stream) {
            Ok(0) => self.ended = true,
            Ok(count) => {
                let count = u32::try_from(count).map_err(|_| Broken)?;
                chain.mark_written(memory, HEADER, count);
                self.sent = self.sent.wrapping_add(count);
                return Ok(count);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // The host's end was closed with data that it had not read.
            Err(_) => self.ended = true,
        }
        Ok(0)
    }
}
