//! `node` and what belongs to it.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand};

use super::{FORMAT, HELP, Output, Timeout, duration, vm_name};

/// `node`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
pub struct Node {
    /// What to do; show it when nothing is said.
    #[command(subcommand)]
    pub what: Option<NodeVerb>,
    /// How to print it.
    #[arg(short, long, value_name = FORMAT, help = HELP)]
    pub output: Option<Output>,
}

/// Operation on the node.
#[derive(Debug, Subcommand)]
pub enum NodeVerb {
    /// Reject the creation and start of VMs here, by request or run policy; running VMs continue
    Cordon {
        /// Why, for people.
        #[arg(long, value_name = "TEXT", default_value = "")]
        reason: String,
        #[command(flatten)]
        #[allow(missing_docs)]
        timeout: Timeout,
    },
    /// Create and start VMs here again; those whose run policy wants it are started.
    Uncordon(Timeout),
    /// Cordon the node and stop all VMs, or move them to other nodes first; after `uncordon`,
    /// stopped VMs start again as their run policy requires
    Drain(Drain),
    /// Set (KEY=VALUE) and remove (KEY-) labels of the node.
    Label(LabelNode),
    /// Say whether VMs of a manifest could be created and started here now, or all that stands against them (exit code 9).
    Check {
        /// Manifest with VMs as YAML or JSON; `-` is standard input. May be given several times.
        #[arg(short, long = "filename", value_name = "FILE", required = true)]
        files: Vec<PathBuf>,
    },
}

/// `node label`.
#[derive(Debug, Args)]
pub struct LabelNode {
    /// Labels.
    #[arg(required = true, value_name = "KEY=VALUE|KEY-")]
    pub labels: Vec<LabelChange>,
    #[command(flatten)]
    #[allow(missing_docs)]
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
    /// Why, for people.
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub reason: String,
    /// Time for each guest to power off, at most 1h (60s when not given); guests that take longer
    /// are killed
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub grace: Option<Duration>,
    /// Move running VMs one after the other to the node whose vmmd listens there. When one VM
    /// cannot be moved, no VM is stopped
    #[arg(long, value_name = "HOST:PORT")]
    pub migrate_to: Option<String>,
    /// Move this VM there instead. May be given several times; without --migrate-to, all others are stopped.
    #[arg(long = "migrate", value_name = "VM=HOST:PORT", value_parser = destination)]
    pub destinations: Vec<(String, String)>,
    /// Stop VMs that cannot be moved
    #[arg(long)]
    pub stop_rest: bool,
    /// Return when it has begun, once VMs are moved.
    #[arg(long)]
    pub no_wait: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
}

impl Drain {
    /// Where a VM is to go; nowhere when it is to be stopped.
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

/// A change of labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LabelChange {
    /// `KEY=VALUE`.
    Set(String, String),
    /// `KEY-`.
    Remove(String),
}

impl std::str::FromStr for LabelChange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text.split_once('='), text.strip_suffix('-')) {
            (Some((key, value)), _) if !key.is_empty() => Ok(Self::Set(key.to_owned(), value.to_owned())),
            (None, Some(key)) if !key.is_empty() => Ok(Self::Remove(key.to_owned())),
            _ => Err("must be KEY=VALUE, or KEY- to remove it".into()),
        }
    }
}
