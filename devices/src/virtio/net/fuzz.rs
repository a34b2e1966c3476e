//! Fuzzer of a network interface. It interprets arbitrary bytes as actions of a hostile driver and
//! of an unreliable host on a pair of queues and the control queue.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex},
};

use vm_memory::{Bytes, GuestAddress};
use vmm_base::sys::Iovecs;
use zerocopy::FromBytes;

use super::{
    Net, NetControl, NetOptions,
    header::{HEADER, Header, MAX_FRAME},
};
use crate::{
    net::{NetBackend, Offloads},
    virtio::{
        device::VirtioDevice,
        testing::{Bare, Input, Layout},
    },
};

/// Guest memory: two regions with a hole between them.
const REGION: u64 = 1 << 17;
const HOLE_END: u64 = 1 << 18;
const MEMORY_END: u64 = HOLE_END + REGION;
/// Rings of a queue, 8 KiB each; buffers are behind them.
const RING: u64 = 0x2000;
const AVAIL: u64 = 0x800;
const USED: u64 = 0x1000;
const QUEUES: u16 = 3;
const DATA: u64 = 0x8000;
/// Size of each queue.
const SIZE: u16 = 64;

/// Mock of the host: packets for the guest, and results for the guest's packets.
#[derive(Default)]
struct Host {
    packets: VecDeque<Vec<u8>>,
    /// Errors for the next packets that are sent.
    failures: VecDeque<io::ErrorKind>,
    sent: u64,
    features: u64,
}

struct Mock {
    host: Arc<Mutex<Host>>,
    /// Never readable: the test itself reports events.
    fd: OwnedFd,
}

impl AsFd for Mock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl NetBackend for Mock {
    fn capabilities(&self) -> Offloads {
        Offloads::all()
    }

    fn receive(&self, buffers: &Iovecs) -> io::Result<usize> {
        let packet = self.host.lock().unwrap().packets.pop_front();
        let packet = packet.ok_or(io::ErrorKind::WouldBlock)?;
        // As a socket does: what does not fit is cut off.
        let room = buffers.len().min(packet.len());
        let (near, far) = std::os::unix::net::UnixDatagram::pair()?;
        far.send(&packet[..room])?;
        buffers.receive(near)
    }

    fn receive_into(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let packet = self.host.lock().unwrap().packets.pop_front();
        let packet = packet.ok_or(io::ErrorKind::WouldBlock)?;
        let length = packet.len().min(buffer.len());
        buffer[..length].copy_from_slice(&packet[..length]);
        Ok(length)
    }

    fn send(&self, header: &[u8], packet: &mut Iovecs) -> io::Result<()> {
        let mut host = self.host.lock().unwrap();
        if let Some(kind) = host.failures.pop_front() {
            return Err(kind.into());
        }
        // The beginning of the frame may follow the header at once.
        let (header, begin) = header.split_at(HEADER as usize);
        let length = u32::try_from(begin.len() + packet.len()).unwrap();
        assert!((14..=MAX_FRAME).contains(&length), "a frame of {length} bytes");
        check(&Header::read_from_bytes(header).unwrap(), length, host.features);
        // The device's announcements do not count as packets of the guest.
        host.sent += u64::from(!packet.is_empty());
        Ok(())
    }

    fn set_offloads(&self, _offloads: Offloads) -> io::Result<()> {
        Ok(())
    }

    fn set_attached(&self, _attached: bool) -> io::Result<()> {
        panic!("there is one queue");
    }
}

/// A header that the host may be given.
fn check(header: &Header, length: u32, features: u64) {
    assert_eq!(header.num_buffers.get(), 0);
    match header.flags {
        0 => assert_eq!(header.gso_type, 0),
        1 => {
            assert!(features & 1 != 0, "a checksum that was not negotiated");
            let end = u32::from(header.csum_start.get()) + u32::from(header.csum_offset.get()) + 2;
            assert!(end <= length, "a checksum behind the packet");
        }
        flags => panic!("flags {flags:#x}"),
    }
    let bit = match header.gso_type & 0x7f {
        0 => return assert_eq!(header.gso_size.get(), 0),
        1 => 11,
        4 => 12,
        5 => 56,
        kind => panic!("segments of kind {kind}"),
    };
    assert!(features >> bit & 1 == 1 && header.gso_size.get() != 0);
    assert!(u32::from(header.hdr_len.get()) <= length);
}

