//! One queue of a disk without threads: the driver's memory, the worker's framework and the host are all in the hands of
//! the test, so that each run is the same.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]

mod host;

use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use self::host::Mock;
pub(super) use self::host::{Host, host};
use vmm_base::GuestMemory;

use super::{Blk, BlkControl, BlkOptions};
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

/// Guest memory: two regions with a hole between them.
pub(super) const REGION: u64 = 1 << 17;
pub(super) const HOLE_END: u64 = 1 << 18;
pub(super) const MEMORY_END: u64 = HOLE_END + REGION;

/// Where the rings are.
pub(super) const DESC: u64 = 0x1000;
pub(super) const AVAIL: u64 = 0x3000;
pub(super) const USED: u64 = 0x4000;
/// Buffers are from here on.
pub(super) const DATA: u64 = 0x8000;

/// Size of the queue.
pub(super) const SIZE: u16 = 64;

/// A queue that was set up, in one of the states of its worker.
pub(super) struct Harness {
    pub memory: GuestMemory,
    pub host: Arc<Mutex<Host>>,
    pub control: BlkControl,
    pub counters: Arc<Counters>,
    /// Times that failed requests were reported, and reported as held.
    pub reported: usize,
    pub held: usize,
    handler: Box<dyn QueueHandler>,
    session: Option<Session>,
    features: u64,
    signals: Arc<Signals>,
    kicks: Vec<Arc<EventFd>>,
    bell: Arc<Bell>,
    state: QueueState,
    /// It keeps the image.
    _front: Blk,
}

impl Harness {
    pub(super) fn new(host: Host, options: BlkOptions, features: u64) -> Self {
        let ranges = [
            (GuestAddress(0), REGION as usize),
            (GuestAddress(HOLE_END), REGION as usize),
        ];
        let host = Arc::new(Mutex::new(host));
        let image = Mock {
            host: host.clone(),
            event: EventFd::new(EFD_NONBLOCK).unwrap(),
        };
        let mut front = Blk::new(Box::new(image), options);
        let mut msix = Msix::new(&MockMsi::default(), 2).unwrap();
        // Enabled; the first vector is not masked.
        msix.set_bus_master(true);
        msix.write_message_control(1 << 15);
        msix.write_table(12, &0_u32.to_le_bytes());
        let signals = Arc::new(Signals::new(Arc::clone(msix.vectors()), 1));
        signals.set_queue_vector(0, 0);
        let handler = front.workers(&signals).unwrap().remove(0).handler;
        let mut harness = Self {
            memory: GuestMemory::from_ranges(&ranges).unwrap(),
            host,
            control: front.control(),
            counters: Arc::default(),
            reported: 0,
            held: 0,
            handler,
            session: None,
            features,
            signals,
            kicks: vec![Arc::new(EventFd::new(EFD_NONBLOCK).unwrap())],
            bell: Arc::new(Bell::new().unwrap()),
            state: fresh(),
            _front: front,
        };
        harness.start();
        harness
    }

    /// Notifies the worker of a new entry in the available ring and runs all its work, including
    /// its own follow-up kicks.
    pub(super) fn kick(&mut self) {
        if let Some(session) = &mut self.session {
            session.kick_again(0);
        }
        self.run();
    }

    /// Requests have completed.
    pub(super) fn event(&mut self) {
        let Some(session) = &mut self.session else {
            return;
        };
        session.lift_budgets();
        let result = self.handler.event(session, 0);
        self.handle_result(result);
        self.run();
    }

    /// The host does all that it was asked for, and what follows from it.
    pub(super) fn finish_all(&mut self) {
        while self.host.lock().unwrap().finish(0) {
            self.event();
        }
    }

    fn run(&mut self) {
        while let Some(session) = &mut self.session {
            if session.take_ready(0).is_none() {
                return;
            }
            let result = session.on(0, (), Queue::disable_notification).and_then(|()| {
                let progress = self.handler.kick(session, 0)?;
                let exhausted = session.queue(0).is_some_and(|ring| ring.exhausted());
                if progress == Progress::Done && !exhausted {
                    session.ask_for_kick(0)?;
                } else if exhausted {
                    session.kick_again(0);
                }
                Ok(())
            });
            if result.is_err() {
                session.kick_again(0);
            }
            self.handle_result(result);
        }
    }

    fn handle_result(&mut self, result: Result<(), Fault>) {
        let Some(session) = &mut self.session else {
            return;
        };
        let result = match result {
            Err(Fault::Guest { queue, head, .. }) => session.add_used(queue, head, 0),
            other => other,
        };
        match result.and_then(|()| session.flush_interrupts()) {
            Ok(_) | Err(Fault::Guest { .. }) => {}
            Err(Fault::Backend(..)) => self.reported += 1,
            Err(Fault::Held(..)) => self.held += 1,
            // It needs a reset.
            Err(Fault::Ring { .. }) => self.reset(),
            Err(Fault::Bug(what)) => panic!("{what}"),
        }
    }

    /// Requests taken from the ring and not given back, as the ring has it.
    pub(super) fn outstanding(&self) -> u16 {
        let states = self.session.as_ref().map(Session::states);
        let state = states.map_or(self.state, |states| states[0]);
        state.next_avail.wrapping_sub(state.next_used)
    }

    fn drain(&mut self) {
        let Some(mut session) = self.session.take() else {
            return;
        };
        session.lift_budgets();
        let deadline = Instant::now() + crate::virtio::testing::PATIENCE;
        loop {
            match self.handler.drain(&mut session, deadline) {
                Ok(Drained::Quiet) => break,
                Ok(Drained::Late) => panic!("late"),
                Err(Fault::Backend(..)) => self.reported += 1,
                Err(Fault::Held(..)) => self.held += 1,
                Err(fault) => panic!("{fault}"),
            }
        }
        self.state = session.states()[0];
        assert!(self.host.lock().unwrap().waiting.is_empty());
    }

    pub(super) fn pause_and_resume(&mut self) {
        self.drain();
        self.start();
        self.run();
    }

    /// A reset, and a start with empty rings.
    pub(super) fn reset(&mut self) {
        self.drain();
        self.handler.reset();
        let stats = self.control.stats();
        assert_eq!((stats.in_flight, stats.held), (0, 0));
        assert_eq!((stats.throttled, stats.waiting), (0, 0));
        self.memory
            .write_slice(&[0; (DATA - DESC) as usize], GuestAddress(DESC))
            .unwrap();
        self.state = fresh();
        self.start();
    }

    fn start(&mut self) {
        let setup = Setup {
            memory: &self.memory,
            features: self.features,
            states: &[self.state],
            max_sizes: &[SIZE],
            kicks: &self.kicks,
            bell: &self.bell,
            signals: self.signals.clone(),
            counters: self.counters.clone(),
        };
        let mut session = Session::new(setup).unwrap();
        self.handler.start(&mut session).unwrap();
        self.session = Some(session);
    }
}

fn fresh() -> QueueState {
    QueueState {
        index: 0,
        size: SIZE,
        desc_table: DESC,
        avail_ring: AVAIL,
        used_ring: USED,
        next_avail: 0,
        next_used: 0,
    }
}
