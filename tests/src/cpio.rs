//! Writing initramfs archives: the `newc` cpio format (Linux: Documentation/driver-api/early-userspace/buffer-format.rst).

use std::io::{self, Write};

/// Type of a directory entry, with its permission bits where they vary.
#[derive(Clone, Copy, Debug)]
pub enum Entry<'a> {
    /// A folder.
    Folder,
    /// A file with its mode and content.
    File(u32, &'a [u8]),
    /// A symbolic link with its target.
    Link(&'a str),
    /// A character device with its major and minor number.
    Character(u32, u32),
}

/// Writes an archive entry by entry. Paths are relative to the root, without a leading slash. A
/// folder must precede its content.
pub struct Archive<W: Write> {
    out: W,
    inode: u32,
}

impl<W: Write> Archive<W> {
    /// An empty archive.
    pub fn new(out: W) -> Self {
        Archive { out, inode: 0 }
    }

    /// Adds one entry.
    pub fn add(&mut self, path: &str, entry: Entry<'_>) -> io::Result<()> {
        let (mode, data, device): (u32, &[u8], (u32, u32)) = match entry {
            Entry::Folder => (0o040_755, b"", (0, 0)),
            Entry::File(mode, content) => (0o100_000 | mode, content, (0, 0)),
            Entry::Link(target) => (0o120_777, target.as_bytes(), (0, 0)),
            Entry::Character(major, minor) => (0o020_600, b"", (major, minor)),
        };
        self.inode += 1;
        self.record(self.inode, mode, path, data, device)
    }

    fn record(
        &mut self,
        inode: u32,
        mode: u32,
        path: &str,
        data: &[u8],
        device: (u32, u32),
    ) -> io::Result<()> {
        let too_long = |_| io::Error::new(io::ErrorKind::InvalidInput, "a file above 4 GiB in an initramfs");
        let size = u32::try_from(data.len()).map_err(too_long)?;
        let name_size = u32::try_from(path.len() + 1).map_err(too_long)?;
        // magic, ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor, namesize, check
        write!(self.out, "070701")?;
        for field in [
            inode, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name_size, 0,
        ] {
            write!(self.out, "{field:08x}")?;
        }
        self.out.write_all(path.as_bytes())?;
        self.out.write_all(b"\0")?;
        self.pad(110 + path.len() + 1)?;
        self.out.write_all(data)?;
        self.pad(data.len())
    }

    /// Names and contents are padded to four bytes.
    fn pad(&mut self, length: usize) -> io::Result<()> {
        let zeros = [0u8; 3];
        let count = length.next_multiple_of(4) - length;
        self.out.write_all(zeros.get(..count).unwrap_or_default())
    }

    /// Writes the end mark and returns the writer.
    pub fn finish(mut self) -> io::Result<W> {
        self.record(0, 0, "TRAILER!!!", b"", (0, 0))?;
        self.out.flush()?;
        Ok(self.out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_aligned_and_carry_their_sizes() {
        let mut archive = Archive::new(Vec::new());
        archive.add("bin", Entry::Folder).expect("add");
        archive.add("bin/x", Entry::File(0o755, b"hello")).expect("add");
        archive.add("dev-console", Entry::Character(5, 1)).expect("add");
        let bytes = archive.finish().expect("finish");
        assert_eq!(bytes.len() % 4, 0);
        let text = String::from_utf8_lossy(&bytes);
        let starts: Vec<usize> = text.match_indices("070701").map(|(at, _)| at).collect();
        assert_eq!(starts.len(), 4);
        assert!(starts.iter().all(|at| at % 4 == 0));
        let field = |record: usize, index: usize| &text[starts[record] + 6 + 8 * index..][..8];
        assert_eq!(field(1, 1), "000081ed");
        assert_eq!(field(1, 6), "00000005");
        assert_eq!(field(2, 9), "00000005");
        assert_eq!(field(2, 10), "00000001");
    }
}
