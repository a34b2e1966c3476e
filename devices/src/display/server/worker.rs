//! The server's thread.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use rfb::{
    Cursor, Frame, Size,
    session::{Event, ResizeStatus, Session},
};
use rustix::{
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    io::Errno,
    net::{SocketFlags, accept_with},
};
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_NONBLOCK, EventFd},
};

use super::{Access, FRAME, KEY_POLLS, MAX_CLIENTS, Resizer, Setup, client::Client, poll::Poller, scroll};
use crate::{
    display::{Framebuffer, Reader},
    input::Hub,
};

/// Tokens of the epoll instance; those of clients start at `FIRST_CLIENT`.
const STOP: u64 = 0;
const WAKE: u64 = 1;
const FIRST_LISTENER: u64 = 2;
const FIRST_CLIENT: u64 = 1 << 32;

struct Listener {
    socket: OwnedFd,
    access: Access,
    /// Somebody may wait to be accepted.
    ready: bool,
}

/// Copy of the framebuffer at its last read.
struct Picture {
    reader: Reader,
    frame: Frame,
    rows: scroll::Rows,
    cursor: Arc<Cursor>,
    /// No earlier than this it is read again.
    next: Instant,
}

pub(super) struct Worker {
    epoll: Epoll,
    stop: EventFd,
    /// The framebuffer or the keyboard's lights changed.
    wake: Arc<EventFd>,
    listeners: Vec<Listener>,
    name: String,
    framebuffer: Arc<Framebuffer>,
    input: Arc<Hub>,
    resizer: Arc<dyn Resizer>,
    clients: Vec<Client>,
    next_id: u64,
    /// While there are clients.
    picture: Option<Picture>,
    /// When the framebuffer, which has changed, is to be read.
    due: Option<Instant>,
    poller: Option<Poller>,
    /// When it is asked again whether the guest has taken the keys that a client waits for, and how long after that once more.
    keys_due: Option<Instant>,
    keys_interval: Duration,
}

impl Worker {
    pub fn new(setup: Setup, stop: EventFd) -> io::Result<Self> {
        let wake = Arc::new(EventFd::new(EFD_NONBLOCK)?);
        setup.input.watch_leds(Arc::clone(&wake));
        let mut worker = Self {
            epoll: Epoll::new()?,
            stop,
            wake,
            listeners: Vec::new(),
            name: setup.name,
            framebuffer: setup.framebuffer,
            input: setup.input,
            resizer: setup.resizer,
            clients: Vec::new(),
            next_id: FIRST_CLIENT,
            picture: None,
            due: None,
            poller: setup.boot.map(Poller::new),
            keys_due: None,
            keys_interval: KEY_POLLS.0,
        };
        worker.watch(&worker.stop, STOP, EventSet::IN)?;
        worker.watch(&*worker.wake, WAKE, EventSet::IN)?;
        for ((socket, access), token) in setup.listeners.into_iter().zip(FIRST_LISTENER..) {
            fcntl_setfl(&socket, fcntl_getfl(&socket)? | OFlags::NONBLOCK)?;
            worker.watch(&socket, token, EventSet::IN | EventSet::EDGE_TRIGGERED)?;
            worker.listeners.push(Listener {
                socket,
                access,
                ready: true,
            });
        }
        Ok(worker)
    }

