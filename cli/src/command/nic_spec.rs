//! NICs of a VM from the command line: the values of `create vm --nic` and `create nic`.

use vmmd_api::v1::{self, NicOffload, nic_spec::Attachment};

use super::keys::{self, bytes, number};
use crate::{
    args::value::{Words, word},
    failure::Result,
};

const KEYS: &str = "network=, bridge=, tap=, pod-network, address=, publish=, routed=, floating=, groups=, name=, mac=, queues=, mtu=, vlan=, mac-filter=, metadata=, boot-order=, backend=, link=, off=, rx-bps=, rx-pps=, tx-bps=, tx-pps=";

/// The NIC number `index` of a VM from `key=value,…`.
pub fn from_text(index: usize, text: &str) -> Result<v1::NicSpec> {
    let mut nic = v1::NicSpec {
        name: format!("eth{index}"),
        ..v1::NicSpec::default()
    };
    apply(&mut nic, text, "--nic")?;
    Ok(nic)
}

/// Applies the keys of `text`, the value of the command line's `option`.
pub fn apply(nic: &mut v1::NicSpec, text: &str, option: &str) -> Result<()> {
    let mut attached = false;
    keys::each(option, text, KEYS, |key, value| {
        let attachment = match (key, value) {
            ("pod-network", interface) => Attachment::PodNetwork(v1::PodNetwork {
                interface: interface.unwrap_or_default().to_owned(),
            }),
            (_, None) => return Ok(false),
            ("bridge", Some(value)) => Attachment::Bridge(value.to_owned()),
            ("tap", Some(value)) => Attachment::Tap(value.to_owned()),
            ("network", Some(value)) => Attachment::Network(value.to_owned()),
            (_, Some(value)) => return set(nic, key, value),
        };
        if std::mem::replace(&mut attached, true) {
            return Err("give one of network=, bridge=, tap= and pod-network".to_owned());
        }
        nic.attachment = Some(attachment);
        Ok(true)
    })
}

/// Sets the field that `key` names; whether there is one.
fn set(nic: &mut v1::NicSpec, key: &str, value: &str) -> Result<bool, String> {
    match key {
        "name" => value.clone_into(&mut nic.name),
        "mac" => value.clone_into(&mut nic.mac),
        "address" => value.clone_into(&mut nic.address),
        "publish" => {
            let ports = value.split('+').filter(|port| *port != "none").map(published);
            nic.published_ports = ports.collect::<Result<_, _>>()?;
        }
        "routed" => {
            let subnets = value.split('+').filter(|subnet| *subnet != "none");
            nic.routed_subnets = subnets.map(str::to_owned).collect();
        }
        "floating" => {
            let addresses = value.split('+').filter(|address| *address != "none");
            nic.floating_addresses = addresses.map(str::to_owned).collect();
        }
        "groups" => {
            let groups = value.split('+').filter(|group| *group != "none");
            nic.security_groups = groups.map(str::to_owned).collect();
        }
        "queues" => nic.queues = number(value)?,
        "mtu" => nic.mtu = number(value)?,
        "vlan" => nic.vlan = number(value)?,
        "mac-filter" => {
            nic.mac_filter = word(&[("on", true, ""), ("off", false, "")], value)?;
        }
        "metadata" => {
            nic.metadata = word(&[("on", true, ""), ("off", false, "")], value)?;
        }
        "boot-order" => nic.boot_order = number(value)?,
        "backend" => {
            const BACKENDS: Words<v1::NicBackend> = &[
                ("userspace", v1::NicBackend::Userspace, ""),
                ("vhost", v1::NicBackend::Vhost, ""),
            ];
            nic.set_backend(word(BACKENDS, value)?);
        }
        "link" => {
            nic.link_down = word(&[("up", false, ""), ("down", true, "")], value)?;
        }
        "off" => {
            nic.disabled_offloads = value
                .split('+')
                .filter(|word| *word != "none")
                .map(|word| Ok(offload(word)?.into()))
                .collect::<Result<_, String>>()?;
        }
        "rx-bps" => bytes_per_second(&mut nic.receive_limit, bytes(value)?),
        "rx-pps" => packets_per_second(&mut nic.receive_limit, number(value)?),
        "tx-bps" => bytes_per_second(&mut nic.transmit_limit, bytes(value)?),
        "tx-pps" => packets_per_second(&mut nic.transmit_limit, number(value)?),
        _ => return Ok(false),
    }
    Ok(true)
}

