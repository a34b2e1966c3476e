//! The back: gives queues to the process that serves them, takes them back, and refuses requests while there is none.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use vmm_base::GuestMemory;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::{
    Inbox,
    request::{Head, IN_HEADER, OUT_HEADER},
};
use crate::{
    state::{Section, StateError, message},
    vhost_user::{self, FrontEnd, RingAddresses, RingEvents},
    virtio::{
        chain::Chain,
        device::{Drained, Progress, QueueHandler},
        fault::{Fault, RingError},
        queue::QueueState,
        session::{EventSet, Session},
        signals::Signals,
    },
};

/// Tokens of watched descriptors.
const BACKEND: u32 = 0;
const ARRIVED: u32 = 1;
const VECTORS: u32 = 2;
const RING_ERROR: u32 = 3;
/// Plus the number of the queue.
const RELAY: u32 = 16;

/// How long a back end may take to stop a queue that it has no request in.
const STOP: Duration = Duration::from_secs(5);

/// Messages about the serving process.
const LOST: &str = "the process that serves the share has ended";
const UNUSABLE: &str = "take the process that serves the share into use";

/// See the module.
pub(super) struct FsHandler {
    /// Number of queues.
    queues: u16,
    inbox: Arc<Inbox>,
    signals: Arc<Signals>,
    backend: Option<FrontEnd>,
    /// The queues are the back end's.
    delegated: bool,
    /// The driver may have inodes and handles of a process that is gone.
    stale: bool,
    /// State of the driver's inodes and handles, for the first process of a restored device.
    inherited: Vec<u8>,
    /// Where a queue's interrupts go that have no eventfd of their own; this thread raises them.
    relays: Vec<EventFd>,
    /// Signalled by the back end when it finds a ring corrupt.
    ring_error: EventFd,
    chain: Chain,
}

