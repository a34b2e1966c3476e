//! Permanent neighbors: without resolution, no packet waits for an answer.

use std::{
    io,
    net::{IpAddr, UdpSocket},
};

use anyhow::{Context, Result, ensure};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketType, netdevice::name_to_index, netlink::SocketAddrNetlink,
    sendto, socket,
};

/// Type of the message, and its flags: request, acknowledge, replace, create (linux/rtnetlink.h,
/// linux/netlink.h).
const NEW_NEIGHBOR: u16 = 28;
const FLAGS: u16 = 1 | 4 | 0x100 | 0x400;
/// State of an entry that is never asked for again (linux/neighbour.h).
const PERMANENT: u16 = 0x80;
/// Attributes of it: its address, and its MAC address.
const ADDRESS: u16 = 1;
const MAC: u16 = 2;
/// Bytes in front of a message of netlink.
const HEADER: usize = 16;

/// From now on `address` has this MAC address on a device, as with `ip neigh replace ADDRESS lladdr MAC dev DEVICE nud permanent`.
pub fn pin(device: &str, address: IpAddr, mac: [u8; 6]) -> Result<()> {
    let any = UdpSocket::bind("0.0.0.0:0")?;
    let index = name_to_index(&any, device).with_context(|| format!("find {device}"))?;
    let message = message(index, address, mac)?;
    // Without a protocol it is NETLINK_ROUTE.
    let netlink = socket(AddressFamily::NETLINK, SocketType::RAW, None).context("open netlink")?;
    sendto(
        &netlink,
        &message,
        SendFlags::empty(),
        &SocketAddrNetlink::new(0, 0),
    )
    .context("ask the kernel")?;
    let mut answer = [0; 256];
    let (length, _) =
        rustix::net::recv(&netlink, &mut answer, RecvFlags::empty()).context("hear the kernel")?;
    let error = answer[..length].get(HEADER..HEADER + 4);
    let error = error
        .and_then(|error| error.try_into().ok())
        .map(i32::from_ne_bytes);
    ensure!(
        error == Some(0),
        "{address} on {device}: {}",
        io::Error::from_raw_os_error(-error.unwrap_or(0))
    );
    Ok(())
}

/// The whole message, with its header.
fn message(index: u32, address: IpAddr, mac: [u8; 6]) -> Result<Vec<u8>> {
    let (family, octets) = match address {
        IpAddr::V4(address) => (libc::AF_INET, address.octets().to_vec()),
        IpAddr::V6(address) => (libc::AF_INET6, address.octets().to_vec()),
    };
    let mut body = vec![u8::try_from(family)?, 0, 0, 0];
    body.extend(index.to_ne_bytes());
    body.extend(PERMANENT.to_ne_bytes());
    // Flags and type.
    body.extend([0, 0]);
    for (kind, value) in [(ADDRESS, &octets[..]), (MAC, &mac)] {
        body.extend(u16::try_from(4 + value.len())?.to_ne_bytes());
        body.extend(kind.to_ne_bytes());
        body.extend(value);
        body.resize(body.len().next_multiple_of(4), 0);
    }
    let mut message = u32::try_from(HEADER + body.len())?.to_ne_bytes().to_vec();
    message.extend([NEW_NEIGHBOR, FLAGS].into_iter().flat_map(u16::to_ne_bytes));
    // Neither a number nor a sender: there is one question.
    message.extend([0; 8]);
    message.extend(body);
    Ok(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_length_is_right_and_attributes_are_aligned() {
        for (address, length) in [("10.0.0.1", 16 + 12 + 8 + 12), ("fd00::1", 16 + 12 + 20 + 12)] {
            let message =
                message(7, address.parse().expect("an address"), [2, 0, 0, 0, 0, 1]).expect("a message");
            assert_eq!(message.len(), length);
            assert_eq!(message[..4], u32::try_from(length).expect("short").to_ne_bytes());
            assert_eq!(message[length - 12..length - 8], [10, 0, 2, 0]);
        }
    }
}
