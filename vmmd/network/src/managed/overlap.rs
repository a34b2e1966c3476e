//! Whether addresses of a new network are in use on the node already.

use std::net::IpAddr;

use vmmd_host::failure::Failure;
use vmmd_spec::network::{Ipv6Net, NewNetwork};

use super::{Networks, Ports, bridge, describe::failed};

/// An address in it, and the bits of its prefix.
type Range = (IpAddr, u8);

impl Networks {
    /// Refuses address ranges that the node reaches over an interface not owned by vmmd: the node
    /// could not reach these addresses any more. The default route does not count, because it
    /// covers all other addresses.
    pub(super) async fn no_clash_with_the_node(
        &self,
        host: Ports<'_>,
        new: &NewNetwork,
    ) -> Result<(), Failure> {
        let ours: Vec<_> = self.registry.lock().records().map(bridge).collect();
        let seen = host.links.survey().await.map_err(|error| failed(&error))?;
        let routes = host.links.routes().await.map_err(|error| failed(&error))?;
        let net = new.spec.subnet.map(|subnet| subnet.net);
        let wanted = [
            net.map(|net| ("ipv4Cidr", (net.first().into(), net.prefix()))),
            new.spec
                .net6
                .map(|net| ("ipv6Cidr", (net.first().into(), Ipv6Net::PREFIX))),
        ];
        for (interface, (link, facts)) in seen.iter().filter(|(name, _)| !ours.contains(name)) {
            let behind = routes.iter().filter(|(_, index)| *index == link.index);
            let theirs = facts.addresses.iter().chain(behind.map(|(range, _)| range));
            for (address, prefix) in theirs {
                for (field, range) in wanted.into_iter().flatten() {
                    if overlap(range, (*address, *prefix)) {
                        let message = format!(
                            "network.spec.{field}: {}/{} overlaps with {address}/{prefix} of the node's interface \"{interface}\": \
                             choose another range",
                            range.0, range.1
                        );
                        return Err(Failure::precondition("NETWORK_OVERLAPS", message));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Whether an address is in both.
fn overlap(one: Range, other: Range) -> bool {
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
