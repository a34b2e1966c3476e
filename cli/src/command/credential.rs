//! Credentials for systemd in a guest, from flags.

use std::path::Path;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use vmmd_api::v1;

use super::cloud_init::read;
use crate::failure::{Code, Failure, Result};

/// The credential of `--credential`: NAME=VALUE or NAME=@FILE.
pub fn from_text(text: &str) -> Result<v1::Credential> {
    let Some((name, value)) = text.split_once('=') else {
        let message = format!("--credential {text}: must be NAME=VALUE or NAME=@FILE");
        return Err(Failure::new(Code::Invalid, message));
    };
    let content = match value.strip_prefix('@') {
        Some(path) => read(Path::new(path))?,
        None => value.as_bytes().to_vec(),
    };
    let mut credential = v1::Credential {
        name: name.to_owned(),
        ..v1::Credential::default()
    };
    match String::from_utf8(content) {
        Ok(text) if !text.contains('\0') => credential.value = text,
        Ok(text) => credential.value_base64 = STANDARD.encode(text),
        Err(other) => credential.value_base64 = STANDARD.encode(other.as_bytes()),
    }
    Ok(credential)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn credential_is_a_text_or_the_content_of_a_file() {
        let made = from_text("a=b=c").unwrap();
        assert_eq!((made.name.as_str(), made.value.as_str()), ("a", "b=c"));
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("content");
        let given = format!("a=@{}", file.display());
        for (content, value, value_base64) in [
            (b"one\ntwo\n".as_slice(), "one\ntwo\n", ""),
            (b"a\0b", "", "YQBi"),
            (&[0xff], "", "/w=="),
        ] {
            fs::write(&file, content).unwrap();
            let made = from_text(&given).unwrap();
            assert_eq!(
                (made.value.as_str(), made.value_base64.as_str()),
                (value, value_base64)
            );
        }
        assert!(from_text("a").is_err());
        assert!(from_text("a=@/nonexistent/file").is_err());
    }
}
