//! Sidecar file `<uid>.json` of a disk's file: the name, and the other data of the store that the
//! disk's file does not contain. With it the file can become a disk again after the loss of the
//! store. Blocking.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use vmmd_api::v1::DiskFormat;
use vmmd_store::DiskRecord;

/// Longest that is read, in bytes: labels and annotations are bounded far below.
const MAX_LENGTH: u64 = 1 << 20;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Sidecar {
    /// Name of the disk.
    pub name: String,
    /// UUID of the disk that its file is an overlay of; empty when it is none.
    pub backing_uid: String,
    /// Name of that disk, for people.
    pub backing_name: String,
    /// Digest of the image that its file is an overlay of, in hexadecimal digits; empty when it is of none.
    pub image_digest: String,
    /// UUID of that image.
    pub image_uid: String,
    /// Length of the logical blocks that the first content was made for, in bytes; 0 when not known.
    pub logical_block_bytes: u32,
    /// As the API has them.
    pub labels: BTreeMap<String, String>,
    /// As the API has them.
    pub annotations: BTreeMap<String, String>,
    /// As the API has it.
    pub owner: String,
    /// All of its space is reserved.
    pub preallocated: bool,
    /// Milliseconds of Unix time.
    pub created_ms: u64,
}

impl Sidecar {
    /// Of a disk; `backing_name` is the name of the disk below it.
    pub fn of(record: &DiskRecord, backing_name: &str) -> Self {
        let backing = Uuid::from_slice(&record.backing);
        let image = Uuid::from_slice(&record.image);
        Self {
            name: record.name.clone(),
            backing_uid: backing.map(|uid| uid.to_string()).unwrap_or_default(),
            backing_name: backing_name.to_owned(),
            image_digest: record
                .image_digest
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect(),
            image_uid: image.map(|uid| uid.to_string()).unwrap_or_default(),
            logical_block_bytes: record.logical_block,
            labels: record.labels.clone(),
            annotations: record.annotations.clone(),
            owner: record.owner.clone(),
            preallocated: record.preallocation() == vmmd_api::v1::DiskPreallocation::Full,
            created_ms: record.created_ms,
        }
    }

    /// Writes the sidecar file of `image`. The old file stays until the new one is complete.
    pub fn write(&self, image: &Path) -> io::Result<()> {
        let (path, temporary) = (beside(image), image.with_extension("json.new"));
        let text = serde_json::to_vec_pretty(self)?;
        let mut file = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)?;
        let written = file.write_all(&text).and_then(|()| file.sync_all());
        if let Err(error) = written.and_then(|()| fs::rename(&temporary, path)) {
            let _ = fs::remove_file(&temporary);
            return Err(error);
        }
        Ok(())
    }

    /// Reads the sidecar file of `image`; `None` when it does not exist.
    pub fn read(image: &Path) -> io::Result<Option<Self>> {
        let file = match File::open(beside(image)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut text = Vec::new();
        file.take(MAX_LENGTH).read_to_end(&mut text)?;
        Ok(Some(serde_json::from_slice(&text)?))
    }

    /// Removes the sidecar file of `image`.
    pub fn remove(image: &Path) -> io::Result<()> {
        match fs::remove_file(beside(image)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// The bytes of a digest in hexadecimal digits; empty when these are none.
pub fn digest(digits: &str) -> Vec<u8> {
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    let bytes = pairs.iter().map(|pair| {
        let pair = std::str::from_utf8(pair).ok()?;
        u8::from_str_radix(pair, 16).ok()
    });
    let bytes: Option<Vec<u8>> = bytes.collect();
    bytes.filter(|_| rest.is_empty()).unwrap_or_default()
}

fn beside(image: &Path) -> PathBuf {
    image.with_extension("json")
}

/// UUID and format of the disk whose file has this name; `None` when it is that of no disk.
pub fn parse(image: &Path) -> Option<(Uuid, DiskFormat)> {
    let uid = image.file_stem()?.to_str()?;
    let format = match image.extension()?.to_str()? {
        "raw" => DiskFormat::Raw,
        "qcow2" => DiskFormat::Qcow2,
        _ => return None,
    };
    let parsed = Uuid::parse_str(uid).ok()?;
    // Uuid::parse_str takes other spellings too.
    (parsed.to_string() == uid).then_some((parsed, format))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_beside_a_file_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("a.raw");
        assert_eq!(Sidecar::read(&image).unwrap(), None);
        for name in ["first", "second"] {
            let sidecar = Sidecar {
                name: name.into(),
                labels: [("tier".into(), "db".into())].into(),
                created_ms: 7,
                ..Sidecar::default()
            };
            sidecar.write(&image).unwrap();
            assert_eq!(Sidecar::read(&image).unwrap(), Some(sidecar));
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        Sidecar::remove(&image).unwrap();
        Sidecar::remove(&image).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn names_of_files_say_which_disk_it_was() {
        let uid = Uuid::new_v4();
        let parse = |name: String| parse(Path::new(&name));
        assert_eq!(parse(format!("/a/{uid}.raw")), Some((uid, DiskFormat::Raw)));
        assert_eq!(parse(format!("/a/{uid}.qcow2")), Some((uid, DiskFormat::Qcow2)));
        for other in [
            format!("/a/{uid}"),
            format!("/a/{uid}.json"),
            format!("/a/{}.raw", uid.simple()),
            "/a/data.raw".to_owned(),
        ] {
            assert_eq!(parse(other.clone()), None, "{other}");
        }
    }
}
