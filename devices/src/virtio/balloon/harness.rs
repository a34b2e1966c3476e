//! A balloon without threads: the driver's memory, the worker's framework and the host are all in the hands of the test,
//! so that each run is the same.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]

use std::{
    io,
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use vm_memory::{Bytes, GuestAddress};
use vmm_base::GuestMemory;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Balloon, BalloonControl, BalloonOptions, PAGE, Reclaim, config::QUEUE_SIZES};
use crate::{
    pci::msix::Msix,
    virtio::{
        bell::Bell,
        device::{Drained, Progress, QueueHandler, VirtioDevice},
        fault::{Counters, Fault},
        queue::{Queue, QueueState},
        session::{Session, Setup},
        signals::Signals,
        testing::MockMsi,
    },
};

/// Guest memory: two regions with a hole between them, in bytes.
pub(super) const REGIONS: [Range<u64>; 2] = [0..1 << 20, 2 << 20..4 << 20];
/// Rings of queue n are at `RINGS + n * RING_SPACE`, buffers after them.
pub(super) const RINGS: u64 = 0x1000;
pub(super) const RING_SPACE: u64 = 0x2000;
pub(super) const AVAIL: u64 = 0x1000;
const USED: u64 = 0x1800;
/// Buffers are from here on, up to the first region's end.
pub(super) const DATA: u64 = 0x1_0000;
/// Size of each queue.
pub(super) const SIZE: u16 = 16;

/// Mock of the host: records the reclaimed ranges, and fails on demand.
#[derive(Clone, Default)]
pub(super) struct MockHost {
    /// In pages, since it was looked at last.
    pub given: Arc<Mutex<Vec<Range<u64>>>>,
    /// How many of the next calls fail.
    pub failures: Arc<AtomicU64>,
}

impl Reclaim for MockHost {
    fn reclaim(&self, address: GuestAddress, length: u64) -> io::Result<()> {
        let range = address.0..address.0 + length;
        assert!(length > 0 && address.0.is_multiple_of(PAGE) && length.is_multiple_of(PAGE));
        assert!(
            REGIONS
                .iter()
                .any(|region| region.start <= range.start && range.end <= region.end),
            "{range:x?} is not in one region"
        );
        if self.failures.load(Ordering::SeqCst) > 0 {
            self.failures.fetch_sub(1, Ordering::SeqCst);
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        self.given
            .lock()
            .unwrap()
            .push(range.start / PAGE..range.end / PAGE);
        Ok(())
    }
}

/// A balloon whose queues were set up, and its driver's memory.
pub(super) struct Harness {
    pub memory: GuestMemory,
    pub host: MockHost,
    pub control: BalloonControl,
    pub front: Balloon,
    /// Faults by kind.
    pub guest_faults: usize,
    pub backend_faults: usize,
    pub resets: usize,
    /// Kicks since the last look, for bounds on work.
    pub kicks_done: usize,
    handler: Box<dyn QueueHandler>,
    session: Option<Session>,
    features: u64,
    signals: Arc<Signals>,
    kicks: Vec<Arc<EventFd>>,
    bell: Arc<Bell>,
    states: Vec<QueueState>,
}

impl Harness {
    pub(super) fn new(features: u64, options: BalloonOptions) -> Self {
        let ranges: Vec<_> = REGIONS
            .iter()
            .map(|region| (GuestAddress(region.start), (region.end - region.start) as usize))
            .collect();
        let host = MockHost::default();
        let mut front = Balloon::new(Box::new(host.clone()), options);
        let queues = front.queue_sizes().len();
        let msix = Msix::new(&MockMsi::default(), queues + 1).unwrap();
        let signals = Arc::new(Signals::new(Arc::clone(msix.vectors()), queues));
        let handler = front.workers(&signals).unwrap().remove(0).handler;
        let event = |_| Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        let mut harness = Self {
            memory: GuestMemory::from_ranges(&ranges).unwrap(),
            host,
            control: front.control(),
            front,
            guest_faults: 0,
            backend_faults: 0,
            resets: 0,
            kicks_done: 0,
            handler,
            session: None,
            features: features | 1 << 32,
            signals,
            kicks: (0..queues).map(event).collect(),
            bell: Arc::new(Bell::new().unwrap()),
            states: (0..queues as u16).map(fresh).collect(),
        };
        harness.start();
        harness.run();
        harness
    }

    /// How many queues it has.
    pub(super) fn queues(&self) -> u16 {
        self.kicks.len() as u16
    }

    /// Notifies the worker of a new entry in the available ring and runs all its work, including
    /// its own follow-up kicks.
    pub(super) fn kick(&mut self, queue: u16) {
        if let Some(session) = &mut self.session {
            session.kick_again(queue);
        }
        self.run();
    }

    /// One call of the handler only.
    pub(super) fn kick_once(&mut self, queue: u16) {
        if let Some(session) = &mut self.session {
            session.kick_again(queue);
        }
        self.step();
    }

