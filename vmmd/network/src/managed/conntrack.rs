//! The kernel's tracked connections (conntrack), by ctnetlink
//! (linux/netfilter/nfnetlink_conntrack.h).
//!
//! While datagrams of one sender arrive often enough, the kernel sends them to the destination of
//! the first one. When their port is published or leads elsewhere, the daemon deletes the tracked
//! connections. The kernel then applies the rules to the next datagram. All connections of a floating address that
//! leads no more to its guest are deleted, too.

use std::{collections::BTreeSet, io, net::IpAddr};

use rtnetlink::{
    packet_core::{
        DecodeError, NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader,
        NetlinkMessage, NetlinkPayload, NetlinkSerializable, NlaBuffer, NlasIterator,
    },
    proto::new_connection,
    sys::{SocketAddr, protocols::NETLINK_NETFILTER},
};
use tokio_stream::StreamExt;

/// Types of messages: the subsystem and the operation.
const GET: u16 = 0x101;
const DELETE: u16 = 0x102;
/// Bytes in front of the attributes: family, version, resource.
const HEADER: usize = 4;
/// Attributes of a connection.
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_STATUS: u16 = 3;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
/// Attributes of a tuple, and of these.
const CTA_TUPLE_IP: u16 = 1;
const CTA_IP_V4_DST: u16 = 2;
const CTA_IP_V6_DST: u16 = 4;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_DST_PORT: u16 = 3;
/// Bits of the status.
const IPS_SRC_NAT: u32 = 1 << 4;
const IPS_DST_NAT: u32 = 1 << 5;
const UDP: u8 = 17;

/// Connections for the kernel to forget.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Ports to which datagrams were sent.
    pub ports: BTreeSet<u16>,
    /// Floating addresses, to which connections led, or which connections of guests had.
    pub addresses: BTreeSet<IpAddr>,
}

impl Moved {
    pub fn is_empty(&self) -> bool {
        self.ports.is_empty() && self.addresses.is_empty()
    }
}

/// A request or a response: its type, and the bytes after the netlink header.
#[derive(Debug)]
struct Message {
    kind: u16,
    bytes: Vec<u8>,
}

impl NetlinkSerializable for Message {
    fn message_type(&self) -> u16 {
        self.kind
    }

    fn buffer_len(&self) -> usize {
        self.bytes.len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.bytes);
    }
}

impl NetlinkDeserializable for Message {
    type Error = DecodeError;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> Result<Self, DecodeError> {
        Ok(Self {
            kind: header.message_type,
            bytes: payload.to_vec(),
        })
    }
}

impl Message {
    fn request(self, flags: u16) -> NetlinkMessage<Self> {
        let mut message = NetlinkMessage::new(NetlinkHeader::default(), NetlinkPayload::InnerMessage(self));
        message.header.flags = NLM_F_REQUEST | flags;
        message
    }

    /// Returns the request to delete this connection, if it is one of these.
    fn deletion(&self, moved: &Moved) -> Option<Self> {
        let (header, attributes) = self.bytes.split_at_checked(HEADER)?;
        let is_one =
            is_of(attributes, &moved.addresses) || leads_to(attributes, &moved.ports).unwrap_or_default();
        if !is_one {
            return None;
        }
        // The last one needs no padding.
        let named =
            [CTA_TUPLE_ORIG, CTA_ID, CTA_ZONE].map(|kind| attribute(attributes, kind).unwrap_or_default());
        Some(Self {
            kind: DELETE,
            bytes: [header, named.concat().as_slice()].concat(),
        })
    }
}

/// Whether a connection leads to one of the addresses, or has one of them as its translated source.
fn is_of(attributes: &[u8], addresses: &BTreeSet<IpAddr>) -> bool {
    let destination = |tuple: u16| {
        let ip = value(attribute(value(attribute(attributes, tuple)?)?, CTA_TUPLE_IP)?)?;
        let (v4, v6) = (attribute(ip, CTA_IP_V4_DST), attribute(ip, CTA_IP_V6_DST));
        let v4 = v4
            .and_then(value)
            .and_then(|octets| <[u8; 4]>::try_from(octets).ok());
        let v6 = v6
            .and_then(value)
            .and_then(|octets| <[u8; 16]>::try_from(octets).ok());
        v4.map(IpAddr::from).or(v6.map(IpAddr::from))
    };
    let mut destinations = [CTA_TUPLE_ORIG, CTA_TUPLE_REPLY]
        .into_iter()
        .filter_map(destination);
    !addresses.is_empty() && destinations.any(|address| addresses.contains(&address))
}

/// Whether a connection has datagrams to one of `ports`. Connections with only a source NAT lead from a guest to a port of another host and
/// stay.
fn leads_to(attributes: &[u8], ports: &BTreeSet<u16>) -> Option<bool> {
    let transport = value(attribute(
        value(attribute(attributes, CTA_TUPLE_ORIG)?)?,
        CTA_TUPLE_PROTO,
    )?)?;
    let protocol = value(attribute(transport, CTA_PROTO_NUM)?)?;
    let port = value(attribute(transport, CTA_PROTO_DST_PORT)?)?;
    let port = u16::from_be_bytes(port.try_into().ok()?);
    let status = value(attribute(attributes, CTA_STATUS)?)?;
    let status = u32::from_be_bytes(status.try_into().ok()?);
    let leaves = status & (IPS_SRC_NAT | IPS_DST_NAT) == IPS_SRC_NAT;
    Some(protocol == [UDP] && ports.contains(&port) && !leaves)
}

