//! The control socket. The thread `control` serves several clients and never blocks on a client or
//! on the driver.
//!
//! The thread answers Hello and GetStatus itself, from the state that the driver published last.
//! These requests therefore stay fast during a boot or a pause. All other requests go to the
//! driver, which sends its replies and events back in order.

mod connection;
mod outbox;
mod requests;

use std::{
    collections::BTreeMap,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixListener,
    },
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    net::listen,
};
use tracing::{info, warn};
use vmm_core::lifecycle::{Answer, Input, Token, publisher::initial_status};
use vmm_protocol::vmm::{
    Error, ErrorKind, Event, ExitKind, Message, Response, Status, Stop, event, message::Kind, request::Op,
};

use crate::{exit_record, sandbox::Sandbox};
use connection::{Broken, Connection};
pub use outbox::Outbox;
use outbox::Outgoing;

/// Time limit for the first client's Hello. A daemon that ends between the start of a `vmm` and its
/// connection connects after its restart.
const FIRST_HELLO: Duration = Duration::from_secs(60);
/// Time that clients have to read pending data before the process ends.
const LAST_FLUSH: Duration = Duration::from_millis(250);
/// Connections at once.
const MAX_CONNECTIONS: usize = 32;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 16;

/// Descriptors that are waited for besides the connections'.
const FIXED_FDS: usize = 3;
/// The connection number of the process itself, which no client has.
const OURSELVES: u64 = u64::MAX;

/// The state of the control thread.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    wake: Arc<OwnedFd>,
    /// Readable when somebody asks the process to end.
    signals: OwnedFd,
    /// The process ends when the other end of this pipe is closed.
    lifeline: Option<OwnedFd>,
    outgoing: Receiver<Outgoing>,
    inputs: Sender<Input>,
    connections: BTreeMap<u64, Connection>,
    /// Connections accepted so far; the next one's number.
    accepted: u64,
    /// State that the driver published last.
    status: Status,
    /// By when the first client must have said Hello; `None` when one has.
    first_hello: Option<Instant>,
    /// Restrictions of this process, as features of HelloReply.
    sandbox: Vec<&'static str>,
}

/// Result of poll(2) for one connection.
struct Ready {
    connection: u64,
    flags: PollFlags,
}

impl Server {
    /// Listens on a bound socket. This process calls listen(2) itself: a client that reads the
    /// credentials of its peer (SO_PEERCRED) then gets those of the `vmm`, not of the process that
    /// bound the socket. A readable `signals` stops the run.
    pub fn new(bound: OwnedFd, signals: OwnedFd, inputs: Sender<Input>) -> io::Result<(Self, Outbox)> {
        listen(&bound, BACKLOG)?;
        let listener = UnixListener::from(bound);
        listener.set_nonblocking(true)?;
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (sender, outgoing) = channel();
        let outbox = Outbox::new(sender, Arc::clone(&wake));
        let server = Self {
            listener,
            wake,
            signals,
            lifeline: None,
            outgoing,
            inputs,
            connections: BTreeMap::new(),
            accepted: 0,
            status: initial_status(),
            first_hello: Some(Instant::now() + FIRST_HELLO),
            sandbox: Vec::new(),
        };
        Ok((server, outbox))
    }

    /// Ends the process at once, with an exit record, when the other end of this pipe is closed.
    pub fn set_lifeline(&mut self, lifeline: OwnedFd) {
        self.lifeline = Some(lifeline);
    }

    /// Sets the restrictions of this process that HelloReply reports to clients.
    pub fn set_sandbox(&mut self, sandbox: Sandbox) {
        self.sandbox = sandbox.features();
    }

    /// Serves until [`Outbox::finish`].
    pub fn run(mut self) -> io::Result<()> {
        loop {
            let ready = self.wait(self.first_hello)?;
            if self.first_hello.is_some_and(|by| Instant::now() >= by) {
                self.first_hello = None;
                self.abandon();
            }
            if self.deliver() {
                return self.last_flush();
            }
            self.accept();
            for Ready { connection, flags } in ready {
                self.serve(connection, flags);
            }
        }
    }

