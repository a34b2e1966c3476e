//! Arguments of the verbs for the node.

use std::time::Duration;

use clap::{Args, Subcommand};

use super::{LabelChange, Timeout, duration, vm::Files, vm_name};

/// Verbs of `node`.
#[derive(Debug, Subcommand)]
pub enum Node {
    /// Reject the creation and start of VMs here, by request or run policy; running VMs continue
    Cordon {
        /// Reason, for people
        #[arg(long, value_name = "TEXT", default_value = "")]
        reason: String,
        #[command(flatten)]
        timeout: Timeout,
    },
    /// Allow the creation and start of VMs here again; run policies start VMs at once
    Uncordon(Timeout),
    /// Cordon the node and stop all VMs, or move them to other nodes first; after `uncordon`,
    /// stopped VMs start again as their run policy requires
    Drain(Drain),
    /// Check whether the VMs of a manifest can be created and started here now, and list all obstacles (exit code 9)
    Check(Files),
    /// Print the processor model and the features that several nodes have in common, as `spec.cpu` of a manifest
    CpuBaseline(CpuBaseline),
}

/// `node cpu-baseline`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl node cpu-baseline node-1 node-2 node-3
  vmmctl node cpu-baseline")]
pub struct CpuBaseline {
    /// Contexts of the nodes, from the configuration file [default: the selected node]
    #[arg(value_name = "CONTEXT", conflicts_with_all = ["context", "socket", "endpoint"])]
    pub contexts: Vec<String>,
}

/// `update node`.
#[derive(Debug, Args)]
pub struct LabelNode {
    /// Labels to set and to remove
    #[arg(required = true, value_name = "KEY=VALUE|KEY-")]
    pub labels: Vec<LabelChange>,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// `node drain`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl node drain --reason 'new kernel' --grace 2m
  vmmctl node drain --migrate-to node-2.example:7443
  vmmctl node drain --migrate-to node-2.example:7443 --migrate db=node-3.example:7443 --stop-rest")]
pub struct Drain {
    /// Reason, for people
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub reason: String,
    /// Time for each guest to power off, at most 1h (60s when not given); guests that take longer
    /// are killed
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub grace: Option<Duration>,
    /// Move running VMs one after the other to the node whose vmmd listens at this address. When one
    /// VM cannot be moved, no VM is stopped
    #[arg(long, value_name = "HOST:PORT")]
    pub migrate_to: Option<String>,
    /// Move this VM to another node. May be given several times; without --migrate-to, all others are stopped
    #[arg(long = "migrate", value_name = "VM=HOST:PORT", value_parser = destination)]
    pub destinations: Vec<(String, String)>,
    /// Stop VMs that cannot be moved
    #[arg(long)]
    pub stop_rest: bool,
    /// Return when the VMs are moved and the drain has begun
    #[arg(long)]
    pub no_wait: bool,
    #[command(flatten)]
    pub timeout: Timeout,
}

impl Drain {
    /// Destination of a VM; `None` for a VM to stop.
    pub fn destination(&self, vm: &str) -> Option<&str> {
        let own = self.destinations.iter().find(|(name, _)| name == vm);
        own.map(|(_, to)| to.as_str()).or(self.migrate_to.as_deref())
    }
}

fn destination(text: &str) -> Result<(String, String), String> {
    let (name, to) = text
        .split_once('=')
        .ok_or("must be VM=HOST:PORT, as in web=node-2.example:7443")?;
    Ok((vm_name(name)?, to.to_owned()))
}
