//! Header of a qcow2 file. Our own parser reads it before any other code looks at the file, and
//! refuses unusable files with the reason. Sections are those of QEMU's `docs/interop/qcow2.rst`.

use std::{io, num::NonZeroU64, ops::RangeInclusive};

use super::medium::Medium;

/// "QFI\xfb", the first bytes of each qcow2 file ("Header", bytes 0-3).
pub const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Bytes of a version 2 header; version 3 adds at least 32.
const V2_LENGTH: u32 = 72;
/// Bytes of a version 3 header without optional fields.
const V3_LENGTH: u32 = 104;
/// Powers of two that a cluster may have as size: 512 bytes by the specification, 2 MiB as in QEMU.
const CLUSTER_BITS: RangeInclusive<u32> = 9..=21;
/// log2 of most bits in a refcount ("Header", bytes 96-99).
const MAX_REFCOUNT_ORDER: u32 = 6;
/// Most entries of the L1 table, as in QEMU: 32 MiB.
const MAX_L1_ENTRIES: u32 = 4 << 20;
/// Most bytes of the refcount table, as in QEMU.
const MAX_REFCOUNT_TABLE: u64 = 8 << 20;
/// Largest disk in bytes, so that a hostile file can't make a check of its tables last long.
pub const MAX_SIZE: u64 = 64 << 40;
/// Most snapshots, as in QEMU.
const MAX_SNAPSHOTS: u32 = 65536;
/// Longest name of a backing file ("Header", bytes 16-19).
const MAX_BACKING_NAME: u32 = 1023;

/// Header extensions ("Header extensions").
const EXTENSIONS_END: u32 = 0;
const FEATURE_NAMES: u32 = 0x6803_f857;
/// Bytes of an entry of the table of feature names ("Feature name table").
const FEATURE_NAME: u32 = 48;
/// Most extensions; five are defined.
const MAX_EXTENSIONS: usize = 256;

/// Incompatible features ("Header", bytes 72-79).
const DIRTY: u64 = 1 << 0;
const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
const COMPRESSION: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;
/// Autoclear features ("Header", bytes 88-95).
const BITMAPS: u64 = 1 << 0;

/// Reason why a file is not usable as a qcow2 image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Other magic bytes, or too short.
    #[error("not a qcow2 image")]
    NotQcow2,
    /// Only 2 and 3 are known.
    #[error("qcow2 version {0} is not supported")]
    Version(u32),
    /// A field of the header makes no sense.
    #[error("the qcow2 header is damaged: {0}")]
    Header(String),
    /// Refcounts may be wrong: written with lazy refcounts, and not closed.
    #[error("the qcow2 image is dirty: it was not closed; repair it with `qemu-img check -r all`")]
    Dirty,
    /// Somebody marked it so.
    #[error("the qcow2 image is marked corrupt; repair it with `qemu-img check -r all`")]
    Corrupt,
    /// Any kind of encryption.
    #[error("the qcow2 image is encrypted")]
    Encrypted,
    /// Data lies in another file.
    #[error("the qcow2 image keeps its data in an external file")]
    ExternalData,
    /// Subclusters.
    #[error("the qcow2 image has extended L2 entries")]
    ExtendedL2,
    /// Not deflate.
    #[error("the qcow2 image is compressed with {0}, only deflate is supported")]
    Compression(String),
    /// Unknown feature bits.
    #[error("the qcow2 image has unknown incompatible features {0:#x}")]
    Features(u64),
    /// Snapshots inside of the image, which is to be written to.
    #[error("the qcow2 image has {0} internal snapshots: such images can be used read-only")]
    Snapshots(u32),
    /// Dirty bitmaps inside of the image, which is to be written to.
    #[error("the qcow2 image has persistent bitmaps: such images can be used read-only")]
    Bitmaps,
    /// The image names a backing file that was not passed for it.
    #[error(
        "the qcow2 image names a backing file, but no backing file was given: vmmd never follows such a name"
    )]
    ForeignBacking,
    /// One was given that the image does not want.
    #[error("a backing image was given, but the qcow2 image is not an overlay")]
    NoBacking,
    /// The tables contradict themselves.
    #[error("the qcow2 image is corrupt: {0}")]
    Inconsistent(String),
    /// It would need more memory to check than an image should.
    #[error("the qcow2 image is too large: {0}")]
    TooLarge(String),
}

/// Checked fields of the header. Offsets and sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// log2 of the cluster size: 9 to 21.
    pub cluster_bits: u32,
    /// Size of the disk.
    pub size: u64,
    /// Where the L1 table begins: a multiple of the cluster size.
    pub l1_offset: u64,
    /// Entries in it.
    pub l1_entries: u32,
    /// Where the refcount table begins: a multiple of the cluster size.
    pub refcount_table_offset: u64,
    /// Clusters in it.
    pub refcount_table_clusters: u32,
    /// log2 of the bits in a refcount: 0 to 6.
    pub refcount_order: u32,
    /// Snapshots in the image.
    pub snapshots: u32,
    /// It names a backing file.
    pub backing: bool,
    /// Any kind of encryption.
    pub encrypted: bool,
    /// Not 0: something else than deflate.
    pub compression: u8,
    /// Its own, without extensions.
    length: u32,
    incompatible: u64,
    autoclear: u64,
}

