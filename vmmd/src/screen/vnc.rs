//! Viewers: RFB over TCP with VNC authentication (RFC 6143, 7.2.2). The password says which VM's screen it is, so that one port is enough
//! for all VMs.
//!
//! VNC authentication is DES with a password of eight characters, and nothing is encrypted. So passwords are random, good once and
//! for a minute, each connection has one try, and the listener is on this machine only.

use std::{io, sync::Arc, time::Duration};

use des::{
    Des,
    cipher::{Array, BlockCipherEncrypt, KeyInit},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy_bidirectional},
    net::{TcpListener, TcpStream},
    time::timeout,
};
use uuid::Uuid;

use super::{accept, enter};
use crate::{
    failure::Failure,
    host::Host,
    registry::screens::{Form, Ticket, Tickets},
};

/// How long a viewer may take to show its password.
const HANDSHAKE: Duration = Duration::from_secs(30);
/// Our version (RFC 6143, 7.1.1).
const VERSION: &[u8; 12] = b"RFB 003.008\n";
/// Security types (7.1.2).
const NONE: u8 = 1;
const VNC_AUTHENTICATION: u8 = 2;
/// A SecurityResult (7.1.3).
const FAILED: u32 = 1;

/// Serves viewers until the daemon ends.
pub async fn serve(listener: TcpListener, host: Arc<Host>) {
    accept(listener, host, |mut stream, from, host| async move {
        if let Err(error) = viewer(&mut stream, &from, &host).await {
            tracing::debug!(%error, from, "a viewer of a screen");
        }
    })
    .await;
}

async fn viewer(stream: &mut TcpStream, from: &str, host: &Host) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let shaken = timeout(HANDSHAKE, authenticate(stream, from, host)).await;
    let Some(mut screen) = shaken.map_err(|_| io::ErrorKind::TimedOut)?? else {
        return Ok(());
    };
    copy_bidirectional(stream, &mut screen).await?;
    Ok(())
}

/// Speaks with a viewer up to the result of its authentication, and with the `vmm` as far; gives the connection to the `vmm`. `None`
/// when the viewer was refused and told so.
async fn authenticate(
    stream: &mut TcpStream,
    from: &str,
    host: &Host,
) -> io::Result<Option<tokio::net::UnixStream>> {
    let (minor, challenge, response) = challenge(stream).await?;
    let opened = match found(&host.screens.tickets, &challenge, &response) {
        Some(ticket) => enter(host, &ticket, from).await,
        None => {
            let message = "the password is wrong, or was used, or is too old: ask vmmd for another one";
            Err(Failure::precondition("WRONG_PASSWORD", message))
        }
    };
    let refused = match opened {
        Ok(mut screen) => {
            greet(&mut screen).await?;
            stream.write_u32(0).await?;
            return Ok(Some(screen));
        }
        Err(failure) => failure.to_string(),
    };
    stream.write_u32(FAILED).await?;
    // Older versions have no reason (7.1.3).
    if minor >= 8 {
        stream
            .write_u32(u32::try_from(refused.len()).unwrap_or(0))
            .await?;
        stream.write_all(refused.as_bytes()).await?;
    }
    stream.shutdown().await?;
    Ok(None)
}

/// The viewer's minor version, a challenge, and what the viewer made of it.
async fn challenge(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
) -> io::Result<(u8, [u8; 16], [u8; 16])> {
    stream.write_all(VERSION).await?;
    let mut version = [0; 12];
    stream.read_exact(&mut version).await?;
    let minor = match &version {
        b"RFB 003.008\n" => 8,
        b"RFB 003.007\n" => 7,
        // What others say is to be taken as that (7.1.1).
        version if version.starts_with(b"RFB 003.") => 3,
        _ => return Err(io::Error::other("the viewer does not speak RFB")),
    };
    if minor == 3 {
        stream.write_u32(VNC_AUTHENTICATION.into()).await?;
    } else {
        stream.write_all(&[1, VNC_AUTHENTICATION]).await?;
        if stream.read_u8().await? != VNC_AUTHENTICATION {
            return Err(io::Error::other("the viewer chose another security type"));
        }
    }
    let challenge = Uuid::new_v4().into_bytes();
    stream.write_all(&challenge).await?;
    let mut response = [0; 16];
    stream.read_exact(&mut response).await?;
    Ok((minor, challenge, response))
}

fn found(tickets: &Tickets, challenge: &[u8; 16], response: &[u8; 16]) -> Option<Ticket> {
    tickets.take(Form::Password, |password| {
        encrypt(password.as_bytes(), *challenge) == *response
    })
}

/// A challenge as VNC authentication encrypts it: DES with the password for a key, whose bits are in the other order in each byte.
fn encrypt(password: &[u8], challenge: [u8; 16]) -> [u8; 16] {
    let mut key = [0_u8; 8];
    for (place, byte) in key.iter_mut().zip(password) {
        *place = byte.reverse_bits();
    }
    let cipher = Des::new(&Array(key));
    let mut encrypted = challenge;
    for half in encrypted.chunks_exact_mut(8) {
        let mut block = Array([0; 8]);
        block.copy_from_slice(half);
        cipher.encrypt_block(&mut block);
        half.copy_from_slice(&block);
    }
    encrypted
}

/// The beginning of the protocol with the `vmm`, which asks for no password.
pub(super) async fn greet(screen: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> io::Result<()> {
    let unexpected = || io::Error::other("the vmm does not speak RFB as expected");
    let mut version = [0; 12];
    screen.read_exact(&mut version).await?;
    screen.write_all(VERSION).await?;
    let count = screen.read_u8().await?;
    let mut types = vec![0; count.into()];
    screen.read_exact(&mut types).await?;
    if version != *VERSION || !types.contains(&NONE) {
        return Err(unexpected());
    }
    screen.write_u8(NONE).await?;
    if screen.read_u32().await? != 0 {
        return Err(unexpected());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of FIPS 81, table B1: key 0123456789abcdef, "Now is the time ".
    #[test]
    fn a_challenge_is_encrypted_as_viewers_do_it() {
        let key = [0x01_u8, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef].map(u8::reverse_bits);
        let encrypted = [
            0x3f, 0xa4, 0x0e, 0x8a, 0x98, 0x4d, 0x48, 0x15, 0x6a, 0x27, 0x17, 0x87, 0xab, 0x88, 0x83, 0xf9,
        ];
        assert_eq!(encrypt(&key, *b"Now is the time "), encrypted);
    }
}
