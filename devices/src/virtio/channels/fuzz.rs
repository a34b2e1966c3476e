//! Fuzzer of the channels: interprets arbitrary bytes as actions of a hostile driver, among them control
//! messages, and of clients on the host.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]

use std::{
    collections::VecDeque,
    io::{Read as _, Write as _},
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    process,
    sync::atomic::{AtomicUsize, Ordering},
};

use vm_memory::{Bytes, GuestAddress};

use super::{Channel, Channels, F_MULTIPORT, protocol::Control};
use crate::virtio::testing::{Bare, Input, Layout};

const SIZE: u16 = 16;
const REGIONS: [(u64, u64); 2] = [(0, 1 << 20), (2 << 20, 4 << 20)];
const RINGS: u64 = 0x1000;
const DATA: u64 = 0x2_0000;
const CHANNELS: usize = 2;
/// Most clients at a time.
const CLIENTS: usize = 4;

const CONTROL_IN: u16 = 2;
const CONTROL_OUT: u16 = 3;
const WRITE: u16 = 2;

/// Numbers the devices of the process, whose sockets have names.
static DEVICES: AtomicUsize = AtomicUsize::new(0);

struct Guest<'a> {
    input: Input<'a>,
    bare: Bare,
    addresses: Vec<SocketAddr>,
    clients: VecDeque<UnixStream>,
}

/// Entry function of the fuzzer. Panics if the device loses a buffer, works without end, or panics
/// itself.
pub fn driver(data: &[u8]) {
    let mut input = Input(data);
    let number = DEVICES.fetch_add(1, Ordering::Relaxed);
    let address = |index| {
        let name = format!("vmmd-channels-{}-{number}-{index}", process::id());
        SocketAddr::from_abstract_name(name).unwrap()
    };
    let addresses: Vec<_> = (0..CHANNELS).map(address).collect();
    let channel = |(index, address): (usize, &SocketAddr)| Channel {
        name: format!("com.example.{index}"),
        listener: Some(UnixListener::bind_addr(address).unwrap()),
    };
    let channels = addresses.iter().enumerate().map(channel).collect();
    let mut front = Channels::new(channels, Box::new(|| ())).unwrap();
    let layout = Layout {
        regions: REGIONS,
        rings: (RINGS, DATA),
        space: 0x2000,
        avail: 0x1000,
        used: 0x1800,
        size: SIZE,
    };
    let first = input.byte();
    let event_idx = u64::from(first & 1) << 29;
    let multiport = if first & 0x80 == 0 { F_MULTIPORT } else { 0 };
    let bare = Bare::new(&mut front, 1 << 32 | event_idx | multiport, layout);
    let mut guest = Guest {
        input,
        bare,
        addresses,
        clients: VecDeque::new(),
    };
    while !guest.input.is_empty() {
        guest.step();
    }
    guest.bare.pause();
}

impl Guest<'_> {
    fn step(&mut self) {
        match self.input.byte() % 16 {
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
                self.bare.pause();
                let section = self.bare.handler.save().unwrap();
                self.bare.handler.restore(&section, &self.bare.memory).unwrap();
                self.bare.resume();
            }
            5 | 6 => {
                let address = &self.addresses[usize::from(self.input.byte()) % CHANNELS];
                // The queue of a listener can be full.
                if let Ok(client) = UnixStream::connect_addr(address) {
                    client.set_nonblocking(true).unwrap();
                    self.clients.push_back(client);
                    self.clients.truncate(CLIENTS);
                }
            }
            7 => {
                let data = vec![7; usize::from(self.input.word())];
                // A client whose connection has ended cannot send.
                let _ended = self.clients.front_mut().map(|client| client.write(&data));
            }
            8 => {
                let mut data = vec![0; usize::from(self.input.word())];
                let _ended = self.clients.front_mut().map(|client| client.read(&mut data));
            }
            9 => drop(self.clients.pop_front()),
            10 => self.clients.rotate_left(usize::from(self.clients.len() > 1)),
            11 => {
                let length = self.input.byte();
                self.buffer(CONTROL_IN, length.into(), WRITE);
            }
            12 | 13 => {
                let queue = 4 + self.queue() % 4;
                let (length, flags) = (self.input.word(), (1 - queue % 2) * WRITE);
                self.buffer(queue, length.into(), flags);
            }
            _ => self.message(),
        }
        if !self.bare.events() {
            self.bare.restart();
        }
    }

    fn queue(&mut self) -> u16 {
        u16::from(self.input.byte()) % self.bare.queues()
    }

    /// A control message of a driver, more or less.
    fn message(&mut self) {
        let control = Control {
            id: match self.input.byte() {
                id @ 0..5 => id.into(),
                id => u32::MAX - u32::from(id),
            },
            event: u16::from(self.input.byte() % 9),
            value: u16::from(self.input.byte() % 3),
        };
        let place = DATA + u64::from(self.input.byte()) * 64;
        let raw = control.encode("");
        self.bare.memory.write_slice(&raw, GuestAddress(place)).unwrap();
        let length = match self.input.byte() {
            short @ 0..8 => short.into(),
            _ => 8,
        };
        self.chain(CONTROL_OUT, place, length, 0);
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
}
