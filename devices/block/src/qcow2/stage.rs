//! Pending state of an image's tables: changes are kept in memory until they are committed
//! together.
//!
//! imago keeps tables in caches and writes them back at any time, sometimes a pointer before the
//! refcount of its target. Therefore imago's writes to tables that the file refers to do not reach
//! the file. Only data, and tables without a reference in the file, are written at once. A commit
//! brings the file from one consistent state to the next, and each step is on stable storage before
//! the next begins:
//!
//! 1. data and new tables,
//! 2. refcounts, none of them lower than before,
//! 3. the refcount table, 4. the header,
//! 5. L1 and L2 tables,
//! 6. refcounts that became lower; this step need not be stable.
//!
//! If the commit is interrupted anywhere, each refcount is at least the correct value: clusters may
//! leak, but none is used twice.
//!
//! Invariant: a cluster that was given up since the last commit is not reused before the next one.
//! [`Stage::moved`] reports given up tables; only the user of the stage knows about given up data.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    num::NonZeroU64,
    sync::Arc,
};

use super::{base::Base, header::Header, refcount::Width};

/// Tables are changed in pieces of at most this many bytes.
const PAGE: NonZeroU64 = NonZeroU64::new(4096).unwrap();
/// Changed pieces from which on a commit is due: 16 MiB.
const MANY_PAGES: usize = 4096;
/// Bits of an L1 entry that are an offset (QEMU's `docs/interop/qcow2.rst`, "L1 table entry").
pub(super) const L1_OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Bits of a refcount table entry that are an offset ("Refcount table entry").
pub(super) const REFCOUNT_OFFSET: u64 = !0x1ff;

