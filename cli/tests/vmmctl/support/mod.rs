//! A daemon made for these tests: its services on a UNIX socket, with VMs and disks in maps.

pub mod disk;
pub mod guest;
pub mod image;
mod migration;
mod network;
mod node;
mod observe;
mod operation;
pub mod screen;
pub mod snapshot;
mod update;
mod vm;

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader, Lines},
    path::{Path, PathBuf},
    pin::Pin,
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{net::UnixListener, sync::broadcast};
use tokio_stream::{Stream, wrappers::UnixListenerStream};
use tonic::{Code, Response, Status};
use tonic_types::{ErrorDetails, StatusExt as _};
use vmmd_api::{
    rule::Mutation,
    v1::{
        self, VmPhase, WatchEventType, disk_service_server::DiskServiceServer,
        event_service_server::EventServiceServer, image_service_server::ImageServiceServer,
        migration_service_server::MigrationServiceServer, network_service_server::NetworkServiceServer,
        node_service_server::NodeServiceServer, operation_service_server::OperationServiceServer,
        snapshot_service_server::SnapshotServiceServer, vm_service_server::VmServiceServer,
    },
};

type Answer<T> = Result<Response<T>, Status>;
type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Objects of the mock daemon, and the calls on it.
#[derive(Clone)]
pub struct State {
    vms: Arc<Mutex<BTreeMap<String, v1::Vm>>>,
    disks: Arc<Mutex<BTreeMap<String, v1::Disk>>>,
    networks: Arc<Mutex<BTreeMap<String, v1::Network>>>,
    images: Arc<Mutex<BTreeMap<String, v1::Image>>>,
    /// Their archives.
    snapshots: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
    /// Snapshots that were taken.
    taken: Arc<Mutex<BTreeMap<String, v1::Snapshot>>>,
    calls: Arc<Mutex<Vec<String>>>,
    ids: Arc<Mutex<Vec<String>>>,
    changes: broadcast::Sender<v1::WatchVmsResponse>,
    disk_changes: broadcast::Sender<v1::WatchDisksResponse>,
    events: broadcast::Sender<v1::Event>,
    samples: Arc<Mutex<u64>>,
    operations: Arc<Mutex<BTreeMap<String, v1::Operation>>>,
    play: Arc<Mutex<Play>>,
    /// Console output of guests.
    printed: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
    consoles: Arc<Mutex<usize>>,
}

/// How the daemon behaves.
#[derive(Default)]
struct Play {
    slow_starts: bool,
    starts: usize,
    most_starts: usize,
    exit: Option<v1::ExitReason>,
    changes_before_updates: usize,
    refuse_first: bool,
    refused_watches: usize,
    disk_warning: Option<String>,
}

/// Runs vmmctl; its exit code, standard output and standard error.
pub fn run(daemon: &Daemon, args: &[&str]) -> (i32, String, String) {
    run_with_input(daemon, args, "")
}

pub fn run_with_input(daemon: &Daemon, args: &[&str], input: &str) -> (i32, String, String) {
    output(daemon.vmmctl().args(args).write_stdin(input))
}

/// Runs a command; its exit code, standard output and standard error.
pub fn output(command: &mut assert_cmd::Command) -> (i32, String, String) {
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (
        output.status.code().unwrap(),
        text(output.stdout),
        text(output.stderr),
    )
}

/// Runs vmmctl with the words of a line.
pub fn line(daemon: &Daemon, line: &str) -> (i32, String, String) {
    run(daemon, &line.split_whitespace().collect::<Vec<_>>())
}

/// Result of a successful command without output on standard error.
pub fn done(stdout: &str) -> (i32, String, String) {
    (0, stdout.to_owned(), String::new())
}

/// Result of a failed command without output on standard output.
pub fn failed(code: i32, stderr: &str) -> (i32, String, String) {
    (code, String::new(), stderr.to_owned())
}

