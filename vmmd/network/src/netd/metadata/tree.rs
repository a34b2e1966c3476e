//! Documents by their paths. cloud-init's data source NoCloud reads below `/`, and its data source Ec2
//! below a version.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
};

use serde_json::json;

use super::Instance;

/// Versions of EC2's service. The documents are the same.
const VERSIONS: [&str; 3] = ["2009-04-04", "2021-03-23", "latest"];
/// Placement of all VMs: the service knows no zones.
const ZONE: &str = "local";

/// The NIC whose guest asks.
#[derive(Clone, Copy, Debug)]
pub struct Requester<'a> {
    /// "52:54:00:12:34:56".
    pub mac: &'a str,
    pub address: Ipv4Addr,
    /// Mask of its network.
    pub mask: Option<Ipv4Addr>,
}

/// Content of a path, with its leading slash; `None` where there is none.
pub fn get(instance: &Instance, requester: &Requester<'_>, path: &str) -> Option<Vec<u8>> {
    let path = path.strip_prefix('/')?;
    if path.is_empty() {
        return Some(VERSIONS.join("\n").into_bytes());
    }
    let document = |name: &str| instance.documents.get(name).map(|document| document.0.clone());
    match path {
        "meta-data" | "user-data" | "network-config" => return document(path),
        // cloud-init warns about a seed without vendor data.
        "vendor-data" => return Some(document(path).unwrap_or_default()),
        _ => {}
    }
    let (version, path) = path.split_once('/').unwrap_or((path, ""));
    if !VERSIONS.contains(&version) {
        return None;
    }
    match path {
        "user-data" => document(path),
        _ => in_tree(&leaves(instance, requester), path),
    }
}

/// A leaf, or the list of a directory. A name with a slash at its end is a directory.
fn in_tree(leaves: &BTreeMap<String, String>, path: &str) -> Option<Vec<u8>> {
    if let Some(leaf) = leaves.get(path) {
        return Some(leaf.clone().into_bytes());
    }
    let directory = path.strip_suffix('/').unwrap_or(path);
    let begin = match path {
        "" => String::new(),
        _ => format!("{directory}/"),
    };
    let names = leaves.keys().filter_map(|leaf| leaf.strip_prefix(&begin));
    let names: BTreeSet<_> = names
        .map(|rest| match rest.split_once('/') {
            // The list of keys has their names, and not their directories.
            Some((number, _)) if directory == KEYS => format!("{number}=key-{number}"),
            Some((name, _)) => format!("{name}/"),
            None => rest.to_owned(),
        })
        .collect();
    let names: Vec<_> = names.into_iter().collect();
    (!names.is_empty()).then(|| names.join("\n").into_bytes())
}

const KEYS: &str = "meta-data/public-keys";

/// All leaves of a version besides the user data.
fn leaves(instance: &Instance, requester: &Requester<'_>) -> BTreeMap<String, String> {
    let address = requester.address.to_string();
    let mac = requester.mac.to_lowercase();
    let identity = json!({
        "architecture": "x86_64",
        "availabilityZone": ZONE,
        "instanceId": instance.instance_id,
        "privateIp": address,
        "region": ZONE,
        "version": "2017-09-30",
    });
    let nic = format!("meta-data/network/interfaces/macs/{mac}");
    let mut leaves = BTreeMap::new();
    let mut add = |path: String, content: &str| drop(leaves.insert(path, content.to_owned()));
    for (path, content) in [
        (
            "dynamic/instance-identity/document",
            identity.to_string().as_str(),
        ),
        ("meta-data/hostname", &instance.hostname),
        ("meta-data/instance-id", &instance.instance_id),
        ("meta-data/local-hostname", &instance.hostname),
        ("meta-data/local-ipv4", &address),
        ("meta-data/mac", &mac),
        ("meta-data/placement/availability-zone", ZONE),
    ] {
        add(path.to_owned(), content);
    }
    add(format!("{nic}/device-number"), "0");
    add(format!("{nic}/local-hostname"), &instance.hostname);
    add(format!("{nic}/local-ipv4s"), &address);
    add(format!("{nic}/mac"), &mac);
    if let Some(mask) = requester.mask {
        let first = Ipv4Addr::from_bits(requester.address.to_bits() & mask.to_bits());
        let block = format!("{first}/{}", mask.to_bits().leading_ones());
        add(format!("{nic}/subnet-ipv4-cidr-block"), &block);
    }
    for (number, key) in instance.public_keys.iter().enumerate() {
        add(format!("{KEYS}/{number}/openssh-key"), key);
    }
    leaves
}
