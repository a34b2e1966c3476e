//! Changes of sets and maps by netlink (linux/netfilter/nf_tables.h): a transaction of a few
//! messages, where the program nft would take ten milliseconds to start. And the notifications about
//! changes by others.

use std::{
    collections::BTreeSet,
    io,
    net::IpAddr,
    os::fd::{AsFd as _, OwnedFd},
};

use rtnetlink::{
    packet_core::{
        NLM_F_ACK, NLM_F_CREATE, NLM_F_REQUEST, NLMSG_ERROR, NetlinkBuffer, NlaBuffer, NlasIterator,
    },
    sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER},
};
use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use tokio::io::unix::AsyncFd;
use vmmd_host::sys;
use vmmd_spec::firewall::Addresses;

use super::rules::{self, Data, Element, Family, Field, TABLE};

/// Number of nf_tables among the subsystems of nfnetlink, and its group of notifications
/// (linux/netfilter/nfnetlink.h).
const SUBSYSTEM: u16 = 10;
const GROUP: u32 = 7;
/// Messages around those of a transaction.
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
/// Messages of nf_tables.
const NEW_SET_ELEMENT: u16 = SUBSYSTEM << 8 | 12;
const DELETE_SET_ELEMENT: u16 = SUBSYSTEM << 8 | 14;
/// Attributes of a list of elements, of an element, of data, and of a verdict.
const LIST_TABLE: u16 = 1;
const LIST_SET: u16 = 2;
const LIST_ELEMENTS: u16 = 3;
const ELEMENT: u16 = 1;
const ELEMENT_KEY: u16 = 1;
const ELEMENT_DATA: u16 = 2;
const ELEMENT_KEY_END: u16 = 10;
const DATA_VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
const VERDICT_CHAIN: u16 = 2;
/// Verdicts.
const DROP: i32 = 0;
const GOTO: i32 = -4;
/// The flag of attributes that have others in them.
const NESTED: u16 = 0x8000;
/// Bytes of an interface name as a key.
const IFNAMSIZ: usize = 16;
/// In all notifications of nf_tables about an object: its table. In front of the attributes are
/// family, version and resource.
const HEADER: usize = 4;
/// Largest message that the kernel sends, in bytes.
const MESSAGE: usize = 1 << 16;

/// Bytes of notifications that wait. A transaction with 10,000 NICs has 11 MiB.
const BACKLOG: usize = 64 << 20;

/// A socket for transactions.
#[derive(Debug)]
pub struct Transactions {
    socket: Socket,
    /// The socket's address, which notifications about its changes have.
    pub port: u32,
}

