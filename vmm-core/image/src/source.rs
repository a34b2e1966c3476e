//! Finds the format of a file by its first bytes, once, when the file is imported. A file that is no image of a disk is refused: as a raw disk
//! it would fail later, in the guest, with another message.

use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::FileExt as _,
};

use anyhow::{Context as _, Result, bail};

use super::{compression::Compression, foreign::Foreign};

/// Bytes of a file that show its format: an ISO 9660 image is known at offset 32769.
pub const HEAD: usize = 64 << 10;

/// Format of an image, apart from its compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Raw,
    Qcow2,
    Iso,
    /// Of another hypervisor.
    Foreign(Foreign),
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Iso => "iso",
            Self::Foreign(kind) => kind.name(),
        }
    }
}

/// Content of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    Disk(Kind),
    Compressed(Compression),
    /// An archive of tar, as OVA files are.
    Tar,
}

/// A file that is not an image. The refusal names the owner's next step.
enum Other {
    Image,
    Compressed,
    Archive,
    Backup,
    Program,
}

impl Other {
    fn refusal(&self, name: &str) -> String {
        match self {
            Self::Image => format!(
                "the image is in the format {name}: convert it to qcow2 or raw first, as with `qemu-img convert`"
            ),
            Self::Compressed => {
                format!("the file is compressed with {name}, which is not read here: decompress it first")
            }
            Self::Archive => {
                format!(
                    "the file is an archive ({name}) and no image: unpack it, and import the disk that is in it"
                )
            }
            Self::Backup => format!(
                "the file is a backup ({name}) and no image: restore the disk with the program that made the backup"
            ),
            Self::Program => format!(
                "the file is a program ({name}) and no image of a disk: a kernel is for `boot.linux` of a VM"
            ),
        }
    }
}

/// Other files that people have, with offset and bytes of their mark.
const OTHERS: [(usize, &[u8], Other, &str); 36] = [
    (0, b"QFI\xfb\0\0\0\x01", Other::Image, "qcow (version 1)"),
    (0, b"QED\0", Other::Image, "qed"),
    (0, b"WithoutFreeSpace", Other::Image, "parallels"),
    (0, b"WithouFreSpacExt", Other::Image, "parallels"),
    (0, b"LUKS\xba\xbe", Other::Image, "luks"),
    (0, b"COWD", Other::Image, "vmdk of ESX"),
    (0, b"OOOM", Other::Image, "cow"),
    (0, b"Bochs Virtual HD Image", Other::Image, "bochs"),
    (0, b"#!/bin/sh\n#V2.0 Format", Other::Image, "cloop"),
    (0, b"\x3a\xff\x26\xed", Other::Image, "sparse image of Android"),
    (0, b"EVF\x09\x0d\x0a\xff\0", Other::Image, "ewf"),
    (0, b"VMA\0", Other::Backup, "vma of Proxmox VE"),
    (0, b"partclone-image", Other::Backup, "partclone"),
    (0, b"MSWIM\0\0\0", Other::Archive, "wim"),
    (0, b"PK\x03\x04", Other::Archive, "zip"),
    (0, b"PK\x05\x06", Other::Archive, "zip"),
    (0, b"PK\x07\x08", Other::Archive, "zip"),
    (0, b"7z\xbc\xaf\x27\x1c", Other::Archive, "7z"),
    (0, b"Rar!\x1a\x07", Other::Archive, "rar"),
    (0, b"070701", Other::Archive, "cpio"),
    (0, b"070702", Other::Archive, "cpio"),
    (0, b"070707", Other::Archive, "cpio"),
    (0, b"!<arch>\n", Other::Archive, "ar, as Debian packages are"),
    (0, b"\xed\xab\xee\xdb", Other::Archive, "rpm"),
    (0, b"MSCF\0\0\0\0", Other::Archive, "cab"),
    (0, b"xar!", Other::Archive, "xar"),
    (0, b"\x04\x22\x4d\x18", Other::Compressed, "lz4"),
    (0, b"\x02\x21\x4c\x18", Other::Compressed, "lz4"),
    (0, b"\x89LZO\0\r\n\x1a\n", Other::Compressed, "lzop"),
    (0, b"LZIP\x01", Other::Compressed, "lzip"),
    (
        0,
        b"\x5d\0\0\x80\0\xff\xff\xff\xff\xff\xff\xff\xff",
        Other::Compressed,
        "lzma",
    ),
    (
        0,
        b"\x5d\0\0\0\x04\xff\xff\xff\xff\xff\xff\xff\xff",
        Other::Compressed,
        "lzma",
    ),
    (0, b"\x1f\x9d\x90", Other::Compressed, "compress"),
    (0, b"\xff\x06\0\0sNaPpY", Other::Compressed, "snappy"),
    (0, b"\x7fELF", Other::Program, "ELF"),
    (514, b"HdrS", Other::Program, "Linux kernel"),
];

