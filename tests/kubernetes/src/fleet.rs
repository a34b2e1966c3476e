//! Nodes: a `vmmd` with the mock `vmm` and a `vmmd-kube agent` each; and the controllers, which any cluster has more than one of.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, chown},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use serde_json::{Value, json};
use vmmd_api::v1::{
    self, NetworkMode, VmPhase, disk_service_client::DiskServiceClient,
    network_service_client::NetworkServiceClient,
};

use vmmd_testing::harness::{self, Daemon, connect};

use crate::{
    certificates::Authority,
    cluster::{Cluster, NAMESPACE},
    eventually,
    program::{self, Program},
    vms::{self, Run, Vm},
};

/// Agents run as this user, and only in this group, which gives them the agent role in their
/// daemon. The number is otherwise unused.
const AGENT: u32 = 990_021;

/// A node of the cluster.
pub struct Node {
    /// As Kubernetes knows it.
    pub name: String,
    /// Its daemon.
    pub daemon: Daemon,
    /// Its Kubernetes agent.
    pub agent: Program,
}

impl Node {
    /// The disks that its daemon keeps.
    pub async fn disks(&self) -> Vec<v1::Disk> {
        let channel = harness::connect(self.daemon.folder.path()).await;
        let request = v1::ListDisksRequest::default();
        let answer = DiskServiceClient::new(channel).list_disks(request).await;
        answer.unwrap().into_inner().disks
    }
}

/// A cluster with nodes and controllers.
pub struct Fleet {
    /// The controllers of VirtualMachines.
    pub controllers: Vec<Program>,
    /// The nodes.
    pub nodes: Vec<Node>,
    /// Authority of the daemons' certificates.
    authority: Authority,
    /// The control plane. It is the last to end.
    pub cluster: Cluster,
}

impl Fleet {
    /// A control plane with our manifests, `nodes` nodes and `controllers` controllers, once all nodes are ready for pods.
    pub async fn start(nodes: usize, controllers: usize) -> Self {
        Self::start_with(nodes, controllers, "").await
    }

    /// With more lines of configuration of the daemons.
    pub async fn start_with(nodes: usize, controllers: usize, extra: &str) -> Self {
        Self::start_in(nodes, controllers, extra, None).await
    }

    /// With daemons in a network namespace, where they may have networks.
    pub async fn start_in(nodes: usize, controllers: usize, extra: &str, namespace: Option<&str>) -> Self {
        let cluster = Cluster::start().await;
        // Guests have users of their own, and find their files in here.
        fs::set_permissions(cluster.path(""), fs::Permissions::from_mode(0o711)).unwrap();
        fs::create_dir(cluster.path("once")).unwrap();
        fs::write(cluster.path("kernel"), [1; 4096]).unwrap();
        cluster.install();
        let mut fleet = Self {
            controllers: cluster.controllers(controllers).await,
            nodes: Vec::new(),
            authority: Authority::new(),
            cluster,
        };
        for number in 0..nodes {
            fleet.add_node(number, extra, namespace).await;
        }
        fleet.nodes_ready(Duration::from_secs(60)).await;
        fleet
    }

    async fn add_node(&mut self, number: usize, extra: &str, namespace: Option<&str>) {
        let name = format!("node-{number}");
        let cluster = &self.cluster;
        let address = cluster.address(u8::try_from(11 + number).unwrap());
        let folder = tempfile::Builder::new()
            .prefix("vmmd")
            .tempdir_in("/tmp")
            .unwrap();
        fs::write(folder.path().join("log.txt"), "").unwrap();
        // It finds the socket in here.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o711)).unwrap();
        let mut extra = format!("agent_group = '{AGENT}'\nrestart = {{ first_ms = 200 }}\n{extra}");
        // The loopback interface of a namespace may be down.
        let migration_address = namespace.is_none().then(|| format!("{address}:7443"));
        if let Some(address) = &migration_address {
            extra += &self.peers(&folder.path().join("tls"), address);
        }
        let daemon = Daemon::with(folder, &extra, namespace.map(str::to_owned)).await;
        let config = cluster.service_account(&name, NAMESPACE, "vmmd-kube-agent").await;
        let own = daemon.path("agent");
        fs::create_dir(&own).unwrap();
        chown(&own, Some(AGENT), Some(AGENT)).unwrap();
        let mut arguments = vec![
            "agent".to_owned(),
            format!("--kubeconfig={}", config.display()),
            format!("--node-name={name}"),
            format!("--socket={}", daemon.path("run/vmmd.sock").display()),
            format!("--address={address}"),
            format!("--lock-file={}", own.join("lock").display()),
            format!("--client-ca={}", cluster.path("pki/ca.crt").display()),
            // On all addresses, where tests of other processes may listen as well.
            format!(
                "--port={}",
                10_400 + std::process::id() % 2500 * 8 + u32::try_from(number).unwrap()
            ),
        ];
        arguments.extend(migration_address.map(|address| format!("--migration-address={address}")));
        let mut agent = cluster.program(&format!("agent-{number}"), arguments).user(AGENT);
        agent.launch();
        self.nodes.push(Node { name, daemon, agent });
    }

