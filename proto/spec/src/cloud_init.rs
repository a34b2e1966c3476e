//! Data for a guest's cloud-init.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use vmmd_api::v1;

use super::{Violations, access};

/// Longest user data, vendor data or network configuration in bytes.
pub const MAX_DATA: usize = 128 << 10;
/// Most SSH keys.
pub const MAX_KEYS: usize = 64;
/// Name of the disk with the seed in the VM.
pub const SEED: &str = "cloud-init";

/// Form of the data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SeedType {
    /// NoCloud of cloud-init.
    #[default]
    NoCloud,
    /// ConfigDrive of OpenStack.
    ConfigDrive,
    /// Answer file of Windows.
    Sysprep,
    /// Configuration of Ignition.
    Ignition,
}

impl SeedType {
    fn new(found: &mut Violations, value: i32) -> Self {
        match v1::SeedType::try_from(value) {
            Ok(v1::SeedType::Unspecified | v1::SeedType::NoCloud) => Self::NoCloud,
            Ok(v1::SeedType::ConfigDrive) => Self::ConfigDrive,
            Ok(v1::SeedType::Sysprep) => Self::Sysprep,
            Ok(v1::SeedType::Ignition) => Self::Ignition,
            Err(_) => {
                found.add("spec.cloudInit.type", format_args!("unknown value {value}"));
                Self::default()
            }
        }
    }

    /// Whether cloud-init, or cloudbase-init, reads the data.
    pub fn is_for_cloud_init(self) -> bool {
        matches!(self, Self::NoCloud | Self::ConfigDrive)
    }
}

/// Data for cloud-init.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CloudInit {
    /// Its form.
    pub kind: SeedType,
    /// As the guest gets it; empty when there is none.
    pub user_data: Vec<u8>,
    /// As the guest gets it; empty when there is none.
    pub vendor_data: String,
    /// As the guest gets it; empty to have it made of the VM's NICs.
    pub network_config: String,
    /// The guest's name for itself; that of the VM when empty.
    pub hostname: String,
    /// Lets the guest detect its first boot; the VM's UUID when empty.
    pub instance_id: String,
    /// For the image's default user.
    pub ssh_authorized_keys: Vec<String>,
    /// Hash of the default user's password, as in shadow(5); empty for none.
    pub password_hash: String,
}

