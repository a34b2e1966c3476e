//! Secrets of a spec: contents for the guest's cloud-init, its credentials, and passwords of its users. Answers show their digests instead. A client that sends a digest back keeps the content.
//!
//! A viewer may know all of a content except a password in it. The digests of answers are made with the node's key, so that a guess cannot be tested
//! against them.

use serde_json::Value as Json;
use sha2::{Digest, Sha256};
use vmmd_api::v1;
use vmmd_spec::{
    Violations,
    cloud_init::user_data,
    credential,
    image::{checksum, checksum_text},
};
use vmmd_store::Key;

/// Before a digest that was made with the node's key.
const KEYED: &str = "hmac-";
/// Begin of the paths of lists with secrets, and the field of each with a digest.
const LISTS: [(&str, &str); 2] = [
    ("spec.credentials[", "valueDigest"),
    ("spec.accessCredentials[", "passwordHashDigest"),
];

/// A secret of cloud-init.
struct Secret {
    /// Its field in JSON, without "Digest" behind it.
    field: &'static str,
    /// The bytes that the guest gets.
    content: fn(&v1::CloudInit) -> Vec<u8>,
    digest: fn(&mut v1::CloudInit) -> &mut String,
    /// Sets the content of the first one to that of the second one.
    put: fn(&mut v1::CloudInit, &v1::CloudInit),
}

const SECRETS: [Secret; 4] = [
    Secret {
        field: "userData",
        // Content that cannot be decoded is refused by the validation.
        content: |init| user_data(init).unwrap_or_default(),
        digest: |init| &mut init.user_data_digest,
        put: |init, from| {
            init.user_data.clone_from(&from.user_data);
            init.user_data_base64.clone_from(&from.user_data_base64);
        },
    },
    Secret {
        field: "passwordHash",
        content: |init| init.password_hash.clone().into_bytes(),
        digest: |init| &mut init.password_hash_digest,
        put: |init, from| init.password_hash.clone_from(&from.password_hash),
    },
    Secret {
        field: "networkConfig",
        content: |init| init.network_config.clone().into_bytes(),
        digest: |init| &mut init.network_config_digest,
        put: |init, from| init.network_config.clone_from(&from.network_config),
    },
    Secret {
        field: "vendorData",
        content: |init| init.vendor_data.clone().into_bytes(),
        digest: |init| &mut init.vendor_data_digest,
        put: |init, from| init.vendor_data.clone_from(&from.vendor_data),
    },
];

/// Replaces secrets by plain digests, for comparing specs. Answers have the digests of [`shown`] instead.
pub fn redact(spec: &mut v1::VmSpec) {
    digests(spec, |content| checksum_text(&Sha256::digest(content)));
}

/// A spec as answers have it: secrets are replaced by digests that are made with the node's key.
pub fn shown(spec: Option<&v1::VmSpec>, key: &Key) -> Option<v1::VmSpec> {
    let mut spec = spec.cloned()?;
    digests(&mut spec, |content| keyed(&Sha256::digest(content), key));
    Some(spec)
}

/// A value of a redacted spec as answers have it.
pub fn shown_value(path: &str, value: Json, key: &Key) -> Json {
    let of_digest = |digest: &str| {
        let hash = checksum(digest);
        hash.map_or(Json::Null, |hash| keyed(&hash, key).into())
    };
    let list = LISTS.iter().find(|(start, _)| path.starts_with(start));
    let is_secret = list.is_some() || path.starts_with("spec.cloudInit.");
    match (value, list) {
        (Json::String(digest), _) if is_secret && path.ends_with("Digest") => of_digest(&digest),
        // An item that was added or removed.
        (Json::Object(mut fields), Some((_, field))) => {
            if let Some(Json::String(digest)) = fields.get_mut(*field) {
                *digest = match of_digest(digest) {
                    Json::String(keyed) => keyed,
                    _ => String::new(),
                };
            }
            Json::Object(fields)
        }
        (value, _) => value,
    }
}

fn digests(spec: &mut v1::VmSpec, digest: impl Fn(&[u8]) -> String) {
    for credential in &mut spec.credentials {
        let content = credential_content(credential);
        *credential = v1::Credential {
            name: std::mem::take(&mut credential.name),
            value_digest: if content.is_empty() {
                String::new()
            } else {
                digest(&content)
            },
            ..v1::Credential::default()
        };
    }
    for user in &mut spec.access_credentials {
        let hash = std::mem::take(&mut user.password_hash);
        if !hash.is_empty() {
            user.password_hash_digest = digest(hash.as_bytes());
        }
    }
    let Some(init) = &mut spec.cloud_init else {
        return;
    };
    for secret in SECRETS {
        let content = (secret.content)(init);
        if !content.is_empty() {
            *(secret.digest)(init) = digest(&content);
        }
        (secret.put)(init, &v1::CloudInit::default());
    }
}

/// The bytes that the guest gets. Content that cannot be decoded is refused by the validation.
fn credential_content(wire: &v1::Credential) -> Vec<u8> {
    credential::content(wire).unwrap_or_default()
}

