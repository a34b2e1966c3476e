//! A worker's context between `Start` and `Stop`: the queues, the negotiated features, and the
//! watched events.

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent},
    eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd},
};

pub use vmm_sys_util::epoll::EventSet;

use vmm_base::GuestMemory;

use super::{
    chain::Chain,
    fault::{Counters, Fault, RingError},
    queue::{Queue, QueueState},
    signals::Signals,
};

/// Chains that one `kick` may take before others have their turn.
const BATCH: u32 = 128;

/// Tags in the upper half of an epoll event's data.
const TAG_COMMAND: u64 = 1 << 32;
const TAG_QUEUE: u64 = 2 << 32;
const TAG_HANDLER: u64 = 3 << 32;

/// Event that woke a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wake {
    Command,
    Queue(u16),
    Handler(u32),
}

/// Notifies a worker of a new command: an eventfd to sleep on, and a flag to look at without a system call.
#[derive(Debug)]
pub(super) struct WakeEvent {
    event: EventFd,
    rung: AtomicBool,
}

impl WakeEvent {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            event: EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?,
            rung: AtomicBool::new(false),
        })
    }

    /// Notifies the worker of a command. The caller sends the command first.
    pub(super) fn ring(&self) -> io::Result<()> {
        self.rung.store(true, Ordering::SeqCst);
        self.event.write(1)
    }

    /// Event that becomes readable when the wake_event rings. No one reads its counter, so it must be
    /// watched edge-triggered.
    pub(super) fn event(&self) -> &EventFd {
        &self.event
    }

    /// Whether it has rung since it was last silenced.
    pub(super) fn has_rung(&self) -> bool {
        self.rung.load(Ordering::SeqCst)
    }

    /// The worker is about to look at all commands.
    pub(super) fn silence(&self) {
        self.rung.store(false, Ordering::SeqCst);
    }
}

/// One queue of a session.
struct Slot {
    queue: Queue,
    /// The handler's `kick` is to be called.
    ready: bool,
    /// Somebody else serves it: neither its ring nor its notifications are looked at.
    delegated: bool,
    kick: Arc<EventFd>,
}

/// The time between the driver's DRIVER_OK (or a resume) and a reset (or a pause), as a handler sees it.
pub struct Session {
    memory: GuestMemory,
    features: u64,
    /// Slots by queue number; `None` for a queue that the driver did not enable or another worker
    /// serves.
    slots: Vec<Option<Slot>>,
    epoll: Epoll,
    wake_event: Arc<WakeEvent>,
    signals: Arc<Signals>,
    counters: Arc<Counters>,
}

impl Session {
    /// Makes queues of `states` and listens to `kicks` (by queue number) and to `wake_event`.
    pub(super) fn new(setup: Setup<'_>) -> Result<Self, Fault> {
        let epoll = Epoll::new().map_err(|error| Fault::Backend("create an epoll instance", error))?;
        let mut session = Self {
            memory: setup.memory.clone(),
            features: setup.features,
            slots: Vec::new(),
            epoll,
            wake_event: Arc::clone(setup.wake_event),
            signals: setup.signals,
            counters: setup.counters,
        };
        session.listen(setup.wake_event.event(), TAG_COMMAND)?;
        let event_idx = session.has_feature(virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX);
        for state in setup.states {
            let at = usize::from(state.index);
            let (Some(max), Some(kick)) = (setup.max_sizes.get(at), setup.kicks.get(at)) else {
                return Err(Fault::Bug(format!("the device has no queue {}", state.index)));
            };
            let queue =
                Queue::new(state, *max, event_idx, setup.memory.clone()).map_err(|error| Fault::Ring {
                    queue: state.index,
                    error,
                })?;
            session.listen(kick, TAG_QUEUE | u64::from(state.index))?;
            if session.slots.len() <= at {
                session.slots.resize_with(at.saturating_add(1), || None);
            }
            if let Some(slot) = session.slots.get_mut(at) {
                *slot = Some(Slot {
                    queue,
                    ready: true,
                    delegated: false,
                    kick: Arc::clone(kick),
                });
            }
        }
        Ok(session)
    }

