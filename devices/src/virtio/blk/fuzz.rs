//! Fuzzer of a disk's queue: interprets arbitrary bytes as actions of a hostile driver and of an
//! unreliable host.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]

use vm_memory::{Bytes, GuestAddress};

use super::{
    BlkOptions, OnError,
    harness::{DATA, DESC, Harness, MEMORY_END, SIZE, host},
};
use crate::virtio::testing::{Input, describe};

const CAPACITY: u64 = 1 << 16;

/// A driver that may do anything.
struct Guest<'a> {
    input: Input<'a>,
    harness: Harness,
    next_desc: u16,
}

/// Entry function of the fuzzer. Panics if the device violates an invariant: it must not access
/// anything outside the disk or the guest's memory, write to read-only parts, return more requests
/// than it took, or panic.
pub fn queue(data: &[u8]) {
    let mut input = Input(data);
    let (setting, features) = (input.byte(), input.byte());
    let block = if setting & 1 == 0 { 512 } else { 4096 };
    let options = BlkOptions {
        name: "fuzz".into(),
        serial: "serial".into(),
        queues: 1,
        logical_block: block,
        on_error: if setting & 2 == 0 {
            OnError::Report
        } else {
            OnError::Hold
        },
        limiter: None,
    };
    let mut host = host(CAPACITY, setting & 12 == 12, block);
    host.eager = setting & 16 != 0;
    // FLUSH, DISCARD, WRITE_ZEROES, and EVENT_IDX.
    let features = 1 << 32
        | u64::from(features & 1) << 9
        | u64::from(features >> 1 & 1) << 13
        | u64::from(features >> 2 & 1) << 14
        | u64::from(features >> 3 & 1) << 29;
    let mut guest = Guest {
        input,
        harness: Harness::new(host, options, features),
        next_desc: 0,
    };
    while !guest.input.is_empty() {
        guest.step();
        guest.check();
    }
    guest.harness.finish_all();
    guest.check();
    guest.harness.reset();
}

impl Guest<'_> {
    /// Somewhere in memory, most often.
    fn address(&mut self) -> u64 {
        self.input.address(MEMORY_END, DESC..DATA, DATA)
    }

    fn length(&mut self) -> u32 {
        match self.input.byte() % 8 {
            0 => self.input.quad() as u32,
            1 => u32::from(self.input.byte()),
            2 => 0,
            3 => 16,
            4 => 1,
            _ => u32::from(self.input.byte() % 16) * 512,
        }
    }

    fn sector(&mut self) -> u64 {
        match self.input.byte() % 4 {
            0 => self.input.quad(),
            _ => u64::from(self.input.byte()) % (CAPACITY / 512 + 2),
        }
    }

    fn step(&mut self) {
        match self.input.byte() % 16 {
            0 => {
                let (at, address, length) = (self.input.word(), self.address(), self.length());
                let (flags, next) = (self.input.word(), self.input.word());
                self.harness.describe(0, at, address, length, flags, next);
            }
            1 => {
                let (address, value) = (self.address(), self.input.quad());
                // Beyond memory is not the guest's either.
                let _ = self.harness.memory.write_obj(value, GuestAddress(address));
            }
            2 => {
                let head = self.input.word();
                self.harness.offer(0, head);
            }
            3 => {
                let index = self.input.word();
                self.harness.set_available(0, index);
            }
            4 => {
                let count = self.input.byte() % 4;
                self.harness.host.lock().unwrap().failures = count.into();
            }
            5 => self.harness.pause_and_resume(),
            6 => {
                self.harness.reset();
                self.next_desc = 0;
            }
            7 | 8 => self.harness.kick(),
            9 | 10 => {
                let which = self.input.byte();
                if self.harness.host.lock().unwrap().finish(which.into()) {
                    self.harness.event();
                }
            }
            _ => self.request(),
        }
    }

    /// A request as a driver makes it, more or less.
    fn request(&mut self) {
        let kind = match self.input.byte() % 8 {
            0 => u32::from(self.input.byte()),
            1 => 4,
            2 => 8,
            3 => 11,
            4 => 13,
            odd => u32::from(odd & 1),
        };
        let sector = self.sector();
        let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        let place = DATA + u64::from(self.input.byte()) * 16;
        self.harness
            .memory
            .write_slice(&header, GuestAddress(place))
            .unwrap();
        let mut parts = vec![(place, 16, 0)];
        for _ in 0..self.input.byte() % 5 {
            let (address, mut length) = (self.address(), self.length());
            let writable = self.input.byte() & 3 != u8::from(kind == 0);
            if matches!(kind, 11 | 13) {
                let range = [
                    &self.sector().to_le_bytes()[..],
                    &u32::from(self.input.byte()).to_le_bytes(),
                    &u32::from(self.input.byte() % 3).to_le_bytes(),
                ];
                let _ = self
                    .harness
                    .memory
                    .write_slice(&range.concat(), GuestAddress(address));
                length = 16;
            }
            parts.push((address, length, if writable && kind == 0 { 2 } else { 0 }));
        }
        parts.push((
            place + 16,
            1 + u32::from(self.input.byte().is_multiple_of(3)) * 19,
            2,
        ));
        let head = self.next_desc % SIZE;
        let indirect = self.input.byte().is_multiple_of(4);
        if indirect {
            let table = DATA + 0x1_0000;
            for (at, (address, length, flags)) in (0_u16..).zip(&parts) {
                let more = u16::from(usize::from(at) + 1 < parts.len());
                let memory = &self.harness.memory;
                describe(memory, table, at, *address, *length, flags | more, at + 1);
            }
            self.harness
                .describe(0, head, table, parts.len() as u32 * 16, 4, 0);
        } else {
            self.harness.describe_chain(0, head, &parts);
        }
        self.next_desc = self.next_desc.wrapping_add(parts.len() as u16);
        self.harness.offer(0, head);
    }

    /// Each request taken completes once or is still counted: none is lost, none completes twice.
    fn check(&self) {
        let stats = self.harness.control.stats();
        assert!(stats.held <= stats.in_flight, "{stats:?}");
        assert_eq!(
            stats.in_flight,
            u64::from(self.harness.outstanding(0)),
            "{stats:?}"
        );
    }
}
