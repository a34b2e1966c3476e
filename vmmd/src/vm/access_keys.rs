//! SSH keys that a guest may have because of its spec: `spec.accessCredentials`.

use vmmd_api::v1;
use vmmd_host::failure::Failure;
use vmmd_spec::access::{MAX_KEY_BYTES, MAX_USERS, is_key, is_user};
use vmmd_store::AccessKeysRecord;

/// Longest keys of a VM in bytes: those of its spec, and as many that are to be removed.
const MAX_BYTES: usize = 2 * MAX_KEY_BYTES;

/// The keys of a spec.
pub fn of_spec(spec: &v1::VmSpec) -> Vec<AccessKeysRecord> {
    from_wire(spec.access_credentials.clone())
}

/// The keys that a source of a migration has noted.
pub fn from_wire(users: Vec<v1::AccessCredential>) -> Vec<AccessKeysRecord> {
    let with_keys = users
        .into_iter()
        .filter(|user| !user.ssh_authorized_keys.is_empty());
    let record = |user: v1::AccessCredential| AccessKeysRecord {
        user: user.name,
        keys: user.ssh_authorized_keys,
    };
    with_keys.map(record).collect()
}

/// Checks the keys that a source of a migration has noted.
pub fn check(users: Vec<v1::AccessCredential>) -> Result<Vec<AccessKeysRecord>, Failure> {
    let mut keys = users.iter().flat_map(|user| &user.ssh_authorized_keys);
    let is_right = users.iter().all(|user| is_user(&user.name)) && keys.all(|key| is_key(key));
    let noted = from_wire(users);
    match is_right && fit(&noted) {
        true => Ok(noted),
        false => Err(Failure::field("access_keys", "must be keys of users of a guest")),
    }
}

/// Whether a record can have these keys. A guest whose agent removes none cannot fill the store.
pub fn fit(noted: &[AccessKeysRecord]) -> bool {
    let keys = noted.iter().flat_map(|user| &user.keys);
    keys.map(String::len).sum::<usize>() <= MAX_BYTES && noted.len() <= 2 * MAX_USERS
}

/// The keys for the target of a migration.
pub fn to_wire(noted: &[AccessKeysRecord]) -> Vec<v1::AccessCredential> {
    let wire = |noted: &AccessKeysRecord| v1::AccessCredential {
        name: noted.user.clone(),
        ssh_authorized_keys: noted.keys.clone(),
        ..v1::AccessCredential::default()
    };
    noted.iter().map(wire).collect()
}

/// The keys of both lists, each once.
pub fn joined(mut noted: Vec<AccessKeysRecord>, more: Vec<AccessKeysRecord>) -> Vec<AccessKeysRecord> {
    for more in more {
        match noted.iter_mut().find(|known| known.user == more.user) {
            Some(known) => {
                let new: Vec<_> = more
                    .keys
                    .into_iter()
                    .filter(|key| !known.keys.contains(key))
                    .collect();
                known.keys.extend(new);
            }
            None => noted.push(more),
        }
    }
    noted
}
