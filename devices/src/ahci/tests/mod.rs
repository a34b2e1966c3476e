use vm_memory::{Bytes, GuestAddress};

use super::harness::*;
use crate::virtio::blk::{OnError, harness::host};

mod ata;
mod atapi;
mod media;
mod port;
mod threads;

const SECTOR: usize = 512;
const CAPACITY: u64 = 1 << 20;

/// Register FIS, PIO Setup FIS and Set Device Bits FIS in the received FISes.
const REGISTER_FIS: u64 = 0x40;
const PIO_SETUP_FIS: u64 = 0x20;
const DEVICE_BITS_FIS: u64 = 0x58;

fn harness(cdrom: bool, eager: bool) -> Harness {
    let mut host = host(CAPACITY, cdrom, if cdrom { 2048 } else { 512 });
    host.eager = eager;
    host.depth = 32;
    let mut harness = Harness::new(host, options(cdrom, OnError::Report));
    harness.start();
    harness
}

/// A started disk whose host does all at once.
fn disk() -> Harness {
    harness(false, true)
}

/// Issues a command.
fn issue(harness: &mut Harness, slot: u32, request: &Request) {
    request.put(harness.memory(), slot);
    if request.command & 0xfe == 0x60 {
        harness.write(register::ACTIVE, 1 << slot);
    }
    harness.write(register::ISSUE, 1 << slot);
}

/// Carries a command out that succeeds, and gives its data.
fn run(harness: &mut Harness, request: &Request) -> Vec<u8> {
    issue(harness, 0, request);
    harness.finish_all();
    assert_eq!(harness.read(register::ISSUE), 0, "{request:x?}");
    assert_eq!(harness.read(register::TASK_FILE), 0x50, "{request:x?}");
    data(harness, request)
}

/// Carries a command out that fails, and gives the Error register. The port is stopped and started again.
fn fails(harness: &mut Harness, request: &Request) -> u8 {
    issue(harness, 0, request);
    harness.finish_all();
    let [status, error, ..] = harness.read(register::TASK_FILE).to_le_bytes();
    assert_eq!(status, 0x51, "{request:x?}");
    assert_ne!(harness.read(register::INTERRUPT) & 1 << 30, 0);
    assert_eq!(harness.read(register::ISSUE), 1, "the command stays issued");
    restart(harness);
    error
}

fn restart(harness: &mut Harness) {
    harness.write(register::COMMAND, 0x10);
    harness.write(register::INTERRUPT, u32::MAX);
    harness.write(register::COMMAND, RUN);
}

/// The content of a command's buffers.
fn data(harness: &Harness, request: &Request) -> Vec<u8> {
    let mut all = Vec::new();
    for (address, length) in &request.buffers {
        let mut part = vec![0; *length as usize];
        harness
            .memory()
            .read_slice(&mut part, GuestAddress(*address))
            .unwrap();
        all.append(&mut part);
    }
    all
}

fn fill(harness: &Harness, address: u64, length: usize, seed: u8) -> Vec<u8> {
    let content: Vec<u8> = (0..length).map(|at| (at / 7) as u8 ^ seed).collect();
    harness
        .memory()
        .write_slice(&content, GuestAddress(address))
        .unwrap();
    content
}

fn fis<const N: usize>(harness: &Harness, at: u64) -> [u8; N] {
    let mut fis = [0; N];
    harness
        .memory()
        .read_slice(&mut fis, GuestAddress(RECEIVED + at))
        .unwrap();
    fis
}

fn word(data: &[u8], word: usize) -> u16 {
    u16::from_le_bytes([data[word * 2], data[word * 2 + 1]])
}

/// A transfer of whole sectors with one buffer.
fn transfer(command: u8, lba: u64, sectors: u16) -> Request {
    let queued = command & 0xfe == 0x60;
    Request {
        command,
        lba: if matches!(command, 0x20 | 0x30 | 0xc4 | 0xc5 | 0xc8 | 0xca) {
            lba & 0xff_ffff
        } else {
            lba
        },
        count: if queued { 0 } else { sectors },
        features: if queued { sectors } else { 0 },
        device: 0x40,
        buffers: vec![(DATA, u32::from(sectors) * SECTOR as u32)],
        ..Request::default()
    }
}

fn page(command: u8) -> Request {
    Request {
        command,
        buffers: vec![(DATA, SECTOR as u32)],
        ..Request::default()
    }
}
