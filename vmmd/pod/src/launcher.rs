//! The launcher's loop.

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixListener,
    },
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    pipe::{PipeFlags, pipe_with},
    termios::{OptionalActions, isatty, tcgetattr, tcsetattr},
};
use vmmd_pod::{
    MAX_INPUT, MAX_PIECE,
    message::{
        DaemonMessage, Ended, Hello, Input, Output, Position, State, Stop, daemon_message, launcher_message,
    },
};
use vmmd_wire::Read;

use crate::{connection::Connection, pod::Pod, ready, say, settings::Settings, sys};

/// Pauses between attempts to connect: the first, and the longest.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Bytes that one write to standard output has. poll(2) reports a pipe as writable when it takes these without waiting
/// (PIPE_BUF, pipe(7)).
const WRITE: usize = 4096;
/// How long the reader of standard output may take for the rest after the end of the VM.
const LAST_OUTPUT: Duration = Duration::from_secs(5);
/// Messages of input that wait for vmmd.
const MAX_WAITING: usize = 4;

/// See the module.
struct Launcher {
    settings: Settings,
    pod: Pod,
    /// Read end and write end of the lifeline. The write end lives as long as the process.
    lifeline: (OwnedFd, OwnedFd),
    signals: OwnedFd,
    probes: UnixListener,
    connection: Option<Connection>,
    /// When a connection is tried again, and the pause after that attempt.
    retry: (Instant, Duration),
    /// Output for standard output.
    output: Vec<u8>,
    /// Behind the last output that was received.
    position: Option<Position>,
    /// The state that was shown last.
    state: State,
    /// When the guest's time is over, after SIGTERM.
    stop_by: Option<Instant>,
    /// Standard input has not ended.
    has_input: bool,
    /// The end of the VM, and until when the rest of its output is written.
    ended: Option<(Ended, Instant)>,
}

/// Runs until the VM has ended. The error is a fault of the pod or of this process.
pub fn run(settings: Settings) -> Result<Ended, String> {
    let failed = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
    let signals = sys::termination_signals().map_err(failed("take signals"))?;
    let pod = Pod::gather(&settings.folder)?;
    let lifeline = pipe_with(PipeFlags::CLOEXEC).map_err(|errno| failed("make a pipe")(errno.into()))?;
    let probes = ready::listen(&settings.uid).map_err(failed("listen for readiness probes"))?;
    make_terminal_raw();
    let launcher = Launcher {
        settings,
        pod,
        lifeline,
        signals,
        probes,
        connection: None,
        retry: (Instant::now(), PAUSE),
        output: Vec::new(),
        position: None,
        state: State::default(),
        stop_by: None,
        has_input: true,
        ended: None,
    };
    launcher.run().map_err(failed("wait for vmmd"))
}

/// The guest's own terminal handles control characters.
fn make_terminal_raw() {
    let input = io::stdin();
    if !isatty(&input) {
        return;
    }
    if let Ok(mut mode) = tcgetattr(&input) {
        mode.make_raw();
        // With another mode the console still works, line by line.
        let _unchanged = tcsetattr(&input, OptionalActions::Now, &mode);
    }
}

/// Events of one poll(2).
struct Events {
    signal: bool,
    probe: bool,
    connection: PollFlags,
    input: bool,
    output: bool,
}

impl Launcher {
    fn run(mut self) -> io::Result<Ended> {
        loop {
            if let Some((ended, by)) = &self.ended
                && (self.output.is_empty() || Instant::now() >= *by)
            {
                return Ok(ended.clone());
            }
            if self.connection.is_none() && self.ended.is_none() && Instant::now() >= self.retry.0 {
                self.connect();
            }
            let events = self.wait()?;
            if events.signal {
                self.on_signal();
            }
            if events.probe {
                ready::answer(&self.probes, self.state.phase == "RUNNING");
            }
            if events.input {
                self.on_input();
            }
            if events.output {
                self.write_output();
            }
            if !events.connection.is_empty() {
                self.on_connection(events.connection);
            }
        }
    }

