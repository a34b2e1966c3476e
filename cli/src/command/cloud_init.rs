//! Cloud-init data for the first boot of a guest, from flags.

use std::{
    fs,
    io::{self, Read as _},
    path::Path,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use vmmd_api::v1;
use vmmd_spec::cloud_init::{UNKNOWN_USER_DATA, is_known_user_data};

use crate::{
    args::vm::CloudInit,
    failure::{Code, Failure, Result},
};

/// Returns the cloud-init data from the flags; `None` without any such flag.
pub fn from_flags(args: &CloudInit) -> Result<Option<v1::CloudInit>> {
    let mut init = v1::CloudInit {
        hostname: args.hostname.clone().unwrap_or_default(),
        r#type: args.seed.unwrap_or_default().into(),
        ..Default::default()
    };
    if let Some(path) = &args.user_data {
        // Gzip data is sent as base64.
        let data = as_text(read(path)?);
        let read_by_cloud_init = !matches!(args.seed, Some(v1::SeedType::Sysprep | v1::SeedType::Ignition));
        if read_by_cloud_init && !is_known_user_data(&data) {
            eprintln!("warning: {}: {UNKNOWN_USER_DATA}", path.display());
        }
        match String::from_utf8(data) {
            Ok(text) => init.user_data = text,
            Err(other) => init.user_data_base64 = STANDARD.encode(other.as_bytes()),
        }
    }
    for key in &args.ssh_keys {
        init.ssh_authorized_keys.extend(ssh_keys(key)?);
    }
    Ok((init != v1::CloudInit::default()).then_some(init))
}

/// Converts a text to the form that cloud-init reads: UTF-8 without a byte order mark. Other data stays unchanged.
fn as_text(data: Vec<u8>) -> Vec<u8> {
    let utf16 = |units: &[u8], unit: fn([u8; 2]) -> u16| {
        let (pairs, rest) = units.as_chunks::<2>();
        let text = String::from_utf16(&pairs.iter().map(|pair| unit(*pair)).collect::<Vec<_>>()).ok();
        text.filter(|_| rest.is_empty()).map(String::into_bytes)
    };
    let converted = match data.as_slice() {
        [0xef, 0xbb, 0xbf, text @ ..] => Some(text.to_vec()),
        [0xff, 0xfe, units @ ..] => utf16(units, u16::from_le_bytes),
        [0xfe, 0xff, units @ ..] => utf16(units, u16::from_be_bytes),
        // Without a mark: the first character is ASCII.
        [b'#' | b'C' | b'M', 0, ..] => utf16(&data, u16::from_le_bytes),
        [0, b'#' | b'C' | b'M', ..] => utf16(&data, u16::from_be_bytes),
        _ => None,
    };
    converted.unwrap_or(data)
}

/// The content of a file; `-` is standard input.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    let mut content = Vec::new();
    let read = match path.as_os_str() == "-" {
        true => io::stdin().read_to_end(&mut content).map(|_| content),
        false => fs::read(path),
    };
    read.map_err(|error| {
        let message = format!("{}: {error}", path.display());
        Failure::new(Code::NotFound, message)
    })
}

/// The keys in a file, or one that was given itself.
pub fn ssh_keys(given: &str) -> Result<Vec<String>> {
    // A key has blanks; a file's name may have some too.
    let is_key = given.split_whitespace().count() > 1 && !Path::new(given).exists();
    let text = match is_key {
        true => given.to_owned(),
        false => String::from_utf8_lossy(&read(Path::new(given))?).into_owned(),
    };
    let lines = text.lines().map(str::trim);
    let keys: Vec<_> = lines
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_owned)
        .collect();
    if keys.iter().any(|key| key.contains("PRIVATE KEY")) {
        let message = format!("{given} is a private key: give the public one, {given}.pub");
        return Err(Failure::new(Code::Invalid, message));
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_given_or_read_and_private_ones_refused() {
        assert_eq!(ssh_keys("ssh-ed25519 AAAA me").unwrap(), ["ssh-ed25519 AAAA me"]);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys");
        fs::write(&file, "# mine\nssh-ed25519 A a\n\nssh-rsa B b\n").unwrap();
        let keys = ssh_keys(file.to_str().unwrap()).unwrap();
        assert_eq!(keys, ["ssh-ed25519 A a", "ssh-rsa B b"]);
        fs::write(&file, "-----BEGIN OPENSSH PRIVATE KEY-----\n").unwrap();
        assert!(
            ssh_keys(file.to_str().unwrap())
                .unwrap_err()
                .message
                .contains("private")
        );
        assert!(ssh_keys("/nonexistent/key").is_err());
    }

    #[test]
    fn user_data_of_windows_becomes_plain_text() {
        let text = "#cloud-config\r\nhostname: ä\r\n";
        let units = |unit: fn(u16) -> [u8; 2]| -> Vec<u8> { text.encode_utf16().flat_map(unit).collect() };
        let marked = |mark: &[u8], rest: &[u8]| [mark, rest].concat();
        for (title, data) in [
            ("plain", text.as_bytes().to_vec()),
            ("UTF-8 with a mark", marked(&[0xef, 0xbb, 0xbf], text.as_bytes())),
            (
                "UTF-16, little-endian",
                marked(&[0xff, 0xfe], &units(u16::to_le_bytes)),
            ),
            (
                "UTF-16, big-endian",
                marked(&[0xfe, 0xff], &units(u16::to_be_bytes)),
            ),
            ("UTF-16 without a mark", units(u16::to_le_bytes)),
            ("big-endian without a mark", units(u16::to_be_bytes)),
        ] {
            assert_eq!(as_text(data), text.as_bytes(), "{title}");
        }
        for other in [
            vec![0x1f, 0x8b, 8, 0],
            vec![0xff, 0xfe, 0],
            vec![0xff, 0xfe, 0, 0xd8],
        ] {
            assert_eq!(as_text(other.clone()), other);
        }
    }

    #[test]
    fn user_data_that_is_no_text_is_sent_as_base64() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("data");
        let args = CloudInit {
            user_data: Some(file.clone()),
            ..Default::default()
        };
        fs::write(&file, "#!/bin/sh\n").unwrap();
        assert_eq!(from_flags(&args).unwrap().unwrap().user_data, "#!/bin/sh\n");
        fs::write(&file, [0x1f, 0x8b, 8, 0]).unwrap();
        let init = from_flags(&args).unwrap().unwrap();
        assert_eq!(
            (init.user_data.as_str(), init.user_data_base64.as_str()),
            ("", "H4sIAA==")
        );
        assert_eq!(from_flags(&CloudInit::default()).unwrap(), None);
    }
}
