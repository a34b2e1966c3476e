//! Control queue: commands of the driver to the interface (virtio 1.3, 5.1.6.5).
//!
//! A command consists of a class, a number and data. The answer is one byte. The device answers an
//! invalid command with an error and changes no state.

use std::sync::Arc;

use virtio_bindings::virtio_net::{
    VIRTIO_NET_CTRL_ANNOUNCE, VIRTIO_NET_CTRL_ANNOUNCE_ACK, VIRTIO_NET_CTRL_GUEST_OFFLOADS,
    VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET, VIRTIO_NET_CTRL_MAC, VIRTIO_NET_CTRL_MAC_ADDR_SET,
    VIRTIO_NET_CTRL_MAC_TABLE_SET, VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, VIRTIO_NET_CTRL_RX,
    VIRTIO_NET_CTRL_RX_ALLMULTI, VIRTIO_NET_CTRL_RX_ALLUNI, VIRTIO_NET_CTRL_RX_NOBCAST,
    VIRTIO_NET_CTRL_RX_NOMULTI, VIRTIO_NET_CTRL_RX_NOUNI, VIRTIO_NET_CTRL_RX_PROMISC, VIRTIO_NET_CTRL_VLAN,
    VIRTIO_NET_CTRL_VLAN_ADD, VIRTIO_NET_CTRL_VLAN_DEL, VIRTIO_NET_ERR, VIRTIO_NET_F_CTRL_GUEST_OFFLOADS,
    VIRTIO_NET_F_CTRL_MAC_ADDR, VIRTIO_NET_F_CTRL_RX, VIRTIO_NET_F_CTRL_RX_EXTRA, VIRTIO_NET_F_CTRL_VLAN,
    VIRTIO_NET_F_GUEST_ANNOUNCE, VIRTIO_NET_F_MQ, VIRTIO_NET_OK,
};
use vmm_base::GuestMemory;

use super::{
    config,
    control::Shared,
    filter::{Address, Table},
};
use crate::virtio::{chain::Chain, device::Progress, fault::Fault, session::Session};

/// Class and number of a command.
const COMMAND: u32 = 2;

/// Longest data of a command: two tables, each with more addresses than the filter distinguishes.
const MAX_DATA: u32 = 65_536;

/// Executor of the control queue's commands.
pub(super) struct Commands {
    memory: Arc<GuestMemory>,
    chain: Chain,
    data: Vec<u8>,
}

impl Commands {
    pub(super) fn new(memory: Arc<GuestMemory>) -> Self {
        Self {
            memory,
            chain: Chain::new(),
            data: Vec::new(),
        }
    }

    /// Executes the commands in `queue`.
    pub(super) fn run(
        &mut self,
        session: &mut Session,
        queue: u16,
        shared: &Shared,
    ) -> Result<Progress, Fault> {
        while session.pop(queue, &mut self.chain)? {
            let head = self.chain.head();
            let length = self.chain.readable_len();
            if length < COMMAND || self.chain.writable_len() == 0 {
                return Err(Fault::Guest {
                    queue,
                    head,
                    reason: "no command, or no place for its answer",
                });
            }
            let done = length <= COMMAND.saturating_add(MAX_DATA) && self.execute(session, shared, length);
            if !done {
                session.count_guest_fault();
            }
            let answer = if done { VIRTIO_NET_OK } else { VIRTIO_NET_ERR };
            // Cannot fail: there is room for it.
            let _ = self
                .chain
                .write(&self.memory, 0, &[u8::try_from(answer).unwrap_or(1)]);
            session.add_used(queue, head, 1)?;
        }
        Ok(Progress::Done)
    }

    fn execute(&mut self, session: &Session, shared: &Shared, length: u32) -> bool {
        self.data.resize(length as usize, 0);
        if self.chain.read(&self.memory, 0, &mut self.data).is_err() {
            return false;
        }
        let [class, number, data @ ..] = self.data.as_slice() else {
            return false;
        };
        let (class, number) = (u32::from(*class), u32::from(*number));
        apply(shared, session.features(), class, number, data).is_some()
    }
}