    fn wait(&self) -> io::Result<Events> {
        let reads = self.output.len() < MAX_PIECE;
        let types = self.has_input
            && self
                .connection
                .as_ref()
                .is_some_and(|connection| connection.waiting() < MAX_WAITING);
        let (input, output) = (io::stdin(), io::stdout());
        let mut fds = vec![
            PollFd::new(&self.signals, PollFlags::IN),
            PollFd::new(&self.probes, PollFlags::IN),
        ];
        let mut add = |fd| {
            fds.push(fd);
            fds.len() - 1
        };
        let connection = self.connection.as_ref().map(|connection| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, reads);
            flags.set(PollFlags::OUT, connection.has_more());
            add(PollFd::from_borrowed_fd(connection.as_fd(), flags))
        });
        let input = types.then(|| add(PollFd::new(&input, PollFlags::IN)));
        let output = (!self.output.is_empty()).then(|| add(PollFd::new(&output, PollFlags::OUT)));
        let until = match (&self.ended, &self.connection) {
            (Some((_, by)), _) => Some(*by),
            (None, None) => Some(self.retry.0),
            (None, Some(_)) => None,
        };
        let timeout = until.map(|until| {
            // Rounded up: poll must not return before the time has come.
            let left = until.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            Timespec::try_from(left).unwrap_or_default()
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let found = |index: usize| fds.get(index).map_or(PollFlags::empty(), PollFd::revents);
        let is_ready = |index: Option<usize>| index.is_some_and(|index| !found(index).is_empty());
        Ok(Events {
            signal: is_ready(Some(0)),
            probe: is_ready(Some(1)),
            connection: connection.map_or(PollFlags::empty(), found),
            input: is_ready(input),
            output: is_ready(output),
        })
    }

    fn connect(&mut self) {
        let hello = Hello {
            name: self.settings.name.clone(),
            namespace: self.settings.namespace.clone(),
            uid: self.settings.uid.clone(),
            vm: self.settings.vm.clone(),
            run: self.settings.run,
            resolver: Some(self.pod.resolver.clone()),
            volumes: self.pod.volumes(),
            position: self.position,
        };
        let pause = self.retry.1;
        self.retry = (Instant::now() + pause, (pause * 2).min(LONGEST_PAUSE));
        match Connection::open(&self.settings.socket, hello) {
            Ok(connection) => {
                self.connection = Some(connection);
                self.send_stop();
            }
            Err(error) if pause == LONGEST_PAUSE => {
                self.show(State {
                    reason: "Connecting".to_owned(),
                    message: format!("connect to {}: {error}", self.settings.socket.display()),
                    ..State::default()
                });
            }
            Err(_) => {}
        }
    }

    fn on_connection(&mut self, flags: PollFlags) {
        if let Err(error) = self.serve(flags) {
            if self.ended.is_none() {
                say(&format!(
                    "the connection to vmmd is lost ({error}): connecting again"
                ));
            }
            self.connection = None;
        }
    }

    fn serve(&mut self, flags: PollFlags) -> Result<(), vmmd_wire::Error> {
        let Some(connection) = &mut self.connection else {
            return Ok(());
        };
        if flags.contains(PollFlags::OUT) {
            let fds = self.pod.descriptors(self.lifeline.0.as_fd());
            connection.flush(&self.pod.files, &fds)?;
        }
        if !flags.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            return Ok(());
        }
        let read = connection.read()?;
        while let Some(message) = self
            .connection
            .as_mut()
            .map(Connection::next_message)
            .transpose()?
            .flatten()
        {
            self.retry.1 = PAUSE;
            self.take(message);
        }
        match read {
            Read::Data => Ok(()),
            Read::Closed => Err(vmmd_wire::Error::Io(io::ErrorKind::UnexpectedEof.into())),
        }
    }

    fn take(&mut self, message: DaemonMessage) {
        match message.kind {
            Some(daemon_message::Kind::State(state)) => self.show(state),
            Some(daemon_message::Kind::Output(Output { bytes, position })) => {
                self.output.extend_from_slice(&bytes);
                self.position = position.or(self.position);
            }
            Some(daemon_message::Kind::Ended(ended)) => {
                self.ended = Some((ended, Instant::now() + LAST_OUTPUT));
            }
            None => {}
        }
    }

    /// Shows a state that has changed.
    fn show(&mut self, state: State) {
        if self.state == state {
            return;
        }
        let State {
            phase,
            reason,
            message,
        } = &state;
        let words = [phase, reason, message]
            .into_iter()
            .filter(|word| !word.is_empty());
        say(&words.cloned().collect::<Vec<_>>().join(": "));
        self.state = state;
    }

    fn on_signal(&mut self) {
        // Which signal it was does not matter.
        let mut info = [0; size_of::<libc::signalfd_siginfo>()];
        while rustix::io::read(&self.signals, &mut info).is_ok() {}
        if self.stop_by.is_none() {
            self.stop_by = Some(Instant::now() + self.settings.grace);
            self.send_stop();
        }
    }

    /// Asks vmmd to stop the VM, after SIGTERM.
    fn send_stop(&mut self) {
        if let (Some(by), Some(connection)) = (self.stop_by, &mut self.connection) {
            let grace = by.saturating_duration_since(Instant::now()).as_millis();
            let grace_ms = u64::try_from(grace).unwrap_or(u64::MAX);
            connection.send(launcher_message::Kind::Stop(Stop { grace_ms }));
        }
    }

    fn on_input(&mut self) {
        let mut bytes = vec![0; MAX_INPUT];
        match rustix::io::read(io::stdin(), &mut bytes) {
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Ok(0) | Err(_) => self.has_input = false,
            Ok(count) => {
                bytes.truncate(count);
                if let Some(connection) = &mut self.connection {
                    connection.send(launcher_message::Kind::Input(Input { bytes }));
                }
            }
        }
    }

    fn write_output(&mut self) {
        let piece = self.output.get(..WRITE).unwrap_or(&self.output);
        match rustix::io::write(io::stdout(), piece) {
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Ok(count) => drop(self.output.drain(..count)),
            // The reader is gone for good.
            Err(_) => self.output.clear(),
        }
    }
}