impl FsHandler {
    pub(super) fn new(queues: u16, inbox: Arc<Inbox>, signals: Arc<Signals>) -> io::Result<Self> {
        let event = || EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK);
        // Made here, by a thread that may.
        signals.vector_changes()?;
        Ok(Self {
            queues,
            inbox,
            signals,
            backend: None,
            delegated: false,
            stale: false,
            inherited: Vec::new(),
            relays: (0..queues).map(|_| event()).collect::<io::Result<_>>()?,
            ring_error: event()?,
            chain: Chain::new(),
        })
    }

    /// Starts to use a process that waits in the inbox, instead of the current process. Returns
    /// false if no process waits.
    fn greet(&mut self, session: &Session) -> Result<bool, Fault> {
        let Some(socket) = self.inbox.take() else {
            return Ok(false);
        };
        if self.backend.take().is_some() {
            // The previous process ended unnoticed while the device was paused.
            self.stale = true;
        }
        let deadline = vhost_user::deadline();
        let greeted = FrontEnd::new(socket, deadline).and_then(|mut backend| {
            backend.set_memory(session.memory(), deadline)?;
            Ok(backend)
        });
        self.backend = Some(greeted.map_err(|error| Fault::Backend(UNUSABLE, error))?);
        Ok(true)
    }

    /// Loads the driver's inodes and handles into the first process of a restored device. On a
    /// failure, drops the process, because it would confuse them with others.
    fn hand_down(&mut self) {
        let inherited = std::mem::take(&mut self.inherited);
        if inherited.is_empty() {
            return;
        }
        let result = match &self.backend {
            Some(backend) => backend.load_state(&inherited),
            None => Err(io::ErrorKind::NotConnected.into()),
        };
        if let Err(error) = result {
            tracing::warn!(%error, "the process of a share cannot continue with the guest's open files: the guest has to mount the share again");
            self.stale = true;
            // It may have taken a part.
            self.backend = None;
        }
    }

    /// Gives all queues to the back end. Without one, or when it fails, they stay here.
    fn delegate(&mut self, session: &mut Session) -> Result<(), Fault> {
        if self.backend.is_none() {
            return Ok(());
        }
        self.delegated = true;
        self.try_delegate(session).or_else(|error| {
            self.lose(session)?;
            Err(Fault::Backend(UNUSABLE, error))
        })
    }

    fn try_delegate(&mut self, session: &mut Session) -> io::Result<()> {
        let Some(backend) = &mut self.backend else {
            return Ok(());
        };
        let deadline = vhost_user::deadline();
        backend.set_features(session.features(), deadline)?;
        for queue in 0..self.queues {
            let Some(state) = session.delegate(queue).map_err(io::Error::other)? else {
                continue;
            };
            let (Some(kick), Some(relay)) = (session.kick_event(queue), self.relays.get(usize::from(queue)))
            else {
                continue;
            };
            let call = self.signals.queue_event(queue).unwrap_or(relay);
            let events = RingEvents {
                kick,
                call,
                error: &self.ring_error,
            };
            let base = state.next_avail;
            backend.start_ring(queue.into(), base, &addresses(&state), &events, deadline)?;
            // The driver does not notify again of requests that are already available.
            kick.write(1)?;
        }
        Ok(())
    }

    /// The back end is gone, or of no use: the queues are this thread's, from the first request on that has no answer.
    fn lose(&mut self, session: &mut Session) -> Result<(), Fault> {
        if let Some(backend) = self.backend.take() {
            // It may not be watched yet.
            let _unwatched = session.unwatch(&backend);
        }
        if std::mem::take(&mut self.delegated) {
            self.stale = true;
            for queue in 0..self.queues {
                session.reclaim(queue, None)?;
                // The process may have ended between publishing completions and signalling them.
                self.signals.queue_interrupt(queue);
            }
        }
        Ok(())
    }

    /// Looks at the connection: nothing comes on it that was not asked for, so it has ended, or a queue that is slow to stop has
    /// stopped after the pause that it was for was given up.
    fn backend_ready(&mut self, session: &mut Session) -> Result<(), Fault> {
        if self.backend.as_ref().is_some_and(FrontEnd::is_stopping) {
            let now = Instant::now();
            if self.take_back(session, now)? == Drained::Quiet {
                return self.delegate(session);
            }
            return Ok(());
        }
        self.lose(session)?;
        // One may have come before the end of the last one was seen.
        let _later = self.receive(session);
        Err(Fault::Backend(LOST, io::ErrorKind::ConnectionReset.into()))
    }

    /// Takes the queues back from the back end.
    fn take_back(&mut self, session: &mut Session, deadline: Instant) -> Result<Drained, Fault> {
        for queue in 0..self.queues {
            if !session.is_delegated(queue) {
                continue;
            }
            let Some(backend) = &mut self.backend else { break };
            match backend.stop_ring(queue.into(), deadline) {
                Ok(Some(base)) => session.reclaim(queue, Some(base))?,
                Ok(None) => return Ok(Drained::Late),
                Err(error) => {
                    self.lose(session)?;
                    return Err(Fault::Backend(LOST, error));
                }
            }
        }
        self.delegated = false;
        Ok(Drained::Quiet)
    }

    /// Handles the arrival of a new process. The process gets the queues when the driver mounts
    /// again.
    fn receive(&mut self, session: &mut Session) -> Result<(), Fault> {
        let _read = self.inbox.arrived.read();
        if self.delegated {
            // It takes the place of one that ends, whose end is seen first.
            return Ok(());
        }
        // A process that arrived during a pause is already in use and watched.
        match self.greet(session)? {
            true => self.watch_backend(session),
            false => Ok(()),
        }
    }

    fn watch_backend(&self, session: &Session) -> Result<(), Fault> {
        match &self.backend {
            Some(backend) => session.watch(backend, BACKEND, EventSet::IN),
            None => Ok(()),
        }
    }

    /// The driver has given queues other vectors.
    fn vectors_changed(&mut self, session: &mut Session) -> Result<(), Fault> {
        self.signals.take_vector_change();
        let deadline = vhost_user::deadline();
        for queue in 0..self.queues {
            let (Some(backend), Some(relay)) = (&mut self.backend, self.relays.get(usize::from(queue)))
            else {
                continue;
            };
            if !session.is_delegated(queue) {
                continue;
            }
            let call = self.signals.queue_event(queue).unwrap_or(relay);
            if let Err(error) = backend.set_call(queue.into(), call, deadline) {
                self.lose(session)?;
                return Err(Fault::Backend(LOST, error));
            }
            // An interrupt that went the old way meanwhile is sent once more; one too many is harmless.
            self.signals.queue_interrupt(queue);
        }
        Ok(())
    }

    /// Completes the request in `chain` with ENOTCONN; gives the number of bytes written.
    fn refuse(&self, memory: &GuestMemory, head: Head) -> u32 {
        let length = u32::try_from(OUT_HEADER).unwrap_or(0);
        if self.chain.writable_len() < length {
            // One that has no answer (FUSE_FORGET).
            return 0;
        }
        match self.chain.write(memory, 0, &head.refusal()) {
            Ok(()) => length,
            Err(_) => 0,
        }
    }

    fn head(&self, memory: &GuestMemory) -> Head {
        let mut bytes = [0; IN_HEADER];
        let length = usize::try_from(self.chain.readable_len()).unwrap_or(usize::MAX);
        let present = bytes.get_mut(..length.min(IN_HEADER)).unwrap_or_default();
        if self.chain.read(memory, 0, present).is_err() {
            bytes = [0; IN_HEADER];
        }
        Head::new(bytes)
    }
}

