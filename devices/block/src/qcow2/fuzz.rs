//! Any bytes as an image: it is refused, or read and written without harm.

#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects)]

use std::{
    io,
    sync::{Arc, Mutex},
};

use vm_memory::GuestAddress;
use vmm_base::{GuestMemory, ram::Segment, sys::Iovecs};

use super::{check, disk::Disk, header::Header, medium::Medium, open_disk};

/// Most bytes that a file may grow to.
const LIMIT: usize = 1 << 20;
/// Bytes of a request.
const LENGTH: u32 = 6 << 10;

/// A file in memory.
#[derive(Debug)]
struct Memory(Mutex<Vec<u8>>);

impl Memory {
    fn with<T>(&self, action: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        action(&mut self.0.lock().unwrap())
    }
}

fn position(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

impl Medium for Memory {
    fn size(&self) -> io::Result<u64> {
        Ok(self.with(|content| content.len() as u64))
    }

    fn read_at(&self, data: &mut [u8], offset: u64) -> io::Result<()> {
        self.with(|content| {
            let rest = content.get(position(offset)..).unwrap_or_default();
            let (filled, empty) = data.split_at_mut(rest.len().min(data.len()));
            filled.copy_from_slice(rest.get(..filled.len()).unwrap_or_default());
            empty.fill(0);
        });
        Ok(())
    }

    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        let start = position(offset);
        let end = start.saturating_add(data.len());
        if end > LIMIT {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.with(|content| {
            content.resize(content.len().max(end), 0);
            content
                .get_mut(start..end)
                .unwrap_or_default()
                .copy_from_slice(data);
        });
        Ok(())
    }

    fn read_guest(&self, buffers: &mut Iovecs, offset: u64) -> io::Result<()> {
        let mut data = vec![0; buffers.len()];
        self.read_at(&mut data, offset)?;
        buffers.put(&data);
        Ok(())
    }

    fn write_guest(&self, buffers: &mut Iovecs, offset: u64) -> io::Result<()> {
        let mut data = vec![0; buffers.len()];
        buffers.take(&mut data);
        self.write_at(&data, offset)
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        self.with(|content| {
            let end = position(offset.saturating_add(length)).min(content.len());
            if let Some(range) = content.get_mut(position(offset)..end) {
                range.fill(0);
            }
        });
        Ok(())
    }

    fn allocate_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.write_at(&vec![0; position(length).min(LIMIT)], offset)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Opens `data` as an image for reading and for writing, and uses it.
pub fn image(data: &[u8]) {
    if data.len() > LIMIT / 2 {
        return;
    }
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), position(LENGTH.into()))]).unwrap();
    let memory = Arc::new(memory);
    let buffers = || {
        let mut buffers = Iovecs::new(Arc::clone(&memory));
        let segment = Segment {
            address: GuestAddress(0),
            length: LENGTH,
        };
        buffers.append(&[segment], 0, LENGTH).unwrap();
        buffers
    };
    let open = |read_only| {
        let medium = Arc::new(Memory(Mutex::new(data.to_vec())));
        let disk = open_disk(Arc::clone(&medium) as Arc<dyn Medium>, read_only, Vec::new());
        disk.ok().map(|disk| (disk, medium))
    };
    // Errors are acceptable here, for example at impossible places.
    if let Some((disk, medium)) = open(true) {
        for offset in places(&disk) {
            let _result = disk.read(&mut buffers(), offset);
            assert!(disk.write(&mut buffers(), offset).is_err());
        }
        assert!(medium.with(|content| content == data), "it was only to be read");
    }
    if let Some((disk, medium)) = open(false) {
        for offset in places(&disk) {
            let _result = disk.read(&mut buffers(), offset);
            let _result = disk.write(&mut buffers(), offset);
            let _result = disk.discard(offset, 4096);
            let _result = disk.write_zeroes(offset, LENGTH.into(), true);
            let _result = disk.write(&mut buffers(), offset);
            let _result = disk.flush();
        }
        let _result = disk.grow(disk.capacity().saturating_add(1 << 20));
        let _result = disk.flush();
        let header = Header::read(&*medium).unwrap().unwrap();
        let found = check::inspect(&*medium, &header).unwrap().unwrap().report;
        assert_eq!(found.corruptions, 0, "{found:?}");
    }
}

/// The beginning, the end, and some places between.
fn places(disk: &Disk) -> impl Iterator<Item = u64> + use<> {
    let capacity = disk.capacity();
    let last = capacity.saturating_sub(LENGTH.into()) / 512 * 512;
    [0, 512, 4096, capacity / 1024 * 512, last].into_iter()
}
