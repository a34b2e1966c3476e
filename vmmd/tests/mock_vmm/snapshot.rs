//! Snapshots and migrations: a line of text each.

use std::{
    fs::File,
    io::{Read, Write},
    os::{fd::OwnedFd, unix::fs::FileExt},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use vmm_protocol::vmm::{
    DisksQuiet, Error, ErrorKind, ImageFormat, MigrationDisks, MigrationPolicy, MigrationRound, PauseReason,
    Save, SaveReply, Send, SendReply, State, event, response::Result as Outcome,
};

use crate::guest::Guest;

/// Prefix of each snapshot.
const BEGIN: &str = "snapshot of ";

/// Prefix of each machine that is sent.
const SENT: &str = "machine of ";

/// Follows the name of a guest that has panicked.
pub const PANICKED: &str = " that has panicked";

/// The first save hangs of a guest with `mock.save=hang`.
static HUNG: AtomicBool = AtomicBool::new(false);

/// `mock.save=refuse`, `mock.save=hang` (the first one), `mock.save=stand` (paused until it is released), `mock.save=keep` (the descriptor) and
/// `mock.save=PATH` are options of the guest: with the last one memory is written, and the disks are not quiet, before there is a file of that name.
pub fn save(guest: &Guest, request: &Save, fds: Vec<OwnedFd>) -> Option<Outcome> {
    match guest.option("mock.save").as_deref() {
        Some("refuse") => {
            return Some(Outcome::Error(Error {
                message: "writing the snapshot: No space left on device".into(),
                kind: ErrorKind::Resources.into(),
            }));
        }
        Some("hang") if !HUNG.swap(true, Ordering::Relaxed) => {
            if request.paused {
                guest.set_state(State::Paused);
            }
            return None;
        }
        Some("stand") => {
            guest.stands_for(PauseReason::Snapshot);
            return None;
        }
        _ => {}
    }
    if request.disks_alone {
        assert!(fds.is_empty(), "nothing is written");
        return Some(Outcome::Saved(SaveReply {
            pause_ns: 5_000_000,
            ..SaveReply::default()
        }));
    }
    let text = format!("{BEGIN}{}", guest.status().name);
    let file = fds.into_iter().nth(request.file_fd as usize).unwrap();
    let file = File::from(file);
    if let Some(path) = guest.option("mock.save").filter(|path| path.starts_with('/')) {
        until_there(&path);
    }
    file.write_all_at(text.as_bytes(), 0).unwrap();
    if guest.option("mock.save").as_deref() == Some("keep") {
        // Open until the process ends.
        std::mem::forget(file);
    }
    Some(Outcome::Saved(SaveReply {
        file_bytes: text.len() as u64,
        memory_bytes: 4096,
        rounds: 1,
        pause_ns: if request.paused { 2_000_000_000 } else { 3_000_000 },
        total_ns: 2_500_000_000,
    }))
}

/// `mock.send=hang`, `mock.send=disks`, `mock.send=much` and `mock.send=PATH` are options of the guest: it never has sent everything, or the disks, it
/// sends more than anybody keeps, and it sends nothing before there is a file of that name.
pub fn send(guest: &Guest, request: &Send, fds: Vec<OwnedFd>) -> Option<Outcome> {
    let socket = fds.into_iter().nth(request.socket_fd as usize).unwrap();
    let mut socket = File::from(socket);
    let status = guest.status();
    let mark = if status.panicked { PANICKED } else { "" };
    let text = format!("{SENT}{}{mark}", status.name);
    if !request.disks.is_empty() {
        guest.tell(event::Kind::MigrationDisks(MigrationDisks {
            done_bytes: 3 << 20,
            total_bytes: 8 << 20,
        }));
    }
    if guest.option("mock.send").as_deref() == Some("disks") {
        std::mem::forget(socket);
        return None;
    }
    guest.tell(event::Kind::MigrationRound(MigrationRound {
        sent_bytes: 5 << 20,
        dirty_bytes: 1 << 20,
        bytes_per_second: 9 << 20,
        throttle_percent: match request.policy() {
            MigrationPolicy::AlwaysForced => 99,
            MigrationPolicy::PreferForced => 20,
            MigrationPolicy::PreferSafe => 1,
            _ => 0,
        },
        ..MigrationRound::default()
    }));
    if guest.option("mock.send").as_deref() == Some("hang") {
        std::mem::forget(socket);
        return None;
    }
    if let Some(path) = guest.option("mock.send").filter(|path| path.starts_with('/')) {
        until_there(&path);
    }
    let text = text + &along(guest, &request.disks);
    let much = guest.option("mock.send").as_deref() == Some("much");
    if much && !write_much(&mut socket) || socket.write_all(text.as_bytes()).is_err() {
        return Some(Outcome::Error(Error {
            message: "writing the snapshot: Broken pipe".into(),
            kind: ErrorKind::Internal.into(),
        }));
    }
    guest.stands_for(PauseReason::Migration);
    Some(Outcome::Sent(SendReply {
        sent_bytes: text.len() as u64,
        memory_bytes: 4096,
        disk_bytes: 4096 * request.disks.len() as u64,
        rounds: 1,
        pause_ns: 3_000_000,
        total_ns: 2_500_000_000,
    }))
}

fn until_there(path: &str) {
    while !Path::new(path).exists() {
        thread::sleep(Duration::from_millis(10));
    }
}

/// Follows the text when disks go along: what each holds, in hexadecimal digits.
const DISKS: &str = " with disks ";

/// Disk data to send: the first block of each raw disk, and zeros for other disks, which the mock
/// cannot read.
fn along(guest: &Guest, names: &[String]) -> String {
    if names.is_empty() {
        return String::new();
    }
    let disks = guest.disks();
    let blocks = names.iter().map(|name| {
        let disk = disks.iter().find(|disk| disk.wire.name == *name).unwrap();
        let block = if disk.wire.format() == ImageFormat::Qcow2 {
            Page([0; PAGE])
        } else {
            read_block(&disk.image)
        };
        let digits: String = block.0.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{name}={digits}")
    });
    format!("{DISKS}{}", blocks.collect::<Vec<_>>().join(" "))
}

/// Bytes of a disk that the mock sends.
const PAGE: usize = 4096;

/// A descriptor may be one for direct I/O.
#[repr(align(4096))]
struct Page([u8; PAGE]);

fn read_block(image: &File) -> Page {
    let mut page = Page([0; PAGE]);
    image.read_at(&mut page.0, 0).unwrap();
    page
}

/// Writes the received disk data; returns the text without it. `None` after a failed write, or when
/// the disks are not the expected ones.
pub fn take_disks(guest: &Guest, text: &str, names: &[String]) -> Option<String> {
    let (text, blocks) = text.split_once(DISKS).unwrap_or((text, ""));
    let came: Vec<_> = blocks
        .split(' ')
        .filter_map(|disk| disk.split_once('='))
        .collect();
    let disks = guest.disks();
    if came
        .iter()
        .map(|(name, _)| *name)
        .ne(names.iter().map(String::as_str))
    {
        return None;
    }
    for (name, digits) in came {
        let disk = disks.iter().find(|disk| disk.wire.name == name)?;
        if disk.wire.format() == ImageFormat::Qcow2 {
            continue;
        }
        let mut page = Page([0; PAGE]);
        for (byte, at) in page.0.iter_mut().zip((0..digits.len()).step_by(2)) {
            *byte = u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
        }
        disk.image.write_at(&page.0, 0).ok()?;
    }
    Some(text.to_owned())
}

/// Writes 64 MiB; false when the other end is closed.
fn write_much(socket: &mut File) -> bool {
    let mut left = 64 << 20;
    while left > 0 {
        match socket.write(&[b'x'; 1 << 16]) {
            Ok(written) => left -= written.min(left),
            // The socket has a limit of time.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return false,
        }
    }
    true
}

/// Keeps a socket open without reading from it, endlessly.
pub fn never_read(socket: &OwnedFd) -> ! {
    loop {
        std::thread::park();
        assert!(rustix::io::fcntl_getfd(socket).is_ok());
    }
}

/// Receives a machine from a socket; `None` for other data.
pub fn receive(socket: OwnedFd) -> Option<String> {
    let mut text = String::new();
    File::from(socket).read_to_string(&mut text).unwrap();
    text.starts_with(SENT).then_some(text)
}

/// The first disk contains all data written until now, and is quiet.
pub fn quiet(guest: &Guest, number: u64) {
    write(guest, b"until the snapshot");
    guest.tell(event::Kind::DisksQuiet(DisksQuiet { number }));
}

/// The answer to a save that is given up.
pub fn given_up(guest: &Guest) -> Outcome {
    guest.set_state(State::Running);
    Outcome::Error(Error {
        message: "the snapshot was given up".into(),
        kind: ErrorKind::State.into(),
    })
}

/// The guest writes again.
pub fn released(guest: &Guest) {
    write(guest, b"behind the snapshot");
}

fn write(guest: &Guest, text: &[u8]) {
    if let Some(disk) = guest.disks().first() {
        disk.image.write_all_at(text, 0).unwrap();
    }
}

/// Content of a snapshot; `None` for another file.
pub fn read(file: OwnedFd) -> Option<String> {
    let mut file = File::from(file);
    assert!(file.write_at(b"x", 0).is_err(), "it is open for reading only");
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    text.starts_with(BEGIN).then_some(text)
}
