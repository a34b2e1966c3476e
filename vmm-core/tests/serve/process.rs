//! A `vmm serve` started as the daemon starts it, and its sockets' other ends.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{PipeWriter, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::{fs::FileExt, net::UnixStream, process::CommandExt},
    },
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use prost::Message as _;
use rustix::{
    fs::{FlockOperation, flock},
    net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket},
};
use tempfile::TempDir;
use vmm_protocol::{
    vmm::{
        AttachDisk, Boot, Disk, Event, ExitRecord, Firmware, Hello, Kernel, MachineSpec, Message, Request,
        Restore, Save, Send, Tpm, event, message::Kind, request::Op, response::Result as Answer,
    },
    wire,
};

/// The user that the processes run as.
pub const UID: u32 = 54321;

/// Longer than any step here; a test fails after this time instead of hanging.
const PATIENCE: Duration = Duration::from_secs(60);

/// The descriptors' numbers in the process.
const FDS: [&str; 5] = ["10", "11", "12", "13", "14"];

/// A running process.
pub struct Vmm {
    dir: TempDir,
    child: Child,
    exit: File,
    serial: File,
}

impl Vmm {
    pub fn start() -> Self {
        Self::with_options(
            &[&format!("--reuid={UID}"), "--bounding-set=-all"],
            Stdio::inherit(),
        )
    }

    /// One that ends when the returned end of its lifeline is closed.
    pub fn with_lifeline() -> (Self, PipeWriter) {
        let (lifeline, end) = std::io::pipe().unwrap();
        let user = [&format!("--reuid={UID}"), "--bounding-set=-all"];
        let vmm = Self::spawn_with(&user, &[], &[], Stdio::inherit(), Some(lifeline.as_fd()));
        (vmm, end)
    }

    /// Starts a process that does a forbidden operation, "KIND:DEED", with these options of
    /// `vmm serve`; its standard error is captured.
    pub fn attempting(deed: &str, more: &[&str]) -> Self {
        let user = [&format!("--reuid={UID}"), "--bounding-set=-all"];
        Self::spawn(&user, more, &[("VMM_ATTEMPT", deed)], Stdio::piped())
    }

    fn with_options(options: &[&str], stderr: Stdio) -> Self {
        Self::spawn(options, &[], &[], stderr)
    }

    fn spawn(options: &[&str], more: &[&str], environment: &[(&str, &str)], stderr: Stdio) -> Self {
        Self::spawn_with(options, more, environment, stderr, None)
    }

