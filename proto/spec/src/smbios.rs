//! The identity of a guest's system in its SMBIOS tables, and texts for programs of the guest there.

use std::fmt;

use uuid::Uuid;
use vmmd_api::v1;

use super::Violations;

/// Longest text in bytes: SMBIOS 2.6 and older have this limit.
pub const MAX_TEXT: usize = 64;
/// Most OEM strings.
pub const MAX_OEM_STRINGS: usize = 64;
/// Longest OEM strings together in bytes, with their final NULs. The tables of a machine without firmware have 64 KiB.
pub const MAX_OEM_BYTES: usize = 32 << 10;

/// Identity of a system. An empty text is the default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Smbios {
    /// The VM's UUID when `None`.
    pub uuid: Option<Uuid>,
    /// Serial number of system and chassis.
    pub serial: String,
    /// Manufacturer of the system.
    pub manufacturer: String,
    /// Product name of the system.
    pub product: String,
    /// Version of the system.
    pub version: String,
    /// SKU number of the system.
    pub sku: String,
    /// Family of the system.
    pub family: String,
    /// Asset tag of the chassis.
    pub asset_tag: String,
    /// OEM strings: the VM's credentials.
    pub oem_strings: Vec<OemString>,
}

/// An OEM string, which may have a secret after its first `=`.
#[derive(Clone, PartialEq, Eq)]
pub struct OemString(String);

impl OemString {
    /// `None` if it is empty or has a NUL, which ends a string of the tables.
    pub fn new(text: String) -> Option<Self> {
        (!text.is_empty() && !text.contains('\0')).then_some(Self(text))
    }

    /// The text with its secret.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for OemString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let open = self.0.split_once('=').map_or("", |(open, _)| open);
        write!(f, "{open}=…")
    }
}

/// Whether the tables have room for these OEM strings.
pub fn fit(strings: &[OemString]) -> bool {
    let bytes: usize = strings
        .iter()
        .map(|text| text.as_str().len().saturating_add(1))
        .sum();
    strings.len() <= MAX_OEM_STRINGS && bytes <= MAX_OEM_BYTES
}

/// Whether a text can be a string of a table.
pub fn is_text(text: &str) -> bool {
    let printable = text.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
    printable && text.len() <= MAX_TEXT && text.trim() == text
}

impl Smbios {
    /// Checks an identity and records violations.
    pub fn new(found: &mut Violations, wire: &v1::SmbiosSpec) -> Self {
        let uuid = match wire.uuid.as_str() {
            "" => None,
            // SMBIOS 3.7, 7.2.1: these two stand for an absent UUID.
            text => match Uuid::try_parse(text) {
                Ok(uuid) if text.len() == 36 && !uuid.is_nil() && !uuid.is_max() => Some(uuid),
                _ => {
                    let wanted = "must be a UUID as in \"6fd1bd2c-8a4e-4c39-9a6f-2c4f9c7a1b10\", neither all zeroes nor all ones";
                    found.add("spec.smbios.uuid", wanted);
                    None
                }
            },
        };
        let mut text = |field: &str, text: &str| {
            if !is_text(text) {
                found.add(
                    format_args!("spec.smbios.{field}"),
                    format_args!(
                        "must be at most {MAX_TEXT} printable ASCII characters, without spaces at the ends"
                    ),
                );
            }
            text.to_owned()
        };
        Self {
            uuid,
            serial: text("serial", &wire.serial),
            manufacturer: text("manufacturer", &wire.manufacturer),
            product: text("product", &wire.product),
            version: text("version", &wire.version),
            sku: text("sku", &wire.sku),
            family: text("family", &wire.family),
            asset_tag: text("assetTag", &wire.asset_tag),
            oem_strings: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn violations(wire: &v1::SmbiosSpec) -> Vec<String> {
        let mut found = Violations::default();
        Smbios::new(&mut found, wire);
        found.0.into_iter().map(|violation| violation.field).collect()
    }

    #[test]
    fn uuid_is_in_its_canonical_form_and_present() {
        let of = |uuid: &str| {
            let uuid = uuid.to_owned();
            violations(&v1::SmbiosSpec {
                uuid,
                ..Default::default()
            })
        };
        assert!(of("").is_empty() && of("6FD1bd2c-8a4e-4c39-9a6f-2c4f9c7a1b10").is_empty());
        for wrong in [
            "6fd1bd2c8a4e4c399a6f2c4f9c7a1b10",
            "00000000-0000-0000-0000-000000000000",
            "ffffffff-ffff-ffff-ffff-ffffffffffff",
            "{6fd1bd2c-8a4e-4c39-9a6f-2c4f9c7a1b10}",
            "web",
        ] {
            assert_eq!(of(wrong), ["spec.smbios.uuid"], "{wrong}");
        }
    }

    #[test]
    fn texts_are_short_printable_and_trimmed() {
        for right in ["", "A", "Precision 3660 (v2)", &"x".repeat(64)] {
            assert!(is_text(right), "{right}");
        }
        for wrong in [" a", "a ", "a\nb", "ü", "a\0", &"x".repeat(65)] {
            assert!(!is_text(wrong), "{wrong}");
        }
        let wire = v1::SmbiosSpec {
            serial: " 1".into(),
            asset_tag: "\t".into(),
            ..Default::default()
        };
        assert_eq!(violations(&wire), ["spec.smbios.serial", "spec.smbios.assetTag"]);
    }
}