/// The first attribute of a kind, as it is in the message.
fn attribute(attributes: &[u8], kind: u16) -> Option<&[u8]> {
    let mut all = NlasIterator::new(attributes).map_while(Result::ok);
    let found = all.find(|attribute| attribute.kind() == kind)?;
    let length = usize::from(found.length());
    NlaBuffer::into_inner(found).get(..length)
}

/// Bytes after the header of an attribute.
fn value(attribute: &[u8]) -> Option<&[u8]> {
    attribute.get(4..)
}

/// Makes the kernel forget these connections.
pub async fn forget(moved: &Moved) -> io::Result<()> {
    let (connection, handle, _) = new_connection::<Message>(NETLINK_NETFILTER)?;
    tokio::spawn(connection);
    let kernel = SocketAddr::new(0, 0);
    let all = Message {
        kind: GET,
        bytes: vec![0; HEADER],
    };
    let mut deletions = Vec::new();
    let answers = handle.request(all.request(NLM_F_DUMP), kernel);
    let answers = answers.map_err(io::Error::other)?;
    tokio::pin!(answers);
    while let Some(answer) = answers.next().await {
        match answer.payload {
            NetlinkPayload::InnerMessage(known) => deletions.extend(known.deletion(moved)),
            NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
            _ => {}
        }
    }
    for deletion in deletions {
        let answers = handle.request(deletion.request(NLM_F_ACK), kernel);
        let answers = answers.map_err(io::Error::other)?;
        tokio::pin!(answers);
        while let Some(answer) = answers.next().await {
            // A connection that has just ended does not exist any more.
            if let NetlinkPayload::Error(error) = answer.payload
                && ![0, -libc::ENOENT].contains(&error.raw_code())
            {
                return Err(error.to_io());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An attribute, with its padding.
    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = u16::try_from(value.len() + 4).unwrap();
        let mut bytes = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    /// The flag of attributes that have others in them.
    const NESTED: u16 = 0x8000;

    fn connection(protocol: u8, port: u16, status: u32) -> Message {
        let transport = [
            attribute(CTA_PROTO_NUM, &[protocol]),
            attribute(CTA_PROTO_DST_PORT, &port.to_be_bytes()),
        ];
        let tuple = attribute(NESTED | CTA_TUPLE_PROTO, &transport.concat());
        let attributes = [
            attribute(NESTED | CTA_TUPLE_ORIG, &tuple),
            attribute(CTA_STATUS, &status.to_be_bytes()),
            attribute(CTA_ID, &[1, 2, 3, 4]),
        ];
        Message {
            kind: 0x100,
            bytes: [vec![2, 0, 0, 0], attributes.concat()].concat(),
        }
    }

    #[test]
    fn datagrams_that_came_to_a_port_are_forgotten_and_nothing_else() {
        let moved = Moved {
            ports: BTreeSet::from([8000]),
            ..Moved::default()
        };
        for (protocol, port, status, expected) in [
            (UDP, 8000, IPS_DST_NAT, true),
            (UDP, 8000, IPS_DST_NAT | IPS_SRC_NAT, true),
            (UDP, 8000, 0, true),
            (UDP, 8000, IPS_SRC_NAT, false),
            (UDP, 8001, IPS_DST_NAT, false),
            (6, 8000, IPS_DST_NAT, false),
        ] {
            let known = connection(protocol, port, status);
            let deletion = known.deletion(&moved);
            assert_eq!(deletion.is_some(), expected, "{protocol} {port} {status}");
            if let Some(deletion) = deletion {
                let named = deletion.bytes.get(HEADER..).unwrap();
                assert!(super::attribute(named, CTA_TUPLE_ORIG).is_some());
                assert_eq!(
                    super::attribute(named, CTA_ID).and_then(value),
                    Some(&[1, 2, 3, 4][..])
                );
                assert_eq!(super::attribute(named, CTA_STATUS), None);
            }
        }
    }

    #[test]
    fn connections_of_a_floating_address_are_forgotten() {
        let moved = Moved {
            addresses: BTreeSet::from([[192, 0, 2, 7].into(), "2001:db8::7".parse().unwrap()]),
            ..Moved::default()
        };
        let tuple = |kind, address: &[u8]| {
            let destination = match address.len() {
                4 => CTA_IP_V4_DST,
                _ => CTA_IP_V6_DST,
            };
            let ip = attribute(NESTED | CTA_TUPLE_IP, &attribute(destination, address));
            attribute(NESTED | kind, &ip)
        };
        let seven6: [u8; 16] = [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7];
        for (original, reply, expected) in [
            (&[192, 0, 2, 7][..], &[198, 51, 100, 2][..], true),
            (&[198, 51, 100, 2], &[192, 0, 2, 7], true),
            (&[198, 51, 100, 2], &[192, 0, 2, 8], false),
            (&seven6, &[0; 16], true),
        ] {
            let tuples = [tuple(CTA_TUPLE_ORIG, original), tuple(CTA_TUPLE_REPLY, reply)];
            let known = Message {
                kind: 0x100,
                bytes: [vec![2, 0, 0, 0], tuples.concat()].concat(),
            };
            assert_eq!(
                known.deletion(&moved).is_some(),
                expected,
                "{original:?} {reply:?}"
            );
        }
    }

    #[test]
    fn a_message_that_is_cut_off_is_no_connection() {
        let whole = connection(UDP, 8000, IPS_DST_NAT);
        let moved = Moved {
            ports: BTreeSet::from([8000]),
            addresses: BTreeSet::from([IpAddr::from([192, 0, 2, 7])]),
        };
        for length in 0..HEADER + 24 {
            let cut = Message {
                kind: whole.kind,
                bytes: whole.bytes[..length].to_vec(),
            };
            assert!(cut.deletion(&moved).is_none(), "{length}");
        }
    }
}
