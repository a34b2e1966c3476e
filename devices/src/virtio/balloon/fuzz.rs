//! Fuzzer of the balloon: interprets arbitrary bytes as actions of a hostile driver.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]

use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress};

use super::{
    BalloonOptions, PAGE,
    config::{self, F_STATS_VQ, Role},
    harness::{DATA, Harness, REGIONS, RINGS, SIZE},
};
use crate::virtio::{device::VirtioDevice, testing::Input};

/// A driver that may do anything.
struct Guest<'a> {
    input: Input<'a>,
    harness: Harness,
    features: u64,
}

/// Entry function of the fuzzer. Panics if the balloon violates an invariant: it must not give back
/// memory outside guest memory, count pages that it does not hold, lose a request, answer a request
/// twice, work without end, or panic.
pub fn queue(data: &[u8]) {
    let mut input = Input(data);
    let (setting, features) = (input.byte(), input.byte());
    let options = BalloonOptions {
        free_page_reporting: setting & 1 == 1,
        target: input.word().into(),
    };
    let offered = config::features(options.free_page_reporting);
    let features = offered & u64::from(features) | u64::from(setting >> 1 & 1) << 29;
    let harness = Harness::new(features, options);
    let mut guest = Guest {
        input,
        harness,
        features,
    };
    while !guest.input.is_empty() {
        guest.step();
        guest.check();
    }
    guest.harness.pause_and_resume();
    guest.check();
    guest.harness.reset();
}

impl Guest<'_> {
    /// Somewhere in memory, most often.
    fn address(&mut self) -> u64 {
        match self.input.byte() % 8 {
            3 => REGIONS[1].start + u64::from(self.input.word() % 512) * PAGE,
            _ => self.input.address(REGIONS[0].end, RINGS..DATA, DATA),
        }
    }

    fn length(&mut self) -> u32 {
        match self.input.byte() % 8 {
            0 => self.input.quad() as u32,
            1 => u32::from(self.input.byte()),
            2 => 0,
            3 => 1 << 20,
            4 => u32::from(self.input.byte()) * PAGE as u32,
            _ => u32::from(self.input.byte()) * 4,
        }
    }

    /// Returns a page number, most often of a page in memory.
    fn number(&mut self) -> u32 {
        match self.input.byte() % 8 {
            0 => self.input.quad() as u32,
            1 => 200 + u32::from(self.input.byte()),
            2 => 1000 + u32::from(self.input.byte() % 32),
            _ => 512 + u32::from(self.input.byte()),
        }
    }

    fn queue(&mut self) -> u16 {
        u16::from(self.input.byte()) % self.harness.queues()
    }

    fn step(&mut self) {
        match self.input.byte() % 16 {
            0 => {
                let (queue, at) = (self.queue(), self.input.word());
                let (address, length) = (self.address(), self.length());
                let (flags, next) = (self.input.word(), self.input.word());
                self.harness.describe(queue, at, address, length, flags, next);
            }
            1 => {
                let (address, value) = (self.address(), self.input.quad());
                // Beyond memory is not the guest's either.
                let _ = self.harness.memory.write_obj(value, GuestAddress(address));
            }
            2 => {
                let (queue, head) = (self.queue(), self.input.word());
                self.harness.offer(queue, head);
            }
            3 => {
                let (offset, width) = (self.input.byte() % 16, self.input.byte() % 8);
                let value = self.input.quad().to_le_bytes();
                let length = usize::from(width).min(16 - usize::from(offset));
                self.harness.front.write_config(offset.into(), &value[..length]);
            }
            4 => {
                let count = self.input.byte() % 4;
                self.harness.host.failures.store(count.into(), Ordering::SeqCst);
            }
            5 => self.harness.pause_and_resume(),
            6 => {
                self.harness.reset();
            }
            7 => self.harness.asked(),
            8 | 9 => {
                let queue = self.queue();
                self.harness.kick(queue);
            }
            10 => {
                let queue = self.queue();
                self.harness.kick_once(queue);
            }
            _ => self.request(),
        }
    }

    /// A request as a driver makes it, more or less.
    fn request(&mut self) {
        let queue = self.queue();
        let place = DATA + u64::from(self.input.byte()) * 64;
        let parts = 1 + u16::from(self.input.byte() % 4);
        let head = self.input.word() % SIZE;
        let report = Role::of(queue, self.features) == Some(Role::Report);
        let parts: Vec<_> = (0..parts)
            .map(|part| {
                if report {
                    return (self.address(), self.length(), 2);
                }
                let place = place + u64::from(part) * 1024;
                let count = self.input.byte() % 64;
                for at in 0..u64::from(count) {
                    let number = self.number();
                    self.harness
                        .memory
                        .write_obj(number, GuestAddress(place + at * 4))
                        .unwrap();
                }
                (place, u32::from(count) * 4, 0)
            })
            .collect();
        self.harness.describe_chain(queue, head, &parts);
        self.harness.offer(queue, head);
    }

    fn check(&self) {
        let stats = self.harness.control.stats();
        let memory: u64 = REGIONS.iter().map(|region| region.end - region.start).sum();
        assert!(stats.held <= memory, "{stats:?}");
        for queue in 0..self.harness.queues() {
            // At most one request per queue is in progress or held for statistics.
            assert!(self.harness.outstanding(queue) <= 1);
        }
        assert!(self.features >> F_STATS_VQ & 1 == 1 || stats.guest.is_none());
        self.harness.host.given.lock().unwrap().clear();
    }
}
