//! Encryption of the VMs' secrets in the store (AES-256-GCM). The key is not in the store, so that
//! a copy of the store alone does not reveal them.
//!
//! The sealed values are the contents that the API shows as digests (user data, vendor data,
//! network configuration, password hashes, credentials), and the passwords for registries of images. A record with
//! unopenable secrets counts as unreadable, because a guest without them would be set up
//! differently.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use prost::{DecodeError, Message};
use ring::{
    aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    hmac,
    rand::{SecureRandom as _, SystemRandom},
};

use super::{
    Error,
    stored::{AccessCredential, CloudInit, Credential, Snapshot, Vm, VmSpec},
};

/// Length of the key in bytes.
const LENGTH: usize = 32;
/// The key that the daemon makes when it is given none, in its state folder.
const OWN: &str = "secrets.key";
/// Name of the credential of the unit that is the key (systemd.exec(5), "LoadCredential=").
const CREDENTIAL: &str = "vmmd.secrets-key";
/// Context string for the derivation of the fingerprint key.
const FINGERPRINTS: &[u8] = b"vmmd: fingerprints of requests";
/// First byte of a sealed value: the format version.
const VERSION: u8 = 1;

/// Why there is no key.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// Its file could not be read or created.
    #[error("{0}: {1}")]
    File(PathBuf, io::Error),
    /// The file is something else.
    #[error(
        "{0} has {1} bytes, and a key has {LENGTH}: make one with `head -c {LENGTH} /dev/urandom`, or bring back the one that was there"
    )]
    Length(PathBuf, u64),
}

/// Key of the secrets; clones share it.
#[derive(Clone)]
pub struct Key(Arc<Keys>);

struct Keys {
    sealing: LessSafeKey,
    fingerprints: hmac::Key,
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    /// Returns the configured key, else the unit's credential, else the key in the state folder,
    /// which is created if it is missing.
    ///
    /// # Errors
    ///
    /// The key could not be read or created, or has another length.
    pub fn find(
        configured: Option<&Path>,
        credentials: Option<&Path>,
        state_dir: &Path,
    ) -> Result<Self, KeyError> {
        let credential = credentials.map(|folder| folder.join(CREDENTIAL));
        let given = configured
            .map(Path::to_owned)
            .or_else(|| credential.filter(|path| path.exists()));
        let path = match given {
            Some(path) => path,
            None => {
                let own = state_dir.join(OWN);
                make(&own).map_err(|error| KeyError::File(own.clone(), error))?;
                own
            }
        };
        let bytes = fs::read(&path).map_err(|error| KeyError::File(path.clone(), error))?;
        let key: [u8; LENGTH] = bytes
            .as_slice()
            .try_into()
            .map_err(|_| KeyError::Length(path, bytes.len() as u64))?;
        Ok(Self::of(&key))
    }

