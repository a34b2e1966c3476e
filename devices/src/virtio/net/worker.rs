//! The worker: one thread for both directions.

use std::{os::fd::AsFd as _, sync::Arc, time::Instant};

use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;

use super::{
    config::{RECEIVE, TRANSMIT, offloads},
    receive::{Pending, Receiver},
    stats::NetStats,
    transmit::Sender,
};
use crate::{
    GuestMemory,
    net::{NetBackend, Offloads},
    state::{Section, StateError},
    virtio::{
        device::{Drained, Progress, QueueHandler},
        fault::Fault,
        session::{EventSet, Session},
    },
};

/// Token of the host's descriptor.
const HOST: u32 = 0;

/// The back.
pub(super) struct NetHandler {
    backend: Box<dyn NetBackend>,
    mtu: u16,
    stats: Arc<NetStats>,
    /// From start to drain.
    running: Option<(Receiver, Sender)>,
    /// Kept over a pause.
    pending: Pending,
    /// Whether the host's descriptor is watched for taking packets too.
    watches_output: bool,
}

impl NetHandler {
    pub(super) fn new(backend: Box<dyn NetBackend>, mtu: u16, stats: Arc<NetStats>) -> Self {
        Self {
            backend,
            mtu,
            stats,
            running: None,
            pending: Pending::default(),
            watches_output: false,
        }
    }

    /// Watches for edges: one that comes while there are no buffers is remembered, not repeated. Changing what is
    /// watched looks at the descriptor anew, so that nothing that happened before is missed; a tap does not even tell
    /// of room for output unless it was looked at since there was none.
    fn watch_output(&mut self, session: &Session, wanted: bool) -> Result<(), Fault> {
        if wanted || self.watches_output {
            session.rewatch(&self.backend.as_fd(), HOST, interest(wanted))?;
            self.watches_output = wanted;
        }
        Ok(())
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

impl QueueHandler for NetHandler {
    fn start(&mut self, session: &mut Session) -> Result<(), Fault> {
        let offloads = offloads(session.features());
        self.backend
            .set_offloads(offloads)
            .map_err(|error| Fault::Backend("set the network's offloads", error))?;
        let memory = Arc::new(session.memory().clone());
        let mergeable = session.has_feature(VIRTIO_NET_F_MRG_RXBUF);
        let large = offloads.intersects(Offloads::TSO4 | Offloads::TSO6);
        let receiver = Receiver::new(
            Arc::clone(&memory),
            Arc::clone(&self.stats),
            mergeable,
            large,
            self.mtu,
            std::mem::take(&mut self.pending),
        );
        self.running = Some((receiver, Sender::new(memory, Arc::clone(&self.stats))));
        self.watches_output = false;
        session.watch(&self.backend.as_fd(), HOST, interest(false))
    }

    fn kick(&mut self, session: &mut Session, queue: u16) -> Result<Progress, Fault> {
        let Some((receiver, sender)) = &mut self.running else {
            return Ok(Progress::Done);
        };
        if queue == RECEIVE {
            return receiver.run(session, &*self.backend);
        }
        let result = sender.run(session, &*self.backend);
        let blocked = sender.blocked;
        self.watch_output(session, blocked)?;
        result
    }

    fn event(&mut self, session: &mut Session, _token: u32) -> Result<(), Fault> {
        if let Some((receiver, sender)) = &mut self.running {
            receiver.readable = true;
            session.kick_again(RECEIVE);
            if std::mem::take(&mut sender.blocked) {
                session.kick_again(TRANSMIT);
            }
        }
        Ok(())
    }

    fn drain(&mut self, session: &mut Session, _deadline: Instant) -> Result<Drained, Fault> {
        if let Some((receiver, _)) = self.running.take() {
            self.pending = receiver.put_back(session);
        }
        Ok(Drained::Quiet)
    }

    fn reset(&mut self) {
        self.running = None;
        self.pending = Pending::default();
        if let Err(error) = self.backend.set_offloads(Offloads::empty()) {
            tracing::warn!(%error, "turn the network's offloads off");
        }
    }

    fn save(&self) -> Result<Section, StateError> {
        Ok(Section::new("net", &self.pending.save()))
    }

    fn restore(&mut self, section: &Section, _memory: &GuestMemory) -> Result<(), StateError> {
        self.pending = Pending::restored(&section.open()?)?;
        Ok(())
    }
}
