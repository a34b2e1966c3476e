//! The workers: one thread for each pair of queues.
//!
//! ```text
//! queues with VIRTIO_NET_F_MQ:     0 1 │ 2 3 │ 4 5 │ … │ 2N      the last one is the control queue,
//!                                pair 0 │  1  │  2  │   │ pair 0   served by the first pair's worker
//! without:                         0 1 │  2  │                   queue 2 is the control queue
//! ```
//!
//! Which queue is the control queue depends on what was negotiated (virtio 1.3, 5.1.2); which thread has a queue does not. So the
//! second pair's worker executes commands for a driver that knows no pairs. Commands change what all workers share
//! ([`Shared`]); a worker attaches its own queue of the host, and detaches it.

use std::{io, os::fd::AsFd as _, sync::Arc, time::Instant};

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CTRL_VLAN, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MRG_RXBUF,
};

use super::{
    command::Commands,
    control::Shared,
    receive::{Pending, Receiver, Setup},
    stats::PairCounters,
    transmit::Sender,
};
use crate::{
    GuestMemory,
    net::NetBackend,
    rate::Cost,
    state::{Section, StateError},
    virtio::{
        device::{Drained, Progress, QueueHandler},
        fault::Fault,
        session::{EventSet, Session},
        throttle::Throttle,
    },
};

/// Tokens of events.
const HOST: u32 = 0;
const WAKE: u32 = 1;
const RECEIVE_TIMER: u32 = 2;
const TRANSMIT_TIMER: u32 = 3;

/// The back of one pair of queues.
pub(super) struct NetHandler {
    shared: Arc<Shared>,
    backend: Arc<dyn NetBackend>,
    pair: u16,
    /// From start to drain, if the driver knows of the pair.
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
    /// The state was restored: the driver may be in another place of the network now.
    moved: bool,
}

impl NetHandler {
    pub(super) fn new(shared: Arc<Shared>, backend: Arc<dyn NetBackend>, pair: u16) -> Self {
        Self {
            shared,
            backend,
            pair,
            running: None,
            commands: None,
            receive_throttle: Throttle::default(),
            transmit_throttle: Throttle::default(),
            pending: Pending::default(),
            attached: pair == 0,
            watched: false,
            watches_output: false,
            moved: false,
        }
    }

    fn receive_queue(&self) -> u16 {
        self.pair.wrapping_mul(2)
    }

    fn transmit_queue(&self) -> u16 {
        self.receive_queue().wrapping_add(1)
    }

    /// Attaches the host's queue or detaches it, as the driver uses the pair or does not, and watches it.
    fn follow(&mut self, session: &Session) -> Result<(), Fault> {
        let wanted = self.running.is_some() && self.shared.is_active(self.pair);
        if self.watched && !wanted {
            session.unwatch(&self.backend.as_fd())?;
            self.watched = false;
        }
        self.attach(wanted || self.pair == 0)
            .map_err(|error| Fault::Backend("attach or detach a queue of the network", error))?;
        if wanted && !self.watched {
            session.watch(&self.backend.as_fd(), HOST, interest(false))?;
            (self.watched, self.watches_output) = (true, false);
            if let Some((receiver, _)) = &mut self.running {
                receiver.readable = true;
            }
        }
        Ok(())
    }

    fn attach(&mut self, wanted: bool) -> io::Result<()> {
        if self.attached != wanted {
            self.backend.set_attached(wanted)?;
            self.attached = wanted;
        }
        Ok(())
    }

    /// Watches for edges: one that comes while there are no buffers is remembered, not repeated. Changing what is
    /// watched looks at the descriptor anew, so that nothing that happened before is missed; a tap does not even tell
    /// of room for output unless it was looked at since there was none.
    fn watch_output(&mut self, session: &Session, wanted: bool) -> Result<(), Fault> {
        if self.watched && (wanted || self.watches_output) {
            session.rewatch(&self.backend.as_fd(), HOST, interest(wanted))?;
            self.watches_output = wanted;
        }
        Ok(())
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
        let memory = Arc::new(session.memory().clone());
        (self.watched, self.watches_output) = (false, false);
        self.receive_throttle.start();
        self.transmit_throttle.start();
        self.refresh_limits();
        self.commands = Some(Commands::new(Arc::clone(&memory)));
        if self.pair == 0 || session.has_feature(VIRTIO_NET_F_MQ) {
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
        if let Some(wake) = self.shared.wake_of(self.pair) {
            session.watch(&**wake, WAKE, EventSet::IN | EventSet::EDGE_TRIGGERED)?;
        }
        if self.pair == 0 && std::mem::take(&mut self.moved) {
            self.shared.announce();
        }
        self.follow(session)
    }

    fn kick(&mut self, session: &mut Session, queue: u16) -> Result<Progress, Fault> {
        if control_queue(session, self.shared.pairs()) == Some(queue) {
            return match &mut self.commands {
                Some(commands) => commands.run(session, queue, &self.shared),
                None => Ok(Progress::Waiting),
            };
        }
        let (receive, transmit) = (self.receive_queue(), self.transmit_queue());
        let Some((receiver, sender)) = &mut self.running else {
            return Ok(Progress::Waiting);
        };
        if queue == receive {
            if !self.watched {
                return Ok(Progress::Waiting);
            }
            return receiver.run(session, &*self.backend, &mut self.receive_throttle, RECEIVE_TIMER);
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
        self.commands = None;
        if let Some((receiver, _)) = self.running.take() {
            self.pending = receiver.put_back(session);
        }
        Ok(Drained::Quiet)
    }

    fn reset(&mut self) {
        self.running = None;
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
        self.moved = true;
        Ok(())
    }
}
