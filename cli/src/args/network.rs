//! Arguments of the network commands.

use clap::Args;
use vmmd_api::v1::NetworkMode;

use super::{
    Label, LabelChange, Timeout, disk_name,
    value::{Words, words},
};

/// Modes of a network.
const MODES: Words<NetworkMode> = &[
    (
        "nat",
        NetworkMode::Nat,
        "VMs reach the outside by the node's address, and are reached by published ports only",
    ),
    (
        "isolated",
        NetworkMode::Isolated,
        "VMs reach each other, and nothing else",
    ),
    (
        "routed",
        NetworkMode::Routed,
        "VMs reach the outside by their own addresses, and are reached by them",
    ),
];

/// `create network`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl create network lan --cidr 10.80.0.0/24 --dns 10.0.0.53
  vmmctl create network both --cidr 10.82.0.0/24 --ipv6 fd00:82::/64
  vmmctl create network six --ipv6 fd00:83::/64
  vmmctl create network lab --cidr 10.84.0.0/24 --route 10.90.0.0/16=10.84.0.9 --dhcp-option 66=tftp.example
  vmmctl create network backend --cidr 10.81.0.0/24 --mode isolated")]
pub struct CreateNetwork {
    /// Name of the network
    #[arg(value_parser = disk_name)]
    pub name: String,
    /// IPv4 addresses, a private range as in 10.80.0.0/24; none when only --ipv6 is given
    #[arg(long, value_name = "RANGE", required_unless_present = "ipv6")]
    pub cidr: Option<String>,
    /// IPv6 addresses, a prefix of 64 bits as in fd00:80::/64; none when not given
    #[arg(long, value_name = "PREFIX")]
    pub ipv6: Option<String>,
    /// Address of the node, the gateway of the VMs; the first address when not given
    #[arg(long, value_name = "ADDRESS", requires = "cidr")]
    pub gateway: Option<String>,
    /// Reachability of the VMs
    #[arg(long, value_parser = words(MODES), default_value = "nat")]
    pub mode: NetworkMode,
    /// Name server for names outside the network; repeat the option for several
    #[arg(long = "dns", value_name = "ADDRESS")]
    pub dns: Vec<String>,
    /// NTP server to announce to VMs; repeat the option for several
    #[arg(long = "ntp", value_name = "ADDRESS")]
    pub ntp: Vec<String>,
    /// Route to announce to VMs, over the gateway or over an address of the network; repeat the option for several
    #[arg(long = "route", value_name = "RANGE[=ADDRESS]")]
    pub routes: Vec<String>,
    /// Option of DHCP to send to VMs, by its number, with a text or with bytes as in 43=0x0a50; repeat the option for several
    #[arg(long = "dhcp-option", value_name = "NUMBER=VALUE")]
    pub dhcp_options: Vec<String>,
    /// Option of DHCP for IPv6 to send to VMs, as --dhcp-option; repeat the option for several
    #[arg(long = "dhcp6-option", value_name = "NUMBER=VALUE")]
    pub dhcp6_options: Vec<String>,
    /// Domain of the names of VMs, besides NETWORK.internal
    #[arg(long, value_name = "DOMAIN")]
    pub domain: Option<String>,
    /// Name that VMs find, in the network's domain or complete, with its addresses; repeat the option for several
    #[arg(long = "dns-record", value_name = "NAME=ADDRESS[,ADDRESS]")]
    pub dns_records: Vec<String>,
    /// Address that stays when its VM is deleted, for NICs that name it, or for the one with a MAC address; NAME=,MAC for IPv6 alone.
    /// Repeat the option for several
    #[arg(long = "reserve", value_name = "NAME=ADDRESS[,MAC]")]
    pub reservations: Vec<String>,
    /// Firewall that NICs name: connections to the VMs (in=) and of the VMs (out=) that it allows, several with + between them, as in
    /// web,in=tcp:80+tcp:8000-8100+icmp@10.80.0.0/24,out=none; repeat the option for several
    #[arg(long = "security-group", value_name = "NAME,in=RULE[+RULE],out=RULE[+RULE]")]
    pub groups: Vec<String>,
    /// Largest packet in bytes; that of the node's default route when not given
    #[arg(long, value_name = "BYTES")]
    pub mtu: Option<u32>,
    /// Addresses that VMs do not reach beyond the node, as in 192.0.2.0/24 or 2001:db8::/32; repeat the option for several
    #[arg(long, value_name = "RANGE")]
    pub deny: Vec<String>,
    /// Label of the network
    #[arg(short, long = "label", value_name = "KEY=VALUE")]
    pub labels: Vec<Label>,
    #[command(flatten)]
    pub timeout: Timeout,
}

