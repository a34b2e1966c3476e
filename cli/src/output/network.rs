//! Networks of the node for people.

use proto::v1;

use super::{
    describe::{Lines, when},
    table::Table,
    vm::camel,
};

/// A table of networks.
pub fn table(networks: &[v1::Network]) -> String {
    let headers = [
        "NAME",
        "MODE",
        "ADDRESSES",
        "GATEWAY",
        "USED",
        "FREE",
        "BRIDGE",
        "READY",
    ];
    let mut table = Table::new(headers.to_vec());
    let rows: Vec<_> = networks.iter().map(row).collect();
    for row in &rows {
        table.fit(row);
    }
    let mut text = table.header() + "\n";
    for row in &rows {
        text += &table.row(row);
        text.push('\n');
    }
    text
}

fn row(network: &v1::Network) -> Vec<String> {
    let spec = network.spec.clone().unwrap_or_default();
    let status = network.status.clone().unwrap_or_default();
    vec![
        name(network),
        mode(&spec),
        spec.ipv4_cidr,
        status.gateway,
        status.leases.len().to_string(),
        status.available_addresses.to_string(),
        status.bridge,
        if status.ready { "yes" } else { "no" }.to_owned(),
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

fn name(network: &v1::Network) -> String {
    network.metadata.clone().unwrap_or_default().name
}

fn mode(spec: &v1::NetworkSpec) -> String {
    match spec.mode() {
        v1::NetworkMode::Unspecified => "nat".to_owned(),
        mode => camel(mode.as_str_name(), "NETWORK_MODE_").to_lowercase(),
    }
}
