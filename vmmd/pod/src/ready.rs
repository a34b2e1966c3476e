//! The readiness probe: `vmmd-pod ready` asks the launcher over an abstract socket of the pod's network namespace, which needs
//! no file. The launcher sends one byte and closes the connection.

use std::{
    io::{self, Read, Write},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    time::Duration,
};

/// The VM runs.
const READY: u8 = b'1';
/// How long the launcher may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

fn address(uid: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("vmmd-pod/{uid}"))
}

/// Asks the launcher of the pod whether its VM runs.
pub fn ask(uid: &str) -> Result<bool, String> {
    let asked = || {
        let mut stream = UnixStream::connect_addr(&address(uid)?)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut answer = [0];
        stream.read_exact(&mut answer)?;
        Ok::<_, io::Error>(answer == [READY])
    };
    asked().map_err(|error| format!("ask the launcher of this pod: {error}"))
}

/// Listens for probes.
pub fn listen(uid: &str) -> io::Result<UnixListener> {
    let listener = UnixListener::bind_addr(&address(uid)?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Answers all waiting probes.
pub fn answer(listener: &UnixListener, ready: bool) {
    while let Ok((mut probe, _)) = listener.accept() {
        // An empty socket takes a byte at once. A probe that has left needs none.
        let _left = probe.write_all(&[if ready { READY } else { b'0' }]);
    }
}
