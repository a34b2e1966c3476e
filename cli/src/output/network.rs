//! Networks of the node for people.

use serde_json::Value as Json;
use vmmd_api::v1::{self, dhcp_option::Value};

use super::{
    Show,
    describe::{Lines, when},
    vm::camel,
};
use crate::{
    client::Kind as _,
    failure::Result,
    manifest::{emit, schema},
};

impl Show for v1::Network {
    const SCHEMA: &'static str = schema::NETWORK;
    const HAS_EVENTS: bool = false;

    fn columns(_: bool) -> Vec<&'static str> {
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
        headers.to_vec()
    }

    fn row(&self, _: bool, _: jiff::Timestamp) -> Vec<String> {
        let spec = self.spec.clone().unwrap_or_default();
        let status = self.status.clone().unwrap_or_default();
        vec![
            self.name().to_owned(),
            if status.ready { "yes" } else { "no" }.to_owned(),
            mode(&spec),
            both([spec.ipv4_cidr, spec.ipv6_cidr]),
            both([status.gateway, status.ipv6_gateway]),
            status.leases.len().to_string(),
            status.available_addresses.to_string(),
            status.bridge,
        ]
    }

    fn describe(&self, now: jiff::Timestamp) -> String {
        let spec = self.spec.clone().unwrap_or_default();
        let status = self.status.clone().unwrap_or_default();
        let mut text = Lines::default();
        text.metadata(self.metadata.as_ref(), true, now);
        text.put("Mode", &mode(&spec));
        if !spec.ipv4_cidr.is_empty() {
            text.put(
                "Addresses",
                &format!("{} ({} free)", spec.ipv4_cidr, status.available_addresses),
            );
        }
        text.put("Gateway", &status.gateway);
        text.put("IPv6 addresses", &spec.ipv6_cidr);
        text.put("IPv6 gateway", &status.ipv6_gateway);
        text.put("DNS", &spec.dns_servers.join(", "));
        text.put("Domain", &spec.domain);
        text.put("NTP", &spec.ntp_servers.join(", "));
        let routes = spec.routes.iter().map(|route| match route.via.as_str() {
            "" => route.to.clone(),
            via => format!("{} via {via}", route.to),
        });
        text.put("Routes", &routes.collect::<Vec<_>>().join(", "));
        for (name, options) in [
            ("DHCP options", &spec.dhcp_options),
            ("DHCPv6 options", &spec.dhcp6_options),
        ] {
            text.put(name, &options.iter().map(option).collect::<Vec<_>>().join(", "));
        }
        text.put("MTU", &status.mtu.to_string());
        text.put("Denied", &spec.deny.join(", "));
        text.put("Bridge", &status.bridge);
        text.put("Ready", if status.ready { "yes" } else { "no" });
        text.put("Problem", &status.message);
        let records = spec.dns_records.iter();
        let records: Vec<_> = records
            .map(|record| vec![record.name.clone(), record.addresses.join(", ")])
            .collect();
        if !records.is_empty() {
            text.list("DNS records", vec!["NAME", "ADDRESSES"], &records);
        }
        let user = |name: &str| {
            let mut leases = status.leases.iter();
            let lease = leases.find(|lease| lease.reservation == name && lease.release_time.is_none());
            lease.map_or(String::new(), |lease| format!("{}/{}", lease.vm, lease.nic))
        };
        let reservations = spec.reservations.iter().map(|reservation| {
            let v1::AddressReservation { name, address, mac } = reservation.clone();
            let user = user(&name);
            vec![name, address, mac, user]
        });
        let reservations: Vec<_> = reservations.collect();
        if !reservations.is_empty() {
            let headers = vec!["NAME", "ADDRESS", "MAC", "VM/NIC"];
            text.list("Reservations", headers, &reservations);
        }
        let groups = spec.security_groups.iter();
        let groups: Vec<_> = groups
            .map(|group| {
                vec![
                    group.name.clone(),
                    rules(group.ingress.as_ref()),
                    rules(group.egress.as_ref()),
                ]
            })
            .collect();
        if !groups.is_empty() {
            text.list("Security groups", vec!["NAME", "IN", "OUT"], &groups);
        }
        let behind = status.leases.iter().flat_map(|lease| {
            let user = format!("{}/{}", lease.vm, lease.nic);
            let via = both([lease.address.clone(), lease.ipv6_address.clone()]);
            let subnets = lease.routed_subnets.iter();
            subnets.map(move |subnet| vec![subnet.clone(), user.clone(), via.clone()])
        });
        let behind: Vec<_> = behind.collect();
        if !behind.is_empty() {
            text.list("Subnets behind VMs", vec!["SUBNET", "VM/NIC", "VIA"], &behind);
        }
        let floating = status.leases.iter().flat_map(|lease| {
            let user = format!("{}/{}", lease.vm, lease.nic);
            let addresses = lease.floating_addresses.iter();
            addresses.map(move |address| vec![address.clone(), user.clone()])
        });
        let floating: Vec<_> = floating.collect();
        if !floating.is_empty() {
            text.list("Floating addresses", vec!["ADDRESS", "VM/NIC"], &floating);
        }
        let rows: Vec<_> = status
            .leases
            .iter()
            .map(|lease| {
                let times = [&lease.release_time, &lease.declined_time];
                let times = times.map(|time| match time {
                    None => String::new(),
                    time => when(time.as_ref(), now),
                });
                let [released, declined] = times;
                vec![
                    both([lease.address.clone(), lease.ipv6_address.clone()]),
                    lease.vm.clone(),
                    lease.nic.clone(),
                    lease.mac.clone(),
                    released,
                    declined,
                ]
            })
            .collect();
        text.list(
            "Leases",
            vec!["ADDRESS", "VM", "NIC", "MAC", "RELEASED", "DECLINED"],
            &rows,
        );
        text.0
    }

    fn json(&self) -> Result<Json> {
        emit::manifest(self)
    }
}

