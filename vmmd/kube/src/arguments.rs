//! The command line.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand};

use crate::{agent, run};

/// Runs virtual machines as pods of a Kubernetes cluster.
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
    /// Offer the vmmd of this machine to its kubelet, and create VMs for launcher pods
    Agent(AgentArguments),
    /// Make pods for VirtualMachines
    Controller(ControllerArguments),
    /// Print the definition of VirtualMachine
    Crd,
}

/// Options of the agent.
#[derive(Debug, Args)]
pub struct AgentArguments {
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

impl AgentArguments {
    /// Settings of the agent.
    pub fn settings(&self) -> agent::Settings {
        agent::Settings {
            node: self.node_name.clone(),
            reconnect: Duration::from_secs(self.reconnect_seconds.into()),
            plugin: agent::plugin::Settings {
                directory: self.device_plugin_directory.clone(),
                pods: self.pods_directory.clone(),
                max_vms: self.max_vms,
            },
        }
    }
}

/// Options of the controller.
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
    /// Image of the launcher, vmmd-pod
    #[arg(long, value_name = "IMAGE", env = "VMMD_KUBE_LAUNCHER_IMAGE")]
    pub launcher_image: String,
    /// Port of the vmmds for each other; VMs are moved to the address of a node with this port
    #[arg(long, value_name = "PORT", default_value_t = 7443)]
    pub migration_port: u16,
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

impl ControllerArguments {
    /// How pods are made.
    pub fn settings(&self) -> run::Settings {
        run::Settings {
            overhead: u64::from(self.overhead_mib) << 20,
            launcher_image: self.launcher_image.clone(),
            migration_port: self.migration_port,
        }
    }
}
