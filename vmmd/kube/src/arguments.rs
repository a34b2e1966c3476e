//! The command line.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    net::{IpAddr, SocketAddr, UdpSocket},
    ops::RangeInclusive,
    path::PathBuf,
    time::Duration,
};

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use rustix::fs::{FlockOperation, flock};

use crate::{agent, pod_agent, run, sources::Allowed};

/// Makes nodes with vmmd nodes of a Kubernetes cluster.
#[derive(Debug, Parser)]
#[command(name = "vmmd-kube", version, max_term_width = 100)]
pub struct Arguments {
    /// How the API server is reached; from the environment of a pod, or as kubectl does it, when not given
    #[arg(long, global = true, value_name = "FILE", env = "VMMD_KUBE_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,
    /// What to do
    #[command(subcommand)]
    pub action: Action,
}

/// Action of the program.
#[derive(Debug, Subcommand)]
pub enum Action {
    /// Make the vmmd of this machine a node
    Agent(AgentArguments),
    /// Offer the vmmd of this machine to its kubelet, and create VMs for launcher pods
    PodAgent(PodAgentArguments),
    /// Make pods for VirtualMachines
    Controller(ControllerArguments),
    /// Print the definition of VirtualMachine
    Crd,
}

/// Of the agent.
#[derive(Debug, Args)]
pub struct AgentArguments {
    /// Name of the node; the host's name with "-vmm" behind it when not given
    #[arg(long, value_name = "NAME", env = "VMMD_KUBE_NODE")]
    pub node_name: Option<String>,
    /// Socket of vmmd
    #[arg(
        long,
        value_name = "FILE",
        env = "VMMD_SOCKET",
        default_value = "/run/vmmd/vmmd.sock"
    )]
    pub socket: PathBuf,
    /// Address of the node; the one that the default route leaves from when not given
    #[arg(long, value_name = "ADDRESS", env = "VMMD_KUBE_ADDRESS")]
    pub address: Option<IpAddr>,
    /// Most VMs that the scheduler places here
    #[arg(long, value_name = "NUMBER", default_value_t = 200, env = "VMMD_KUBE_MAX_VMS")]
    pub max_vms: u32,
    /// A label of the node
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = pair)]
    pub labels: Vec<(String, String)>,
    /// CA of the certificate with which the API server calls nodes, as PEM; the agent serves `kubectl logs`, `attach`, `exec` and
    /// `port-forward` when it is given
    #[arg(long, value_name = "FILE", env = "VMMD_KUBE_CLIENT_CA")]
    pub client_ca: Option<PathBuf>,
    /// Port for these calls
    #[arg(long, value_name = "PORT", default_value_t = 10350, env = "VMMD_KUBE_PORT")]
    pub port: u16,
    /// Where the vmmds of other nodes reach this node's; VMs are moved to this node when it is given
    #[arg(long, value_name = "HOST:PORT", env = "VMMD_KUBE_MIGRATION_ADDRESS")]
    pub migration_address: Option<String>,
    /// Run no VM that directly names a kernel, a file, a disk, a bridge or another thing of the
    /// node; VMs then have only volumes and networks
    #[arg(long, env = "VMMD_KUBE_NO_NODE_FILES")]
    pub no_node_files: bool,
    /// With --no-node-files: ports of the node that VMs may publish; none when not given
    #[arg(long, value_name = "FIRST-LAST", value_parser = ports, env = "VMMD_KUBE_PUBLISHED_PORTS")]
    pub published_ports: Option<RangeInclusive<u16>>,
    /// Serve metrics for Prometheus on this address, "127.0.0.1:9754" or another
    #[arg(long, value_name = "ADDRESS", env = "VMMD_KUBE_METRICS")]
    pub metrics: Option<SocketAddr>,
    /// Locked while the agent runs, so that there is one
    #[arg(
        long,
        value_name = "FILE",
        env = "VMMD_KUBE_LOCK",
        default_value = "/run/vmmd-kube/lock"
    )]
    pub lock_file: PathBuf,
}

/// Options of the agent for launcher pods.
#[derive(Debug, Args)]
pub struct PodAgentArguments {
    /// Name of the node
    #[arg(long, value_name = "NAME", env = "VMMD_KUBE_NODE")]
    pub node_name: String,
    /// Socket of vmmd
    #[arg(
        long,
        value_name = "FILE",
        env = "VMMD_SOCKET",
        default_value = "/run/vmmd/vmmd.sock"
    )]
    pub socket: PathBuf,
    /// Directory on the host of vmmd's socket for launchers, `pods.socket` in its configuration
    #[arg(
        long,
        value_name = "DIRECTORY",
        env = "VMMD_KUBE_PODS_DIRECTORY",
        default_value = "/run/vmmd/pod"
    )]
    pub pods_directory: String,
    /// Directory of the kubelet for device plugins
    #[arg(
        long,
        value_name = "DIRECTORY",
        env = "VMMD_KUBE_DEVICE_PLUGIN_DIRECTORY",
        default_value = "/var/lib/kubelet/device-plugins"
    )]
    pub device_plugin_directory: PathBuf,
    /// Most VMs that the scheduler places here
    #[arg(long, value_name = "NUMBER", default_value_t = 200, env = "VMMD_KUBE_MAX_VMS")]
    pub max_vms: u32,
    /// Time in seconds in which launchers connect again after a restart of vmmd or of this agent;
    /// stopped VMs whose launchers do not are deleted afterwards
    #[arg(long, value_name = "SECONDS", default_value_t = 15)]
    pub reconnect_seconds: u32,
    /// Serve metrics for Prometheus on this address, "127.0.0.1:9754" or another
    #[arg(long, value_name = "ADDRESS", env = "VMMD_KUBE_METRICS")]
    pub metrics: Option<SocketAddr>,
}

