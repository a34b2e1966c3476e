//! Requests on the disk in an image.
//!
//! Locks that keep imago consistent, in the order of acquisition:
//!
//! 1. `ranges`: the place of a cluster is stable while a request uses its range, so that data is
//!    read and written in place without a lock. A request that removes clusters holds their range
//!    exclusively.
//! 2. `access`: shared by all requests, exclusive for growing.
//! 3. `turns`: one request at a time changes an L2 table or makes imago lock it.
//! 4. `tables`: shared for look-ups and exclusive for changes of tables. imago's caches write each
//!    other back in a certain order, which holds only while no other request changes them.
//!
//! A write that allocates holds `tables` during the allocation of the cluster and again during the
//! update of the L2 table, but not while the data is written. A commit in between finds a cluster
//! with a refcount and without a reference, which at worst leaks. Flushes and look-ups do not wait
//! for data.

mod clear;
mod export;
mod ranges;
mod turns;

use std::{
    io,
    sync::{
        PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use imago::{FormatAccess, Mapping, ShallowMapping};
use vmm_base::sys::Iovecs;

use self::{
    ranges::{Ranges, Use},
    turns::Turns,
};
use super::{layer::Layer, medium::Medium, stage::Stage};
use crate::content::Extent;

/// Compressed data is read in pieces of at most this size; one cluster at the most is 2 MiB.
const BOUNCE: u64 = 2 << 20;

/// See the module.
#[derive(Debug)]
pub(super) struct Disk {
    ranges: Ranges,
    access: RwLock<FormatAccess<Layer>>,
    turns: Turns,
    tables: RwLock<Tables>,
    /// The image's own file, not those of its backing images.
    layer: Layer,
    cluster: u64,
    read_only: bool,
    /// Zero clusters exist: version 3.
    zero_clusters: bool,
    /// Size in bytes of the image below.
    below: Option<u64>,
    capacity: AtomicU64,
    /// A request panicked: the state of the tables in memory is unknown.
    failed: AtomicBool,
    /// The file is at least so long, in bytes.
    length: AtomicU64,
    /// There are changes of tables that no commit has brought to the file.
    uncommitted: AtomicBool,
}

#[derive(Debug, Default)]
struct Tables {
    /// Clusters were given up since the last commit: none may be allocated before the next.
    given_up: bool,
    /// Clusters were allocated since the last commit: none may be given up before the next, which would not see that they
    /// have been in use, and leave them their space in the file.
    allocated: bool,
}

/// Where in the file a range lies, for a request in a ring.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// In bytes.
    pub(super) offset: u64,
    range: Use,
    write: bool,
}

/// Properties of an image, for [`Disk::new`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Traits {
    pub(super) read_only: bool,
    pub(super) cluster: u64,
    pub(super) version: u32,
    /// Size in bytes of the image below.
    pub(super) below: Option<u64>,
    /// In bytes.
    pub(super) capacity: u64,
}

fn shared<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn exclusive<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

fn bytes(length: u64) -> usize {
    usize::try_from(length).unwrap_or(usize::MAX)
}

impl Disk {
    pub(super) fn new(access: FormatAccess<Layer>, layer: Layer, traits: Traits) -> Self {
        Self {
            ranges: Ranges::default(),
            access: RwLock::new(access),
            turns: Turns::default(),
            tables: RwLock::default(),
            layer,
            cluster: traits.cluster,
            read_only: traits.read_only,
            zero_clusters: traits.version >= 3,
            below: traits.below,
            capacity: AtomicU64::new(traits.capacity),
            failed: AtomicBool::new(false),
            length: AtomicU64::new(0),
            uncommitted: AtomicBool::new(false),
        }
    }

