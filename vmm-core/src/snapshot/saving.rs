//! Snapshots of a machine: a thread writes memory, and the machine's owner takes the rest while the
//! machine is paused.
//!
//! ```text
//!  owner   begin ───────────────── Ready ▶ pause, take state and changed pages, complete ─ resume ──── Ended ▶ end
//!  thread    └ all memory, then what the guest changed meanwhile, again and again ┘    └ the rest, make it durable ┘
//! ```
//!
//! The memory of a machine that is paused all the time is written once. For a running machine,
//! changed pages are logged and written again, until few are left or a round finds no fewer. The
//! last pages are copied while the machine is paused, and written later. If they are too many for a
//! copy, the machine stays paused until they are written.
//!
//! A live [migration](crate::migration) is a save into a stream ([`Purpose::Migration`]). Rounds
//! continue until the rest can be sent within the limit of the downtime, and the machine stays
//! paused until all is sent. If rounds do not reduce the rest, the save may ask the machine's owner
//! to [throttle](Round::throttle) the vCPUs.
//!
//! The drop of a [`Saving`] ends the thread, and leaves a file that was never completed.

use std::{
    fs::File,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use vm_memory::{GuestAddress, GuestMemoryBackend};
use vmm_base::{
    GuestMemory,
    thread::{self, ThreadKind},
};
use vmm_protocol::{
    state::{self, SnapshotInfo},
    vmm::ErrorKind,
};

use super::{
    Writer,
    converging::{bytes_per_second, is_time_to_pause, may_throttle, next_throttle},
    error::SnapshotError,
    format::{PAGE, check_sections},
    memory,
};
use crate::{
    failure::Failure,
    kvm::{SlotError, SlotId, Vm},
};

/// Changed pages that are worth another round while the machine runs, in bytes.
const FEW: u64 = 2 << 20;
/// Most rounds of a snapshot.
pub(super) const MAX_ROUNDS: u32 = 16;
/// Most bytes that are copied while the machine is paused, to be written later.
const MAX_COPIED: u64 = 32 << 20;

/// Called for each mebibyte: an error ends the save.
pub type GoOn<'a> = &'a dyn Fn() -> Result<(), SnapshotError>;

/// Where a machine is written to.
pub trait Sink: Send {
    /// Writes what all of `memory` holds now. Comes first.
    fn everything(&mut self, memory: &GuestMemory, go_on: GoOn<'_>) -> Result<(), SnapshotError>;
    /// Writes what these pages of `memory` hold now; guest-physical addresses, in order.
    fn pages(
        &mut self,
        memory: &GuestMemory,
        addresses: Vec<u64>,
        go_on: GoOn<'_>,
    ) -> Result<(), SnapshotError>;
    /// Writes whole pages whose content was copied, at a guest-physical address within one range of memory.
    fn contents(&mut self, address: u64, contents: &[u8], go_on: GoOn<'_>) -> Result<(), SnapshotError>;
    /// Writes the content of all mirrored disks, and most of their changes meanwhile. Called before
    /// memory. `tell` receives the number of written bytes and the total.
    fn disks(&mut self, tell: &dyn Fn(u64, u64), go_on: GoOn<'_>) -> Result<(), SnapshotError>;
    /// Writes the changes of the disks since the last call.
    fn disk_changes(&mut self, go_on: GoOn<'_>) -> Result<(), SnapshotError>;
    /// Bytes that were changed on the disks and not written since.
    fn changed_on_disks(&self) -> u64;
    /// How much was written so far.
    fn written(&self) -> Written;
    /// Writes the rest; returns the total length. The written memory matches the moment at which
    /// `machine` was saved.
    fn finish(
        self: Box<Self>,
        info: &SnapshotInfo,
        machine: state::Machine,
        go_on: GoOn<'_>,
    ) -> Result<u64, SnapshotError>;
}

/// Number of bytes written, including repeated writes; zeroes may be omitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Of memory.
    pub memory: u64,
    /// Of disks.
    pub disks: u64,
}

impl Written {
    /// Of both.
    pub fn bytes(self) -> u64 {
        self.memory.saturating_add(self.disks)
    }
}

/// Policy for a guest that changes memory and disks faster than they can be sent within the limit
/// of the downtime.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Nothing: it is not migrated then.
    #[default]
    AlwaysSafe,
    /// Its vCPUs are throttled when it would not be migrated otherwise.
    PreferSafe,
    /// Its vCPUs are throttled as soon as a round does not help enough.
    PreferForced,
    /// The same, and when that does not help, it stands still for as long as it takes.
    AlwaysForced,
}

/// Purpose of a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The machine continues as soon as possible.
    Snapshot,
    /// It stays paused when all is sent.
    Migration {
        /// How long sending the rest may take while the machine is paused. Zero: no matter how long.
        downtime: Duration,
        /// Policy for a guest that is too fast.
        policy: Policy,
    },
}

/// A round of a migration has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// Its number; 0 is the one that sends all memory.
    pub number: u32,
    /// Bytes of memory and disks that were sent so far.
    pub sent_bytes: u64,
    /// Bytes that the guest has changed of them meanwhile.
    pub dirty_bytes: u64,
    /// How fast this round was sent, in bytes per second.
    pub bytes_per_second: u64,
    /// For which part of the time the vCPUs are to stand still from now on, in percent: 0 to 99.
    pub throttle: u8,
}

/// Progress of a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The disks that go along are sent: bytes of how many.
    Disks {
        /// So far.
        done: u64,
        /// Total of all disks.
        total: u64,
    },
    /// A round of a migration has ended.
    Round(Round),
    /// Pause the machine and [`complete`](Saving::complete).
    Ready,
    /// The thread has ended: see [`Saving::end`].
    Ended,
}