/// `update network`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl update network lan --dns 10.0.0.53 --dns 10.0.0.54
  vmmctl update network lan --dns node
  vmmctl update network lan --reserve web=10.80.0.9 --reserve old-
  vmmctl update network lan --security-group web,in=tcp:80+tcp:443 --security-group old-
  vmmctl update network lan --domain lan.example --dns-record db=10.80.0.9 --dns-record registry.example.com=192.0.2.7
  vmmctl update network backend --mode routed -l tier=back -l old-")]
pub struct UpdateNetwork {
    /// Name of the network
    #[arg(value_parser = disk_name)]
    pub name: String,
    /// Reachability of the VMs. VMs learn of the change when they renew their address, each half hour
    #[arg(long, value_parser = words(MODES))]
    pub mode: Option<NetworkMode>,
    /// Name server for names outside the network, in place of the present ones; repeat the option for several.
    /// "node" selects the name servers of the node
    #[arg(long = "dns", value_name = "ADDRESS|node")]
    pub dns: Vec<String>,
    /// NTP server to announce to VMs, in place of the present ones; repeat the option for several.
    /// "none" removes all
    #[arg(long = "ntp", value_name = "ADDRESS|none")]
    pub ntp: Vec<String>,
    /// Route to announce to VMs, in place of the present ones; repeat the option for several.
    /// "none" removes all
    #[arg(long = "route", value_name = "RANGE[=ADDRESS]|none")]
    pub routes: Vec<String>,
    /// Option of DHCP to send to VMs, in place of the present ones; repeat the option for several.
    /// "none" removes all
    #[arg(long = "dhcp-option", value_name = "NUMBER=VALUE|none")]
    pub dhcp_options: Vec<String>,
    /// Domain of the names of VMs, besides NETWORK.internal. "none" leaves NETWORK.internal alone
    #[arg(long, value_name = "DOMAIN|none")]
    pub domain: Option<String>,
    /// Name that VMs find, in place of the present ones; repeat the option for several.
    /// "none" removes all
    #[arg(long = "dns-record", value_name = "NAME=ADDRESS[,ADDRESS]|none")]
    pub dns_records: Vec<String>,
    /// Address that stays when its VM is deleted, besides the present ones or in place of the one of that name; repeat the option for
    /// several. "NAME-" removes one
    #[arg(long = "reserve", value_name = "NAME=ADDRESS[,MAC]|NAME-")]
    pub reservations: Vec<String>,
    /// Firewall that NICs name, besides the present ones or in place of the one of that name, as of `create network`; repeat the option
    /// for several. "NAME-" removes one
    #[arg(
        long = "security-group",
        value_name = "NAME,in=RULE[+RULE],out=RULE[+RULE]|NAME-"
    )]
    pub groups: Vec<String>,
    /// Option of DHCP for IPv6 to send to VMs, as --dhcp-option
    #[arg(long = "dhcp6-option", value_name = "NUMBER=VALUE|none")]
    pub dhcp6_options: Vec<String>,
    /// Addresses that VMs do not reach beyond the node, in place of the present ones; repeat the option for several.
    /// "none" removes all
    #[arg(long, value_name = "RANGE|none")]
    pub deny: Vec<String>,
    /// Label to set or to remove
    #[arg(short, long = "label", value_name = "KEY=VALUE|KEY-")]
    pub labels: Vec<LabelChange>,
    #[command(flatten)]
    pub timeout: Timeout,
}