    /// Guest memory. It can be cloned and kept until `drain`.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// The feature bits that the driver accepted.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Whether the driver accepted the feature with that bit number.
    pub fn has_feature(&self, bit: u32) -> bool {
        self.features.checked_shr(bit).is_some_and(|bits| bits & 1 == 1)
    }

    /// A queue of this worker that the driver enabled.
    pub fn queue(&mut self, index: u16) -> Option<&mut Queue> {
        Some(&mut self.slots.get_mut(usize::from(index))?.as_mut()?.queue)
    }

    /// See [`Queue::pop`]. An absent queue is empty.
    pub fn pop(&mut self, queue: u16, chain: &mut Chain) -> Result<bool, Fault> {
        self.on(queue, false, |ring| ring.pop(chain))
    }

    /// [`Queue::read_chain`]. A queue that is not there has no chains.
    pub fn read_chain(&mut self, queue: u16, head: u16, chain: &mut Chain) -> Result<(), Fault> {
        let absent = Err(RingError::HeadIndex(head));
        let read = self
            .queue(queue)
            .map_or(absent, |ring| ring.read_chain(head, chain));
        read.map_err(|error| Fault::Ring { queue, error })
    }

    /// [`Queue::add_used`].
    pub fn add_used(&mut self, queue: u16, head: u16, written: u32) -> Result<(), Fault> {
        self.on(queue, (), |ring| ring.add_used(head, written))
    }

    /// [`Queue::put_used`].
    pub fn put_used(&mut self, queue: u16, head: u16, written: u32) -> Result<(), Fault> {
        self.on(queue, (), |ring| ring.put_used(head, written))
    }

    /// [`Queue::show_used`].
    pub fn show_used(&mut self, queue: u16) -> Result<(), Fault> {
        self.on(queue, (), Queue::show_used)
    }

    /// Has the handler's `kick` called for that queue, soon.
    pub fn kick_again(&mut self, queue: u16) {
        if let Some(slot) = self.slot_mut(queue) {
            slot.ready = !slot.delegated;
        }
    }

    /// Delegates a queue to the kernel (vhost) or to another process (vhost-user). From now on,
    /// that server takes chains, completes them and interrupts the driver, with
    /// [`kick_event`](Self::kick_event) and [`Signals::queue_event`]. The
    /// framework uses neither the rings nor the notifications until [`reclaim`](Self::reclaim),
    /// which must precede the end of a drain. Returns the queue and its position, or `None` if the
    /// queue is not enabled or is delegated already.
    ///
    /// The framework may have consumed some notifications. The driver does not repeat them for
    /// available requests.
    pub fn delegate(&mut self, queue: u16) -> Result<Option<QueueState>, Fault> {
        let Some(slot) = self.slot_mut(queue).filter(|slot| !slot.delegated) else {
            return Ok(None);
        };
        slot.delegated = true;
        slot.ready = false;
        let (state, kick) = (slot.queue.state(), Arc::clone(&slot.kick));
        self.unwatch(&*kick)?;
        Ok(Some(state))
    }

    /// Takes a delegated queue back. Its server must not use the rings and the notifications any
    /// more. The queue continues with the available entry `next_avail`. Without `next_avail` (the
    /// server is gone), it continues with the first entry that has no used entry. This is correct
    /// if chains were completed in order, and an error otherwise. The handler is kicked soon.
    pub fn reclaim(&mut self, queue: u16, next_avail: Option<u16>) -> Result<(), Fault> {
        let Some(slot) = self.slot_mut(queue).filter(|slot| slot.delegated) else {
            return Ok(());
        };
        slot.delegated = false;
        slot.ready = true;
        let kick = Arc::clone(&slot.kick);
        self.listen(&kick, TAG_QUEUE | u64::from(queue))?;
        self.on(queue, (), |ring| ring.go_on(next_avail))
    }

