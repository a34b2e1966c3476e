//! Workers of the network device: one thread for each pair of queues.
//!
//! ```text
//! queues with VIRTIO_NET_F_MQ:     0 1 │ 2 3 │ 4 5 │ … │ 2N      the last one is the control queue,
//!                                pair 0 │  1  │  2  │   │ pair 0   served by the first pair's worker
//! without:                         0 1 │  2  │                   queue 2 is the control queue
//! ```
//!
//! The number of the control queue depends on the negotiated features (virtio 1.3, 5.1.2). The
//! assignment of queues to threads does not. For a driver without pairs, the second pair's worker
//! therefore executes the commands. Commands change the workers' shared state ([`Shared`]). Each
//! worker attaches and detaches its own queue of the host.

use std::{
    io,
    os::fd::AsFd as _,
    sync::Arc,
    time::{Duration, Instant},
};

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CTRL_VLAN, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MRG_RXBUF,
};
use vmm_base::{GuestMemory, sys::Iovecs};

use super::{
    announce,
    command::Commands,
    control::Shared,
    delegation::{self, Delegation},
    receive::{Pending, Receiver, Setup},
    stats::PairCounters,
    transmit::Sender,
};
use crate::{
    net::NetBackend,
    state::{Section, StateError},
    virtio::{
        device::{Drained, Progress, QueueHandler},
        fault::Fault,
        rate::{Cost, Throttle},
        session::{EventSet, Session},
    },
};

/// Tokens of events.
const HOST: u32 = 0;
const WAKE: u32 = 1;
const RECEIVE_TIMER: u32 = 2;
const TRANSMIT_TIMER: u32 = 3;
const ANNOUNCE_TIMER: u32 = 4;

/// Announcements of the driver's new place after a restore: a frame may get lost.
const ANNOUNCEMENTS: u32 = 5;
/// Time between the first two announcements. Each later wait is [`LONGER`] than the one before.
const ANNOUNCE_AFTER: Duration = Duration::from_millis(50);
const LONGER: Duration = Duration::from_millis(100);

/// The back of one pair of queues.
pub(super) struct NetHandler {
    shared: Arc<Shared>,
    backend: Arc<dyn NetBackend>,
    pair: u16,
    /// The kernel may serve the pair.
    delegation: Option<Delegation>,
    /// From start to drain: the driver knows of the pair.
    known: bool,
    /// While this thread serves the pair, or could.
    running: Option<(Receiver, Sender)>,
    /// From start to drain.
    commands: Option<Commands>,
    receive_throttle: Throttle<Cost>,
    transmit_throttle: Throttle<Cost>,
    /// Kept over a pause.
    pending: Pending,
    /// The host hands packets to this queue.
    attached: bool,
    /// Whether the host's descriptor is watched, and for taking packets too.
    watched: bool,
    watches_output: bool,
    /// Announcements that are left after a restore: the driver may be in another place of the network.
    announcements: u32,
    /// The timer of the next announcement. It has no limiter.
    announce_timer: Throttle<()>,
    /// The host may have packets from before the driver's start, which are not for the driver.
    fresh: bool,
    /// The kernel is to serve the pair when the packet that waits for buffers has been delivered.
    postponed: bool,
}

/// So many packets are in the queue of a tap at most, and some more.
const STALE: u32 = 4096;

impl NetHandler {
    pub(super) fn new(
        shared: Arc<Shared>,
        backend: Arc<dyn NetBackend>,
        pair: u16,
        delegation: Option<Delegation>,
    ) -> Self {
        Self {
            shared,
            backend,
            pair,
            delegation,
            known: false,
            running: None,
            commands: None,
            receive_throttle: Throttle::default(),
            transmit_throttle: Throttle::default(),
            pending: Pending::default(),
            attached: pair == 0,
            watched: false,
            watches_output: false,
            announcements: 0,
            announce_timer: Throttle::default(),
            fresh: true,
            postponed: false,
        }
    }

