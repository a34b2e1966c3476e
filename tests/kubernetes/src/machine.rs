//! Machines of a cluster with a real kubelet, kube-proxy, containerd and CNI plugins, each in a network, mount and process namespace of its own.
//!
//! The test's thread has a network namespace as well, with the control plane in it. All programs that the thread starts inherit it.

use std::{
    fs,
    net::Ipv4Addr,
    os::{fd::AsFd as _, unix::process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use rustix::{
    process::{Pid, Signal, kill_process},
    thread::{LinkNameSpaceType, move_into_link_name_space},
};
use serde_json::{Value, json};
use vmmd_testing::namespace::Namespace;

use crate::{cluster::Cluster, eventually, program::Program};

/// The network between the machines: /24. The control plane has address 1, machine N has 11 + N.
pub const NETWORK: [u8; 3] = [10, 99, 0];
/// Time for a program or a pod to become ready, beside other tests.
pub const READY: Duration = Duration::from_secs(120);
/// The image that holds the network namespace of a pod, with busybox for tests.
pub const BUSYBOX: &str = "vmmd.test/busybox:1";

/// Moves this thread into a network namespace with the bridge of the cluster. It is removed with the returned value.
pub fn enter_network() -> Namespace {
    let namespace = Namespace::new();
    let file = fs::File::open(format!("/run/netns/{}", namespace.0)).unwrap();
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
    let [a, b, c] = NETWORK;
    ip("link set lo up");
    ip("link add cluster0 type bridge");
    ip(&format!("address add {a}.{b}.{c}.1/24 dev cluster0"));
    ip("link set cluster0 up");
    namespace
}

fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {output:?}");
}

/// A machine of the cluster.
pub struct Machine {
    /// As Kubernetes knows it.
    pub name: String,
    /// Its address.
    pub address: Ipv4Addr,
    /// The container runtime.
    pub containerd: Program,
    /// The kubelet.
    pub kubelet: Program,
    /// The proxy of Services.
    pub proxy: Program,
    /// Its network namespace, for its vmmd.
    pub namespace: Namespace,
    folder: PathBuf,
    bin: PathBuf,
    first: Child,
    cgroup: String,
}

impl Machine {
    /// Starts all programs of machine `number`, whose pods have addresses of `10.244.NUMBER.0/24`, and waits until Kubernetes sees it as ready.
    pub async fn start(cluster: &Cluster, number: u8) -> Self {
        let name = format!("machine-{number}");
        let folder = cluster.path(&name);
        for part in ["run", "log", "kubelet", "containerd", "cni"] {
            fs::create_dir_all(folder.join(part)).unwrap();
        }
        let [a, b, c] = NETWORK;
        let address = Ipv4Addr::new(a, b, c, 11 + number);
        let namespace = Namespace::new();
        let inner = &namespace.0;
        ip(&format!(
            "link add m{number} type veth peer name eth0 netns {inner}"
        ));
        ip(&format!("link set m{number} master cluster0 up"));
        ip(&format!("route add 10.244.{number}.0/24 via {address}"));
        namespace.ip("link set lo up");
        namespace.ip(&format!("address add {address}/24 dev eth0"));
        namespace.ip("link set eth0 up");
        namespace.ip(&format!("route add default via {a}.{b}.{c}.1"));
        let first = hold(&folder, inner);
        // Its children get the process namespace, and `sleep` is the first of them.
        let pid = eventually("the machine is there", READY, async || {
            let children = format!("/proc/{0}/task/{0}/children", first.id());
            let pid = fs::read_to_string(children).map_err(|error| error.to_string())?;
            fs::metadata(folder.join("run/ready")).map_err(|error| error.to_string())?;
            pid.trim().parse::<u32>().map_err(|error| error.to_string())
        })
        .await;
        let parts = cluster.programs().to_owned();
        let bin = parts.join("bin");
        let program = |name: &str, arguments: Vec<String>| {
            Program::new(
                &format!("{name}-{number}"),
                &bin.join(name),
                arguments,
                &cluster.path("logs"),
            )
            .env("PATH", format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", bin.display()))
            .env("XTABLES_LIBDIR", parts.join("xtables"))
            .inside(pid)
        };
        let settings = folder.join("containerd.toml");
        fs::write(&settings, runtime_settings(&folder, &parts)).unwrap();
        let network = pod_network(number, &folder).to_string();
        fs::write(folder.join("cni/10-pods.conflist"), network).unwrap();
        let config = cluster.path("config/admin.yaml").display().to_string();
        let cgroup = format!("vmmd-test-{}", inner.trim_start_matches("vmmd-test-"));
        for hierarchy in hierarchies() {
            fs::create_dir(hierarchy.join(&cgroup)).unwrap();
        }
        let mut machine = Self {
            containerd: program("containerd", vec![format!("--config={}", settings.display())]),
            kubelet: program("kubelet", kubelet(&name, address, &config, &cgroup)),
            proxy: program(
                "kube-proxy",
                vec![
                    format!("--kubeconfig={config}"),
                    format!("--hostname-override={name}"),
                    "--proxy-mode=iptables".into(),
                    "--cluster-cidr=10.244.0.0/16".into(),
                    "--conntrack-max-per-core=0".into(),
                    "--conntrack-tcp-timeout-established=0".into(),
                    "--conntrack-tcp-timeout-close-wait=0".into(),
                ],
            ),
            name,
            address,
            namespace,
            folder,
            bin,
            first,
            cgroup,
        };
        machine.containerd.launch();
        let busybox = machine.bin.join("busybox");
        machine
            .import(&image(cluster, BUSYBOX, &busybox, &["sleep", "2147483647"]))
            .await;
        machine.kubelet.launch();
        machine.proxy.launch();
        machine.ready(cluster).await;
        machine
    }

    /// Waits until Kubernetes sees the machine as ready.
    pub async fn ready(&mut self, cluster: &Cluster) {
        eventually("the machine is ready", READY, async || {
            for program in [&mut self.containerd, &mut self.kubelet, &mut self.proxy] {
                program.check().unwrap();
            }
            cluster.node_ready(&self.name).await
        })
        .await;
    }

    /// Imports images from an archive, when the runtime answers.
    pub async fn import(&self, archive: &Path) {
        let socket = self.folder.join("run/containerd/containerd.sock");
        eventually("an image is imported", READY, async || {
            let output = Command::new(self.bin.join("ctr"))
                .args(["--namespace=k8s.io", "--address"])
                .arg(&socket)
                .args(["images", "import", "--no-unpack"])
                .arg(archive)
                .output()
                .unwrap();
            match output.status.success() {
                true => Ok(()),
                false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
            }
        })
        .await;
    }

    /// The folder that is `/var/lib/kubelet` of the machine.
    pub fn kubelet_folder(&self) -> PathBuf {
        self.folder.join("kubelet")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        for program in [&mut self.proxy, &mut self.kubelet, &mut self.containerd] {
            program.kill();
        }
        // All processes of the machine end with its first one.
        if let Ok(children) = fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.first.id()))
            && let Some(pid) = children.trim().parse().ok().and_then(Pid::from_raw)
        {
            let _ = kill_process(pid, Signal::KILL);
        }
        let _ = self.first.wait();
        for hierarchy in hierarchies() {
            remove_group(&hierarchy.join(&self.cgroup));
        }
    }
}