impl Transactions {
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        let port = socket.bind_auto()?.port_number();
        socket.set_non_blocking(true)?;
        Ok(Self { socket, port })
    }

    /// Removes and adds elements in one transaction. The kernel carries it out before it returns.
    pub fn change(&self, removed: &BTreeSet<Element>, added: &BTreeSet<Element>) -> io::Result<()> {
        let kernel = SocketAddr::new(0, 0);
        self.socket.send_to(&batch(removed, added), &kernel, 0)?;
        // All answers are there: an error for each failed message, and one answer for the last.
        let mut answered = false;
        loop {
            let mut buffer = Vec::with_capacity(MESSAGE);
            match self.socket.recv(&mut buffer, 0) {
                Ok(_) => answered |= check(&buffer)?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && answered => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::Error::other("nf_tables did not answer"));
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Checks answers of the kernel. True when there is one.
fn check(mut bytes: &[u8]) -> io::Result<bool> {
    let mut answered = false;
    while let Some((message, rest)) = split(bytes) {
        bytes = rest;
        let code = message.payload().get(..4).and_then(|code| code.try_into().ok());
        if message.message_type() == NLMSG_ERROR
            && let Some(code) = code
        {
            match i32::from_ne_bytes(code) {
                0 => answered = true,
                code => return Err(io::Error::from_raw_os_error(code.saturating_abs())),
            }
        }
    }
    Ok(answered)
}

/// The first message.
fn split(bytes: &[u8]) -> Option<(NetlinkBuffer<&[u8]>, &[u8])> {
    let message = NetlinkBuffer::new_checked(bytes).ok()?;
    let length = usize::try_from(message.length()).ok()?.next_multiple_of(4);
    Some((message, bytes.get(length..).unwrap_or_default()))
}

/// A transaction; elements are removed first.
fn batch(removed: &BTreeSet<Element>, added: &BTreeSet<Element>) -> Vec<u8> {
    let mut bytes = Vec::new();
    message(&mut bytes, BATCH_BEGIN, 0, header(0, SUBSYSTEM), &[]);
    let removed = removed.iter().map(|element| (DELETE_SET_ELEMENT, 0, element));
    let added = added
        .iter()
        .map(|element| (NEW_SET_ELEMENT, NLM_F_CREATE, element));
    let mut all = removed.chain(added).peekable();
    while let Some((kind, flags, element)) = all.next() {
        let last = if all.peek().is_none() { NLM_F_ACK } else { 0 };
        let family = match element.set.0 {
            Family::Inet => libc::NFPROTO_INET,
            Family::Bridge => libc::NFPROTO_BRIDGE,
        };
        let attributes = attributes(element);
        message(&mut bytes, kind, flags | last, header(family, 0), &attributes);
    }
    message(&mut bytes, BATCH_END, 0, header(0, SUBSYSTEM), &[]);
    bytes
}

/// Family, version and resource (struct nfgenmsg).
fn header(family: i32, resource: u16) -> [u8; HEADER] {
    let [high, low] = resource.to_be_bytes();
    [family.to_le_bytes()[0], 0, high, low]
}

fn message(bytes: &mut Vec<u8>, kind: u16, flags: u16, header: [u8; HEADER], attributes: &[u8]) {
    let length = u32::try_from(16 + HEADER + attributes.len()).unwrap_or(u32::MAX);
    bytes.extend(length.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend((NLM_F_REQUEST | flags).to_ne_bytes());
    // Sequence number, and the sender's port, which the kernel fills in.
    bytes.extend([0; 8]);
    bytes.extend(header);
    bytes.extend(attributes);
}

fn attributes(element: &Element) -> Vec<u8> {
    let key = |kind, fields: &[Field]| attribute(NESTED | kind, &attribute(DATA_VALUE, &value(fields)));
    let mut parts = key(ELEMENT_KEY, &element.key);
    if element.key.iter().any(|field| matches!(field, Field::Range(_))) {
        let last = element.key.iter().map(|field| match field {
            Field::Range(addresses) => Field::Ip(addresses.last()),
            field => field.clone(),
        });
        parts.extend(key(ELEMENT_KEY_END, &last.collect::<Vec<_>>()));
    }
    let data = match &element.data {
        Data::None => Vec::new(),
        Data::Fields(fields) => attribute(DATA_VALUE, &value(fields)),
        Data::Drop => verdict(DROP, &[]),
        Data::Goto(chain) => verdict(GOTO, &text(VERDICT_CHAIN, chain)),
    };
    if !data.is_empty() {
        parts.extend(attribute(NESTED | ELEMENT_DATA, &data));
    }
    let list = attribute(NESTED | ELEMENT, &parts);
    [
        text(LIST_TABLE, TABLE),
        text(LIST_SET, element.set.1),
        attribute(NESTED | LIST_ELEMENTS, &list),
    ]
    .concat()
}

fn verdict(code: i32, chain: &[u8]) -> Vec<u8> {
    let code = attribute(VERDICT_CODE, &code.to_be_bytes());
    attribute(NESTED | DATA_VERDICT, &[&code, chain].concat())
}

/// An attribute with a text, which ends with a zero.
fn text(kind: u16, text: &str) -> Vec<u8> {
    attribute(kind, &[text.as_bytes(), &[0]].concat())
}

/// An attribute, with its padding.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
    let mut bytes = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Fields as the kernel's registers have them: each of several begins at a multiple of 4 bytes.
fn value(fields: &[Field]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for field in fields {
        match field {
            Field::Interface(name) => {
                let end = bytes.len() + IFNAMSIZ;
                bytes.extend(name.bytes().take(IFNAMSIZ));
                bytes.resize(end, 0);
            }
            Field::Mac(mac) => bytes.extend(mac),
            Field::Ip(address) | Field::Range(Addresses { first: address, .. }) => match address {
                IpAddr::V4(address) => bytes.extend(address.octets()),
                IpAddr::V6(address) => bytes.extend(address.octets()),
            },
            Field::Target(address) => bytes.extend(address.octets()),
            Field::Protocol(protocol) => bytes.push(rules::number(*protocol)),
            Field::Port(port) => bytes.extend(port.to_be_bytes()),
        }
        if fields.len() > 1 {
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
    }
    bytes
}

/// Notifications about changes of the packet filter.
#[derive(Debug)]
pub struct Watch(AsyncFd<OwnedFd>);

impl Watch {
    /// To be called in a tokio runtime.
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        socket.bind_auto()?;
        set_socket_recv_buffer_size_force(&socket, BACKLOG)?;
        socket.add_membership(GROUP)?;
        socket.set_non_blocking(true)?;
        sys::watch(socket.as_fd().try_clone_to_owned()?).map(Self)
    }

    /// Waits for a change of our tables; its author's port, or 0 when notifications were lost.
    pub async fn next(&self) -> io::Result<u32> {
        loop {
            let mut ready = self.0.readable().await?;
            let mut buffer = vec![0; MESSAGE];
            match ready.try_io(|socket| Ok(rustix::io::read(socket, buffer.as_mut_slice())?)) {
                Ok(Ok(length)) => {
                    let bytes = buffer.get(..length).unwrap_or_default();
                    if let Some(author) = author(bytes) {
                        return Ok(author);
                    }
                }
                Ok(Err(error)) if error.raw_os_error() == Some(libc::ENOBUFS) => return Ok(0),
                Ok(Err(error)) => return Err(error),
                Err(_would_block) => {}
            }
        }
    }
}

/// The author of the first change of our tables among notifications.
fn author(mut bytes: &[u8]) -> Option<u32> {
    while let Some((message, rest)) = split(bytes) {
        bytes = rest;
        if is_ours(message.message_type(), message.payload()) {
            return Some(message.port_number());
        }
    }
    None
}

fn is_ours(kind: u16, payload: &[u8]) -> bool {
    let attributes = payload.get(HEADER..).unwrap_or_default();
    let mut attributes = NlasIterator::new(attributes).map_while(Result::ok);
    let is_table = |attribute: &NlaBuffer<&[u8]>| attribute.kind() == LIST_TABLE;
    let table = attributes.find(is_table);
    kind >> 8 == SUBSYSTEM && table.is_some_and(|table| table.value() == format!("{TABLE}\0").as_bytes())
}

#[cfg(test)]
mod tests {
    use vmmd_spec::nic::Protocol;

    use super::*;
    use crate::managed::rules::Set;

    #[test]
    fn parts_of_a_key_begin_at_multiples_of_four_bytes() {
        let protocol = Field::Protocol(Protocol::Tcp);
        assert_eq!(
            value(&[protocol.clone(), Field::Port(80)]),
            [6, 0, 0, 0, 0, 80, 0, 0]
        );
        assert_eq!(value(&[protocol]), [6]);
        let key = [Field::Interface("vmb0".into()), Field::Mac([2, 0, 0, 0, 0, 1])];
        let bytes = value(&key);
        assert_eq!(bytes.len(), IFNAMSIZ + 8);
        assert_eq!(
            (&bytes[..5], &bytes[16..22]),
            (&b"vmb0\0"[..], &[2, 0, 0, 0, 0, 1][..])
        );
    }

    #[test]
    fn transaction_removes_first_and_wants_one_answer() {
        let element = |port| Element {
            set: Set(Family::Inet, "published4"),
            key: vec![Field::Protocol(Protocol::Tcp), Field::Port(port)],
            data: Data::Drop,
        };
        let bytes = batch(&[element(1)].into(), &[element(2), element(3)].into());
        let (mut rest, mut seen) = (bytes.as_slice(), Vec::new());
        while let Some((message, after)) = split(rest) {
            seen.push((message.message_type(), message.flags() & NLM_F_ACK));
            rest = after;
        }
        let expected = [
            (BATCH_BEGIN, 0),
            (DELETE_SET_ELEMENT, 0),
            (NEW_SET_ELEMENT, 0),
            (NEW_SET_ELEMENT, NLM_F_ACK),
            (BATCH_END, 0),
        ];
        assert_eq!(seen, expected);
    }

    #[test]
    fn an_error_among_answers_is_returned() {
        let answer = |code: i32| {
            let mut bytes = Vec::new();
            message(&mut bytes, NLMSG_ERROR, 0, code.to_ne_bytes(), &[0; 16]);
            bytes
        };
        assert!(check(&answer(0)).unwrap());
        assert!(!check(&[]).unwrap());
        let failed = [answer(0), answer(-libc::ENOENT)].concat();
        assert_eq!(check(&failed).unwrap_err().raw_os_error(), Some(libc::ENOENT));
    }

    #[test]
    fn changes_of_other_tables_are_not_noticed() {
        let notification = |kind, table: &str| {
            let mut bytes = Vec::new();
            message(
                &mut bytes,
                kind,
                0,
                header(libc::NFPROTO_INET, 0),
                &text(LIST_TABLE, table),
            );
            author(&bytes).is_some()
        };
        assert!(notification(SUBSYSTEM << 8 | 2, TABLE));
        assert!(!notification(SUBSYSTEM << 8 | 2, "vmmd2"));
        // Another subsystem of netfilter.
        assert!(!notification(1 << 8 | 2, TABLE));
    }
}
