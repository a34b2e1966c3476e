//! Arguments of the network commands.

use clap::{Args, Subcommand, ValueEnum};

use vmmd_api::v1;

use super::{Delete, Label, Names, Timeout, WatchedList, disk_name, node::LabelChange};

/// `network`.
#[derive(Debug, Subcommand)]
pub enum Network {
    /// Make a network: a bridge with addresses, DHCP, and a way to the outside.
    Create(CreateNetwork),
    /// List the networks.
    #[command(visible_alias = "list")]
    Ls(ListNetworks),
    /// Show a network and its address assignments
    Describe(Names<v1::Network>),
    /// Change a network while VMs are in it.
    Update(UpdateNetwork),
    /// Delete a network that no VM's spec names.
    #[command(visible_alias = "delete")]
    Rm(Delete<v1::Network>),
}

/// `network create`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl network create lan --cidr 10.80.0.0/24 --dns 10.0.0.53
  vmmctl network create both --cidr 10.82.0.0/24 --ipv6 fd00:82::/64
  vmmctl network create backend --cidr 10.81.0.0/24 --mode isolated")]
pub struct CreateNetwork {
    /// Name of the network.
    #[arg(value_parser = disk_name)]
    pub name: String,
    /// Its addresses, a private range as in 10.80.0.0/24.
    #[arg(long, value_name = "RANGE")]
    pub cidr: String,
    /// Its IPv6 addresses, a prefix of 64 bits as in fd00:80::/64; none when not given.
    #[arg(long, value_name = "PREFIX")]
    pub ipv6: Option<String>,
    /// The node's own address, the VMs' gateway; the first one when not given.
    #[arg(long, value_name = "ADDRESS")]
    pub gateway: Option<String>,
    /// Who reaches whom.
    #[arg(long, value_enum, default_value = "nat")]
    pub mode: Mode,
    /// Name server that is asked for names outside the network; several are given one by one.
    #[arg(long = "dns", value_name = "ADDRESS")]
    pub dns: Vec<String>,
    /// NTP server to announce to VMs; repeat the flag for several
    #[arg(long = "ntp", value_name = "ADDRESS")]
    pub ntp: Vec<String>,
    /// Largest packet in bytes; 1500 when not given.
    #[arg(long, value_name = "BYTES")]
    pub mtu: Option<u32>,
    /// Label of the network.
    #[arg(short, long = "label", value_name = "KEY=VALUE")]
    pub labels: Vec<Label>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
}

/// Who reaches whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// VMs reach the outside by the node's address, and are reached by published ports only.
    Nat,
    /// VMs reach each other, and nothing else.
    Isolated,
    /// VMs reach the outside by their own addresses, and are reached by them.
    Routed,
}

/// `network ls`.
#[derive(Debug, Default, Args)]
pub struct ListNetworks {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub all: WatchedList<v1::Network>,
    /// The same as -o json.
    #[arg(long, conflicts_with = "output")]
    pub json: bool,
}

/// `network update`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl network update lan --dns 10.0.0.53 --dns 10.0.0.54
  vmmctl network update lan --dns node
  vmmctl network update backend --mode routed -l tier=back -l old-")]
pub struct UpdateNetwork {
    /// Name of the network.
    #[arg(value_parser = disk_name)]
    pub name: String,
    /// Who reaches whom. VMs hear of it when they next ask for their address, which they do each half hour.
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// Name server that is asked for names outside the network, instead of those before: several are given one by one, "node" is
    /// those of the node.
    #[arg(long = "dns", value_name = "ADDRESS|node")]
    pub dns: Vec<String>,
    /// NTP server to announce to VMs, in place of the present ones: repeat the flag for several,
    /// "none" removes all
    #[arg(long = "ntp", value_name = "ADDRESS|none")]
    pub ntp: Vec<String>,
    /// Label to set, or to take away.
    #[arg(short, long = "label", value_name = "KEY=VALUE|KEY-")]
    pub labels: Vec<LabelChange>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
}
