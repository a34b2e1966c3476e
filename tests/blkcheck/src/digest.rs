//! A number for a disk's content.

use std::io::{Read, Seek};
use std::path::Path;

use anyhow::{Context, Result};

use crate::plan::{Random, SECTOR};
use crate::write;

/// Prints it. Sectors of zeroes count like all others.
pub fn run(disk: &Path) -> Result<()> {
    let (mut file, sectors) = write::open(disk, false)?;
    file.rewind()?;
    let mut buffer = write::Aligned::new(256 * SECTOR);
    let mut digest = sectors;
    let mut left = usize::try_from(sectors)?;
    while left > 0 {
        let count = left.min(256);
        let bytes = buffer.part(count * SECTOR);
        file.read_exact(bytes).context("read")?;
        for word in bytes.chunks_exact(8) {
            let word = word.try_into().map(u64::from_le_bytes).unwrap_or_default();
            digest = digest.rotate_left(5).wrapping_mul(0x517c_c1b7_2722_0a95) ^ word;
        }
        left -= count;
    }
    println!("DIGEST={:016x};", Random::new(digest).next());
    Ok(())
}
