//! The process that answers the DHCP clients of one network.
//!
//! It is started with a socket that is bound to the bridge as its standard input, and with the folder that the daemon writes
//! the table to. It gives up all rights before it reads the first packet, and lives until it is killed.

use std::{
    fs::File,
    io::{self, Read as _},
    net::UdpSocket,
    os::{fd::AsFd as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use clap::Args;
use dhcproto::{
    decoder::{Decodable as _, Decoder},
    encoder::{Encodable as _, Encoder},
    v4::Message,
};
use rustix::{
    process::{Gid, Uid, chdir},
    thread::{
        CapabilitySet, CapabilitySets, UnshareFlags, set_capabilities, set_no_new_privs, set_thread_groups,
        set_thread_res_gid, set_thread_res_uid,
    },
};

use super::{Table, answer::answer};

/// The table's name in its folder.
pub const TABLE: &str = "table.json";
/// Largest table in bytes: 65,536 hosts of 100 bytes.
const MAX_TABLE: u64 = 8 << 20;
/// Larger than any Ethernet frame of a network.
const MAX_PACKET: usize = 9216;
/// Nobody, as Debian numbers it: a user who owns nothing.
const NOBODY: u32 = 65534;

/// `vmmd serve-dhcp`.
#[derive(Debug, Args)]
pub struct ServeDhcp {
    /// Folder with the table.
    folder: PathBuf,
}

/// Serves until it is killed.
pub fn run(arguments: &ServeDhcp) -> anyhow::Result<()> {
    let socket = io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .context("take the socket")?;
    let socket = UdpSocket::from(socket);
    confine(&arguments.folder).context("give up rights")?;
    let mut tables = Tables::default();
    let mut packet = vec![0; MAX_PACKET];
    loop {
        // Errors are of single packets, or of the interface while it is down.
        let Ok((length, _)) = socket.recv_from(&mut packet) else {
            std::thread::sleep(std::time::Duration::from_millis(100));
            continue;
        };
        let Some(bytes) = packet.get(..length) else {
            continue;
        };
        let Some(table) = tables.current() else { continue };
        if let Some((reply, to)) = respond(table, bytes)
            && let Err(error) = socket.send_to(&reply, to)
        {
            eprintln!("answer a DHCP client: {error}");
        }
    }
}

/// What is sent for a packet, and where to.
pub fn respond(table: &Table, packet: &[u8]) -> Option<(Vec<u8>, std::net::SocketAddrV4)> {
    let request = Message::decode(&mut Decoder::new(&sifted(packet)?)).ok()?;
    let answer = answer(table, &request)?;
    let mut reply = Vec::new();
    answer.message.encode(&mut Encoder::new(&mut reply)).ok()?;
    Some((reply, answer.to))
}

/// Bytes of a message before its options, the magic cookie included (RFC 2131, 2).
const HEADER: usize = 240;
const COOKIE: [u8; 4] = [99, 130, 83, 99];
/// Options that an answer depends on, with their lengths: the type of the message, the address that is asked for, the server that is
/// meant (RFC 2132, 9.6, 9.1, 9.7).
const NEEDED: [(u8, u8); 3] = [(53, 1), (50, 4), (54, 4)];

/// A message with the header and the options that an answer depends on and nothing else: dhcproto panics on some options, and on a
/// hardware address that is too long.
fn sifted(packet: &[u8]) -> Option<Vec<u8>> {
    let (header, mut options) = packet.split_at_checked(HEADER)?;
    let mut sifted = header.to_vec();
    if !header.ends_with(&COOKIE) || header.get(2) != Some(&6) {
        return None;
    }
    // Names of a server and a file.
    sifted.get_mut(44..236)?.fill(0);
    while let Some((&code, rest)) = options.split_first() {
        match code {
            0 => options = rest,
            255 => break,
            code => {
                let (&length, rest) = rest.split_first()?;
                let (value, rest) = rest.split_at_checked(length.into())?;
                if NEEDED.contains(&(code, length)) {
                    sifted.extend([code, length]);
                    sifted.extend(value);
                }
                options = rest;
            }
        }
    }
    sifted.push(255);
    Some(sifted)
}

/// Keeps the socket and one folder: another user, no capabilities, no way to get rights, and no other network where the kernel
/// lets a user make one.
fn confine(folder: &Path) -> io::Result<()> {
    chdir(folder)?;
    set_thread_groups(&[])?;
    let (group, user) = (Gid::from_raw(NOBODY), Uid::from_raw(NOBODY));
    set_thread_res_gid(group, group, group)?;
    // With its user it loses all capabilities.
    set_thread_res_uid(user, user, user)?;
    set_no_new_privs(true)?;
    #[allow(deprecated, reason = "the process has one thread")]
    if let Err(error) = rustix::thread::unshare(UnshareFlags::NEWUSER | UnshareFlags::NEWNET) {
        eprintln!("a DHCP server stays in the node's network: {error}");
    }
    // In a user namespace of its own it would have all of them again.
    let none = CapabilitySet::empty();
    set_capabilities(
        None,
        CapabilitySets {
            effective: none,
            permitted: none,
            inheritable: none,
        },
    )?;
    Ok(())
}

/// The table as it was read last.
#[derive(Default)]
struct Tables {
    /// Inode and time of change of the file.
    version: Option<(u64, i64, i64)>,
    table: Option<Table>,
}

impl Tables {
    /// The daemon exchanges the file as a whole; one that can't be read changes nothing.
    fn current(&mut self) -> Option<&Table> {
        if let Ok(mut file) = File::open(TABLE)
            && let Ok(facts) = file.metadata()
        {
            let version = (facts.ino(), facts.mtime(), facts.mtime_nsec());
            if self.version != Some(version) {
                let mut text = Vec::new();
                let read = (&mut file).take(MAX_TABLE).read_to_end(&mut text);
                if let (Ok(_), Ok(table)) = (read, serde_json::from_slice(&text)) {
                    self.table = Some(table);
                    self.version = Some(version);
                }
            }
        }
        self.table.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::{super::answer::tests::table, *};

    /// A request for an address, with more options.
    fn discover(options: &[u8]) -> Vec<u8> {
        let mut packet = vec![1, 1, 6, 0];
        packet.resize(28, 0);
        packet.extend([0x52, 0x54, 0, 0, 0, 1]);
        packet.resize(236, 0);
        packet.extend(COOKIE);
        packet.extend([53, 1, 1]);
        packet.extend(options);
        packet
    }

    #[test]
    fn a_request_is_answered_whatever_else_is_in_it() {
        for options in [
            &[255][..],
            &[],
            // A fully qualified name that is too short, and a class (RFC 4702).
            &[81, 1, 0, 0, 60, 4, b'u', b'd', b'h', b'c', 255],
        ] {
            assert!(respond(&table(), &discover(options)).is_some(), "{options:?}");
        }
        assert!(
            respond(&table(), &discover(&[60, 4, 1])).is_none(),
            "an option that is cut off"
        );
    }

    #[test]
    fn a_hardware_address_that_is_longer_than_its_field_is_no_request() {
        let mut packet = discover(&[255]);
        packet[2] = 200;
        assert!(respond(&table(), &packet).is_none());
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig { cases: 5000, ..Default::default() })]

        #[test]
        fn no_packet_does_harm(packet in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..600)) {
            respond(&table(), &packet);
        }

        /// Behind a header that is right.
        #[test]
        fn no_options_do_harm(options in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..400)) {
            respond(&table(), &discover(&options));
        }
    }
}
