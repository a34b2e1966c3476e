//! Serves a serial port to its readers and writers, on one thread.
//!
//! # Protocol of console clients
//!
//! A client connects to the UNIX stream socket and first gets 8 bytes: the length, little-endian, of the output from before it
//! connected, which follows; then comes what is printed from there on. What it sends is input. A client that reads too
//! slowly loses output and finds a line in its place that says how much. At most [`MAX_CLIENTS`] are served; one too
//! many is closed without the 8 bytes.
//!
//! # Cost
//!
//! The guest's first byte after a silence wakes the thread, which waits for [`COALESCE`] before it writes what has come
//! by then, so that a flood costs 250 wake-ups a second at most and a line is one write. The thread sleeps otherwise.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::{
    fs::{FileType, Mode, OFlags, fcntl_getfl, fcntl_setfl, fstat, open},
    io::Errno,
    net::{SocketFlags, accept_with},
};
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_NONBLOCK, EventFd},
};

use super::{
    history::History,
    log::Log,
    output::{Output, notice},
    uart::Uart,
};

/// Most clients at once.
pub const MAX_CLIENTS: usize = 16;

/// How long output is gathered before it is written.
pub const COALESCE: Duration = Duration::from_millis(4);

/// Input taken from one sender before the next has its turn, in bytes.
const INPUT_CHUNK: usize = 1024;

/// What is copied out of the history at once, in bytes.
const OUTPUT_CHUNK: usize = 16 << 10;

/// Events taken from the kernel at once.
const EVENTS: usize = 16;

/// The terminal that `vmm run` was started on. Both descriptors are non-blocking; [`reopen`] makes them so without touching
/// those of the shell.
#[derive(Debug)]
pub struct Terminal {
    /// What is typed.
    pub input: OwnedFd,
    /// Where the output goes.
    pub output: OwnedFd,
    /// A byte that is no input, and what is signalled when it is typed.
    pub escape: Option<(u8, EventFd)>,
}

/// What is to be served.
#[derive(Default)]
pub struct Setup {
    /// A listening UNIX stream socket; it is made non-blocking.
    pub listener: Option<OwnedFd>,
    /// A terminal.
    pub terminal: Option<Terminal>,
    /// Gets everything that is printed, up to the server's end.
    pub log: Option<Log>,
}

/// A running server. It ends with [`stop`](Self::stop), or when dropped.
#[derive(Debug)]
pub struct Server {
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts the thread.
    pub fn start(uart: Arc<Mutex<Uart>>, setup: Setup) -> io::Result<Self> {
        let stop = EventFd::new(EFD_NONBLOCK)?;
        let mut worker = Worker::new(uart, setup, stop.try_clone()?)?;
        let thread = std::thread::Builder::new()
            .name("aux".into())
            .spawn(move || worker.run())?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }

    /// Writes what was printed so far (to the log all of it, to others what they take without waiting), closes
    /// everything and ends the thread; says whether it had been alive. To be called when no vCPU runs any more.
    pub fn stop(&mut self) -> bool {
        let Some(thread) = self.thread.take() else {
            return true;
        };
        // It can only fail when the counter is full, and then it is readable.
        let _ = self.stop.write(1);
        thread.join().is_ok()
    }

    /// Whether the thread is gone without having been told to.
    pub fn failed(&self) -> bool {
        self.thread.as_ref().is_some_and(JoinHandle::is_finished)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A non-blocking descriptor for the terminal, pipe or file behind `fd`, with a file description of its own: the mode of
/// the one that the shell uses stays as it is. Sockets can't be opened anew; theirs is changed. Files are taken as they are.
pub fn reopen(fd: impl AsFd, write: bool) -> io::Result<OwnedFd> {
    if FileType::from_raw_mode(fstat(&fd)?.st_mode) == FileType::RegularFile {
        // Never blocks, and its position may be shared with standard error.
        return fd.as_fd().try_clone_to_owned();
    }
    let mode = if write { OFlags::WRONLY } else { OFlags::RDONLY };
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    let flags = mode | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    if let Ok(opened) = open(path, flags, Mode::empty()) {
        return Ok(opened);
    }
    let copy = fd.as_fd().try_clone_to_owned()?;
    set_nonblocking(&copy)?;
    Ok(copy)
}

fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    Ok(fcntl_setfl(&fd, fcntl_getfl(&fd)? | OFlags::NONBLOCK)?)
}

/// What an epoll event is about.
const STOP: u64 = 0;
const NEWS: u64 = 1;
const ROOM: u64 = 2;
const LISTENER: u64 = 3;
/// From here on: peers, by their ids.
const FIRST_PEER: u64 = 4;

/// A sender and reader: the terminal or a client. What an edge-triggered event said is noted here until it is used up.
struct Peer {
    id: u64,
    input: Option<Input>,
    /// Gone when nobody reads any more.
    output: Option<Output>,
    client: bool,
}

struct Input {
    fd: Arc<OwnedFd>,
    /// The last read did not say that it would block.
    readable: bool,
    escape: Option<(u8, EventFd)>,
}

/// State of the thread.
struct Worker {
    epoll: Epoll,
    stop: EventFd,
    room: EventFd,
    uart: Arc<Mutex<Uart>>,
    history: Arc<History>,
    listener: Option<OwnedFd>,
    /// Somebody may wait to be accepted.
    knocked: bool,
    peers: Vec<Peer>,
    next_id: u64,
    log: Option<Log>,
    /// Up to where the log was written.
    logged: u64,
    /// When gathered output is to be written.
    due: Option<Instant>,
    /// The news eventfd will be signalled.
    armed: bool,
    scratch: Vec<u8>,
}

impl Worker {
    fn new(uart: Arc<Mutex<Uart>>, setup: Setup, stop: EventFd) -> io::Result<Self> {
        let (room, history) = {
            let uart = lock(&uart);
            (uart.room_event()?, Arc::clone(uart.history()))
        };
        let mut worker = Self {
            epoll: Epoll::new()?,
            stop,
            room,
            uart,
            history,
            listener: setup.listener,
            knocked: true,
            peers: Vec::new(),
            next_id: FIRST_PEER,
            log: setup.log,
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

    fn run(&mut self) {
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

    /// In milliseconds, rounded up; -1 is for ever.
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
                    if output.pump(&self.history, &mut self.scratch).is_err() {
                        peer.output = None;
                    }
                }
            }
        }
    }