/// Starts the first process of a machine in a network namespace.
fn hold(folder: &Path, network: &str) -> Child {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/machine-hold.sh");
    Command::new("nsenter")
        .arg(format!("--net=/run/netns/{network}"))
        .args([
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--mount-proc",
            "--propagation=private",
        ])
        .arg("--kill-child=KILL")
        .arg(script)
        .arg(folder)
        .stdin(Stdio::null())
        .process_group(0)
        .spawn()
        .unwrap()
}

/// Mounts of cgroups, one for each hierarchy.
fn hierarchies() -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let lines = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    lines
        .filter(|parts| parts[2].starts_with("cgroup"))
        .map(|parts| parts[1].into())
        .collect()
}

/// Removes a cgroup with all below it; the last processes may still be ending.
fn remove_group(group: &Path) {
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_group(&entry.path());
        }
    }
    for _ in 0..100 {
        if fs::remove_dir(group).is_ok() || !group.exists() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn kubelet(name: &str, address: Ipv4Addr, config: &str, cgroup: &str) -> Vec<String> {
    [
        &format!("--kubeconfig={config}"),
        &format!("--hostname-override={name}"),
        &format!("--node-ip={address}"),
        &format!("--cgroup-root=/{cgroup}"),
        "--container-runtime=remote",
        "--container-runtime-endpoint=unix:///run/containerd/containerd.sock",
        "--cgroup-driver=cgroupfs",
        "--enforce-node-allocatable=",
        "--fail-swap-on=false",
        "--eviction-hard=",
        "--cert-dir=/var/lib/kubelet/pki",
        "--cluster-domain=cluster.local",
        "--anonymous-auth=true",
        "--authorization-mode=AlwaysAllow",
        // The test sees each change soon.
        "--sync-frequency=5s",
        "--node-status-update-frequency=2s",
    ]
    .map(str::to_owned)
    .into()
}

fn runtime_settings(folder: &Path, parts: &Path) -> String {
    format!(
        r#"version = 2
root = "{folder}/containerd"
state = "/run/containerd/state"
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{BUSYBOX}"
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{parts}/cni"
conf_dir = "{folder}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
BinaryName = "{parts}/bin/runc"
SystemdCgroup = false
"#,
        folder = folder.display(),
        parts = parts.display(),
    )
}

fn pod_network(number: u8, folder: &Path) -> Value {
    json!({
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
                "ipam": {
                    "type": "host-local",
                    "dataDir": folder.join("cni/data"),
                    "ranges": [[{"subnet": format!("10.244.{number}.0/24")}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": true}},
        ],
    })
}

/// Writes an archive with an image that has this static program alone, and runs it with these arguments.
pub fn image(cluster: &Cluster, name: &str, program: &Path, arguments: &[&str]) -> PathBuf {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/image.sh");
    let output = Command::new(script)
        .arg(name)
        .arg(program)
        .args(arguments)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let path = cluster.path(&format!("{}.tar", name.replace(['/', ':'], "-")));
    fs::write(&path, output.stdout).unwrap();
    path
}