    fn receive_queue(&self) -> u16 {
        self.pair.wrapping_mul(2)
    }

    fn transmit_queue(&self) -> u16 {
        self.receive_queue().wrapping_add(1)
    }

    /// Attaches the host's queue or detaches it, as the driver uses the pair or does not, and has it served: by the kernel where
    /// that can be, by this thread otherwise.
    fn follow(&mut self, session: &mut Session) -> Result<(), Fault> {
        let wanted = self.known && self.shared.is_active(self.pair);
        let by_kernel = wanted && self.kernel_may_serve(session);
        if let Some(delegation) = self.delegation.as_mut().filter(|_| !by_kernel) {
            delegation.end(session)?;
        }
        if self.watched && (!wanted || by_kernel) {
            session.unwatch(&self.backend.as_fd())?;
            self.watched = false;
        }
        self.attach(wanted || self.pair == 0)
            .map_err(|error| Fault::Backend("attach or detach a queue of the network", error))?;
        let given = if by_kernel { self.give(session) } else { Ok(()) };
        if wanted && !self.is_served() {
            self.serve_here(session)?;
        }
        given
    }

    fn is_served(&self) -> bool {
        self.delegation.as_ref().is_some_and(Delegation::is_serving)
    }

    /// Whether nothing speaks against having the kernel serve the pair.
    fn kernel_may_serve(&mut self, session: &mut Session) -> bool {
        let Some(delegation) = &self.delegation else {
            return false;
        };
        let limits = self.receive_throttle.limits() || self.transmit_throttle.limits();
        let both = [self.receive_queue(), self.transmit_queue()];
        if limits || !delegation.may_serve() || both.iter().any(|queue| session.queue(*queue).is_none()) {
            return false;
        }
        let idle = match &self.running {
            Some((receiver, _)) => receiver.is_idle(),
            None => self.pending.is_empty(),
        };
        self.postponed = !idle;
        idle
    }

    /// Has the kernel serve the pair, if it does not yet.
    fn give(&mut self, session: &mut Session) -> Result<(), Fault> {
        self.receive_throttle.give_up();
        self.transmit_throttle.give_up();
        if let Some((receiver, _)) = self.running.take() {
            self.pending = receiver.put_back(session);
        }
        if std::mem::take(&mut self.fresh) {
            let mut packet = [0; 64];
            let mut left = STALE;
            while left > 0 && self.backend.receive_into(&mut packet).is_ok() {
                left = left.saturating_sub(1);
            }
        }
        match &mut self.delegation {
            Some(delegation) => delegation.begin(session, self.backend.as_fd()),
            None => Ok(()),
        }
    }

    /// Ends the service of the pair after a ring fault, until the driver resets the device. Also
    /// takes the queues back from the kernel, so that no caller waits for the kernel to stop.
    fn end_of_service(&mut self, session: &mut Session, fault: Fault) -> Fault {
        if matches!(fault, Fault::Ring { .. })
            && let Some(delegation) = &mut self.delegation
            && let Err(error) = delegation.end(session)
        {
            tracing::debug!(%error, pair = self.pair, "take queues back after a fault");
        }
        fault
    }

    /// Has this thread serve the pair, if it does not yet.
    fn serve_here(&mut self, session: &Session) -> Result<(), Fault> {
        self.make_ready(session);
        if !self.watched {
            session.watch(&self.backend.as_fd(), HOST, interest(false))?;
            (self.watched, self.watches_output) = (true, false);
            if let Some((receiver, _)) = &mut self.running {
                receiver.readable = true;
            }
        }
        Ok(())
    }

    fn make_ready(&mut self, session: &Session) {
        if !self.known || self.running.is_some() {
            return;
        }
        let memory = Arc::new(session.memory().clone());
        let setup = Setup {
            memory: Arc::clone(&memory),
            shared: Arc::clone(&self.shared),
            pair: self.pair,
            mergeable: session.has_feature(VIRTIO_NET_F_MRG_RXBUF),
            vlans: session.has_feature(VIRTIO_NET_F_CTRL_VLAN),
        };
        let receiver = Receiver::new(setup, std::mem::take(&mut self.pending));
        let sender = Sender::new(memory, Arc::clone(&self.shared), self.pair);
        self.running = Some((receiver, sender));
    }

