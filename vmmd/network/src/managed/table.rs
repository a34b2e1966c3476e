//! The table from which the helper of a network serves addresses, routes, names and options.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
};

use vmmd_spec::network::{
    NetworkMode, NetworkSpec, Subnet,
    dhcp::{DhcpOption, Route},
};
use vmmd_store::NetworkRecord;

use super::{bridge, bridge_mac, metadata};
use crate::netd::{self, Table};

/// For how long VMs are given their addresses, in seconds. They have them for their lives; a client asks again at half time.
pub(crate) const LEASE_SECONDS: u32 = 3600;

/// The table of a network's helper. The leases of `secondary`, by VM and NIC, have no default route.
pub(super) fn table(
    spec: &NetworkSpec,
    record: &NetworkRecord,
    secondary: &BTreeSet<(Vec<u8>, String)>,
) -> Table {
    let leases = record.leases.iter().filter(|lease| lease.released_ms == 0);
    let hosts = leases.filter_map(|lease| {
        let host = netd::Host {
            address: lease.ip(),
            address6: spec.net6.and_then(|net| Some(net.of(lease.mac()?))),
            name: lease.vm_name.clone(),
            primary: !secondary.contains(&(lease.vm.clone(), lease.nic.clone())),
            metadata: lease.metadata.then(|| metadata::name(&lease.vm)),
        };
        Some((lease.mac()?.to_string(), host))
    });
    Table {
        network: record.name.clone(),
        search: Vec::new(),
        domain: spec.domain.clone().unwrap_or_default(),
        records: records(spec, &record.name),
        routes: spec.mode != NetworkMode::Isolated,
        ipv4: spec.subnet.map(|Subnet { net, gateway }| netd::Ipv4 {
            gateway,
            mask: net.mask(),
            broadcast: net.last(),
            routes: spec
                .routes
                .iter()
                .filter_map(|route| route4(route, gateway))
                .collect(),
            options: options(&spec.dhcp_options),
        }),
        mtu: spec.mtu,
        forward: name_servers(spec),
        site: !spec.dns.is_empty(),
        ntp: spec.ntp.clone(),
        lease_seconds: LEASE_SECONDS,
        ipv6: spec.net6.map(|net| netd::Ipv6 {
            bridge: bridge(record),
            mac: bridge_mac(record),
            prefix: net.first(),
            routes: spec.routes.iter().filter_map(route6).collect(),
            options: options(&spec.dhcp6_options),
        }),
        hosts: hosts.collect(),
    }
}

/// Addresses by complete name.
fn records(spec: &NetworkSpec, network: &str) -> BTreeMap<String, Vec<IpAddr>> {
    let records = spec.dns_records.iter().map(|(name, addresses)| {
        let name = match &spec.domain {
            _ if name.contains('.') => name.clone(),
            Some(domain) => format!("{name}.{domain}"),
            None => format!("{name}.{network}.internal"),
        };
        (name, addresses.clone())
    });
    records.collect()
}

fn route4(route: &Route, gateway: Ipv4Addr) -> Option<netd::Route4> {
    match route.to.first {
        IpAddr::V4(first) => Some(netd::Route4 {
            to: (first, route.to.prefix),
            via: route.via.unwrap_or(gateway),
        }),
        IpAddr::V6(_) => None,
    }
}

fn route6(route: &Route) -> Option<netd::Route6> {
    match route.to.first {
        IpAddr::V6(first) => Some(netd::Route6 {
            to: (first, route.to.prefix),
        }),
        IpAddr::V4(_) => None,
    }
}

fn options(options: &[DhcpOption]) -> Vec<netd::DhcpOption> {
    let options = options.iter().map(|option| netd::DhcpOption {
        code: option.code,
        value: option.value.clone(),
    });
    options.collect()
}

/// Most name servers that are asked for the names of the outside, as many as resolv.conf(5) has.
pub(crate) const NAME_SERVERS: usize = 3;

/// Name servers for names outside the network: those of its spec, or those of the node. Empty for
/// an isolated network, because names are a way out.
fn name_servers(spec: &NetworkSpec) -> Vec<IpAddr> {
    if spec.mode == NetworkMode::Isolated {
        return Vec::new();
    }
    if !spec.dns.is_empty() {
        return spec.dns.clone();
    }
    let text = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    let mut servers = resolvers(&text);
    // It would ask itself.
    let own = spec.subnet.map(|subnet| IpAddr::from(subnet.gateway));
    servers.retain(|server| Some(*server) != own);
    servers.truncate(NAME_SERVERS);
    servers
}

/// The name servers in a resolv.conf(5), without those of an interface ("fe80::1%eth0").
fn resolvers(text: &str) -> Vec<IpAddr> {
    let servers = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some("nameserver")).then(|| words.next()?.parse().ok())?
    });
    servers.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nodes_name_servers_are_those_of_resolv_conf() {
        let text = "# made by hand\nsearch example.com\nnameserver 127.0.0.53\n nameserver 2001:db8::1\nnameserver fe80::1%eth0\n";
        let expected: [IpAddr; 2] = ["127.0.0.53".parse().unwrap(), "2001:db8::1".parse().unwrap()];
        assert_eq!(resolvers(text), expected);
        assert_eq!(
            resolvers("nameserver\nnameservers 10.0.0.1\n"),
            Vec::<IpAddr>::new()
        );
    }
}