/// A driver that may do anything.
struct Guest<'a> {
    input: Input<'a>,
    bare: Bare,
    host: Arc<Mutex<Host>>,
    control: NetControl,
    front: Net,
    next: [u16; QUEUES as usize],
}

/// Entry function of the fuzzer. Panics if the device violates an invariant: it must not pass the
/// host a header that was not negotiated or points outside the packet, return more buffers than it
/// took, miscount, or panic.
pub fn queue(data: &[u8]) {
    let mut input = Input(data);
    // CSUM to MRG_RXBUF, STATUS to CTRL_MAC_ADDR without MQ, EVENT_IDX; USO.
    let choice = input.quad();
    let mask = 0xffff | 0xbf << 16 | 1 << 29 | 7 << 54;
    let features = choice & mask | 1 << 32;
    let mut guest = Guest::new(input, features);
    while !guest.input.is_empty() {
        guest.step();
        guest.check();
    }
    guest.reset();
}

impl<'a> Guest<'a> {
    fn new(input: Input<'a>, features: u64) -> Self {
        let host = Arc::new(Mutex::new(Host::default()));
        let mock = Mock {
            host: Arc::clone(&host),
            fd: rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap(),
        };
        let options = NetOptions::new("fuzz", [0x52, 0x54, 0, 1, 2, 3], 1500);
        let mut front = Net::new(vec![Box::new(mock)], options);
        let features = features & (front.features() | 1 << 29 | 1 << 32);
        host.lock().unwrap().features = features;
        let layout = Layout {
            regions: [(0, REGION), (HOLE_END, MEMORY_END)],
            rings: (0, DATA),
            space: RING,
            avail: AVAIL,
            used: USED,
            size: SIZE,
        };
        Self {
            input,
            bare: Bare::new(&mut front, features, layout),
            host,
            control: front.control(),
            front,
            next: [0; QUEUES as usize],
        }
    }

    /// Somewhere in memory, most often.
    fn address(&mut self) -> u64 {
        self.input.address(MEMORY_END, 0..DATA, DATA)
    }

    fn length(&mut self) -> u32 {
        match self.input.byte() % 8 {
            0 => self.input.quad() as u32,
            1 => u32::from(self.input.byte()),
            2 => HEADER,
            3 => u32::from(self.input.word()),
            _ => 14 + u32::from(self.input.byte()) * 8,
        }
    }

    fn step(&mut self) {
        let queue = u16::from(self.input.byte()) % QUEUES;
        match self.input.byte() % 16 {
            0 => {
                let (at, address, length) = (self.input.word(), self.address(), self.length());
                let (flags, next) = (self.input.word(), self.input.word());
                self.bare.describe(queue, at, address, length, flags, next);
            }
            1 => {
                let head = self.input.word();
                self.bare.offer(queue, head);
            }
            2 => {
                let index = self.input.word();
                self.bare.set_available(queue, index);
            }
            3 => {
                let kinds = [
                    io::ErrorKind::WouldBlock,
                    io::ErrorKind::InvalidInput,
                    io::ErrorKind::BrokenPipe,
                ];
                let kind = kinds[usize::from(self.input.byte() % 3)];
                self.host.lock().unwrap().failures.push_back(kind);
            }
            4 => {
                self.pause();
                self.bare.start();
                self.run();
            }
            5 => self.reset(),
            6 => {
                let up = self.input.byte() & 1 == 1;
                self.control.set_link(up);
            }
            7 => self.control.announce(),
            8 | 9 => self.packet(),
            10 => self.event(),
            11 => {
                self.kick(queue);
            }
            12 => self.command(),
            13 => self.buffers(),
            _ => self.send(),
        }
    }

