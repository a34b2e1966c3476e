//! A daemon in folders of its own, and what tests ask of it.

use std::{
    fs, io,
    os::unix::{fs::MetadataExt as _, net::UnixDatagram, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use hyper_util::rt::TokioIo;
use rustix::process::{Pid, Signal, kill_process};
use tokio::{net::UnixStream, task::JoinHandle, time::timeout};
use tokio_stream::StreamExt;
use tonic::{
    Code, Status, Streaming,
    transport::{Channel, Endpoint, Uri},
};
use tonic_types::StatusExt;
use vmmd_api::{
    v1::{
        self, event_service_client::EventServiceClient, node_service_client::NodeServiceClient,
        vm_service_client::VmServiceClient,
    },
    well_known,
};

/// No event that a test waits for takes this long; it is a failure's way to end, not a measure.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// In the configuration of a test's only daemon: it has user ids for 1,000 VMs.
pub const MANY_USERS: &str = "# many users\n";

/// A running daemon. When it is dropped, it and all that it has started are ended and removed.
pub struct Daemon {
    pub folder: tempfile::TempDir,
    pub client: VmServiceClient<Channel>,
    pub uids: std::ops::Range<u32>,
    cgroup: Option<PathBuf>,
    child: Child,
    /// Socket on which the daemon notifies systemd.
    pub notify: UnixDatagram,
    namespace: Option<String>,
}

static NEXT: AtomicU32 = AtomicU32::new(0);
/// User ids of a daemon: more than a test has VMs, networks and images.
const UIDS: u32 = 500;

impl Daemon {
    /// One with the mock `vmm`.
    pub async fn start() -> Self {
        Self::configured("").await
    }

    /// In a network namespace.
    pub async fn in_network(namespace: &str) -> Self {
        Self::in_network_with(namespace, "").await
    }

    /// The same, with more lines of configuration.
    pub async fn in_network_with(namespace: &str, extra: &str) -> Self {
        let folder = temporary_folder();
        Self::with(folder, extra, Some(namespace.to_owned())).await
    }

    /// One whose log, as it would be in the journal, is in `log.txt`.
    pub async fn with_log(extra: &str) -> Self {
        let folder = temporary_folder();
        fs::write(folder.path().join("log.txt"), "").unwrap();
        Self::in_folder(folder, extra).await
    }

    /// Waits for `count` events with this reason. A call or a status may show a change before its
    /// event appears.
    pub async fn told(&self, reason: &str, count: usize) -> Vec<v1::Event> {
        let told = timeout(PATIENCE, async {
            loop {
                let events = self.events(reason).await;
                if events.len() >= count {
                    break events;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        told.await
            .unwrap_or_else(|_| panic!("{reason} is not told {count} times"))
    }

    /// As [`told`](Self::told), and fails when there are more.
    pub async fn told_exactly(&self, reason: &str, count: usize) -> Vec<v1::Event> {
        let events = self.told(reason, count).await;
        assert_eq!(events.len(), count, "{events:?}");
        events
    }

    /// Events with this reason by now, the oldest first.
    pub async fn events(&self, reason: &str) -> Vec<v1::Event> {
        let mut client = EventServiceClient::new(connect(self.folder.path()).await);
        let request = v1::ListEventsRequest {
            page_size: 1000,
            ..Default::default()
        };
        let events = client.list_events(request).await.unwrap().into_inner().events;
        events
            .into_iter()
            .filter(|event| event.reason == reason)
            .collect()
    }

    /// With more lines of configuration.
    pub async fn configured(extra: &str) -> Self {
        let folder = temporary_folder();
        Self::in_folder(folder, extra).await
    }

    pub async fn in_folder(folder: tempfile::TempDir, extra: &str) -> Self {
        Self::with(folder, extra, None).await
    }

    /// With all that can be chosen.
    pub async fn with(folder: tempfile::TempDir, extra: &str, namespace: Option<String>) -> Self {
        let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        // No two processes of tests that run at a time have the same, also when one makes a hundred daemons one after another.
        let first = 1_000_000_000 + (process % 32_768 * 128 + number % 128) * UIDS;
        let count = if extra.contains(MANY_USERS) { 1000 } else { UIDS };
        // Named as the folder, which no other has: numbers of processes come again, and an earlier test may have left its cgroup.
        let name = folder.path().file_name().unwrap().to_str().unwrap();
        let cgroup = cgroup_mount().map(|mount| mount.join(format!("vmmd-test-{name}")));
        let path = |name: &str| folder.path().join(name);
        fs::write(path("kernel"), [1; 4096]).unwrap();
        let mut config = format!(
            "state_dir = {:?}\nrun_dir = {:?}\nlog_dir = {:?}\nsocket_group = '0'\n",
            path("state"),
            path("run"),
            path("log")
        );
        if !extra.contains("vmm =") {
            config += &format!("vmm = {:?}\n", vmmd_testing::program("mock-vmm"));
        }
        if !extra.contains("vmm_image =") {
            config += &format!("vmm_image = {:?}\n", vmmd_testing::program("mock-vmm-image"));
        }
        if !extra.contains("kvm_device =") {
            config += "kvm_device = '/dev/null'\n";
        }
        if let Some(cgroup) = &cgroup {
            config += &format!("cgroup = {cgroup:?}\n");
        }
        config += extra;
        // Tests run more VMs at once than the machine has processors.
        if !extra.contains("[overcommit]") {
            config += "\n[overcommit]\ncpu = 1000\nvcpu = 1000\n";
        }
        config += &format!("\n[vm_uids]\nfirst = {first}\ncount = {count}\n");
        fs::write(path("config.toml"), config).unwrap();
        let (child, notify) = launch(folder.path(), namespace.as_deref(), &[]).await;
        let client = VmServiceClient::new(connect(folder.path()).await);
        Self {
            folder,
            client,
            uids: first..first + count,
            cgroup,
            child,
            notify,
            namespace,
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Kills the daemon, starts it again and connects to it.
    pub async fn kill_and_restart(&mut self) {
        self.kill();
        self.relaunch().await;
    }

    /// Asks the daemon to end, and waits for that.
    pub fn terminate(&mut self) {
        kill_process(self.pid(), Signal::TERM).unwrap();
        assert!(
            self.child.wait().unwrap().success(),
            "the daemon did not end well"
        );
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }

    pub async fn relaunch(&mut self) {
        self.relaunch_with(&[]).await;
    }

    /// With more in its environment.
    pub async fn relaunch_with(&mut self, environment: &[(&str, &str)]) {
        let launched = launch(self.folder.path(), self.namespace.as_deref(), environment);
        (self.child, self.notify) = launched.await;
        self.client = VmServiceClient::new(connect(self.folder.path()).await);
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub async fn nodes(&self) -> NodeServiceClient<Channel> {
        NodeServiceClient::new(connect(self.folder.path()).await)
    }

    pub fn client(&self) -> VmServiceClient<Channel> {
        self.client.clone()
    }

    /// A manifest of a small VM without disks and NICs, which is only started by request; `options` are for the mock.
    pub fn manifest(&self, name: &str, options: &str) -> v1::Vm {
        let linux = v1::LinuxBoot {
            kernel: self.path("kernel").to_str().unwrap().to_owned(),
            initrd: String::new(),
            cmdline: options.to_owned(),
        };
        v1::Vm {
            metadata: metadata_of(name),
            spec: Some(v1::VmSpec {
                cpu: Some(v1::CpuSpec {
                    cores: 1,
                    ..Default::default()
                }),
                memory: Some(v1::MemorySpec {
                    size_bytes: 128 << 20,
                    backing: 0,
                    ..Default::default()
                }),
                boot: Some(v1::BootSpec {
                    source: Some(v1::boot_spec::Source::Linux(linux)),
                }),
                run_policy: v1::RunPolicy::Manual.into(),
                ..Default::default()
            }),
            status: None,
        }
    }

    pub async fn create(&self, vm: v1::Vm) -> Result<v1::Vm, Status> {
        let request = v1::CreateVmRequest {
            vm: Some(vm),
            start: false,
            dry_run: false,
            ..Default::default()
        };
        Ok(self.client().create_vm(request).await?.into_inner().vm.unwrap())
    }

    /// Makes and starts a VM.
    pub async fn run(&self, name: &str, options: &str) -> v1::Vm {
        self.create(self.manifest(name, options)).await.unwrap();
        self.start_vm(name).await.unwrap()
    }

    pub async fn start_vm(&self, name: &str) -> Result<v1::Vm, Status> {
        let request = v1::StartVmRequest {
            name: name.into(),
            ..Default::default()
        };
        Ok(self.client().start_vm(request).await?.into_inner().vm.unwrap())
    }

    /// Starts a VM in the background.
    pub fn begin_start(&self, name: &str) -> JoinHandle<Result<v1::Vm, Status>> {
        let mut client = self.client();
        let request = v1::StartVmRequest {
            name: name.into(),
            ..Default::default()
        };
        tokio::spawn(async move { Ok(client.start_vm(request).await?.into_inner().vm.unwrap()) })
    }

    pub async fn pause(&self, name: &str) -> Result<v1::Vm, Status> {
        let request = v1::PauseVmRequest {
            name: name.into(),
            ..Default::default()
        };
        Ok(self.client().pause_vm(request).await?.into_inner().vm.unwrap())
    }

    pub async fn resume(&self, name: &str) -> Result<v1::Vm, Status> {
        let request = v1::ResumeVmRequest {
            name: name.into(),
            ..Default::default()
        };
        Ok(self.client().resume_vm(request).await?.into_inner().vm.unwrap())
    }

    pub async fn stop(&self, name: &str, grace: Option<Duration>) -> Result<v1::Vm, Status> {
        let grace_period = grace.map(|grace| well_known::Duration {
            seconds: i64::try_from(grace.as_secs()).unwrap(),
            nanos: i32::try_from(grace.subsec_nanos()).unwrap(),
        });
        let request = v1::StopVmRequest {
            name: name.into(),
            grace_period,
            force: false,
            ..Default::default()
        };
        Ok(self.client().stop_vm(request).await?.into_inner().vm.unwrap())
    }

    pub async fn kill_vm(&self, name: &str) -> Result<v1::Vm, Status> {
        let request = v1::StopVmRequest {
            name: name.into(),
            grace_period: None,
            force: true,
            ..Default::default()
        };
        Ok(self.client().stop_vm(request).await?.into_inner().vm.unwrap())
    }

    pub async fn delete(&self, name: &str, force: bool) -> Result<(), Status> {
        self.client()
            .delete_vm(v1::DeleteVmRequest {
                name: name.into(),
                force,
                ..Default::default()
            })
            .await
            .map(drop)
    }

    pub async fn get(&self, name: &str) -> Result<v1::Vm, Status> {
        let request = v1::GetVmRequest { name: name.into() };
        Ok(self.client().get_vm(request).await?.into_inner().vm.unwrap())
    }

    pub async fn list(&self) -> Vec<v1::Vm> {
        self.client()
            .list_vms(v1::ListVmsRequest { ..Default::default() })
            .await
            .unwrap()
            .into_inner()
            .vms
    }

    pub async fn watch(&self, name: &str) -> Streaming<v1::WatchVmsResponse> {
        self.client()
            .watch_vms(v1::WatchVmsRequest {
                name: name.into(),
                ..Default::default()
            })
            .await
            .unwrap()
            .into_inner()
    }

    /// Waits until the VM is as wanted, by the events of a watch.
    pub async fn wait(&self, name: &str, wanted: impl Fn(&v1::VmStatus) -> bool) -> v1::VmStatus {
        let mut events = self.watch(name).await;
        let mut last = None;
        let found = timeout(PATIENCE, async {
            while let Some(event) = events.next().await {
                last = event.unwrap().vm.and_then(|vm| vm.status).or(last.take());
                if let Some(status) = last.as_ref().filter(|status| wanted(status)) {
                    return status.clone();
                }
            }
            panic!("the watch ended");
        });
        match found.await {
            Ok(status) => status,
            Err(_) => panic!("{name} did not come to be as wanted: {:?}", self.get(name).await),
        }
    }

    pub async fn wait_phase(&self, name: &str, phase: v1::VmPhase) -> v1::VmStatus {
        self.wait(name, |status| status.phase() == phase).await
    }

    /// Processes with a user id of this daemon's VMs.
    pub fn vmm_processes(&self) -> Vec<Pid> {
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let ours = pids.filter(|pid| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let field = |name: &str| {
                status
                    .lines()
                    .find_map(|line| line.strip_prefix(name)?.split_whitespace().next())
            };
            let uid = field("Uid:").and_then(|uid| uid.parse().ok());
            // Zombies wait for their inheriting parent.
            let alive = field("State:").is_some_and(|state| state != "Z");
            alive && uid.is_some_and(|uid| self.uids.contains(&uid))
        });
        ours.filter_map(Pid::from_raw).collect()
    }

    /// Where the cgroup v2 hierarchy is mounted.
    pub fn cgroup_mount(&self) -> PathBuf {
        cgroup_mount().expect("a cgroup v2 hierarchy")
    }

    /// Those of VMs: they are named by UUIDs.
    pub fn cgroups(&self) -> Vec<PathBuf> {
        let mut groups = self.all_cgroups();
        groups.retain(|group| group.file_name().is_some_and(|name| name.len() == 36));
        groups
    }

    /// Those of helpers too.
    pub fn all_cgroups(&self) -> Vec<PathBuf> {
        let Some(cgroup) = &self.cgroup else {
            return Vec::new();
        };
        let entries = fs::read_dir(cgroup).into_iter().flatten().flatten();
        entries
            .map(|entry| entry.path())
            .filter(|path| path.is_dir())
            .collect()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
        for pid in self.vmm_processes() {
            end(pid);
        }
        // DHCP servers of its networks outlive it.
        for network in fs::read_dir(self.path("run/networks"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let known = fs::read(network.path().join("server.json")).unwrap_or_default();
            let known: serde_json::Value = serde_json::from_slice(&known).unwrap_or_default();
            let pid = known["pid"]
                .as_i64()
                .and_then(|pid| Pid::from_raw(pid.try_into().ok()?));
            if let Some(pid) = pid {
                end(pid);
            }
        }
        for group in self.all_cgroups().into_iter().chain(self.cgroup.clone()) {
            // A process that the daemon was just starting may not be recognizable yet.
            let pids = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
            pids.lines()
                .filter_map(|pid| Pid::from_raw(pid.parse().ok()?))
                .for_each(end);
            remove_cgroup(&group);
        }
    }
}

/// Stops a process, and waits until none of its threads runs: the signal arrives later than the call returns.
pub fn stop_process(pid: Pid) {
    kill_process(pid, Signal::STOP).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let runs = || {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        threads.flatten().any(|thread| {
            let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            // proc_pid_stat(5): the state follows the name, which is in parentheses.
            stat.rsplit_once(") ")
                .is_some_and(|(_, rest)| !rest.starts_with('T'))
        })
    };
    while runs() {
        assert!(Instant::now() < deadline, "process {pid} does not stop");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Kills a process and waits for its end.
pub fn end(pid: Pid) {
    let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty());
    let _ = kill_process(pid, Signal::KILL);
    if let Ok(pidfd) = pidfd {
        let mut fds = [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)];
        let _ = rustix::event::poll(&mut fds, None);
    }
}

/// Removes a cgroup in which no process is; one that has ended may count for a moment. A test that leaves a cgroup fails.
fn remove_cgroup(group: &Path) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match fs::remove_dir(group) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(10));
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound && !thread::panicking() => {
                panic!("{} is left: {error}", group.display());
            }
            _ => return,
        }
    }
}

/// Starts the daemon and waits until it says that it is ready, as systemd would.
async fn launch(
    folder: &Path,
    namespace: Option<&str>,
    environment: &[(&str, &str)],
) -> (Child, UnixDatagram) {
    let notify = folder.join("notify");
    let _ = fs::remove_file(&notify);
    let socket = UnixDatagram::bind(&notify).unwrap();
    let mut child = command(folder, namespace)
        .env("NOTIFY_SOCKET", &notify)
        .envs(environment.iter().copied())
        .spawn()
        .unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut buffer = [0; 64];
    let pidfd =
        rustix::process::pidfd_open(Pid::from_child(&child), rustix::process::PidfdFlags::empty()).unwrap();
    let mut fds = [
        rustix::event::PollFd::new(&socket, rustix::event::PollFlags::IN),
        rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN),
    ];
    rustix::event::poll(&mut fds, None).unwrap();
    if let Some(status) = child.try_wait().unwrap() {
        panic!("the daemon ended at its start: {status}");
    }
    let length = socket.recv(&mut buffer).unwrap();
    assert!(buffer[..length].starts_with(b"READY=1"));
    (child, socket)
}

/// The daemon's program with this folder's configuration.
pub fn command(folder: &Path, namespace: Option<&str>) -> Command {
    let daemon = vmmd_testing::program("vmmd");
    let mut command = match namespace {
        Some(namespace) => {
            let mut command = Command::new("nsenter");
            command.arg(format!("--net=/run/netns/{namespace}")).arg(daemon);
            command
        }
        None => Command::new(daemon),
    };
    command.arg("--config").arg(folder.join("config.toml"));
    command
        .env(
            "RUST_LOG",
            std::env::var_os("RUST_LOG").unwrap_or_else(|| "debug,h2=info,hyper=info".into()),
        )
        .stdin(Stdio::null());
    let log = folder.join("log.txt");
    if log.exists() {
        let log = fs::File::options().append(true).open(log).unwrap();
        command.env("RUST_LOG", "info").stderr(log);
    }
    // Paths of a VM can be below /proc/self/cwd, where each test has files of its own.
    command.current_dir(folder);
    // Its messages are the test's.
    command.process_group(0);
    command
}

pub async fn connect(folder: &Path) -> Channel {
    let path = folder.join("run/vmmd.sock");
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://vmmd")
        .connect_with_connector(connector)
        .await
        .unwrap()
}

fn cgroup_mount() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.lines().find_map(|line| {
        let (mount, filesystem) = line.split_once(" - ")?;
        filesystem
            .starts_with("cgroup2 ")
            .then(|| PathBuf::from(mount.split(' ').nth(4).unwrap()))
    })
}

/// Room that files below a folder take, in bytes.
pub fn room(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).unwrap().map(Result::unwrap);
    let rooms = entries.map(|entry| match entry.metadata().unwrap() {
        metadata if metadata.is_dir() => room(&entry.path()),
        metadata => metadata.blocks() * 512,
    });
    rooms.sum()
}

/// A folder of a test's own, which is removed with its content.
pub fn temporary_folder() -> tempfile::TempDir {
    let mut builder = tempfile::Builder::new();
    builder.prefix("vmmd").tempdir_in("/tmp").unwrap()
}

/// Metadata with only a name.
#[allow(clippy::unnecessary_wraps, reason = "a field of messages, which is optional")]
pub fn metadata_of(name: impl Into<String>) -> Option<v1::ObjectMetadata> {
    Some(v1::ObjectMetadata {
        name: name.into(),
        ..Default::default()
    })
}

/// Expects the code and the reason of a refusal.
#[track_caller]
pub fn assert_refused(status: &Status, code: Code, reason: &str) {
    assert_eq!(refusal(status), (code, reason.to_owned()), "{status}");
}

/// Expects these words in the message of a refusal.
#[track_caller]
pub fn assert_says(status: &Status, words: &str) {
    assert!(status.message().contains(words), "{words:?} is not in {status}");
}

/// The code and reason of a refusal.
pub fn refusal(status: &Status) -> (Code, String) {
    let details = status.get_error_details();
    let info = details
        .error_info()
        .cloned()
        .unwrap_or_else(|| panic!("no reason in {status:?}"));
    assert_eq!(info.domain, "vmmd");
    (status.code(), info.reason)
}

pub fn status(vm: &v1::Vm) -> &v1::VmStatus {
    vm.status.as_ref().unwrap()
}

pub fn vm_pid(vm: &v1::Vm) -> Pid {
    let pid = status(vm).instance.as_ref().unwrap().pid;
    Pid::from_raw(i32::try_from(pid).unwrap()).unwrap()
}

/// The precondition that the VM has this generation.
pub fn generation(generation: u64) -> Option<v1::Preconditions> {
    Some(v1::Preconditions {
        generation: Some(generation),
        ..Default::default()
    })
}

pub fn uid(vm: &v1::Vm) -> String {
    vm.metadata.as_ref().unwrap().uid.clone()
}
