//! MAC addresses.

use std::{fmt, str::FromStr};

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
