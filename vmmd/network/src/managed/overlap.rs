//! Whether addresses of a new network, or of a subnet behind a guest, are in use on the node already.

use std::net::IpAddr;

use vmmd_host::failure::Failure;
use vmmd_spec::network::{Ipv6Net, NewNetwork};

use super::{Networks, Ports, bridge, describe::failed};

/// An address in it, and the bits of its prefix.
pub type Range = (IpAddr, u8);

/// A range that the node reaches over an interface not owned by vmmd.
#[derive(Debug)]
pub struct Clash {
    /// The range that overlaps with it.
    pub wanted: Range,
    found: Range,
    interface: String,
}

impl Clash {
    /// The range of the node.
    pub fn in_words(&self) -> String {
        let ((address, prefix), interface) = (self.found, &self.interface);
        format!("{address}/{prefix} of the node's interface \"{interface}\"")
    }
}

impl Networks {
    /// Refuses address ranges that the node reaches over an interface not owned by vmmd, or behind a guest: the node
    /// could not reach these addresses any more.
    pub(super) async fn no_clash_with_the_node(
        &self,
        host: Ports<'_>,
        new: &NewNetwork,
    ) -> Result<(), Failure> {
        let net4 = new.spec.subnet.map(|subnet| subnet.net);
        let net4 = net4.map(|net| (net.first().into(), net.prefix()));
        let net6 = new.spec.net6.map(|net| (net.first().into(), Ipv6Net::PREFIX));
        let wanted: Vec<Range> = net4.into_iter().chain(net6).collect();
        let clash = self.clash_with_the_node(host, &wanted).await?;
        let clash = clash.map(|clash| (clash.wanted, clash.in_words()));
        let Some(((address, prefix), other)) = clash.or_else(|| self.behind_guests(&wanted)) else {
            return Ok(());
        };
        let field = if address.is_ipv6() { "ipv6Cidr" } else { "ipv4Cidr" };
        let message =
            format!("network.spec.{field}: {address}/{prefix} overlaps with {other}: choose another range");
        Err(Failure::precondition("NETWORK_OVERLAPS", message))
    }

    /// The first range of the node that overlaps with one of these. The default route does not count, because it
    /// covers all other addresses.
    pub(super) async fn clash_with_the_node(
        &self,
        host: Ports<'_>,
        wanted: &[Range],
    ) -> Result<Option<Clash>, Failure> {
        if wanted.is_empty() {
            return Ok(None);
        }
        let ours: Vec<_> = self.registry.lock().records().map(bridge).collect();
        let seen = host.links.survey().await.map_err(|error| failed(&error))?;
        let routes = host.links.routes().await.map_err(|error| failed(&error))?;
        for (interface, (link, facts)) in seen.iter().filter(|(name, _)| !ours.contains(name)) {
            let behind = routes.iter().filter(|(_, index)| *index == link.index);
            let mut theirs = facts.addresses.iter().chain(behind.map(|(range, _)| range));
            let clash = theirs.find_map(|found| {
                let wanted = wanted.iter().find(|wanted| overlap(**wanted, *found))?;
                Some((*wanted, *found))
            });
            if let Some((wanted, found)) = clash {
                let interface = interface.clone();
                return Ok(Some(Clash {
                    wanted,
                    found,
                    interface,
                }));
            }
        }
        Ok(None)
    }
}

/// Whether an address is in both.
pub fn overlap(one: Range, other: Range) -> bool {
    let same_bits = match (one.0, other.0) {
        (IpAddr::V4(one), IpAddr::V4(other)) => (one.to_bits() ^ other.to_bits()).leading_zeros(),
        (IpAddr::V6(one), IpAddr::V6(other)) => (one.to_bits() ^ other.to_bits()).leading_zeros(),
        _ => return false,
    };
    same_bits >= u32::from(one.1.min(other.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_overlap_when_one_is_in_the_other() {
        let range = |text: &str| {
            let (address, prefix) = text.split_once('/').unwrap();
            (address.parse().unwrap(), prefix.parse().unwrap())
        };
        for (one, other, expected) in [
            ("192.168.1.0/25", "192.168.1.200/24", true),
            ("192.168.1.0/25", "192.168.1.200/25", false),
            ("10.80.0.0/16", "10.80.7.1/32", true),
            ("10.80.0.0/16", "10.81.7.1/32", false),
            ("fd00:80::/64", "fd00:80::5/128", true),
            ("fd00:80::/64", "fd00::/16", true),
            ("fd00:80::/64", "fd00:80:0:1::/64", false),
            ("10.80.0.0/24", "a50::/8", false),
        ] {
            assert_eq!(overlap(range(one), range(other)), expected, "{one} {other}");
            assert_eq!(overlap(range(other), range(one)), expected, "{other} {one}");
        }
    }
}
