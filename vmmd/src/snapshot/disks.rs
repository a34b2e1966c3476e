//! The disks in a snapshot: a copy of each image that the guest can write to, at the moment of the snapshot.
//!
//! A copy shares the blocks of the image where the file system can (reflink), and is made within milliseconds then. Elsewhere its content
//! is copied while the VM is paused, which the client must have allowed. The file is `<uid>.<number>.disk` in the folder of snapshots.

use std::{fs::File, io, os::unix::fs::FileTypeExt, path::PathBuf, sync::Arc};

use rustix::fs::ioctl_ficlone;
use uuid::Uuid;
use vmmd_api::v1;
use vmmd_host::{failure::Failure, text};
use vmmd_objects::operation::Control;
use vmmd_spec::{
    disk::{Cache, Disk, Format},
    name::Name,
    vm::VmSpec,
};
use vmmd_store::{DiskRecord, DiskSource, SnapshotDisk, SnapshotRecord, disk_source};

use super::{Folder, allocated, failed};
use crate::{
    disk,
    files::{self, Locks, OpenDisk},
    host::Host,
    registry::vms::command::DiskRollback,
};

/// The disks that are to be in a snapshot, open for reading.
#[derive(Debug)]
pub struct Images(Vec<Image>);

#[derive(Debug)]
struct Image {
    of: SnapshotDisk,
    file: File,
}

impl Images {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Room that they take, in bytes. Blocking.
    pub fn allocated(&self) -> Result<u64, Failure> {
        self.0.iter().try_fold(0_u64, |sum, image| {
            let looked = image.file.metadata();
            let looked =
                looked.map_err(|error| failed(&format!("look at disk \"{}\"", image.of.name), &error))?;
            Ok(sum.saturating_add(allocated(&looked)))
        })
    }

    /// Returns the disks for the record.
    pub fn describe(&self) -> Vec<SnapshotDisk> {
        self.0.iter().map(|image| image.of.clone()).collect()
    }
}

fn model(wire: &v1::VmSpec) -> Result<VmSpec, Failure> {
    VmSpec::try_from(wire).map_err(|problems| Failure::internal(problems.to_string()))
}

/// Opens the images of a VM's disks that its guest can write to. [`Locks::Take`] excludes writers
/// from then on. Blocking.
pub fn open(host: &Host, wire: &v1::VmSpec, locks: Locks) -> Result<Images, Failure> {
    let spec = model(wire)?;
    let mut images = Vec::new();
    for disk in spec.disks.iter().filter(|disk| !disk.read_only) {
        let opened = open_for_reading(host, disk, locks)?;
        let file = File::from(opened.fd);
        let label = format!("disk \"{}\"", disk.name);
        if locks == Locks::Take
            && let Some(user) = files::node_user_of(&file)
        {
            return Err(Failure::precondition(
                "DISK_IN_USE",
                format!("{label} is in use by {user}"),
            ));
        }
        let looked = file.metadata().map_err(|error| failed(&label, &error))?;
        if looked.file_type().is_block_device() {
            let message = format!("{label} is a block device: a snapshot can only have disks that are files");
            return Err(Failure::precondition("SNAPSHOT_DISKS", message));
        }
        let below = disk.named().and_then(|name| host.disks.get(name.as_str()).ok());
        let format = match opened.format {
            Format::Qcow2 => v1::DiskFormat::Qcow2,
            Format::Raw | Format::Iso => v1::DiskFormat::Raw,
        };
        images.push(Image {
            of: SnapshotDisk {
                name: disk.name.to_string(),
                format: format.into(),
                capacity_bytes: below.as_ref().map_or(looked.len(), |record| record.size_bytes),
                image: below
                    .as_ref()
                    .map(|record| record.image.clone())
                    .unwrap_or_default(),
                image_digest: below
                    .as_ref()
                    .map(|record| record.image_digest.clone())
                    .unwrap_or_default(),
                source: below.as_ref().and_then(DiskRecord::made_of),
                backing: below.map(|record| record.backing).unwrap_or_default(),
            },
            file,
        });
    }
    Ok(Images(images))
}

fn open_for_reading(host: &Host, disk: &Disk, locks: Locks) -> Result<OpenDisk, Failure> {
    let disk = Disk {
        read_only: true,
        cache: Cache::Writeback,
        ..disk.clone()
    };
    let field = format!("disks.{}", disk.name);
    files::open_disk(&field, &disk, &host.sources(), locks)
}

/// Makes the files of the copies, empty, and finds out whether all of them can share blocks with their images. Refused when they can't
/// and they may not be copied (`may_copy`). Blocking.
pub fn prepare(
    folder: &Folder,
    record: &SnapshotRecord,
    images: &Images,
    may_copy: bool,
) -> Result<(), Failure> {
    for (number, image) in images.0.iter().enumerate() {
        let copy = folder.create_disk(record, number);
        let copy = copy.map_err(|error| failed("make a disk's copy", &error))?;
        if ioctl_ficlone(&copy, &image.file).is_ok() || may_copy {
            continue;
        }
        let message = format!(
            "the file system can't share the blocks of disk \"{}\" with a snapshot (reflink), so that its content would have to be copied \
             while the VM is paused: allow that by `paused`",
            image.of.name
        );
        return Err(Failure::precondition("SNAPSHOT_DISKS", message));
    }
    Ok(())
}

