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
    thread::{UnshareFlags, set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid},
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
    let socket = io::stdin().as_fd().try_clone_to_owned().context("take the socket")?;
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
        let Some(bytes) = packet.get(..length) else { continue };
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
    let request = Message::decode(&mut Decoder::new(packet)).ok()?;
    let answer = answer(table, &request)?;
    let mut reply = Vec::new();
    answer.message.encode(&mut Encoder::new(&mut reply)).ok()?;
    Some((reply, answer.to))
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

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig { cases: 5000, ..Default::default() })]

        #[test]
        fn no_packet_does_harm(packet in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..600)) {
            respond(&table(), &packet);
        }

        /// Behind a header that is right.
        #[test]
        fn no_options_do_harm(options in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..400)) {
            let mut packet = vec![1, 1, 6, 0];
            packet.resize(28, 0);
            packet.extend([0x52, 0x54, 0, 0, 0, 1]);
            packet.resize(236, 0);
            packet.extend([99, 130, 83, 99]);
            packet.extend(options);
            respond(&table(), &packet);
        }
    }
}