impl PodAgentArguments {
    /// Settings of the agent.
    pub fn settings(&self) -> pod_agent::Settings {
        pod_agent::Settings {
            node: self.node_name.clone(),
            reconnect: Duration::from_secs(self.reconnect_seconds.into()),
            plugin: pod_agent::plugin::Settings {
                directory: self.device_plugin_directory.clone(),
                pods: self.pods_directory.clone(),
                max_vms: self.max_vms,
            },
        }
    }
}

/// Of the controller.
#[derive(Debug, Args)]
pub struct ControllerArguments {
    /// Namespace of the lease by which one of several controllers is chosen
    #[arg(
        long,
        value_name = "NAME",
        env = "POD_NAMESPACE",
        default_value = "vmmd-system"
    )]
    pub namespace: String,
    /// Image of the launcher vmmd-pod: VMs run in ordinary pods of this image. Without it, VMs run
    /// on virtual nodes
    #[arg(long, value_name = "IMAGE", env = "VMMD_KUBE_LAUNCHER_IMAGE")]
    pub launcher_image: Option<String>,
    /// RuntimeClass of the pods; none when not given
    #[arg(long, value_name = "NAME")]
    pub runtime_class: Option<String>,
    /// Memory in MiB that pods request beyond what vmmd sets aside for their VMs
    #[arg(long, value_name = "MIB", default_value_t = 0)]
    pub overhead_mib: u32,
    /// Serve metrics for Prometheus on this address, "127.0.0.1:9755" or another
    #[arg(long, value_name = "ADDRESS", env = "VMMD_KUBE_METRICS")]
    pub metrics: Option<SocketAddr>,
    /// Work without asking whether another controller does
    #[arg(long)]
    pub no_leader_election: bool,
}

impl AgentArguments {
    /// Settings of the node.
    ///
    /// # Errors
    ///
    /// Fails when no address is given, and none is found.
    pub fn settings(&self) -> anyhow::Result<agent::Settings> {
        let host = rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .to_lowercase();
        let name = self.node_name.clone().unwrap_or_else(|| format!("{host}-vmm"));
        let address = match self.address {
            Some(address) => address,
            None => own_address().context("this machine has no address that others know: give --address")?,
        };
        let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
        let pretty = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
        Ok(agent::Settings {
            addresses: vec![("InternalIP", address.to_string()), ("Hostname", host)],
            name,
            max_vms: self.max_vms,
            port: self.client_ca.is_some().then_some(self.port),
            migration_address: self.migration_address.clone(),
            allowed: Allowed {
                everything: !self.no_node_files,
                ports: self.published_ports.clone(),
            },
            labels: self.labels.iter().cloned().collect::<BTreeMap<_, _>>(),
            machine_id: fs::read_to_string("/etc/machine-id")
                .unwrap_or_default()
                .trim()
                .to_owned(),
            os_image: pretty.unwrap_or_default().trim_matches('"').to_owned(),
        })
    }

    /// Held as long as the file is open.
    ///
    /// # Errors
    ///
    /// That another agent holds it.
    pub fn lock(&self) -> anyhow::Result<File> {
        let path = self.lock_file.display();
        let file = File::create(&self.lock_file).with_context(|| format!("open {path}"))?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)
            .with_context(|| format!("lock {path}: is another agent running?"))?;
        Ok(file)
    }
}

impl ControllerArguments {
    /// How pods are made.
    pub fn settings(&self) -> run::Settings {
        run::Settings {
            overhead: u64::from(self.overhead_mib) << 20,
            runtime_class: self.runtime_class.clone(),
            launcher_image: self.launcher_image.clone(),
        }
    }
}

/// The address that packets to others leave from. Nothing is sent.
fn own_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    // An address of the documentation's (RFC 5737): any that is not local does.
    socket.connect("192.0.2.1:9").ok()?;
    socket
        .local_addr()
        .ok()
        .map(|address| address.ip())
        .filter(|ip| !ip.is_unspecified())
}

fn ports(text: &str) -> Result<RangeInclusive<u16>, String> {
    let parsed = text
        .split_once('-')
        .and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
    match parsed {
        Some((first, last)) if 0 < first && first <= last => Ok(first..=last),
        _ => Err("must be FIRST-LAST, as 20000-20999".to_owned()),
    }
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text
        .split_once('=')
        .ok_or_else(|| "must be KEY=VALUE".to_owned())?;
    Ok((key.to_owned(), value.to_owned()))
}