impl QueueHandler for FsHandler {
    fn start(&mut self, session: &mut Session) -> Result<(), Fault> {
        session.watch(&self.inbox.arrived, ARRIVED, EventSet::IN)?;
        // Drops reports about rings of an earlier session. A ring that is still corrupt will be
        // reported again.
        let _read = self.ring_error.read();
        session.watch(&self.ring_error, RING_ERROR, EventSet::IN)?;
        let changes = self.signals.vector_changes();
        let changes = changes.map_err(|error| Fault::Backend("watch the vectors", error))?;
        session.watch(changes, VECTORS, EventSet::IN)?;
        for (relay, queue) in self.relays.iter().zip(RELAY..) {
            session.watch(relay, queue, EventSet::IN)?;
        }
        // Without a back end the device works on, and refuses requests.
        if let Err(error) = self.greet(session) {
            tracing::warn!(%error, "a share has no process that serves it");
        }
        self.hand_down();
        if self.backend.is_some() && !self.stale {
            self.delegated = true;
            if let Err(error) = self.try_delegate(session) {
                tracing::warn!(%error, "a share's process can't be used");
                self.lose(session)?;
            }
        }
        self.watch_backend(session)
    }

    fn kick(&mut self, session: &mut Session, queue: u16) -> Result<Progress, Fault> {
        let mut chain = std::mem::replace(&mut self.chain, Chain::new());
        while !self.delegated && session.pop(queue, &mut chain)? {
            self.chain = chain;
            let head = self.head(session.memory());
            if head.is_init() && self.backend.is_some() {
                session.unpop(queue);
                self.stale = false;
                self.delegate(session)?;
                return Ok(Progress::Waiting);
            }
            self.stale = true;
            let written = self.refuse(session.memory(), head);
            session.add_used(queue, self.chain.head(), written)?;
            chain = std::mem::replace(&mut self.chain, Chain::new());
        }
        self.chain = chain;
        Ok(Progress::Done)
    }

    fn event(&mut self, session: &mut Session, token: u32) -> Result<(), Fault> {
        match token {
            BACKEND => self.backend_ready(session),
            ARRIVED => self.receive(session),
            VECTORS => self.vectors_changed(session),
            RING_ERROR => {
                let _read = self.ring_error.read();
                Err(Fault::Ring {
                    queue: 0,
                    error: RingError::Delegated,
                })
            }
            relay => {
                let queue = relay
                    .checked_sub(RELAY)
                    .and_then(|queue| u16::try_from(queue).ok());
                if let Some(queue) = queue
                    && let Some(event) = self.relays.get(usize::from(queue))
                {
                    let _read = event.read();
                    self.signals.queue_interrupt(queue);
                }
                Ok(())
            }
        }
    }

    fn drain(&mut self, session: &mut Session, deadline: Instant) -> Result<Drained, Fault> {
        if !self.delegated {
            return Ok(Drained::Quiet);
        }
        let now = Instant::now();
        self.take_back(session, deadline.min(now.checked_add(STOP).unwrap_or(now)))
    }

    fn reset(&mut self) {
        // The next driver starts with FUSE_INIT.
        self.stale = false;
        self.inherited.clear();
    }

    fn save(&self) -> Result<Section, StateError> {
        let process = match &self.backend {
            // Its first process has not come yet.
            _ if !self.inherited.is_empty() => self.inherited.clone(),
            Some(backend) if !self.stale => backend
                .save_state()
                .map_err(|error| StateError::not_migratable("a share", error.to_string()))?,
            _ => Vec::new(),
        };
        let stale = self.stale;
        Ok(Section::new("fs", &message::VirtioFsQueues { process, stale }))
    }

    fn restore(&mut self, section: &Section, _memory: &GuestMemory) -> Result<(), StateError> {
        let saved: message::VirtioFsQueues = section.open()?;
        (self.inherited, self.stale) = (saved.process, saved.stale);
        Ok(())
    }
}

fn addresses(state: &QueueState) -> RingAddresses {
    RingAddresses {
        size: state.size,
        descriptors: state.desc_table,
        available: state.avail_ring,
        used: state.used_ring,
    }
}