/// A daemon that listens until it is dropped.
pub struct Daemon {
    pub socket: PathBuf,
    pub state: State,
    _folder: tempfile::TempDir,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Daemon {
    pub fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("vmmd.sock");
        let state = State {
            vms: Arc::default(),
            disks: Arc::default(),
            networks: Arc::default(),
            images: Arc::default(),
            snapshots: Arc::default(),
            taken: Arc::default(),
            calls: Arc::default(),
            ids: Arc::default(),
            changes: broadcast::channel(64).0,
            disk_changes: broadcast::channel(64).0,
            events: broadcast::channel(64).0,
            samples: Arc::default(),
            operations: Arc::default(),
            play: Arc::default(),
            printed: Arc::default(),
            consoles: Arc::default(),
        };
        Self {
            runtime: Some(serve(&socket, &state)),
            socket,
            state,
            _folder: folder,
        }
    }

    /// Drops all connections and listens again, as after a crash.
    pub fn restart(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Waits until the worker has dropped the connections.
            runtime.shutdown_timeout(std::time::Duration::from_secs(20));
        }
        std::fs::remove_file(&self.socket).unwrap();
        self.runtime = Some(serve(&self.socket, &self.state));
    }

    /// Runs a task beside the daemon's.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.runtime.as_ref().unwrap().spawn(task);
    }

    /// Starts vmmctl with this daemon; its standard streams are pipes.
    pub fn begin(&self, args: &[&str]) -> Running {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_vmmctl"));
        Running::start(command.args(args).env("VMMD_SOCKET", &self.socket))
    }

    /// `vmmctl` with this daemon.
    pub fn vmmctl(&self) -> assert_cmd::Command {
        let mut command = assert_cmd::Command::cargo_bin("vmmctl").unwrap();
        command
            .env("VMMD_SOCKET", &self.socket)
            .timeout(std::time::Duration::from_secs(30));
        command
    }
}

/// A started program; killed when dropped.
pub struct Running {
    pub child: Child,
    pub input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    errors: Lines<BufReader<ChildStderr>>,
}

impl Running {
    pub fn start(command: &mut std::process::Command) -> Self {
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = piped.stderr(Stdio::piped()).spawn().unwrap();
        Self {
            input: child.stdin.take().unwrap(),
            output: BufReader::new(child.stdout.take().unwrap()).lines(),
            errors: BufReader::new(child.stderr.take().unwrap()).lines(),
            child,
        }
    }

    /// The next line of standard output.
    pub fn line(&mut self) -> String {
        self.output.next().unwrap().unwrap()
    }

    /// The next line of standard error.
    pub fn error(&mut self) -> String {
        self.errors.next().unwrap().unwrap()
    }

