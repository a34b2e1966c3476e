//! Networks of the node for people.

use proto::v1;

use super::{
    describe::{Lines, when},
    disk::pairs,
    table::Table,
    vm::camel,
};

/// A table for networks.
pub fn table() -> Table {
    let headers = [
        "NAME",
        "READY",
        "MODE",
        "ADDRESSES",
        "GATEWAY",
        "USED",
        "FREE",
        "BRIDGE",
    ];
    Table::new(headers.to_vec())
}

/// Networks as a table.
pub fn whole(networks: &[v1::Network]) -> String {
    let rows: Vec<_> = networks.iter().map(row).collect();
    table().whole(&rows, true)
}

/// A row of the table.
pub fn row(network: &v1::Network) -> Vec<String> {
    let spec = network.spec.clone().unwrap_or_default();
    let status = network.status.clone().unwrap_or_default();
    vec![
        name(network).to_owned(),
        if status.ready { "yes" } else { "no" }.to_owned(),
        mode(&spec),
        spec.ipv4_cidr,
        status.gateway,
        status.leases.len().to_string(),
        status.available_addresses.to_string(),
        status.bridge,
    ]
}

/// Everything about a network.
pub fn describe(network: &v1::Network, now: jiff::Timestamp) -> String {
    let metadata = network.metadata.clone().unwrap_or_default();
    let spec = network.spec.clone().unwrap_or_default();
    let status = network.status.clone().unwrap_or_default();
    let mtu = if spec.mtu == 0 { 1500 } else { spec.mtu };
    let mut text = Lines::default();
    text.put("Name", &metadata.name);
    text.put("UID", &metadata.uid);
    text.put("Generation", &metadata.generation.to_string());
    text.put("Labels", &pairs(&metadata.labels, ", "));
    text.put("Created", &when(metadata.create_time.as_ref(), now));
    text.put("Mode", &mode(&spec));
    text.put(
        "Addresses",
        &format!("{} ({} free)", spec.ipv4_cidr, status.available_addresses),
    );
    text.put("Gateway", &status.gateway);
    text.put("IPv6 addresses", &spec.ipv6_cidr);
    text.put("IPv6 gateway", &status.ipv6_gateway);
    text.put("DNS", &spec.dns_servers.join(", "));
    text.put("NTP", &spec.ntp_servers.join(", "));
    text.put("MTU", &mtu.to_string());
    text.put("Bridge", &status.bridge);
    text.put("Ready", if status.ready { "yes" } else { "no" });
    text.put("Problem", &status.message);
    let rows: Vec<_> = status
        .leases
        .iter()
        .map(|lease| {
            let released = match &lease.release_time {
                None => String::new(),
                time => when(time.as_ref(), now),
            };
            vec![
                lease.address.clone(),
                lease.vm.clone(),
                lease.nic.clone(),
                lease.mac.clone(),
                released,
            ]
        })
        .collect();
    text.list("Leases", vec!["ADDRESS", "VM", "NIC", "MAC", "RELEASED"], &rows);
    text.0
}

/// The name of a network.
pub fn name(network: &v1::Network) -> &str {
    let metadata = network.metadata.as_ref();
    metadata.map_or("", |metadata| &metadata.name)
}

fn mode(spec: &v1::NetworkSpec) -> String {
    match spec.mode() {
        v1::NetworkMode::Unspecified => "nat".to_owned(),
        mode => camel(mode.as_str_name(), "NETWORK_MODE_").to_lowercase(),
    }
}