    /// Makes the certificates by which a daemon moves VMs to others, and says how it is configured.
    fn peers(&self, folder: &Path, address: &str) -> String {
        fs::create_dir(folder).unwrap();
        let (ip, _) = address.split_once(':').unwrap();
        self.authority.write(folder);
        self.authority.server(folder, "server", ip.parse().unwrap());
        self.authority.peer(folder);
        let file = |name: &str| folder.join(name);
        format!(
            "\n[tcp]\nlisten = {address:?}\ncertificate = {:?}\nkey = {:?}\nclient_ca = {:?}\npeer_certificate = {:?}\npeer_key = {:?}\n",
            file("server.crt"),
            file("server.key"),
            file("ca.crt"),
            file("peer.crt"),
            file("peer.key")
        )
    }

    /// Makes a network on a node whose daemon is in a namespace.
    pub async fn make_network(&self, node: usize, name: &str, cidr: &str) {
        let daemon = &self.nodes[node].daemon;
        let mut networks = NetworkServiceClient::new(connect(daemon.folder.path()).await);
        let spec = v1::NetworkSpec {
            mode: NetworkMode::Isolated.into(),
            ipv4_cidr: cidr.into(),
            ..v1::NetworkSpec::default()
        };
        let metadata = v1::ObjectMetadata {
            name: name.into(),
            ..v1::ObjectMetadata::default()
        };
        let request = v1::CreateNetworkRequest {
            network: Some(v1::Network {
                metadata: Some(metadata),
                spec: Some(spec),
                status: None,
            }),
            request_id: format!("make-{name}"),
        };
        networks.create_network(request).await.unwrap();
    }

    /// Waits until each node is ready and takes pods that tolerate its own taint.
    pub async fn nodes_ready(&mut self, patience: Duration) {
        let (cluster, nodes, controllers) = (&self.cluster, &mut self.nodes, &mut self.controllers);
        eventually("all nodes are ready", patience, async || {
            for controller in controllers.iter_mut() {
                controller.check().unwrap();
            }
            for node in nodes.iter_mut() {
                node.agent.check().unwrap();
                cluster.node_ready(&node.name).await?;
            }
            Ok(())
        })
        .await;
    }

    /// A manifest of a small VM that runs always. A second run of it at the same time, wherever, is found by [`Fleet::ran_twice`].
    pub fn vm(&self, name: &str) -> Value {
        let once = self.once(name);
        if !once.exists() {
            fs::write(&once, "").unwrap();
            fs::set_permissions(&once, fs::Permissions::from_mode(0o666)).unwrap();
        }
        json!({
            "apiVersion": "vmmd.dev/v1alpha1",
            "kind": "VirtualMachine",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {
                "vm": {
                    "cpu": {"cores": 1},
                    "memory": {"sizeBytes": "128Mi"},
                    "boot": {"linux": {
                        "kernel": self.cluster.path("kernel"),
                        "cmdline": format!("mock.exclusive={}", once.display()),
                    }},
                    "runPolicy": "always_on",
                },
            },
        })
    }

    fn once(&self, name: &str) -> PathBuf {
        self.cluster.path("once").join(name)
    }

    /// VMs of which two runs were seen at the same time, by the mock itself.
    pub fn ran_twice(&self) -> Vec<String> {
        let files = fs::read_dir(self.cluster.path("once")).unwrap().flatten();
        let twice = files.filter(|file| file.metadata().is_ok_and(|file| file.len() > 0));
        twice
            .map(|file| file.file_name().to_string_lossy().into_owned())
            .collect()
    }

    /// For each node, its VMs that have a process, as its daemon says.
    pub async fn running(&self) -> Vec<Vec<Run>> {
        let mut all = Vec::new();
        for node in &self.nodes {
            let vms = node.daemon.list().await;
            all.push(vms.iter().filter(|vm| runs(vm)).map(run).collect());
        }
        all
    }

    /// How many VMs have left for another node, as the daemons' events say.
    pub async fn moves(&self) -> usize {
        let mut moves = 0;
        for node in &self.nodes {
            moves += node.daemon.events("Moved").await.len();
        }
        moves
    }