    /// Waits for the end; returns the exit code, and the rest of standard output and standard error.
    pub fn end(mut self) -> (Option<i32>, String, String) {
        let text = |line: std::io::Result<String>| line.unwrap() + "\n";
        let output = self.output.by_ref().map(text).collect();
        let errors = self.errors.by_ref().map(text).collect();
        (self.child.wait().unwrap().code(), output, errors)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // By a signal, as ^C does. The program may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Serves `state` on `socket` for the lifetime of the runtime.
fn serve(socket: &Path, state: &State) -> tokio::runtime::Runtime {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let listener = {
        let _inside = runtime.enter();
        UnixListener::bind(socket).unwrap()
    };
    let server = tonic::transport::Server::builder()
        .add_service(VmServiceServer::new(state.clone()))
        .add_service(DiskServiceServer::new(state.clone()))
        .add_service(EventServiceServer::new(state.clone()))
        .add_service(ImageServiceServer::new(state.clone()))
        .add_service(MigrationServiceServer::new(state.clone()))
        .add_service(NetworkServiceServer::new(state.clone()))
        .add_service(OperationServiceServer::new(state.clone()))
        .add_service(SnapshotServiceServer::new(state.clone()))
        .add_service(NodeServiceServer::new(state.clone()));
    runtime.spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
    runtime
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn matches(filter: &v1::VmFilter, vm: &v1::Vm) -> bool {
    let metadata = vm.metadata.clone().unwrap_or_default();
    let phase = vm.status.clone().unwrap_or_default().phase;
    let label = |key: &str| metadata.labels.get(key).map(String::as_str);
    let labels = filter.labels.iter().all(|selector| {
        if let Some((key, value)) = selector.split_once("!=") {
            label(key) != Some(value)
        } else if let Some((key, value)) = selector.split_once('=') {
            label(key) == Some(value)
        } else {
            label(selector).is_some()
        }
    });
    labels
        && (filter.phases.is_empty() || filter.phases.contains(&phase))
        && (filter.names.is_empty() || filter.names.contains(&metadata.name))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn refusal(code: Code, reason: &str, message: String) -> Status {
    let details = ErrorDetails::with_error_info(reason, "vmmd", []);
    Status::with_error_details(code, message, details)
}

impl State {
    /// Refuses each change once; accepts the repetition with the same id.
    pub fn refuse_first(&self) {
        lock(&self.play).refuse_first = true;
    }

    /// Records a change; fails like a stopping daemon if requested.
    fn once<M: Mutation>(&self, request: &M) -> Result<(), Status> {
        let id = request.request_id();
        assert!(!id.is_empty(), "{} has an id", M::METHOD);
        if lock(&self.play).refuse_first && self.ids(id) == 1 {
            self.called(format!("refused {}", M::METHOD));
            let message = "vmmd is stopping; try again in a moment".to_owned();
            return Err(refusal(Code::Unavailable, "DAEMON_STOPPING", message));
        }
        Ok(())
    }

    /// How often a request with this id has come.
    fn ids(&self, id: &str) -> usize {
        let mut ids = lock(&self.ids);
        ids.push(id.to_owned());
        ids.iter().filter(|known| *known == id).count()
    }

    /// Adds a VM in a phase, behind the API's back.
    pub fn put(&self, name: &str, phase: VmPhase, labels: &[(&str, &str)]) {
        let vm = v1::Vm {
            metadata: Some(v1::ObjectMetadata {
                name: name.into(),
                uid: "7b5ba9f5-6ad1-4d56-8e35-6bd3ba9d1ef8".into(),
                generation: 1,
                labels: labels
                    .iter()
                    .map(|(key, value)| (key.to_string(), value.to_string()))
                    .collect(),
                create_time: None,
                ..Default::default()
            }),
            spec: Some(v1::VmSpec {
                cpu: Some(v1::CpuSpec {
                    cores: 2,
                    ..Default::default()
                }),
                memory: Some(v1::MemorySpec {
                    size_bytes: 1 << 30,
                    backing: 0,
                    ..Default::default()
                }),
                boot: Some(v1::BootSpec {
                    source: Some(v1::boot_spec::Source::Linux(v1::LinuxBoot {
                        kernel: "/boot/vmlinuz".into(),
                        ..v1::LinuxBoot::default()
                    })),
                }),
                ..v1::VmSpec::default()
            }),
            status: Some(v1::VmStatus {
                phase: phase.into(),
                instance: (phase == VmPhase::Running).then(|| v1::InstanceStatus {
                    pid: 7,
                    ..Default::default()
                }),
                conditions: vec![ready(name, phase)],
                ..v1::VmStatus::default()
            }),
        };
        lock(&self.vms).insert(name.into(), vm);
    }

    /// The VM has a socket device.
    pub fn with_vsock(&self, name: &str) {
        let mut vms = lock(&self.vms);
        let spec = vms.get_mut(name).unwrap().spec.as_mut().unwrap();
        spec.vsock = Some(v1::VsockSpec::default());
    }

    /// A migration of the VM waits for a decision.
    pub fn migrates(&self, name: &str, migration: v1::MigrationStatus) {
        let mut vms = lock(&self.vms);
        let vm = vms.get_mut(name).unwrap();
        vm.status.get_or_insert_default().migration = Some(migration);
    }

    /// A guest prints.
    pub fn print(&self, name: &str, text: &[u8]) {
        lock(&self.printed)
            .entry(name.to_owned())
            .or_default()
            .extend_from_slice(text);
    }

    /// How many consoles were opened.
    pub fn consoles(&self) -> usize {
        *lock(&self.consoles)
    }

    /// Starts take a moment.
    pub fn slow_starts(&self) {
        lock(&self.play).slow_starts = true;
    }

    /// How many starts were under way at a time, at most.
    pub fn most_starts(&self) -> usize {
        lock(&self.play).most_starts
    }

    /// Stops end so from now on.
    pub fn end_with(&self, exit: v1::ExitReason) {
        lock(&self.play).exit = Some(exit);
    }

    /// The daemon warns of each disk in these words.
    pub fn warn_of_disks(&self, warning: &str) {
        lock(&self.play).disk_warning = Some(warning.to_owned());
    }

    /// That many times, somebody else changes a VM just before an update comes.
    pub fn change_before_updates(&self, times: usize) {
        lock(&self.play).changes_before_updates = times;
    }

    /// A start that takes a moment, and one more beside the others.
    async fn start_slowly(&self) {
        {
            let mut play = lock(&self.play);
            if !play.slow_starts {
                return;
            }
            play.starts += 1;
            play.most_starts = play.most_starts.max(play.starts);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        lock(&self.play).starts -= 1;
    }

    /// Phase of a VM, if the VM exists.
    pub fn phase(&self, name: &str) -> Option<VmPhase> {
        Some(lock(&self.vms).get(name)?.status.as_ref()?.phase())
    }

    /// The VM as the daemon has it.
    pub fn vm(&self, name: &str) -> v1::Vm {
        lock(&self.vms)[name].clone()
    }

    /// Requests for changes, in order.
    pub fn calls(&self) -> Vec<String> {
        lock(&self.calls).clone()
    }

    /// Notifies watchers of a change.
    pub fn announce(&self, kind: WatchEventType, name: &str) {
        let vm = Some(self.vm(name));
        // Nobody may watch.
        let _ = self.changes.send(v1::WatchVmsResponse {
            r#type: kind.into(),
            vm,
            ..Default::default()
        });
    }

    /// How many watch.
    pub fn watchers(&self) -> usize {
        self.changes.receiver_count()
    }

    /// The run of a VM ends as it is to end.
    fn end_run(&self, vm: Option<&mut v1::Vm>) {
        let exit = lock(&self.play).exit;
        if let (Some(status), Some(exit)) = (vm.and_then(|vm| vm.status.as_mut()), exit) {
            status.last_exit.get_or_insert_default().set_reason(exit);
        }
    }

    fn called(&self, call: String) {
        lock(&self.calls).push(call);
    }

    fn find(&self, name: &str) -> Result<v1::Vm, Status> {
        let vm = lock(&self.vms).get(name).cloned();
        vm.ok_or_else(|| Status::not_found(format!("there is no VM \"{name}\"")))
    }

    fn change(&self, name: &str, from: &[VmPhase], to: VmPhase) -> Result<Option<v1::Vm>, Status> {
        let mut vm = self.find(name)?;
        let status = vm.status.as_mut().unwrap();
        if !from.contains(&status.phase()) {
            let reason = match to {
                VmPhase::Terminating => "STILL_RUNNING",
                VmPhase::Running => "ALREADY_RUNNING",
                _ => "NOT_RUNNING",
            };
            return Err(refusal(
                Code::FailedPrecondition,
                reason,
                format!("VM \"{name}\" is {}", status.phase().as_str_name()),
            ));
        }
        status.set_phase(to);
        lock(&self.vms).insert(name.into(), vm.clone());
        Ok(Some(vm))
    }
}

/// Whether the guest runs and its vmm answers; unknown for the VM `silent`.
fn ready(name: &str, phase: VmPhase) -> v1::Condition {
    let status = match (name, phase) {
        ("silent", _) => v1::ConditionStatus::Unknown,
        (_, VmPhase::Running) => v1::ConditionStatus::True,
        _ => v1::ConditionStatus::False,
    };
    v1::Condition {
        r#type: "Ready".into(),
        status: status.into(),
        ..Default::default()
    }
}
