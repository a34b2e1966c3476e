//! VMs of pods: the launcher with its cgroup, its volumes and its lifeline.

use std::{
    fs::{self, File},
    io::Write,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::{fs::symlink, net::UnixStream},
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use tokio_stream::StreamExt;
use tonic::{Code, transport::Channel};
use uuid::Uuid;
use vmmd_api::v1::{
    self, ExitReason, PodReport, RunPolicy, VmPhase, pod_service_client::PodServiceClient,
    watch_pods_response::Change,
};
use vmmd_pod::{
    MAX_PIECE, MAX_VOLUMES,
    message::{
        DaemonMessage, FilePiece, Hello, LauncherMessage, Stop, Volume, daemon_message, launcher_message,
    },
};
use vmmd_wire::Receiver;

use crate::{
    harness::{Daemon, PATIENCE, connect, end, refusal, vm_pid},
    namespace::Namespace,
    verbs::within,
};

/// A pod of the kubelet: its cgroup, its folder, and its launcher if that was started.
pub struct Pod {
    pub uid: String,
    pub group: PathBuf,
    pub folder: PathBuf,
    socket: PathBuf,
    /// Its network; that of the node when there is none.
    pub namespace: Option<Namespace>,
    launcher: Option<Child>,
}

impl Pod {
    /// With a directory volume `data` that has an image.
    pub fn new(daemon: &Daemon) -> Self {
        let uid = Uuid::new_v4().to_string();
        let group = daemon.cgroup_mount().join(format!("pod{uid}"));
        let folder = daemon.path(&format!("pod-{uid}"));
        fs::create_dir(&group).unwrap();
        fs::create_dir_all(folder.join("volumes/data")).unwrap();
        fs::write(folder.join("volumes/data/disk.img"), vec![0; 1 << 20]).unwrap();
        for file in ["termination", "stdout", "stderr"] {
            fs::write(folder.join(file), "").unwrap();
        }
        Self {
            uid,
            group,
            folder,
            socket: daemon.path("run/pod/vmmd.sock"),
            namespace: None,
            launcher: None,
        }
    }

    fn command(&self, group: &Path) -> Command {
        // The shell is in the cgroup before it becomes the launcher.
        let mut command = Command::new("sh");
        command
            .args(["-c", "echo $$ >\"$0/cgroup.procs\" && exec \"$@\""])
            .arg(group);
        if let Some(namespace) = &self.namespace {
            command.args(["nsenter", &format!("--net=/run/netns/{}", namespace.0)]);
        }
        command
            .arg(vmmd_testing::program("vmmd-pod"))
            .env("VMMD_POD_NAMESPACE", "default")
            .env("VMMD_POD_NAME", "web-1")
            .env("VMMD_POD_UID", &self.uid)
            .env("VMMD_POD_VM", "web")
            .env("VMMD_POD_RUN", "1")
            .env("VMMD_POD_SOCKET", &self.socket)
            .env("VMMD_POD_FOLDER", &self.folder)
            .env("VMMD_POD_TERMINATION_LOG", self.folder.join("termination"))
            .stdin(Stdio::piped());
        command
    }

    pub fn launch(&mut self) {
        let file = |name| File::options().append(true).open(self.folder.join(name)).unwrap();
        let mut command = self.command(&self.group);
        command.stdout(file("stdout")).stderr(file("stderr"));
        self.launcher = Some(command.spawn().unwrap());
    }

    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.folder.join(name)).unwrap()
    }

    pub async fn says(&self, text: &str) {
        within(async || self.read("stderr").contains(text).then_some(())).await;
    }

    pub async fn prints(&self, text: &str) {
        within(async || self.read("stdout").contains(text).then_some(())).await;
    }

    pub fn type_in(&mut self, line: &str) {
        let stdin = self.launcher.as_mut().unwrap().stdin.as_mut().unwrap();
        stdin.write_all(line.as_bytes()).unwrap();
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(self.launcher.as_ref().unwrap());
        kill_process(pid, signal).unwrap();
    }

    pub async fn ended(&mut self) -> ExitStatus {
        let launcher = self.launcher.as_mut().unwrap();
        within(async || launcher.try_wait().unwrap()).await
    }

    pub fn is_ready(&self) -> bool {
        let mut command = self.command(&self.group);
        command
            .arg("ready")
            .stderr(Stdio::null())
            .status()
            .unwrap()
            .success()
    }

    /// A VM of the pod with the disk of its volume.
    pub fn vm(&self, daemon: &Daemon, change: impl FnOnce(&mut v1::VmSpec)) -> v1::Vm {
        self.vm_with(daemon, "", change)
    }

    pub fn vm_with(&self, daemon: &Daemon, options: &str, change: impl FnOnce(&mut v1::VmSpec)) -> v1::Vm {
        daemon.manifest_with("web", options, |spec| {
            spec.pod = Some(v1::PodSpec {
                uid: self.uid.clone(),
            });
            spec.disks = vec![v1::DiskSpec {
                name: "root".into(),
                source: Some(v1::disk_spec::Source::PodVolume("data".into())),
                ..Default::default()
            }];
            change(spec);
        })
    }

    /// Starts the launcher and the VM.
    async fn run(&mut self, daemon: &Daemon) -> v1::Vm {
        self.launch();
        self.says("WaitingForVm").await;
        daemon.create(self.vm(daemon, |_| {})).await.unwrap();
        daemon.start_vm("web").await.unwrap()
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        if let Some(launcher) = &mut self.launcher {
            let _ = launcher.kill();
            let _ = launcher.wait();
        }
        for group in [self.group.join("vmm"), self.group.clone()] {
            let deadline = Instant::now() + PATIENCE;
            while group.exists() && Instant::now() < deadline {
                let pids = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
                pids.lines()
                    .filter_map(|pid| Pid::from_raw(pid.parse().ok()?))
                    .filter(|pid| *pid != rustix::process::getpid())
                    .for_each(end);
                let _ = fs::remove_dir(&group);
            }
        }
    }
}