    async fn all_up(&self) -> bool {
        let mut all = true;
        for node in &self.nodes {
            let vms = node.daemon.list().await;
            all &= vms
                .iter()
                .all(|vm| vm.status.as_ref().unwrap().phase() == VmPhase::Running);
        }
        all
    }

    /// The VMs as the API server has them.
    pub async fn vms(&self) -> Result<Vec<Vm>, String> {
        vms::list(&self.cluster.api).await
    }

    /// Waits until these VMs and no others are there, all Running, each on exactly one node, by the API server and by the daemons.
    pub async fn all_run(&self, names: &[String], patience: Duration) {
        eventually("all VMs run", patience, async || self.converged(names).await).await;
    }

    /// Waits for the same after faults, and restarts programs that end because of them.
    pub async fn recovered(&mut self, names: &[String], patience: Duration) {
        eventually("all VMs run again", patience, async || {
            self.programs().for_each(Program::revive);
            self.converged(names).await
        })
        .await;
    }

    fn programs(&mut self) -> impl Iterator<Item = &mut Program> {
        let ours = self
            .controllers
            .iter_mut()
            .chain(self.nodes.iter_mut().map(|node| &mut node.agent));
        ours.chain(self.cluster.parts())
    }

    /// Programs that ended by themselves, and how often.
    pub fn ended_by_themselves(&mut self) -> Vec<(String, u32)> {
        program::ended_by_themselves(self.programs())
    }

    /// Whether all is as [`Fleet::all_run`] wants it.
    pub async fn converged(&self, names: &[String]) -> Result<(), String> {
        let vms = vms::running(&self.cluster.api, names).await?;
        let nodes = self.nodes.iter().map(|node| node.name.as_str());
        let found: Vec<_> = nodes.zip(self.running().await).collect();
        vms::each_once(&vms, &found)?;
        if !self.all_up().await {
            return Err(format!("not all have started: {vms:?}"));
        }
        Ok(())
    }

    /// Deletes all VMs, and waits until nothing of them is left. Checks that no VM ran twice at the same time.
    pub async fn end(&self, patience: Duration) {
        self.cluster
            .kubectl(&["delete", "vmmvm", "--all", "--timeout=60s"]);
        self.nothing_left(patience).await;
        assert_eq!(self.ran_twice(), [""; 0]);
    }

    /// Waits until no VM, no placeholder, no process, no cgroup and no disk is left.
    pub async fn nothing_left(&self, patience: Duration) {
        eventually("nothing is left", patience, async || {
            let known = vms::left(&self.cluster.api).await?;
            let mut left = Vec::new();
            for node in &self.nodes {
                let vms: Vec<_> = node.daemon.list().await.iter().map(name).collect();
                let (processes, groups) = (node.daemon.vmm_processes(), node.daemon.cgroups());
                left.push((vms, processes, groups, node.disks().await));
            }
            let clean = left.iter().all(|(vms, processes, groups, disks)| {
                vms.is_empty() && processes.is_empty() && groups.is_empty() && disks.is_empty()
            });
            if !clean || !known.is_empty() {
                return Err(format!("{known:?} {left:?}"));
            }
            Ok(())
        })
        .await;
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        if !thread::panicking() {
            return;
        }
        let agents = self.nodes.iter().map(|node| &node.agent);
        for program in self.controllers.iter().chain(agents) {
            eprintln!("--- {}\n{}", program.name, program.tail(40));
        }
        for node in &self.nodes {
            let log = fs::read_to_string(node.daemon.path("log.txt")).unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            eprintln!(
                "--- vmmd of {}\n{}",
                node.name,
                lines[lines.len().saturating_sub(30)..].join("\n")
            );
        }
    }
}

fn name(vm: &v1::Vm) -> String {
    vm.metadata.as_ref().unwrap().name.clone()
}

fn run(vm: &v1::Vm) -> Run {
    let labels = &vm.metadata.as_ref().unwrap().labels;
    let counts = vm.status.as_ref().unwrap().counts.as_ref();
    let starts = counts.map_or(0, |counts| counts.automatic_starts);
    Run {
        uid: labels.get("vmmd.dev/machine-uid").cloned().unwrap_or_default(),
        starts: starts.try_into().unwrap(),
    }
}

fn runs(vm: &v1::Vm) -> bool {
    let phase = vm.status.as_ref().unwrap().phase();
    matches!(
        phase,
        VmPhase::Starting | VmPhase::Running | VmPhase::Paused | VmPhase::Stopping
    )
}
