//! The console's socket: 8 bytes with the length of the replay, the replay, then the guest's
//! output.

use std::{
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    sync::{Arc, mpsc::sync_channel},
    thread,
};

use rustix::event::{PollFd, PollFlags, poll};

use crate::guest::Guest;

/// Most clients at once, as of the real one. One too many is closed without the 8 bytes.
const MAX_CLIENTS: usize = 16;

pub fn listen(guest: &Arc<Guest>, listener: &UnixListener) {
    let mut clients: Vec<UnixStream> = Vec::new();
    for stream in listener.incoming() {
        let stream = stream.unwrap();
        clients.retain(is_connected);
        if clients.len() < MAX_CLIENTS {
            clients.push(stream.try_clone().unwrap());
            serve(Arc::clone(guest), stream);
        }
    }
}

/// Whether the other side has not closed the connection.
fn is_connected(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::empty())];
    poll(&mut fds, Some(&rustix::event::Timespec::default())).unwrap();
    !fds[0].revents().contains(PollFlags::HUP)
}

fn serve(guest: Arc<Guest>, mut stream: UnixStream) {
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
            if &buffer[..count] == b"deaf\n" {
                guest.wait_until_it_hears();
                let waited = rustix::io::ioctl_fionread(&stream).unwrap();
                guest.print(&format!("{waited} bytes waited\r\n"));
            }
        }
    });
}

/// A virtio-console that says whose it is, and echoes in capitals to the client that typed.
pub fn serve_hvc(name: &str, listener: UnixListener) {
    let replay = format!("hvc of {name}\r\n");
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, replay) = (stream.unwrap(), replay.clone());
            thread::spawn(move || {
                let length = (replay.len() as u64).to_le_bytes();
                let mut written = stream
                    .write_all(&length)
                    .and_then(|()| stream.write_all(replay.as_bytes()));
                let mut buffer = [0; 4096];
                while let (Ok(()), Ok(count @ 1..)) = (&written, stream.read(&mut buffer)) {
                    let typed = buffer[..count].to_ascii_uppercase();
                    written = stream.write_all(&typed);
                }
            });
        }
    });
}

/// A screen that speaks RFB (RFC 6143, 7.1) up to the security result; then it sends its name, and
/// echoes.
pub fn serve_screen(name: &str, listener: UnixListener) {
    let name = name.to_owned();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, name) = (stream.unwrap(), name.clone());
            thread::spawn(move || {
                let mut shake = || {
                    let (mut version, mut chosen) = ([0; 12], [0]);
                    stream.write_all(b"RFB 003.008\n")?;
                    stream.read_exact(&mut version)?;
                    stream.write_all(&[1, 1])?;
                    stream.read_exact(&mut chosen)?;
                    stream.write_all(&[0; 4])?;
                    stream.write_all(name.as_bytes())
                };
                let mut written = shake();
                let mut buffer = [0; 4096];
                while let (Ok(()), Ok(count @ 1..)) = (&written, stream.read(&mut buffer)) {
                    written = stream.write_all(&buffer[..count]);
                }
            });
        }
    });
}