impl CloudInit {
    /// Validates it.
    pub fn new(found: &mut Violations, wire: &v1::CloudInit) -> Self {
        let field = |name: &str| format!("spec.cloudInit.{name}");
        for (name, text) in [
            ("userData", &wire.user_data),
            ("vendorData", &wire.vendor_data),
            ("networkConfig", &wire.network_config),
        ] {
            if text.len() > MAX_DATA {
                let problem = format_args!("must have at most {MAX_DATA} bytes, has {}", text.len());
                found.add(field(name), problem);
            }
        }
        let user_data = user_data(wire).unwrap_or_else(|problem| {
            found.add(field("userDataBase64"), problem);
            Vec::new()
        });
        if user_data.len() > MAX_DATA && wire.user_data.is_empty() {
            let problem = format_args!("must be at most {MAX_DATA} bytes, is {}", user_data.len());
            found.add(field("userDataBase64"), problem);
        }
        let letter = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        for (name, text, most) in [
            ("hostname", &wire.hostname, 253),
            ("instanceId", &wire.instance_id, 128),
        ] {
            if text.len() > most || !text.bytes().all(letter) {
                let problem = format_args!("must have at most {most} letters, digits, '-', '.' and '_'");
                found.add(field(name), problem);
            }
        }
        if wire.ssh_authorized_keys.len() > MAX_KEYS {
            found.add(field("sshAuthorizedKeys"), format_args!("at most {MAX_KEYS}"));
        }
        for (index, key) in wire.ssh_authorized_keys.iter().enumerate() {
            if !access::is_key(key) {
                let field = format_args!("spec.cloudInit.sshAuthorizedKeys[{index}]");
                found.add(field, access::KEY);
            }
        }
        let hash = &wire.password_hash;
        if !hash.is_empty() && !access::is_password_hash(hash) {
            found.add(field("passwordHash"), access::PASSWORD_HASH);
        }
        if !hash.is_empty() && !wire.vendor_data.is_empty() {
            found.add(
                field("vendorData"),
                "must be left out with `passwordHash`, which is put there",
            );
        }
        let kind = SeedType::new(found, wire.r#type);
        check_kind(found, kind, wire, &user_data);
        Self {
            kind,
            user_data,
            vendor_data: wire.vendor_data.clone(),
            network_config: wire.network_config.clone(),
            hostname: wire.hostname.clone(),
            instance_id: wire.instance_id.clone(),
            ssh_authorized_keys: wire.ssh_authorized_keys.clone(),
            password_hash: wire.password_hash.clone(),
        }
    }
}

/// Checks the data against its form.
fn check_kind(found: &mut Violations, kind: SeedType, wire: &v1::CloudInit, user_data: &[u8]) {
    let is_object = |data: &[u8]| data.trim_ascii_start().starts_with(b"{");
    let mut json = |field: &str, data: &[u8]| {
        if !data.is_empty() && !is_object(data) {
            found.add(field, "must be an object of JSON");
        }
    };
    match kind {
        SeedType::NoCloud => return,
        SeedType::ConfigDrive => {
            json("spec.cloudInit.networkConfig", wire.network_config.as_bytes());
            json("spec.cloudInit.vendorData", wire.vendor_data.as_bytes());
            return;
        }
        SeedType::Ignition => json("spec.cloudInit.userData", user_data),
        SeedType::Sysprep => {}
    }
    if user_data.is_empty() && wire.user_data_digest.is_empty() {
        let missing = "must be given with `type` SYSPREP or IGNITION";
        found.add("spec.cloudInit.userData", missing);
    }
    for (field, given) in [
        ("networkConfig", !wire.network_config.is_empty()),
        ("hostname", !wire.hostname.is_empty()),
        ("sshAuthorizedKeys", !wire.ssh_authorized_keys.is_empty()),
        ("passwordHash", !wire.password_hash.is_empty()),
        ("vendorData", !wire.vendor_data.is_empty()),
    ] {
        if given {
            let useless = "must be left out with `type` SYSPREP or IGNITION: write it into `userData`";
            found.add(format_args!("spec.cloudInit.{field}"), useless);
        }
    }
}

/// First bytes of the formats of cloud-init (its documentation, "User data formats") and of cloudbase-init for Windows.
const BEGINNINGS: [&[u8]; 13] = [
    b"#cloud-config",
    b"#!",
    b"#include",
    b"#cloud-boothook",
    b"#part-handler",
    b"## template:",
    b"Content-Type:",
    b"MIME-Version:",
    b"\x1f\x8b",
    b"#ps1",
    b"rem cmd",
    b"From ",
    b"<powershell>",
];

/// Whether cloud-init knows the format of user data; a guest ignores other data silently. Empty data is known.
pub fn is_known_user_data(data: &[u8]) -> bool {
    let begins = |begin: &&[u8]| {
        let first = data.get(..begin.len());
        first.is_some_and(|first| first.eq_ignore_ascii_case(begin))
    };
    data.is_empty() || BEGINNINGS.iter().any(begins)
}

/// The warning about unknown user data.
pub const UNKNOWN_USER_DATA: &str = "the format of the user data is unknown to cloud-init, and most guests ignore it: begin it with \"#cloud-config\", \
                                     \"#!\" or another header of cloud-init";

/// The user data as the guest gets it.
///
/// # Errors
///
/// It is given twice, or is not base64.
pub fn user_data(wire: &v1::CloudInit) -> Result<Vec<u8>, &'static str> {
    match (wire.user_data.as_str(), wire.user_data_base64.as_str()) {
        (text, "") => Ok(text.as_bytes().to_vec()),
        ("", coded) => {
            // As base64(1) prints it: in lines.
            let coded: String = coded.split_ascii_whitespace().collect();
            STANDARD
                .decode(coded)
                .map_err(|_| "must be base64, as `base64` prints it")
        }
        _ => Err("must be left out with `userData`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_said_by_field() {
        for (init, field) in [
            (
                v1::CloudInit {
                    password_hash: "secret".into(),
                    ..Default::default()
                },
                "spec.cloudInit.passwordHash",
            ),
            (
                v1::CloudInit {
                    hostname: "a b".into(),
                    ..Default::default()
                },
                "spec.cloudInit.hostname",
            ),
            (
                v1::CloudInit {
                    ssh_authorized_keys: vec!["a\nb".into()],
                    ..Default::default()
                },
                "spec.cloudInit.sshAuthorizedKeys[0]",
            ),
            (
                v1::CloudInit {
                    user_data: "x".repeat(MAX_DATA + 1),
                    ..Default::default()
                },
                "spec.cloudInit.userData",
            ),
            (
                v1::CloudInit {
                    user_data_base64: "no base64!".into(),
                    ..Default::default()
                },
                "spec.cloudInit.userDataBase64",
            ),
            (
                v1::CloudInit {
                    user_data: "#!/bin/sh".into(),
                    user_data_base64: "ZWNobw==".into(),
                    ..Default::default()
                },
                "spec.cloudInit.userDataBase64",
            ),
        ] {
            let mut found = Violations::default();
            CloudInit::new(&mut found, &init);
            assert_eq!(found.0[0].field, field);
        }
    }

    #[test]
    fn form_of_the_data_decides_which_fields_it_has() {
        use v1::SeedType::{ConfigDrive, Ignition, Sysprep};
        let of = |kind: v1::SeedType, data: &str| v1::CloudInit {
            r#type: kind.into(),
            user_data: data.into(),
            ..Default::default()
        };
        let hostname = |kind, data| v1::CloudInit {
            hostname: "web".into(),
            ..of(kind, data)
        };
        let network = |config: &str| v1::CloudInit {
            network_config: config.into(),
            ..of(ConfigDrive, "")
        };
        for (init, field) in [
            (of(Sysprep, "<unattend/>"), ""),
            (of(Sysprep, ""), "userData"),
            (hostname(Sysprep, "<unattend/>"), "hostname"),
            (of(Ignition, " {\"ignition\": {}}"), ""),
            (of(Ignition, "variant: fcos"), "userData"),
            (hostname(Ignition, "{}"), "hostname"),
            (hostname(ConfigDrive, "#!/bin/sh"), ""),
            (network("{\"links\": []}"), ""),
            (network("version: 2"), "networkConfig"),
        ] {
            let mut found = Violations::default();
            CloudInit::new(&mut found, &init);
            let fields: Vec<_> = found.0.iter().map(|it| it.field.as_str()).collect();
            match field {
                "" => assert_eq!(fields, [""; 0], "{init:?}"),
                field => assert_eq!(fields, [format!("spec.cloudInit.{field}")], "{init:?}"),
            }
        }
    }

    #[test]
    fn user_data_is_known_by_its_first_bytes() {
        for (data, known) in [
            (b"".as_slice(), true),
            (b"#cloud-config\r\nhostname: a\r\n", true),
            (b"#!/bin/sh\n", true),
            (b"content-type: multipart/mixed", true),
            (&[0x1f, 0x8b, 8], true),
            (b" #cloud-config\n", false),
            (b"\xef\xbb\xbf#cloud-config\n", false),
            (b"#\0c\0l\0o\0", false),
            (b"hostname: a\n", false),
            (br#"{"ignition":{}}"#, false),
            (b"#", false),
        ] {
            assert_eq!(is_known_user_data(data), known, "{data:?}");
        }
    }

    #[test]
    fn user_data_is_a_text_or_anything_in_base64() {
        for (user_data, user_data_base64, bytes) in [
            ("#!/bin/sh", "", b"#!/bin/sh".as_slice()),
            ("", "H4s\nIAA==\n", &[0x1f, 0x8b, 8, 0]),
            ("", "", b""),
        ] {
            let mut found = Violations::default();
            let init = v1::CloudInit {
                user_data: user_data.into(),
                user_data_base64: user_data_base64.into(),
                ..Default::default()
            };
            assert_eq!(CloudInit::new(&mut found, &init).user_data, bytes);
            assert!(found.0.is_empty());
        }
    }
}