    /// A key of these bytes.
    pub fn of(bytes: &[u8; LENGTH]) -> Self {
        let key = UnboundKey::new(&AES_256_GCM, bytes);
        #[allow(clippy::expect_used)] // It fails for another length only.
        let sealing = LessSafeKey::new(key.expect("the length of a key"));
        let derived = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, bytes), FINGERPRINTS);
        let fingerprints = hmac::Key::new(hmac::HMAC_SHA256, derived.as_ref());
        Self(Arc::new(Keys {
            sealing,
            fingerprints,
        }))
    }

    /// Fingerprint of a request, from the hash of its content. Keyed, so that a reader without the
    /// key cannot test guesses of secrets in the request.
    pub fn fingerprint(&self, hash: &[u8]) -> Vec<u8> {
        hmac::sign(&self.0.fingerprints, hash).as_ref().to_vec()
    }

    /// The record as it is written.
    pub(super) fn seal<R: Secretive>(&self, mut record: R) -> Result<Vec<u8>, Error> {
        let uid = record.uid().to_vec();
        for holder in record.holders() {
            let secrets = holder.take();
            if !secrets.is_empty() {
                *holder.sealed() = self.close(&uid, secrets)?;
            }
        }
        Ok(record.encode_to_vec())
    }

    /// Puts the secrets of a record back where they belong.
    pub(super) fn open<R: Secretive>(&self, record: &mut R) -> Result<(), Error> {
        let uid = record.uid().to_vec();
        for holder in record.holders() {
            let sealed = std::mem::take(holder.sealed());
            if !sealed.is_empty() {
                let opened = self
                    .plain(&uid, &sealed)
                    .and_then(|plain| holder.give(&plain).ok());
                opened.ok_or_else(|| {
                    let reason = "they were sealed with another key, or are damaged: bring back the key (`secrets_key`) and restart vmmd";
                    Error::Failed("open the VM's secrets", reason.to_owned())
                })?;
            }
        }
        Ok(())
    }

    /// Seals what belongs to the record with this UUID.
    pub(super) fn close(&self, uid: &[u8], mut text: Vec<u8>) -> Result<Vec<u8>, Error> {
        let failed = |_| Error::Failed("seal a secret", "no random numbers".to_owned());
        let mut nonce = [0; NONCE_LEN];
        SystemRandom::new().fill(&mut nonce).map_err(failed)?;
        let used = Nonce::assume_unique_for_key(nonce);
        self.0
            .sealing
            .seal_in_place_append_tag(used, Aad::from(uid), &mut text)
            .map_err(failed)?;
        Ok([&[VERSION], nonce.as_slice(), &text].concat())
    }

    /// What was sealed; nothing when that was done with another key or for another record.
    pub(super) fn plain(&self, uid: &[u8], sealed: &[u8]) -> Option<Vec<u8>> {
        let (version, rest) = sealed.split_first()?;
        let (nonce, text) = rest.split_first_chunk::<NONCE_LEN>()?;
        if *version != VERSION {
            return None;
        }
        let mut text = text.to_vec();
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let plain = self
            .0
            .sealing
            .open_in_place(nonce, Aad::from(uid), &mut text)
            .ok()?;
        Some(plain.to_vec())
    }
}

/// Creates a key atomically unless it exists.
fn make(path: &Path) -> io::Result<()> {
    if path.exists() {
        return Ok(());
    }
    let mut key = [0; LENGTH];
    SystemRandom::new()
        .fill(&mut key)
        .map_err(|_| io::Error::other("no random numbers"))?;
    let new = path.with_extension("new");
    let mut file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)?;
    file.write_all(&key)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    File::open(path.parent().unwrap_or(path))?.sync_all()
}

/// A record with secrets.
pub(super) trait Secretive: Message + Default {
    /// Identity of the record, as associated data: a secret of one record is invalid in another.
    fn uid(&self) -> &[u8];
    /// Where its secrets are.
    fn holders(&mut self) -> Vec<&mut dyn Holder>;
}

/// A part of a record with secrets.
pub(super) trait Holder {
    /// Removes the secrets and returns them encoded; empty when there are none.
    fn take(&mut self) -> Vec<u8>;
    /// Puts encoded secrets back.
    fn give(&mut self, secrets: &[u8]) -> Result<(), DecodeError>;
    /// The sealed secrets, in a written record.
    fn sealed(&mut self) -> &mut Vec<u8>;
}

fn of_spec(spec: &mut VmSpec) -> impl Iterator<Item = &mut dyn Holder> {
    let init = spec.cloud_init.iter_mut().map(|init| init as &mut dyn Holder);
    let credentials = spec.credentials.iter_mut();
    let users = spec.access_credentials.iter_mut();
    init.chain(credentials.map(|credential| credential as &mut dyn Holder))
        .chain(users.map(|user| user as &mut dyn Holder))
}

impl Secretive for Vm {
    fn uid(&self) -> &[u8] {
        &self.uid
    }

    fn holders(&mut self) -> Vec<&mut dyn Holder> {
        let running = self.instance.as_mut().and_then(|instance| instance.spec.as_mut());
        let specs = [self.spec.as_mut(), running].into_iter().flatten();
        specs.flat_map(of_spec).collect()
    }
}

