//! Taking a snapshot of a machine: a thread writes memory, the machine's owner takes the rest while the machine is paused.
//!
//! ```text
//!  owner   begin ───────────────── Ready ▶ pause, take state and changed pages, complete ─ resume ──── Ended ▶ end
//!  thread    └ all memory, then what the guest changed meanwhile, again and again ┘    └ the rest, make it durable ┘
//! ```
//!
//! Of a machine that is paused all the time, memory is written once. Of one that runs, the pages that it changes are logged and
//! written again, until few are left, or a round does not make them fewer. The last of them are copied while the machine is paused and
//! written later; when they are too many for that, the machine stays paused until they are written.
//!
//! Whoever drops a [`Saving`] ends the thread and leaves a file that was never completed.

use std::{
    fs::File,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
};

use devices::{
    GuestMemory,
    thread::{self, ThreadKind},
};
use proto::{
    state::{self, SnapshotInfo},
    vmm::ErrorKind,
};
use vm_memory::{GuestAddress, GuestMemoryBackend};

use super::{Writer, error::SnapshotError, format::PAGE, memory};
use crate::{
    kvm::{SlotError, SlotId, Vm},
    lifecycle::Failure,
};

/// Changed pages that are worth another round while the machine runs, in bytes.
const FEW: u64 = 2 << 20;
/// Most rounds.
const MAX_ROUNDS: u32 = 16;
/// Most bytes that are copied while the machine is paused, to be written later.
const MAX_COPIED: u64 = 32 << 20;

/// What is told of a save that goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Pause the machine and [`complete`](Saving::complete).
    Ready,
    /// The thread has ended: see [`Saving::end`].
    Ended,
}

/// What came of a save.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Length of the file.
    pub file_bytes: u64,
    /// Bytes of memory that were written, those that were written again included; pages of zeroes are not.
    pub memory_bytes: u64,
    /// How often memory that was changed meanwhile was written again.
    pub rounds: u32,
}

/// When the machine can go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GoesOn {
    /// At once.
    Now,
    /// After [`Event::Ended`].
    WhenEnded,
}

/// What the thread needs at last.
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

/// A save under way.
#[derive(Debug)]
pub struct Saving {
    vm: Arc<Vm>,
    memory: GuestMemory,
    /// Whose pages are logged; none when the machine is paused.
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
        let writer = Writer::new(file, memory)?;
        let (rest, awaited) = channel();
        let mut saving = Self {
            vm: Arc::clone(vm),
            memory: memory.clone(),
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
            writer,
        };
        let thread = thread::spawn(ThreadKind::Snapshot, "snapshot", move || {
            let result = job.run(|| tell(Event::Ready));
            tell(Event::Ended);
            result
        });
        saving.thread = Some(thread.map_err(|error| Failure::new(ErrorKind::Resources, &error))?);
        Ok(saving)
    }

    /// Hands over what is left, after [`Event::Ready`], with the machine paused; `machine` is its state. To be called once.
    pub fn complete(&mut self, info: SnapshotInfo, machine: state::Machine) -> Result<GoesOn, Failure> {
        let changed = take_dirty(&self.vm, &self.logged).map_err(SnapshotError::from)?;
        let bytes = changed.len() as u64 * PAGE;
        let (pages, goes_on) = if bytes <= MAX_COPIED {
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

    /// What came of it, after [`Event::Ended`].
    pub fn end(mut self) -> Result<Report, Failure> {
        self.stop_logs();
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => Ok(result?),
            _ => Err(Failure {
                kind: ErrorKind::Internal,
                message: "writing a snapshot panicked".to_owned(),
            }),
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
            // What it has to say interests nobody any more.
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

/// What the thread does.
struct Job {
    vm: Arc<Vm>,
    memory: GuestMemory,
    logged: Vec<SlotId>,
    stop: Arc<AtomicBool>,
    rest: Receiver<Rest>,
    writer: Writer,
}

impl Job {
    fn run(mut self, ready: impl FnOnce()) -> Result<Report, SnapshotError> {
        // The first time all pages are named, and all are written.
        let _all = take_dirty(&self.vm, &self.logged)?;
        let go_on = go_on(&self.stop);
        self.writer.everything(&self.memory, &go_on)?;
        let rounds = self.rounds()?;
        ready();
        let Ok(Rest { info, machine, pages }) = self.rest.recv() else {
            return Err(SnapshotError::Cancelled);
        };
        match pages {
            LastPages::Copied(pages) => {
                for (address, content) in pages {
                    go_on()?;
                    self.writer.page_contents(address, &content)?;
                }
            }
            LastPages::Named(pages) => self.writer.pages(&self.memory, pages, &go_on)?,
        }
        let memory_bytes = self.writer.written();
        Ok(Report {
            file_bytes: self.writer.finish(&info, machine)?,
            memory_bytes,
            rounds,
        })
    }

    /// Writes what is changed until that is little, or more than before; says how often.
    fn rounds(&mut self) -> Result<u32, SnapshotError> {
        if self.logged.is_empty() {
            return Ok(0);
        }
        let go_on = go_on(&self.stop);
        let mut before = u64::MAX;
        for round in 1..=MAX_ROUNDS {
            let pages = take_dirty(&self.vm, &self.logged)?;
            let bytes = pages.len() as u64 * PAGE;
            self.writer.pages(&self.memory, pages, &go_on)?;
            if bytes <= FEW || bytes >= before {
                return Ok(round);
            }
            before = bytes;
        }
        Ok(MAX_ROUNDS)
    }
}

fn go_on(stop: &Arc<AtomicBool>) -> impl Fn() -> Result<(), SnapshotError> + use<> {
    let stop = Arc::clone(stop);
    move || match stop.load(Ordering::Relaxed) {
        true => Err(SnapshotError::Cancelled),
        false => Ok(()),
    }
}
