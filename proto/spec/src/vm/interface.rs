//! A network interface of a VM.

use vmmd_api::v1;

use super::{MAX_IFNAME, name};
use crate::{
    Violations,
    disk::{BootOrder, RateLimit},
    firewall::Addresses,
    name::Name,
    nic::{self, Access, Mac, NicAddress, NicSwitches},
};

/// A network interface of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Unique in the VM.
    pub name: Name,
    /// Where it is attached.
    pub attachment: Attachment,
    /// The daemon chooses one when there is none.
    pub mac: Option<Mac>,
    /// Pairs of queues: 1 to [`MAX_QUEUES`](nic::MAX_QUEUES).
    pub queues: u16,
    /// Largest packet without the Ethernet header, in bytes: 68 to 65,535. `None` takes that of the
    /// attachment.
    pub mtu: Option<u16>,
    /// Features that are not offered to the guest.
    pub without: NicSwitches,
    /// The guest sees a cable.
    pub link_up: bool,
    /// Limit on traffic to the guest. Operations are packets.
    pub receive_limit: Option<RateLimit>,
    /// Limit on traffic from the guest.
    pub transmit_limit: Option<RateLimit>,
    /// The kernel carries packets (vhost-net).
    pub vhost: bool,
    /// VLAN on its bridge, one of [`VLANS`](nic::VLANS); that of the bridge for new ports when there is none.
    pub vlan: Option<u16>,
    /// Frames of the guest with another source MAC address than the NIC's are dropped, on a bridge of an operator.
    pub mac_filter: bool,
    /// The guest reads the documents of its cloud-init over it. Only in a network of the node.
    pub metadata: bool,
    /// Position in the boot order.
    pub boot_order: Option<BootOrder>,
}

impl Nic {
    /// Its MTU on something whose MTU is `host`, in bytes.
    pub fn mtu_on(&self, host: u32) -> u32 {
        let most = host.min(u32::from(u16::MAX));
        self.mtu.map_or(most, |mtu| most.min(mtu.into()))
    }
}

/// Attachment of a NIC on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attachment {
    /// A new tap on this bridge.
    Bridge(String),
    /// This tap.
    Tap(String),
    /// A network that the node makes.
    Network {
        /// Its name.
        name: Name,
        /// The address there; one that is free when there is none.
        address: Option<NicAddress>,
        /// Connections of the guest.
        access: Access,
    },
    /// The network of the VM's pod.
    PodNetwork {
        /// The pod's interface that leads to the cluster; that of the default route when there is none.
        interface: Option<String>,
    },
}

/// Adds a violation for subnets that are behind two NICs, and for floating addresses of two.
pub(super) fn disjoint_subnets(found: &mut Violations, nics: &[Nic]) {
    let mut seen: Vec<(&Name, Addresses)> = Vec::new();
    for (index, nic) in nics.iter().enumerate() {
        let Attachment::Network { access, .. } = &nic.attachment else {
            continue;
        };
        for subnet in &access.subnets {
            let clash = seen.iter().find(|(_, other)| other.overlaps(*subnet));
            if let Some((other, range)) = clash {
                let wrong = format_args!("{subnet} overlaps with {range} of NIC \"{other}\"");
                found.add(format_args!("spec.nics[{index}].routedSubnets"), wrong);
            }
        }
        for address in &access.floating {
            let clash = seen.iter().find(|(_, other)| other.has((*address).into()));
            if let Some((other, _)) = clash {
                let wrong = format_args!("NIC \"{other}\" has {address}, too");
                found.add(format_args!("spec.nics[{index}].floatingAddresses"), wrong);
            }
        }
        let floating = access.floating.iter().map(|address| Addresses::from(*address));
        let own = access.subnets.iter().copied().chain(floating);
        seen.extend(own.map(|range| (&nic.name, range)));
    }
}

/// Validates a NIC; `field` is its path: `spec.nics[1]`.
pub fn nic(found: &mut Violations, field: &str, nic: &v1::NicSpec) -> Option<Nic> {
    let name = name(found, &format!("{field}.name"), &nic.name);
    let attachment = match &nic.attachment {
        Some(v1::nic_spec::Attachment::Bridge(bridge)) => {
            interface(found, format_args!("{field}.bridge"), bridge).map(Attachment::Bridge)
        }
        Some(v1::nic_spec::Attachment::Tap(tap)) => {
            interface(found, format_args!("{field}.tap"), tap).map(Attachment::Tap)
        }
        Some(v1::nic_spec::Attachment::Network(network)) => {
            let network = self::name(found, &format!("{field}.network"), network);
            let (address, access) = nic::in_network(found, field, nic);
            network.map(|name| Attachment::Network {
                name,
                address,
                access,
            })
        }
        Some(v1::nic_spec::Attachment::PodNetwork(pod)) => {
            let field = format_args!("{field}.podNetwork.interface");
            let name = Some(pod.interface.as_str()).filter(|name| !name.is_empty());
            match name.map(|name| interface(found, field, name)) {
                Some(None) => None,
                interface => Some(Attachment::PodNetwork {
                    interface: interface.flatten(),
                }),
            }
        }
        None => {
            let wanted = "must say what it is attached to: give `network`, `bridge`, `tap` or `podNetwork`";
            found.add(field, wanted);
            None
        }
    };
    if !matches!(nic.attachment, Some(v1::nic_spec::Attachment::Network(_))) {
        nic::refuse_in_network(found, field, nic);
    }
    let mac = if nic.mac.is_empty() {
        None
    } else {
        let mac = nic.mac.parse::<Mac>();
        mac.map_err(|error| found.add(format_args!("{field}.mac"), error))
            .ok()
    };
    let limit = |found: &mut Violations, what: &str, limit: Option<&v1::RateLimit>| {
        let limit = limit.filter(|limit| **limit != v1::RateLimit::default())?;
        Some(RateLimit::new(found, &format!("{field}.{what}"), limit))
    };
    let receive_limit = limit(found, "receiveLimit", nic.receive_limit.as_ref());
    let transmit_limit = limit(found, "transmitLimit", nic.transmit_limit.as_ref());
    let queues = nic::queues(found, field, nic.queues);
    let mtu = nic::mtu(found, field, nic.mtu);
    let without = NicSwitches::new(found, field, &nic.disabled_offloads);
    let vhost = nic::vhost(found, field, nic.backend);
    let (vlan, mac_filter) = nic::on_bridge(found, field, nic);
    let boot_order = BootOrder::new(found, field, nic.boot_order);
    Some(Nic {
        name: name?,
        attachment: attachment?,
        mac,
        queues,
        mtu,
        without,
        link_up: !nic.link_down,
        receive_limit,
        transmit_limit,
        vhost,
        vlan,
        mac_filter,
        metadata: nic.metadata,
        boot_order,
    })
}

fn interface(found: &mut Violations, field: impl std::fmt::Display, name: &str) -> Option<String> {
    let allowed = |byte: u8| byte.is_ascii_graphic() && byte != b'/' && byte != b':';
    let dots = name == "." || name == "..";
    if name.is_empty() || name.len() > MAX_IFNAME || dots || !name.bytes().all(allowed) {
        found.add(
            field,
            format_args!("must be an interface name of 1 to {MAX_IFNAME} characters"),
        );
        return None;
    }
    Some(name.to_owned())
}
