//! Disks in the stream, at the source's end.

use std::{
    io,
    ops::Range,
    time::{Duration, Instant},
};

use block::content::{BLOCK, PIECE};

use super::{Mirrored, Sender, format::Kind};
use crate::snapshot::{SnapshotError, format::PAGE_BYTES, memory, saving::GoOn};

/// The changes of the disks during their transfer are sent again, before memory. This ends when at
/// most this many bytes are left, or a pass does not leave less than the previous one.
const FEW: u64 = 16 << 20;
/// Most such passes.
const MAX_PASSES: u32 = 16;
/// Interval of progress reports.
const TELL: Duration = Duration::from_secs(1);

impl Sender {
    /// Sends the whole content of the disks, and then the changes until few are left. `tell`
    /// receives the progress and the total, in bytes of the disks.
    pub(super) fn all_disks(
        &mut self,
        tell: &dyn Fn(u64, u64),
        go_on: GoOn<'_>,
    ) -> Result<(), SnapshotError> {
        self.begin(go_on)?;
        let mut disks = std::mem::take(&mut self.disks);
        let total: u64 = disks.iter().map(|disk| disk.mirror.capacity()).sum();
        for (number, disk) in (0_u32..).zip(&disks) {
            let size = disk.mirror.capacity().to_le_bytes();
            let body = [&number.to_le_bytes()[..], &size, disk.name.as_bytes()];
            self.frame(Kind::Disk, &body, go_on)?;
        }
        let mut before = 0_u64;
        let mut told = None;
        for (number, disk) in (0_u32..).zip(&mut disks) {
            let so_far = before;
            let mut tell = |offset: u64| {
                if told.is_none_or(|at: Instant| at.elapsed() >= TELL) {
                    told = Some(Instant::now());
                    tell(so_far.saturating_add(offset), total);
                }
            };
            self.whole_disk(number, disk, &mut tell, go_on)?;
            before = before.saturating_add(disk.mirror.capacity());
        }
        self.disks = disks;
        let mut before = u64::MAX;
        for _ in 0..MAX_PASSES {
            let left: u64 = self.disks.iter().map(|disk| disk.mirror.changed()).sum();
            if left <= FEW || left >= before {
                break;
            }
            before = left;
            self.changes(go_on)?;
        }
        Ok(())
    }

    fn whole_disk(
        &mut self,
        number: u32,
        disk: &mut Mirrored,
        tell: &mut dyn FnMut(u64),
        go_on: GoOn<'_>,
    ) -> Result<(), SnapshotError> {
        let mut buffer = Vec::new();
        let mut offset = 0_u64;
        while offset < disk.mirror.capacity() {
            go_on()?;
            tell(offset);
            let extent = disk.mirror.extent(offset).map_err(|error| failed(disk, error))?;
            let end = match extent.is_hole {
                true => offset.saturating_add(extent.length),
                false => offset.saturating_add(extent.length.min(PIECE)),
            };
            let frames = self.frames;
            if !extent.is_hole {
                self.blocks(number, disk, &(offset..end), &mut buffer, false, go_on)?;
            }
            // Only if no frame was sent for this part: otherwise this frame would clear the sent
            // data.
            if self.frames == frames && self.is_quiet() {
                self.cleared(number, &(offset..end.min(offset.saturating_add(PIECE))), go_on)?;
            }
            offset = end;
        }
        Ok(())
    }

    /// Sends the changes since the last call.
    pub(super) fn changes(&mut self, go_on: GoOn<'_>) -> Result<(), SnapshotError> {
        let mut disks = std::mem::take(&mut self.disks);
        let mut buffer = Vec::new();
        for (number, disk) in (0_u32..).zip(&mut disks) {
            let mut from = 0;
            while let Some(range) = disk.mirror.take(from).map_err(|error| failed(disk, error))? {
                go_on()?;
                from = range.end;
                let mut start = range.start;
                // A block of a very large disk is more than a piece.
                while start < range.end {
                    let end = range.end.min(start.saturating_add(PIECE));
                    self.blocks(number, disk, &(start..end), &mut buffer, true, go_on)?;
                    start = end;
                }
            }
        }
        self.disks = disks;
        Ok(())
    }

    /// Sends the content of a part of a disk. With `again`, also sends zeroes, since the part may
    /// have had other content before.
    fn blocks(
        &mut self,
        number: u32,
        disk: &mut Mirrored,
        range: &Range<u64>,
        buffer: &mut Vec<u8>,
        again: bool,
        go_on: GoOn<'_>,
    ) -> Result<(), SnapshotError> {
        let read = disk.mirror.read(range, buffer);
        read.map_err(|error| failed(disk, error))?;
        let block = usize::try_from(BLOCK).unwrap_or(usize::MAX);
        let mut blocks = buffer.chunks(block).peekable();
        let mut start = 0_usize;
        while let Some(first) = blocks.next() {
            let zeroes = is_zero(first);
            let mut end = start.saturating_add(first.len());
            while let Some(next) = blocks.next_if(|next| is_zero(next) == zeroes) {
                end = end.saturating_add(next.len());
            }
            let run = buffer.get(start..end).unwrap_or_default();
            let at = range.start.saturating_add(start as u64);
            if !zeroes {
                let body = [&number.to_le_bytes()[..], &at.to_le_bytes(), run];
                self.frame(Kind::Blocks, &body, go_on)?;
                self.blocks = self.blocks.saturating_add(run.len() as u64);
            } else if again {
                self.cleared(number, &(at..at.saturating_add(run.len() as u64)), go_on)?;
            }
            start = end;
        }
        Ok(())
    }

    fn cleared(&mut self, number: u32, range: &Range<u64>, go_on: GoOn<'_>) -> Result<(), SnapshotError> {
        let length = range.end.saturating_sub(range.start).to_le_bytes();
        let body = [&number.to_le_bytes()[..], &range.start.to_le_bytes(), &length];
        self.frame(Kind::Cleared, &body, go_on)
    }
}

/// The last block of a disk may be shorter than a page.
fn is_zero(block: &[u8]) -> bool {
    memory::is_zero(block) || block.len() < PAGE_BYTES && block.iter().all(|byte| *byte == 0)
}

fn failed(disk: &Mirrored, source: io::Error) -> SnapshotError {
    SnapshotError::disk("reading", &disk.name, source)
}
