//! The start of a connection (RFC 6143, 7.1 and 7.2): the version of the viewer, and VNC authentication.

/// The version of all servers here (7.1.1).
pub const VERSION: &[u8; 12] = b"RFB 003.008\n";

/// The minor version of a viewer: 3, 7 or 8. `None` for another protocol.
///
/// Versions in between are as the one below (7.1.1). Those above are as 3.8: Apple's viewer says 3.889, others 4.x and 5.x.
pub fn minor_version(message: &[u8]) -> Option<u8> {
    let text = std::str::from_utf8(message).ok()?;
    let (major, minor) = text.strip_prefix("RFB ")?.strip_suffix('\n')?.split_once('.')?;
    let number = |text: &str| {
        let plain = text.len() == 3 && text.bytes().all(|byte| byte.is_ascii_digit());
        plain.then(|| text.parse::<u16>().ok())?
    };
    match (number(major)?, number(minor)?) {
        (4.., _) | (3, 8..) => Some(8),
        (3, 7) => Some(7),
        (3, 3..) => Some(3),
        _ => None,
    }
}

/// A challenge as VNC authentication encrypts it (7.2.2): DES with the password for a key, whose bits are in the other order in each
/// byte.
#[cfg(feature = "password")]
pub fn encrypt(password: &[u8], challenge: [u8; 16]) -> [u8; 16] {
    use des::{
        Des,
        cipher::{Array, BlockCipherEncrypt, KeyInit},
    };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn viewer_version_is_one_of_three_or_none() {
        for (said, expected) in [
            ("RFB 003.003\n", Some(3)),
            ("RFB 003.005\n", Some(3)),
            ("RFB 003.007\n", Some(7)),
            ("RFB 003.008\n", Some(8)),
            ("RFB 003.889\n", Some(8)),
            ("RFB 004.001\n", Some(8)),
            ("RFB 005.000\n", Some(8)),
            ("RFB 003.002\n", None),
            ("RFB 002.009\n", None),
            ("RFB 003.+08\n", None),
            ("RFB 003.008 ", None),
            ("GET / HTTP/1", None),
        ] {
            assert_eq!(minor_version(said.as_bytes()), expected, "{said:?}");
        }
    }

    /// The example of FIPS 81, table B1: key 0123456789abcdef, "Now is the time ".
    #[cfg(feature = "password")]
    #[test]
    fn challenge_is_encrypted_as_viewers_do_it() {
        let key = [0x01_u8, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef].map(u8::reverse_bits);
        let encrypted = [
            0x3f, 0xa4, 0x0e, 0x8a, 0x98, 0x4d, 0x48, 0x15, 0x6a, 0x27, 0x17, 0x87, 0xab, 0x88, 0x83, 0xf9,
        ];
        assert_eq!(encrypt(&key, *b"Now is the time "), encrypted);
    }
}