/// Executes a command. Returns `None` if the command is invalid or fails.
fn apply(shared: &Shared, features: u64, class: u32, number: u32, data: &[u8]) -> Option<()> {
    let has = |bit: u32| features & 1 << bit != 0;
    match class {
        VIRTIO_NET_CTRL_RX => {
            let extra = number > VIRTIO_NET_CTRL_RX_ALLMULTI;
            let feature = if extra {
                VIRTIO_NET_F_CTRL_RX_EXTRA
            } else {
                VIRTIO_NET_F_CTRL_RX
            };
            has(feature).then(|| receive_mode(shared, number, data))?
        }
        VIRTIO_NET_CTRL_MAC => match number {
            VIRTIO_NET_CTRL_MAC_ADDR_SET if has(VIRTIO_NET_F_CTRL_MAC_ADDR) => {
                let mac: Address = data.try_into().ok()?;
                // A multicast address cannot be the interface's address.
                (mac[0] & 1 == 0).then(|| shared.set_mac(mac))
            }
            VIRTIO_NET_CTRL_MAC_TABLE_SET if has(VIRTIO_NET_F_CTRL_RX) => tables(shared, data),
            _ => None,
        },
        VIRTIO_NET_CTRL_VLAN if has(VIRTIO_NET_F_CTRL_VLAN) => {
            let id = u16::from_le_bytes(data.try_into().ok()?);
            let wanted = match number {
                VIRTIO_NET_CTRL_VLAN_ADD => true,
                VIRTIO_NET_CTRL_VLAN_DEL => false,
                _ => return None,
            };
            shared
                .change_filter(|filter| filter.set_vlan(id, wanted))
                .then_some(())
        }
        VIRTIO_NET_CTRL_ANNOUNCE if has(VIRTIO_NET_F_GUEST_ANNOUNCE) => {
            (number == VIRTIO_NET_CTRL_ANNOUNCE_ACK).then(|| shared.announced())
        }
        VIRTIO_NET_CTRL_MQ if has(VIRTIO_NET_F_MQ) && number == VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET => {
            let pairs = u16::from_le_bytes(data.try_into().ok()?);
            (1..=shared.pairs())
                .contains(&pairs)
                .then(|| shared.set_active(pairs))
        }
        VIRTIO_NET_CTRL_GUEST_OFFLOADS
            if has(VIRTIO_NET_F_CTRL_GUEST_OFFLOADS) && number == VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET =>
        {
            let bits = u64::from_le_bytes(data.try_into().ok()?);
            if bits & !(config::guest_offload_bits() & features) != 0 {
                return None;
            }
            shared.set_guest_offloads(bits).ok()
        }
        _ => None,
    }
}

/// VIRTIO_NET_CTRL_RX: one switch.
fn receive_mode(shared: &Shared, number: u32, data: &[u8]) -> Option<()> {
    let on = match data {
        [0] => false,
        [1] => true,
        _ => return None,
    };
    shared.change_filter(|filter| {
        let switch = match number {
            VIRTIO_NET_CTRL_RX_PROMISC => &mut filter.promiscuous,
            VIRTIO_NET_CTRL_RX_ALLMULTI => &mut filter.all_multicast,
            VIRTIO_NET_CTRL_RX_ALLUNI => &mut filter.all_unicast,
            VIRTIO_NET_CTRL_RX_NOMULTI => &mut filter.no_multicast,
            VIRTIO_NET_CTRL_RX_NOUNI => &mut filter.no_unicast,
            VIRTIO_NET_CTRL_RX_NOBCAST => &mut filter.no_broadcast,
            _ => return None,
        };
        *switch = on;
        Some(())
    })
}

/// VIRTIO_NET_CTRL_MAC_TABLE_SET: both tables, each with the number of its addresses in front.
fn tables(shared: &Shared, data: &[u8]) -> Option<()> {
    let (unicast, rest) = table(data)?;
    let (multicast, rest) = table(rest)?;
    if !rest.is_empty() {
        return None;
    }
    shared.change_filter(|filter| {
        filter.unicast = Table::new(unicast);
        filter.multicast = Table::new(multicast);
    });
    Some(())
}

/// Splits a table into its addresses and the remaining data.
fn table(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let (count, rest) = data.split_first_chunk::<4>()?;
    let length = usize::try_from(u32::from_le_bytes(*count)).ok()?.checked_mul(6)?;
    rest.split_at_checked(length)
}