/// Returns the NIC fields, as in the protocol files, of the keys in a text. Both limits of a
/// direction are one field: a limit that the text does not name stays unchanged.
pub fn fields(text: &str) -> impl Iterator<Item = &str> {
    let keys = text.split(',').filter_map(|part| Some(part.split_once('=')?.0));
    keys.map(|key| match key {
        "link" => "link_down",
        "off" => "disabled_offloads",
        "rx-bps" | "rx-pps" => "receive_limit",
        "tx-bps" | "tx-pps" => "transmit_limit",
        "publish" => "published_ports",
        "routed" => "routed_subnets",
        "floating" => "floating_addresses",
        "groups" => "security_groups",
        "mac-filter" => "mac_filter",
        "boot-order" => "boot_order",
        // The other keys have the names of the fields.
        field => field,
    })
}

fn bytes_per_second(limit: &mut Option<v1::RateLimit>, rate: u64) {
    limit.get_or_insert_default().bytes_per_second = rate;
    drop_empty(limit);
}

fn packets_per_second(limit: &mut Option<v1::RateLimit>, rate: u64) {
    limit.get_or_insert_default().operations_per_second = rate;
    drop_empty(limit);
}

/// Removes a limit without any rate.
fn drop_empty(limit: &mut Option<v1::RateLimit>) {
    *limit = limit.filter(|limit| limit.bytes_per_second != 0 || limit.operations_per_second != 0);
}

/// Ports from `8080:80/tcp`, `8080:80`, `8080`, `8000-8010:80` or `192.0.2.1:8080:80`. An IPv6 address is in brackets.
fn published(text: &str) -> Result<v1::PublishedPort, String> {
    let (ports, protocol) = match text.split_once('/') {
        None | Some((_, "tcp")) => (text.trim_end_matches("/tcp"), v1::PortProtocol::Tcp),
        Some((ports, "udp")) => (ports, v1::PortProtocol::Udp),
        Some(_) => return Err("the protocol must be tcp or udp".to_owned()),
    };
    let bracketed = ports.strip_prefix('[').and_then(|rest| rest.split_once("]:"));
    let (address, ports) = match bracketed.or_else(|| ports.split_once(':')) {
        Some((address, ports)) if address.contains(['.', ':']) => (address, ports),
        _ => ("", ports),
    };
    let (node, guest) = ports.split_once(':').unwrap_or((ports, ""));
    let (first, last) = node.split_once('-').unwrap_or((node, ""));
    let guest = match guest {
        "" => first,
        guest => guest,
    };
    Ok(v1::PublishedPort {
        protocol: protocol.into(),
        node_port: number(first)?,
        guest_port: number(guest)?,
        address: address.to_owned(),
        last_node_port: if last.is_empty() { 0 } else { number(last)? },
    })
}