    fn attach(&mut self, wanted: bool) -> io::Result<()> {
        if self.attached != wanted {
            self.backend.set_attached(wanted)?;
            self.attached = wanted;
        }
        Ok(())
    }

    /// Changes whether the host's descriptor is watched for output. The watch is edge-triggered: an
    /// edge that arrives without buffers is remembered, not repeated. A change of the watch checks
    /// the descriptor again, so no earlier event is lost. A tap signals room for output only if it
    /// was polled since it ran out of room.
    fn watch_output(&mut self, session: &Session, wanted: bool) -> Result<(), Fault> {
        if self.watched && (wanted || self.watches_output) {
            session.rewatch(&self.backend.as_fd(), HOST, interest(wanted))?;
            self.watches_output = wanted;
        }
        Ok(())
    }

    /// Sends one of the announcements that are left, and sets the timer for the next one.
    fn announce(&mut self, session: &Session) -> Result<(), Fault> {
        let Some(left) = self.announcements.checked_sub(1) else {
            return Ok(());
        };
        self.announcements = left;
        if !self.shared.announce() && self.shared.is_link_up() {
            let (_, mac) = self.shared.filter();
            let mut nothing = Iovecs::new(Arc::new(session.memory().clone()));
            // A lost announcement does no harm: the guest's next packet has the same effect.
            if let Err(error) = self.backend.send(&announce::packet(mac), &mut nothing) {
                tracing::debug!(%error, "announce where a network interface is");
            }
        }
        if left == 0 {
            return Ok(());
        }
        let before = ANNOUNCEMENTS.saturating_sub(left).saturating_sub(1);
        let wait = ANNOUNCE_AFTER.saturating_add(LONGER.saturating_mul(before));
        self.announce_timer.arm(session, ANNOUNCE_TIMER, wait)
    }

    fn refresh_limits(&mut self) {
        let wake = self.shared.wake_of(self.pair);
        self.receive_throttle.refresh(&self.shared.receive_limit, wake);
        self.transmit_throttle.refresh(&self.shared.transmit_limit, wake);
    }
}

fn interest(output: bool) -> EventSet {
    let interest = EventSet::IN | EventSet::EDGE_TRIGGERED;
    if output {
        interest | EventSet::OUT
    } else {
        interest
    }
}

/// The control queue's number, if the driver accepted one; see the module.
fn control_queue(session: &Session, pairs: u16) -> Option<u16> {
    let pairs = if session.has_feature(VIRTIO_NET_F_MQ) {
        pairs
    } else {
        1
    };
    session
        .has_feature(VIRTIO_NET_F_CTRL_VQ)
        .then(|| pairs.wrapping_mul(2))
}

impl QueueHandler for NetHandler {
    fn start(&mut self, session: &mut Session) -> Result<(), Fault> {
        if self.pair == 0 {
            self.shared
                .begin(session.features())
                .map_err(|error| Fault::Backend("set the network's offloads", error))?;
        }
        (self.watched, self.watches_output, self.postponed) = (false, false, false);
        self.receive_throttle.start();
        self.transmit_throttle.start();
        self.refresh_limits();
        self.commands = Some(Commands::new(Arc::new(session.memory().clone())));
        self.known = self.pair == 0 || session.has_feature(VIRTIO_NET_F_MQ);
        self.make_ready(session);
        if let Some(delegation) = &self.delegation {
            delegation.watch(session)?;
        }
        if let Some(wake) = self.shared.wake_of(self.pair) {
            session.watch(&**wake, WAKE, EventSet::IN | EventSet::EDGE_TRIGGERED)?;
        }
        self.announce_timer.start();
        self.announce(session)?;
        match self.follow(session) {
            // This thread serves the pair then.
            Err(Fault::Backend(what, error)) if self.delegation.is_some() => {
                tracing::warn!(%error, pair = self.pair, "{what}");
                Ok(())
            }
            followed => followed,
        }
    }

