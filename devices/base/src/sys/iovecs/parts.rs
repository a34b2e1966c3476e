//! Lists in parts.

use std::{mem, sync::Arc};

use vm_memory::VolatileSlice;

use super::{EMPTY, Iovecs};

/// Source for zeroing guest memory, one page at a time.
static ZEROES: [u8; 4096] = [0; 4096];

impl Iovecs {
    /// Takes the first `count` bytes off the list, or all that there are, as a list of their own.
    pub fn split_front(&mut self, count: usize) -> Self {
        if count >= self.length {
            let rest = Self::new(Arc::clone(&self.memory));
            return mem::replace(self, rest);
        }
        let mut taken = Self::new(Arc::clone(&self.memory));
        let mut left = count;
        for entry in self.entries.iter().skip(1) {
            if left == 0 {
                break;
            }
            let length = entry.iov_len.min(left);
            taken.entries.push(libc::iovec {
                iov_base: entry.iov_base,
                iov_len: length,
            });
            left = left.saturating_sub(length);
        }
        taken.length = count;
        self.skip(count);
        taken
    }

    /// Fills the list with zeroes. Uses it up.
    pub fn zero(&mut self) {
        for entry in self.entries.iter().skip(1) {
            // SAFETY: the entry is mapped guest memory of that many bytes (see the type's invariant).
            let guest = unsafe { VolatileSlice::new(entry.iov_base.cast(), entry.iov_len) };
            let mut rest = guest;
            while !rest.is_empty() {
                // The guest may use this memory meanwhile: the same volatile writes as for data.
                rest.copy_from(&ZEROES);
                let Ok(next) = rest.offset(ZEROES.len().min(rest.len())) else {
                    break;
                };
                rest = next;
            }
        }
        self.entries.truncate(0);
        self.entries.push(EMPTY);
        self.length = 0;
    }
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]
mod tests {
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::{GuestMemory, ram::Segment};

    fn memory() -> Arc<GuestMemory> {
        Arc::new(GuestMemory::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap())
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
}
