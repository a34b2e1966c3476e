//! What is in a file that somebody gave: found out by its first bytes, once, when it is imported.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read},
    os::unix::fs::FileExt as _,
};

use anyhow::{Context as _, Result, bail};
use bzip2::bufread::MultiBzDecoder;
use flate2::bufread::MultiGzDecoder;
use lzma_rust2::XzReader;
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::foreign::Foreign;

/// Read from the file at a time, in bytes.
const BUFFER: usize = 256 << 10;
/// Enough of a file to know its format, in bytes: the magic number of a VDI image is the last one (offset 64).
pub const HEAD: usize = 512;

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    Gzip,
    Xz,
    Zstd,
    Bzip2,
}

impl Compression {
    /// By the first bytes of a file; `None` when it is not compressed.
    pub fn of(head: &[u8]) -> Option<Self> {
        // RFC 1952, 2.3.1; .xz 1.2, 2.1.1.1; RFC 8878, 3.1.1; bzip2 has no specification, but "BZh" and the level.
        let known: [(&[u8], Self); 4] = [
            (b"\x1f\x8b\x08", Self::Gzip),
            (b"\xfd7zXZ\0", Self::Xz),
            (b"\x28\xb5\x2f\xfd", Self::Zstd),
            (b"BZh", Self::Bzip2),
        ];
        let found = known.iter().find(|(magic, _)| head.starts_with(magic));
        found.map(|(_, compression)| *compression)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Xz => "xz",
            Self::Zstd => "zstd",
            Self::Bzip2 => "bzip2",
        }
    }
}

/// What an image is, but for its compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Raw,
    Qcow2,
    Iso,
    /// Of another hypervisor.
    Foreign(Foreign),
}

impl Kind {
    /// By the first bytes of an image.
    ///
    /// # Errors
    ///
    /// It is of a known format that is not read here, or compressed twice.
    pub fn of(head: &[u8]) -> Result<Self> {
        let at = |offset: usize, magic: &[u8]| {
            let rest = head.get(offset..);
            rest.is_some_and(|rest| rest.starts_with(magic))
        };
        if at(0, b"QFI\xfb") {
            return Ok(Self::Qcow2);
        }
        let foreign = [
            (0, b"KDMV".as_slice(), Foreign::Vmdk),
            (0, b"# Disk DescriptorFile", Foreign::Vmdk),
            (0, b"vhdxfile", Foreign::Vhdx),
            (0, b"conectix", Foreign::Vhd),
            (64, b"\x7f\x10\xda\xbe", Foreign::Vdi),
        ];
        if let Some((_, _, kind)) = foreign.iter().find(|(offset, magic, _)| at(*offset, magic)) {
            return Ok(Self::Foreign(*kind));
        }
        let others = [
            (0, b"QED\0".as_slice(), "qed"),
            (0, b"WithoutFreeSpace", "parallels"),
            (0, b"WithouFreSpacExt", "parallels"),
            (0, b"LUKS\xba\xbe", "luks"),
        ];
        if let Some((_, _, name)) = others.iter().find(|(offset, magic, _)| at(*offset, magic)) {
            bail!(
                "the image is in the format {name}: convert it to qcow2 or raw first, as with `qemu-img convert`"
            );
        }
        if let Some(again) = Compression::of(head) {
            bail!(
                "what was compressed is compressed with {} again: decompress it first",
                again.name()
            );
        }
        Ok(Self::Raw)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Iso => "iso",
            Self::Foreign(kind) => kind.name(),
        }
    }
}

/// A part of a file, which is read from its beginning to its end.
#[derive(Debug)]
pub struct Part {
    file: File,
    at: u64,
    end: u64,
}

impl Part {
    /// `length` bytes from `at` on, or as many of them as the file has.
    pub fn of(file: &File, at: u64, length: u64) -> Result<Self> {
        let end = at.saturating_add(length);
        let file = file.try_clone()?;
        Ok(Self { file, at, end })
    }

    /// The whole file.
    pub fn whole(file: &File) -> Result<Self> {
        Self::of(file, 0, u64::MAX)
    }

    /// Its first bytes, which are read again.
    pub fn head(&self) -> Result<Vec<u8>> {
        let mut head = Vec::new();
        let part = Self::of(&self.file, self.at, self.end.saturating_sub(self.at))?;
        part.take(HEAD as u64)
            .read_to_end(&mut head)
            .context("read the file")?;
        Ok(head)
    }

    /// What is in it when it is compressed.
    pub fn decompressed(self, compression: Compression) -> Box<dyn Read> {
        let file = BufReader::with_capacity(BUFFER, self);
        match compression {
            Compression::Gzip => Box::new(MultiGzDecoder::new(file)),
            Compression::Xz => Box::new(XzReader::new(file, true)),
            Compression::Bzip2 => Box::new(MultiBzDecoder::new(file)),
            Compression::Zstd => Box::new(Frames {
                file,
                decoder: FrameDecoder::new(),
                in_frame: false,
            }),
        }
    }
}

impl Read for Part {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let length = buffer.len().min(left);
        let count = self
            .file
            .read_at(buffer.get_mut(..length).unwrap_or_default(), self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

/// Frames of zstd one after the other (RFC 8878, 3.1).
struct Frames {
    file: BufReader<Part>,
    decoder: FrameDecoder,
    in_frame: bool,
}

impl Read for Frames {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.in_frame {
                if self.file.fill_buf()?.is_empty() {
                    return Ok(0);
                }
                self.decoder.init(&mut self.file).map_err(io::Error::other)?;
                self.in_frame = true;
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let some = BlockDecodingStrategy::UptoBytes(buffer.len().max(1));
                self.decoder
                    .decode_blocks(&mut self.file, some)
                    .map_err(io::Error::other)?;
            }
            let count = self.decoder.read(buffer)?;
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            self.in_frame = false;
        }
    }
}