/// "tcp:80,443@10.80.0.9 any@192.0.2.0/24"; "none" when nothing is allowed, empty without rules.
fn rules(rules: Option<&v1::NicRules>) -> String {
    let Some(rules) = rules else {
        return String::new();
    };
    let rules = rules.allow.iter().map(|rule| {
        let protocol = match rule.protocol() {
            v1::RuleProtocol::Unspecified => "any".to_owned(),
            protocol => camel(protocol.as_str_name(), "RULE_PROTOCOL_").to_lowercase(),
        };
        let ports = rule.ports.iter().map(|ports| match ports.last {
            0 => ports.first.to_string(),
            last => format!("{}-{last}", ports.first),
        });
        let ports = ports.collect::<Vec<_>>().join(",");
        let with = |sign: &str, list: String| match list.as_str() {
            "" => list,
            _ => format!("{sign}{list}"),
        };
        protocol + &with(":", ports) + &with("@", rule.addresses.join(","))
    });
    let all: Vec<_> = rules.collect();
    match all.as_slice() {
        [] => "none".to_owned(),
        all => all.join(" "),
    }
}

/// "66=tftp.example", or "43=0x0a50".
fn option(option: &v1::DhcpOption) -> String {
    match &option.value {
        Some(Value::Text(text)) => format!("{}={text}", option.code),
        Some(Value::Hex(hex)) => format!("{}=0x{hex}", option.code),
        None => option.code.to_string(),
    }
}

/// Texts of IPv4 and of IPv6, each of which may be empty: "10.80.0.1,fd00:80::1".
pub fn both(texts: [String; 2]) -> String {
    let given: Vec<_> = texts.into_iter().filter(|text| !text.is_empty()).collect();
    given.join(",")
}

fn mode(spec: &v1::NetworkSpec) -> String {
    match spec.mode() {
        v1::NetworkMode::Unspecified => "nat".to_owned(),
        mode => camel(mode.as_str_name(), "NETWORK_MODE_").to_lowercase(),
    }
}
