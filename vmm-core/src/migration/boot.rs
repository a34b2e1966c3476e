//! Boot files in the stream: kernel, initial RAM disk and command line, from which the guest boots at a reset. The target of a
//! machine whose kernel came from a disk has no such files: it receives the content of that disk by the same stream.

use std::{fs::File, os::unix::fs::FileExt};

use block::content::PIECE;

use super::{Sender, format::Kind};
use crate::snapshot::{SnapshotError, saving::GoOn};

/// Longest kernel in bytes: that of the search for a kernel on a disk.
const MAX_KERNEL: u64 = 256 << 20;
/// Longest initial RAM disk in bytes: the same.
const MAX_INITRD: u64 = 1 << 30;
/// Longest command line in bytes: that of x86 Linux (`COMMAND_LINE_SIZE`), less the NUL.
const MAX_CMDLINE: usize = 2047;

/// First byte of a frame: the file or text to which the rest belongs.
mod part {
    pub(super) const KERNEL: u8 = 0;
    pub(super) const INITRD: u8 = 1;
    pub(super) const CMDLINE: u8 = 2;
}

/// The files from which the guest boots at a reset.
#[derive(Debug)]
pub struct BootFiles {
    /// The kernel.
    pub kernel: File,
    /// The initial RAM disk.
    pub initrd: Option<File>,
    /// The command line.
    pub cmdline: String,
}

impl Sender {
    /// Sends all of it.
    pub(super) fn boot(&mut self, boot: &BootFiles, go_on: GoOn<'_>) -> Result<(), SnapshotError> {
        self.file(part::KERNEL, &boot.kernel, go_on)?;
        if let Some(initrd) = &boot.initrd {
            self.file(part::INITRD, initrd, go_on)?;
        }
        self.frame(Kind::Boot, &[&[part::CMDLINE], boot.cmdline.as_bytes()], go_on)
    }

    fn file(&mut self, part: u8, file: &File, go_on: GoOn<'_>) -> Result<(), SnapshotError> {
        let mut buffer = vec![0; usize::try_from(PIECE).unwrap_or(0)];
        let mut offset = 0_u64;
        loop {
            let count = file
                .read_at(&mut buffer, offset)
                .map_err(SnapshotError::reading)?;
            let Some(bytes) = buffer.get(..count).filter(|bytes| !bytes.is_empty()) else {
                return Ok(());
            };
            self.frame(Kind::Boot, &[&[part], bytes], go_on)?;
            offset = offset.saturating_add(count as u64);
        }
    }
}

/// The received part of the boot files.
#[derive(Debug)]
pub struct ReceivedBoot {
    kernel: File,
    initrd: File,
    kernel_length: u64,
    initrd_length: u64,
    cmdline: Option<String>,
}

impl ReceivedBoot {
    /// Into these files, which are empty.
    pub fn new(kernel: File, initrd: File) -> Self {
        Self {
            kernel,
            initrd,
            kernel_length: 0,
            initrd_length: 0,
            cmdline: None,
        }
    }

    /// The command line, and whether there is an initial RAM disk. `None` when the stream had no kernel or no command line.
    pub fn complete(self) -> Option<(String, bool)> {
        let cmdline = self.cmdline.filter(|_| self.kernel_length > 0)?;
        Some((cmdline, self.initrd_length > 0))
    }

    /// Takes the body of a frame.
    pub(super) fn take(&mut self, body: &[u8]) -> Result<(), Refused> {
        let (part, bytes) = body
            .split_first()
            .ok_or(Refused::Frame("it has no part of the boot files"))?;
        let (file, length, most) = match *part {
            part::KERNEL => (&self.kernel, &mut self.kernel_length, MAX_KERNEL),
            part::INITRD => (&self.initrd, &mut self.initrd_length, MAX_INITRD),
            part::CMDLINE => {
                let text = String::from_utf8(bytes.to_vec()).ok();
                let text = text.filter(|text| text.len() <= MAX_CMDLINE && !text.contains('\0'));
                let text = text.ok_or(Refused::Frame("it has no command line of Linux"))?;
                return match self.cmdline.replace(text) {
                    None => Ok(()),
                    Some(_) => Err(Refused::Frame("it has the command line again")),
                };
            }
            _ => return Err(Refused::Frame("it has a part of an unknown boot file")),
        };
        let end = length.saturating_add(bytes.len() as u64);
        if bytes.is_empty() || bytes.len() as u64 > PIECE || end > most {
            return Err(Refused::Frame(
                "its boot file is longer than any, or its piece is",
            ));
        }
        file.write_all_at(bytes, *length).map_err(Refused::Write)?;
        *length = end;
        Ok(())
    }
}

/// Why a frame was not taken.
#[derive(Debug)]
pub(super) enum Refused {
    /// The frame is wrong.
    Frame(&'static str),
    /// A file of the target could not be written.
    Write(std::io::Error),
}
