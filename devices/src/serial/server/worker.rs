//! Main loop of the thread: connections and the timing of writes.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
    time::Instant,
};

use rustix::{
    io::Errno,
    net::{SocketFlags, accept_with},
};
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::EventFd,
};

use super::{
    super::{
        history::{History, notice},
        log::Log,
        output::Output,
        port::Port,
    },
    COALESCE, MAX_CLIENTS, Setup, Terminal, Watch,
    peer::{Input, Peer, Room},
    set_nonblocking,
};

/// Input taken from one sender before the next has its turn, in bytes.
const INPUT_CHUNK: usize = 1024;

/// Number of bytes copied out of the history at once.
const OUTPUT_CHUNK: usize = 16 << 10;

/// Replays that no client has taken yet have together at most this many bytes, and [`LEAST_REPLAY`] each.
const REPLAYS: usize = 4 << 20;

/// A client that comes when [`REPLAYS`] are used up gets the last bytes alone.
const LEAST_REPLAY: usize = 64 << 10;

/// Events taken from the kernel at once.
const EVENTS: usize = 16;

/// Tokens of epoll events.
const STOP: u64 = 0;
const NEWS: u64 = 1;
const ROOM: u64 = 2;
const LISTENER: u64 = 3;
/// From here on: peers, by their ids.
const FIRST_PEER: u64 = 4;

/// State of the thread.
pub(super) struct Worker {
    epoll: Epoll,
    stop: EventFd,
    room: EventFd,
    port: Arc<dyn Port>,
    history: Arc<History>,
    listener: Option<OwnedFd>,
    /// Somebody may wait to be accepted.
    knocked: bool,
    peers: Vec<Peer>,
    next_id: u64,
    log: Option<Log>,
    watch: Option<Watch>,
    /// Up to where the log was written.
    logged: u64,
    /// When gathered output is to be written.
    due: Option<Instant>,
    /// The news eventfd will be signalled.
    armed: bool,
    scratch: Vec<u8>,
}

impl Worker {
    pub(super) fn new(port: Arc<dyn Port>, setup: Setup, stop: EventFd) -> io::Result<Self> {
        let (room, history) = (port.room_event()?, port.history());
        let mut worker = Self {
            epoll: Epoll::new()?,
            stop,
            room,
            port,
            history,
            listener: setup.listener,
            knocked: true,
            peers: Vec::new(),
            next_id: FIRST_PEER,
            log: setup.log,
            watch: setup.watch,
            logged: 0,
            due: None,
            armed: false,
            scratch: vec![0; OUTPUT_CHUNK],
        };
        worker.watch(&worker.stop, STOP, EventSet::IN)?;
        // Signals of these are edges; they are never read.
        let edge = EventSet::IN | EventSet::EDGE_TRIGGERED;
        worker.watch(worker.history.news(), NEWS, edge)?;
        worker.watch(&worker.room, ROOM, edge)?;
        if let Some(listener) = &worker.listener {
            set_nonblocking(listener)?;
            worker.watch(listener, LISTENER, edge)?;
        }
        if let Some(terminal) = setup.terminal {
            worker.add_terminal(terminal)?;
        }
        Ok(worker)
    }