pub async fn pods(daemon: &Daemon) -> PodServiceClient<Channel> {
    PodServiceClient::new(connect(daemon.folder.path()).await)
}

pub fn cgroup_of(pid: Pid) -> String {
    fs::read_to_string(format!("/proc/{}/cgroup", pid.as_raw_nonzero())).unwrap()
}

#[tokio::test]
async fn launcher_gets_its_vm_with_the_disk_of_its_volume() {
    let daemon = Daemon::start().await;
    let mut pod = Pod::new(&daemon);
    fs::create_dir_all(pod.folder.join("secrets/init")).unwrap();
    fs::write(pod.folder.join("secrets/init/userData"), "#cloud-config\n").unwrap();
    let mut pods = pods(&daemon).await;
    let watch = pods.watch_pods(v1::WatchPodsRequest {}).await;
    let mut watch = watch.unwrap().into_inner();
    let mut change = async || watch.next().await.unwrap().unwrap().change.unwrap();
    assert_eq!(change().await, Change::All(v1::PodSet::default()));
    pod.launch();
    let Change::Connected(connected) = change().await else {
        panic!("it is not connected");
    };
    let names = [
        &connected.uid,
        &connected.namespace,
        &connected.name,
        &connected.vm,
    ];
    assert_eq!(names, [&pod.uid, "default", "web-1", "web"]);
    assert_eq!((connected.run, connected.files.len()), (1, 0));
    assert_eq!(connected.volumes[0].kind(), v1::PodVolumeKind::Directory);
    let request = v1::GetPodRequest { uid: pod.uid.clone() };
    let whole = pods.get_pod(request).await.unwrap().into_inner().pod.unwrap();
    assert_eq!(whole.files[0].path, "init/userData");
    assert_eq!(whole.files[0].content, b"#cloud-config\n");
    assert!(!pod.is_ready());

    daemon.create(pod.vm(&daemon, |_| {})).await.unwrap();
    let second = daemon.create(pod.vm(&daemon, |_| {})).await.unwrap_err();
    assert!(["VM_EXISTS", "POD_HAS_VM"].contains(&refusal(&second).1.as_str()));
    let vm = daemon.start_vm("web").await.unwrap();
    let group = format!("/pod{}/vmm", pod.uid);
    assert!(cgroup_of(vm_pid(&vm)).contains(&format!("0::{group}\n")));
    pod.prints("booted web").await;
    pod.says("RUNNING").await;
    assert!(pod.is_ready());
    let files = fs::read_dir(format!("/proc/{}/fd", vm_pid(&vm).as_raw_nonzero())).unwrap();
    let image = pod.folder.join("volumes/data/disk.img");
    assert!(
        files
            .flatten()
            .any(|file| fs::read_link(file.path()).is_ok_and(|path| path == image))
    );
    pod.type_in("hello\n");
    pod.prints("hello").await;
    pod.type_in("poweroff\n");
    assert_eq!(pod.ended().await.code(), Some(0));
    assert_eq!(pod.read("termination"), "GuestShutdown");
    assert_eq!(change().await, Change::Disconnected(pod.uid.clone()));
    assert!(!pod.group.join("vmm").exists());
}

