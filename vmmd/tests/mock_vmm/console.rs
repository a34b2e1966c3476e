//! The console's socket: 8 bytes with the length of the replay, the replay, then what the guest prints.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    sync::{Arc, mpsc::sync_channel},
    thread,
};

use crate::guest::Guest;

pub fn serve(guest: Arc<Guest>, mut stream: UnixStream) {
    let (sender, receiver) = sync_channel(64);
    let replay = guest.open_console(sender);
    let mut writer = stream.try_clone().unwrap();
    thread::spawn(move || {
        let length = (replay.len() as u64).to_le_bytes();
        let mut written = writer.write_all(&length).and_then(|()| writer.write_all(&replay));
        while let (Ok(()), Ok(bytes)) = (&written, receiver.recv()) {
            written = writer.write_all(&bytes);
        }
    });
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = stream.read(&mut buffer) {
            guest.type_in(&buffer[..count]);
        }
    });
}