/// Big-endian fields of a header, by offset.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn u32(&self, offset: usize) -> u32 {
        let bytes = self.0.get(offset..).and_then(|rest| rest.first_chunk());
        bytes.map_or(0, |bytes| u32::from_be_bytes(*bytes))
    }

    fn u64(&self, offset: usize) -> u64 {
        let bytes = self.0.get(offset..).and_then(|rest| rest.first_chunk());
        bytes.map_or(0, |bytes| u64::from_be_bytes(*bytes))
    }
}

impl Header {
    /// Reads the header of a file and checks it. Invalid values are refused for every use of the
    /// file.
    pub fn read(medium: &dyn Medium) -> io::Result<Result<Self, Refusal>> {
        if medium.size()? < u64::from(V2_LENGTH) {
            return Ok(Err(Refusal::NotQcow2));
        }
        let mut bytes = [0; V3_LENGTH as usize + 8];
        medium.read_at(&mut bytes, 0)?;
        Ok(Self::parse(&bytes))
    }

    /// Parses the first bytes of a file; missing bytes count as zeroes.
    pub fn parse(bytes: &[u8]) -> Result<Self, Refusal> {
        let fields = Fields(bytes);
        if !bytes.starts_with(&MAGIC) {
            return Err(Refusal::NotQcow2);
        }
        let version = fields.u32(4);
        if !(2..=3).contains(&version) {
            return Err(Refusal::Version(version));
        }
        let v3 = version >= 3;
        let length = if v3 { fields.u32(100) } else { V2_LENGTH };
        let header = Self {
            version,
            cluster_bits: fields.u32(20),
            size: fields.u64(24),
            l1_offset: fields.u64(40),
            l1_entries: fields.u32(36),
            refcount_table_offset: fields.u64(48),
            refcount_table_clusters: fields.u32(56),
            refcount_order: if v3 { fields.u32(96) } else { 4 },
            snapshots: fields.u32(60),
            backing: fields.u64(8) != 0,
            encrypted: fields.u32(32) != 0,
            compression: match bytes.get(V3_LENGTH as usize) {
                Some(kind) if v3 && length > V3_LENGTH => *kind,
                _ => 0,
            },
            length,
            incompatible: if v3 { fields.u64(72) } else { 0 },
            autoclear: if v3 { fields.u64(88) } else { 0 },
        };
        header.check_fields(length, fields.u32(16))?;
        Ok(header)
    }

    fn check_fields(&self, length: u32, backing_name: u32) -> Result<(), Refusal> {
        let damaged = |reason: String| Err(Refusal::Header(reason));
        if !CLUSTER_BITS.contains(&self.cluster_bits) {
            return damaged(format!("clusters of 2^{} bytes", self.cluster_bits));
        }
        let cluster = self.cluster_size();
        if self.version >= 3 && (length < V3_LENGTH || u64::from(length) > cluster) {
            return damaged(format!("it is {length} bytes long"));
        }
        if self.refcount_order > MAX_REFCOUNT_ORDER {
            return damaged(format!("refcounts of 2^{} bits", self.refcount_order));
        }
        if self.l1_entries > MAX_L1_ENTRIES {
            return damaged(format!("the L1 table has {} entries", self.l1_entries));
        }
        let table = u64::from(self.refcount_table_clusters).saturating_mul(cluster);
        if self.refcount_table_clusters == 0 || table > MAX_REFCOUNT_TABLE {
            return damaged(format!("the refcount table is {table} bytes long"));
        }
        for (name, offset) in [
            ("L1 table", self.l1_offset),
            ("refcount table", self.refcount_table_offset),
        ] {
            if !offset.is_multiple_of(cluster) || offset >= 1 << 56 {
                return damaged(format!("the {name} is at {offset:#x}"));
            }
        }
        if self.refcount_table_offset == 0 || (self.l1_offset == 0 && self.l1_entries != 0) {
            return damaged("a table lies in the header".to_owned());
        }
        if self.snapshots > MAX_SNAPSHOTS {
            return damaged(format!("{} snapshots", self.snapshots));
        }
        if self.backing && backing_name > MAX_BACKING_NAME {
            return damaged(format!(
                "the name of the backing file is {backing_name} bytes long"
            ));
        }
        if self.size > MAX_SIZE {
            return Err(Refusal::TooLarge(format!(
                "a disk of {} bytes, the limit is {MAX_SIZE}",
                self.size
            )));
        }
        let needed = self.size.div_ceil(self.bytes_per_l1_entry());
        if u64::from(self.l1_entries) < needed {
            return damaged(format!(
                "an L1 table of {} entries is too small for a disk of {} bytes",
                self.l1_entries, self.size
            ));
        }
        Ok(())
    }

