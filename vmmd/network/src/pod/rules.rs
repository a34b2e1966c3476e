//! Packet filter rules in the network namespace of a pod: constant text (`rules.nft`) behind the definitions of its names.

use std::fmt::Write as _;

use vmmd_spec::{network::link_local, nic::Mac};

use super::plan::Addresses;
use crate::managed::rules::{Family, TABLE};

/// The rules, without the definitions.
const RULES: &str = include_str!("rules.nft");

/// Input for nft that removes the rules.
pub fn none() -> String {
    let family = Family::Inet;
    // Adding an existing table is no error, but deleting a missing one is.
    format!("add table {family} {TABLE}\ndelete table {family} {TABLE}\n")
}

/// Input for nft that replaces the rules, in one transaction. `uplink` is the pod's interface that leads to the cluster.
pub fn whole((tap, uplink): (&str, &str), mac: Mac, addresses: &Addresses) -> String {
    let mut text = none();
    let definitions = [
        ("tap", format!("\"{tap}\"")),
        ("uplink", format!("\"{uplink}\"")),
        ("mac", mac.to_string()),
        ("guest4", addresses.guest4.to_string()),
        ("gateway4", addresses.gateway4.to_string()),
        ("guest6", addresses.guest6.to_string()),
        ("link6", link_local(mac).to_string()),
        ("gateway6", addresses.gateway6.to_string()),
    ];
    for (name, value) in definitions {
        let _ = writeln!(text, "define {name} = {value}");
    }
    text + RULES
}