    fn kick(&mut self, session: &mut Session, queue: u16) -> Result<Progress, Fault> {
        if control_queue(session, self.shared.pairs()) == Some(queue) {
            let progress = match &mut self.commands {
                Some(commands) => commands.run(session, queue, &self.shared),
                None => Ok(Progress::Waiting),
            };
            return progress.map_err(|fault| self.end_of_service(session, fault));
        }
        let (receive, transmit) = (self.receive_queue(), self.transmit_queue());
        let Some((receiver, sender)) = &mut self.running else {
            return Ok(Progress::Waiting);
        };
        if queue == receive {
            if !self.watched {
                return Ok(Progress::Waiting);
            }
            let progress = receiver.run(session, &*self.backend, &mut self.receive_throttle, RECEIVE_TIMER);
            if self.postponed && receiver.is_idle() {
                self.follow(session)?;
            }
            return progress;
        }
        if queue != transmit {
            return Ok(Progress::Waiting);
        }
        let result = sender.run(
            session,
            &*self.backend,
            &mut self.transmit_throttle,
            TRANSMIT_TIMER,
        );
        let blocked = sender.blocked;
        self.watch_output(session, blocked)?;
        result
    }

    fn event(&mut self, session: &mut Session, token: u32) -> Result<(), Fault> {
        let (receive, transmit) = (self.receive_queue(), self.transmit_queue());
        match token {
            WAKE => {
                self.refresh_limits();
                self.follow(session)?;
                session.kick_again(receive);
                session.kick_again(transmit);
            }
            RECEIVE_TIMER => session.kick_again(receive),
            TRANSMIT_TIMER => session.kick_again(transmit),
            ANNOUNCE_TIMER => self.announce(session)?,
            delegation::VECTORS.. => {
                if let Some(delegation) = &mut self.delegation {
                    let done = delegation.event(token);
                    return done.map_err(|fault| self.end_of_service(session, fault));
                }
            }
            _ => {
                if let Some((receiver, sender)) = self.running.as_mut().filter(|_| self.watched) {
                    receiver.readable = true;
                    session.kick_again(receive);
                    if std::mem::take(&mut sender.blocked) {
                        session.kick_again(transmit);
                    }
                }
            }
        }
        Ok(())
    }

    fn drain(&mut self, session: &mut Session, _deadline: Instant) -> Result<Drained, Fault> {
        self.receive_throttle.give_up();
        self.transmit_throttle.give_up();
        if let Some(delegation) = &mut self.delegation {
            delegation.end(session)?;
        }
        self.commands = None;
        self.known = false;
        if let Some((receiver, _)) = self.running.take() {
            self.pending = receiver.put_back(session);
        }
        Ok(Drained::Quiet)
    }

    fn reset(&mut self) {
        self.running = None;
        self.fresh = true;
        self.announcements = 0;
        if let Some(delegation) = &mut self.delegation {
            delegation.reset();
        }
        if !std::mem::take(&mut self.pending).is_empty()
            && let Some(counters) = self.shared.counters(self.pair)
        {
            PairCounters::add(&counters.receive_dropped, 1);
        }
        let result = if self.pair == 0 {
            self.shared.end()
        } else {
            self.attach(false)
        };
        if let Err(error) = result {
            tracing::warn!(%error, pair = self.pair, "reset the host's side of a network interface");
        }
    }

    fn save(&self) -> Result<Section, StateError> {
        Ok(Section::new("net", &self.pending.save()))
    }

    fn restore(&mut self, section: &Section, _memory: &GuestMemory) -> Result<(), StateError> {
        self.pending = Pending::restored(&section.open()?)?;
        if self.pair == 0 {
            self.announcements = ANNOUNCEMENTS;
        }
        self.fresh = false;
        Ok(())
    }
}
