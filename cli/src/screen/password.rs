//! A password for viewers that connect where `vnc --listen` says: VNC authentication (RFC 6143, 7.2.2). The viewer of macOS accepts no
//! server without one.

use std::io;

use ::rfb::handshake::{self, VERSION};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use uuid::Uuid;

/// The security type (7.1.2).
const VNC_AUTHENTICATION: u8 = 2;
/// SecurityResults (7.1.3).
const OK: u32 = 0;
const FAILED: u32 = 1;
/// Random bytes of a password: eight characters, which is as many as the protocol has.
const BYTES: usize = 6;

/// A random password.
pub fn new() -> String {
    let random = Uuid::new_v4().into_bytes();
    // The first six bytes of a random UUID have neither its version nor its variant.
    URL_SAFE_NO_PAD.encode(random.get(..BYTES).unwrap_or_default())
}

/// Authenticates a viewer; true when its password is right. [`admit`] follows then.
pub async fn shown(
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
    password: &str,
) -> io::Result<bool> {
    writer.write_all(VERSION).await?;
    let mut version = [0; VERSION.len()];
    reader.read_exact(&mut version).await?;
    let minor = handshake::minor_version(&version);
    let minor = minor.ok_or_else(|| io::Error::other("the viewer does not speak RFB"))?;
    if minor >= 7 {
        writer.write_all(&[1, VNC_AUTHENTICATION]).await?;
        if reader.read_u8().await? != VNC_AUTHENTICATION {
            return Err(io::Error::other("the viewer chose another security type"));
        }
    } else {
        writer.write_u32(VNC_AUTHENTICATION.into()).await?;
    }
    let challenge = Uuid::new_v4().into_bytes();
    writer.write_all(&challenge).await?;
    let mut response = [0; 16];
    reader.read_exact(&mut response).await?;
    let right = response == handshake::encrypt(password.as_bytes(), challenge);
    if !right {
        writer.write_u32(FAILED).await?;
        if minor >= 8 {
            let why = "the password is wrong";
            writer.write_u32(u32::try_from(why.len()).unwrap_or(0)).await?;
            writer.write_all(why.as_bytes()).await?;
        }
        writer.shutdown().await?;
    }
    Ok(right)
}

/// Reports to the viewer that authentication succeeded.
pub async fn admit(writer: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
    writer.write_u32(OK).await
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The result that a viewer of this version reads after it answered with `password`, and whether the server admits it.
    async fn see(version: &str, password: &str) -> (Vec<u8>, bool) {
        let (viewer, server) = tokio::io::duplex(1024);
        let (mut reader, mut writer) = tokio::io::split(server);
        let speaking = tokio::spawn(async move {
            let right = shown(&mut reader, &mut writer, "12345678").await.unwrap();
            if right {
                admit(&mut writer).await.unwrap();
            }
            right
        });
        let (mut from, mut to) = tokio::io::split(viewer);
        let mut hello = [0; 12];
        from.read_exact(&mut hello).await.unwrap();
        to.write_all(version.as_bytes()).await.unwrap();
        let old = version == "RFB 003.003\n";
        let mut types = vec![0; if old { 4 } else { 2 }];
        from.read_exact(&mut types).await.unwrap();
        assert_eq!(types, if old { vec![0, 0, 0, 2] } else { vec![1, 2] });
        if !old {
            to.write_all(&[2]).await.unwrap();
        }
        let mut challenge = [0; 16];
        from.read_exact(&mut challenge).await.unwrap();
        let response = handshake::encrypt(password.as_bytes(), challenge);
        to.write_all(&response).await.unwrap();
        let right = speaking.await.unwrap();
        let mut rest = Vec::new();
        drop(to);
        from.read_to_end(&mut rest).await.unwrap();
        (rest, right)
    }

    #[tokio::test]
    async fn viewer_of_each_version_gets_in_by_the_password_alone() {
        for version in ["RFB 003.003\n", "RFB 003.007\n", "RFB 003.889\n", "RFB 004.001\n"] {
            assert_eq!(see(version, "12345678").await, (vec![0; 4], true), "{version}");
            let (rest, right) = see(version, "12345679").await;
            assert!(rest.starts_with(&[0, 0, 0, 1]) && !right, "{version}");
        }
    }

    #[test]
    fn password_has_eight_characters() {
        assert_eq!(new().len(), 8);
        assert_ne!(new(), new());
    }
}
