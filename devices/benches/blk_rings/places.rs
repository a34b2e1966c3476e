//! Placement of threads on processors.
//!
//! One of two processors of a guest may temporarily run at half the other's speed, because another
//! guest shares its core. Within a turn, the loop and the worker therefore run on the same
//! processor, and the requesting thread runs on the other. The two sides swap processors after
//! every second turn.

use std::path::Path;

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

/// Where the threads of a turn run; anywhere, if there is but one processor.
#[derive(Clone, Copy)]
pub(super) struct Places {
    pair: Option<[usize; 2]>,
}

impl Places {
    /// Two of the processors of this process; others have their turn with `turned`.
    pub(super) fn new(all: &CpuSet, turned: bool) -> Self {
        let mut found = (0..CpuSet::MAX_CPU).filter(|processor| all.is_set(*processor));
        let pair = found.next().zip(found.next());
        Self {
            pair: pair.map(|(a, b)| if turned { [b, a] } else { [a, b] }),
        }
    }

    /// The calling thread serves.
    pub(super) fn serve(&self) {
        self.place(None, 0);
    }

    /// That thread of this process, a folder in /proc/self/task, serves.
    pub(super) fn has_serve(&self, task: &Path) {
        let name = task.file_name().and_then(|name| name.to_str());
        let number = name.and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        self.place(Some(number.expect("a thread")), 0);
    }

    /// The calling thread asks.
    pub(super) fn ask(&self) {
        self.place(None, 1);
    }

    fn place(&self, thread: Option<Pid>, index: usize) {
        if let Some(pair) = self.pair {
            let mut only = CpuSet::new();
            only.set(pair[index]);
            sched_setaffinity(thread, &only).expect("place a thread");
        }
    }
}

/// The processors that the calling thread may use.
pub(super) fn processors() -> CpuSet {
    sched_getaffinity(None).expect("the thread's processors")
}

/// Lets the calling thread use them again.
pub(super) fn restore(all: &CpuSet) {
    sched_setaffinity(None, all).expect("place a thread");
}
