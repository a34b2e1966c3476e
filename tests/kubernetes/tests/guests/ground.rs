//! A control plane and controllers on this machine, and two nodes of the cluster in the test node: a daemon with an agent each.

use std::{
    fmt::Display,
    net::{Ipv4Addr, SocketAddrV4},
    thread,
    time::Duration,
};

use serde_json::{Value, json};
use vmmd_kubernetes_tests::{
    cluster::{Cluster, NAMESPACE},
    eventually,
    faults::{Fault, Random},
    program::{self, Program},
    vms::{self, Run},
};
use vmmd_tests::{
    Case,
    node::{Forward, Kernel, Killed, Node as TestNode},
    two_daemons::{self, Daemon, traveller::SMALL},
    vm::VmSpec,
};

use crate::beats::{self, Beats};

/// Number in the daemons' addresses and namespaces, unique among the tests.
const NUMBER: u32 = 31;
/// The node on the guests' network, and the port that it hears guests at.
const NODE: Ipv4Addr = Ipv4Addr::new(10, 78, 210, 1);
const PORT: u16 = 7;
/// The API server's.
const API: u16 = 6443;

/// A unit of systemd in the test node. It is stopped when this is dropped.
struct Unit<'case> {
    node: &'case TestNode,
    name: String,
}

impl<'case> Unit<'case> {
    fn start(case: &'case Case, suffix: &str, properties: &str, command: &str) -> Self {
        let (node, name) = (case.node(), format!("{}-{suffix}", case.name()));
        node.sh(&format!(
            "systemd-run -q --collect --unit={name} {properties} {command}"
        ));
        Self { node, name }
    }
}

impl Drop for Unit<'_> {
    fn drop(&mut self) {
        // A failed test leaves a node that nothing else is done with.
        let _ = self.node.ssh(&format!("systemctl stop {}", self.name));
    }
}

/// A VM that a daemon has.
struct Machine {
    run: Run,
    phase: String,
    /// Of its vmm.
    pid: Option<u64>,
}

/// With the error as a text.
fn said<T>(result: Result<T, impl Display>) -> Result<T, String> {
    result.map_err(|error| format!("{error:#}"))
}

/// A node of the cluster.
struct Node<'case> {
    /// As Kubernetes knows it.
    name: String,
    agent: Unit<'case>,
    daemon: Daemon<'case>,
}

impl Node<'_> {
    fn machines(&self) -> Result<Vec<Machine>, String> {
        let listed = said(self.daemon.try_ctl("get vm -o json"))?;
        let listed: Vec<Value> = said(serde_json::from_str(&listed))?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let machines = listed.iter().map(|vm| Machine {
            run: Run {
                uid: text(&vm["metadata"]["labels"]["vmmd.dev/machine-uid"]),
                // Canonical JSON has 64 bits as a text, and no zeroes.
                starts: text(&vm["status"]["counts"]["automaticStarts"])
                    .parse()
                    .unwrap_or_default(),
            },
            phase: text(&vm["status"]["phase"]),
            pid: vm["status"]["instance"]["pid"].as_u64(),
        });
        Ok(machines.collect())
    }

    /// The VMs, each of which is Running and has the one process that the node knows of.
    fn running(&self) -> Result<Vec<Run>, String> {
        let machines = self.machines()?;
        let other = machines.iter().find(|vm| vm.phase != "VM_PHASE_RUNNING");
        if let Some(vm) = other {
            return Err(format!("{:?} is {} on {}", vm.run, vm.phase, self.name));
        }
        let mut known: Vec<_> = machines.iter().filter_map(|vm| vm.pid).collect();
        let found = self.daemon.processes().into_iter();
        let mut found: Vec<_> = found.map(u64::from).collect();
        known.sort_unstable();
        found.sort_unstable();
        if known != found || known.len() != machines.len() {
            return Err(format!(
                "{}: vmmd says that {known:?} run, the node {found:?}",
                self.name
            ));
        }
        Ok(machines.into_iter().map(|vm| vm.run).collect())
    }

    /// Returns the remains of VMs. Empty when all are gone.
    fn left(&self) -> Result<String, String> {
        Ok(said(self.daemon.try_ctl("get vm -o name"))? + &self.daemon.traces())
    }
}

/// Programs that a fault has killed.
#[derive(Default)]
pub struct Struck {
    /// systemd starts it again.
    unit: Option<Killed>,
    /// The uid of the VirtualMachine whose vmm was killed.
    pub vm: Option<String>,
}