/// Result of a save.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Length of the file.
    pub file_bytes: u64,
    /// Bytes of memory written, including repeated writes but without pages of zeroes.
    pub memory_bytes: u64,
    /// The same of disks.
    pub disk_bytes: u64,
    /// How often memory that was changed meanwhile was written again.
    pub rounds: u32,
}

/// Time at which the machine can continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GoesOn {
    /// At once.
    Now,
    /// After [`Event::Ended`]; after a migration not at all.
    WhenEnded,
}

/// Final input of the thread.
struct Rest {
    info: SnapshotInfo,
    machine: state::Machine,
    pages: LastPages,
}

/// The pages that were changed since the last round.
enum LastPages {
    /// Guest-physical address and content.
    Copied(Vec<(u64, Vec<u8>)>),
    /// Guest-physical addresses; they do not change any more.
    Named(Vec<u64>),
}

/// Remaining data at the time of the pause.
#[derive(Debug, Default, PartialEq, Eq)]
struct Left {
    rounds: u32,
    /// In order.
    pages: Vec<u64>,
}

/// A save under way.
#[derive(Debug)]
pub struct Saving {
    vm: Arc<Vm>,
    memory: GuestMemory,
    purpose: Purpose,
    /// Slots with a dirty log; empty if the machine is paused.
    logged: Vec<SlotId>,
    rest: Option<Sender<Rest>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Report, SnapshotError>>>,
}

impl Saving {
    /// Begins to write a snapshot into `file`. `runs`: the machine runs meanwhile. `tell` is called by the thread.
    pub fn begin(
        vm: &Arc<Vm>,
        memory: &GuestMemory,
        file: File,
        runs: bool,
        tell: impl Fn(Event) + Send + 'static,
    ) -> Result<Self, Failure> {
        let sink = Box::new(Writer::new(file, memory)?);
        Self::into_sink(vm, memory, sink, (Purpose::Snapshot, runs), tell)
    }

