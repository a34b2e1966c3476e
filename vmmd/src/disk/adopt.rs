//! Makes a disk of a file that an earlier installation of the daemon left in its folder.

use std::{
    fs::{self, File, Permissions},
    io,
    os::unix::fs::{FileExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use uuid::Uuid;
use vmmd_api::v1;
use vmmd_host::{failure::Failure, roots::Within, text};
use vmmd_objects::{
    context::Context,
    operation::{Begun, Type},
};
use vmmd_spec::{
    disk::{Cache, Format, MAX_SIZE, NewDisk, SECTOR},
    name::Name,
};
use vmmd_store::DiskRecord;

use super::{
    create::{self, record},
    operation, tell,
};
use crate::{
    files::{self, Locks, Use},
    host::Host,
    paths::{
        disk::Folder,
        sidecar::{self, Sidecar, parse},
    },
};

/// The field of the request.
const FIELD: &str = "disk.spec.adopt";

/// A file that may become a disk.
struct Found {
    uid: Uuid,
    format: v1::DiskFormat,
    size: u64,
    /// It is an overlay of something.
    is_overlay: bool,
    beside: Sidecar,
}

/// Creates a disk from the file at `path`. On any failure the file stays unchanged.
pub async fn adopt(
    host: &Arc<Host>,
    new: &NewDisk,
    path: &Path,
    context: &Context,
) -> Result<Begun, Failure> {
    let (of, of_path, wanted) = (Arc::clone(host), path.to_owned(), new.format);
    let paths = [path.to_owned(), host.disk_folder().root()];
    let examining = host
        .pools
        .files
        .run(&paths, move || examine(&of, &of_path, wanted));
    let record = complete(new, examining.await??, record(host, new, context))?;
    if !record.image_digest.is_empty() && !host.disk_folder().image(&record).exists() {
        let message =
            "adopt: the image that the file is an overlay of is missing on this node: import it again";
        return Err(Failure::precondition("BACKING_DISK_MISSING", message));
    }
    let mut record = host.disks.adopt(record)?;
    let handle = match operation::begin(host, Type::DiskCreate, &record, context) {
        Ok(handle) => handle,
        Err(failure) => {
            create::forget(host, &record);
            return Err(failure);
        }
    };
    // This call writes the disk to the store. If the daemon ends before, the file is unchanged.
    if let Err(failure) = create::settle(host, &mut record).await {
        create::forget(host, &record);
        handle.fail(&failure);
        return Err(failure);
    }
    let pending = Some(handle.pending());
    tell(
        host,
        &record,
        "DiskAdopted",
        "a file that was there became the disk",
    );
    handle.complete("the disk can be used");
    Ok(Begun {
        uid: record.uid,
        pending,
    })
}

/// Builds the disk's record. The values of the request take precedence over the sidecar file.
fn complete(new: &NewDisk, found: Found, record: DiskRecord) -> Result<DiskRecord, Failure> {
    let Found {
        uid,
        format,
        size,
        is_overlay,
        beside,
    } = found;
    let name = match &new.name {
        Some(name) => name.clone(),
        None => Name::try_from(beside.name.as_str()).map_err(|_| {
            let problem = "must be given: nothing beside the file says which name it had";
            Failure::field("disk.metadata.name", problem)
        })?,
    };
    let backing = Uuid::parse_str(&beside.backing_uid).ok();
    let image_digest = sidecar::digest(&beside.image_digest);
    if is_overlay && backing.is_none() && image_digest.is_empty() {
        let message = "adopt: the file is an overlay, and nothing beside it says of what";
        return Err(Failure::precondition("BACKING_DISK_MISSING", message));
    }
    let preallocation = match beside.preallocated {
        true => v1::DiskPreallocation::Full,
        false => record.preallocation(),
    };
    let or_beside = |given: std::collections::BTreeMap<_, _>, beside| match given.is_empty() {
        true => beside,
        false => given,
    };
    let image = Uuid::parse_str(&beside.image_uid).ok();
    Ok(DiskRecord {
        image: image.map(|uid| uid.as_bytes().to_vec()).unwrap_or_default(),
        image_digest,
        logical_block: match beside.logical_block_bytes {
            block @ (512 | 4096) => block,
            _ => 0,
        },
        uid: uid.as_bytes().to_vec(),
        name: name.to_string(),
        format: format.into(),
        size_bytes: size,
        preallocation: preallocation.into(),
        backing: backing.map(|uid| uid.as_bytes().to_vec()).unwrap_or_default(),
        labels: or_beside(record.labels.clone(), beside.labels),
        annotations: or_beside(record.annotations.clone(), beside.annotations),
        owner: if record.owner.is_empty() {
            beside.owner
        } else {
            record.owner.clone()
        },
        created_ms: if beside.created_ms == 0 {
            record.created_ms
        } else {
            beside.created_ms
        },
        ..record
    })
}

/// Blocking.
fn examine(host: &Host, path: &Path, wanted: Option<Format>) -> Result<Found, Failure> {
    let refuse = |problem: &str| Failure::field(FIELD, problem);
    let folder = host.disk_folder();
    if path.parent() != Some(folder.root().as_path()) {
        return Err(refuse(
            "must be a file in the folder of the daemon's disks (`disks` in its state_dir): make a disk of a copy of any other file, \
             with `rawFile`",
        ));
    }
    let Some((uid, format)) = parse(path) else {
        return Err(refuse("is not the name of a disk's file: UUID.raw or UUID.qcow2"));
    };
    let is_qcow2 = format == v1::DiskFormat::Qcow2;
    if wanted.is_some_and(|wanted| (wanted == Format::Qcow2) != is_qcow2) {
        let problem = "is another than the file's name says: leave it out, or say the same";
        return Err(Failure::field("disk.spec.format", problem));
    }
    let label = format!("adopt: \"{}\"", path.display());
    let unusable = |problem: &str| Failure::precondition("DISK_UNUSABLE", format!("{label} {problem}"));
    let io_failed = |error: io::Error| unusable(&text::words(&error));
    if fs::symlink_metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        return Err(unusable("is not a regular file"));
    }
    let image = files::open_image_file(&label, path, Within::Own, Cache::Writeback, Use::Write)?;
    if !files::lock(&image, Locks::Take, false, &host.ledger).map_err(io_failed)? {
        let user = files::user(&image, &host.ledger);
        return Err(Failure::precondition(
            "DISK_IN_USE",
            format!("{label} is in use by {user}"),
        ));
    }
    let mut size = image.size;
    let file = File::from(image.fd);
    let mut is_overlay = false;
    if is_qcow2 {
        // qcow2 specification, "Header": magic, then big-endian version, offset of the backing file's name, …, size.
        let mut header = [0; 32];
        file.read_exact_at(&mut header, 0).map_err(io_failed)?;
        if header.get(..4) != Some(b"QFI\xfb".as_slice()) {
            return Err(unusable("is no qcow2 image"));
        }
        let number = |at: usize| {
            let bytes = header.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
            bytes.map_or(0, u64::from_be_bytes)
        };
        (is_overlay, size) = (number(8) != 0, number(24));
    }
    if size == 0 || !size.is_multiple_of(SECTOR) || size > MAX_SIZE {
        let message =
            format!("{label} has {size} bytes, which is not a multiple of 512 above 0 and up to 64 TiB");
        return Err(Failure::precondition("DISK_SIZE_INVALID", message));
    }
    file.set_permissions(Permissions::from_mode(0o600))
        .map_err(io_failed)?;
    let beside = Sidecar::read(path).unwrap_or_else(|error| {
        tracing::warn!(%uid, %error, "the description beside a disk's file cannot be read");
        None
    });
    Ok(Found {
        uid,
        format,
        size,
        is_overlay,
        beside: beside.unwrap_or_default(),
    })
}

/// Files in the folder without a disk, with their last names if known. Blocking.
pub fn left(folder: &Folder, known: &[Uuid]) -> io::Result<Vec<(PathBuf, String)>> {
    let entries = match fs::read_dir(folder.root()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut left = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if parse(&path).is_some_and(|(uid, _)| !known.contains(&uid)) {
            let name = Sidecar::read(&path).ok().flatten().map(|beside| beside.name);
            left.push((path, name.unwrap_or_default()));
        }
    }
    left.sort();
    Ok(left)
}
