//! Disk after a power loss, from a log of the kernel's dm-log-writes
//! (Documentation/admin-guide/device-mapper/log-writes.rst).
//!
//! The target logs every write in the order of durability: writes before a flush precede the flush
//! in the log, and a write that was never flushed follows the last flush that did not cover it.
//! drivers/md/dm-log-writes.c defines the format: a superblock, then for each write an entry of one
//! sector and the data.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::plan::Random;

const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
/// Flags of an entry.
const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;
/// Bytes of an entry before its text.
const HEADER: usize = 32;

/// Log entry of one write.
struct Entry {
    /// Bytes from the disk's beginning.
    offset: u64,
    length: u64,
    flags: u64,
    text: String,
    /// Where its data is in the log.
    data: u64,
}

/// A log that is read from its beginning.
struct Log {
    file: File,
    sector: u64,
    left: u64,
    next: u64,
}

impl Log {
    fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("open {}", path.display()))?;
        let mut head = [0; 28];
        file.read_exact_at(&mut head, 0).context("read the superblock")?;
        ensure!(
            word(&head, 0) == MAGIC && word(&head, 8) == VERSION,
            "{} is no log of dm-log-writes",
            path.display()
        );
        let sector = word(&head, 24) & 0xffff_ffff;
        ensure!(matches!(sector, 512 | 4096), "sectors of {sector} bytes");
        Ok(Log {
            file,
            sector,
            left: word(&head, 16),
            next: sector,
        })
    }

    fn next(&mut self) -> Result<Option<Entry>> {
        let Some(left) = self.left.checked_sub(1) else {
            return Ok(None);
        };
        self.left = left;
        let mut head = vec![0; usize::try_from(self.sector)?];
        self.file
            .read_exact_at(&mut head, self.next)
            .context("read an entry")?;
        let (flags, text) = (word(&head, 16), usize::try_from(word(&head, 24))?);
        let text = head.get(HEADER..HEADER + text).context("an entry's text")?;
        let data = self.next + self.sector;
        let length = word(&head, 8) * self.sector;
        self.next = data + if flags & DISCARD == 0 { length } else { 0 };
        Ok(Some(Entry {
            offset: word(&head, 0) * self.sector,
            length,
            flags,
            text: String::from_utf8_lossy(text).trim_end_matches('\0').to_owned(),
            data,
        }))
    }

    fn apply(&self, entry: &Entry, disk: &File) -> Result<()> {
        let mut data = vec![0; usize::try_from(entry.length)?];
        if entry.flags & DISCARD == 0 {
            self.file
                .read_exact_at(&mut data, entry.data)
                .context("read data")?;
        }
        disk.write_all_at(&data, entry.offset).context("write data")
    }
}

/// The little-endian number at `at`; bytes behind the end are zeroes.
fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    for (to, from) in word.iter_mut().zip(bytes.iter().skip(at)) {
        *to = *from;
    }
    u64::from_le_bytes(word)
}

/// Writes to `onto` all writes that were durable at the mark, and each later write up to the next
/// flush with a probability of one half. Without a mark, writes all logged writes.
pub fn run(log: &Path, onto: &Path, mark: Option<&str>, seed: u64) -> Result<()> {
    let mut log = Log::open(log)?;
    let disk = File::options()
        .write(true)
        .open(onto)
        .with_context(|| format!("open {}", onto.display()))?;
    let mut durable = 0_u64;
    loop {
        let Some(entry) = log.next()? else {
            let Some(mark) = mark else { break };
            bail!("no mark {mark:?} in the log");
        };
        if entry.flags & MARK == 0 {
            log.apply(&entry, &disk)?;
            durable += 1;
        } else if mark == Some(entry.text.as_str()) {
            break;
        }
    }
    let mut random = Random::new(seed);
    let (mut volatile, mut survived) = (0_u64, 0_u64);
    while let Some(entry) = log.next()? {
        if entry.flags & (FLUSH | FUA) != 0 {
            break;
        }
        if entry.flags & MARK != 0 {
            continue;
        }
        volatile += 1;
        if random.below(2) == 0 {
            log.apply(&entry, &disk)?;
            survived += 1;
        }
    }
    match disk.sync_all() {
        Err(error) if error.kind() != ErrorKind::InvalidInput => return Err(error).context("sync"),
        _ => {}
    }
    println!("{durable} writes were durable; {survived} of {volatile} others survive");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A log of sectors: (place, byte, flags), or a mark.
    fn log(path: &Path, entries: &[(u64, u8, u64, &str)]) {
        let mut bytes = Vec::new();
        for number in [MAGIC, VERSION, entries.len() as u64] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(512_u32.to_le_bytes());
        bytes.resize(512, 0);
        for (place, byte, flags, text) in entries {
            let count = u64::from(flags & (MARK | FLUSH) == 0);
            let start = bytes.len();
            for number in [*place, count, *flags, text.len() as u64] {
                bytes.extend(number.to_le_bytes());
            }
            bytes.extend(text.as_bytes());
            bytes.resize(start + 512, 0);
            bytes.resize(bytes.len() + if count == 1 { 512 } else { 0 }, *byte);
        }
        std::fs::write(path, bytes).expect("log");
    }

    #[test]
    fn replay_holds_flushed_writes_up_to_the_mark() {
        let folder = std::env::temp_dir().join(format!("blkcheck-replay-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("folder");
        let (path, disk) = (folder.join("log"), folder.join("disk"));
        log(
            &path,
            &[
                (0, 1, 0, ""),
                (0, 0, FLUSH, ""),
                (0, 0, MARK, "here"),
                (1, 2, 0, ""),
                (2, 3, 0, ""),
                (0, 0, FLUSH, ""),
                (3, 4, 0, ""),
            ],
        );
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..64 {
            File::create(&disk)
                .and_then(|file| file.set_len(2048))
                .expect("disk");
            run(&path, &disk, Some("here"), seed).expect("replay");
            let content = std::fs::read(&disk).expect("disk");
            let sectors: Vec<u8> = content.chunks(512).map(|sector| sector[0]).collect();
            assert_eq!((sectors[0], sectors[3]), (1, 0));
            seen.insert((sectors[1], sectors[2]));
        }
        assert_eq!(seen, [(0, 0), (0, 3), (2, 0), (2, 3)].into());
        run(&path, &disk, Some("elsewhere"), 0).expect_err("no such mark");
        run(&path, &disk, None, 0).expect("replay");
        let content = std::fs::read(&disk).expect("disk");
        let sectors: Vec<u8> = content.chunks(512).map(|sector| sector[0]).collect();
        assert_eq!(sectors, [1, 2, 3, 4]);
        std::fs::remove_dir_all(folder).expect("remove");
    }
}