/// The keyed digest of a content with this SHA-256.
fn keyed(hash: &[u8], key: &Key) -> String {
    format!("{KEYED}{}", checksum_text(&key.fingerprint(hash)))
}

/// Puts the secrets of `present` back where `spec` has their digests, and takes the digests away. A client that knows a content may also send its
/// plain SHA-256 ("sha256:…").
///
/// # Errors
///
/// Digests of something else.
pub fn restore(spec: &mut v1::VmSpec, present: Option<&v1::VmSpec>, key: &Key) -> Result<(), Violations> {
    give_back(spec, present, |content, digest| {
        let hash = Sha256::digest(content);
        digest == keyed(&hash, key) || digest == checksum_text(&hash)
    })
}

/// Refuses digests: a spec that was not shown by this node has its secrets themselves.
///
/// # Errors
///
/// Digests.
pub fn refuse_digests(spec: &mut v1::VmSpec) -> Result<(), Violations> {
    give_back(spec, None, |_, _| false)
}

fn give_back(
    spec: &mut v1::VmSpec,
    present: Option<&v1::VmSpec>,
    is_of: impl Fn(&[u8], &str) -> bool,
) -> Result<(), Violations> {
    let mut found = Violations::default();
    // Whether the present content has to be taken.
    let mut takes = |field: String, digest: &str, given: &[u8], present: &[u8]| {
        let content = if given.is_empty() { present } else { given };
        let right = digest.is_empty() || !content.is_empty() && is_of(content, digest);
        if !right {
            let problem = "is not that of what the VM has: give the content itself";
            found.add(field, problem);
        }
        right && !digest.is_empty() && given.is_empty()
    };
    if let Some(init) = &mut spec.cloud_init {
        let none = v1::CloudInit::default();
        let present = present.and_then(|spec| spec.cloud_init.as_ref()).unwrap_or(&none);
        for secret in SECRETS {
            let digest = std::mem::take((secret.digest)(init));
            let field = format!("spec.cloudInit.{}Digest", secret.field);
            if takes(
                field,
                &digest,
                &(secret.content)(init),
                &(secret.content)(present),
            ) {
                (secret.put)(init, present);
            }
        }
    }
    let users = present.map_or(&[][..], |spec| &spec.access_credentials);
    for (index, user) in spec.access_credentials.iter_mut().enumerate() {
        let digest = std::mem::take(&mut user.password_hash_digest);
        let field = format!("spec.accessCredentials[{index}].passwordHashDigest");
        let same = users.iter().find(|present| present.name == user.name);
        let hash = same.map_or("", |same| &same.password_hash);
        if takes(field, &digest, user.password_hash.as_bytes(), hash.as_bytes()) {
            hash.clone_into(&mut user.password_hash);
        }
    }
    let present = present.map_or(&[][..], |spec| &spec.credentials);
    for (index, credential) in spec.credentials.iter_mut().enumerate() {
        let digest = std::mem::take(&mut credential.value_digest);
        let field = format!("spec.credentials[{index}].valueDigest");
        let same = present.iter().find(|present| present.name == credential.name);
        let content = same.map(credential_content).unwrap_or_default();
        if takes(field, &digest, &credential_content(credential), &content)
            && let Some(same) = same
        {
            credential.clone_from(same);
        }
    }
    found.or(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(init: v1::CloudInit) -> v1::VmSpec {
        v1::VmSpec {
            cloud_init: Some(init),
            ..Default::default()
        }
    }

    fn key() -> Key {
        Key::of(&[7; 32])
    }

    fn whole() -> v1::VmSpec {
        spec(v1::CloudInit {
            user_data: "#cloud-config\n".into(),
            password_hash: "$6$a$b".into(),
            network_config: "wifis: {a: {password: b}}".into(),
            vendor_data: "#!/bin/register".into(),
            hostname: "web".into(),
            ..Default::default()
        })
    }

    #[test]
    fn secrets_are_shown_as_digests_and_come_back_by_them() {
        let whole = whole();
        let mut shown = super::shown(Some(&whole), &key()).unwrap();
        let text = format!("{shown:?}");
        for secret in ["#cloud-config", "$6$", "wifis", "#!/bin", "\"sha256:"] {
            assert!(!text.contains(secret), "{secret}");
        }
        assert!(text.contains("web"));
        let mut back = shown.clone();
        restore(&mut back, Some(&whole), &key()).unwrap();
        assert_eq!(back, whole);
        let mut of_another_node = shown.clone();
        let other = Key::of(&[8; 32]);
        assert!(restore(&mut of_another_node, Some(&whole), &other).is_err());
        // A client that has the content may say which one it means.
        let mut plain = whole.clone();
        redact(&mut plain);
        restore(&mut plain, Some(&whole), &key()).unwrap();
        assert_eq!(plain, whole);
        assert!(refuse_digests(&mut shown.clone()).is_err());
        refuse_digests(&mut whole.clone()).unwrap();
        // The digests of other content are refused.
        let found = restore(&mut shown, None, &key()).unwrap_err();
        let fields: Vec<_> = found.0.iter().map(|wrong| wrong.field.as_str()).collect();
        assert_eq!(
            fields,
            [
                "spec.cloudInit.userDataDigest",
                "spec.cloudInit.passwordHashDigest",
                "spec.cloudInit.networkConfigDigest",
                "spec.cloudInit.vendorDataDigest",
            ]
        );
        // New content replaces the old content.
        let mut new = spec(v1::CloudInit {
            user_data: "#!/bin/sh\n".into(),
            ..Default::default()
        });
        restore(&mut new, Some(&whole), &key()).unwrap();
        assert_eq!(new.cloud_init.unwrap().user_data, "#!/bin/sh\n");
    }

    #[test]
    fn credentials_are_shown_as_digests_and_come_back_by_name() {
        let credential = |name: &str, value: &str| v1::Credential {
            name: name.into(),
            value: value.into(),
            ..Default::default()
        };
        let whole = v1::VmSpec {
            credentials: vec![
                credential("a", "SECRET-1"),
                v1::Credential {
                    value_base64: "AAE=".into(),
                    ..credential("b", "")
                },
                credential("empty", ""),
            ],
            ..Default::default()
        };
        let shown = super::shown(Some(&whole), &key()).unwrap();
        let text = format!("{shown:?}");
        assert!(!text.contains("SECRET") && !text.contains("AAE="), "{text}");
        let mut back = shown.clone();
        back.credentials.reverse();
        restore(&mut back, Some(&whole), &key()).unwrap();
        back.credentials.reverse();
        assert_eq!(back, whole);
        assert!(refuse_digests(&mut shown.clone()).is_err());
        // The digest of one credential is not that of another.
        let mut swapped = shown.clone();
        swapped.credentials[0].name = "b".into();
        swapped.credentials.truncate(1);
        let refused = restore(&mut swapped, Some(&whole), &key()).unwrap_err();
        assert_eq!(refused.0[0].field, "spec.credentials[0].valueDigest");

        let mut redacted = whole;
        redact(&mut redacted);
        let value = serde_json::to_value(&redacted.credentials[0]).unwrap();
        let added = shown_value("spec.credentials[a]", value.clone(), &key());
        let digest = shown.credentials[0].value_digest.as_str();
        assert_eq!(added["valueDigest"], digest);
        let changed = shown_value(
            "spec.credentials[a].valueDigest",
            value["valueDigest"].clone(),
            &key(),
        );
        assert_eq!(changed, digest);
    }

    #[test]
    fn hashes_of_passwords_are_shown_as_digests_and_come_back() {
        let user = |name: &str, hash: &str| v1::AccessCredential {
            name: name.into(),
            ssh_authorized_keys: vec!["ssh-ed25519 A".into()],
            password_hash: hash.into(),
            ..Default::default()
        };
        let whole = v1::VmSpec {
            access_credentials: vec![user("root", "$6$a$SECRET"), user("ann", "")],
            ..Default::default()
        };
        let shown = super::shown(Some(&whole), &key()).unwrap();
        assert!(!format!("{shown:?}").contains("SECRET"));
        let mut back = shown.clone();
        restore(&mut back, Some(&whole), &key()).unwrap();
        assert_eq!(back, whole);
        // The digest of one user is not that of another.
        let mut swapped = shown.clone();
        swapped.access_credentials[0].name = "ann".into();
        let refused = restore(&mut swapped, Some(&whole), &key()).unwrap_err();
        assert_eq!(refused.0[0].field, "spec.accessCredentials[0].passwordHashDigest");
        let mut redacted = whole;
        redact(&mut redacted);
        let value = serde_json::to_value(&redacted.access_credentials[0]).unwrap();
        let added = shown_value("spec.accessCredentials[root]", value, &key());
        let digest = &shown.access_credentials[0].password_hash_digest;
        assert_eq!(added["passwordHashDigest"], digest.as_str());
    }

    #[test]
    fn a_change_of_a_secret_is_shown_by_keyed_digests() {
        let mut redacted = whole();
        redact(&mut redacted);
        let shown = super::shown(Some(&whole()), &key()).unwrap();
        let digests = |spec: v1::VmSpec| {
            let init = serde_json::to_value(spec.cloud_init).unwrap();
            let fields = init.as_object().unwrap().clone().into_iter();
            fields
                .filter(|(name, _)| name.ends_with("Digest"))
                .collect::<Vec<_>>()
        };
        let wanted = digests(shown);
        assert_eq!(wanted.len(), SECRETS.len());
        let found = digests(redacted).into_iter().map(|(name, value)| {
            let value = shown_value(&format!("spec.cloudInit.{name}"), value, &key());
            (name, value)
        });
        assert_eq!(found.collect::<Vec<_>>(), wanted);
        let other = Json::from("sha256:00");
        assert_eq!(shown_value("spec.disks[a].serial", other.clone(), &key()), other);
    }
}
