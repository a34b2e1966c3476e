//! `node` and what belongs to it.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand};

use super::{FORMAT, HELP, Output, Timeout, duration};

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

/// What is done to the node.
#[derive(Debug, Subcommand)]
pub enum NodeVerb {
    /// Create and start no VMs here any more, by request or run policy; those that run go on.
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
    /// Cordon the node and stop all VMs; they start again after `uncordon` when their run policy wants it.
    Drain(Drain),
    /// Set (KEY=VALUE) and remove (KEY-) labels of the node.
    Label {
        /// Labels.
        #[arg(required = true, value_name = "KEY=VALUE|KEY-")]
        labels: Vec<LabelChange>,
        #[command(flatten)]
        #[allow(missing_docs)]
        timeout: Timeout,
    },
    /// Say whether VMs of a manifest could be created and started here now, or all that stands against them (exit code 9).
    Check {
        /// Manifest with VMs as YAML or JSON; `-` is standard input. May be given several times.
        #[arg(short, long = "filename", value_name = "FILE", required = true)]
        files: Vec<PathBuf>,
    },
}

/// `node drain`.
#[derive(Debug, Args)]
pub struct Drain {
    /// Why, for people.
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub reason: String,
    /// How long each guest may take to power off, at most 1h (60s when not given); those that have not are killed.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub grace: Option<Duration>,
    /// Return when it has begun.
    #[arg(long)]
    pub no_wait: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
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