#[tokio::test]
async fn vm_without_its_launcher_or_image_is_refused() {
    let daemon = Daemon::start().await;
    let mut pod = Pod::new(&daemon);
    daemon.create(pod.vm(&daemon, |_| {})).await.unwrap();
    let refused = daemon.start_vm("web").await.unwrap_err();
    assert_eq!(refusal(&refused), (Code::Unavailable, "POD_NOT_CONNECTED".into()));
    daemon.delete("web", true).await.unwrap();

    let image = pod.folder.join("volumes/data/disk.img");
    fs::rename(&image, pod.folder.join("secret")).unwrap();
    symlink(pod.folder.join("secret"), &image).unwrap();
    pod.launch();
    pod.says("WaitingForVm").await;
    let name = |vm: v1::Vm, name: &str| v1::Vm {
        metadata: crate::harness::metadata_of(name),
        ..vm
    };
    daemon
        .create(name(pod.vm(&daemon, |_| {}), "link"))
        .await
        .unwrap();
    let refused = daemon.start_vm("link").await.unwrap_err();
    assert_eq!(refusal(&refused).1, "PATH_NOT_ALLOWED", "{refused}");
    assert!(
        refused.message().contains("disk.img in volume \"data\""),
        "{refused}"
    );
    // A failed start of a VM that nothing starts again is the end of the pod.
    assert_eq!(pod.ended().await.code(), Some(1));
    assert!(pod.read("termination").starts_with("PathNotAllowed: "));
}

#[tokio::test]
async fn process_outside_of_its_pod_is_refused() {
    let daemon = Daemon::start().await;
    let (pod, mut other) = (Pod::new(&daemon), Pod::new(&daemon));
    let output = pod.command(daemon.cgroup_mount().as_path()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.code() == Some(1) && said.contains("not that of a pod"),
        "{said}"
    );
    other.group.clone_from(&pod.group);
    let output = other.command(&pod.group).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.code() == Some(1) && said.contains("claims the pod"),
        "{said}"
    );
    assert!(other.read("termination").starts_with("PodRefused: "));
    other.group = daemon.cgroup_mount().join(format!("pod{}", other.uid));
}

#[tokio::test]
async fn launcher_and_vm_survive_a_kill_of_the_daemon() {
    let mut daemon = Daemon::start().await;
    let mut pod = Pod::new(&daemon);
    let pid = vm_pid(&pod.run(&daemon).await);
    pod.prints("booted web").await;
    daemon.kill();
    pod.says("connecting again").await;
    daemon.relaunch().await;
    within(async || (pod.read("stderr").matches("RUNNING").count() >= 1).then_some(())).await;
    let vm = daemon.get("web").await.unwrap();
    assert_eq!(vm_pid(&vm), pid);
    let mut pods = pods(&daemon).await;
    within(async || {
        let request = v1::GetPodRequest { uid: pod.uid.clone() };
        pods.get_pod(request).await.ok().map(drop)
    })
    .await;
    pod.type_in("again\n");
    pod.prints("again").await;
    assert_eq!(pod.read("stdout").matches("booted web").count(), 1);
    pod.type_in("poweroff\n");
    assert_eq!(pod.ended().await.code(), Some(0));
    assert!(!pod.group.join("vmm").exists());
}