    /// Whether a queue was given away.
    pub fn is_delegated(&self, queue: u16) -> bool {
        let slot = self.slots.get(usize::from(queue)).and_then(Option::as_ref);
        slot.is_some_and(|slot| slot.delegated)
    }

    fn slot_mut(&mut self, queue: u16) -> Option<&mut Slot> {
        self.slots.get_mut(usize::from(queue))?.as_mut()
    }

    /// Asks the driver to notify when it adds to the queue, whose available buffers are all taken; when it did
    /// meanwhile, `kick` is called soon as well.
    pub fn ask_for_kick(&mut self, queue: u16) -> Result<(), Fault> {
        if self.on(queue, false, Queue::enable_notification)? {
            self.kick_again(queue);
        }
        Ok(())
    }

    /// Asks the driver to notify, for a handler that has taken all and looks for itself. True when there are buffers already.
    pub fn is_left_after_asking(&mut self, queue: u16) -> Result<bool, Fault> {
        self.on(queue, false, Queue::enable_notification)
    }

    /// Asks the driver not to send notifications, outside of `kick`. Notifications are off during
    /// `kick`.
    pub fn suppress_kicks(&mut self, queue: u16) -> Result<(), Fault> {
        self.on(queue, (), Queue::disable_notification)
    }

    /// How many chains are available.
    pub fn available(&mut self, queue: u16) -> usize {
        self.queue(queue).map_or(0, |ring| ring.available().into())
    }

    /// Puts the chain taken last back, to be taken again; see [`Queue::unpop`].
    pub fn unpop(&mut self, queue: u16) {
        if let Some(ring) = self.queue(queue) {
            ring.unpop(1);
        }
    }

    /// From now on the handler's `event` is called with `token` when `fd` is ready as `interest` says.
    pub fn watch(&self, fd: &impl AsRawFd, token: u32, interest: EventSet) -> Result<(), Fault> {
        self.control(
            ControlOperation::Add,
            fd.as_raw_fd(),
            TAG_HANDLER | u64::from(token),
            interest,
        )
        .map_err(|error| Fault::Backend("watch a file descriptor", error))
    }

    /// Changes the events of a watched `fd`.
    pub fn rewatch(&self, fd: &impl AsRawFd, token: u32, interest: EventSet) -> Result<(), Fault> {
        self.control(
            ControlOperation::Modify,
            fd.as_raw_fd(),
            TAG_HANDLER | u64::from(token),
            interest,
        )
        .map_err(|error| Fault::Backend("change how a file descriptor is watched", error))
    }

    /// Stops watching `fd`. The end of the session ends all watches.
    pub fn unwatch(&self, fd: &impl AsRawFd) -> Result<(), Fault> {
        self.control(ControlOperation::Delete, fd.as_raw_fd(), 0, EventSet::empty())
            .map_err(|error| Fault::Backend("stop watching a file descriptor", error))
    }