    /// The same with anything that takes it.
    pub fn into_sink(
        vm: &Arc<Vm>,
        memory: &GuestMemory,
        sink: Box<dyn Sink>,
        (purpose, runs): (Purpose, bool),
        tell: impl Fn(Event) + Send + 'static,
    ) -> Result<Self, Failure> {
        let (rest, awaited) = channel();
        let mut saving = Self {
            vm: Arc::clone(vm),
            memory: memory.clone(),
            purpose,
            logged: Vec::new(),
            rest: Some(rest),
            stop: Arc::default(),
            thread: None,
        };
        if runs {
            // A screen's memory is a slot too, and is saved with its device.
            let is_ram = |range: &Range<u64>| memory.find_region(GuestAddress(range.start)).is_some();
            for (slot, _) in vm.slots().into_iter().filter(|(_, range)| is_ram(range)) {
                vm.start_dirty_log(slot)?;
                saving.logged.push(slot);
            }
        }
        let job = Job {
            vm: Arc::clone(vm),
            memory: memory.clone(),
            logged: saving.logged.clone(),
            stop: Arc::clone(&saving.stop),
            rest: awaited,
            sink,
            purpose,
        };
        let thread = thread::spawn(ThreadKind::Snapshot, "snapshot", move || {
            let result = job.run(&tell);
            tell(Event::Ended);
            result
        });
        saving.thread = Some(thread.map_err(|error| Failure::new(ErrorKind::Resources, &error))?);
        Ok(saving)
    }

    /// Passes the remaining data to the thread, after [`Event::Ready`], with the machine paused;
    /// `machine` is its state. To be called once.
    pub fn complete(&mut self, info: SnapshotInfo, machine: state::Machine) -> Result<GoesOn, Failure> {
        check_sections(&machine.sections)?;
        let changed = take_dirty(&self.vm, &self.logged).map_err(SnapshotError::from)?;
        let bytes = changed.len() as u64 * PAGE;
        let (pages, goes_on) = if bytes <= MAX_COPIED && self.purpose == Purpose::Snapshot {
            (LastPages::Copied(self.copy(changed)?), GoesOn::Now)
        } else {
            (LastPages::Named(changed), GoesOn::WhenEnded)
        };
        if let Some(rest) = self.rest.take() {
            // A thread that has failed says so itself.
            let _ = rest.send(Rest { info, machine, pages });
        }
        Ok(goes_on)
    }

    fn copy(&self, pages: Vec<u64>) -> Result<Vec<(u64, Vec<u8>)>, SnapshotError> {
        let copied = memory::runs(pages).map(|(address, length)| {
            let mut content = Vec::new();
            memory::read(&self.memory, address, length, &mut content)?;
            Ok((address, content))
        });
        copied.collect()
    }

    /// Has the thread end soon: the file is never completed. It is [ended](Self::end) as usual.
    pub fn give_up(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.rest = None;
    }

    /// Result of the save, after [`Event::Ended`].
    pub fn end(mut self) -> Result<Report, Failure> {
        self.stop_logs();
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => Ok(result?),
            _ => Err(Failure::of(ErrorKind::Internal, "writing a snapshot panicked")),
        }
    }

    fn stop_logs(&mut self) {
        for slot in self.logged.drain(..) {
            if let Err(error) = self.vm.stop_dirty_log(slot) {
                tracing::warn!(%error, "the guest's writes are logged on after a snapshot");
            }
        }
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.rest = None;
        self.stop_logs();
        if let Some(thread) = self.thread.take() {
            // The result of the thread is not needed.
            let _ = thread.join();
        }
    }
}

/// The pages of all `slots` that were changed since the last time, in order; all of them the first time.
fn take_dirty(vm: &Vm, slots: &[SlotId]) -> Result<Vec<u64>, SlotError> {
    let mut pages = Vec::new();
    for slot in slots {
        pages.extend(vm.take_dirty(*slot)?.addresses());
    }
    pages.sort_unstable();
    Ok(pages)
}

/// Work of the thread.
struct Job {
    vm: Arc<Vm>,
    memory: GuestMemory,
    logged: Vec<SlotId>,
    stop: Arc<AtomicBool>,
    rest: Receiver<Rest>,
    sink: Box<dyn Sink>,
    purpose: Purpose,
}