#[tokio::test]
async fn killed_launcher_takes_its_vm_along_for_good() {
    let daemon = Daemon::configured("[restart]\nfirst_ms = 1\n").await;
    let mut pod = Pod::new(&daemon);
    pod.launch();
    pod.says("WaitingForVm").await;
    let vm = pod.vm(&daemon, |spec| spec.run_policy = RunPolicy::AlwaysOn.into());
    daemon.create(vm).await.unwrap();
    daemon.wait_phase("web", VmPhase::Running).await;
    pod.signal(Signal::KILL);
    let status = daemon.wait_phase("web", VmPhase::Failed).await;
    let exit = status.last_exit.unwrap();
    assert_eq!(
        (exit.reason(), status.reason.as_str()),
        (ExitReason::LauncherGone, "LauncherGone")
    );
    assert!(
        status
            .restart
            .is_none_or(|restart| restart.next_start_time.is_none())
    );
    assert_eq!(daemon.vmm_processes(), []);
}

#[tokio::test]
async fn sigterm_stops_the_vm_whatever_its_run_policy() {
    let daemon = Daemon::configured("[restart]\nfirst_ms = 1\n").await;
    let mut pod = Pod::new(&daemon);
    pod.launch();
    pod.says("WaitingForVm").await;
    let vm = pod.vm(&daemon, |spec| spec.run_policy = RunPolicy::AlwaysOn.into());
    daemon.create(vm).await.unwrap();
    daemon.wait_phase("web", VmPhase::Running).await;
    pod.says("RUNNING").await;
    pod.signal(Signal::TERM);
    assert_eq!(pod.ended().await.code(), Some(0));
    assert_eq!(pod.read("termination"), "Stopped");
    let status = daemon.get("web").await.unwrap().status.unwrap();
    assert_eq!(status.phase(), VmPhase::Stopped);
}

#[tokio::test]
async fn reports_reach_the_launcher_until_it_has_a_vm() {
    let daemon = Daemon::start().await;
    let mut pod = Pod::new(&daemon);
    let mut pods = pods(&daemon).await;
    let report = |report: PodReport, reason: &str| v1::ReportPodRequest {
        uid: pod.uid.clone(),
        report: report.into(),
        reason: reason.into(),
        message: "because".into(),
    };
    let waiting = report(PodReport::Waiting, "Importing");
    let refused = report(PodReport::Refused, "NotNamed");
    let unknown = pods.report_pod(waiting.clone()).await.unwrap_err();
    assert_eq!(refusal(&unknown).1, "POD_NOT_FOUND");
    pod.launch();
    pod.says("WaitingForVm").await;
    pods.report_pod(waiting.clone()).await.unwrap();
    pod.says("Importing: because").await;
    for wrong in ["", "importing", "In Parts", &"X".repeat(65)] {
        let request = v1::ReportPodRequest {
            reason: wrong.into(),
            ..waiting.clone()
        };
        let wrong = pods.report_pod(request).await.unwrap_err();
        assert_eq!(wrong.code(), Code::InvalidArgument);
    }
    daemon.create(pod.vm(&daemon, |_| {})).await.unwrap();
    let has_vm = pods.report_pod(refused.clone()).await.unwrap_err();
    assert_eq!(refusal(&has_vm).1, "POD_HAS_VM");
    daemon.delete("web", true).await.unwrap();
    pod.ended().await;
    pod.launch();
    within(async || (pod.read("stderr").matches("WaitingForVm").count() == 2).then_some(())).await;
    pods.report_pod(refused).await.unwrap();
    assert_eq!(pod.ended().await.code(), Some(1));
    assert_eq!(pod.read("termination"), "NotNamed: because");
}

/// A connection of this process, which is in the pod's cgroup meanwhile.
struct Hostile {
    stream: UnixStream,
    receiver: Receiver<DaemonMessage>,
    back: PathBuf,
}