/// Content of a cluster according to the tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Data,
    Header,
    L1,
    L2,
    RefcountTable,
    /// The how many-th.
    RefcountBlock(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Region {
    offset: u64,
    length: u64,
}

impl Region {
    /// How far into the region `offset` lies.
    fn position(self, offset: u64) -> Option<u64> {
        let position = offset.checked_sub(self.offset)?;
        (position < self.length).then_some(position)
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Stage {
    base: Arc<Base>,
    cluster: NonZeroU64,
    page: NonZeroU64,
    width: Width,
    /// Changed pieces of tables, by offset in units of `page`.
    pages: BTreeMap<u64, Vec<u8>>,
    /// L2 tables and refcount blocks, by cluster.
    tables: HashMap<u64, Kind>,
    l1: Region,
    refcount_table: Region,
    moved: bool,
}

impl Stage {
    /// Reads the tables of the image with this `header`.
    pub(super) fn new(base: Arc<Base>, header: &Header) -> io::Result<Self> {
        let mut stage = Self {
            base,
            cluster: header.cluster(),
            page: header.cluster().min(PAGE),
            width: Width::new(header.refcount_order),
            pages: BTreeMap::new(),
            tables: HashMap::new(),
            l1: Region { offset: 0, length: 0 },
            refcount_table: Region { offset: 0, length: 0 },
            moved: false,
        };
        stage.locate(header)?;
        stage.moved = false;
        Ok(stage)
    }

    /// A table was given up since the last commit.
    pub(super) fn moved(&self) -> bool {
        self.moved
    }

    /// So much waits that a commit is due.
    pub(super) fn is_full(&self) -> bool {
        self.pages.len() >= MANY_PAGES
    }

    /// Fills `data` from byte `offset` on, as if everything were committed.
    pub(super) fn read(&self, data: &mut [u8], offset: u64) -> io::Result<()> {
        self.base.medium.read_at(data, offset)?;
        if self.pages.is_empty() || data.is_empty() {
            return Ok(());
        }
        let end = offset.saturating_add(data.len() as u64);
        let pages = offset / self.page..=end.saturating_sub(1) / self.page;
        for (number, content) in self.pages.range(pages) {
            let start = number.saturating_mul(self.page.get());
            // Where the page begins in `data`, or how much of it lies before.
            let to = usize::try_from(start.saturating_sub(offset)).unwrap_or(usize::MAX);
            let from = usize::try_from(offset.saturating_sub(start)).unwrap_or(usize::MAX);
            let into = data.get_mut(to..).unwrap_or_default();
            for (byte, new) in into.iter_mut().zip(content.get(from..).unwrap_or_default()) {
                *byte = *new;
            }
        }
        Ok(())
    }

    /// Writes `data` from byte `offset` on: to the file if it is data, else to be committed.
    pub(super) fn write(&mut self, data: &[u8], offset: u64) -> io::Result<()> {
        let (mut rest, mut offset) = (data, offset);
        while !rest.is_empty() {
            let left = self.cluster.get().saturating_sub(offset % self.cluster);
            let length = usize::try_from(left).unwrap_or(usize::MAX).min(rest.len());
            let (now, later) = rest.split_at(length);
            match self.kind(offset / self.cluster) {
                Kind::Data => self.base.write(now, offset)?,
                kind => self.change(kind, now, offset)?,
            }
            rest = later;
            offset = offset.saturating_add(length as u64);
        }
        Ok(())
    }

    /// Makes a range of data clusters read as zeroes.
    pub(super) fn zero(&mut self, offset: u64, length: u64, allocate: bool) -> io::Result<()> {
        let end = offset.saturating_add(length);
        let mut clusters = offset / self.cluster..end.div_ceil(self.cluster.get());
        if clusters.any(|cluster| self.kind(cluster) != Kind::Data) {
            // imago zeroes data only.
            return Err(io::Error::other("tables can't be zeroed"));
        }
        self.base.written();
        if allocate {
            self.base.medium.allocate_zeroes(offset, length)
        } else {
            self.base.medium.punch(offset, length)
        }
    }

    fn kind(&self, cluster: u64) -> Kind {
        let offset = cluster.saturating_mul(self.cluster.get());
        if cluster == 0 {
            Kind::Header
        } else if self.l1.position(offset).is_some() {
            Kind::L1
        } else if self.refcount_table.position(offset).is_some() {
            Kind::RefcountTable
        } else {
            self.tables.get(&cluster).copied().unwrap_or(Kind::Data)
        }
    }

    /// Changes a part of one cluster.
    fn change(&mut self, kind: Kind, data: &[u8], offset: u64) -> io::Result<()> {
        let (mut rest, mut offset) = (data, offset);
        while !rest.is_empty() {
            let (number, within) = (offset / self.page, offset % self.page);
            let left = usize::try_from(self.page.get().saturating_sub(within)).unwrap_or(usize::MAX);
            let (now, later) = rest.split_at(left.min(rest.len()));
            let start = number.saturating_mul(self.page.get());
            let mut content = vec![0; usize::try_from(self.page.get()).unwrap_or(0)];
            self.read(&mut content, start)?;
            let old = content.clone();
            let place = content
                .get_mut(usize::try_from(within).unwrap_or(usize::MAX)..)
                .unwrap_or_default();
            for (byte, new) in place.iter_mut().zip(now) {
                *byte = *new;
            }
            if old != content {
                self.pages.insert(number, content.clone());
                self.learn(kind, start, &old, &content)?;
            }
            rest = later;
            offset = offset.saturating_add(now.len() as u64);
        }
        Ok(())
    }

    /// Takes notice of tables that a changed piece points to.
    fn learn(&mut self, kind: Kind, start: u64, old: &[u8], new: &[u8]) -> io::Result<()> {
        match kind {
            Kind::Header if start == 0 => {
                if let Ok(header) = Header::parse(new) {
                    self.locate(&header)?;
                }
            }
            Kind::L1 | Kind::RefcountTable => {
                let region = if kind == Kind::L1 {
                    self.l1
                } else {
                    self.refcount_table
                };
                let position = region.position(start).unwrap_or(0);
                self.forget(kind, old, new);
                self.enter(kind, position, new);
            }
            _ => {}
        }
        Ok(())
    }

    /// Entries of `kind`'s table that no longer point where they did.
    fn forget(&mut self, kind: Kind, old: &[u8], new: &[u8]) {
        for (old, new) in entries(kind, old).zip(entries(kind, new)) {
            if old != 0 && old != new {
                self.tables.remove(&(old / self.cluster));
                self.moved = true;
            }
        }
    }

    fn enter(&mut self, kind: Kind, position: u64, content: &[u8]) {
        let first = position / 8;
        for (index, offset) in (first..).zip(entries(kind, content)) {
            if offset != 0 {
                let points_to = match kind {
                    Kind::L1 => Kind::L2,
                    _ => Kind::RefcountBlock(index),
                };
                self.tables.insert(offset / self.cluster, points_to);
            }
        }
    }

    /// Locates the tables after a change of the header.
    fn locate(&mut self, header: &Header) -> io::Result<()> {
        let l1 = Region {
            offset: header.l1_offset,
            length: header.l1_bytes().next_multiple_of(self.cluster.get()),
        };
        let refcount_table = Region {
            offset: header.refcount_table_offset,
            length: header.refcount_table_bytes(),
        };
        if (l1, refcount_table) == (self.l1, self.refcount_table) {
            return Ok(());
        }
        (self.l1, self.refcount_table) = (l1, refcount_table);
        self.moved = true;
        self.tables.clear();
        for (kind, region, length) in [
            (Kind::L1, l1, header.l1_bytes()),
            (Kind::RefcountTable, refcount_table, refcount_table.length),
        ] {
            let mut content = vec![0; usize::try_from(length).unwrap_or(0)];
            self.read(&mut content, region.offset)?;
            self.enter(kind, 0, &content);
        }
        Ok(())
    }

    /// Brings the file to the state that it is to have, as the module says; on return that is stable. After an error
    /// everything is still to be committed.
    pub(super) fn commit(&mut self) -> io::Result<()> {
        self.base.sync()?;
        if self.pages.is_empty() {
            self.moved = false;
            return Ok(());
        }
        let blocks = self.raise_refcounts()?;
        self.base.sync()?;
        self.write_pages(|kind| kind == Kind::RefcountTable)?;
        self.base.sync()?;
        self.write_pages(|kind| kind == Kind::Header)?;
        self.base.sync()?;
        self.write_pages(|kind| {
            !matches!(kind, Kind::RefcountTable | Kind::Header | Kind::RefcountBlock(_))
        })?;
        self.base.sync()?;
        let mut free = Vec::new();
        for block in &blocks {
            if let Some(content) = self.pages.get(&block.page) {
                if *content != block.raised {
                    self.base
                        .write(content, block.page.saturating_mul(self.page.get()))?;
                }
                self.note_free(block, content, &mut free);
            }
        }
        self.pages.clear();
        self.moved = false;
        for (first, count) in free {
            let (offset, length) = (
                first.saturating_mul(self.cluster.get()),
                count.saturating_mul(self.cluster.get()),
            );
            if let Err(error) = self.base.medium.punch(offset, length) {
                tracing::debug!("space of a qcow2 image is not given back: {error}");
            }
        }
        Ok(())
    }

    fn raise_refcounts(&self) -> io::Result<Vec<Block>> {
        let mut blocks = Vec::new();
        for (page, content) in &self.pages {
            let offset = page.saturating_mul(self.page.get());
            let Kind::RefcountBlock(index) = self.kind(offset / self.cluster) else {
                continue;
            };
            let mut before = vec![0; content.len()];
            self.base.medium.read_at(&mut before, offset)?;
            let mut raised = content.clone();
            self.width.raise(&mut raised, &before);
            if raised != before {
                self.base.write(&raised, offset)?;
            }
            blocks.push(Block {
                page: *page,
                index,
                before,
                raised,
            });
        }
        Ok(blocks)
    }

    fn write_pages(&self, wanted: impl Fn(Kind) -> bool) -> io::Result<()> {
        for (page, content) in &self.pages {
            let offset = page.saturating_mul(self.page.get());
            if wanted(self.kind(offset / self.cluster)) {
                self.base.write(content, offset)?;
            }
        }
        Ok(())
    }

    /// Adds clusters that are free from now on to `free`: the first, and how many.
    fn note_free(&self, block: &Block, after: &[u8], free: &mut Vec<(u64, u64)>) {
        let per_block = self.width.count(usize::try_from(self.cluster.get()).unwrap_or(0)) as u64;
        let per_page = self.width.count(after.len());
        let page_in_block = (block.page.saturating_mul(self.page.get()) % self.cluster) / self.page;
        let first = block
            .index
            .saturating_mul(per_block)
            .saturating_add(page_in_block.saturating_mul(per_page as u64));
        for index in 0..per_page {
            if self.width.get(after, index) != 0 || self.width.get(&block.before, index) == 0 {
                continue;
            }
            let cluster = first.saturating_add(index as u64);
            match free.last_mut() {
                Some((start, count)) if start.saturating_add(*count) == cluster => {
                    *count = count.saturating_add(1);
                }
                _ => free.push((cluster, 1)),
            }
        }
    }
}

/// A piece of a refcount block that is being committed.
struct Block {
    page: u64,
    /// Which refcount block it belongs to.
    index: u64,
    before: Vec<u8>,
    raised: Vec<u8>,
}

/// Offsets in the entries of a piece of an L1 or refcount table; 0 where an entry is empty.
fn entries(kind: Kind, content: &[u8]) -> impl Iterator<Item = u64> + '_ {
    let mask = if kind == Kind::L1 {
        L1_OFFSET
    } else {
        REFCOUNT_OFFSET
    };
    let (chunks, _) = content.as_chunks();
    chunks.iter().map(move |chunk| u64::from_be_bytes(*chunk) & mask)
}
