//! The back of a device without its thread: the driver's memory and the worker's framework are in the hands of the test, so
//! that each run is the same.

use std::{
    ops::Range,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use vm_memory::{Bytes, GuestAddress};
use vmm_base::GuestMemory;
use vmm_sys_util::{
    epoll::EpollEvent,
    eventfd::{EFD_NONBLOCK, EventFd},
};

use super::{MockMsi, PATIENCE, describe};
use crate::{
    pci::msix::Msix,
    virtio::{
        device::{Drained, Progress, QueueHandler, VirtioDevice},
        fault::{Counters, Fault},
        queue::{Queue, QueueState},
        session::{Session, Setup, Wake, WakeEvent},
        signals::Signals,
    },
};

/// Guest memory, and where the rings are in it.
#[derive(Clone, Copy)]
pub struct Layout {
    /// Two regions with a hole between them.
    pub regions: [(u64, u64); 2],
    /// The rings of all queues, one behind the other.
    pub rings: (u64, u64),
    /// Bytes from one queue to the next.
    pub space: u64,
    /// The available ring and the used ring, from the descriptor table on.
    pub avail: u64,
    pub used: u64,
    /// Size of each queue.
    pub size: u16,
}

impl Layout {
    /// Where a queue is after a reset.
    fn fresh(&self, index: u16) -> QueueState {
        let table = self.rings.0 + u64::from(index) * self.space;
        QueueState {
            index,
            size: self.size,
            desc_table: table,
            avail_ring: table + self.avail,
            used_ring: table + self.used,
            next_avail: 0,
            next_used: 0,
        }
    }
}

/// A back, in one of the states of its worker, with its driver's memory.
pub struct Bare {
    pub memory: GuestMemory,
    pub counters: Arc<Counters>,
    pub handler: Box<dyn QueueHandler>,
    /// Faults by kind, since it was made.
    pub guest_faults: usize,
    pub backend_faults: usize,
    /// Calls of the handler's `kick`.
    pub kicks_done: usize,
    layout: Layout,
    session: Option<Session>,
    features: u64,
    signals: Arc<Signals>,
    kicks: Vec<Arc<EventFd>>,
    wake_event: Arc<WakeEvent>,
    /// States of the queues while there is no session.
    states: Vec<QueueState>,
    /// The driver's available indexes.
    available: Vec<u16>,
    last: u16,
}

impl Bare {
    /// The only worker of `front`, started.
    pub fn new(front: &mut dyn VirtioDevice, features: u64, layout: Layout) -> Self {
        let queues = front.queue_sizes().len();
        let msix = Msix::new(&MockMsi::default(), queues + 1).unwrap();
        let signals = Arc::new(Signals::new(Arc::clone(msix.vectors()), queues));
        let handler = front.workers(&signals).unwrap().remove(0).handler;
        Self::of(handler, queues, features, &signals, layout)
    }

    /// A back with that many queues, started.
    pub fn of(
        handler: Box<dyn QueueHandler>,
        queues: usize,
        features: u64,
        signals: &Arc<Signals>,
        layout: Layout,
    ) -> Self {
        let event = |_| Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        let ranges = layout
            .regions
            .map(|(start, end)| (GuestAddress(start), (end - start) as usize));
        let mut bare = Self {
            memory: GuestMemory::from_ranges(&ranges).unwrap(),
            counters: Arc::default(),
            handler,
            guest_faults: 0,
            backend_faults: 0,
            kicks_done: 0,
            layout,
            session: None,
            features,
            signals: Arc::clone(signals),
            kicks: (0..queues).map(event).collect(),
            wake_event: Arc::new(WakeEvent::new().unwrap()),
            states: (0..queues as u16).map(|index| layout.fresh(index)).collect(),
            available: vec![0; queues],
            last: u16::MAX,
        };
        bare.start();
        bare
    }

    /// How many queues it has.
    pub fn queues(&self) -> u16 {
        self.kicks.len() as u16
    }

    /// The driver is ready, or the machine continues.
    pub fn start(&mut self) {
        let sizes = vec![self.layout.size; self.kicks.len()];
        let setup = Setup {
            memory: &self.memory,
            features: self.features,
            states: &self.states,
            max_sizes: &sizes,
            kicks: &self.kicks,
            wake_event: &self.wake_event,
            signals: self.signals.clone(),
            counters: self.counters.clone(),
        };
        let mut session = Session::new(setup).unwrap();
        self.handler.start(&mut session).unwrap();
        self.session = Some(session);
    }

    /// The driver notifies the worker of a queue.
    pub fn notify(&mut self, queue: u16) {
        if let Some(session) = &mut self.session {
            session.kick_again(queue);
        }
    }

    /// One call of the handler for a queue that is ready. `None` when there is none; false when the ring is corrupt, so
    /// that the device needs a [`reset`](Self::reset).
    pub fn step(&mut self) -> Option<bool> {
        let session = self.session.as_mut()?;
        let queue = session.take_ready(self.last)?;
        self.last = queue;
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
        Some(self.settle(result))
    }

    /// All that the worker does until it sleeps. False when the device needs a reset.
    pub fn run(&mut self) -> bool {
        for _ in 0..100_000 {
            match self.step() {
                None => return true,
                Some(false) => return false,
                Some(true) => {}
            }
        }
        panic!("the worker does not come to rest");
    }

    /// An event of the handler's, with what follows from it. False when the device needs a reset.
    pub fn event(&mut self) -> bool {
        let Some(session) = &mut self.session else {
            return true;
        };
        session.lift_budgets();
        let result = self.handler.event(session, 0);
        self.settle(result) && self.run()
    }

    /// The events that are ready, with what follows from them. False when the device needs a reset.
    pub fn events(&mut self) -> bool {
        let mut events = [EpollEvent::default(); 16];
        let Some(session) = &mut self.session else {
            return true;
        };
        session.lift_budgets();
        let count = session.wait(false, &mut events).unwrap();
        for wake in events.iter().take(count).filter_map(Session::wake_of) {
            if let (Wake::Handler(token), Some(session)) = (wake, &mut self.session) {
                let result = self.handler.event(session, token);
                if !self.settle(result) {
                    return false;
                }
            }
        }
        self.run()
    }

    fn settle(&mut self, result: Result<(), Fault>) -> bool {
        let Some(session) = &mut self.session else {
            return true;
        };
        let result = match result {
            Err(Fault::Guest { queue, head, .. }) => {
                self.guest_faults += 1;
                session.add_used(queue, head, 0)
            }
            other => other,
        };
        match result.and_then(|()| session.flush_interrupts()) {
            Ok(_) => true,
            Err(Fault::Backend(..) | Fault::Held(..)) => {
                self.backend_faults += 1;
                true
            }
            Err(Fault::Ring { .. }) => false,
            Err(fault) => panic!("{fault}"),
        }
    }

    /// Requests of a queue taken from the ring and not given back, as the ring has it.
    pub fn outstanding(&self, queue: u16) -> u16 {
        let state = self.states()[usize::from(queue)];
        state.next_avail.wrapping_sub(state.next_used)
    }

    fn states(&self) -> Vec<QueueState> {
        let states = self.session.as_ref().map(Session::states);
        states.unwrap_or_else(|| self.states.clone())
    }

    /// Drains the handler. Then there is no session.
    pub fn drain(&mut self) {
        let Some(mut session) = self.session.take() else {
            return;
        };
        session.lift_budgets();
        loop {
            match self.handler.drain(&mut session, Instant::now() + PATIENCE) {
                Ok(Drained::Quiet) => break,
                Ok(Drained::Late) => panic!("late"),
                Err(Fault::Backend(..) | Fault::Held(..)) => self.backend_faults += 1,
                Err(fault) => panic!("{fault}"),
            }
        }
        self.states = session.states();
    }

    /// A reset by the driver, which clears its rings. The caller resets the front and starts again.
    pub fn reset(&mut self) {
        self.drain();
        self.handler.reset();
        let (start, end) = self.layout.rings;
        let zeroes = vec![0; (end - start) as usize];
        self.memory.write_slice(&zeroes, GuestAddress(start)).unwrap();
        self.states = (0..self.queues()).map(|index| self.layout.fresh(index)).collect();
        self.available.fill(0);
    }

    /// The driver notifies the worker of a queue, which comes to rest. A corrupt ring has the device reset.
    pub fn kick(&mut self, queue: u16) {
        self.notify(queue);
        if !self.run() {
            self.restart();
        }
    }

    /// The machine pauses. No buffer is lost.
    pub fn pause(&mut self) {
        self.drain();
        for queue in 0..self.queues() {
            assert_eq!(self.outstanding(queue), 0, "a buffer of queue {queue} is lost");
        }
    }

    /// The machine continues after [`Self::pause`].
    pub fn resume(&mut self) {
        self.start();
        if !self.run() {
            self.restart();
        }
    }

    /// The driver resets a device whose front has no state, and starts it.
    pub fn restart(&mut self) {
        self.reset();
        self.start();
    }

    /// Writes one descriptor of a queue's table.
    pub fn describe(&self, queue: u16, at: u16, address: u64, length: u32, flags: u16, next: u16) {
        let table = self.layout.fresh(queue).desc_table;
        describe(
            &self.memory,
            table,
            at % self.layout.size,
            address,
            length,
            flags,
            next,
        );
    }

    /// Writes a chain of buffers (address, length, flags) from descriptor `first` on.
    pub fn describe_chain(&self, queue: u16, first: u16, parts: &[(u64, u32, u16)]) {
        let size = self.layout.size;
        for (at, (address, length, flags)) in (0_u16..).zip(parts) {
            let more = u16::from(usize::from(at) + 1 < parts.len());
            let place = first.wrapping_add(at) % size;
            self.describe(
                queue,
                place,
                *address,
                *length,
                flags | more,
                place.wrapping_add(1) % size,
            );
        }
    }

    /// Makes the chain with that head available.
    pub fn offer(&mut self, queue: u16, head: u16) {
        let index = self.available[usize::from(queue)];
        let ring = self.layout.fresh(queue).avail_ring;
        let slot = GuestAddress(ring + 4 + u64::from(index % self.layout.size) * 2);
        self.memory.write_obj(head, slot).unwrap();
        self.set_available(queue, index.wrapping_add(1));
    }

    /// Sets the available index.
    pub fn set_available(&mut self, queue: u16, index: u16) {
        self.available[usize::from(queue)] = index;
        let place = GuestAddress(self.layout.fresh(queue).avail_ring + 2);
        self.memory.store(index, place, Ordering::Release).unwrap();
    }
}

/// Bytes of a fuzzer, to be used up; zeroes when there are none any more.
pub struct Input<'a>(pub &'a [u8]);

impl Input<'_> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    pub fn word(&mut self) -> u16 {
        u16::from(self.byte()) | u16::from(self.byte()) << 8
    }

    pub fn quad(&mut self) -> u64 {
        (0..8).fold(0, |value, at| value | u64::from(self.byte()) << (8 * at))
    }

    /// An address: any, one near the end of a region, in the rings, or in the 64 KiB from `data` on, most often.
    pub fn address(&mut self, end: u64, rings: Range<u64>, data: u64) -> u64 {
        match self.byte() % 8 {
            0 => self.quad(),
            1 => end - u64::from(self.byte()),
            2 => rings.start + u64::from(self.word()) % (rings.end - rings.start),
            _ => data + u64::from(self.word()),
        }
    }
}
