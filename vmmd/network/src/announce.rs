//! Announcements of addresses for which an interface of the node answers: hosts that know another MAC address of such an address
//! learn the interface's.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddrV6},
    time::Duration,
};

use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use vmmd_host::sys;

/// Announcements of an address, and the time between them (RFC 9131, 6.1.2; RFC 5227, 1.1 has two).
const COUNT: u32 = 3;
const INTERVAL: Duration = Duration::from_secs(1);
/// EtherType of ARP (IANA).
const ETHERTYPE: u16 = 0x0806;
/// All nodes of a link (RFC 4291, 2.7.1).
const NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
/// Hop limit of neighbor messages (RFC 4861, 7.1.2).
const HOPS: u32 = 255;

/// Announces an address on the Ethernet interface with this index and MAC address some times, in the background.
pub fn announce((interface, address): (u32, IpAddr), mac: [u8; 6]) {
    tokio::spawn(async move {
        for number in 0..COUNT {
            if number > 0 {
                tokio::time::sleep(INTERVAL).await;
            }
            if let Err(error) = send(interface, address, mac) {
                tracing::warn!(interface, %address, %error, "announce a floating address: other hosts may know its former place");
                return;
            }
        }
    });
}

fn send(interface: u32, address: IpAddr, mac: [u8; 6]) -> io::Result<()> {
    match address {
        IpAddr::V4(address) => {
            let socket = Socket::new(Domain::PACKET, Type::RAW, None)?;
            sys::bind_packet(&socket, ETHERTYPE, interface)?;
            socket.send(&arp(mac, address)).map(drop)
        }
        IpAddr::V6(address) => {
            let socket = Socket::new(Domain::IPV6, Type::RAW, Some(Protocol::ICMPV6))?;
            socket.set_multicast_hops_v6(HOPS)?;
            socket.set_multicast_if_v6(interface)?;
            let nodes = SockAddr::from(SocketAddrV6::new(NODES, 0, 0, interface));
            socket.send_to(&advertisement(mac, address), &nodes).map(drop)
        }
    }
}

/// A frame with an ARP announcement (RFC 5227, 3): a request for the address, from the address.
fn arp(mac: [u8; 6], address: Ipv4Addr) -> Vec<u8> {
    /// Ethernet and IPv4, the lengths of their addresses, and a request (RFC 826).
    const REQUEST: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 1];
    let address = address.octets();
    [
        &[0xff; 6][..],
        &mac,
        &ETHERTYPE.to_be_bytes(),
        &REQUEST,
        &mac,
        &address,
        &[0; 6],
        &address,
    ]
    .concat()
}

/// An unsolicited neighbor advertisement (RFC 4861, 4.4): a router's, which replaces known addresses. The kernel adds the checksum.
fn advertisement(mac: [u8; 6], address: Ipv6Addr) -> Vec<u8> {
    [
        &[136, 0, 0, 0, 0xa0, 0, 0, 0][..],
        &address.octets(),
        &[2, 1],
        &mac,
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

    #[test]
    fn announcements_have_the_address_and_the_mac_address() {
        let frame = arp(MAC, Ipv4Addr::new(192, 0, 2, 7));
        assert_eq!(frame.len(), 14 + 28);
        assert_eq!(frame[22..32], [2, 0, 0, 0, 0, 1, 192, 0, 2, 7]);
        assert_eq!(frame[38..], [192, 0, 2, 7]);
        let message = advertisement(MAC, "2001:db8::7".parse().unwrap());
        assert_eq!(message.len(), 32);
        assert_eq!(message[24..], [2, 1, 2, 0, 0, 0, 0, 1]);
    }
}