    /// Waits until something can be done, at most until `deadline`; gives the connections that are ready.
    fn wait(&self, deadline: Option<Instant>) -> io::Result<Vec<Ready>> {
        let timeout = deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            Timespec::try_from(left).unwrap_or_default()
        });
        let mut fds = Vec::with_capacity(FIXED_FDS + self.connections.len());
        fds.push(PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN));
        fds.push(PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN));
        fds.push(PollFd::from_borrowed_fd(self.signals.as_fd(), PollFlags::IN));
        for connection in self.connections.values() {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, !connection.closing);
            flags.set(PollFlags::OUT, connection.waiting() > 0);
            fds.push(PollFd::from_borrowed_fd(connection.as_fd(), flags));
        }
        if let Some(lifeline) = &self.lifeline {
            // Poll reports the end of the other side in any case. Bytes in the pipe are not read.
            fds.push(PollFd::from_borrowed_fd(lifeline.as_fd(), PollFlags::empty()));
        }
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if fds
            .get(2)
            .is_some_and(|signals| signals.revents().contains(PollFlags::IN))
        {
            self.stop_by_signal()?;
        }
        let last = fds.last().filter(|_| self.lifeline.is_some());
        if last.is_some_and(|lifeline| !lifeline.revents().is_empty()) {
            // Another node may run the VM next: no request of the guest is waited for.
            exit_record::end(ExitKind::LifelineClosed, "the launcher of the VM's pod has ended");
        }
        let ready = self.connections.keys().zip(fds.iter().skip(FIXED_FDS));
        Ok(ready
            .filter(|(_, fd)| !fd.revents().is_empty())
            .map(|(&connection, fd)| Ready {
                connection,
                flags: fd.revents(),
            })
            .collect())
    }

    fn stop_by_signal(&self) -> io::Result<()> {
        // One signal, as long as siginfo (signalfd(2)); which one does not matter.
        rustix::io::read(&self.signals, &mut [0; 128])?;
        info!("asked to end by a signal");
        let token = Token {
            connection: OURSELVES,
            request: 0,
        };
        let _ = self
            .inputs
            .send(Input::Request(token, Box::new(Op::Stop(Stop {}).into())));
        Ok(())
    }

    /// Passes pending output of the driver to the clients. Returns whether it ended with
    /// [`Outgoing::Finish`].
    fn deliver(&mut self) -> bool {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        while let Ok(outgoing) = self.outgoing.try_recv() {
            match outgoing {
                Outgoing::Finish => return true,
                Outgoing::Event(event) => self.broadcast(event),
                Outgoing::Reply(token, answer) => {
                    let Some(connection) = self.connections.get_mut(&token.connection) else {
                        continue;
                    };
                    connection.under_way = connection.under_way.saturating_sub(1);
                    let answer = answer.unwrap_or_else(|failure| error(failure.kind, failure.message));
                    self.respond(token, answer);
                }
            }
        }
        false
    }

    fn broadcast(&mut self, event: Event) {
        match &event.kind {
            Some(event::Kind::StateChanged(changed)) => {
                self.status = changed.status.clone().unwrap_or_default();
            }
            Some(event::Kind::GuestPanicked(_)) => self.status.panicked = true,
            Some(event::Kind::GuestReset(reset)) => self.status.guest_resets = reset.guest_resets,
            Some(event::Kind::CrashReset(reset)) => self.status.crash_resets = reset.crash_resets,
            _ => {}
        }
        let message = Message {
            kind: Some(Kind::Event(event)),
        };
        let greeted: Vec<u64> = self
            .connections
            .iter()
            .filter(|(_, connection)| connection.greeted)
            .map(|(&number, _)| number)
            .collect();
        for number in greeted {
            self.send(number, &message);
        }
    }

    fn accept(&mut self) {
        while let Ok((socket, _)) = self.listener.accept() {
            if self.connections.len() >= MAX_CONNECTIONS {
                warn!("too many connections at once: one more is refused");
                continue;
            }
            match Connection::new(socket) {
                Ok(connection) => {
                    self.connections.insert(self.accepted, connection);
                    self.accepted += 1;
                }
                Err(error) => warn!(%error, "a connection can't be served"),
            }
        }
    }

    fn serve(&mut self, number: u64, flags: PollFlags) {
        let result = self.try_serve(number, flags);
        self.settle(number, result);
    }

    fn try_serve(&mut self, number: u64, flags: PollFlags) -> Result<(), Broken> {
        let Some(connection) = self.connections.get_mut(&number) else {
            return Ok(());
        };
        if flags.contains(PollFlags::OUT) {
            connection.flush()?;
        }
        if connection.closing {
            return if connection.waiting() == 0 || !flags.contains(PollFlags::OUT) {
                Err(Broken::Closed)
            } else {
                Ok(())
            };
        }
        if flags.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            connection.read()?;
            while let Some((message, fds)) = self.next_message(number)? {
                self.take(number, message, fds);
            }
        }
        Ok(())
    }

    fn next_message(&mut self, number: u64) -> Result<Option<(Message, Vec<OwnedFd>)>, Broken> {
        match self.connections.get_mut(&number) {
            Some(connection) if !connection.closing => connection.next_message(),
            _ => Ok(None),
        }
    }

    fn respond(&mut self, token: Token, answer: Answer) {
        let response = Response {
            id: token.request,
            result: Some(answer),
        };
        self.send(
            token.connection,
            &Message {
                kind: Some(Kind::Response(response)),
            },
        );
    }

    fn send(&mut self, number: u64, message: &Message) {
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        let result = connection.send(message);
        self.settle(number, result);
    }

    /// Takes a connection away that broke, or that was to be closed and is done.
    fn settle(&mut self, number: u64, result: Result<(), Broken>) {
        let Some(connection) = self.connections.get(&number) else {
            return;
        };
        match result {
            Ok(()) if connection.closing && connection.waiting() == 0 => {}
            Ok(()) => return,
            Err(Broken::Closed) => {}
            Err(error) => warn!(%error, "a control connection is dropped"),
        }
        self.connections.remove(&number);
        if self.first_hello.is_none() && !self.connections.values().any(|connection| connection.greeted) {
            self.abandon();
        }
    }

    /// Reports to the driver that no client is left to boot a machine. Without a machine, the
    /// driver ends the process.
    fn abandon(&self) {
        let _ = self.inputs.send(Input::Abandoned);
    }

    fn last_flush(&mut self) -> io::Result<()> {
        let by = Instant::now() + LAST_FLUSH;
        loop {
            self.connections.retain(|_, connection| {
                connection.closing = true;
                connection.flush().is_ok() && connection.waiting() > 0
            });
            if self.connections.is_empty() || Instant::now() >= by {
                return Ok(());
            }
            self.wait(Some(by))?;
        }
    }
}

fn error(kind: ErrorKind, message: String) -> Answer {
    Answer::Error(Error {
        message,
        kind: kind.into(),
    })
}

#[cfg(test)]
mod tests;
