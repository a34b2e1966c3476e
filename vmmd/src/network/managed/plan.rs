//! How the bridges of the node differ from those that the networks need: a pure function.

use std::{collections::BTreeMap, net::Ipv4Addr};

/// A bridge as a network needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Its MAC address, so that it does not change as VMs come and go.
    pub mac: [u8; 6],
    /// The node's address, with the bits of its prefix.
    pub address: (Ipv4Addr, u8),
    /// In bytes.
    pub mtu: u32,
    /// What people see of it.
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
    /// Its IPv4 addresses, with the bits of their prefixes.
    pub addresses: Vec<(Ipv4Addr, u8)>,
}

/// Something to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make this bridge, and bring it up.
    Create(String, Wanted),
    /// Give a bridge its MTU, and bring it up.
    Adjust(u32, u32),
    /// Give a bridge an address.
    AddAddress(u32, (Ipv4Addr, u8)),
    /// Take an address from a bridge.
    RemoveAddress(u32, (Ipv4Addr, u8)),
    /// Take an interface away.
    Delete(u32),
}

/// What has to be done to the bridges, by name: `None` is wanted for one that is to go. Interfaces of other names are nobody's
/// business here.
pub fn plan(wanted: &BTreeMap<String, Option<Wanted>>, found: &BTreeMap<String, Found>) -> Vec<Step> {
    let mut steps = Vec::new();
    for (name, wanted) in wanted {
        match (wanted, found.get(name)) {
            (None, None) => {}
            (None, Some(found)) => steps.push(Step::Delete(found.index)),
            (Some(wanted), None) => steps.push(Step::Create(name.clone(), wanted.clone())),
            (Some(wanted), Some(found)) if !found.is_bridge => {
                steps.push(Step::Delete(found.index));
                steps.push(Step::Create(name.clone(), wanted.clone()));
            }
            (Some(wanted), Some(found)) => {
                if !found.up || found.mtu != wanted.mtu {
                    steps.push(Step::Adjust(found.index, wanted.mtu));
                }
                if !found.addresses.contains(&wanted.address) {
                    steps.push(Step::AddAddress(found.index, wanted.address));
                }
                let others = found.addresses.iter().filter(|address| **address != wanted.address);
                steps.extend(others.map(|address| Step::RemoveAddress(found.index, *address)));
            }
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 80, 0, 1), 24);

    fn wanted() -> Wanted {
        Wanted {
            mac: [2, 0, 0, 0, 0, 1],
            address: ADDRESS,
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

    fn steps(wanted: Option<Wanted>, found: Option<Found>) -> Vec<Step> {
        let wanted = BTreeMap::from([("vmb0".to_owned(), wanted)]);
        let found = found.map(|found| ("vmb0".to_owned(), found)).into_iter().collect();
        plan(&wanted, &found)
    }

    #[test]
    fn a_bridge_that_is_as_wanted_is_left_alone() {
        assert_eq!(steps(Some(wanted()), Some(found())), []);
        assert_eq!(steps(None, None), []);
    }

    #[test]
    fn a_bridge_is_made_and_taken_away() {
        assert_eq!(steps(Some(wanted()), None), [Step::Create("vmb0".into(), wanted())]);
        assert_eq!(steps(None, Some(found())), [Step::Delete(7)]);
    }

    #[test]
    fn what_others_changed_is_put_right() {
        let other = (Ipv4Addr::new(192, 168, 1, 1), 24);
        for (changed, expected) in [
            (Found { up: false, ..found() }, vec![Step::Adjust(7, 1500)]),
            (Found { mtu: 9000, ..found() }, vec![Step::Adjust(7, 1500)]),
            (
                Found { addresses: vec![other], ..found() },
                vec![Step::AddAddress(7, ADDRESS), Step::RemoveAddress(7, other)],
            ),
            (
                Found { is_bridge: false, ..found() },
                vec![Step::Delete(7), Step::Create("vmb0".into(), wanted())],
            ),
        ] {
            assert_eq!(steps(Some(wanted()), Some(changed)), expected);
        }
    }
}
