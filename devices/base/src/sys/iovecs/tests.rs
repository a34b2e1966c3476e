use std::{
    io::{self, Write},
    os::unix::{fs::FileExt, net::UnixDatagram},
};

use vm_memory::{Bytes, GuestAddress};

use super::*;

fn memory() -> Arc<GuestMemory> {
    let memory =
        GuestMemory::from_ranges(&[(GuestAddress(0), 0x4000), (GuestAddress(0x4000), 0x4_0000)]).unwrap();
    Arc::new(memory)
}

fn segment(address: u64, length: u32) -> Segment {
    Segment {
        address: GuestAddress(address),
        length,
    }
}

#[test]
fn a_list_is_cut_out_of_segments_across_regions_of_memory() {
    let mut list = Iovecs::new(memory());
    let segments = [segment(0x10, 4), segment(0x3ffe, 4), segment(0x5000, 100)];
    list.append(&segments, 2, 6).unwrap();
    assert_eq!((list.len(), list.entries.len() - 1), (6, 3));
    list.append(&segments, 8, 100).unwrap();
    assert_eq!(list.len(), 106);
    assert_eq!(list.append(&segments, 8, 101), Err(TooShort));
    assert_eq!((list.len(), list.entries.len() - 1), (106, 4));
    list.clear();
    assert!(list.is_empty());
}

#[test]
fn what_is_written_at_an_offset_is_read_back_through_other_cuts() {
    let memory = memory();
    let pattern: Vec<u8> = (0..=255).cycle().take(5000).collect();
    memory.write_slice(&pattern, GuestAddress(0x100)).unwrap();
    let file = tempfile::tempfile().unwrap();
    let mut list = Iovecs::new(memory.clone());
    for stable in [false, true] {
        list.append(&[segment(0x100, 5000)], 0, 5000).unwrap();
        list.write_all_at(&file, 512, stable).unwrap();
        assert!(list.is_empty());
    }
    let pieces: Vec<_> = (0..50).map(|n| segment(0x8000 + n * 0x200, 100)).collect();
    list.append(&pieces, 0, 5000).unwrap();
    list.read_exact_at(&file, 512).unwrap();
    for (n, piece) in pieces.iter().enumerate() {
        let mut data = [0; 100];
        memory.read_slice(&mut data, piece.address).unwrap();
        assert_eq!(data[..], pattern[n * 100..][..100]);
    }
}

#[test]
fn more_entries_than_the_kernel_takes_at_once_are_worked_off_in_turns() {
    let memory = memory();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&vec![7; 3000]).unwrap();
    let mut list = Iovecs::new(memory.clone());
    for n in 0..3000 {
        list.append(&[segment(0x4000 + n * 2, 1)], 0, 1).unwrap();
    }
    assert!(!list.fits_one_call());
    list.read_exact_at(&file, 0).unwrap();
    for n in 0..3000 {
        assert_eq!(
            memory.read_obj::<[u8; 2]>(GuestAddress(0x4000 + n * 2)).unwrap(),
            [7, 0]
        );
    }
}

#[test]
fn a_file_that_ends_early_is_an_error() {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&[1; 100], 0).unwrap();
    let mut list = Iovecs::new(memory());
    list.append(&[segment(0, 200)], 0, 200).unwrap();
    assert_eq!(
        list.read_exact_at(&file, 0).unwrap_err().kind(),
        io::ErrorKind::UnexpectedEof
    );
}

#[test]
fn skipping_takes_whole_and_partial_entries_off() {
    let mut list = Iovecs::new(memory());
    list.append(&[segment(0, 10), segment(100, 10), segment(200, 10)], 0, 30)
        .unwrap();
    let base = list.entries[1].iov_base;
    list.skip(3);
    assert_eq!(
        (list.entries[1].iov_base, list.len()),
        (base.wrapping_byte_add(3), 27)
    );
    list.skip(17);
    assert_eq!((list.entries.len(), list.len()), (2, 10));
    list.skip(100);
    assert!(list.is_empty() && list.entries.len() == 1);
}

#[test]
fn data_is_copied_out_and_in_piece_by_piece() {
    let memory = memory();
    memory.write_slice(b"0123456789", GuestAddress(0x3ffa)).unwrap();
    let mut list = Iovecs::new(memory.clone());
    list.append(&[segment(0x3ffa, 10), segment(0x100, 5)], 0, 15)
        .unwrap();
    let mut data = [0; 8];
    list.take(&mut data);
    assert_eq!((&data, list.len()), (b"01234567", 7));
    list.put(b"abc");
    list.put(b"defg+++");
    assert!(list.is_empty());
    assert_eq!(&memory.read_obj::<[u8; 2]>(GuestAddress(0x4002)).unwrap(), b"ab");
    assert_eq!(
        &memory.read_obj::<[u8; 6]>(GuestAddress(0x100)).unwrap(),
        b"cdefg\0"
    );
}

