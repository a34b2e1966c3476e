//! Whether an image's tables agree with each other: every cluster that is used has at least as high a refcount, and
//! none is used twice. Refcounts that are too high are leaks, which do no harm but to space; all else is corruption.
//!
//! Memory and time are bounded by the length of the file and the largest tables that a header may have.

use std::{collections::HashMap, io, num::NonZeroU64};

use super::{
    header::{Header, Refusal},
    medium::Medium,
    refcount::Width,
    stage::{L1_OFFSET, REFCOUNT_OFFSET},
};

/// Most clusters of a file that is checked: one byte of memory for each.
const MAX_CLUSTERS: u64 = 1 << 27;
/// The refcount of what an L1 or L2 entry points to is one ("L1 table entry", bit 63).
const COPIED: u64 = 1 << 63;
/// An L2 entry describes compressed data ("L2 table entry", bit 62).
const COMPRESSED: u64 = 1 << 62;
/// The cluster reads as zeroes ("Standard Cluster Descriptor", bit 0).
const ZERO: u64 = 1;
/// Bits of an L1 entry that must be 0.
const L1_RESERVED: u64 = !(L1_OFFSET | COPIED);
/// Bits of an L2 entry of a standard cluster that must be 0.
const L2_RESERVED: u64 = !(L1_OFFSET | COPIED | COMPRESSED | ZERO);

/// Result of a check.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Contradictions in the tables.
    pub corruptions: u64,
    /// The first of them, in words.
    pub first: Option<String>,
    /// Clusters with too high a refcount.
    pub leaks: u64,
    /// Clusters of the disk that have a place in the file, compressed ones included.
    pub allocated: u64,
}

/// Result of a check, and the state needed to repair leaks.
#[derive(Debug)]
pub struct Inspection {
    /// Result to report.
    pub report: Report,
    references: References,
    /// Where the refcount blocks are, by number; 0 for none.
    blocks: Vec<u64>,
}

/// How often each cluster of the file is used.
#[derive(Debug)]
struct References {
    /// By cluster: [`OWNED`], or how often compressed data lies in it, up to [`MANY`].
    counts: Vec<u8>,
    /// Counts of the clusters at [`MANY`].
    many: HashMap<u64, u64>,
}

/// Used by one table or as one cluster of data, and by nothing else.
const OWNED: u8 = 0x80;
const MANY: u8 = 0x7f;

impl References {
    fn count(&self, cluster: u64) -> u64 {
        let count = usize::try_from(cluster)
            .ok()
            .and_then(|index| self.counts.get(index));
        match count.copied().unwrap_or(0) {
            OWNED => 1,
            MANY => self.many.get(&cluster).copied().unwrap_or(u64::from(MANY)),
            count => u64::from(count),
        }
    }

    /// Records a use of a cluster; the error describes the conflict.
    fn add(&mut self, cluster: u64, owned: bool) -> Result<(), &'static str> {
        let index = usize::try_from(cluster).unwrap_or(usize::MAX);
        let Some(count) = self.counts.get_mut(index) else {
            return Err("lies behind the end of the file");
        };
        match *count {
            0 if owned => *count = OWNED,
            OWNED => return Err("is used for something else, too"),
            _ if owned => return Err("is used for something else, too"),
            MANY => {
                let many = self.many.entry(cluster).or_insert(u64::from(MANY));
                *many = many.saturating_add(1);
            }
            _ => *count = count.saturating_add(1),
        }
        Ok(())
    }
}

struct Checker<'a> {
    medium: &'a dyn Medium,
    header: &'a Header,
    cluster: NonZeroU64,
    report: Report,
    references: References,
    blocks: Vec<u64>,
}