    /// A packet of the host's comes.
    fn packet(&mut self) {
        let length = usize::from(self.input.word());
        let mut packet = vec![self.input.byte(); length];
        for byte in packet.iter_mut().take(30) {
            *byte = self.input.byte();
        }
        self.host.lock().unwrap().packets.push_back(packet);
        self.event();
    }

    /// A packet as a driver sends it, more or less.
    fn send(&mut self) {
        let place = DATA + u64::from(self.input.byte()) * 16;
        let mut header = [0_u8; HEADER as usize];
        let kind = self.input.byte();
        header[0] = kind & 1;
        header[1] = [0, 0, 1, 4, 5, 3, 0x81, 0x85][usize::from(kind >> 1 & 7)];
        for byte in &mut header[2..10] {
            *byte = self.input.byte();
        }
        if kind & 0x80 != 0 {
            (header[3], header[7], header[9]) = (0, 0, 0);
        }
        let _ = self.bare.memory.write_slice(&header, GuestAddress(place));
        let mut parts = vec![(place, HEADER, 0)];
        for _ in 0..self.input.byte() % 4 {
            parts.push((self.address(), self.length(), 0));
        }
        self.chain(1, &parts);
    }

    /// Offers buffers for incoming packets.
    fn buffers(&mut self) {
        let mut parts = Vec::new();
        for _ in 0..1 + self.input.byte() % 4 {
            parts.push((self.address(), self.length(), 2));
        }
        self.chain(0, &parts);
    }

    /// A command, more or less.
    fn command(&mut self) {
        let place = DATA + u64::from(self.input.byte()) * 16;
        let (class, number) = (self.input.byte() % 8, self.input.byte() % 8);
        let length = self.input.byte() % 32;
        let mut bytes = vec![class, number];
        bytes.extend((0..length).map(|_| self.input.byte()));
        let _ = self.bare.memory.write_slice(&bytes, GuestAddress(place));
        let answer = self.address();
        self.chain(2, &[(place, bytes.len() as u32, 0), (answer, 1, 2)]);
    }

    fn chain(&mut self, queue: u16, parts: &[(u64, u32, u16)]) {
        let first = self.next[usize::from(queue)];
        self.bare.describe_chain(queue, first % SIZE, parts);
        self.next[usize::from(queue)] = first.wrapping_add(parts.len() as u16);
        self.bare.offer(queue, first % SIZE);
        self.kick(queue);
    }

    fn kick(&mut self, queue: u16) {
        self.bare.notify(queue);
        self.run();
    }

    /// The host has something, or takes something again.
    fn event(&mut self) {
        if !self.bare.event() {
            self.reset();
            self.run();
        }
    }

    fn run(&mut self) {
        while !self.bare.run() {
            self.reset();
        }
    }

    /// A pause goes over a saved state.
    fn pause(&mut self) {
        self.bare.drain();
        let back = self.bare.handler.save().unwrap();
        self.bare.handler.restore(&back, &self.bare.memory).unwrap();
        let front = self.front.save().unwrap();
        self.front.restore(&front).unwrap();
        assert_eq!(self.front.save().unwrap(), front);
    }

    /// A reset, and a start with empty rings.
    fn reset(&mut self) {
        self.pause();
        self.bare.reset();
        self.front.reset();
        self.next = Default::default();
        self.bare.start();
    }

    /// Checks that the device returns only taken chains, and that its counter matches the packets
    /// at the host.
    fn check(&self) {
        for queue in 0..QUEUES {
            let outstanding = self.bare.outstanding(queue);
            assert!(outstanding <= if queue == 0 { SIZE } else { 0 }, "{queue}");
        }
        let stats = self.control.stats();
        assert_eq!(stats.sent, self.host.lock().unwrap().sent);
        assert!(stats.send_invalid <= stats.send_dropped);
    }
}
