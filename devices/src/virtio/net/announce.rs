//! Announcement of an interface's new location, for guests whose driver cannot send one
//! (`VIRTIO_NET_F_GUEST_ANNOUNCE`). Without it, switches send the guest's packets to the old
//! location until the guest sends a packet.

use super::{filter::Address, header::HEADER};

/// With the shortest Ethernet frame, which is 60 bytes without its checksum.
const PACKET: usize = HEADER as usize + 60;

/// Returns a packet with a header: a broadcast from the interface that asks for its own address
/// (reverse ARP, RFC 903). All switches see the sender, and no host replies.
pub(super) fn packet(mac: Address) -> Vec<u8> {
    let mut packet = vec![0; HEADER as usize];
    packet.extend([0xff; 6]);
    packet.extend(mac);
    // EtherType; hardware is Ethernet, protocol IPv4, lengths of their addresses, "request reverse".
    for field in [0x8035_u16, 1, 0x0800, 0x0604, 3] {
        packet.extend(field.to_be_bytes());
    }
    for address in [(mac, [0; 4]), (mac, [0; 4])] {
        packet.extend(address.0);
        packet.extend(address.1);
    }
    packet.resize(PACKET, 0);
    packet
}
