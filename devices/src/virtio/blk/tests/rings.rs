//! The driver's side of a [`Harness`].

use std::collections::HashMap;

use vm_memory::{Bytes, GuestAddress};

use crate::virtio::blk::harness::{AVAIL, DATA, HOLE_END, Harness, MEMORY_END, REGION, SIZE, USED};

/// A request, and how it lies in memory.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    pub(super) kind: u32,
    pub(super) sector: u64,
    /// Data to write, or the ranges.
    pub(super) outgoing: Vec<u8>,
    pub(super) incoming: usize,
    /// Where the readable and the writable bytes are cut into buffers, modulo their number.
    pub(super) cuts: (Vec<usize>, Vec<usize>),
    /// Bytes of the header that are missing.
    pub(super) short: usize,
}

/// Descriptors and writable buffers of a request.
type Given = (Vec<u16>, Vec<(u64, u32)>);

/// The driver: descriptors and buffers are used round and round, apart from those under way.
pub(super) struct Rings {
    pub(super) harness: Harness,
    seen: u16,
    free: Vec<u16>,
    /// By head.
    under_way: HashMap<u16, Given>,
    next: u64,
}

impl Rings {
    pub(super) fn new(harness: Harness) -> Self {
        Self {
            harness,
            seen: 0,
            free: (0..SIZE).collect(),
            under_way: HashMap::new(),
            next: DATA,
        }
    }

    /// Somewhere with that much room; a buffer may end where the first region does.
    fn room(&mut self, length: u64) -> u64 {
        let end = if self.next < REGION { REGION } else { MEMORY_END };
        if self.next + length > end {
            self.next = if self.next < REGION { HOLE_END } else { DATA };
        }
        let place = self.next;
        self.next += length;
        place
    }

    fn cut(&mut self, total: usize, cuts: &[usize]) -> Vec<(u64, u32)> {
        let mut points: Vec<usize> = cuts.iter().map(|cut| cut % (total + 1)).collect();
        points.extend([0, total]);
        points.sort_unstable();
        points
            .windows(2)
            .map(|pair| {
                let length = pair[1] - pair[0];
                (self.room(length as u64), u32::try_from(length).unwrap())
            })
            .collect()
    }

    /// `None` when the ring is full.
    pub(super) fn offer(&mut self, ask: &Ask) -> Option<u16> {
        let header = [&ask.kind.to_le_bytes()[..], &[0; 4], &ask.sector.to_le_bytes()].concat();
        let readable = [&header[..16 - ask.short], &ask.outgoing].concat();
        let out = self.cut(readable.len(), &ask.cuts.0);
        let back = self.cut(ask.incoming + 1, &ask.cuts.1);
        let count = out.len() + back.len();
        if self.free.len() < count {
            return None;
        }
        let mut left = &readable[..];
        for (address, length) in &out {
            let (now, rest) = left.split_at(*length as usize);
            self.harness
                .memory
                .write_slice(now, GuestAddress(*address))
                .unwrap();
            left = rest;
        }
        let descriptors = self.free.split_off(self.free.len() - count);
        let flags = out.iter().map(|_| 0_u16).chain(back.iter().map(|_| 2));
        for (at, ((address, length), flags)) in out.iter().chain(&back).zip(flags).enumerate() {
            let next = descriptors.get(at + 1).copied();
            let flags = flags | u16::from(next.is_some());
            self.harness
                .describe(0, descriptors[at], *address, *length, flags, next.unwrap_or(0));
        }
        let head = descriptors[0];
        self.under_way.insert(head, (descriptors, back));
        self.harness.offer(0, head);
        Some(head)
    }

    /// Records since the last call.
    pub(super) fn seen(&self) -> Vec<(u16, usize)> {
        std::mem::take(&mut self.harness.host.lock().unwrap().seen)
    }

    /// Answers since the last call. The driver wants to be told of the next one.
    pub(super) fn answers(&mut self) -> Vec<(u16, u8, Vec<u8>)> {
        let memory = self.harness.memory.clone();
        let used: u16 = memory.read_obj(GuestAddress(USED + 2)).unwrap();
        let mut answers = Vec::new();
        while self.seen != used {
            let slot = GuestAddress(USED + 4 + u64::from(self.seen % SIZE) * 8);
            let head = memory.read_obj::<u32>(slot).unwrap() as u16;
            self.seen = self.seen.wrapping_add(1);
            let (descriptors, buffers) = self.under_way.remove(&head).expect("answered twice");
            self.free.extend(descriptors);
            let mut bytes = Vec::new();
            for (address, length) in buffers {
                let mut piece = vec![0; length as usize];
                memory.read_slice(&mut piece, GuestAddress(address)).unwrap();
                bytes.extend(piece);
            }
            let status = bytes.pop().unwrap();
            answers.push((head, status, bytes));
        }
        let used_event = GuestAddress(AVAIL + 4 + u64::from(SIZE) * 2);
        memory.write_obj(self.seen, used_event).unwrap();
        answers
    }
}
