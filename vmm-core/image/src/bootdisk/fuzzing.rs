//! Entry points for fuzzers and tests with data of their own (`vmm-core/fuzz`).

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Write},
    rc::Rc,
};

use super::{bls, find_within, firmware, grub, loader::default_of_loader, medium::Medium, uki};

/// Bytes of a sector. A piece of a disk says where it is in two bytes, so a disk has 32 MiB.
const SECTOR: u64 = 512;
const LENGTH: usize = 512;
const SECTORS: u64 = 1 << 16;
/// Bytes of a block of the seed with Btrfs, and where its superblock is.
const BLOCK: u64 = 4096;
const SUPERBLOCK: u64 = 0x10000;
/// How much is read to find a kernel and to copy it, in bytes: less than of a real disk, so that an input takes no longer than a moment.
const LOOKING: u64 = 64 << 20;
const COPYING: u64 = 64 << 20;
/// A copy is ended behind so many bytes.
const LONGEST: u64 = 4 << 20;

/// Searches for a bootable kernel in input of the form that the first byte selects:
///
/// - 0: a disk of pieces, each with the number of its first sector and its length in two bytes each
///   (little-endian); the firmware that boots it is chosen, and a found kernel is copied;
/// - 1: a grub.cfg, with the environment block and a zero byte before it;
/// - 2: boot loader entries: the environment block, loader.conf, and entries whose first line is
///   their name; a zero byte between them;
/// - 3: a unified kernel image.
pub fn boot_disk(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else {
        return;
    };
    match kind % 4 {
        0 => disk(rest),
        1 => grub_cfg(rest),
        2 => loader(rest),
        _ => image(rest),
    }
}

fn disk(data: &[u8]) {
    let disk: Rc<dyn Medium> = Rc::new(Pieces::new(data));
    let _refused = firmware::of_disk(Rc::clone(&disk), SECTOR);
    let _refused = firmware::of_cdrom(Rc::clone(&disk));
    if let Ok(found) = find_within(disk, LOOKING, COPYING) {
        let _damaged = found.copy_kernel(&mut Sink(LONGEST));
        let _damaged = found.copy_initrd(&mut Sink(LONGEST));
    }
}

fn grub_cfg(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (environment, text) = text.split_once('\0').unwrap_or(("", &text));
    grub::menu(text, &grub::environment(environment));
}

fn loader(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut parts = text.split('\0');
    let variables = grub::environment(parts.next().unwrap_or_default());
    let loader = parts.next().unwrap_or_default();
    let entries = parts.filter_map(|part| {
        let (id, text) = part.split_once('\n')?;
        bls::entry(id, text, &variables)
    });
    let mut entries: Vec<_> = entries.collect();
    let saved = variables.get("saved_entry").cloned().unwrap_or_default();
    let chosen = default_of_loader(loader, &entries).unwrap_or(saved);
    bls::sort(&mut entries, &chosen);
}

fn image(data: &[u8]) {
    uki::image(&|range| {
        let range = usize::try_from(range.start).ok()?..usize::try_from(range.end).ok()?;
        data.get(range).map(<[u8]>::to_vec)
    });
}

/// A disk of which only some sectors are not zeroes.
struct Pieces(BTreeMap<u64, [u8; LENGTH]>);

impl Pieces {
    fn new(mut data: &[u8]) -> Self {
        let mut sectors = BTreeMap::new();
        while let Some(([low, high, length @ ..], rest)) = data.split_first_chunk::<4>() {
            let first = u64::from(u16::from_le_bytes([*low, *high]));
            let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
            let (piece, rest) = rest.split_at(length);
            for (number, bytes) in (first..SECTORS).zip(piece.chunks(LENGTH)) {
                let sector = sectors.entry(number).or_insert([0; LENGTH]);
                sector.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            }
            data = rest;
        }
        let mut disk = Self(sectors);
        disk.seal();
        disk
    }

    /// Makes the checksums of a Btrfs right, since no fuzzer finds those: they are before what begins with its UUID in each of its blocks.
    fn seal(&mut self) {
        let superblock = self.block(SUPERBLOCK);
        if superblock.get(64..72) != Some(b"_BHRfS_M".as_slice()) {
            return;
        }
        let starts: BTreeSet<_> = self
            .0
            .keys()
            .map(|number| number * SECTOR / BLOCK * BLOCK)
            .collect();
        for at in starts {
            let block = self.block(at);
            let Some(summed) = block
                .get(32..)
                .filter(|_| block.get(32..48) == superblock.get(32..48))
            else {
                continue;
            };
            let sum = crc32c::crc32c(summed).to_le_bytes();
            let sector = self.0.entry(at / SECTOR).or_insert([0; LENGTH]);
            sector.iter_mut().zip(sum).for_each(|(to, from)| *to = from);
        }
    }

    fn block(&self, at: u64) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(BLOCK).unwrap_or(0)];
        let read = self.read_at(&mut bytes, at);
        read.map(|()| bytes).unwrap_or_default()
    }
}

impl Medium for Pieces {
    fn size(&self) -> u64 {
        SECTORS * SECTOR
    }

    fn read_at(&self, data: &mut [u8], offset: u64) -> io::Result<()> {
        data.fill(0);
        let end = offset + data.len() as u64;
        for (number, bytes) in self.0.range(offset / SECTOR..end.div_ceil(SECTOR)) {
            let start = number * SECTOR;
            // Overlap of the sector and the requested range.
            let (from, to) = (start.max(offset), end.min(start + SECTOR));
            let part = |base: u64| {
                let within = |at: u64| usize::try_from(at.saturating_sub(base)).unwrap_or(0);
                within(from)..within(to)
            };
            if let (Some(target), Some(source)) = (data.get_mut(part(offset)), bytes.get(part(start))) {
                target.copy_from_slice(source);
            }
        }
        Ok(())
    }
}

/// Takes so many bytes.
struct Sink(u64);

impl Write for Sink {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let left = self.0.checked_sub(data.len() as u64);
        self.0 = left.ok_or(io::ErrorKind::StorageFull)?;
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