/// All of it.
pub struct Ground<'case> {
    controllers: Vec<Program>,
    nodes: Vec<Node<'case>>,
    _hears: Unit<'case>,
    _api: Forward,
    case: &'case Case,
    bridge: String,
    /// File on the node with the heartbeats of the guests, and the number of bytes that were read.
    heard: String,
    read: usize,
    /// Heartbeats of the guests.
    pub beats: Beats,
    /// The control plane.
    pub cluster: Cluster,
}

impl<'case> Ground<'case> {
    /// Starts all, once both nodes are ready for pods.
    pub async fn start(case: &'case Case, patience: Duration) -> Self {
        let cluster = Cluster::start().await;
        cluster.install();
        let (node, folder) = (case.node(), case.folder());
        let api = node
            .bring_address(SocketAddrV4::new(cluster.address(1), API))
            .unwrap();
        let authority = format!("{folder}/ca.crt");
        node.copy_in(&cluster.path("pki/ca.crt"), &authority).unwrap();
        let bridge = case.bridge();
        let heard = format!("{folder}/heard");
        // Each line is written as a whole, although a receive may return half a line.
        node.sh(&format!(
            "ip addr add {NODE}/24 dev {bridge} && touch {heard} && cat >{folder}/hear <<'SCRIPT'\n\
             while read -r line; do echo \"$line\" >>{heard}; done\nSCRIPT\n"
        ));
        let hears = Unit::start(
            case,
            "hear",
            "",
            &format!("socat -u TCP-LISTEN:{PORT},bind={NODE},reuseaddr,fork 'EXEC:sh {folder}/hear'"),
        );
        let mut nodes = Vec::new();
        for (number, daemon) in two_daemons::pair(case, NUMBER).into_iter().enumerate() {
            daemon.join_bridge(&bridge);
            let name = format!("node-{number}");
            let config = cluster.service_account(&name, NAMESPACE, "vmmd-kube-agent").await;
            let mut config: Value = serde_json::from_slice(&std::fs::read(config).unwrap()).unwrap();
            let server = &mut config["clusters"][0]["cluster"];
            // A name that is in the server's certificate.
            server["server"] = format!("https://localhost:{API}").into();
            server["certificate-authority"] = authority.clone().into();
            let (address, _) = daemon.address().split_once(':').unwrap();
            let files = format!("{folder}/agent-{number}");
            node.sh(&format!("cat >{files}.json <<'CONFIG'\n{config}\nCONFIG\n"));
            // As in vmmd-kube.service.
            let agent = Unit::start(
                case,
                &format!("agent-{number}"),
                "-p Type=notify -p Restart=always -p RestartSec=1s -p StartLimitIntervalSec=0",
                &format!(
                    "/usr/lib/vmmd/vmmd-kube --kubeconfig={files}.json agent --node-name={name} --socket={} \
                     --address={address} --migration-address={} --lock-file={files}.lock",
                    daemon.socket(),
                    daemon.address()
                ),
            );
            nodes.push(Node { name, agent, daemon });
        }
        let ground = Self {
            controllers: cluster.controllers(2).await,
            nodes,
            _hears: hears,
            _api: api,
            case,
            bridge,
            heard,
            read: 0,
            beats: Beats::default(),
            cluster,
        };
        eventually("both nodes are ready", patience, async || {
            for node in &ground.nodes {
                ground.cluster.node_ready(&node.name).await?;
            }
            Ok(())
        })
        .await;
        ground
    }

