//! Digest of an image's content: SHA-256 of the SHA-256 hashes of each MiB. The last block may be
//! shorter. Holes need no hashing. Blocking.

use std::{fs::File, io, ops::Range, os::unix::fs::FileExt, sync::LazyLock, thread};

use rustix::{
    fs::{SeekFrom, seek},
    io::Errno,
};
use sha2::{Digest, Sha256, Sha512};

use vmmd_objects::operation::Control;

/// Bytes per hash.
const BLOCK: u64 = 1 << 20;
/// Most threads that make hashes of one file.
const MOST_THREADS: usize = 4;
static THREADS: LazyLock<usize> = LazyLock::new(|| {
    thread::available_parallelism()
        .map_or(1, usize::from)
        .min(MOST_THREADS)
});
/// Hash of a block of zeroes.
static ZEROES: LazyLock<[u8; 32]> =
    LazyLock::new(|| Sha256::digest(vec![0; usize::try_from(BLOCK).unwrap_or_default()]).into());

/// Makes the checksum of a file: SHA-256, or SHA-512 when that is to be compared.
#[derive(Clone, Debug)]
pub enum Checksum {
    Sha256(Sha256),
    Sha512(Box<Sha512>),
}

impl Checksum {
    /// A checksum of the same kind as the wanted one; SHA-256 when none is wanted.
    pub fn like(wanted: &[u8]) -> Self {
        match wanted.len() {
            64 => Self::Sha512(Box::default()),
            _ => Self::Sha256(Sha256::new()),
        }
    }

    /// Another one of the same kind, of nothing yet.
    pub fn restarted(&self) -> Self {
        match self {
            Self::Sha256(_) => Self::Sha256(Sha256::new()),
            Self::Sha512(_) => Self::Sha512(Box::default()),
        }
    }

    pub fn update(&mut self, data: &[u8]) {
        match self {
            Self::Sha256(hash) => hash.update(data),
            Self::Sha512(hash) => hash.update(data),
        }
    }

    pub fn finalize(self) -> Vec<u8> {
        match self {
            Self::Sha256(hash) => hash.finalize().to_vec(),
            Self::Sha512(hash) => hash.finalize().to_vec(),
        }
    }
}

/// Bytes of a file whose hashes are in memory at once.
pub const WINDOW: u64 = 256 << 20;

/// The hashes of the blocks that begin in `range` of a file of this length.
pub fn of_blocks(file: &File, size: u64, range: Range<u64>, control: &Control) -> io::Result<Vec<[u8; 32]>> {
    let mut buffer = vec![0; usize::try_from(BLOCK).unwrap_or_default()];
    let mut hashes = Vec::new();
    let (mut data, mut start) = (0, range.start);
    while start < range.end.min(size) {
        let end = size.min(start.saturating_add(BLOCK));
        if data < start {
            data = match seek(file, SeekFrom::Data(start)) {
                Ok(data) => data,
                Err(Errno::NXIO) => size,
                Err(_) => start,
            };
        }
        if data >= end && end - start == BLOCK {
            hashes.push(*ZEROES);
        } else {
            control.wanted()?;
            let length = usize::try_from(end - start).unwrap_or_default();
            let block = buffer.get_mut(..length).unwrap_or_default();
            file.read_exact_at(block, start)?;
            hashes.push(Sha256::digest(block).into());
        }
        start = end;
    }
    Ok(hashes)
}

/// The parts of a window at `start` of which several threads make the hashes: whole blocks each.
pub fn parts(start: u64, size: u64) -> impl Iterator<Item = Range<u64>> {
    let end = size.min(start.saturating_add(WINDOW));
    let blocks = (end - start).div_ceil(BLOCK).div_ceil(*THREADS as u64).max(1);
    let step = blocks.saturating_mul(BLOCK);
    let starts = (start..end).step_by(usize::try_from(step).unwrap_or(usize::MAX));
    starts.map(move |start| start..end.min(start.saturating_add(step)))
}

/// The checksum of a file, begun with `hash`, and its length.
pub fn of_file(file: &File, mut hash: Checksum, control: &Control) -> io::Result<(Vec<u8>, u64)> {
    let size = file.metadata()?.len();
    let mut buffer = vec![0; usize::try_from(BLOCK).unwrap_or_default()];
    let mut offset = 0;
    loop {
        control.wanted()?;
        control.progress(offset, size);
        let count = file.read_at(&mut buffer, offset)?;
        if count == 0 {
            return Ok((hash.finalize(), offset));
        }
        hash.update(buffer.get(..count).unwrap_or_default());
        offset += count as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As an import makes it.
    fn whole(file: &File, size: u64) -> [u8; 32] {
        let mut whole = Sha256::new();
        for start in (0..size).step_by(usize::try_from(WINDOW).unwrap()) {
            for part in parts(start, size) {
                let hashes = of_blocks(file, size, part, &Control::default()).unwrap();
                whole.update(hashes.as_flattened());
            }
        }
        whole.finalize().into()
    }

    #[test]
    fn parts_are_whole_blocks_and_each_byte_is_in_one() {
        for size in [512, BLOCK, BLOCK + 1, 5 * BLOCK, 1000 * BLOCK - 512, WINDOW] {
            let mut end = 0;
            for part in parts(0, size) {
                assert!(part.start == end && part.start.is_multiple_of(BLOCK) && part.end > part.start);
                end = part.end;
            }
            assert_eq!(end, size.min(WINDOW));
        }
        let mut second = parts(WINDOW, WINDOW + 700);
        assert_eq!((second.next(), second.next()), (Some(WINDOW..WINDOW + 700), None));
    }

    #[test]
    fn holes_and_written_zeroes_have_the_same_digest() {
        let (holes, data) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let size = (5 << 20) + 512;
        data.write_all_at(&vec![0; 5 << 20], 0).unwrap();
        for file in [&holes, &data] {
            file.set_len(size).unwrap();
            file.write_all_at(b"here", (3 << 20) + 7).unwrap();
        }
        let digest = |file: &File| whole(file, size);
        assert_eq!(digest(&holes), digest(&data));
        data.write_all_at(b"x", size - 1).unwrap();
        assert_ne!(digest(&holes), digest(&data));
        assert_ne!(whole(&holes, size - 512), digest(&holes));
    }

    #[test]
    fn the_digest_is_that_of_the_documentation() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 512], 1 << 20).unwrap();
        let blocks = [Sha256::digest(vec![0; 1 << 20]), Sha256::digest([7; 512])].concat();
        let size = (1 << 20) + 512;
        assert_eq!(whole(&file, size), <[u8; 32]>::from(Sha256::digest(blocks)));
        let mut content = vec![0; 1 << 20];
        content.extend([7; 512]);
        for (wanted, right) in [
            (0, Sha256::digest(&content).to_vec()),
            (64, Sha512::digest(&content).to_vec()),
        ] {
            let hash = Checksum::like(&vec![0; wanted]);
            let found = of_file(&file, hash, &Control::default()).unwrap();
            assert_eq!(found, (right, size));
        }
    }
}
