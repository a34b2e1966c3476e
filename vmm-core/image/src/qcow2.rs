//! Reads the disk in a qcow2 image for an import. Section names are those of QEMU's `docs/interop/qcow2.rst`.
//!
//! Only tables that map the disk are read: refcounts do not matter, so an image that was not closed is read too. Clusters that are compressed
//! with zstd and extended L2 entries, which disks in use may not have, are read as well. Several threads may read parts of one image.

use std::{fs::File, io::Read, ops::Range, os::unix::fs::FileExt as _};

use anyhow::{Context as _, Result, bail};
use block::qcow2::Header;
use flate2::read::DeflateDecoder;
use ruzstd::decoding::StreamingDecoder;

/// Most bytes of data in one piece, except for larger clusters that are compressed.
const PIECE: u64 = 1 << 20;
/// Where a table or cluster is, in an entry of a table ("L1 table entry", "L2 table entry").
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// "L2 table entry": the cluster is compressed; it reads as zeroes.
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;
/// Subclusters of a cluster ("Extended L2 Entries").
const SUBCLUSTERS: u64 = 32;
const DAMAGED: &str = "the qcow2 image is damaged, its tables are not in the file: was it cut off?";

/// Gets a piece of the disk, and its offset.
pub type Take<'a> = dyn FnMut(u64, &[u8]) -> Result<()> + 'a;

/// An image that can be read.
#[derive(Debug)]
pub struct Image<'a> {
    file: &'a File,
    /// Bytes of the file.
    length: u64,
    header: Header,
    l1: Vec<u64>,
}

/// Data of the disk that is in one piece in the file: offsets in both, and the length.
#[derive(Clone, Copy)]
struct Run {
    from: u64,
    to: u64,
    length: u64,
}

impl<'a> Image<'a> {
    /// Checks the header and reads the L1 table. An L2 table outside the file is refused: its part of the disk would read as zeroes.
    pub fn open(file: &'a File, header: Header) -> Result<Self> {
        header.check_readable()?;
        let length = file.metadata().context("look at the file")?.len();
        let mut table = vec![0; usize::try_from(header.l1_bytes())?];
        file.read_exact_at(&mut table, header.l1_offset)
            .context(DAMAGED)?;
        let (entries, _) = table.as_chunks::<8>();
        let l1: Vec<_> = entries
            .iter()
            .map(|entry| u64::from_be_bytes(*entry) & OFFSET)
            .collect();
        let image = Self {
            file,
            length,
            header,
            l1,
        };
        let needed = image.header.size.div_ceil(image.mapped_by_l2());
        let is_there = |at: &u64| at.saturating_add(image.header.cluster_size()) <= length;
        if (image.l1.len() as u64) < needed || !image.l1.iter().filter(|at| **at != 0).all(is_there) {
            bail!(DAMAGED);
        }
        Ok(image)
    }

    /// Bytes of an L2 entry.
    fn entry(&self) -> u64 {
        if self.header.extended_l2() { 16 } else { 8 }
    }

    /// Bytes of the disk that an L2 table, which is one cluster, maps.
    fn mapped_by_l2(&self) -> u64 {
        let cluster = self.header.cluster_size();
        (cluster / self.entry()).saturating_mul(cluster).max(1)
    }

    /// Calls `take` with the data within `range`, which begins and ends with clusters or the disk. Zeroes may be left out.
    pub fn each_data(&self, range: Range<u64>, take: &mut Take<'_>) -> Result<()> {
        let cluster = self.header.cluster_size();
        let mut table = (0, Vec::new());
        let mut run: Option<Run> = None;
        let mut at = range.start;
        while at < range.end.min(self.header.size) {
            let mapped = self.mapped_by_l2();
            let l2 = usize::try_from(at / mapped)
                .ok()
                .and_then(|index| self.l1.get(index));
            let l2 = l2.copied().unwrap_or(0);
            if l2 == 0 {
                at = (at / mapped + 1).saturating_mul(mapped);
                continue;
            }
            if table.0 != l2 {
                table = (l2, self.bytes(l2, cluster)?);
            }
            let entry = usize::try_from(at % mapped / cluster * self.entry())?;
            let field = |at: usize| {
                let bytes = table.1.get(at..).and_then(|rest| rest.first_chunk());
                bytes.map_or(0, |bytes| u64::from_be_bytes(*bytes))
            };
            let (place, subclusters) = (field(entry), field(entry + 8));
            if place & COMPRESSED != 0 {
                let data = self.decompressed(place)?;
                let length = usize::try_from(cluster.min(self.header.size - at))?;
                take(at, data.get(..length).unwrap_or(&data))?;
            } else {
                self.mapped(place, subclusters, &mut |offset, length, from| {
                    self.join(
                        &mut run,
                        Run {
                            from,
                            to: at + offset,
                            length,
                        },
                        take,
                    )
                })?;
            }
            at = at.saturating_add(cluster);
        }
        run.map_or(Ok(()), |run| self.copy(run, take))
    }