    /// In bytes.
    pub(super) fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Acquire)
    }

    /// In bytes.
    pub(super) fn cluster_size(&self) -> u64 {
        self.cluster
    }

    /// From now on every request fails.
    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Release);
        self.ranges.fail();
    }

    /// Returns the place of a range in the file, if the range is contiguous and, with `write`, can
    /// be written in place. The place is stable until [`unplace`](Self::unplace). Does not wait for
    /// other requests.
    pub(super) fn place(&self, offset: u64, length: u64, write: bool) -> Option<Place> {
        let allowed = if write {
            self.check_change(offset, length)
        } else {
            self.check(offset, length)
        };
        allowed.ok()?;
        let range = self.ranges.try_enter(offset..offset.checked_add(length)?)?;
        let found = self.find(offset, length, write);
        if found.is_none() {
            self.ranges.leave(range);
        }
        Some(Place {
            offset: found?,
            range,
            write,
        })
    }

    fn find(&self, offset: u64, length: u64, write: bool) -> Option<u64> {
        let access = self.access.try_read().ok()?;
        let tables = self.tables.try_read().ok()?;
        let (mapping, run) = access.get_shallow_mapping(offset, length).ok()?;
        let ShallowMapping::Raw {
            offset: at, writable, ..
        } = mapping
        else {
            return None;
        };
        // A write to another part of the cluster may give up a place that is not writable.
        if run < length || !(writable || self.read_only) {
            return None;
        }
        drop(tables);
        if !write && !self.reaches(at.checked_add(length)?) {
            return None;
        }
        Some(at)
    }

    /// A range that was placed is used no more. If it was for a write, it was written to, or may have been.
    pub(super) fn unplace(&self, place: &Place) {
        if place.write {
            self.layer.base().written();
        }
        self.ranges.leave(place.range);
    }

    /// Which L2 table is for `offset`: an L2 table is a cluster of entries of 8 bytes, each for a cluster.
    fn l2_table(&self, offset: u64) -> u64 {
        let covered = self.cluster.saturating_mul(self.cluster / 8);
        offset.checked_div(covered).unwrap_or(0)
    }

    /// Whether the file is at least so long: it never becomes shorter.
    fn reaches(&self, end: u64) -> bool {
        if self.length.load(Ordering::Relaxed) >= end {
            return true;
        }
        let length = self.layer.base().medium.size().unwrap_or(0);
        self.length.store(length, Ordering::Relaxed);
        length >= end
    }

    /// Whether a commit has something to do.
    pub(super) fn uncommitted(&self) -> bool {
        self.uncommitted.load(Ordering::Acquire) && !self.failed.load(Ordering::Acquire)
    }

    fn check(&self, offset: u64, length: u64) -> io::Result<()> {
        if self.failed.load(Ordering::Acquire) {
            return Err(io::Error::other("the qcow2 image failed before"));
        }
        match offset.checked_add(length) {
            Some(end) if end <= self.capacity() => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// The same for what changes something.
    fn check_change(&self, offset: u64, length: u64) -> io::Result<()> {
        if self.read_only {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        self.check(offset, length)
    }

    /// Fills `buffers` from byte `offset` on. Uses the list up.
    pub(super) fn read(&self, buffers: &mut Iovecs, offset: u64) -> io::Result<()> {
        let length = buffers.len() as u64;
        self.check(offset, length)?;
        let _range = self.ranges.enter(offset..offset.saturating_add(length))?;
        let access = shared(&self.access);
        let (mut offset, mut turn) = (offset, None);
        while !buffers.is_empty() {
            let tables = shared(&self.tables);
            let (mapping, length) = access.get_mapping(offset, buffers.len() as u64)?;
            let length = match mapping {
                Mapping::Raw {
                    storage,
                    offset: at,
                    writable,
                    ..
                } => {
                    // A write to another part of a cluster that is not only this one's gives it up.
                    let may_go =
                        !writable && !self.read_only && std::ptr::eq(storage.base(), self.layer.base());
                    let _stays = may_go.then_some(tables);
                    storage
                        .base()
                        .medium
                        .read_guest(&mut buffers.split_front(bytes(length)), at)?;
                    length
                }
                // imago locks the L2 table of a compressed cluster while it reads that.
                Mapping::Special { .. } if turn.is_none() && self.is_compressed(&access, offset)? => {
                    drop(tables);
                    turn = Some(self.turns.take(self.l2_table(offset)));
                    continue;
                }
                Mapping::Special { .. } => {
                    let length = length.min(BOUNCE);
                    self.layer.base().buffers.with(bytes(length), |data| {
                        access.read(&mut *data, offset)?;
                        drop(tables);
                        buffers.put(data);
                        io::Result::Ok(())
                    })?;
                    length
                }
                Mapping::Zero { .. } => {
                    drop(tables);
                    buffers.split_front(bytes(length)).zero();
                    length
                }
                // It ends before its last sector does only when it is broken.
                _ => return Err(io::ErrorKind::UnexpectedEof.into()),
            };
            turn = None;
            offset = advance(offset, length)?;
        }
        Ok(())
    }

    /// How far from `offset` on, below the capacity, there is data, in this image or below it, or nothing.
    pub(super) fn extent(&self, offset: u64) -> io::Result<Extent> {
        self.check(offset, 1)?;
        let left = self.capacity().saturating_sub(offset);
        let access = shared(&self.access);
        let tables = shared(&self.tables);
        let (mapping, length) = access.get_mapping(offset, left)?;
        drop(tables);
        Ok(Extent {
            length: length.max(1),
            is_hole: matches!(mapping, Mapping::Zero { .. }),
        })
    }

    /// Returns whether the cluster at `offset` is compressed in this file and may change.
    fn is_compressed(&self, access: &FormatAccess<Layer>, offset: u64) -> io::Result<bool> {
        let (mapping, _) = access.get_shallow_mapping(offset, 1)?;
        Ok(!self.read_only && matches!(mapping, ShallowMapping::Special { .. }))
    }

    /// Writes `buffers` from byte `offset` on. Uses the list up.
    pub(super) fn write(&self, buffers: &mut Iovecs, offset: u64) -> io::Result<()> {
        let length = buffers.len() as u64;
        self.check_change(offset, length)?;
        let _range = self.ranges.enter(offset..offset.saturating_add(length))?;
        let access = shared(&self.access);
        self.put(&access, offset, length, &mut |medium, at, length| {
            medium.write_guest(&mut buffers.split_front(bytes(length)), at)
        })
    }

    /// Writes a range, front to back; `write` is to write so many of its next bytes to a place of the file.
    fn put(
        &self,
        access: &FormatAccess<Layer>,
        offset: u64,
        length: u64,
        write: &mut dyn FnMut(&dyn Medium, u64, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let (mut offset, mut left) = (offset, length);
        while left > 0 {
            let tables = shared(&self.tables);
            let (mapping, run) = access.get_shallow_mapping(offset, left)?;
            let done = match mapping {
                ShallowMapping::Raw {
                    storage,
                    offset: at,
                    writable: true,
                    ..
                } => {
                    drop(tables);
                    let result = write(&*storage.base().medium, at, run);
                    storage.base().written();
                    result?;
                    run
                }
                _ => {
                    drop(tables);
                    self.allocate(access, offset, left, write)?
                }
            };
            offset = advance(offset, done)?;
            left = left.saturating_sub(done);
        }
        Ok(())
    }

    /// Writes the beginning of a range that has no clusters of its own yet; says how much.
    fn allocate(
        &self,
        access: &FormatAccess<Layer>,
        offset: u64,
        length: u64,
        write: &mut dyn FnMut(&dyn Medium, u64, u64) -> io::Result<()>,
    ) -> io::Result<u64> {
        let _turn = self.turns.take(self.l2_table(offset));
        let mut tables = exclusive(&self.tables);
        self.commit_before_allocation(access, &mut tables)?;
        let (mapping, run) = access.get_shallow_mapping(offset, length)?;
        let (length, gives_up) = match mapping {
            // Somebody else was quicker.
            ShallowMapping::Raw { writable: true, .. } => (run, false),
            // The write gives up the old place: compressed data, or a cluster with other users.
            ShallowMapping::Special { .. } | ShallowMapping::Raw { .. } => (run, true),
            _ => (self.unallocated(access, offset, length)?, false),
        };
        self.uncommitted.store(true, Ordering::Release);
        tables.allocated = true;
        let mapping = access.prepare_data_mapping(offset, length, true)?;
        drop(tables);

        let length = mapping.length();
        let base = mapping.storage().base();
        let result = write(&*base.medium, mapping.offset(), length);
        base.written();

        // A commit meanwhile knew nothing of what changes now.
        let mut tables = exclusive(&self.tables);
        self.uncommitted.store(true, Ordering::Release);
        tables.allocated = true;
        tables.given_up |= gives_up;
        match result {
            Ok(()) => access.commit_data_mapping(mapping)?,
            // Frees the allocation; the old content of the range is untouched.
            Err(error) => {
                drop(mapping);
                return Err(error);
            }
        }
        Ok(length)
    }

    /// How far from `offset` on writing gives nothing up.
    ///
    /// A cluster that reads as zeroes may have a place of its own that was kept ([`Clear::Zero`](clear)). imago takes it when
    /// asked for this cluster alone; as a part of more it may give it up for one that follows the cluster before.
    fn unallocated(&self, access: &FormatAccess<Layer>, offset: u64, length: u64) -> io::Result<u64> {
        let mut found = 0_u64;
        while found < length {
            let left = length.saturating_sub(found);
            let (mapping, run) = access.get_shallow_mapping(offset.saturating_add(found), left)?;
            let zeroes = matches!(mapping, ShallowMapping::Zero { explicit: true, .. });
            if zeroes && found == 0 {
                let rest = offset.checked_rem(self.cluster).unwrap_or(0);
                return Ok(run.min(self.cluster.saturating_sub(rest)));
            }
            if run == 0
                || zeroes
                || matches!(
                    mapping,
                    ShallowMapping::Special { .. } | ShallowMapping::Raw { .. }
                )
            {
                break;
            }
            found = found.saturating_add(run);
        }
        Ok(found)
    }

    fn commit_before_allocation(&self, access: &FormatAccess<Layer>, tables: &mut Tables) -> io::Result<()> {
        let due = self.layer.stage(|stage| stage.moved() || stage.is_full());
        if tables.given_up || due.unwrap_or(false) {
            self.commit_tables(access, tables)?;
        }
        Ok(())
    }

    /// Brings the file up to date with the tables in memory; on return that is stable.
    fn commit_tables(&self, access: &FormatAccess<Layer>, tables: &mut Tables) -> io::Result<()> {
        access.flush()?;
        match self.layer.stage(Stage::commit) {
            Some(result) => result?,
            None => self.layer.base().sync()?,
        }
        *tables = Tables::default();
        self.uncommitted.store(false, Ordering::Release);
        Ok(())
    }

    /// On return everything that was done before is on stable storage.
    pub(super) fn flush(&self) -> io::Result<()> {
        self.check(0, 0)?;
        // Mostly without the lock, so that look-ups need not wait for it.
        self.layer.base().sync()?;
        if !self.uncommitted.load(Ordering::Acquire) {
            return Ok(());
        }
        let access = shared(&self.access);
        let mut tables = exclusive(&self.tables);
        self.commit_tables(&access, &mut tables)
    }
}

fn advance(offset: u64, length: u64) -> io::Result<u64> {
    match offset.checked_add(length) {
        Some(next) if length > 0 => Ok(next),
        _ => Err(io::Error::other("a qcow2 image maps nothing at all")),
    }
}