impl Secretive for Snapshot {
    fn uid(&self) -> &[u8] {
        &self.uid
    }

    fn holders(&mut self) -> Vec<&mut dyn Holder> {
        self.vm_spec.as_mut().into_iter().flat_map(of_spec).collect()
    }
}

/// Secrets of cloud-init.
#[derive(Clone, PartialEq, prost::Message)]
struct Secrets {
    #[prost(string, tag = "1")]
    user_data: String,
    #[prost(string, tag = "2")]
    user_data_base64: String,
    #[prost(string, tag = "3")]
    password_hash: String,
    #[prost(string, tag = "4")]
    network_config: String,
    #[prost(string, tag = "5")]
    vendor_data: String,
}

impl Holder for CloudInit {
    fn take(&mut self) -> Vec<u8> {
        let secrets = Secrets {
            user_data: std::mem::take(&mut self.user_data),
            user_data_base64: std::mem::take(&mut self.user_data_base64),
            password_hash: std::mem::take(&mut self.password_hash),
            network_config: std::mem::take(&mut self.network_config),
            vendor_data: std::mem::take(&mut self.vendor_data),
        };
        secrets.encode_to_vec()
    }

    fn give(&mut self, secrets: &[u8]) -> Result<(), DecodeError> {
        let secrets = Secrets::decode(secrets)?;
        self.user_data = secrets.user_data;
        self.user_data_base64 = secrets.user_data_base64;
        self.password_hash = secrets.password_hash;
        self.network_config = secrets.network_config;
        self.vendor_data = secrets.vendor_data;
        Ok(())
    }

    fn sealed(&mut self) -> &mut Vec<u8> {
        &mut self.sealed
    }
}

/// Secrets of a credential.
#[derive(Clone, PartialEq, prost::Message)]
struct Content {
    #[prost(string, tag = "1")]
    value: String,
    #[prost(string, tag = "2")]
    value_base64: String,
}

impl Holder for Credential {
    fn take(&mut self) -> Vec<u8> {
        let content = Content {
            value: std::mem::take(&mut self.value),
            value_base64: std::mem::take(&mut self.value_base64),
        };
        content.encode_to_vec()
    }

    fn give(&mut self, secrets: &[u8]) -> Result<(), DecodeError> {
        let content = Content::decode(secrets)?;
        (self.value, self.value_base64) = (content.value, content.value_base64);
        Ok(())
    }

    fn sealed(&mut self) -> &mut Vec<u8> {
        &mut self.sealed
    }
}

