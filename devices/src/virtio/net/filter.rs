//! Filter of incoming packets on behalf of the driver (virtio 1.3, 5.1.6.5.1 to 5.1.6.5.3).
//!
//! A driver without settings gets all packets. The filter is a service to the driver and no
//! protection: the host decides which packets reach a guest's network.

use std::collections::BTreeSet;

use crate::state::{StateError, check, message};

/// Addresses that a table holds. Above that all of the kind are let through.
const TABLE: usize = 64;

/// Bytes of the bitmap of VLAN ids, which have 12 bits.
const VLAN_BYTES: usize = 512;

/// Bytes of a frame that the filter looks at: the Ethernet header with a VLAN tag.
pub(super) const LOOKS_AT: usize = 18;

/// EtherType of a VLAN tag (IEEE 802.1Q).
const VLAN_TAG: [u8; 2] = [0x81, 0x00];

pub(super) type Address = [u8; 6];

/// Addresses of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Table {
    addresses: BTreeSet<Address>,
    /// There are more than it holds.
    overflow: bool,
}

impl Table {
    /// Creates a table from `bytes`, six bytes per address. An incomplete address at the end is
    /// dropped.
    pub(super) fn new(bytes: &[u8]) -> Self {
        let (addresses, _) = bytes.as_chunks::<6>();
        if addresses.len() > TABLE {
            return Self {
                addresses: BTreeSet::new(),
                overflow: true,
            };
        }
        Self {
            addresses: addresses.iter().copied().collect(),
            overflow: false,
        }
    }

    fn has(&self, address: &Address) -> bool {
        self.overflow || self.addresses.contains(address)
    }

    fn bytes(&self) -> Vec<u8> {
        self.addresses.iter().flatten().copied().collect()
    }

    fn restored(field: &'static str, bytes: &[u8], overflow: bool) -> Result<Self, StateError> {
        let fits = bytes.len().is_multiple_of(6) && bytes.len() <= TABLE.saturating_mul(6);
        check(fits, field, "no list of up to 64 addresses")?;
        check(
            !overflow || bytes.is_empty(),
            field,
            "addresses besides an overflow",
        )?;
        let addresses = bytes.as_chunks::<6>().0.iter().copied().collect();
        Ok(Self { addresses, overflow })
    }
}

/// Filter settings of a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Filter {
    pub promiscuous: bool,
    pub all_multicast: bool,
    pub all_unicast: bool,
    pub no_multicast: bool,
    pub no_unicast: bool,
    pub no_broadcast: bool,
    pub unicast: Table,
    pub multicast: Table,
    vlans: Box<[u8; VLAN_BYTES]>,
}

impl Default for Filter {
    /// Filter of a driver without settings.
    fn default() -> Self {
        Self {
            promiscuous: true,
            all_multicast: false,
            all_unicast: false,
            no_multicast: false,
            no_unicast: false,
            no_broadcast: false,
            unicast: Table::default(),
            multicast: Table::default(),
            vlans: Box::new([0; VLAN_BYTES]),
        }
    }
}

impl Filter {
    /// Whether a frame is for the driver: one that begins with `start`, at least [`LOOKS_AT`] bytes of it or zeroes. `mac` is
    /// the interface's address; `vlans` says whether packets of a VLAN are let through only if it was added.
    pub(super) fn accepts(&self, start: &[u8; LOOKS_AT], mac: &Address, vlans: bool) -> bool {
        if self.promiscuous {
            return true;
        }
        let ([destination @ .., _, _, _, _, _, _, t0, t1, v0, v1, _, _], first) = (*start, start[0]);
        let vlan = u16::from_be_bytes([v0, v1]) & 0xfff;
        if vlans && [t0, t1] == VLAN_TAG && !self.has_vlan(vlan) {
            return false;
        }
        if destination == [0xff; 6] {
            return !self.no_broadcast;
        }
        if first & 1 == 1 {
            return !self.no_multicast && (self.all_multicast || self.multicast.has(&destination));
        }
        !self.no_unicast && (self.all_unicast || destination == *mac || self.unicast.has(&destination))
    }

    fn has_vlan(&self, id: u16) -> bool {
        let (byte, bit) = place(id);
        self.vlans.get(byte).is_some_and(|value| value & bit != 0)
    }

    /// Adds a VLAN or takes it out; false when there is no such id.
    pub(super) fn set_vlan(&mut self, id: u16, wanted: bool) -> bool {
        let (byte, bit) = place(id);
        let Some(value) = self.vlans.get_mut(byte) else {
            return false;
        };
        *value = if wanted { *value | bit } else { *value & !bit };
        true
    }

    pub(super) fn save(&self) -> Option<message::VirtioNetFilter> {
        if *self == Self::default() {
            return None;
        }
        let has_vlans = self.vlans.iter().any(|byte| *byte != 0);
        Some(message::VirtioNetFilter {
            promiscuous: self.promiscuous,
            all_multicast: self.all_multicast,
            all_unicast: self.all_unicast,
            no_multicast: self.no_multicast,
            no_unicast: self.no_unicast,
            no_broadcast: self.no_broadcast,
            unicast: self.unicast.bytes(),
            unicast_overflow: self.unicast.overflow,
            multicast: self.multicast.bytes(),
            multicast_overflow: self.multicast.overflow,
            vlans: if has_vlans {
                self.vlans.to_vec()
            } else {
                Vec::new()
            },
        })
    }

