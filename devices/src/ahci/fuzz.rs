//! Fuzzer of a port: interprets arbitrary bytes as actions of a hostile driver and of an unreliable host.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]

use vm_memory::{Bytes, GuestAddress};

use super::harness::{
    DATA, Harness, LIST, MEMORY_END, RUN, RUNS, Request, TABLES, options, put_fis, register,
};
use crate::virtio::{
    blk::{OnError, harness::host},
    testing::Input,
};

const CAPACITY: u64 = 1 << 16;

/// A driver that may do anything.
struct Guest<'a> {
    input: Input<'a>,
    harness: Harness,
}

/// Entry function of the fuzzer. Panics if the device violates an invariant: it must not access anything outside the
/// disk or the guest's memory, write to a CD-ROM, lose a command, or panic.
pub fn port(data: &[u8]) {
    let mut input = Input(data);
    let setting = input.byte();
    let cdrom = setting & 1 != 0;
    let on_error = if setting & 2 == 0 {
        OnError::Report
    } else {
        OnError::Hold
    };
    let mut host = host(CAPACITY, cdrom, if cdrom { 2048 } else { 512 });
    host.eager = setting & 4 != 0;
    let mut guest = Guest {
        input,
        harness: Harness::new(host, options(cdrom, on_error)),
    };
    if setting & 8 == 0 {
        guest.harness.start();
    }
    while !guest.input.is_empty() {
        guest.step();
        guest.check();
    }
    guest.harness.host.lock().unwrap().failures = 0;
    guest.harness.pause_and_resume();
    guest.harness.finish_all();
    guest.check();
    // Each command completed, or the port waits to be stopped.
    let port = guest.harness.hba.ports()[0].lock().clone();
    assert_eq!((port.ready(), port.fetched), (0, 0), "{port:?}");
    guest.harness.bare.reset();
}

impl Guest<'_> {
    fn address(&mut self) -> u64 {
        self.input.address(MEMORY_END, LIST..TABLES, DATA)
    }

    fn step(&mut self) {
        match self.input.byte() % 16 {
            0 => {
                let (offset, value) = (u64::from(self.input.byte()) * 4, self.input.quad() as u32);
                self.harness.write(offset, value);
            }
            1 => {
                let (address, value) = (self.address(), self.input.quad());
                // Beyond memory is not the guest's either.
                let _ = self.harness.memory().write_obj(value, GuestAddress(address));
            }
            2 => self.harness.write(
                register::COMMAND,
                if self.input.byte() & 1 == 0 { 0x10 } else { RUN },
            ),
            3 => self
                .harness
                .write(register::SATA_CONTROL, u32::from(self.input.byte() & 1)),
            4 => {
                let count = self.input.byte() % 4;
                self.harness.host.lock().unwrap().failures = count.into();
            }
            5 => self.harness.pause_and_resume(),
            6 => self
                .harness
                .write(register::CONTROL, u32::from(self.input.byte() & 3)),
            7 => self.harness.start(),
            8..=10 => {
                let which = self.input.byte();
                self.harness.finish(which.into());
            }
            _ => self.command(),
        }
    }

    /// A command as a driver makes it, more or less.
    fn command(&mut self) {
        const COMMANDS: [u8; 16] = [
            0x60, 0x61, 0x60, 0x61, 0x25, 0x35, 0xec, 0xea, 0x06, 0xa0, 0xa0, 0xa0, 0xa1, 0xef, 0x2f, 0xb0,
        ];
        let slot = u32::from(self.input.byte() % 32);
        let choice = self.input.byte();
        let command = match choice >> 4 {
            0 => self.input.byte(),
            _ => COMMANDS[usize::from(choice & 15)],
        };
        let queued = command & 0xfe == 0x60;
        let sectors = u16::from(self.input.byte() % 8);
        let mut request = Request {
            command,
            lba: u64::from(self.input.byte()) % (CAPACITY / 512 + 2),
            device: 0x40 | self.input.byte() & 0x80,
            features: if queued {
                sectors
            } else {
                u16::from(self.input.byte())
            },
            count: if queued { (slot as u16) << 3 } else { sectors },
            writes: command & 1 != 0,
            ..Request::default()
        };
        if command == 0xa0 {
            const PACKETS: [u8; 16] = [
                0, 3, 0x12, 0x1b, 0x1e, 0x25, 0x28, 0x28, 0xa8, 0x43, 0x46, 0x4a, 0x51, 0x5a, 0x35, 0xff,
            ];
            request.packet = vec![PACKETS[usize::from(self.input.byte() % 16)]];
            request.packet.extend((0..11).map(|_| match self.input.byte() {
                odd if odd & 1 == 1 => odd >> 4,
                _ => 0,
            }));
        }
        for _ in 0..self.input.byte() % 5 {
            let length = match self.input.byte() % 4 {
                0 => self.input.quad() as u32,
                _ => u32::from(self.input.byte() % 8 + 1) * 512,
            };
            let address = self.address();
            request.buffers.push((address, length));
        }
        if self.input.byte().is_multiple_of(16) {
            let mut fis = [0; 20];
            fis.iter_mut().for_each(|byte| *byte = self.input.byte());
            put_fis(self.harness.memory(), slot, &fis, &request);
        } else {
            request.put(self.harness.memory(), slot);
        }
        if queued {
            self.harness.write(register::ACTIVE, 1 << slot);
        }
        self.harness.write(register::ISSUE, 1 << slot);
    }

    fn check(&self) {
        let stats = self.harness.control.stats();
        let port = self.harness.hba.ports()[0].lock().clone();
        assert_eq!(stats.in_flight, u64::from(port.fetched.count_ones()), "{stats:?}");
        assert!(stats.held <= stats.in_flight, "{stats:?}");
        let started = port.command & 1 != 0;
        let runs = self.harness.read(register::COMMAND) & RUNS != 0;
        assert_eq!(runs, started || port.fetched != 0);
        if !started {
            assert_eq!((port.issued, port.active), (0, 0));
        }
        // Queued commands are in process together, and others alone.
        assert!(port.fetched.count_ones() <= 8, "more than the engine takes");
    }
}