impl Holder for AccessCredential {
    fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.password_hash).into_bytes()
    }

    fn give(&mut self, secrets: &[u8]) -> Result<(), DecodeError> {
        self.password_hash = String::from_utf8_lossy(secrets).into_owned();
        Ok(())
    }

    fn sealed(&mut self) -> &mut Vec<u8> {
        &mut self.sealed
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use vmmd_api::v1;

    use super::*;
    use crate::{InstanceRecord, Store, VMS, VmRecord, write};

    const USER_DATA: &str = "#cloud-config\npassword: nobody-knows-this\n";

    fn record() -> VmRecord {
        let spec = v1::VmSpec {
            cloud_init: Some(v1::CloudInit {
                user_data: USER_DATA.into(),
                password_hash: "$6$salt$nobody-knows-this-either".into(),
                network_config: "wifis: {a: {password: nobody-knows-this-one}}".into(),
                vendor_data: "#!/bin/register nobody-knows-this-key".into(),
                hostname: "web".into(),
                ..Default::default()
            }),
            credentials: vec![v1::Credential {
                name: "a".into(),
                value: "nobody-knows-this-value".into(),
                ..Default::default()
            }],
            access_credentials: vec![v1::AccessCredential {
                name: "root".into(),
                password_hash: "$6$salt$nobody-knows-this-hash".into(),
                ..Default::default()
            }],
            ..Default::default()
        };
        VmRecord {
            uid: vec![1; 16],
            name: "web".into(),
            spec: Some(spec.clone()),
            instance: Some(InstanceRecord {
                spec: Some(spec),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    fn has_secret(bytes: &[u8]) -> bool {
        bytes.windows(12).any(|window| window == b"nobody-knows")
    }

    #[test]
    fn written_record_has_no_secret_and_opens_with_its_key() {
        let key = Key::of(&[7; LENGTH]);
        let sealed = key.seal(Vm::from(record())).unwrap();
        assert!(has_secret(&Vm::from(record()).encode_to_vec()) && !has_secret(&sealed));
        let mut back = Vm::decode(sealed.as_slice()).unwrap();
        key.open(&mut back).unwrap();
        assert_eq!(VmRecord::from(back), record());
        // Twice the same is not written twice alike.
        assert_ne!(sealed, key.seal(Vm::from(record())).unwrap());

        let sealed = Vm::decode(sealed.as_slice()).unwrap();
        let error = Key::of(&[8; LENGTH]).open(&mut sealed.clone()).unwrap_err();
        assert!(error.to_string().contains("secrets_key"), "{error}");
        let mut other = sealed.clone();
        other.uid = vec![2; 16];
        assert!(key.open(&mut other).is_err());
        let mut damaged = sealed;
        damaged.holders().pop().unwrap().sealed().truncate(20);
        assert!(key.open(&mut damaged).is_err());
    }

    #[test]
    fn a_key_is_made_once_and_what_is_no_key_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (path, none) = (folder.path(), None);
        let sealed = Key::find(none, none, path)
            .unwrap()
            .seal(Vm::from(record()))
            .unwrap();
        let mut back = Vm::decode(sealed.as_slice()).unwrap();
        Key::find(none, none, path).unwrap().open(&mut back).unwrap();
        let own = path.join(OWN);
        assert_eq!(fs::metadata(&own).unwrap().permissions().mode() & 0o777, 0o600);

        // The credential has precedence over the own key, and the configured key over both.
        let (credentials, given) = (path.join("credentials"), path.join("given"));
        fs::create_dir(&credentials).unwrap();
        let mut sealed = Vm::decode(sealed.as_slice()).unwrap();
        Key::find(none, Some(&credentials), path)
            .unwrap()
            .open(&mut sealed.clone())
            .unwrap();
        fs::write(credentials.join(CREDENTIAL), [1; LENGTH]).unwrap();
        let other = Key::find(none, Some(&credentials), path).unwrap();
        assert!(other.open(&mut sealed.clone()).is_err());
        fs::copy(&own, &given).unwrap();
        let key = Key::find(Some(&given), Some(&credentials), path).unwrap();
        key.open(&mut sealed).unwrap();

        fs::write(&given, "short").unwrap();
        let error = Key::find(Some(&given), none, path).unwrap_err().to_string();
        assert!(
            error.contains("5 bytes") && error.contains("/dev/urandom"),
            "{error}"
        );
        assert!(Key::find(Some(&path.join("missing")), none, path).is_err());
    }

    #[test]
    fn store_has_no_secret_and_lost_key_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let key = Key::of(&[7; LENGTH]);
        let database = super::super::open(&Store::file(folder.path()), &key).unwrap();
        write(&database, |transaction| {
            let mut vms = transaction.open_table(VMS).unwrap();
            let sealed = key.seal(Vm::from(record()))?;
            vms.insert([1; 16].as_slice(), sealed.as_slice()).unwrap();
            Ok(())
        })
        .unwrap();
        assert!(!has_secret(&fs::read(Store::file(folder.path())).unwrap()));
        let records = super::super::load(&database, &key).unwrap();
        assert_eq!(records.vms, [record()]);
        let records = super::super::load(&database, &Key::of(&[8; LENGTH])).unwrap();
        assert_eq!(records.vms, []);
        assert_eq!(records.unreadable[0].name, "web");
        assert!(records.unreadable[0].error.contains("another key"));
    }
}
