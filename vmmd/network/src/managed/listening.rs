//! Where the node itself waits for what others send to it: a published port would take that away.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use vmmd_spec::nic::{Protocol, PublishedPort};

/// The port on which the gateways answer for names.
const DNS: u16 = 53;

/// Address on which the node listens for connections or datagrams to a port. The loopback
/// interface, and the gateways' port for names, stay with the node even for published ports.
/// `gateways` are those of all networks.
pub fn listens(port: &PublishedPort, gateways: &[Ipv4Addr]) -> io::Result<Option<SocketAddr>> {
    // A socket's state in /proc/net: TCP_LISTEN, and TCP_CLOSE of a UDP socket without a peer.
    let (name, state) = match port.protocol {
        Protocol::Tcp => ("tcp", "0A"),
        Protocol::Udp => ("udp", "07"),
    };
    // On these ports a listening socket looks the same as the socket of a client.
    if port.protocol == Protocol::Udp && clients()?.contains(&port.node_port) {
        return Ok(None);
    }
    let stays = |address: &SocketAddr| {
        let of_gateway = |gateway: &Ipv4Addr| address.ip() == IpAddr::from(*gateway);
        address.ip().is_loopback()
            || port.protocol == Protocol::Udp && address.port() == DNS && gateways.iter().any(of_gateway)
    };
    let takes = |address: &SocketAddr| {
        let is_there = |bound: IpAddr| address.ip().is_unspecified() || address.ip() == bound;
        address.port() == port.node_port && port.address.is_none_or(is_there) && !stays(address)
    };
    for version in ["", "6"] {
        let text = match fs::read_to_string(format!("/proc/net/{name}{version}")) {
            // The node has no IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            text => text?,
        };
        let mut found = sockets(&text, state);
        if let Some(address) = found.find(takes) {
            return Ok(Some(address));
        }
    }
    Ok(None)
}

/// Ports that the kernel gives to sockets that ask for none.
fn clients() -> io::Result<std::ops::RangeInclusive<u16>> {
    let text = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")?;
    let mut ports = text.split_whitespace().map_while(|word| word.parse().ok());
    let range = ports.next().zip(ports.next());
    let (first, last) = range.ok_or(io::ErrorKind::InvalidData)?;
    Ok(first..=last)
}

/// The addresses of sockets in one state, in a table of /proc/net (proc(5)): `sl  local_address rem_address   st …`.
fn sockets<'a>(text: &'a str, state: &'a str) -> impl Iterator<Item = SocketAddr> + 'a {
    text.lines().skip(1).filter_map(move |line| {
        let mut words = line.split_whitespace().skip(1);
        let local = words.next()?;
        (words.nth(1)? == state).then(|| address(local))?
    })
}

/// "0100007F:1F90": words of 32 bits in the byte order of the machine, and the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let words = (0..address.len()).step_by(8).map(|at| {
        let word = u32::from_str_radix(address.get(at..at.checked_add(8)?)?, 16).ok()?;
        Some(word.to_ne_bytes())
    });
    let bytes = words.collect::<Option<Vec<_>>>()?.concat();
    let ip = match bytes.len() {
        4 => IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?),
        // An IPv6 socket can have an IPv4 address (RFC 4291, 2.5.5.2).
        _ => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?).to_canonical(),
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, UdpSocket};

    use super::*;

    fn port(protocol: Protocol, node_port: u16) -> PublishedPort {
        PublishedPort {
            protocol,
            node_port,
            guest_port: 1,
            address: None,
        }
    }

    #[test]
    fn a_listening_socket_is_found_with_its_address() {
        for (bound, found) in [
            ("0.0.0.0:0", true),
            ("[::]:0", true),
            ("127.0.0.1:0", false),
            ("[::1]:0", false),
            ("[::ffff:127.0.0.1]:0", false),
        ] {
            let listener = TcpListener::bind(bound).unwrap();
            let at = listener.local_addr().unwrap();
            let listens = listens(&port(Protocol::Tcp, at.port()), &[]).unwrap();
            assert_eq!(listens, found.then_some(at), "{bound}");
        }
    }

    #[test]
    fn a_udp_port_that_the_kernel_chose_is_a_clients() {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        let port = port(Protocol::Udp, socket.local_addr().unwrap().port());
        assert_eq!(listens(&port, &[]).unwrap(), None);
    }

    #[test]
    fn a_line_of_the_table_has_address_and_state() {
        let word = |octets: [u8; 4]| format!("{:08X}", u32::from_ne_bytes(octets));
        let text = format!(
            "  sl  local_address rem_address   st tx_queue\n   0: {}:0035 00000000:0000 07 0\n   1: {}:0035 {}:0035 01 0\n   2: nonsense\n",
            word([10, 80, 0, 1]),
            word([10, 80, 0, 1]),
            word([10, 80, 0, 2]),
        );
        let found: Vec<_> = sockets(&text, "07").collect();
        assert_eq!(found, [SocketAddr::from(([10, 80, 0, 1], 53))]);
    }
}
