//! Says where an interface is now, for guests whose driver does not say so itself (`VIRTIO_NET_F_GUEST_ANNOUNCE`): without it, switches send to
//! the old place what is for the guest until that sends something.

use super::{filter::Address, header::HEADER};

/// With the shortest Ethernet frame, which is 60 bytes without its checksum.
const PACKET: usize = HEADER as usize + 60;

/// With a header, a broadcast of the interface that asks for its own address (reverse ARP, RFC 903): all switches see who sent it, and there is
/// nobody to reply.
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