#[test]
fn alignment_is_that_of_the_worst_entry() {
    let mut list = Iovecs::new(memory());
    list.append(&[segment(0x400, 0x400), segment(0x1200, 0x200)], 0, 0x600)
        .unwrap();
    assert!(list.aligned(512, 512) && list.aligned(1, 1));
    assert!(!list.aligned(1024, 512) && !list.aligned(512, 1024));
}

#[test]
fn packets_are_sent_with_a_header_and_received_whole() {
    let memory = memory();
    memory.write_slice(b"payload", GuestAddress(0x20)).unwrap();
    let (a, b) = UnixDatagram::pair().unwrap();
    let mut list = Iovecs::new(memory.clone());
    list.append(&[segment(0x20, 3), segment(0x23, 4)], 0, 7).unwrap();
    assert_eq!(list.send(&a, b"head").unwrap(), 11);
    let mut into = Iovecs::new(memory.clone());
    into.append(&[segment(0x1000, 5), segment(0x2000, 1000)], 0, 1005)
        .unwrap();
    assert_eq!(into.receive(&b).unwrap(), 11);
    assert_eq!(
        &memory.read_obj::<[u8; 5]>(GuestAddress(0x1000)).unwrap(),
        b"headp"
    );
    assert_eq!(
        &memory.read_obj::<[u8; 6]>(GuestAddress(0x2000)).unwrap(),
        b"ayload"
    );
    b.set_nonblocking(true).unwrap();
    assert_eq!(into.receive(&b).unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

/// 30 bytes of it, in three pieces.
fn list(memory: &Arc<GuestMemory>) -> Iovecs {
    let mut list = Iovecs::new(Arc::clone(memory));
    let segments = [(0, 10), (100, 10), (200, 10)].map(|(address, length)| Segment {
        address: GuestAddress(address),
        length,
    });
    list.append(&segments, 0, 30).unwrap();
    list
}

#[test]
fn what_is_scattered_over_parts_is_gathered_from_the_whole() {
    let memory = memory();
    let (mut list, mut whole) = (list(&memory), list(&memory));
    let data: Vec<u8> = (1..=30).collect();
    let mut first = list.split_front(15);
    assert_eq!((first.len(), list.len()), (15, 15));
    first.put(&data[..15]);
    let mut rest = list.split_front(100);
    assert_eq!((first.len(), list.len(), rest.len()), (0, 0, 15));
    rest.put(&data[15..]);
    let mut back = [0; 30];
    whole.take(&mut back);
    assert_eq!(back[..], data[..]);
    assert_eq!(memory.read_obj::<u8>(GuestAddress(10)).unwrap(), 0);
}

#[test]
fn zeroes_fill_pieces_of_any_length_and_nothing_beside_them() {
    for length in [1, 4095, 4096, 4097, 12_288, 20_001_u32] {
        let memory = Arc::new(GuestMemory::from_ranges(&[(GuestAddress(0), 0x8000)]).unwrap());
        memory.write_slice(&[9; 0x8000], GuestAddress(0)).unwrap();
        let mut list = Iovecs::new(Arc::clone(&memory));
        let address = GuestAddress(3);
        list.append(&[Segment { address, length }], 0, length).unwrap();
        list.zero();
        let mut content = vec![1; 0x8000];
        memory.read_slice(&mut content, GuestAddress(0)).unwrap();
        let end = 3 + length as usize;
        assert_eq!(content[..3], [9; 3]);
        assert!(content[3..end].iter().all(|byte| *byte == 0), "{length}");
        assert!(content[end..].iter().all(|byte| *byte == 9), "{length}");
    }
}

#[test]
fn zeroes_fill_what_is_left() {
    let memory = memory();
    let (mut list, mut whole) = (list(&memory), list(&memory));
    list.put(&[7; 12]);
    assert_eq!(list.len(), 18);
    memory.write_slice(&[9; 10], GuestAddress(200)).unwrap();
    list.zero();
    assert!(list.is_empty());
    let mut back = [1; 30];
    whole.take(&mut back);
    assert_eq!(back[..12], [7; 12]);
    assert_eq!(back[12..], [0; 18]);
}
