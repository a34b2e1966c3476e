//! The other end of the cable: sockets that keep packets apart in place of a tap's queues.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Condvar, Mutex},
    thread,
    time::Instant,
};

use rustix::{
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
};
use vmm_base::sys::Iovecs;

use super::{
    super::{Net, NetOptions},
    MAC,
};
use crate::{
    net::{NetBackend, Offloads},
    virtio::testing::PATIENCE,
};

/// Calls that the interface received.
#[derive(Default)]
pub struct Told {
    pub offloads: Mutex<Vec<Offloads>>,
    /// By queue.
    attached: Mutex<Vec<bool>>,
    changed: Condvar,
}

impl Told {
    pub fn last_offloads(&self) -> Option<Offloads> {
        self.offloads.lock().unwrap().last().copied()
    }

    pub fn attached(&self) -> Vec<bool> {
        self.attached.lock().unwrap().clone()
    }

    /// Waits until just the queues with `wanted` set are attached.
    pub fn wait_attached(&self, wanted: &[bool]) {
        let attached = self.attached.lock().unwrap();
        let differs = |now: &mut Vec<bool>| now != wanted;
        let (now, result) = self
            .changed
            .wait_timeout_while(attached, PATIENCE, differs)
            .unwrap();
        assert!(!result.timed_out(), "{now:?} instead of {wanted:?}");
    }
}

struct Socket {
    fd: OwnedFd,
    queue: usize,
    told: Arc<Told>,
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl NetBackend for Socket {
    fn capabilities(&self) -> Offloads {
        Offloads::all()
    }
    fn receive(&self, buffers: &Iovecs) -> io::Result<usize> {
        buffers.receive(&self.fd)
    }
    fn receive_into(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(&self.fd, buffer)?)
    }
    fn send(&self, header: &[u8], packet: &mut Iovecs) -> io::Result<()> {
        packet.send(&self.fd, header).map(|_| ())
    }
    fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        self.told.offloads.lock().unwrap().push(offloads);
        Ok(())
    }
    fn set_attached(&self, attached: bool) -> io::Result<()> {
        let mut queues = self.told.attached.lock().unwrap();
        // As Linux has it.
        if queues[self.queue] == attached {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        queues[self.queue] = attached;
        self.told.changed.notify_all();
        Ok(())
    }
}

#[derive(Default)]
struct Arrived {
    packets: Mutex<VecDeque<Vec<u8>>>,
    changed: Condvar,
}

pub struct Peer {
    ends: Vec<Arc<OwnedFd>>,
    pub told: Arc<Told>,
    next: u64,
    arrived: Vec<Arc<Arrived>>,
}

impl Peer {
    /// With an interface of one pair of queues that can do everything.
    pub fn new() -> (Self, Box<Net>) {
        Self::with(1, NetOptions::new("eth0", MAC, 1500))
    }

    pub fn with(pairs: usize, options: NetOptions) -> (Self, Box<Net>) {
        let told = Arc::<Told>::default();
        *told.attached.lock().unwrap() = vec![true; pairs];
        let mut ends = Vec::new();
        let mut backends: Vec<Box<dyn NetBackend>> = Vec::new();
        for queue in 0..pairs {
            let none = SocketFlags::CLOEXEC;
            let (near, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, none, None).unwrap();
            fcntl_setfl(&near, fcntl_getfl(&near).unwrap() | OFlags::NONBLOCK).unwrap();
            ends.push(Arc::new(far));
            backends.push(Box::new(Socket {
                fd: near,
                queue,
                told: Arc::clone(&told),
            }));
        }
        let peer = Self {
            ends,
            told,
            next: 0,
            arrived: Vec::new(),
        };
        (peer, Box::new(Net::new(backends, options)))
    }

    /// A number that was not used yet.
    pub fn next(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Takes all that arrives from now on, on threads that end with the device.
    pub fn drain(&mut self) {
        for fd in &self.ends {
            let (fd, arrived) = (Arc::clone(fd), Arc::<Arrived>::default());
            self.arrived.push(Arc::clone(&arrived));
            thread::spawn(move || {
                let mut buffer = vec![0; 70_000];
                while let Ok(length @ 1..) = rustix::io::read(&fd, &mut buffer) {
                    arrived
                        .packets
                        .lock()
                        .unwrap()
                        .push_back(buffer[..length].to_vec());
                    arrived.changed.notify_all();
                }
            });
        }
    }

    /// Waits until `wanted` arrives over the pair, and drops earlier packets. Requires
    /// [`drain`](Self::drain).
    pub fn wait_for(&self, pair: u16, wanted: &[u8]) {
        let arrived = &self.arrived[usize::from(pair)];
        let deadline = Instant::now() + PATIENCE;
        let mut packets = arrived.packets.lock().unwrap();
        loop {
            while let Some(packet) = packets.pop_front() {
                if packet == wanted {
                    return;
                }
            }
            assert!(Instant::now() < deadline, "the packet does not arrive");
            packets = arrived.changed.wait_timeout(packets, PATIENCE).unwrap().0;
        }
    }

    /// Returns the number of packets that have arrived over the pair.
    pub fn arrived(&self, pair: usize) -> usize {
        self.arrived[pair].packets.lock().unwrap().len()
    }

    pub fn send(&self, packet: &[u8]) {
        self.send_to(0, packet);
    }

    pub fn send_to(&self, pair: u16, packet: &[u8]) {
        let fd = &self.ends[usize::from(pair)];
        assert_eq!(rustix::io::write(fd, packet).unwrap(), packet.len());
    }

    pub fn receive(&self) -> Vec<u8> {
        self.receive_from(0)
    }

    pub fn receive_from(&self, pair: u16) -> Vec<u8> {
        let mut buffer = vec![0; 70_000];
        let length = rustix::io::read(&self.ends[usize::from(pair)], &mut buffer).unwrap();
        buffer.truncate(length);
        buffer
    }
}

/// A packet with an empty header and `length` bytes behind it that begin with `number`.
pub fn packet(number: u64, length: usize) -> Vec<u8> {
    let mut packet = vec![0; 12];
    packet.extend(number.to_le_bytes());
    packet.extend((0..length).map(|at| u8::try_from(at % 253).unwrap()));
    packet.truncate(12 + length);
    packet
}
