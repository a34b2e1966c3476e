//! Passwords and SSH keys of users of a guest: `spec.accessCredentials`.

use vmmd_api::v1;

use crate::{Violations, vm::unique};

/// Most users of a VM.
pub const MAX_USERS: usize = 16;
/// Most keys of a user.
pub const MAX_KEYS: usize = 64;
/// Longest key in bytes.
pub const MAX_KEY: usize = 8 << 10;
/// Longest keys of all users together in bytes.
pub const MAX_KEY_BYTES: usize = 64 << 10;
/// Longest name of a user in bytes.
const MAX_USER: usize = 256;
/// Longest hash of a password in bytes.
const MAX_HASH: usize = 512;

/// A user of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessCredential {
    /// Name of the user.
    pub name: String,
    /// Lines for authorized_keys.
    pub ssh_authorized_keys: Vec<String>,
    /// Hash of the password as in shadow(5); empty to leave the password.
    pub password_hash: String,
}

/// Validates the users of a spec. The agent of the guest sets them.
pub(super) fn users(found: &mut Violations, spec: &v1::VmSpec) -> Vec<AccessCredential> {
    let field = "spec.accessCredentials";
    let wires = &spec.access_credentials;
    if !wires.is_empty() && spec.guest_agent.is_none() {
        found.add(
            field,
            "needs spec.guestAgent, whose agent sets them: give it, `{}`",
        );
    }
    list(found, field, wires)
}

/// Validates a list of users.
pub fn list(found: &mut Violations, field: &str, wires: &[v1::AccessCredential]) -> Vec<AccessCredential> {
    if wires.len() > MAX_USERS {
        found.add(field, format_args!("at most {MAX_USERS}, are {}", wires.len()));
        return Vec::new();
    }
    unique(found, field, "name", wires.iter().map(|wire| wire.name.as_str()));
    let keys = wires.iter().flat_map(|wire| &wire.ssh_authorized_keys);
    if keys.map(String::len).sum::<usize>() > MAX_KEY_BYTES {
        let most = format_args!("must have keys of at most {MAX_KEY_BYTES} bytes together");
        found.add(field, most);
    }
    for (index, wire) in wires.iter().enumerate() {
        if !is_user(&wire.name) {
            let wanted = "must be the name of a user of the guest";
            found.add(format_args!("{field}[{index}].name"), wanted);
        }
        let keys = format!("{field}[{index}].sshAuthorizedKeys");
        if wire.ssh_authorized_keys.len() > MAX_KEYS {
            found.add(&keys, format_args!("at most {MAX_KEYS}"));
        }
        let wrong = wire.ssh_authorized_keys.iter().position(|key| !is_key(key));
        if let Some(wrong) = wrong {
            found.add(format_args!("{keys}[{wrong}]"), KEY);
        }
        if !wire.password_hash.is_empty() && !is_password_hash(&wire.password_hash) {
            found.add(format_args!("{field}[{index}].passwordHash"), PASSWORD_HASH);
        }
    }
    let user = |wire: &v1::AccessCredential| AccessCredential {
        name: wire.name.clone(),
        ssh_authorized_keys: wire.ssh_authorized_keys.clone(),
        password_hash: wire.password_hash.clone(),
    };
    wires.iter().map(user).collect()
}

/// Whether a text can be the name of a user.
pub fn is_user(name: &str) -> bool {
    let is_odd = |letter: char| letter.is_control() || letter == ':' || letter == '/';
    (1..=MAX_USER).contains(&name.len()) && !name.starts_with('-') && !name.contains(is_odd)
}

/// The problem of a text that is no key.
pub const KEY: &str =
    "must be one line of an authorized_keys file, at most 8 KiB: \"ssh-ed25519 AAAA… comment\"";

/// Whether a text is one line of authorized_keys (sshd(8)) with a key.
pub fn is_key(line: &str) -> bool {
    let is_line = !line.trim().is_empty() && !line.starts_with('#') && !line.chars().any(char::is_control);
    is_line && line.len() <= MAX_KEY && !line.contains("PRIVATE KEY")
}

/// The problem of a text that is no hash of a password.
pub const PASSWORD_HASH: &str =
    "must be a hash as in /etc/shadow, such as `openssl passwd -6` prints: never a password itself";

/// Whether a text has the form of a password's hash in shadow(5).
pub fn is_password_hash(hash: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_graphic() && byte != b':';
    hash.starts_with('$') && hash.len() <= MAX_HASH && hash.bytes().all(is_allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(wires: &[v1::AccessCredential]) -> Vec<String> {
        let mut found = Violations::default();
        list(&mut found, "a", wires);
        found.0.into_iter().map(|violation| violation.field).collect()
    }

    fn user(name: &str, keys: &[&str], password_hash: &str) -> v1::AccessCredential {
        v1::AccessCredential {
            name: name.into(),
            ssh_authorized_keys: keys.iter().map(ToString::to_string).collect(),
            password_hash: password_hash.into(),
            ..Default::default()
        }
    }

    #[test]
    fn wrong_users_keys_and_hashes_are_named() {
        assert!(
            fields(&[
                user("root", &["ssh-ed25519 A me"], "$6$a$b"),
                user("ann", &[], "")
            ])
            .is_empty()
        );
        for (wire, field) in [
            (user("", &[], ""), "a[0].name"),
            (user("-x", &[], ""), "a[0].name"),
            (user("a:b", &[], ""), "a[0].name"),
            (user("a", &["ssh-rsa A", "a\nb"], ""), "a[0].sshAuthorizedKeys[1]"),
            (user("a", &["# x"], ""), "a[0].sshAuthorizedKeys[0]"),
            (user("a", &["x"; 65], ""), "a[0].sshAuthorizedKeys"),
            (user("a", &[], "secret"), "a[0].passwordHash"),
            (user("a", &[], "$6$a:b"), "a[0].passwordHash"),
        ] {
            assert_eq!(fields(std::slice::from_ref(&wire)), [field], "{wire:?}");
        }
        assert_eq!(fields(&[user("a", &[], ""), user("a", &[], "")]), ["a"]);
        assert_eq!(fields(&vec![user("a", &[], ""); 17]), ["a"]);
        let long = "x".repeat(MAX_KEY);
        assert_eq!(fields(&[user("a", &[long.as_str(); 9], "")]), ["a"]);
    }

    #[test]
    fn users_need_the_channel_of_an_agent() {
        let mut spec = v1::VmSpec {
            access_credentials: vec![user("root", &[], "")],
            ..Default::default()
        };
        let mut found = Violations::default();
        users(&mut found, &spec);
        assert_eq!(found.0[0].field, "spec.accessCredentials");
        spec.guest_agent = Some(v1::GuestAgentSpec {});
        let mut found = Violations::default();
        assert_eq!(users(&mut found, &spec).len(), 1);
        assert!(found.0.is_empty());
    }
}
