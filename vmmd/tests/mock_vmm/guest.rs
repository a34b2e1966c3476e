//! The guest and its machine.

use std::{
    fs::File,
    io::Write,
    net::Shutdown,
    os::{
        fd::OwnedFd,
        linux::net::SocketAddrExt,
        unix::{
            fs::FileExt,
            net::{SocketAddr, UnixListener, UnixStream},
        },
    },
    process,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak, mpsc::SyncSender},
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use prost::Message;
use rustix::fs::{FlockOperation, flock};
use vmm_protocol::{
    machine::AGENT_CHANNEL,
    vmm::{
        ChannelsChanged, CrashReset, DeviceError, Ended, Event, ExitKind, ExitRecord, GuestPanicked,
        GuestReset, MachineSpec, OnCrash, PauseReason, State, StateChanged, Status, event::Kind,
    },
};

use crate::{
    balloon,
    disks::{self, Plugged},
    lies, nics, shares,
};

/// From the end of its connections to the end of the process.
const FADING: Duration = Duration::from_millis(50);

pub struct Guest {
    inner: Mutex<Inner>,
    disks: Mutex<Vec<Plugged>>,
    nics: Mutex<Vec<nics::Plugged>>,
    shares: Mutex<Vec<shares::Plugged>>,
    /// `None` after it has given up its control connections.
    controls: Mutex<Option<Vec<Weak<UnixStream>>>>,
    exit: File,
    /// Held as long as the process lives.
    name: OnceLock<UnixListener>,
    /// Locked while the guest runs.
    exclusive: Mutex<Option<File>>,
    /// Whether a console that has typed `deaf` is read again.
    hears: Mutex<bool>,
    heard: Condvar,
}

#[derive(Default)]
struct Inner {
    state: State,
    name: String,
    cmdline: String,
    resets: u64,
    crash_resets: u64,
    panicked: bool,
    open_channels: Vec<String>,
    on_crash: OnCrash,
    history: Vec<u8>,
    serial_log: Option<File>,
    /// Why it is paused, if by a disk.
    pause_message: String,
    /// Reason for a pause that neither a request nor a disk caused.
    stands_for: PauseReason,
    /// Taps and so on: held as the real one does.
    devices: Vec<OwnedFd>,
    consoles: Vec<SyncSender<Arc<[u8]>>>,
    listeners: Vec<SyncSender<Event>>,
    line: Vec<u8>,
    has_vsock: bool,
    /// Clients that wait for a notification of the guest.
    notified: Vec<UnixStream>,
    /// Notifications without such a client.
    notices: Vec<String>,
    /// "vcpus=2 memory=134217728 nics=eth0@2": configuration of the machine.
    machine: String,
}

impl Guest {
    pub fn new(exit: File) -> Self {
        let inner = Inner {
            state: State::Empty,
            ..Inner::default()
        };
        Self {
            inner: Mutex::new(inner),
            disks: Mutex::default(),
            nics: Mutex::default(),
            shares: Mutex::default(),
            controls: Mutex::new(Some(Vec::new())),
            exit,
            name: OnceLock::new(),
            exclusive: Mutex::default(),
            hears: Mutex::new(true),
            heard: Condvar::new(),
        }
    }

    /// Notes a control connection; false when there are to be none any more.
    pub fn is_controlled_by(&self, stream: &Arc<UnixStream>) -> bool {
        let mut controls = self.controls.lock().unwrap();
        let Some(controls) = controls.as_mut() else {
            return false;
        };
        controls.push(Arc::downgrade(stream));
        true
    }

    /// Whether no other process has this name; it is this one's from now on.
    pub fn take_name(&self, name: &str) -> bool {
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let listener = UnixListener::bind_addr(&address);
        listener.is_ok_and(|listener| self.name.set(listener).is_ok())
    }

    pub fn boot(&self, machine: &MachineSpec, serial_log: Option<File>, fds: Vec<OwnedFd>) -> Status {
        let mut inner = self.lock();
        inner.name.clone_from(&machine.name);
        inner.on_crash = machine.on_crash();
        inner.has_vsock = machine.vsock.is_some();
        inner.cmdline = machine.kernel.clone().unwrap_or_default().cmdline;
        inner.serial_log = serial_log;
        inner.devices = fds;
        let nics = machine.nics.iter();
        let nics: Vec<_> = nics.map(|nic| format!("{}@{}", nic.name, nic.pci_slot)).collect();
        let (vcpus, memory) = (machine.vcpus, machine.memory_bytes);
        inner.machine = format!("vcpus={vcpus} memory={memory} nics={}", nics.join(","));
        inner.state = State::Running;
        let text = format!("booted {}\r\n", machine.name);
        inner.print(text.as_bytes());
        if let Some(text) = balloon::boot(machine) {
            inner.print(text.as_bytes());
        }
        inner.status()
    }

    pub fn has_vsock(&self) -> bool {
        self.lock().has_vsock
    }

    /// Onto the console.
    pub fn print(&self, text: &str) {
        self.lock().print(text.as_bytes());
    }

