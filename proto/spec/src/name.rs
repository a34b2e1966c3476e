//! Names of VMs, disks and NICs.

use std::fmt;

/// A DNS label (RFC 1123, 2.1): 1 to 63 of `a-z`, `0-9` and `-`, beginning and ending with a letter or digit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(String);

/// A name that is no DNS label.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be 1 to 63 lower-case letters, digits or '-', beginning and ending with a letter or digit")]
pub struct InvalidName;

impl Name {
    /// The name itself.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<&str> for Name {
    type Error = InvalidName;

    fn try_from(name: &str) -> Result<Self, InvalidName> {
        let alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let bytes = name.as_bytes();
        let ends = bytes.first().is_some_and(alphanumeric) && bytes.last().is_some_and(alphanumeric);
        let inside = bytes.iter().all(|byte| alphanumeric(byte) || *byte == b'-');
        if ends && inside && bytes.len() <= 63 {
            Ok(Self(name.to_owned()))
        } else {
            Err(InvalidName)
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::borrow::Borrow<str> for Name {
    fn borrow(&self) -> &str {
        &self.0
    }
}