    /// Somebody asked for statistics.
    pub(super) fn asked(&mut self) {
        let Some(session) = &mut self.session else {
            return;
        };
        session.lift_budgets();
        let result = self.handler.event(session, 0);
        self.handle_result(result);
        self.run();
    }

    pub(super) fn run(&mut self) {
        let mut left = 100_000;
        while self.step() {
            left -= 1;
            assert!(left > 0, "it never comes to rest");
        }
    }

    fn step(&mut self) -> bool {
        let Some(session) = &mut self.session else {
            return false;
        };
        let Some(queue) = session.take_ready(u16::MAX) else {
            return false;
        };
        self.kicks_done += 1;
        let result = session.on(queue, (), Queue::disable_notification).and_then(|()| {
            let progress = self.handler.kick(session, queue)?;
            let exhausted = session.queue(queue).is_some_and(|ring| ring.exhausted());
            if progress == Progress::Done && !exhausted {
                session.ask_for_kick(queue)?;
            } else if exhausted {
                session.kick_again(queue);
            }
            Ok(())
        });
        if result.is_err() {
            session.kick_again(queue);
        }
        self.handle_result(result);
        true
    }

    fn handle_result(&mut self, result: Result<(), Fault>) {
        let Some(session) = &mut self.session else {
            return;
        };
        let result = match result {
            Err(Fault::Guest { queue, head, .. }) => {
                self.guest_faults += 1;
                session.add_used(queue, head, 0)
            }
            other => other,
        };
        match result.and_then(|()| session.flush_interrupts()) {
            Ok(_) => {}
            Err(Fault::Backend(..)) => self.backend_faults += 1,
            // It needs a reset.
            Err(Fault::Ring { .. }) => {
                self.resets += 1;
                self.reset();
            }
            Err(fault) => panic!("{fault}"),
        }
    }

    /// Requests of a queue taken from the ring and not given back, as the ring has it.
    pub(super) fn outstanding(&self, queue: u16) -> u16 {
        let states = self.session.as_ref().map(Session::states);
        let state = states.unwrap_or_else(|| self.states.clone())[usize::from(queue)];
        state.next_avail.wrapping_sub(state.next_used)
    }

    fn drain(&mut self) {
        let Some(mut session) = self.session.take() else {
            return;
        };
        session.lift_budgets();
        let deadline = Instant::now() + crate::virtio::testing::PATIENCE;
        assert_eq!(
            self.handler.drain(&mut session, deadline).unwrap(),
            Drained::Quiet
        );
        self.states = session.states();
        for state in &self.states {
            assert_eq!(
                state.next_avail, state.next_used,
                "a request is neither in the ring nor answered"
            );
        }
    }

    pub(super) fn pause_and_resume(&mut self) {
        self.drain();
        self.start();
        self.run();
    }

    /// A reset by the driver, and a start with empty rings.
    pub(super) fn reset(&mut self) {
        self.drain();
        self.handler.reset();
        self.front.reset();
        let stats = self.control.stats();
        assert_eq!((stats.held, stats.claimed, stats.guest), (0, 0, None));
        let zeroes = [0; (DATA - RINGS) as usize];
        self.memory.write_slice(&zeroes, GuestAddress(RINGS)).unwrap();
        self.states = (0..self.queues()).map(fresh).collect();
        self.start();
    }

    fn start(&mut self) {
        let sizes = vec![SIZE.min(QUEUE_SIZES[0]); self.kicks.len()];
        let setup = Setup {
            memory: &self.memory,
            features: self.features,
            states: &self.states,
            max_sizes: &sizes,
            kicks: &self.kicks,
            bell: &self.bell,
            signals: self.signals.clone(),
            counters: Arc::new(Counters::default()),
        };
        let mut session = Session::new(setup).unwrap();
        self.handler.start(&mut session).unwrap();
        self.session = Some(session);
    }

    /// Writes one descriptor of a queue's table.
    pub(super) fn describe(&self, queue: u16, at: u16, address: u64, length: u32, flags: u16, next: u16) {
        let raw = u128::from(address)
            | u128::from(length) << 64
            | u128::from(flags) << 96
            | u128::from(next) << 112;
        let place = RINGS + u64::from(queue) * RING_SPACE + u64::from(at % SIZE) * 16;
        self.memory
            .write_slice(&raw.to_le_bytes(), GuestAddress(place))
            .unwrap();
    }

    /// Makes the chain with that head available, `index` being the index before.
    pub(super) fn offer(&self, queue: u16, index: u16, head: u16) {
        let avail = RINGS + u64::from(queue) * RING_SPACE + AVAIL;
        let slot = GuestAddress(avail + 4 + u64::from(index % SIZE) * 2);
        self.memory.write_obj(head, slot).unwrap();
        self.memory
            .store(index.wrapping_add(1), GuestAddress(avail + 2), Ordering::Release)
            .unwrap();
    }
}

fn fresh(index: u16) -> QueueState {
    let base = RINGS + u64::from(index) * RING_SPACE;
    QueueState {
        index,
        size: SIZE,
        desc_table: base,
        avail_ring: base + AVAIL,
        used_ring: base + USED,
        next_avail: 0,
        next_used: 0,
    }
}