    /// Into the serial log alone, however long that becomes.
    pub fn print_to_log(&self, bytes: &[u8]) {
        if let Some(log) = &mut self.lock().serial_log {
            log.write_all(bytes).unwrap();
        }
    }

    pub fn status(&self) -> Status {
        self.lock().status()
    }

    /// The value of a word of the command line.
    pub fn option(&self, key: &str) -> Option<String> {
        let inner = self.lock();
        let words = inner.cmdline.split(' ');
        words
            .filter_map(|word| word.split_once('='))
            .find(|(name, _)| *name == key)
            .map(|(_, value)| value.into())
    }

    /// Records whether the guest runs. Only one guest at a time may run with the same
    /// world-writable file `mock.exclusive=PATH`. A second guest writes `twice` into the file.
    pub fn runs(&self, runs: bool) {
        let Some(path) = self.option("mock.exclusive") else {
            return;
        };
        let mut exclusive = self.exclusive.lock().unwrap();
        if !runs {
            *exclusive = None;
        } else if exclusive.is_none() {
            let mut file = File::options().append(true).open(path).unwrap();
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                file.write_all(b"twice").unwrap();
            }
            *exclusive = Some(file);
        }
    }

    pub fn set_state(&self, state: State) -> Status {
        self.runs(state == State::Running);
        let mut inner = self.lock();
        inner.state = state;
        inner.pause_message.clear();
        inner.stands_for = PauseReason::Unspecified;
        let status = inner.status();
        inner.tell(Kind::StateChanged(StateChanged {
            status: Some(status.clone()),
        }));
        status
    }

    /// Stands still, as when all of it was sent.
    pub fn stands_for(&self, reason: PauseReason) {
        self.runs(false);
        let mut inner = self.lock();
        (inner.state, inner.stands_for) = (State::Paused, reason);
        let status = inner.status();
        inner.tell(Kind::StateChanged(StateChanged { status: Some(status) }));
    }

    pub fn nics(&self) -> MutexGuard<'_, Vec<nics::Plugged>> {
        self.nics.lock().unwrap()
    }

    pub fn shares(&self) -> MutexGuard<'_, Vec<shares::Plugged>> {
        self.shares.lock().unwrap()
    }

    pub fn disks(&self) -> MutexGuard<'_, Vec<Plugged>> {
        self.disks.lock().unwrap()
    }

    pub fn tell(&self, kind: Kind) {
        self.lock().tell(kind);
    }

    /// Pauses because of a disk.
    pub fn stall(&self, name: &str) {
        let mut inner = self.lock();
        inner.state = State::Paused;
        inner.pause_message = format!("disk {name}: write to the image: No space left on device");
        let status = inner.status();
        inner.tell(Kind::StateChanged(StateChanged { status: Some(status) }));
    }

    pub fn listen(&self, listener: SyncSender<Event>) {
        self.lock().listeners.push(listener);
    }

    /// Adds a console; returns the earlier output.
    pub fn open_console(&self, console: SyncSender<Arc<[u8]>>) -> Vec<u8> {
        let mut inner = self.lock();
        inner.consoles.push(console);
        inner.history.clone()
    }

    /// Waits until a console has typed `hear`.
    pub fn wait_until_it_hears(&self) {
        let hears = self.hears.lock().unwrap();
        drop(self.heard.wait_while(hears, |hears| !*hears).unwrap());
    }

    pub fn type_in(&self, bytes: &[u8]) {
        for byte in bytes {
            let mut inner = self.lock();
            if *byte != b'\n' {
                inner.line.push(*byte);
                continue;
            }
            let line = String::from_utf8_lossy(&std::mem::take(&mut inner.line)).into_owned();
            drop(inner);
            self.command(&line);
        }
    }

    fn command(&self, line: &str) {
        let words: Vec<_> = line.split(' ').collect();
        match words.as_slice() {
            ["poweroff"] => self.end(ExitKind::PowerOff, ""),
            ["panic"] => {
                self.lock().tell(Kind::GuestPanicked(GuestPanicked::default()));
                self.end(ExitKind::GuestPanic, "the guest's kernel panicked");
            }
            ["halt"] => {
                let mut inner = self.lock();
                inner.panicked = true;
                inner.tell(Kind::GuestPanicked(GuestPanicked::default()));
            }
            ["triple"] => self.triple_fault(),
            ["crash"] => self.end(ExitKind::GuestCrash, "triple fault"),
            ["error"] => self.end(ExitKind::VmmError, "out of luck"),
            ["abort"] => process::abort(),
            ["fade"] => self.fade(),
            ["fork"] => lies::fork(self),
            ["stick", path] => {
                lies::stick(path);
                self.print("stuck\r\n");
            }
            ["lie", word] => {
                let controls = self.controls.lock().unwrap().clone().unwrap_or_default();
                lies::tell(self, word, &controls);
            }
            ["open"] => self.set_channels(&[AGENT_CHANNEL]),
            ["open", names @ ..] => self.set_channels(names),
            ["close"] => self.set_channels(&[]),
            ["notify", lines @ ..] => self.lock().notify(lines.join("\n")),
            ["machine"] => {
                let mut inner = self.lock();
                let text = format!("{}\r\n", inner.machine);
                inner.print(text.as_bytes());
            }
            ["eject", name] => {
                disks::eject(self, name, false);
                nics::eject(self, name, false);
                shares::eject(self, name, false);
            }
            ["fail", name] => {
                let device = format!("disk {name}");
                let message = "read from the image: Input/output error".into();
                self.tell(Kind::DeviceError(DeviceError { device, message }));
            }
            ["stall", name] => self.stall(name),
            ["pause"] => drop(self.set_state(State::Paused)),
            ["deaf"] => {
                *self.hears.lock().unwrap() = false;
                self.print("deaf\r\n");
            }
            ["hear"] => {
                *self.hears.lock().unwrap() = true;
                self.heard.notify_all();
            }
            ["reset"] => {
                let mut inner = self.lock();
                inner.resets += 1;
                inner.panicked = false;
                let guest_resets = inner.resets;
                inner.tell(Kind::GuestReset(GuestReset { guest_resets }));
            }
            ["print", count] => {
                let count = count.parse().unwrap_or(0);
                let mut inner = self.lock();
                for start in (0..count).step_by(4096) {
                    inner.print(&vec![b'.'; (count - start).min(4096)]);
                }
                inner.print(b"printed\r\n");
            }
            _ => self.lock().print(format!("{line}\r\n").as_bytes()),
        }
    }

    /// Programs of the guest have these channels open.
    fn set_channels(&self, names: &[&str]) {
        let mut inner = self.lock();
        inner.open_channels = names.iter().map(ToString::to_string).collect();
        let open = inner.open_channels.clone();
        inner.tell(Kind::ChannelsChanged(ChannelsChanged { open }));
    }

    /// A client waits for a notification of the guest.
    pub fn wait_for_notice(&self, client: UnixStream) {
        let mut inner = self.lock();
        inner.notified.push(client);
        let notices = std::mem::take(&mut inner.notices);
        notices.into_iter().for_each(|notice| inner.notify(notice));
    }

    /// Handles the shutdown of a vCPU by the spec.
    fn triple_fault(&self) {
        let message = "vCPU 0: triple fault";
        let mut inner = self.lock();
        if inner.on_crash == OnCrash::Stop {
            drop(inner);
            self.end(ExitKind::GuestCrash, message);
        }
        inner.crash_resets += 1;
        let crash_resets = inner.crash_resets;
        inner.tell(Kind::CrashReset(CrashReset {
            crash_resets,
            message: message.into(),
        }));
    }

    /// Ends like a killed process, but slower: first its control connections, then the process.
    pub fn fade(&self) -> ! {
        let controls = self.controls.lock().unwrap().take().unwrap_or_default();
        for stream in controls.iter().filter_map(Weak::upgrade) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.print("fading\r\n");
        thread::sleep(FADING);
        process::abort();
    }

    /// Where the exit record goes.
    pub fn exit_file(&self) -> &File {
        &self.exit
    }

    /// Ends the process with a record.
    pub fn end(&self, kind: ExitKind, message: &str) -> ! {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let time_unix_ms = u64::try_from(since.as_millis()).unwrap();
        let record = ExitRecord {
            kind: kind.into(),
            message: message.into(),
            time_unix_ms,
        };
        self.exit.write_all_at(&record.encode_to_vec(), 0).unwrap();
        self.lock().tell(Kind::Ended(Ended { exit: Some(record) }));
        process::exit(0);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap()
    }
}

