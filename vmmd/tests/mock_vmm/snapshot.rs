//! Snapshots: a line of text each.

use std::{fs::File, io::Read, os::fd::OwnedFd, os::unix::fs::FileExt};

use proto::vmm::{DisksQuiet, Error, ErrorKind, Save, SaveReply, event, response::Result as Outcome};

use crate::guest::Guest;

/// What each begins with.
const BEGIN: &str = "snapshot of ";

/// `mock.save=refuse`, `mock.save=hang` and `mock.save=keep` (the descriptor) are options of the guest.
pub fn save(guest: &Guest, request: &Save, fds: Vec<OwnedFd>) -> Option<Outcome> {
    match guest.option("mock.save").as_deref() {
        Some("refuse") => {
            return Some(Outcome::Error(Error {
                message: "writing the snapshot: No space left on device".into(),
                kind: ErrorKind::Resources.into(),
            }));
        }
        Some("hang") => return None,
        _ => {}
    }
    let text = format!("{BEGIN}{}", guest.status().name);
    let file = fds.into_iter().nth(request.file_fd as usize).unwrap();
    let file = File::from(file);
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

/// The first disk has what was written until now, and is quiet.
pub fn quiet(guest: &Guest) {
    write(guest, b"until the snapshot");
    guest.tell(event::Kind::DisksQuiet(DisksQuiet {}));
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

/// What is in a snapshot; nothing when it is none.
pub fn read(file: OwnedFd) -> Option<String> {
    let mut file = File::from(file);
    assert!(file.write_at(b"x", 0).is_err(), "it is open for reading only");
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    text.starts_with(BEGIN).then_some(text)
}