/// Checks the image on `medium`, which has this `header` and no internal snapshots.
pub fn inspect(medium: &dyn Medium, header: &Header) -> io::Result<Result<Inspection, Refusal>> {
    let cluster = header.cluster();
    let clusters = medium.size()?.div_ceil(cluster.get());
    if clusters > MAX_CLUSTERS {
        return Ok(Err(Refusal::TooLarge(format!(
            "a file of {clusters} clusters, the limit is {MAX_CLUSTERS}; use larger clusters"
        ))));
    }
    let mut checker = Checker {
        medium,
        header,
        cluster,
        report: Report::default(),
        references: References {
            counts: vec![0; usize::try_from(clusters).unwrap_or(0)],
            many: HashMap::new(),
        },
        blocks: Vec::new(),
    };
    checker.count_references()?;
    checker.compare_refcounts()?;
    Ok(Ok(Inspection {
        report: checker.report,
        references: checker.references,
        blocks: checker.blocks,
    }))
}

impl Checker<'_> {
    fn corrupt(&mut self, reason: impl FnOnce() -> String) {
        self.report.corruptions = self.report.corruptions.saturating_add(1);
        if self.report.first.is_none() {
            self.report.first = Some(reason());
        }
    }

    /// Notes what `name` uses; says whether that was fine.
    fn own(&mut self, name: &str, offset: u64, length: u64) -> bool {
        if !offset.is_multiple_of(self.cluster.get()) {
            self.corrupt(|| format!("{name} at {offset:#x} is not at the beginning of a cluster"));
            return false;
        }
        let first = offset / self.cluster;
        for index in 0..length.div_ceil(self.cluster.get()) {
            if let Err(reason) = self.references.add(first.saturating_add(index), true) {
                self.corrupt(|| format!("{name} at {offset:#x} {reason}"));
                return false;
            }
        }
        true
    }

    fn read_table(&self, offset: u64, length: u64) -> io::Result<Vec<u64>> {
        let mut content = vec![0; usize::try_from(length).unwrap_or(0)];
        self.medium.read_at(&mut content, offset)?;
        let (chunks, _) = content.as_chunks();
        Ok(chunks.iter().map(|chunk| u64::from_be_bytes(*chunk)).collect())
    }

    fn count_references(&mut self) -> io::Result<()> {
        let header = self.header;
        self.own("the header", 0, 1);
        let table = header.refcount_table_bytes();
        if self.own("the refcount table", header.refcount_table_offset, table) {
            for entry in self.read_table(header.refcount_table_offset, table)? {
                let offset = entry & REFCOUNT_OFFSET;
                if entry != offset {
                    self.corrupt(|| format!("the entry {entry:#x} of the refcount table is invalid"));
                }
                let usable = offset != 0 && self.own("a refcount block", offset, self.cluster.get());
                self.blocks.push(if usable { offset } else { 0 });
            }
        }
        if header.l1_entries == 0 || !self.own("the L1 table", header.l1_offset, header.l1_bytes()) {
            return Ok(());
        }
        for entry in self.read_table(header.l1_offset, header.l1_bytes())? {
            let offset = entry & L1_OFFSET;
            if entry & L1_RESERVED != 0 {
                self.corrupt(|| format!("the L1 entry {entry:#x} is invalid"));
            } else if offset != 0 && self.own("an L2 table", offset, self.cluster.get()) {
                if entry & COPIED == 0 {
                    self.corrupt(|| format!("the L2 table at {offset:#x} is not marked as the only one"));
                }
                for entry in self.read_table(offset, self.cluster.get())? {
                    self.check_l2_entry(entry);
                }
            }
        }
        Ok(())
    }

    fn check_l2_entry(&mut self, entry: u64) {
        if entry & COMPRESSED != 0 {
            self.check_compressed(entry);
            return;
        }
        let zero_allowed = self.header.version >= 3;
        let invalid = entry & L2_RESERVED != 0 || (entry & ZERO != 0 && !zero_allowed);
        let offset = entry & L1_OFFSET;
        if invalid || (offset == 0 && entry & COPIED != 0) {
            self.corrupt(|| format!("the L2 entry {entry:#x} is invalid"));
        } else if offset != 0 && self.own("a cluster of data", offset, self.cluster.get()) {
            self.report.allocated = self.report.allocated.saturating_add(1);
            if entry & COPIED == 0 {
                self.corrupt(|| format!("the cluster of data at {offset:#x} is not marked as the only one"));
            }
        }
    }

    /// "Compressed Clusters Descriptor".
    fn check_compressed(&mut self, entry: u64) {
        let offset_bits = 70_u32.saturating_sub(self.header.cluster_bits);
        let offset = entry & (1_u64.checked_shl(offset_bits).unwrap_or(0).wrapping_sub(1)) & !(0xff << 56);
        let sectors = (entry & !(COPIED | COMPRESSED))
            .checked_shr(offset_bits)
            .unwrap_or(0);
        if entry & COPIED != 0 || offset == 0 {
            self.corrupt(|| format!("the L2 entry {entry:#x} is invalid"));
            return;
        }
        // Whole sectors, of which the first may have begun before.
        let end = (offset & !511).saturating_add(sectors.saturating_add(1).saturating_mul(512));
        let mut last = end.saturating_sub(1) / self.cluster;
        // The descriptor rounds up, behind the end of the file if need be.
        let in_file = self.references.counts.len() as u64;
        if last >= in_file && offset / self.cluster < in_file {
            last = in_file.saturating_sub(1);
        }
        for cluster in offset / self.cluster..=last {
            if let Err(reason) = self.references.add(cluster, false) {
                self.corrupt(|| format!("compressed data at {offset:#x} {reason}"));
                return;
            }
        }
        self.report.allocated = self.report.allocated.saturating_add(1);
    }

    fn compare_refcounts(&mut self) -> io::Result<()> {
        let width = Width::new(self.header.refcount_order);
        let per_block = width.count(usize::try_from(self.cluster.get()).unwrap_or(0)) as u64;
        let in_file = self.references.counts.len() as u64;
        let covered = per_block.saturating_mul(self.blocks.len() as u64);
        for cluster in covered..in_file {
            if self.references.count(cluster) != 0 {
                self.corrupt(|| format!("cluster {cluster} is used, and has no refcount"));
            }
        }
        let mut content = vec![0; usize::try_from(self.cluster.get()).unwrap_or(0)];
        for number in 0..self.blocks.len() {
            let block = self.blocks.get(number).copied().unwrap_or(0);
            let first = per_block.saturating_mul(number as u64);
            if block == 0 {
                if first >= in_file {
                    continue;
                }
                content.fill(0);
            } else {
                self.medium.read_at(&mut content, block)?;
            }
            for (index, cluster) in (0..width.count(content.len())).zip(first..) {
                let refcount = width.get(&content, index);
                let references = self.references.count(cluster);
                if refcount > references {
                    self.report.leaks = self.report.leaks.saturating_add(1);
                } else if refcount < references {
                    self.corrupt(|| {
                        format!("cluster {cluster} is used {references} times, its refcount is {refcount}")
                    });
                }
            }
        }
        Ok(())
    }
}

impl Inspection {
    /// Lowers the refcounts that are too high, on stable storage on return, and gives the space back. To be called only
    /// when there is no corruption.
    pub fn free_leaks(&self, medium: &dyn Medium, header: &Header) -> io::Result<()> {
        let cluster = header.cluster_size();
        let width = Width::new(header.refcount_order);
        let per_block = width.count(usize::try_from(cluster).unwrap_or(0)) as u64;
        let mut content = vec![0; usize::try_from(cluster).unwrap_or(0)];
        let mut free = Vec::new();
        for (block, number) in self.blocks.iter().zip(0..) {
            if *block == 0 {
                continue;
            }
            medium.read_at(&mut content, *block)?;
            let mut changed = false;
            let first = per_block.saturating_mul(number);
            for (index, cluster) in (0..width.count(content.len())).zip(first..) {
                let references = self.references.count(cluster);
                if width.get(&content, index) > references {
                    width.set(&mut content, index, references);
                    changed = true;
                    if references == 0 {
                        free.push(cluster);
                    }
                }
            }
            if changed {
                medium.write_at(&content, *block)?;
            }
        }
        medium.sync()?;
        for number in free {
            medium.punch(number.saturating_mul(cluster), cluster)?;
        }
        Ok(())
    }
}