    fn spawn_with(
        options: &[&str],
        more: &[&str],
        environment: &[(&str, &str)],
        stderr: Stdio,
        lifeline: Option<BorrowedFd<'_>>,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let open = |name: &str| {
            let mut options = OpenOptions::new();
            options.create(true).truncate(false).read(true).write(true);
            options.open(dir.path().join(name)).unwrap()
        };
        let (exit, lock, serial) = (open("exit"), open("lock"), open("serial"));
        flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
        let sockets = ["control", "console"].map(|name| bound(&dir.path().join(name)));
        let mut inherited = vec![sockets[0].as_fd(), sockets[1].as_fd(), exit.as_fd(), lock.as_fd()];
        inherited.extend(lifeline);
        let mut command = setpriv(options);
        let names = [
            "--control-fd",
            "--console-fd",
            "--exit-fd",
            "--lock-fd",
            "--lifeline-fd",
        ];
        for (option, number) in names.iter().zip(FDS).take(inherited.len()) {
            command.args([option, number]);
        }
        inherit(&mut command, &inherited);
        let more = if more.is_empty() { &["--seccomp=on"] } else { more };
        command.args(more).envs(environment.iter().copied());
        let child = command
            .stdin(Stdio::null())
            .stderr(stderr)
            .spawn()
            .expect("setpriv of util-linux");
        Self {
            dir,
            child,
            exit,
            serial,
        }
    }

    /// A client that has not said Hello.
    pub fn connect(&self) -> Client {
        Client {
            socket: UnixStream::connect(self.dir.path().join("control")).unwrap(),
            receiver: wire::Receiver::new(),
            asked: 0,
            events: Vec::new(),
            serial: self.serial.try_clone().unwrap(),
        }
    }

    /// A client that has said Hello.
    pub fn client(&self) -> Client {
        let mut client = self.connect();
        let hello = Op::Hello(Hello {
            major: wire::MAJOR,
            minor: wire::MINOR,
        });
        assert!(matches!(client.ask(hello), Answer::Hello(_)));
        client
    }

    pub fn console(&self) -> Console {
        let socket = UnixStream::connect(self.dir.path().join("console")).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Console(socket)
    }

    /// Until the process has ended.
    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    pub fn exit_record(&self) -> ExitRecord {
        ExitRecord::decode(read_all(&self.exit).as_slice()).unwrap()
    }

    pub fn serial_log(&self) -> String {
        String::from_utf8(read_all(&self.serial)).unwrap()
    }

    /// Has the serial log begin with this many bytes from an earlier run. To be called before the boot.
    pub fn fill_serial_log(&self, length: u64) {
        self.serial.set_len(length).unwrap();
    }

    /// Waits until the guest has printed this.
    pub fn wait_for_serial(&self, text: &str) {
        let mut console = self.console();
        let mut seen = Vec::new();
        // The replay's length comes first.
        let replay = u64::from_le_bytes(console.read(8).try_into().unwrap());
        seen.extend(console.read(usize::try_from(replay).unwrap()));
        while !String::from_utf8_lossy(&seen).contains(text) {
            seen.extend(console.read(1));
        }
    }

    /// The id of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether the lock that the process inherited is free.
    pub fn lock_is_free(&self) -> bool {
        let lock = File::open(self.dir.path().join("lock")).unwrap();
        flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok()
    }

    pub fn terminate(&self) {
        let pid = i32::try_from(self.child.id()).unwrap();
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(pid).unwrap(),
            rustix::process::Signal::TERM,
        )
        .unwrap();
    }

    /// /proc/PID/status, by field.
    pub fn proc_status(&self) -> BTreeMap<String, String> {
        fields(&fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap())
    }

    /// /proc/PID/task/TID/status of each thread, by field.
    pub fn thread_statuses(&self) -> Vec<BTreeMap<String, String>> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        // One may end meanwhile.
        tasks
            .filter_map(|task| {
                Some(fields(
                    &fs::read_to_string(task.ok()?.path().join("status")).ok()?,
                ))
            })
            .collect()
    }

    /// The same, when they are as `settled` wants them.
    pub fn thread_statuses_when(
        &self,
        settled: impl Fn(&[BTreeMap<String, String>]) -> bool,
    ) -> Vec<BTreeMap<String, String>> {
        let begun = std::time::Instant::now();
        loop {
            let threads = self.thread_statuses();
            if settled(&threads) {
                return threads;
            }
            assert!(begun.elapsed() < PATIENCE, "{threads:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// All that it printed until it ended.
    pub fn standard_error(&mut self) -> String {
        let mut said = String::new();
        let mut stderr = self.child.stderr.take().expect("it was started with a pipe");
        stderr.read_to_string(&mut said).unwrap();
        said
    }

    pub fn thread_names(&self) -> Vec<String> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        // One may end meanwhile.
        tasks
            .filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok())
            .map(|name| name.trim().to_owned())
            .collect()
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Error message of `vmm serve` when it starts with these rights.
pub fn refused(options: &[&str]) -> String {
    let mut vmm = Vmm::with_options(options, Stdio::piped());
    assert_eq!(vmm.wait().code(), Some(1));
    let mut message = String::new();
    vmm.child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut message)
        .unwrap();
    message
}

fn fields(status: &str) -> BTreeMap<String, String> {
    let fields = status.lines().filter_map(|line| line.split_once(':'));
    fields
        .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
        .collect()
}

fn setpriv(options: &[&str]) -> Command {
    let mut command = Command::new("setpriv");
    command.args([
        "--regid=54321",
        "--clear-groups",
        "--inh-caps=-all",
        "--ambient-caps=-all",
        "--no-new-privs",
    ]);
    command
        .args(options)
        .args(["--", env!("CARGO_BIN_EXE_vmm"), "serve"]);
    command
}

/// Gives the descriptors to the child under the numbers of [`FDS`].
#[allow(unsafe_code)]
fn inherit(command: &mut Command, fds: &[BorrowedFd<'_>]) {
    let fds: Vec<i32> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    // SAFETY: dup2 is async-signal-safe, and nothing else is called between fork and exec.
    unsafe {
        command.pre_exec(move || {
            // First out of the way of the numbers that are wanted.
            let mut high = [0; FDS.len()];
            for (high, fd) in high.iter_mut().zip(&fds) {
                *high = duplicate(*fd, 100)?;
            }
            for (number, fd) in (10..).zip(high) {
                replace(fd, number)?;
            }
            Ok(())
        });
    }
}

#[allow(unsafe_code)]
fn duplicate(fd: i32, lowest: i32) -> std::io::Result<i32> {
    // SAFETY: takes numbers only.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, lowest) };
    if copy < 0 {
        Err(std::io::Error::last_os_error())
    } else {
        Ok(copy)
    }
}

#[allow(unsafe_code)]
fn replace(fd: i32, number: i32) -> std::io::Result<()> {
    // SAFETY: takes numbers only; in the child, no object owns the old descriptor `number`.
    if unsafe { libc::dup2(fd, number) } < 0 {
        Err(std::io::Error::last_os_error())
    } else {
        Ok(())
    }
}

fn bound(path: &Path) -> OwnedFd {
    let socket = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    // As the daemon does, so that it can connect before the process has called listen itself.
    listen(&socket, 16).unwrap();
    socket
}

fn read_all(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// A connection to the control socket.
pub struct Client {
    socket: UnixStream,
    receiver: wire::Receiver,
    asked: u64,
    /// Events that arrived during a wait for an answer.
    events: Vec<event::Kind>,
    serial: File,
}

impl Client {
    /// Sends a request and waits for its answer.
    pub fn ask(&mut self, op: Op) -> Answer {
        self.send(op, &[]);
        self.answer()
    }

    /// Boots a machine with 128 MiB and this kernel.
    pub fn boot(&mut self, kernel: &[u8], boot: &Boot) -> Answer {
        self.send_boot(kernel, boot);
        self.answer()
    }

    /// Attaches a raw image as `name` in a slot.
    pub fn attach(&mut self, image: &File, name: &str, pci_slot: u32) -> Answer {
        let disk = Disk {
            name: name.into(),
            pci_slot,
            ..Disk::default()
        };
        self.send(Op::AttachDisk(AttachDisk { disk: Some(disk) }), &[image.as_fd()]);
        self.answer()
    }

    /// Boots a machine like that of [`boot`](Self::boot), which continues from a snapshot.
    pub fn restore(&mut self, kernel: &[u8], snapshot: &File, on_demand: bool) -> Answer {
        let restore = Restore {
            snapshot_fd: 5,
            on_demand,
            ..Restore::default()
        };
        let boot = Boot {
            restore: Some(restore),
            ..Boot::default()
        };
        self.send_boot_with(kernel, &boot, Some(snapshot.as_fd()), None);
        self.answer()
    }

    /// Begins to boot a machine like that of [`boot`](Self::boot), which is received from `socket` and stays paused.
    pub fn begin_receive(&mut self, kernel: &[u8], socket: &UnixStream) {
        self.begin_receive_with(kernel, socket, None);
    }

    /// The same with a disk "root" that the guest can write to.
    pub fn begin_receive_with(&mut self, kernel: &[u8], socket: &UnixStream, disk: Option<&File>) {
        self.begin_receive_copy(kernel, socket, disk, &[]);
    }

    /// The same; what these disks hold comes too.
    pub fn begin_receive_copy(
        &mut self,
        kernel: &[u8],
        socket: &UnixStream,
        disk: Option<&File>,
        copied: &[&str],
    ) {
        let boot = Boot {
            paused: true,
            restore: Some(Restore {
                snapshot_fd: 5,
                stream: true,
                disks: copied.iter().map(ToString::to_string).collect(),
                ..Restore::default()
            }),
            ..Boot::default()
        };
        self.send_boot_with(kernel, &boot, Some(socket.as_fd()), disk);
    }

    /// The same without a disk and a kernel: what the guest boots comes too.
    pub fn begin_receive_boot(&mut self, socket: &UnixStream) {
        let restore = Restore {
            snapshot_fd: 5,
            stream: true,
            boot_files: true,
            ..Restore::default()
        };
        let boot = Boot {
            paused: true,
            restore: Some(restore),
            ..Boot::default()
        };
        self.send_boot_with(&[], &boot, Some(socket.as_fd()), None);
    }

    /// Boots a machine with a disk "root" that the guest can write to.
    pub fn boot_with_disk(&mut self, kernel: &[u8], disk: &File) -> Answer {
        self.send_boot_with(kernel, &Boot::default(), None, Some(disk));
        self.answer()
    }

    /// Begins to send the machine over `socket`.
    pub fn begin_send(&mut self, socket: &UnixStream, downtime_ms: u64) {
        self.begin_send_with(socket, downtime_ms, &[]);
    }

    /// The same, with what these disks hold.
    pub fn begin_send_with(&mut self, socket: &UnixStream, downtime_ms: u64, disks: &[&str]) {
        socket
            .set_write_timeout(Some(Duration::from_millis(100)))
            .unwrap();
        let send = Send {
            downtime_ms,
            disks: disks.iter().map(ToString::to_string).collect(),
            ..Send::default()
        };
        self.send(Op::Send(send), &[socket.as_fd()]);
    }

    /// Has a snapshot written into `file`.
    pub fn save(&mut self, file: &File, paused: bool) -> Answer {
        let save = Save {
            file_fd: 0,
            paused,
            description: b"web".to_vec(),
            ..Save::default()
        };
        self.send(Op::Save(save), &[file.as_fd()]);
        self.answer()
    }

    pub fn send_boot(&mut self, kernel: &[u8], boot: &Boot) {
        self.send_boot_with(kernel, boot, None, None);
    }

    /// Boots through firmware, or restores a machine with it.
    pub fn send_firmware(
        &mut self,
        code: &[u8],
        variables: &File,
        cdrom: Option<&File>,
        snapshot: Option<&File>,
    ) {
        self.send_firmware_with(code, variables, cdrom, snapshot, None);
    }

    /// The same with a TPM that has these sockets of swtpm.
    pub fn send_firmware_with(
        &mut self,
        code: &[u8],
        variables: &File,
        cdrom: Option<&File>,
        snapshot: Option<&File>,
        tpm: Option<&[UnixStream; 2]>,
    ) {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(code).unwrap();
        let kvm = File::options().read(true).write(true).open("/dev/kvm");
        let kvm = kvm.expect("these tests need KVM");
        let random = File::open("/dev/urandom").unwrap();
        let (serial, older) = (self.serial.try_clone().unwrap(), tempfile::tempfile().unwrap());
        let machine = MachineSpec {
            name: "web".into(),
            uuid: vec![7; 16],
            vcpus: 1,
            memory_bytes: 128 << 20,
            kvm_fd: 0,
            firmware: Some(Firmware {
                menu_seconds: 0,
                code_fd: 1,
                variables_fd: Some(5),
            }),
            rng_pci_slot: 1,
            rng_fd: 2,
            serial_log_fd: Some(3),
            serial_log_old_fd: Some(4),
            disks: cdrom.map(|_| cdrom_at_port_0(6)).into_iter().collect(),
            ..MachineSpec::default()
        };
        let files = [&kvm, &file, &random, &serial, &older, variables];
        let more = cdrom.into_iter().chain(snapshot);
        let mut fds: Vec<_> = files.into_iter().chain(more).map(File::as_fd).collect();
        let next = u32::try_from(fds.len()).unwrap();
        fds.extend(tpm.into_iter().flatten().map(AsFd::as_fd));
        let boot = Boot {
            machine: Some(MachineSpec {
                tpm: tpm.map(|_| Tpm {
                    data_fd: next,
                    control_fd: next + 1,
                }),
                ..machine
            }),
            restore: snapshot.map(|_| Restore {
                snapshot_fd: 6 + u32::from(cdrom.is_some()),
                ..Restore::default()
            }),
            ..Boot::default()
        };
        self.send(Op::Boot(boot), &fds);
    }

    fn send_boot_with(
        &mut self,
        kernel: &[u8],
        boot: &Boot,
        more: Option<BorrowedFd<'_>>,
        disk: Option<&File>,
    ) {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(kernel).unwrap();
        let kvm = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .expect("these tests need KVM");
        let random = File::open("/dev/urandom").unwrap();
        let initrd = tempfile::tempfile().unwrap();
        let receives_boot = boot.restore.as_ref().is_some_and(|restore| restore.boot_files);
        let older = tempfile::tempfile().unwrap();
        let disks = disk.map(|_| Disk {
            name: "root".into(),
            fd: if more.is_some() { 6 } else { 5 },
            pci_slot: 10,
            ..Disk::default()
        });
        let machine = MachineSpec {
            disks: disks.into_iter().collect(),
            name: "web".into(),
            uuid: vec![7; 16],
            vcpus: 1,
            memory_bytes: 128 << 20,
            kvm_fd: 0,
            kernel: Some(Kernel {
                kernel_fd: 1,
                initrd_fd: receives_boot.then_some(6),
                ..Kernel::default()
            }),
            rng_pci_slot: 1,
            rng_fd: 2,
            serial_log_fd: Some(3),
            serial_log_old_fd: Some(4),
            on_crash: boot.machine.as_ref().map_or(0, |machine| machine.on_crash),
            vsock: boot.machine.as_ref().and_then(|machine| machine.vsock),
            ..MachineSpec::default()
        };
        let op = Op::Boot(Boot {
            machine: Some(machine),
            paused: boot.paused,
            restore: boot.restore.clone(),
        });
        let serial = self.serial.try_clone().unwrap();
        let mut fds = vec![
            kvm.as_fd(),
            file.as_fd(),
            random.as_fd(),
            serial.as_fd(),
            older.as_fd(),
        ];
        fds.extend(more);
        fds.extend(disk.map(File::as_fd));
        fds.extend(receives_boot.then(|| initrd.as_fd()));
        self.send(op, &fds);
    }

    pub fn send(&mut self, op: Op, fds: &[BorrowedFd<'_>]) {
        self.asked += 1;
        let request = Request {
            id: self.asked,
            op: Some(op),
            ..Request::default()
        };
        wire::send_all(
            &self.socket,
            &Message {
                kind: Some(Kind::Request(request)),
            },
            fds,
        )
        .unwrap();
    }

    /// The answer to the last request.
    pub fn answer(&mut self) -> Answer {
        loop {
            match self.receive() {
                Kind::Response(response) if response.id == self.asked => return response.result.unwrap(),
                Kind::Event(Event { kind }) => self.events.extend(kind),
                _ => {}
            }
        }
    }

    fn receive(&mut self) -> Kind {
        self.socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let received = wire::receive(&self.socket, &mut self.receiver).unwrap();
        received.expect("the vmm closed the connection").0.kind.unwrap()
    }

    /// Waits for an event that `pick` takes.
    pub fn wait_for_event<T>(&mut self, pick: impl Fn(&event::Kind) -> Option<T>) -> T {
        let mut seen = 0;
        loop {
            while let Some(kind) = self.events.get(seen) {
                if let Some(picked) = pick(kind) {
                    return picked;
                }
                seen += 1;
            }
            if let Kind::Event(Event { kind }) = self.receive() {
                self.events.extend(kind);
            }
        }
    }

    /// Waits for the end of the run.
    pub fn wait_for_end(&mut self) -> ExitRecord {
        self.wait_for_event(|kind| match kind {
            event::Kind::Ended(ended) => ended.exit.clone(),
            _ => None,
        })
    }
}

/// A connection to the console socket.
pub struct Console(UnixStream);

impl Console {
    pub fn read(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub fn write(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }
}

/// A CD-ROM drive with this descriptor as its medium.
fn cdrom_at_port_0(fd: u32) -> Disk {
    Disk {
        name: "cd".into(),
        fd,
        sata_port: Some(0),
        cdrom: true,
        ..Disk::default()
    }
}