    /// Descriptor that is readable when the framework has an event to handle: the driver's
    /// notification, a command, or a [watched](Self::watch) descriptor.
    pub fn events(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// Whether the framework has a command to handle. The handler must then return soon.
    pub fn has_command(&self) -> bool {
        self.wake_event.has_rung()
    }

    /// Counts a notification of the driver that the handler noticed itself.
    pub fn count_kick(&self) {
        Counters::bump(&self.counters.kicks);
    }

    /// Sends the interrupts that are due now, before the handler returns. Says whether there were any.
    pub fn flush_interrupts(&mut self) -> Result<bool, Fault> {
        let mut sent = false;
        for slot in self.slots.iter_mut().flatten().filter(|slot| !slot.delegated) {
            let queue = slot.queue.index();
            if slot
                .queue
                .needs_interrupt()
                .map_err(|error| Fault::Ring { queue, error })?
            {
                Counters::bump(&self.counters.interrupts);
                self.signals.queue_interrupt(queue);
                sent = true;
            }
        }
        Ok(sent)
    }

    /// Notifies the driver of a change of the device's configuration space.
    pub fn config_changed(&self) {
        self.signals.config_changed();
    }

    /// Counts a request that was answered with an error because it made no sense.
    pub fn count_guest_fault(&self) {
        Counters::bump(&self.counters.guest_faults);
    }

    /// The eventfd that the driver's notifications of a queue signal, for handing to the kernel (vhost).
    pub fn kick_event(&self, queue: u16) -> Option<&EventFd> {
        Some(&self.slots.get(usize::from(queue))?.as_ref()?.kick)
    }

    /// A queue of which `kick` is to be called; it is not ready any more and may take a batch.
    pub(super) fn take_ready(&mut self, after: u16) -> Option<u16> {
        // After the one served last, so that all have their turn.
        let (first, second) = (after.wrapping_add(1), 0);
        let found = self.ready_from(first).or_else(|| self.ready_from(second))?;
        let slot = self.slots.get_mut(usize::from(found))?.as_mut()?;
        slot.ready = false;
        slot.queue.set_budget(BATCH);
        Some(found)
    }

    pub(super) fn has_ready(&self) -> bool {
        self.slots.iter().flatten().any(|slot| slot.ready)
    }

    /// Removes the handler's limit for taking chains, outside of `kick`.
    pub(super) fn lift_budgets(&mut self) {
        for slot in self.slots.iter_mut().flatten() {
            slot.queue.set_budget(u32::MAX);
        }
    }

    pub(super) fn states(&self) -> Vec<QueueState> {
        self.slots
            .iter()
            .flatten()
            .map(|slot| slot.queue.state())
            .collect()
    }

    /// Waits (or only looks) for events; a signal counts as no event.
    pub(super) fn wait(&self, block: bool, events: &mut [EpollEvent]) -> io::Result<usize> {
        match self.epoll.wait(if block { -1 } else { 0 }, events) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
            result => result,
        }
    }

    pub(super) fn wake_of(event: &EpollEvent) -> Option<Wake> {
        let data = event.data();
        let low = u32::try_from(data & u64::from(u32::MAX)).ok()?;
        match data & !u64::from(u32::MAX) {
            TAG_COMMAND => Some(Wake::Command),
            TAG_QUEUE => u16::try_from(low).ok().map(Wake::Queue),
            TAG_HANDLER => Some(Wake::Handler(low)),
            _ => None,
        }
    }

    pub(super) fn on<T>(
        &mut self,
        queue: u16,
        absent: T,
        op: impl FnOnce(&mut Queue) -> Result<T, RingError>,
    ) -> Result<T, Fault> {
        match self.queue(queue) {
            Some(ring) => op(ring).map_err(|error| Fault::Ring { queue, error }),
            None => Ok(absent),
        }
    }

    fn ready_from(&self, first: u16) -> Option<u16> {
        let ready = |slot: &&Slot| slot.ready;
        let slot = self.slots.iter().skip(usize::from(first)).flatten().find(ready)?;
        Some(slot.queue.index())
    }

    /// Edge-triggered, so that the eventfd needs no read: each write to it is an edge.
    fn listen(&self, event: &EventFd, data: u64) -> Result<(), Fault> {
        let interest = EventSet::IN | EventSet::EDGE_TRIGGERED;
        self.control(ControlOperation::Add, event.as_raw_fd(), data, interest)
            .map_err(|error| Fault::Backend("watch an eventfd", error))
    }

    fn control(&self, op: ControlOperation, fd: RawFd, data: u64, interest: EventSet) -> io::Result<()> {
        self.epoll.ctl(op, fd, EpollEvent::new(interest, data))
    }
}

/// Parameters of a session.
pub(super) struct Setup<'a> {
    pub memory: &'a GuestMemory,
    pub features: u64,
    pub states: &'a [QueueState],
    /// One entry for each queue of the device.
    pub max_sizes: &'a [u16],
    /// One entry for each queue of the device.
    pub kicks: &'a [Arc<EventFd>],
    pub wake_event: &'a Arc<WakeEvent>,
    pub signals: Arc<Signals>,
    pub counters: Arc<Counters>,
}