fn offload(word: &str) -> Result<NicOffload, String> {
    match word {
        "checksum" => Ok(NicOffload::Checksum),
        "tso" => Ok(NicOffload::TcpSegmentation),
        "uso" => Ok(NicOffload::UdpSegmentation),
        "merge" => Ok(NicOffload::MergeableBuffers),
        _ => Err("must be checksum, tso, uso or merge, several with + between them, or none".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nic_is_read_from_keys_and_values() {
        let text = "bridge=br0,queues=4,mtu=9000,backend=vhost,off=tso+uso,link=down,rx-bps=10Mi,rx-pps=5000,tx-pps=100";
        let nic = from_text(1, text).unwrap();
        assert_eq!(
            (nic.name.as_str(), nic.queues, nic.mtu, nic.link_down),
            ("eth1", 4, 9000, true)
        );
        assert_eq!(nic.attachment, Some(Attachment::Bridge("br0".into())));
        assert_eq!(nic.disabled_offloads, [2, 3]);
        assert_eq!(nic.backend(), v1::NicBackend::Vhost);
        let receive = nic.receive_limit.unwrap();
        assert_eq!(
            (receive.bytes_per_second, receive.operations_per_second),
            (10 << 20, 5000)
        );
        assert_eq!(nic.transmit_limit.unwrap().operations_per_second, 100);
    }

    #[test]
    fn published_ports_have_addresses_and_ranges() {
        for (text, expected) in [
            ("8080", ("", 8080, 0, 8080)),
            ("8000-8010:80", ("", 8000, 8010, 80)),
            ("192.0.2.1:8080:80", ("192.0.2.1", 8080, 0, 80)),
            ("192.0.2.1:8080", ("192.0.2.1", 8080, 0, 8080)),
            ("[2001:db8::1]:53-54", ("2001:db8::1", 53, 54, 53)),
        ] {
            let port = published(text).unwrap();
            let found = (
                port.address.as_str(),
                port.node_port,
                port.last_node_port,
                port.guest_port,
            );
            assert_eq!(found, expected, "{text}");
        }
        assert!(published("8000-:80").is_ok_and(|port| port.last_node_port == 0));
        assert!(published("a-b").is_err() && published("192.0.2.1:").is_err());
    }

    #[test]
    fn nic_in_a_network_has_address_and_published_ports() {
        let nic = from_text(0, "network=lan,address=10.80.0.9,publish=8080:80+53/udp").unwrap();
        assert_eq!(nic.attachment, Some(Attachment::Network("lan".into())));
        assert_eq!(nic.address, "10.80.0.9");
        let ports: Vec<_> = nic
            .published_ports
            .iter()
            .map(|port| (port.protocol, port.node_port, port.guest_port))
            .collect();
        assert_eq!(ports, [(1, 8080, 80), (2, 53, 53)]);
    }

    #[test]
    fn nic_in_the_network_of_a_pod_may_name_the_interface() {
        for (text, interface) in [("pod-network", ""), ("mtu=1400,pod-network=net1", "net1")] {
            let nic = from_text(0, text).unwrap();
            let interface = interface.to_owned();
            let expected = Attachment::PodNetwork(v1::PodNetwork { interface });
            assert_eq!(nic.attachment, Some(expected), "{text}");
        }
        assert!(from_text(0, "pod-network,bridge=br0").is_err());
        assert!(from_text(0, "bridge").is_err());
    }

    #[test]
    fn lists_of_names_and_addresses_are_emptied_by_none() {
        let text =
            "network=lan,routed=10.90.0.0/24+fd00:90::/64,floating=192.0.2.7+2001:db8::7,groups=web+db";
        let mut nic = from_text(0, text).unwrap();
        assert_eq!(nic.routed_subnets, ["10.90.0.0/24", "fd00:90::/64"]);
        assert_eq!(nic.floating_addresses, ["192.0.2.7", "2001:db8::7"]);
        assert_eq!(nic.security_groups, ["web", "db"]);
        apply(&mut nic, "routed=none,floating=none,groups=none", "KEY=VALUE").unwrap();
        assert_eq!(nic, from_text(0, "network=lan").unwrap());
    }

    #[test]
    fn keys_change_a_nic_and_zero_removes_a_limit() {
        let mut nic = from_text(0, "tap=tap0,off=tso,tx-bps=1Mi,link=down").unwrap();
        apply(&mut nic, "off=none,tx-bps=0,link=up", "KEY=VALUE").unwrap();
        let wanted = from_text(0, "tap=tap0").unwrap();
        assert_eq!(nic, wanted);
    }

    #[test]
    fn each_key_sets_a_field_of_the_api() {
        let text = "queues=1,mtu=9,vlan=5,mac-filter=on,metadata=on,boot-order=1,backend=vhost,name=a,mac=b,bridge=c,tap=d,network=e,address=f,publish=1,routed=10.90.0.0/24,floating=192.0.2.7,groups=web,link=up,off=tso,rx-bps=1,rx-pps=1,tx-bps=1,tx-pps=1";
        let paths: Vec<_> = fields(text)
            .map(|field| format!("spec.nics[eth0].{field}"))
            .collect();
        vmmd_spec::mask::UpdateMask::new("mask", &paths).unwrap();
    }

    #[test]
    fn wrong_key_or_value_is_named() {
        for (text, expected) in [
            ("bridge=a,tap=b", "one of network=, bridge=, tap= and pod-network"),
            ("bridge=a,speed=9", "speed=9"),
            ("bridge=a,off=all", "checksum, tso, uso or merge"),
            ("bridge=a,link=maybe", "up or down"),
            ("bridge=a,mac-filter=maybe", "on or off"),
            ("bridge=a,backend=fast", "userspace or vhost"),
            ("bridge=a,queues=many", "whole number"),
        ] {
            let message = from_text(0, text).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