impl Job {
    fn run(mut self, tell: &impl Fn(Event)) -> Result<Report, SnapshotError> {
        let go_on = go_on(&self.stop);
        // They take longest: memory that is changed meanwhile need not be sent twice.
        let tell_disks = |done, total| tell(Event::Disks { done, total });
        self.sink.disks(&tell_disks, &go_on)?;
        // The first time all pages are named, and all are written.
        for slot in &self.logged {
            let _all = self.vm.take_dirty(*slot)?;
        }
        let before = self.sink.written().bytes();
        let began = Instant::now();
        self.sink.everything(&self.memory, &go_on)?;
        let left = match self.purpose {
            _ if self.logged.is_empty() => Left::default(),
            Purpose::Snapshot => self.rounds()?,
            Purpose::Migration { downtime, policy } => {
                self.converge((downtime, policy), (before, began.elapsed()), tell)?
            }
        };
        tell(Event::Ready);
        let Ok(Rest { info, machine, pages }) = self.rest.recv() else {
            return Err(SnapshotError::Cancelled);
        };
        match pages {
            LastPages::Copied(pages) => {
                for (address, content) in pages {
                    self.sink.contents(address, &content, &go_on)?;
                }
            }
            LastPages::Named(pages) => {
                self.sink.pages(&self.memory, join(left.pages, pages), &go_on)?;
                // The guest stands still.
                self.sink.disk_changes(&go_on)?;
            }
        }
        let written = self.sink.written();
        Ok(Report {
            file_bytes: self.sink.finish(&info, machine, &go_on)?,
            memory_bytes: written.memory,
            disk_bytes: written.disks,
            rounds: left.rounds,
        })
    }

    /// Writes changed pages until few are left, or a round finds no fewer than the previous one.
    fn rounds(&mut self) -> Result<Left, SnapshotError> {
        let go_on = go_on(&self.stop);
        let mut before = u64::MAX;
        for rounds in 1..=MAX_ROUNDS {
            let pages = take_dirty(&self.vm, &self.logged)?;
            let bytes = pages.len() as u64 * PAGE;
            self.sink.pages(&self.memory, pages, &go_on)?;
            if bytes <= FEW || bytes >= before {
                return Ok(Left {
                    rounds,
                    ..Left::default()
                });
            }
            before = bytes;
        }
        Ok(Left {
            rounds: MAX_ROUNDS,
            ..Left::default()
        })
    }

    /// Sends changes until the rest can be sent within `downtime`, and applies `policy` to the
    /// guest. `before` is the number of bytes written before all memory, and `elapsed` is the time
    /// that all memory took.
    fn converge(
        &mut self,
        (downtime, policy): (Duration, Policy),
        (mut before, mut elapsed): (u64, Duration),
        tell: &impl Fn(Event),
    ) -> Result<Left, SnapshotError> {
        let go_on = go_on(&self.stop);
        let mut rounds = 0;
        let mut throttle = 0;
        loop {
            let sent_bytes = self.sink.written().bytes();
            let pages = take_dirty(&self.vm, &self.logged)?;
            let dirty_bytes = (pages.len() as u64 * PAGE).saturating_add(self.sink.changed_on_disks());
            let sent_now = sent_bytes.saturating_sub(before);
            let speed = bytes_per_second(sent_now, elapsed);
            let ready = is_time_to_pause(policy, rounds, dirty_bytes, speed, downtime);
            if may_throttle(policy, rounds) && !matches!(ready, Ok(true)) {
                throttle = next_throttle(throttle, sent_now, dirty_bytes);
            }
            tell(Event::Round(Round {
                number: rounds,
                sent_bytes,
                dirty_bytes,
                bytes_per_second: speed,
                throttle,
            }));
            if ready? {
                return Ok(Left { rounds, pages });
            }
            rounds = rounds.saturating_add(1);
            before = sent_bytes;
            let began = Instant::now();
            self.sink.pages(&self.memory, pages, &go_on)?;
            self.sink.disk_changes(&go_on)?;
            elapsed = began.elapsed();
        }
    }
}

/// All pages of both, in order.
fn join(mut left: Vec<u64>, more: Vec<u64>) -> Vec<u64> {
    left.extend(more);
    left.sort_unstable();
    left.dedup();
    left
}

fn go_on(stop: &Arc<AtomicBool>) -> impl Fn() -> Result<(), SnapshotError> + use<> {
    let stop = Arc::clone(stop);
    move || match stop.load(Ordering::Relaxed) {
        true => Err(SnapshotError::Cancelled),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_has_each_page_once_in_order() {
        assert_eq!(
            join(vec![0x3000, 0x1000], vec![0x2000, 0x3000]),
            [0x1000, 0x2000, 0x3000]
        );
    }
}