    pub fn run(&mut self) {
        let mut events = [EpollEvent::default(); 64];
        loop {
            let count = match self.epoll.wait(self.timeout(), &mut events) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
                Err(error) => {
                    tracing::error!(%error, "wait for VNC clients");
                    return;
                }
            };
            for event in events.iter().take(count) {
                match event.data() {
                    STOP => return,
                    // This thread is the only reader.
                    WAKE => {
                        let _count = self.wake.read();
                    }
                    token => self.note(token, event.event_set()),
                }
            }
            self.accept();
            self.listen();
            self.answer_who_types();
            self.show();
            self.clients.retain(|client| !client.gone);
            if self.clients.is_empty() {
                self.picture = None;
            }
        }
    }

    /// Returns the timeout for epoll in milliseconds; -1 for no timeout.
    fn timeout(&self) -> i32 {
        let busy = self
            .clients
            .iter()
            .any(|client| client.wants_reading() || client.wants_writing());
        if busy || self.listeners.iter().any(|listener| listener.ready) {
            return 0;
        }
        let due = self.due.into_iter().chain(self.keys_due).min();
        due.map_or(-1, |due| {
            let left = due.saturating_duration_since(Instant::now());
            // Rounded up, so as not to come too early and spin.
            i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
        })
    }

    fn note(&mut self, token: u64, events: EventSet) {
        if let Some(client) = self.clients.iter_mut().find(|client| client.id == token) {
            let closed = EventSet::HANG_UP | EventSet::ERROR | EventSet::READ_HANG_UP;
            client.readable |= events.intersects(EventSet::IN | closed);
            client.writable |= events.intersects(EventSet::OUT | closed);
            return;
        }
        let at = usize::try_from(token.saturating_sub(FIRST_LISTENER)).unwrap_or(usize::MAX);
        if let Some(listener) = self.listeners.get_mut(at) {
            listener.ready = true;
        }
    }

    fn accept(&mut self) {
        let mut came = Vec::new();
        for listener in self.listeners.iter_mut().filter(|listener| listener.ready) {
            // A few at a time: clients that are there have their turn in between.
            match accept_with(&listener.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => came.push((socket, listener.access)),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => listener.ready = false,
                Err(error) => {
                    // Out of descriptors or memory: tried again when the next one comes.
                    tracing::warn!(%error, "accept a VNC client");
                    listener.ready = false;
                }
            }
        }
        for (socket, access) in came {
            if let Err(error) = self.add_client(socket, access) {
                tracing::warn!(%error, "serve a VNC client");
            }
        }
    }

    fn add_client(&mut self, socket: OwnedFd, access: Access) -> io::Result<()> {
        if self.clients.len() >= MAX_CLIENTS {
            // The oldest client with an unfinished handshake makes room.
            let Some(at) = self.clients.iter().position(|client| !client.session.is_ready()) else {
                return Ok(());
            };
            self.clients.remove(at);
        }
        let id = self.next_id;
        self.next_id = id.saturating_add(1);
        let both = EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED;
        self.watch(&socket, id, both)?;
        let size = self
            .picture
            .as_ref()
            .map_or_else(|| self.framebuffer.size(), |picture| picture.frame.size());
        self.clients.push(Client {
            id,
            socket,
            session: Session::new(&self.name, size),
            access,
            source: Hub::source(&self.input),
            readable: true,
            writable: true,
            closing: false,
            deaf: false,
            gone: false,
        });
        Ok(())
    }

    /// Takes what clients have sent.
    fn listen(&mut self) {
        let leds = self.input.leds();
        let mut events = Vec::new();
        let (mut alone, mut acted) = (None, false);
        for client in &mut self.clients {
            client.read(&mut events);
            for event in events.drain(..) {
                if let Event::Ready { shared } = event {
                    if let Some(picture) = &self.picture {
                        client.session.set_cursor(Arc::clone(&picture.cursor));
                    }
                    if !shared && client.access == Access::Full {
                        alone = Some(client.id);
                    }
                } else if client.access == Access::Full {
                    acted = true;
                    act(client, event, &*self.resizer);
                } else if matches!(event, Event::Resize { .. }) {
                    client.session.answer_resize(ResizeStatus::Prohibited);
                }
            }
            client.session.set_leds(leds);
        }
        if let Some(poller) = self.poller.as_mut().filter(|_| acted) {
            poller.hurry(Instant::now());
        }
        // RFC 6143, 7.3.1: the others are disconnected.
        if let Some(alone) = alone {
            for client in self.clients.iter_mut().filter(|client| client.id != alone) {
                client.gone |= client.session.is_ready();
            }
        }
    }

    /// Answers clients that wait until the guest has taken their keys.
    fn answer_who_types(&mut self) {
        let now = Instant::now();
        if !self
            .clients
            .iter()
            .any(|client| client.session.waits_for_effect())
        {
            self.keys_due = None;
            self.keys_interval = KEY_POLLS.0;
            return;
        }
        if self.keys_due.is_some_and(|due| now < due) {
            return;
        }
        if self.input.keys_wait() {
            self.keys_due = now.checked_add(self.keys_interval);
            self.keys_interval = self.keys_interval.saturating_mul(2).min(KEY_POLLS.1);
            return;
        }
        self.keys_due = None;
        for client in &mut self.clients {
            client.session.took_effect();
        }
    }

    /// Reads the framebuffer if it is time and somebody waits, and sends what can be sent.
    fn show(&mut self) {
        self.due = None;
        let now = Instant::now();
        if self.somebody_waits() {
            self.follow(now);
            if let Some(poller) = &mut self.poller {
                poller.poll(now);
            }
            if let Some(picture) = &mut self.picture
                && picture.reader.arm()
            {
                if now >= picture.next {
                    picture.next = now.checked_add(FRAME).unwrap_or(now);
                    refresh(picture, &mut self.clients);
                } else {
                    self.due = Some(picture.next);
                }
            }
        }
        if let Some(picture) = &self.picture {
            for client in &mut self.clients {
                if client.session.wants_update() {
                    client.session.begin_update(None);
                }
                client.write(&picture.frame);
            }
        } else {
            let nothing = Frame::black(Size::DEFAULT);
            for client in &mut self.clients {
                client.write(&nothing);
            }
        }
        if self.due.is_none()
            && self.somebody_waits()
            && let Some(picture) = &mut self.picture
            && picture.reader.arm()
        {
            self.due = Some(picture.next);
        }
        if self.somebody_waits()
            && let Some(next) = self.poller.as_ref().and_then(Poller::next)
        {
            self.due = Some(self.due.map_or(next, |due| due.min(next)));
        }
    }

    fn somebody_waits(&self) -> bool {
        self.clients.iter().any(|client| client.session.accepts_update())
    }

    /// Begins to follow the framebuffer.
    fn follow(&mut self, now: Instant) {
        if self.picture.is_some() {
            return;
        }
        let Some(reader) = self.framebuffer.reader(Arc::clone(&self.wake)) else {
            return;
        };
        let frame = Frame::black(self.framebuffer.size());
        self.picture = Some(Picture {
            reader,
            rows: scroll::Rows::of(&frame),
            frame,
            cursor: Arc::default(),
            next: now,
        });
    }

    fn watch(&self, fd: &impl AsRawFd, token: u64, interest: EventSet) -> io::Result<()> {
        self.epoll.ctl(
            ControlOperation::Add,
            fd.as_raw_fd(),
            EpollEvent::new(interest, token),
        )
    }
}