/// Copies the images, which must have no writer meanwhile. Blocking.
pub fn copy(
    folder: &Folder,
    record: &SnapshotRecord,
    images: &Images,
    control: &Control,
) -> Result<(), Failure> {
    for (number, image) in images.0.iter().enumerate() {
        let copied = (|| {
            let copy = File::options().write(true).open(folder.disk(record, number))?;
            disk::copy(&image.file, &copy, image.file.metadata()?.len(), true, control)
        })();
        copied.map_err(|error| failed(&format!("copy disk \"{}\"", image.of.name), &error))?;
    }
    Ok(())
}

/// Makes the copies durable; returns their lengths. Blocking.
pub fn sync(folder: &Folder, record: &SnapshotRecord) -> io::Result<Vec<u64>> {
    let synced = (0..record.disks.len()).map(|number| {
        let copy = File::open(folder.disk(record, number))?;
        copy.sync_all()?;
        Ok(copy.metadata()?.len())
    });
    let lengths = synced.collect::<io::Result<_>>()?;
    folder.sync().map(|()| lengths)
}

/// Notes how large the disks are whose copies are so long: one may have grown since it was looked at.
pub fn note_sizes(record: &mut SnapshotRecord, lengths: &[u64]) {
    let raw = i32::from(v1::DiskFormat::Raw);
    for (disk, length) in record.disks.iter_mut().zip(lengths) {
        if disk.format == raw {
            disk.capacity_bytes = *length;
        }
    }
}

/// Disk copies that a start of the snapshot's own VM restores; `None` without disks.
pub fn rollback(
    host: &Host,
    folder: &Folder,
    record: &SnapshotRecord,
    vm: &str,
) -> Result<Option<DiskRollback>, Failure> {
    let spec = model(&record.vm_spec.clone().unwrap_or_default())?;
    let copies = record.disks.iter().enumerate().map(|(number, of)| {
        let disk = spec.disks.iter().find(|disk| disk.name.as_str() == of.name);
        let disk = disk.ok_or_else(|| Failure::internal("the snapshot has a disk that its VM has not"))?;
        check_base(host, of)?;
        check_user(host, disk, vm)?;
        Ok((of.name.clone(), folder.disk(record, number)))
    });
    let copies = copies.collect::<Result<Vec<_>, Failure>>()?;
    let snapshot = super::uid(record);
    Ok((!copies.is_empty()).then_some(DiskRollback { snapshot, copies }))
}

/// Refused when a disk that the VM had is another VM's by now, or always was by what an archive says.
fn check_user(host: &Host, disk: &Disk, vm: &str) -> Result<(), Failure> {
    let Some(name) = disk.named() else { return Ok(()) };
    match host.disks.uses(name.as_str()).iter().find(|user| user.vm != vm) {
        None => Ok(()),
        Some(other) => {
            let message = format!(
                "disk \"{name}\" of the snapshot is one of VM \"{}\": detach it there",
                other.vm
            );
            Err(Failure::precondition("DISK_IN_USE", message))
        }
    }
}

/// Refused when the disk below an overlay is not there any more.
fn check_base(host: &Host, of: &SnapshotDisk) -> Result<(), Failure> {
    if of.backing.is_empty() || host.disks.registry.find(&of.backing).is_some() {
        return Ok(());
    }
    let message = format!(
        "the disk below disk \"{}\" of the snapshot is not there any more",
        of.name
    );
    Err(Failure::precondition("DISK_NOT_FOUND", message))
}

/// Creates disks of the DiskService for another VM of a snapshot, named `<vm>-<disk>`, and sets
/// their names in `spec`. Returns the created disks, also on failure.
pub async fn make(
    host: &Arc<Host>,
    folder: &Folder,
    record: &SnapshotRecord,
    vm: &str,
    spec: &mut v1::VmSpec,
) -> (Vec<String>, Result<(), Failure>) {
    let mut made = Vec::new();
    for (number, of) in record.disks.iter().enumerate() {
        let name = format!("{vm}-{}", of.name);
        let mut disk = spec.disks.iter_mut().find(|disk| disk.name == of.name);
        let disk_record = DiskRecord {
            name: name.clone(),
            for_vm: vm.to_owned(),
            // The guest has used the disk with these blocks.
            logical_block: disk.as_ref().map_or(0, |disk| disk.logical_block_bytes),
            ..copied(of)
        };
        match make_one(host, folder.disk(record, number), of, disk_record).await {
            Ok(()) => made.push(name.clone()),
            Err(failure) => return (made, Err(failure)),
        }
        if let Some(disk) = &mut disk {
            disk.source = Some(v1::disk_spec::Source::Disk(name));
            // These are about a path.
            disk.beneath.clear();
            disk.any_content = false;
        }
    }
    (made, Ok(()))
}

async fn make_one(
    host: &Arc<Host>,
    copy: PathBuf,
    of: &SnapshotDisk,
    record: DiskRecord,
) -> Result<(), Failure> {
    let name = &record.name;
    if let Err(error) = Name::try_from(name.as_str()) {
        let problem = format_args!("gives its disk the name \"{name}\", which {error}");
        return Err(Failure::field("vm", problem));
    }
    check_base(host, of)?;
    disk::take_in(host, record, copy).await
}

/// The record of a new disk with the content of a snapshot's disk.
fn copied(of: &SnapshotDisk) -> DiskRecord {
    DiskRecord {
        uid: Uuid::new_v4().as_bytes().to_vec(),
        created_ms: text::now_ms(),
        format: of.format,
        size_bytes: of.capacity_bytes,
        backing: of.backing.clone(),
        image: of.image.clone(),
        image_digest: of.image_digest.clone(),
        source: of.source.clone().map(|image| DiskSource {
            source: Some(disk_source::Source::Image(image)),
            any_content: false,
        }),
        ..DiskRecord::default()
    }
}
