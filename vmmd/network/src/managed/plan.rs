//! How a bridge of the node differs from what its network needs: a pure function.

use std::net::IpAddr;

/// A bridge as a network needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Its MAC address, so that it does not change as VMs come and go.
    pub mac: [u8; 6],
    /// The node's addresses, with the bits of their prefixes.
    pub addresses: Vec<(IpAddr, u8)>,
    /// In bytes.
    pub mtu: u32,
    /// Alias of the interface, for users.
    pub alias: String,
}

/// A bridge as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Interface index.
    pub index: u32,
    /// It is a bridge.
    pub is_bridge: bool,
    /// It is up.
    pub up: bool,
    /// In bytes.
    pub mtu: u32,
    /// Its addresses but those of the link, with the bits of their prefixes.
    pub addresses: Vec<(IpAddr, u8)>,
}

/// Something to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make the bridge, and bring it up.
    Create(Wanted),
    /// Give a bridge its MTU, and bring it up.
    Adjust(u32, u32),
    /// Give a bridge an address.
    AddAddress(u32, (IpAddr, u8)),
    /// Take an address from a bridge.
    RemoveAddress(u32, (IpAddr, u8)),
    /// Take an interface away.
    Delete(u32),
}

/// Steps for the bridge of a network; without `wanted` the bridge is removed.
pub fn plan(wanted: Option<&Wanted>, found: Option<&Found>) -> Vec<Step> {
    match (wanted, found) {
        (None, None) => Vec::new(),
        (None, Some(found)) => vec![Step::Delete(found.index)],
        (Some(wanted), None) => vec![Step::Create(wanted.clone())],
        (Some(wanted), Some(found)) if !found.is_bridge => {
            vec![Step::Delete(found.index), Step::Create(wanted.clone())]
        }
        (Some(wanted), Some(found)) => {
            let mut steps = Vec::new();
            if !found.up || found.mtu != wanted.mtu {
                steps.push(Step::Adjust(found.index, wanted.mtu));
            }
            let missing = wanted
                .addresses
                .iter()
                .filter(|address| !found.addresses.contains(address));
            steps.extend(missing.map(|address| Step::AddAddress(found.index, *address)));
            let others = found
                .addresses
                .iter()
                .filter(|address| !wanted.addresses.contains(address));
            steps.extend(others.map(|address| Step::RemoveAddress(found.index, *address)));
            steps
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const ADDRESS: (IpAddr, u8) = (IpAddr::V4(Ipv4Addr::new(10, 80, 0, 1)), 24);

    fn wanted() -> Wanted {
        Wanted {
            mac: [2, 0, 0, 0, 0, 1],
            addresses: vec![ADDRESS],
            mtu: 1500,
            alias: "vmmd: lan".into(),
        }
    }

    fn found() -> Found {
        Found {
            index: 7,
            is_bridge: true,
            up: true,
            mtu: 1500,
            addresses: vec![ADDRESS],
        }
    }

    #[test]
    fn a_bridge_that_is_as_wanted_is_left_alone() {
        assert_eq!(plan(Some(&wanted()), Some(&found())), []);
        assert_eq!(plan(None, None), []);
    }

    #[test]
    fn a_bridge_is_made_and_taken_away() {
        assert_eq!(plan(Some(&wanted()), None), [Step::Create(wanted())]);
        assert_eq!(plan(None, Some(&found())), [Step::Delete(7)]);
    }

    #[test]
    fn what_others_changed_is_put_right() {
        let other = (Ipv4Addr::new(192, 168, 1, 1).into(), 24);
        for (changed, expected) in [
            (Found { up: false, ..found() }, vec![Step::Adjust(7, 1500)]),
            (Found { mtu: 9000, ..found() }, vec![Step::Adjust(7, 1500)]),
            (
                Found {
                    addresses: vec![other],
                    ..found()
                },
                vec![Step::AddAddress(7, ADDRESS), Step::RemoveAddress(7, other)],
            ),
            (
                Found {
                    is_bridge: false,
                    ..found()
                },
                vec![Step::Delete(7), Step::Create(wanted())],
            ),
        ] {
            assert_eq!(plan(Some(&wanted()), Some(&changed)), expected);
        }
    }
}
