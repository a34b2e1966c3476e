//! Direct boot: loads a kernel file, an initial RAM disk and a command line into guest memory, and
//! sets the registers with which the bootstrap processor begins.
//!
//! The magic of the kernel file alone determines its format: a bzImage ([`linux`]) or an ELF with a
//! PVH entry ([`pvh`]). Kernel files are untrusted: all their fields are checked against the file
//! and the RAM before use. The files stay open but are not kept in memory: a machine that resets
//! reads them again.

mod entry;
mod linux;
mod pvh;
#[cfg(test)]
mod tests;

use std::{fs::File, io, ops::Range, os::unix::fs::FileExt};

use rustix::fs::FileType;
use vm_memory::{Bytes, GuestAddress};
use vmm_base::{GuestMemory, sys::file};

use crate::memory::{LoadError, layout, load_file};

pub use entry::Entry;

/// What is booted. All reads are at positions: the files may be shared with other processes.
#[derive(Debug)]
pub struct BootSource {
    /// A bzImage or an ELF with a PVH entry note.
    pub kernel: File,
    /// The initial RAM disk.
    pub initrd: Option<File>,
    /// The kernel's command line, without a NUL.
    pub cmdline: String,
}

/// A kind of kernel file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    /// A bzImage.
    Linux,
    /// An ELF with a PVH entry.
    Pvh,
}

/// Properties of the machine that the kernel's boot parameters describe.
#[derive(Clone, Copy, Debug)]
pub struct BootParams {
    /// RAM in bytes.
    pub ram: u64,
    /// Guest-physical address of the ACPI root pointer (RSDP).
    pub rsdp: u64,
    /// The screen that the kernel can use without a driver.
    pub screen: Option<BootFramebuffer>,
}

/// A linear framebuffer: rows one after another, 4 bytes for each pixel (blue, green, red, nothing).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BootFramebuffer {
    /// Guest-physical address.
    pub address: u64,
    /// Pixels from left to right.
    pub width: u16,
    /// Pixels from top to bottom.
    pub height: u16,
}