    pub(super) fn run(&mut self) {
        let mut events = [EpollEvent::default(); EVENTS];
        self.rearm(0);
        loop {
            self.accept();
            self.pump_input();
            if self.due.is_some_and(|due| Instant::now() >= due) {
                self.pump_output();
            }
            self.forget_dead_peers();
            let count = match self.epoll.wait(self.timeout(), &mut events) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
                Err(error) => {
                    tracing::error!(%error, "wait for console events");
                    break;
                }
            };
            let mut stop = false;
            for event in events.iter().take(count) {
                stop |= event.data() == STOP;
                self.note(event.data(), event.event_set());
            }
            if stop {
                break;
            }
        }
        self.pump_output();
    }

    /// Returns the timeout in milliseconds, rounded up; -1 for no timeout.
    fn timeout(&self) -> i32 {
        self.due.map_or(-1, |due| {
            let left = due.saturating_duration_since(Instant::now());
            i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
        })
    }

    /// Notes what an event says.
    fn note(&mut self, token: u64, flags: EventSet) {
        match token {
            NEWS => {
                self.armed = false;
                self.due.get_or_insert_with(soon);
            }
            LISTENER => self.knocked = true,
            STOP | ROOM => {}
            id => {
                let Some(peer) = self.peers.iter_mut().find(|peer| peer.covers(id)) else {
                    return;
                };
                if let Some(input) = &mut peer.input {
                    input.readable |= flags.intersects(
                        EventSet::IN | EventSet::READ_HANG_UP | EventSet::HANG_UP | EventSet::ERROR,
                    );
                }
                if flags.intersects(EventSet::HANG_UP | EventSet::ERROR) {
                    peer.output = None;
                }
                if let (Some(output), true) = (&mut peer.output, flags.contains(EventSet::OUT)) {
                    output.writable = true;
                    let end = self.history.end();
                    peer.pump(&self.history, &mut self.scratch, end, &self.epoll);
                }
            }
        }
    }

    /// Accepts waiting connections.
    fn accept(&mut self) {
        while self.knocked {
            let Some(listener) = &self.listener else { return };
            match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(client) => {
                    if let Err(error) = self.add_client(client) {
                        tracing::warn!(%error, "serve a console client");
                    }
                }
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => self.knocked = false,
                Err(error) => {
                    // Out of descriptors or memory: tried again when the next one comes or one leaves.
                    tracing::warn!(%error, "accept a console client");
                    self.knocked = false;
                }
            }
        }
    }

    fn add_client(&mut self, socket: OwnedFd) -> io::Result<()> {
        if self.clients() >= MAX_CLIENTS {
            // Disconnected clients with untaken input make room.
            self.peers.retain(|peer| !peer.client || peer.output.is_some());
        }
        if self.clients() >= MAX_CLIENTS {
            return Ok(());
        }
        let outputs = self.peers.iter().filter_map(|peer| peer.output.as_ref());
        let untaken = outputs.map(Output::pending).fold(0, usize::saturating_add);
        let most = REPLAYS.saturating_sub(untaken).max(LEAST_REPLAY);
        let (replay, position) = self.history.replay(most);
        let mut first = Vec::with_capacity(replay.len().saturating_add(8));
        first.extend((replay.len() as u64).to_le_bytes());
        first.extend(replay);
        let socket = Arc::new(socket);
        let input = Input {
            fd: Arc::clone(&socket),
            readable: true,
            escape: None,
        };
        let output = Output::new(Arc::clone(&socket), first, position);
        let id = self.next_id;
        let interest = EventSet::IN | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED;
        self.watch(&socket, id, interest)?;
        self.add_peer(input, (output, Room::new(id, interest)), true);
        Ok(())
    }

    fn add_terminal(&mut self, terminal: Terminal) -> io::Result<()> {
        let (input, output) = (Arc::new(terminal.input), Arc::new(terminal.output));
        let watched = Input {
            fd: Arc::clone(&input),
            readable: true,
            escape: terminal.escape,
        };
        let (id, edge) = (self.next_id, EventSet::EDGE_TRIGGERED);
        let room = Room::new(id.saturating_add(1), edge);
        self.watch_unless_file(&input, id, EventSet::IN | edge)?;
        self.watch_unless_file(&output, id.saturating_add(1), edge)?;
        self.add_peer(watched, (Output::new(output, Vec::new(), 0), room), false);
        Ok(())
    }

    /// Takes a peer in that is watched by the next free id and, where its output is apart, the one after it.
    fn add_peer(&mut self, input: Input, (output, room): (Output, Room), client: bool) {
        let id = self.next_id;
        self.next_id = id.saturating_add(2);
        let mut peer = Peer {
            id,
            input: Some(input),
            output: Some(output),
            room,
            client,
        };
        let end = self.history.end();
        peer.pump(&self.history, &mut self.scratch, end, &self.epoll);
        self.peers.push(peer);
        if !self.armed && self.due.is_none() {
            self.rearm(end);
        }
    }

    fn clients(&self) -> usize {
        self.peers.iter().filter(|peer| peer.client).count()
    }

    /// Passes input to the port, as long as the port has room.
    fn pump_input(&mut self) {
        let mut buffer = [0; INPUT_CHUNK];
        let mut more = true;
        while more {
            more = false;
            for peer in &mut self.peers {
                let Some(input) = peer.input.as_mut().filter(|input| input.readable) else {
                    continue;
                };
                let room = self.port.room().min(INPUT_CHUNK);
                let Some(space) = buffer.get_mut(..room).filter(|space| !space.is_empty()) else {
                    return;
                };
                if input.pump(space, self.port.as_ref()) {
                    more |= input.readable;
                } else {
                    peer.input = None;
                }
            }
        }
    }

    /// Writes the collected output.
    fn pump_output(&mut self) {
        let end = self.history.end();
        self.due = None;
        self.pump_log(end);
        for peer in &mut self.peers {
            peer.pump(&self.history, &mut self.scratch, end, &self.epoll);
        }
        self.rearm(end);
    }

    fn pump_log(&mut self, until: u64) {
        if self.is_unread() {
            return;
        }
        while self.logged < until {
            let read = self.history.read(&mut self.logged, &mut self.scratch);
            let text = self.scratch.get(..read.bytes).unwrap_or_default();
            if let Some(log) = &mut self.log {
                if read.lost > 0 {
                    log.append(&notice(read.lost));
                }
                log.append(text);
            }
            if let Some(watch) = &mut self.watch {
                watch(text, self.logged);
            }
        }
    }

    /// Whether there is neither a log nor a watch.
    fn is_unread(&self) -> bool {
        self.log.is_none() && self.watch.is_none()
    }

    /// Asks for a signal when something is printed behind `position`, if somebody wants it.
    fn rearm(&mut self, position: u64) {
        if self.is_unread() && self.peers.iter().all(|peer| peer.output.is_none()) {
            return;
        }
        if self.history.arm(position) {
            self.due.get_or_insert_with(soon);
        } else {
            self.armed = true;
        }
    }

    fn forget_dead_peers(&mut self) {
        let before = self.peers.len();
        self.peers
            .retain(|peer| peer.input.is_some() || peer.output.is_some());
        // A descriptor is free again.
        self.knocked |= self.peers.len() < before && self.listener.is_some();
    }

    fn watch(&self, fd: &impl AsRawFd, token: u64, interest: EventSet) -> io::Result<()> {
        self.epoll.ctl(
            ControlOperation::Add,
            fd.as_raw_fd(),
            EpollEvent::new(interest, token),
        )
    }

    /// Ignores regular files: they cannot be watched, and are always ready.
    fn watch_unless_file(&self, fd: &impl AsRawFd, token: u64, interest: EventSet) -> io::Result<()> {
        match self.watch(fd, token, interest) {
            Err(error) if error.raw_os_error() == Some(Errno::PERM.raw_os_error()) => Ok(()),
            result => result,
        }
    }
}

fn soon() -> Instant {
    let now = Instant::now();
    now.checked_add(COALESCE).unwrap_or(now)
}