impl Hostile {
    fn connect(daemon: &Daemon, pod: &Pod) -> Self {
        fs::write(pod.group.join("cgroup.procs"), std::process::id().to_string()).unwrap();
        let stream = UnixStream::connect(&pod.socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self {
            stream,
            receiver: Receiver::new(),
            back: daemon.cgroup_mount(),
        }
    }

    fn send(&self, kind: launcher_message::Kind, fds: &[BorrowedFd<'_>]) {
        let message = LauncherMessage { kind: Some(kind) };
        // The daemon may have closed the connection.
        let _closed = vmmd_wire::send_all(&self.stream, &message, fds);
    }

    fn hello(&self, pod: &Pod, volumes: usize) {
        let network = File::open("/proc/self/ns/net").unwrap();
        let (lifeline, end) = std::io::pipe().unwrap();
        let folder = File::open(&pod.folder).unwrap();
        let mut fds = vec![network.as_fd(), lifeline.as_fd()];
        fds.extend((0..volumes).map(|_| folder.as_fd()));
        let volumes = (0..volumes).map(|number| Volume {
            name: format!("v{number}"),
            ..Volume::default()
        });
        let hello = Hello {
            name: "web-1".into(),
            namespace: "default".into(),
            uid: pod.uid.clone(),
            vm: "web".into(),
            run: 1,
            volumes: volumes.collect(),
            ..Hello::default()
        };
        self.send(launcher_message::Kind::Hello(hello), &fds);
        // The lifeline stays open as long as the test.
        std::mem::forget(end);
    }

    /// The reason of the refusal.
    fn refused(mut self) -> String {
        loop {
            let received = vmmd_wire::receive(&self.stream, &mut self.receiver);
            let (message, _) = received.unwrap().expect("it was closed without a reason");
            if let Some(daemon_message::Kind::Ended(ended)) = message.kind {
                assert_eq!((ended.code, ended.reason.as_str()), (1, "PodRefused"));
                return ended.message;
            }
        }
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        fs::write(self.back.join("cgroup.procs"), std::process::id().to_string()).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_launchers_are_refused_within_bounds() {
    let daemon = Daemon::start().await;
    let pod = Pod::new(&daemon);
    let hostile = Hostile::connect(&daemon, &pod);
    hostile.hello(&pod, MAX_VOLUMES + 1);
    let message = hostile.refused();
    assert!(
        message.contains("descriptors") || message.contains("volumes"),
        "{message}"
    );

    let mut hostile = Hostile::connect(&daemon, &pod);
    hostile.stream.write_all(&u32::MAX.to_le_bytes()).unwrap();
    assert!(hostile.refused().contains("too long"));

    let hostile = Hostile::connect(&daemon, &pod);
    for number in 0..80 {
        let piece = FilePiece {
            path: format!("a/{number}"),
            content: vec![0; MAX_PIECE],
        };
        hostile.send(launcher_message::Kind::File(piece), &[]);
    }
    assert!(hostile.refused().contains("too many files"));

    let hostile = Hostile::connect(&daemon, &pod);
    hostile.send(launcher_message::Kind::Stop(Stop { grace_ms: 0 }), &[]);
    assert!(hostile.refused().contains("no Hello"));
    assert!(
        pods(&daemon)
            .await
            .get_pod(v1::GetPodRequest { uid: pod.uid.clone() })
            .await
            .is_err()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn launcher_that_does_not_read_can_stop_its_vm() {
    let daemon = Daemon::start().await;
    let (pod, mut other) = (Pod::new(&daemon), Pod::new(&daemon));
    let hostile = Hostile::connect(&daemon, &pod);
    hostile.hello(&pod, 0);
    let mut pods = pods(&daemon).await;
    within(async || {
        let request = v1::GetPodRequest { uid: pod.uid.clone() };
        pods.get_pod(request).await.ok().map(drop)
    })
    .await;
    let vm = pod.vm(&daemon, |spec| spec.disks.clear());
    daemon.create(vm).await.unwrap();
    daemon.start_vm("web").await.unwrap();
    let input = vmmd_pod::message::Input {
        bytes: b"print 4000000\n".to_vec(),
    };
    hostile.send(launcher_message::Kind::Input(input), &[]);
    // Another pod is served meanwhile.
    other.launch();
    other.says("WaitingForVm").await;
    hostile.send(launcher_message::Kind::Stop(Stop { grace_ms: 60_000 }), &[]);
    daemon.wait_phase("web", VmPhase::Stopped).await;
    drop(hostile);
    tokio::time::timeout(Duration::from_secs(20), async {
        while pods
            .get_pod(v1::GetPodRequest { uid: pod.uid.clone() })
            .await
            .is_ok()
        {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
}
