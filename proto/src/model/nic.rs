//! What NICs are like: MAC addresses, queues, offloads.

use std::{fmt, str::FromStr};

use super::Violations;
use crate::v1;

/// Most pairs of queues of a NIC.
pub const MAX_QUEUES: usize = 16;
/// Most pairs of queues of all NICs of a VM together: each has a descriptor and a thread.
pub const MAX_QUEUES_TOGETHER: usize = 128;
/// Least MTU in bytes (virtio 1.3, 5.1.4.1).
pub const MIN_MTU: u16 = 68;

/// Offloads of a NIC that are switched off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NicSwitches {
    /// Checksums, and with them all segmentation.
    pub checksum: bool,
    /// Segmentation of TCP.
    pub tso: bool,
    /// Segmentation of UDP.
    pub uso: bool,
    /// Packets in several receive buffers.
    pub merge: bool,
}

impl NicSwitches {
    /// Validates `disabled` ([`v1::NicOffload`]); `field` is the NIC's path.
    pub(super) fn new(found: &mut Violations, field: &str, disabled: &[i32]) -> Self {
        let mut without = Self::default();
        for (index, value) in disabled.iter().enumerate() {
            let switch = match v1::NicOffload::try_from(*value) {
                Ok(v1::NicOffload::Checksum) => &mut without.checksum,
                Ok(v1::NicOffload::TcpSegmentation) => &mut without.tso,
                Ok(v1::NicOffload::UdpSegmentation) => &mut without.uso,
                Ok(v1::NicOffload::MergeableBuffers) => &mut without.merge,
                Ok(v1::NicOffload::Unspecified) | Err(_) => {
                    found.add(
                        format_args!("{field}.disabledOffloads[{index}]"),
                        "must be CHECKSUM, TCP_SEGMENTATION, UDP_SEGMENTATION or MERGEABLE_BUFFERS",
                    );
                    continue;
                }
            };
            *switch = true;
        }
        without
    }
}

/// Validates a number of queues; `field` is the NIC's path.
pub(super) fn queues(found: &mut Violations, field: &str, wanted: u32) -> u16 {
    let number = u16::try_from(wanted.max(1)).unwrap_or(u16::MAX);
    if usize::from(number) > MAX_QUEUES {
        let wrong = format_args!("must be 1 to {MAX_QUEUES}, or 0 for one, is {wanted}");
        found.add(format_args!("{field}.queues"), wrong);
        return 1;
    }
    number
}

/// Validates an MTU; `field` is the NIC's path.
pub(super) fn mtu(found: &mut Violations, field: &str, wanted: u32) -> Option<u16> {
    if wanted == 0 {
        return None;
    }
    let mtu = u16::try_from(wanted).ok().filter(|mtu| *mtu >= MIN_MTU);
    if mtu.is_none() {
        let wrong = format_args!(
            "must be {MIN_MTU} to 65535 bytes, or 0 for that of what it is attached to, is {wanted}"
        );
        found.add(format_args!("{field}.mtu"), wrong);
    }
    mtu
}

/// A unicast Ethernet address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mac([u8; 6]);

/// An address that a NIC can't have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be a unicast MAC address such as 52:54:00:12:34:56")]
pub struct InvalidMac;

impl Mac {
    /// The six bytes as on the wire.
    pub fn octets(self) -> [u8; 6] {
        self.0
    }

    /// A locally administered unicast address with these random bits.
    pub fn local(random: [u8; 6]) -> Self {
        let [first, rest @ ..] = random;
        let first = (first & 0xfc) | 0x02;
        Self([first, rest[0], rest[1], rest[2], rest[3], rest[4]])
    }
}

impl TryFrom<[u8; 6]> for Mac {
    type Error = InvalidMac;

    fn try_from(octets: [u8; 6]) -> Result<Self, InvalidMac> {
        let multicast = octets[0] & 1 != 0;
        if multicast || octets == [0; 6] {
            Err(InvalidMac)
        } else {
            Ok(Self(octets))
        }
    }
}

impl FromStr for Mac {
    type Err = InvalidMac;

    fn from_str(text: &str) -> Result<Self, InvalidMac> {
        let mut octets = [0; 6];
        let mut parts = text.split(':');
        for octet in &mut octets {
            let part = parts.next().filter(|part| part.len() == 2).ok_or(InvalidMac)?;
            if !part.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err(InvalidMac);
            }
            *octet = u8::from_str_radix(part, 16).map_err(|_| InvalidMac)?;
        }
        if parts.next().is_some() {
            Err(InvalidMac)
        } else {
            Self::try_from(octets)
        }
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}
