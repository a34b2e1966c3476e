//! Overlays, and compressed clusters.

use std::sync::Arc;

use super::support::{Guest, Recorder, assert_sound, image, open, overlay, report, try_open};
use crate::{Image, Operation, qcow2::Below};

#[test]
fn an_overlay_reads_through_and_writes_above() {
    let base = Recorder::new(vec![7; 1 << 20]);
    let middle = overlay(1 << 20, 4096, "raw");
    {
        let disk = try_open(&middle, false, vec![Below::Raw(Arc::clone(&base) as _)]).unwrap();
        Guest::new(&disk).write(4096, &[8; 4096]).unwrap();
    }
    let top = overlay(2 << 20, 4096, "qcow2");
    let before = (base.content(), middle.content());
    let below = || {
        vec![
            Below::Qcow2(Arc::clone(&middle) as _),
            Below::Raw(Arc::clone(&base) as _),
        ]
    };
    let disk = try_open(&top, false, below()).unwrap();
    let mut guest = Guest::new(&disk);
    guest.write(4096 + 512, &[9; 512]).unwrap();
    let mut expected = [7; 12288];
    expected[4096..8192].fill(8);
    expected[4608..5120].fill(9);
    assert_eq!(guest.read(0, 12288).unwrap(), expected);
    // Behind the image below there are zeroes.
    assert_eq!(guest.read((1 << 20) - 512, 512).unwrap(), [7; 512]);
    assert_eq!(guest.read(1 << 20, 4096).unwrap(), [0; 4096]);
    // Discarded or zeroed ranges never show their old content again.
    let zeroes = Operation::WriteZeroes {
        offset: 8192,
        length: 6000 / 512 * 512,
        unmap: true,
    };
    guest.request(zeroes, 0).unwrap();
    assert_eq!(guest.read(8192, 5632).unwrap(), [0; 5632]);
    assert_eq!(guest.read(8192 + 5632, 512).unwrap(), [7; 512]);
    guest.flush().unwrap();
    drop((guest, disk));
    assert!((base.content(), middle.content()) == before);
    let disk = try_open(&top, true, below()).unwrap();
    assert_eq!(Guest::new(&disk).read(0, 8192).unwrap(), expected[..8192]);
    assert!(Guest::new(&disk).write(0, &[1; 512]).is_err());
    assert_eq!(report(&top).corruptions, 0);
}

#[test]
fn what_lies_below_does_not_appear_when_an_overlay_grows() {
    let base = Recorder::new(vec![7; 1 << 20]);
    let top = overlay((512 << 10) + 512, 4096, "raw");
    let disk = try_open(&top, false, vec![Below::Raw(base)]).unwrap();
    let mut guest = Guest::new(&disk);
    disk.grow(Some(2 << 20)).unwrap();
    let data = guest.read(512 << 10, (1 << 20) + (512 << 10)).unwrap();
    assert_eq!(data[..512], [7; 512]);
    assert!(data[512..].iter().all(|byte| *byte == 0));
    guest.write((2 << 20) - 512, &[1; 512]).unwrap();
    drop((guest, disk));
    assert_sound(&top);
}

/// An image whose first four clusters of 4096 bytes are compressed, in the middle of host clusters.
fn compressed() -> Arc<Recorder> {
    let recorder = image(1 << 20, 4096);
    {
        let disk = open(&recorder);
        let mut guest = Guest::new(&disk);
        // Two clusters to put the compressed data into, used by nothing else in the end.
        guest.write(0, &[0xee; 8192]).unwrap();
    }
    let at = |offset: u64| {
        let content = recorder.content();
        let bytes = content[offset as usize..offset as usize + 8].try_into().unwrap();
        u64::from_be_bytes(bytes) & 0x00ff_ffff_ffff_fe00
    };
    let l2 = at(at(40));
    let (first, second) = (at(l2), at(l2 + 8));
    assert_eq!(second, first + 4096);
    let refcounts = at(at(48));
    let mut offset = first + 100;
    for cluster in 0..4_u64 {
        let data = deflated(cluster as u8 + 1);
        recorder.patch(offset, &data);
        let sectors = (offset % 512 + data.len() as u64).div_ceil(512) - 1;
        let entry = 1 << 62 | sectors << (62 - (12 - 8)) | offset;
        recorder.patch(l2 + cluster * 8, &entry.to_be_bytes());
        offset += data.len() as u64;
    }
    let used = (offset - 1) / 512 * 512 + 512;
    assert!(used <= first + 8192);
    // Number of compressed clusters in each host cluster.
    let mut counts = [0_u16; 2];
    let mut offset = first + 100;
    for cluster in 0..4_u8 {
        let end = (offset + deflated(cluster + 1).len() as u64).next_multiple_of(512);
        for host in (offset - first) / 4096..=(end - 1 - first) / 4096 {
            counts[host as usize] += 1;
        }
        offset += deflated(cluster + 1).len() as u64;
    }
    for (host, count) in (first / 4096..).zip(counts) {
        recorder.patch(refcounts + host * 2, &count.to_be_bytes());
    }
    recorder
}