    /// Calls `found` with each piece of data in a cluster: its offset there, its length, and where it is in the file.
    fn mapped(
        &self,
        place: u64,
        subclusters: u64,
        found: &mut dyn FnMut(u64, u64, u64) -> Result<()>,
    ) -> Result<()> {
        let (at, cluster) = (place & OFFSET, self.header.cluster_size());
        if at == 0 {
            return Ok(());
        }
        if !self.header.extended_l2() {
            // Version 2 has no clusters of zeroes.
            let zero = self.header.version >= 3 && place & ZERO != 0;
            return if zero { Ok(()) } else { found(0, cluster, at) };
        }
        let length = cluster / SUBCLUSTERS;
        for number in (0..SUBCLUSTERS).filter(|number| subclusters >> number & 1 != 0) {
            found(number * length, length, at + number * length)?;
        }
        Ok(())
    }

    /// Adds a piece to a run that it continues; others are read.
    fn join(&self, run: &mut Option<Run>, next: Run, take: &mut Take<'_>) -> Result<()> {
        if let Some(run) = run
            && run.from + run.length == next.from
            && run.to + run.length == next.to
            && run.length + next.length <= PIECE
        {
            run.length += next.length;
            return Ok(());
        }
        match run.replace(next) {
            Some(run) => self.copy(run, take),
            None => Ok(()),
        }
    }

    fn copy(&self, run: Run, take: &mut Take<'_>) -> Result<()> {
        let end = run.to.saturating_add(run.length).min(self.header.size);
        let mut done = 0;
        while run.to + done < end {
            let length = (end - run.to - done).min(PIECE);
            take(run.to + done, &self.bytes(run.from + done, length)?)?;
            done += length;
        }
        Ok(())
    }

    /// Bytes of the file. The last cluster may be written in part.
    fn bytes(&self, at: u64, length: u64) -> Result<Vec<u8>> {
        if at >= self.length
            || at.saturating_add(length) >= self.length.saturating_add(self.header.cluster_size())
        {
            bail!("the qcow2 image is damaged, its data is not in the file: was it cut off?");
        }
        let mut bytes = vec![0; usize::try_from(length)?];
        let there = usize::try_from(length.min(self.length - at))?;
        self.file
            .read_exact_at(bytes.get_mut(..there).unwrap_or_default(), at)
            .context("read the file")?;
        Ok(bytes)
    }

    /// A cluster that is compressed ("Compressed Clusters Descriptor"): its offset, and how many further sectors it reaches into.
    fn decompressed(&self, place: u64) -> Result<Vec<u8>> {
        const SECTOR: u64 = 512;
        let cluster = self.header.cluster_size();
        let bits = 62_u32.saturating_sub(self.header.cluster_bits.saturating_sub(8));
        let at = place & (1_u64.checked_shl(bits).unwrap_or(0)).wrapping_sub(1);
        let sectors = (place & (COMPRESSED - 1)).checked_shr(bits).unwrap_or(0);
        let length = (sectors + 1) * SECTOR - at % SECTOR;
        let packed = self.bytes(at, length.min(self.length.saturating_sub(at).max(1)))?;
        let (mut data, mut packed) = (Vec::new(), packed.as_slice());
        match self.header.compression {
            0 => DeflateDecoder::new(packed).take(cluster).read_to_end(&mut data),
            _ => StreamingDecoder::new(&mut packed)?
                .take(cluster)
                .read_to_end(&mut data),
        }
        .context("the qcow2 image is damaged, a cluster can't be decompressed")?;
        if data.len() as u64 != cluster {
            bail!("the qcow2 image is damaged, a cluster is too short");
        }
        Ok(data)
    }
}