impl Inner {
    /// systemd of the guest notifies. Clients of an earlier daemon do not wait any more.
    fn notify(&mut self, notice: String) {
        let message = [&[0], notice.as_bytes()].concat();
        while let Some(mut client) = self.notified.pop() {
            if client.write_all(&message).is_ok() {
                return;
            }
        }
        self.notices.push(notice);
    }

    fn status(&self) -> Status {
        Status {
            state: self.state.into(),
            guest_resets: self.resets,
            crash_resets: self.crash_resets,
            panicked: self.panicked,
            name: self.name.clone(),
            exit: None,
            pause_reason: match (self.state, self.pause_message.is_empty()) {
                (State::Paused, _) if self.stands_for != PauseReason::Unspecified => self.stands_for,
                (State::Paused, false) => PauseReason::DiskError,
                (State::Paused, true) => PauseReason::Requested,
                _ => PauseReason::Unspecified,
            }
            .into(),
            pause_message: self.pause_message.clone(),
            open_channels: self.open_channels.clone(),
        }
    }

    /// A console or listener that is full loses it; one that is gone is forgotten.
    fn print(&mut self, bytes: &[u8]) {
        use std::sync::mpsc::TrySendError::Disconnected;
        self.history.extend_from_slice(bytes);
        if let Some(log) = &mut self.serial_log {
            log.write_all(bytes).unwrap();
        }
        let bytes: Arc<[u8]> = bytes.into();
        self.consoles
            .retain(|console| !matches!(console.try_send(bytes.clone()), Err(Disconnected(_))));
    }

    fn tell(&mut self, kind: Kind) {
        let event = Event { kind: Some(kind) };
        self.listeners
            .retain(|listener| listener.try_send(event.clone()).is_ok());
    }
}