/// Error of a direct boot.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// Neither magic.
    #[error("the kernel is neither a bzImage nor an x86-64 ELF")]
    UnknownFormat,
    /// A file is a directory, a socket or another special file.
    #[error("the {0} is not a regular file")]
    NotAFile(&'static str),
    /// A file is shorter than its headers claim.
    #[error("the {0} is truncated")]
    Truncated(&'static str),
    /// A field of the kernel's headers is invalid or not supported.
    #[error("the kernel is corrupt or not supported: {0}")]
    Kernel(&'static str),
    /// RAM is too small.
    #[error(
        "the {what} does not fit into memory: it needs {needed} bytes of RAM below 3 GiB, there are {available}"
    )]
    TooLarge {
        /// "kernel" or "initrd".
        what: &'static str,
        /// From the start of RAM.
        needed: u64,
        /// Below the MMIO hole.
        available: u64,
    },
    /// The command line is too long or holds a NUL.
    #[error("the kernel command line is longer than the {max} bytes that the kernel takes, or holds a NUL")]
    Cmdline {
        /// Without the NUL at its end.
        max: usize,
    },
    /// A read failed.
    #[error("reading the {what}")]
    Read {
        /// "kernel" or "initrd".
        what: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Guest memory refused a write to the planned layout (a defect).
    #[error("writing boot structures")]
    Memory(#[from] vm_memory::GuestMemoryError),
}

/// Addresses of the loader's structures, all in conventional memory. The kernel copies the parts
/// that it keeps.
mod place {
    use std::ops::Range;

    pub(super) const GDT: u64 = 0x500;
    /// `hvm_start_info`, then its memory map and module list.
    pub(super) const START_INFO: u64 = 0x6000;
    pub(super) const PVH_MEMORY_MAP: u64 = 0x6100;
    pub(super) const PVH_MODULES: u64 = 0x6f00;
    pub(super) const ZERO_PAGE: u64 = 0x7000;
    /// One page of PML4, one of PDPT, four of PD.
    pub(super) const PAGE_TABLES: u64 = 0x9000;
    pub(super) const CMDLINE: Range<u64> = 0x2_0000..0x3_0000;
}

/// Maximum length of a command line in bytes: `COMMAND_LINE_SIZE` of x86 less the NUL.
pub const CMDLINE_MAX: usize = 2047;
const _: () = assert!(CMDLINE_MAX as u64 + 1 < place::CMDLINE.end - place::CMDLINE.start);

impl BootSource {
    /// Loads everything into `memory`, which is all zeroes (fresh, or cleared), and says how the guest begins.
    pub fn load(&self, memory: &GuestMemory, params: &BootParams) -> Result<Entry, BootError> {
        let kernel = Image::new("kernel", &self.kernel)?;
        let initrd = self
            .initrd
            .as_ref()
            .map(|file| Image::new("initrd", file))
            .transpose()?;
        if self.cmdline.len() > CMDLINE_MAX || self.cmdline.contains('\0') {
            return Err(BootError::Cmdline { max: CMDLINE_MAX });
        }
        let job = Job {
            memory,
            params,
            kernel,
            initrd,
            cmdline: &self.cmdline,
        };
        match job.kernel.format()? {
            Format::Pvh => pvh::load(&job),
            Format::Linux => linux::load(&job),
        }
    }
}

/// A file to load, and its length.
#[derive(Clone, Copy)]
struct Image<'a> {
    what: &'static str,
    file: &'a File,
    length: u64,
}

impl<'a> Image<'a> {
    fn new(what: &'static str, file: &'a File) -> Result<Self, BootError> {
        let status = file::status(file).map_err(|source| BootError::Read { what, source })?;
        if status.kind != FileType::RegularFile {
            return Err(BootError::NotAFile(what));
        }
        Ok(Self {
            what,
            file,
            length: status.length,
        })
    }

    /// Returns the format that the magic of a kernel file names.
    fn format(&self) -> Result<Format, BootError> {
        let mut magic = [0; 4];
        self.read(&mut magic, 0)?;
        if magic == *b"\x7fELF" {
            return Ok(Format::Pvh);
        }
        self.read(&mut magic, linux::MAGIC_OFFSET)?;
        if magic == *b"HdrS" {
            return Ok(Format::Linux);
        }
        Err(BootError::UnknownFormat)
    }

    /// Small parts (headers). A file that is too short for a magic is truncated too.
    fn read(&self, bytes: &mut [u8], offset: u64) -> Result<(), BootError> {
        if offset
            .checked_add(bytes.len() as u64)
            .is_none_or(|end| end > self.length)
        {
            return Err(BootError::Truncated(self.what));
        }
        self.file
            .read_exact_at(bytes, offset)
            .map_err(|source| match source.kind() {
                io::ErrorKind::UnexpectedEof => BootError::Truncated(self.what),
                _ => BootError::Read {
                    what: self.what,
                    source,
                },
            })
    }

    /// Large parts, straight into guest memory.
    fn load(&self, memory: &GuestMemory, address: u64, offset: u64, length: u64) -> Result<(), BootError> {
        load_file(memory, GuestAddress(address), self.file, offset, length).map_err(|error| match error {
            LoadError::Truncated { .. } => BootError::Truncated(self.what),
            LoadError::Read(source) => BootError::Read {
                what: self.what,
                source,
            },
            LoadError::Memory(error) => BootError::Memory(error),
        })
    }
}

/// Everything that one boot is made of.
struct Job<'a> {
    memory: &'a GuestMemory,
    params: &'a BootParams,
    kernel: Image<'a>,
    initrd: Option<Image<'a>>,
    cmdline: &'a str,
}

impl Job<'_> {
    /// Where low RAM ends.
    fn low_end(&self) -> u64 {
        layout::Map::Direct.ram_ranges(self.params.ram).0.end
    }

    /// Checks that `range` is in extended memory below the hole: nothing of the loader's is overwritten there.
    fn check_extended(&self, range: &Range<u64>) -> Result<(), BootError> {
        if range.start < layout::LOW_RESERVED_END {
            return Err(BootError::Kernel("it wants to be loaded below 1 MiB"));
        }
        if range.end > self.low_end() {
            return Err(BootError::TooLarge {
                what: "kernel",
                needed: range.end,
                available: self.low_end(),
            });
        }
        Ok(())
    }

    /// Loads the initial RAM disk at the highest page below `limit` and the end of low RAM, above `kernel_end`. An
    /// empty one is none.
    fn load_initrd(&self, kernel_end: u64, limit: u64) -> Result<Option<Range<u64>>, BootError> {
        const PAGE_MASK: u64 = 0xfff;
        let Some(initrd) = self.initrd.as_ref().filter(|initrd| initrd.length > 0) else {
            return Ok(None);
        };
        let too_large = || BootError::TooLarge {
            what: "initrd",
            needed: kernel_end.saturating_add(initrd.length),
            available: self.low_end(),
        };
        let start = self
            .low_end()
            .min(limit)
            .checked_sub(initrd.length)
            .ok_or_else(too_large)?
            & !PAGE_MASK;
        if start < kernel_end {
            return Err(too_large());
        }
        initrd.load(self.memory, start, 0, initrd.length)?;
        Ok(Some(start..start.saturating_add(initrd.length)))
    }

    /// Writes the command line; guest memory behind it is zero.
    fn write_cmdline(&self) -> Result<(), BootError> {
        Ok(self
            .memory
            .write_slice(self.cmdline.as_bytes(), GuestAddress(place::CMDLINE.start))?)
    }
}