impl Content {
    /// By the first [`HEAD`] bytes of a file.
    ///
    /// # Errors
    ///
    /// It is something else than an image, or of a format that is not read here.
    pub fn of(head: &[u8]) -> Result<Self> {
        let at = |offset: usize, magic: &[u8]| {
            let rest = head.get(offset..);
            rest.is_some_and(|rest| rest.starts_with(magic))
        };
        if let Some((_, _, other, name)) = OTHERS.iter().find(|(offset, magic, ..)| at(*offset, magic)) {
            bail!("{}", other.refusal(name));
        }
        if at(0, b"QFI\xfb") {
            return Ok(Self::Disk(Kind::Qcow2));
        }
        let foreign = [
            (0, b"KDMV".as_slice(), Foreign::Vmdk),
            (0, b"# Disk DescriptorFile", Foreign::Vmdk),
            (0, b"vhdxfile", Foreign::Vhdx),
            (0, b"conectix", Foreign::Vhd),
            (64, b"\x7f\x10\xda\xbe", Foreign::Vdi),
        ];
        if let Some((_, _, kind)) = foreign.iter().find(|(offset, magic, _)| at(*offset, magic)) {
            return Ok(Self::Disk(Kind::Foreign(*kind)));
        }
        if let Some(compression) = Compression::of(head) {
            return Ok(Self::Compressed(compression));
        }
        if is_tar(head) {
            return Ok(Self::Tar);
        }
        if is_efi_program(head) {
            bail!("{}", Other::Program.refusal("EFI"));
        }
        if let Some(text) = text(head) {
            let next = match text.contains("HTML") {
                true => "open its address in a browser; the link may have expired, or lead to a login",
                false => "look into it; its address or path is not that of an image",
            };
            bail!("the file is {text} and no image: {next}");
        }
        Ok(Self::Disk(Kind::Raw))
    }
}

/// Whether it begins with a header of tar: the checksum is the sum of its bytes, with its own field as blanks (POSIX.1-2024, "ustar
/// Interchange Format"). Archives older than that format have no other mark.
pub fn is_tar(head: &[u8]) -> bool {
    const FIELD: std::ops::Range<usize> = 148..156;
    let Some(header) = head.first_chunk::<512>() else {
        return false;
    };
    let sum: u32 = header
        .iter()
        .enumerate()
        .map(|(at, byte)| match FIELD.contains(&at) {
            true => u32::from(b' '),
            false => u32::from(*byte),
        })
        .sum();
    let wanted = tar::Header::from_byte_slice(header).cksum();
    header.first().is_some_and(|byte| *byte != 0) && wanted.is_ok_and(|wanted| wanted == sum)
}

/// Whether it is a program for UEFI (PE format, "MS-DOS Stub"), and has no partition table as some images that begin so have.
fn is_efi_program(head: &[u8]) -> bool {
    let field = head.get(0x3c..).and_then(|rest| rest.first_chunk());
    let offset = field.map_or(usize::MAX, |offset| {
        usize::try_from(u32::from_le_bytes(*offset)).unwrap_or(usize::MAX)
    });
    let pe = head.get(offset..).is_some_and(|rest| rest.starts_with(b"PE\0\0"));
    head.starts_with(b"MZ") && pe && !has_file_system(head)
}

/// The kind of text, if the file has only text.
pub fn text(head: &[u8]) -> Option<&'static str> {
    let bare = head
        .strip_prefix(b"\xef\xbb\xbf")
        .unwrap_or(head)
        .trim_ascii_start();
    let start = bare
        .get(..64.min(bare.len()))
        .unwrap_or_default()
        .to_ascii_lowercase();
    let begins = |words: &[&str]| words.iter().any(|word| start.starts_with(word.as_bytes()));
    if begins(&["<!doctype html", "<html", "<head>"]) {
        return Some("a web page (HTML)");
    }
    let valid = match std::str::from_utf8(bare) {
        Ok(text) => text,
        // The end of the head may split a character.
        Err(error) if error.error_len().is_none() => {
            std::str::from_utf8(bare.get(..error.valid_up_to())?).unwrap_or_default()
        }
        Err(_) => return None,
    };
    if valid.is_empty()
        || valid
            .chars()
            .any(|letter| letter.is_control() && !letter.is_whitespace())
    {
        return None;
    }
    Some(match start.first() {
        Some(b'<') => "XML text",
        Some(b'{' | b'[') => "JSON text",
        _ => "text",
    })
}

/// Whether the first bytes of a disk have a partition table or a file system.
pub fn has_file_system(head: &[u8]) -> bool {
    // MBR and FAT; GPT and LVM; ISO 9660; ext2 to ext4; XFS; squashfs; EROFS; F2FS; swap; Btrfs has its own at 64 KiB, and no smaller disk.
    let known: [(usize, &[u8]); 11] = [
        (510, b"\x55\xaa"),
        (512, b"EFI PART"),
        (4096, b"EFI PART"),
        (512, b"LABELONE"),
        (32769, b"CD001"),
        (1080, b"\x53\xef"),
        (0, b"XFSB"),
        (0, b"hsqs"),
        (1024, b"\xe2\xe1\xf5\xe0"),
        (1024, b"\x10\x20\xf5\xf2"),
        (4086, b"SWAPSPACE2"),
    ];
    let at = |(offset, magic): &(usize, &[u8])| {
        let rest = head.get(*offset..);
        rest.is_some_and(|rest| rest.starts_with(magic))
    };
    known.iter().any(at)
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