    pub(super) fn restored(saved: Option<&message::VirtioNetFilter>) -> Result<Self, StateError> {
        let Some(saved) = saved else {
            return Ok(Self::default());
        };
        let mut vlans = Box::new([0; VLAN_BYTES]);
        if !saved.vlans.is_empty() {
            check(saved.vlans.len() == VLAN_BYTES, "filter.vlans", "not 512 bytes")?;
            vlans.copy_from_slice(&saved.vlans);
        }
        Ok(Self {
            promiscuous: saved.promiscuous,
            all_multicast: saved.all_multicast,
            all_unicast: saved.all_unicast,
            no_multicast: saved.no_multicast,
            no_unicast: saved.no_unicast,
            no_broadcast: saved.no_broadcast,
            unicast: Table::restored("filter.unicast", &saved.unicast, saved.unicast_overflow)?,
            multicast: Table::restored("filter.multicast", &saved.multicast, saved.multicast_overflow)?,
            vlans,
        })
    }
}

/// Byte and bit of a VLAN in the bitmap.
fn place(id: u16) -> (usize, u8) {
    (usize::from(id >> 3), 1 << (id & 7))
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, clippy::arithmetic_side_effects)]
mod tests {
    use super::*;

    const MAC: Address = [0x52, 0x54, 0, 1, 2, 3];
    const OTHER: Address = [0x52, 0x54, 0, 9, 9, 9];
    const GROUP: Address = [0x33, 0x33, 0, 0, 0, 1];

    fn frame(to: Address, vlan: Option<u16>) -> [u8; LOOKS_AT] {
        let mut frame = [0; LOOKS_AT];
        frame[..6].copy_from_slice(&to);
        if let Some(id) = vlan {
            frame[12..14].copy_from_slice(&VLAN_TAG);
            frame[14..16].copy_from_slice(&(0xe000 | id).to_be_bytes());
        }
        frame
    }

    fn quiet() -> Filter {
        Filter {
            promiscuous: false,
            ..Filter::default()
        }
    }

    #[test]
    fn a_driver_that_set_nothing_gets_everything() {
        for to in [MAC, OTHER, GROUP, [0xff; 6]] {
            assert!(Filter::default().accepts(&frame(to, Some(5)), &MAC, true));
        }
    }

    #[test]
    fn a_filter_lets_its_own_address_its_groups_and_broadcasts_through() {
        let mut filter = quiet();
        let accepts = |filter: &Filter, to| filter.accepts(&frame(to, None), &MAC, false);
        assert!(accepts(&filter, MAC) && accepts(&filter, [0xff; 6]));
        assert!(!accepts(&filter, OTHER) && !accepts(&filter, GROUP));
        filter.multicast = Table::new(&GROUP);
        filter.unicast = Table::new(&OTHER);
        assert!(accepts(&filter, OTHER) && accepts(&filter, GROUP));
        (filter.no_broadcast, filter.no_multicast, filter.no_unicast) = (true, true, true);
        for to in [MAC, OTHER, GROUP, [0xff; 6]] {
            assert!(!accepts(&filter, to), "{to:?}");
        }
    }

    #[test]
    fn a_table_with_too_many_addresses_lets_all_through() {
        let many: Vec<u8> = (0..=64_u8).flat_map(|last| [0x33, 0x33, 0, 0, 1, last]).collect();
        let filter = Filter {
            multicast: Table::new(&many),
            ..quiet()
        };
        assert!(filter.accepts(&frame(GROUP, None), &MAC, false));
        assert!(!filter.accepts(&frame(OTHER, None), &MAC, false));
    }

    #[test]
    fn packets_of_a_vlan_come_when_it_was_added() {
        let mut filter = quiet();
        assert!(!filter.accepts(&frame(MAC, Some(7)), &MAC, true));
        assert!(filter.accepts(&frame(MAC, Some(7)), &MAC, false));
        assert!(filter.set_vlan(7, true) && !filter.set_vlan(4096, true));
        assert!(filter.accepts(&frame(MAC, Some(7)), &MAC, true));
        assert!(!filter.accepts(&frame(MAC, Some(8)), &MAC, true));
        assert!(filter.set_vlan(7, false) && !filter.accepts(&frame(MAC, Some(7)), &MAC, true));
    }

    #[test]
    fn a_filter_is_saved_and_restored() {
        let mut filter = quiet();
        filter.multicast = Table::new(&GROUP);
        filter.unicast = Table::new(&[0; 6 * 65]);
        assert!(filter.set_vlan(4095, true));
        for filter in [filter, Filter::default()] {
            assert_eq!(Filter::restored(filter.save().as_ref()).ok(), Some(filter));
        }
    }
}
