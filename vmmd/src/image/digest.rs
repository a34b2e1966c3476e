//! What names the content of an image: SHA-256 of the SHA-256 of each MiB, the last one may be shorter. Holes cost nothing. Blocking.

use std::{fs::File, io, os::unix::fs::FileExt};

use rustix::{
    fs::{SeekFrom, seek},
    io::Errno,
};
use sha2::{Digest, Sha256};

use crate::disk::Control;

/// Of a hash, in bytes.
const BLOCK: u64 = 1 << 20;

/// The digest of a file of this length.
pub fn of_blocks(file: &File, size: u64, control: &Control) -> io::Result<[u8; 32]> {
    let mut buffer = vec![0; usize::try_from(BLOCK).unwrap_or_default()];
    let zeroes: [u8; 32] = Sha256::digest(&buffer).into();
    let mut whole = Sha256::new();
    let mut data = 0;
    let mut start = 0;
    while start < size {
        let end = size.min(start.saturating_add(BLOCK));
        if data < start {
            data = match seek(file, SeekFrom::Data(start)) {
                Ok(data) => data,
                Err(Errno::NXIO) => size,
                Err(_) => start,
            };
        }
        if data >= end && end - start == BLOCK {
            whole.update(zeroes);
        } else {
            control.wanted()?;
            control.progress(start, size);
            let length = usize::try_from(end - start).unwrap_or_default();
            let block = buffer.get_mut(..length).unwrap_or_default();
            file.read_exact_at(block, start)?;
            whole.update(Sha256::digest(block));
        }
        start = end;
    }
    Ok(whole.finalize().into())
}

/// SHA-256 of a file, and its length.
pub fn of_file(file: &File, control: &Control) -> io::Result<([u8; 32], u64)> {
    let size = file.metadata()?.len();
    let mut hash = Sha256::new();
    let mut buffer = vec![0; usize::try_from(BLOCK).unwrap_or_default()];
    let mut offset = 0;
    loop {
        control.wanted()?;
        control.progress(offset, size);
        let count = file.read_at(&mut buffer, offset)?;
        if count == 0 {
            return Ok((hash.finalize().into(), offset));
        }
        hash.update(buffer.get(..count).unwrap_or_default());
        offset += count as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_and_written_zeroes_have_the_same_digest() {
        let (holes, data) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let size = (5 << 20) + 512;
        data.write_all_at(&vec![0; 5 << 20], 0).unwrap();
        for file in [&holes, &data] {
            file.set_len(size).unwrap();
            file.write_all_at(b"here", (3 << 20) + 7).unwrap();
        }
        let digest = |file: &File| of_blocks(file, size, &Control::default()).unwrap();
        assert_eq!(digest(&holes), digest(&data));
        data.write_all_at(b"x", size - 1).unwrap();
        assert_ne!(digest(&holes), digest(&data));
        assert_ne!(
            of_blocks(&holes, size - 512, &Control::default()).unwrap(),
            digest(&holes)
        );
    }

    #[test]
    fn the_digest_is_that_of_the_documentation() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 512], 1 << 20).unwrap();
        let blocks = [Sha256::digest(vec![0; 1 << 20]), Sha256::digest([7; 512])].concat();
        let size = (1 << 20) + 512;
        assert_eq!(
            of_blocks(&file, size, &Control::default()).unwrap(),
            <[u8; 32]>::from(Sha256::digest(blocks))
        );
        let (whole, length) = of_file(&file, &Control::default()).unwrap();
        let mut content = vec![0; 1 << 20];
        content.extend([7; 512]);
        assert_eq!((whole, length), (Sha256::digest(content).into(), size));
    }
}