/// 4096 bytes of `byte` in deflate (RFC 1951): one byte in a stored block, then matches of it in a block of fixed codes;
/// and something behind the end, which does not count.
fn deflated(byte: u8) -> Vec<u8> {
    let mut bits = Bits::default();
    bits.put(0b000, 3);
    bits.align();
    bits.bytes(&[1, 0, 0xfe, 0xff, byte]);
    bits.put(0b011, 3);
    let mut left = 4095;
    while left >= 258 {
        // Code 285 is 11000101 by 3.2.6, distance code 0 is 00000.
        bits.code(0b1100_0101, 8);
        bits.code(0, 5);
        left -= 258;
    }
    while left > 0 {
        // Length 3 is code 257, 0000001; the rest is a multiple of 3.
        assert!(left >= 3);
        bits.code(0b000_0001, 7);
        bits.code(0, 5);
        left -= 3;
    }
    bits.code(0, 7);
    bits.align();
    bits.out.resize(900, 0x55);
    bits.out
}

#[derive(Default)]
struct Bits {
    out: Vec<u8>,
    used: u32,
}

impl Bits {
    fn put(&mut self, value: u32, count: u32) {
        for bit in 0..count {
            if self.used.is_multiple_of(8) {
                self.out.push(0);
            }
            *self.out.last_mut().unwrap() |= ((value >> bit & 1) << (self.used % 8)) as u8;
            self.used += 1;
        }
    }

    /// A Huffman code: its first bit is the highest.
    fn code(&mut self, value: u32, count: u32) {
        for bit in (0..count).rev() {
            self.put(value >> bit & 1, 1);
        }
    }

    fn align(&mut self) {
        self.used = self.used.next_multiple_of(8);
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }
}

#[test]
fn compressed_clusters_are_read_and_written_over() {
    let recorder = compressed();
    assert_sound(&recorder);
    let disk = open(&recorder);
    let mut guest = Guest::new(&disk);
    let mut expected: Vec<u8> = (1..=4).flat_map(|byte| [byte; 4096]).collect();
    assert!(guest.read(0, 16384).unwrap() == expected);
    assert!(guest.read(4096 + 512, 8192).unwrap() == expected[4608..12800]);
    for at in [4096 + 1024, 12288, 512] {
        guest.write(at as u64, &[9; 1024]).unwrap();
        expected[at..at + 1024].fill(9);
        assert!(guest.read(0, 16384).unwrap() == expected);
    }
    guest
        .request(
            Operation::Discard {
                offset: 8192,
                length: 4096,
            },
            0,
        )
        .unwrap();
    expected[8192..12288].fill(0);
    guest.flush().unwrap();
    drop((guest, disk));
    assert_sound(&recorder);
    let disk = try_open(&recorder, true, Vec::new()).unwrap();
    assert!(Guest::new(&disk).read(0, 16384).unwrap() == expected);
}

#[test]
fn compressed_data_that_is_none_is_an_error_of_that_place() {
    let recorder = compressed();
    let content = recorder.content();
    let start = content
        .windows(6)
        .position(|window| window == [0, 1, 0, 0xfe, 0xff, 2]);
    recorder.patch(start.unwrap() as u64, &[0x07; 900]);
    let disk = open(&recorder);
    let mut guest = Guest::new(&disk);
    assert!(guest.read(4096, 4096).is_err());
    assert!(guest.write(4096 + 512, &[1; 512]).is_err());
    assert_eq!(guest.read(0, 4096).unwrap(), [1; 4096]);
    guest.write(4096, &[5; 4096]).unwrap();
    assert_eq!(guest.read(4096, 4096).unwrap(), [5; 4096]);
}