    /// Manifest of a VM whose guest sends heartbeats to the node. `number` is in its address.
    pub fn vm(&self, name: &str, number: usize) -> Value {
        let guest = format!("guest.ip=10.78.210.{}/24", 11 + number);
        let spec = VmSpec::busybox(Kernel::Cloud612)
            .cmdline(&format!("{SMALL} {guest}"))
            .script(&beats::script(name, &NODE.to_string(), PORT))
            .nic("eth0", &self.bridge)
            .set("/memory", json!({"sizeBytes": "128Mi"}))
            // All of them fit on one node.
            .set("/cpu/coreFractionPercent", json!(20))
            .set("/runPolicy", json!("always_on"));
        json!({
            "apiVersion": "vmmd.dev/v1alpha1",
            "kind": "VirtualMachine",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"vm": spec.manifest(name)["spec"]},
        })
    }

    fn programs(&mut self) -> impl Iterator<Item = &mut Program> {
        self.controllers.iter_mut().chain(self.cluster.parts())
    }

    /// Programs on this machine that ended by themselves, and how often.
    pub fn ended_by_themselves(&mut self) -> Vec<(String, u32)> {
        program::ended_by_themselves(self.programs())
    }

    /// Waits until these VMs and no others are there, each Running on exactly one node and started as often, by the API server, by the daemons
    /// and by the test node's processes; and then until each guest says that it runs.
    pub async fn all_run(&mut self, names: &[String], patience: Duration) {
        eventually("all VMs run", patience, async || {
            self.programs().for_each(Program::revive);
            let vms = vms::running(&self.cluster.api, names).await?;
            let mut found = Vec::new();
            for node in &self.nodes {
                found.push((node.name.as_str(), node.running()?));
            }
            vms::each_once(&vms, &found)
        })
        .await;
        self.listen();
        self.beats.forget();
        eventually("all guests are heard", patience, async || {
            self.listen();
            match self.beats.silent(names) {
                silent if silent.is_empty() => Ok(()),
                silent => Err(format!("{silent:?} are silent")),
            }
        })
        .await;
    }

    /// Reads new heartbeats of the guests. The test fails if two runs of a VM existed at the same
    /// time.
    fn listen(&mut self) {
        let script = format!("tail -c +{} {}", self.read + 1, self.heard);
        let more = self.case.node().sh(&script);
        for line in more.split_inclusive('\n') {
            let Some(whole) = line.strip_suffix('\n') else {
                break;
            };
            self.read += line.len();
            self.beats.hear(whole).unwrap();
        }
    }

    /// Kills the fault's program. If the node has no VM and thus no vmm, kills a vmm of the other
    /// node.
    pub fn kill(&mut self, fault: Fault, random: &mut Random) -> Struck {
        let test_node = self.case.node();
        let mut struck = Struck::default();
        match fault {
            Fault::Agent(node) => {
                struck.unit = Some(test_node.kill_unit(&self.nodes[node].agent.name));
            }
            Fault::Daemon(node) => {
                struck.unit = Some(test_node.kill_unit(self.nodes[node].daemon.unit()));
            }
            Fault::Vmm(node) => {
                let with_process = |node: usize| {
                    let machines = self.nodes[node].machines().unwrap().into_iter();
                    let found = machines.filter_map(|vm| Some((vm.pid?, vm.run.uid)));
                    found.collect::<Vec<_>>()
                };
                let mut machines = with_process(node);
                if machines.is_empty() {
                    machines = with_process(1 - node);
                }
                let (pid, uid) = machines.swap_remove(random.below(machines.len()));
                test_node.sh(&format!("kill -9 {pid}"));
                struck.vm = Some(uid);
            }
            Fault::Controller(number) => self.controllers[number].kill(),
            Fault::ApiServer => self.cluster.api_server.kill(),
            Fault::Etcd => self.cluster.etcd.kill(),
        }
        struck
    }

    /// Restarts the killed program, or waits until systemd has.
    pub fn mend(&mut self, fault: Fault, struck: &Struck) {
        match fault {
            Fault::Agent(_) | Fault::Daemon(_) | Fault::Vmm(_) => {}
            Fault::Controller(number) => self.controllers[number].launch(),
            Fault::ApiServer => self.cluster.api_server.launch(),
            Fault::Etcd => self.cluster.etcd.launch(),
        }
        if let Some(unit) = &struck.unit {
            self.case.node().wait_restarted(unit);
        }
    }

    /// Waits until no VM, no placeholder, no process, no cgroup, no folder and no tap is left.
    pub async fn nothing_left(&self, patience: Duration) {
        eventually("nothing is left", patience, async || {
            let mut left = vms::left(&self.cluster.api).await?;
            for node in &self.nodes {
                left.push(node.left()?);
            }
            // All vmm processes of the whole test node.
            left.push(said(self.case.node().try_sh("pgrep -x vmm || true"))?);
            left.retain(|one| !one.is_empty());
            if left.is_empty() {
                Ok(())
            } else {
                Err(format!("{left:?}"))
            }
        })
        .await;
    }

    /// Log lines of the agents and daemons; `lines` selects them.
    fn journal(&self, lines: &str) -> String {
        let units = self
            .nodes
            .iter()
            .flat_map(|node| [node.agent.name.as_str(), node.daemon.unit()]);
        let units: Vec<_> = units.map(|unit| format!("-u {unit}")).collect();
        let script = format!(
            "journalctl --no-pager -o short-precise {} {lines}",
            units.join(" ")
        );
        let journal = self.case.node().ssh(&script);
        journal.map_or_else(|error| format!("{error:#}"), |output| output.stdout)
    }

    /// Log lines about panics of the agents and daemons.
    pub fn panics(&self) -> String {
        self.journal("| grep 'panicked at'")
    }
}

impl Drop for Ground<'_> {
    fn drop(&mut self) {
        if !thread::panicking() {
            return;
        }
        for program in &self.controllers {
            eprintln!("--- {}\n{}", program.name, program.tail(40));
        }
        eprintln!("--- agents and vmmds\n{}", self.journal("-n 200"));
        eprintln!("--- {:?}", self.beats);
    }
}