    /// Whether the image can be used: for reading and, with `write`, for writing; with a backing image or without.
    pub fn check_usable(&self, write: bool, backing: bool) -> Result<(), Refusal> {
        let incompatible = |feature| self.incompatible & feature != 0;
        if self.encrypted {
            return Err(Refusal::Encrypted);
        }
        if incompatible(CORRUPT) {
            return Err(Refusal::Corrupt);
        }
        if incompatible(DIRTY) {
            return Err(Refusal::Dirty);
        }
        if incompatible(EXTERNAL_DATA) {
            return Err(Refusal::ExternalData);
        }
        if incompatible(EXTENDED_L2) {
            return Err(Refusal::ExtendedL2);
        }
        if incompatible(COMPRESSION) || self.compression != 0 {
            let kind = match self.compression {
                1 => "zstd".to_owned(),
                kind => format!("method {kind}"),
            };
            return Err(Refusal::Compression(kind));
        }
        if self.incompatible != 0 {
            return Err(Refusal::Features(self.incompatible));
        }
        if write && self.snapshots != 0 {
            return Err(Refusal::Snapshots(self.snapshots));
        }
        if write && self.autoclear & BITMAPS != 0 {
            return Err(Refusal::Bitmaps);
        }
        match (self.backing, backing) {
            (true, false) => Err(Refusal::ForeignBacking),
            (false, true) => Err(Refusal::NoBacking),
            _ => Ok(()),
        }
    }

    /// Whether a reader of the tables and of clusters of each known kind can read the disk. Such a reader ignores refcounts.
    pub fn check_readable(&self) -> Result<(), Refusal> {
        if self.encrypted {
            return Err(Refusal::Encrypted);
        }
        if self.corrupt() {
            return Err(Refusal::Corrupt);
        }
        if self.incompatible & EXTERNAL_DATA != 0 {
            return Err(Refusal::ExternalData);
        }
        let unknown = self.incompatible & !(DIRTY | COMPRESSION | EXTENDED_L2);
        if unknown != 0 {
            return Err(Refusal::Features(unknown));
        }
        if self.compression > 1 {
            return Err(Refusal::Compression(format!("method {}", self.compression)));
        }
        match self.backing {
            true => Err(Refusal::ForeignBacking),
            false => Ok(()),
        }
    }

    /// Checks the header's extensions, for an image that [can be used](Self::check_usable).
    /// Extensions of version 2 images are ignored.
    pub fn check_extensions(&self, medium: &dyn Medium) -> io::Result<Result<(), Refusal>> {
        let damaged = |reason: String| Ok(Err(Refusal::Header(reason)));
        if self.version < 3 {
            return Ok(Ok(()));
        }
        let mut at = u64::from(self.length);
        for _ in 0..MAX_EXTENSIONS {
            let mut head = [0; 8];
            medium.read_at(&mut head, at)?;
            let (kind, length) = (Fields(&head).u32(0), Fields(&head).u32(4));
            let data = at.saturating_add(8);
            let end = data.saturating_add(length.into());
            if end > self.cluster_size() {
                return damaged("its extensions reach beyond the first cluster".to_owned());
            }
            if kind == EXTENSIONS_END {
                return Ok(Ok(()));
            }
            if kind == FEATURE_NAMES && !length.is_multiple_of(FEATURE_NAME) {
                return damaged(format!(
                    "the table of feature names has {length} bytes, which are no whole entries"
                ));
            }
            at = end.next_multiple_of(8);
        }
        damaged(format!("it has more than {MAX_EXTENSIONS} extensions"))
    }

    /// Whether it was not closed by a program that keeps refcounts lazily.
    pub fn dirty(&self) -> bool {
        self.incompatible & DIRTY != 0
    }

    /// Whether its L2 entries have two words, the second one for subclusters.
    pub fn extended_l2(&self) -> bool {
        self.incompatible & EXTENDED_L2 != 0
    }

    /// Whether somebody marked it as corrupt.
    pub fn corrupt(&self) -> bool {
        self.incompatible & CORRUPT != 0
    }

    /// Bytes in a cluster.
    pub fn cluster_size(&self) -> u64 {
        self.cluster().get()
    }

    /// Bytes in a cluster, to divide by.
    pub fn cluster(&self) -> NonZeroU64 {
        let size = 1_u64.checked_shl(self.cluster_bits).unwrap_or(u64::MAX);
        NonZeroU64::new(size).unwrap_or(NonZeroU64::MAX)
    }

    /// Bytes of the disk that one L2 table, which is one cluster of 8-byte entries, maps.
    pub fn bytes_per_l1_entry(&self) -> u64 {
        let bits = self.cluster_bits.saturating_mul(2).saturating_sub(3);
        1_u64.checked_shl(bits).unwrap_or(u64::MAX)
    }

    /// Bytes in the L1 table.
    pub fn l1_bytes(&self) -> u64 {
        u64::from(self.l1_entries).saturating_mul(8)
    }

    /// Bytes in the refcount table.
    pub fn refcount_table_bytes(&self) -> u64 {
        u64::from(self.refcount_table_clusters).saturating_mul(self.cluster_size())
    }
}
