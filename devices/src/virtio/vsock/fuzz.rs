//! Fuzzer of the socket device: interprets arbitrary bytes as actions of a hostile driver and of
//! clients on the host.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]

use std::{collections::VecDeque, os::fd::OwnedFd, sync::Arc};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use vm_memory::{Bytes, GuestAddress};
use zerocopy::IntoBytes as _;

use super::{
    Direction, EVENT, RX, TX, Vsock, VsockHost,
    packet::{HEADER, HOST_CID, Header, STREAM},
};
use crate::virtio::testing::{Bare, Input, Layout};

const CID: u32 = 3;
const SIZE: u16 = 16;
const REGIONS: [(u64, u64); 2] = [(0, 1 << 20), (2 << 20, 4 << 20)];
const RINGS: u64 = 0x1000;
const DATA: u64 = 0x1_0000;
/// Most clients at a time.
const CLIENTS: usize = 8;

const WRITE: u16 = 2;

struct Guest<'a> {
    input: Input<'a>,
    bare: Bare,
    host: Arc<VsockHost>,
    clients: VecDeque<OwnedFd>,
}

/// Entry function of the fuzzer. Panics if the device loses a buffer, works without end, or panics
/// itself.
pub fn driver(data: &[u8]) {
    let mut input = Input(data);
    let mut front = Vsock::new(CID).unwrap();
    let layout = Layout {
        regions: REGIONS,
        rings: (RINGS, DATA),
        space: 0x2000,
        avail: 0x1000,
        used: 0x1800,
        size: SIZE,
    };
    let event_idx = u64::from(input.byte() & 1) << 29;
    let bare = Bare::new(&mut front, 1 << 32 | event_idx, layout);
    let mut guest = Guest {
        input,
        bare,
        host: front.host(),
        clients: VecDeque::new(),
    };
    while !guest.input.is_empty() {
        guest.step();
    }
    guest.bare.pause();
}

/// Two ends of a connection that do not block.
pub(super) fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
}

impl Guest<'_> {
    fn step(&mut self) {
        match self.input.byte() % 20 {
            0 => {
                let (queue, at) = (self.queue(), self.input.word());
                let address = self.input.address(REGIONS[0].1, RINGS..DATA, DATA);
                let (length, flags, next) = (self.input.word(), self.input.word(), self.input.word());
                self.bare.describe(queue, at, address, length.into(), flags, next);
            }
            1 => {
                let (queue, head) = (self.queue(), self.input.word());
                self.bare.offer(queue, head);
                self.bare.kick(queue);
            }
            2 => {
                self.bare.pause();
                self.bare.resume();
            }
            3 => self.bare.restart(),
            4 => {
                let section = self.saved();
                self.bare.handler.restore(&section, &self.bare.memory).unwrap();
                self.bare.resume();
            }
            5 | 6 => {
                let direction = match self.input.byte() & 1 {
                    0 => Direction::Connect,
                    _ => Direction::Accept,
                };
                let (client, end) = pair();
                let port = u32::from(self.input.byte() % 4);
                if self.host.open(direction, port, end).is_ok() {
                    self.clients.push_back(client);
                    self.clients.truncate(CLIENTS);
                }
            }
            7 | 8 => {
                let data = vec![7; usize::from(self.input.word())];
                // A client whose connection has ended cannot send.
                let _ended = self
                    .clients
                    .front()
                    .map(|client| rustix::io::write(client, &data));
            }
            9 => {
                let mut data = vec![0; usize::from(self.input.word())];
                let _ended = self
                    .clients
                    .front()
                    .map(|client| rustix::io::read(client, &mut data));
            }
            10 => drop(self.clients.pop_front()),
            11 => self.clients.rotate_left(usize::from(self.clients.len() > 1)),
            12 => self.buffer(EVENT, 4, WRITE),
            13 | 14 => {
                let length = HEADER + u32::from(self.input.word());
                self.buffer(RX, length, WRITE);
            }
            _ => self.packet(),
        }
        if !self.bare.events() {
            self.bare.restart();
        }
    }

    fn queue(&mut self) -> u16 {
        u16::from(self.input.byte()) % self.bare.queues()
    }

    /// A packet of a driver, more or less.
    fn packet(&mut self) {
        let header = Header {
            src_cid: u64::from(CID).into(),
            dst_cid: (HOST_CID + u64::from(self.input.byte() / 255)).into(),
            src_port: u32::from(self.input.byte() % 4).into(),
            dst_port: match self.input.byte() {
                port @ 0..4 => u32::from(port).into(),
                port => (1024 + u32::from(port % 8)).into(),
            },
            len: u32::from(self.input.word()).into(),
            kind: (STREAM + u16::from(self.input.byte() / 255)).into(),
            op: u16::from(self.input.byte() % 9).into(),
            flags: u32::from(self.input.byte() % 4).into(),
            buf_alloc: u32::from(self.input.word()).into(),
            fwd_cnt: u32::from(self.input.word()).into(),
        };
        let place = GuestAddress(DATA + u64::from(self.input.byte()) * 64);
        self.bare.memory.write_slice(header.as_bytes(), place).unwrap();
        let length = HEADER + u32::from(self.input.word());
        self.chain(TX, place.0, length, 0);
    }

    fn buffer(&mut self, queue: u16, length: u32, flags: u16) {
        let place = DATA + u64::from(self.input.byte()) * 64;
        self.chain(queue, place, length, flags);
    }

    fn chain(&mut self, queue: u16, place: u64, length: u32, flags: u16) {
        let head = u16::from(self.input.byte()) % SIZE;
        self.bare.describe_chain(queue, head, &[(place, length, flags)]);
        self.bare.offer(queue, head);
        self.bare.kick(queue);
    }

    fn saved(&mut self) -> crate::state::Section {
        self.bare.pause();
        self.bare.handler.save().unwrap()
    }
}