    /// Takes in who waits at the socket.
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
            // Those that are gone but left input that nobody takes make room.
            self.peers.retain(|peer| !peer.client || peer.output.is_some());
        }
        if self.clients() >= MAX_CLIENTS {
            return Ok(());
        }
        let (replay, position) = self.history.snapshot();
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
        self.watch(
            &socket,
            self.next_id,
            EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED,
        )?;
        self.add_peer(input, output, true);
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
        self.watch_unless_file(&input, id, EventSet::IN | edge)?;
        self.watch_unless_file(&output, id.saturating_add(1), EventSet::OUT | edge)?;
        self.add_peer(watched, Output::new(output, Vec::new(), 0), false);
        Ok(())
    }

    /// Takes a peer in that is watched by the next free id and, where its output is apart, the one after it.
    fn add_peer(&mut self, input: Input, mut output: Output, client: bool) {
        let id = self.next_id;
        self.next_id = id.saturating_add(2);
        let alive = output.pump(&self.history, &mut self.scratch).is_ok();
        self.peers.push(Peer {
            id,
            input: Some(input),
            output: alive.then_some(output),
            client,
        });
        if !self.armed && self.due.is_none() {
            self.rearm(self.history.end());
        }
    }

    fn clients(&self) -> usize {
        self.peers.iter().filter(|peer| peer.client).count()
    }

    /// Gives the port what was typed, as long as it has room.
    fn pump_input(&mut self) {
        let mut buffer = [0; INPUT_CHUNK];
        let mut more = true;
        while more {
            more = false;
            for peer in &mut self.peers {
                let Some(input) = peer.input.as_mut().filter(|input| input.readable) else {
                    continue;
                };
                let room = lock(&self.uart).room().min(INPUT_CHUNK);
                let Some(space) = buffer.get_mut(..room).filter(|space| !space.is_empty()) else {
                    return;
                };
                if input.pump(space, &self.uart) {
                    more |= input.readable;
                } else {
                    peer.input = None;
                }
            }
        }
    }

    /// Writes what was gathered.
    fn pump_output(&mut self) {
        let end = self.history.end();
        self.due = None;
        self.pump_log();
        for peer in &mut self.peers {
            if peer
                .output
                .as_mut()
                .is_some_and(|output| output.pump(&self.history, &mut self.scratch).is_err())
            {
                peer.output = None;
            }
        }
        self.rearm(end);
    }

    fn pump_log(&mut self) {
        let Some(log) = &mut self.log else { return };
        loop {
            let read = self.history.read(&mut self.logged, &mut self.scratch);
            if read.lost > 0 {
                log.append(&notice(read.lost));
            }
            if read.bytes == 0 {
                return;
            }
            log.append(self.scratch.get(..read.bytes).unwrap_or_default());
        }
    }

    /// Asks for a signal when something is printed behind `position`, if somebody wants it.
    fn rearm(&mut self, position: u64) {
        if self.log.is_none() && self.peers.iter().all(|peer| peer.output.is_none()) {
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

    /// Plain files can't be watched, and need not be: they are always ready.
    fn watch_unless_file(&self, fd: &impl AsRawFd, token: u64, interest: EventSet) -> io::Result<()> {
        match self.watch(fd, token, interest) {
            Err(error) if error.raw_os_error() == Some(Errno::PERM.raw_os_error()) => Ok(()),
            result => result,
        }
    }
}

impl Peer {
    fn covers(&self, id: u64) -> bool {
        id == self.id || id == self.id.saturating_add(1)
    }
}

impl Input {
    /// Reads once into `space`, which the port has room for; says whether more may come.
    fn pump(&mut self, space: &mut [u8], uart: &Mutex<Uart>) -> bool {
        let count = match rustix::io::retry_on_intr(|| rustix::io::read(&self.fd, &mut *space)) {
            Ok(0) => return false,
            Ok(count) => count,
            Err(Errno::AGAIN) => {
                self.readable = false;
                return true;
            }
            Err(_) => return false,
        };
        let typed = space.get(..count).unwrap_or_default();
        match &self.escape {
            Some((escape, event)) if typed.contains(escape) => {
                // It can only fail when the counter is full, and then it is readable.
                let _ = event.write(1);
                for part in typed.split(|byte| byte == escape) {
                    lock(uart).receive(part);
                }
            }
            _ => {
                lock(uart).receive(typed);
            }
        }
        true
    }
}

fn soon() -> Instant {
    let now = Instant::now();
    now.checked_add(COALESCE).unwrap_or(now)
}

fn lock(uart: &Mutex<Uart>) -> MutexGuard<'_, Uart> {
    uart.lock().unwrap_or_else(PoisonError::into_inner)
}