/// Reads the framebuffer and passes the changes to all clients. Clients that support moves receive
/// a moved area as such, at once.
fn refresh(picture: &mut Picture, clients: &mut [Client]) {
    let update = picture.reader.read(&mut picture.frame);
    if let Some(cursor) = update.cursor {
        for client in clients.iter_mut() {
            client.session.set_cursor(Arc::clone(&cursor));
        }
        picture.cursor = cursor;
    }
    for client in clients.iter_mut() {
        client.session.resize(picture.frame.size());
    }
    let moved = picture.rows.update(&picture.frame, &update.damage);
    for client in clients {
        match &moved {
            Some((moved, rest)) if client.session.accepts_move(*moved) => {
                client.session.add_damage(rest);
                client.session.begin_update(Some(*moved));
            }
            _ => client.session.add_damage(&update.damage),
        }
    }
}

/// Carries out a request of a client with full access.
fn act(client: &mut Client, event: Event, resizer: &dyn Resizer) {
    match event {
        Event::Ready { .. } => {}
        Event::Key { down, keysym } => client.source.keysym(keysym, down),
        Event::Scancode { down, scancode } => client.source.scancode(scancode, down),
        Event::Pointer { buttons, x, y, size } => client.source.point(buttons, (x, y), size),
        Event::Resize {
            width,
            height,
            screens,
        } => {
            let size = Size::new(width.into(), height.into()).filter(|_| screens == 1);
            let status = match size {
                None => ResizeStatus::Invalid,
                Some(size) if resizer.request_size(size) => ResizeStatus::Forwarded,
                Some(_) => ResizeStatus::Prohibited,
            };
            client.session.answer_resize(status);
        }
    }
}
