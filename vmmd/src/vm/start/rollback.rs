//! Restore of a VM from a snapshot: copies of the snapshot's disks replace the VM's images.
//!
//! ```text
//!  noted in the record ──▶ copied beside the images ──▶ the machine runs with the copies ──▶ committed in the record ──▶ renamed
//! ```
//!
//! The old images keep their names until the machine runs. A failed start removes the copies and
//! loses nothing. If the daemon is killed in between, the next daemon finishes: once the copies are
//! committed, or when the machine runs or may have run, they get the images' names. Otherwise they
//! are removed. Each image is replaced in one step.
//!
//! All operations are relative to the descriptor of the image's folder, so that a link cannot
//! redirect them to another image.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io, mem,
    os::{
        fd::OwnedFd,
        unix::{
            ffi::{OsStrExt, OsStringExt},
            fs::fchown,
        },
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, fchmod, fstat, fsync, openat, renameat, unlinkat},
    io::Errno,
};
use tokio_util::sync::CancellationToken;
use vmmd_host::{
    failure::{Failure, file_failed},
    fault,
    roots::{self, Within},
};
use vmmd_objects::operation::Control;
use vmmd_spec::vm::VmSpec;
use vmmd_store::store_failure;
use vmmd_store::{ReplacedImage, ReplacingRecord, VmRecord};

use super::{Plan, blocking, failures::cancelled, prepare::Checked};
use crate::{
    disk,
    files::{self, Locks, Use},
    host::Host,
    registry::vms::command::DiskRollback,
};

/// An image that is to be replaced.
struct Replacement {
    /// Index of the disk in the spec.
    index: usize,
    /// The copy in the snapshot.
    copy: PathBuf,
    own: bool,
    folder: OwnedFd,
    /// The image's name in the folder.
    name: OsString,
    /// The new one's.
    new: OsString,
}

fn within(host: &Host, own: bool) -> Within<'_> {
    match own {
        true => Within::Own,
        false => Within::Roots(&host.config.roots.disks),
    }
}

fn failed(what: &OsStr, error: &io::Error) -> Failure {
    file_failed(&format!("put back the image \"{}\"", what.display()), error)
}

/// Copies the disks of the snapshot that `plan` restores beside the VM's images, and has the machine take the copies.
pub(super) async fn prepare(
    host: &Arc<Host>,
    plan: &mut Plan,
    checked: Checked,
    cancel: &CancellationToken,
) -> Result<Checked, Failure> {
    let Some(rollback) = plan.restore.as_ref().and_then(|restore| restore.rollback.clone()) else {
        return Ok(checked);
    };
    let (of, spec) = (Arc::clone(host), plan.spec.clone());
    let (checked, found, replacing) = blocking(move || {
        let found = find(&of, &rollback, &spec, &checked)?;
        let replacing = describe(&found)?;
        Ok((checked, found, replacing))
    })
    .await?;
    plan.record.replacing = Some(replacing);
    let written = host.store.put_unless(cancel, &plan.record).await;
    if !written.map_err(store_failure)? {
        return Err(cancelled(&plan.record.name));
    }
    let control = Control::default();
    let _with_this = control.cancel().clone().drop_guard();
    let (of, spec) = (Arc::clone(host), plan.spec.clone());
    let copying = blocking(move || {
        let mut checked = checked;
        let copied = found
            .iter()
            .try_for_each(|it| copy(&of, &spec, it, &mut checked, &control));
        if copied.is_err() {
            // The task that waited for the copies may have ended.
            for Replacement { folder, new, .. } in &found {
                let _ = unlinkat(folder, new, AtFlags::empty());
            }
        }
        copied.map(|()| checked)
    });
    let copied = tokio::select! {
        copied = copying => copied,
        () = cancel.cancelled() => Err(cancelled(&plan.record.name)),
    };
    // Written with the record before the process is forked.
    if let Some(replacing) = &mut plan.record.replacing {
        replacing.copied = copied.is_ok();
    }
    copied
}

/// The images that are to be replaced. They are locked already.
fn find(
    host: &Host,
    rollback: &DiskRollback,
    spec: &VmSpec,
    checked: &Checked,
) -> Result<Vec<Replacement>, Failure> {
    let copies = rollback.copies.iter().map(|(disk, copy)| {
        let index = spec.disks.iter().position(|it| it.name.as_str() == disk);
        let found =
            index.and_then(|index| Some((index, spec.disks.get(index)?, checked.files.disks.get(index)?)));
        let (index, of, opened) =
            found.ok_or_else(|| Failure::internal("the snapshot has a disk that its VM has not"))?;
        let own = of.named().is_some();
        let folder = roots::open_folder_of(&opened.fd, within(host, own));
        let (folder, name) = folder.map_err(|refused| failed(OsStr::new(disk), &refused.into()))?;
        let mut new = OsString::from(".");
        new.push(&name);
        new.push(format!(".{}", rollback.snapshot));
        Ok(Replacement {
            index,
            copy: copy.clone(),
            own,
            folder,
            name,
            new,
        })
    });
    copies.collect()
}

fn describe(found: &[Replacement]) -> Result<ReplacingRecord, Failure> {
    let images = found.iter().map(|it| {
        let folder = roots::path_of(&it.folder).map_err(|errno| failed(&it.name, &errno.into()))?;
        Ok(ReplacedImage {
            folder: folder.into_os_string().into_vec(),
            name: it.name.as_bytes().to_vec(),
            new: it.new.as_bytes().to_vec(),
            own: it.own,
        })
    });
    Ok(ReplacingRecord {
        images: images.collect::<Result<_, Failure>>()?,
        committed: false,
        copied: false,
    })
}

/// Makes the copy of one disk, durable, and has the machine take it.
fn copy(
    host: &Host,
    spec: &VmSpec,
    of: &Replacement,
    checked: &mut Checked,
    control: &Control,
) -> Result<(), Failure> {
    let (Some(disk), Some(opened)) = (spec.disks.get(of.index), checked.files.disks.get_mut(of.index)) else {
        return Err(Failure::internal("the snapshot has a disk that its VM has not"));
    };
    let failed = |error: io::Error| failed(&of.name, &error);
    let made = copy_beside(of, &opened.fd, control).map_err(failed)?;
    let folder = roots::path_of(&of.folder).map_err(|errno| failed(errno.into()))?;
    let label = format!("disk \"{}\": the copy of the snapshot", disk.name);
    let real = roots::real(within(host, of.own));
    let within = real.as_deref().map_or(Within::Own, Within::NoLinks);
    let image = files::open_image_file(&label, &folder.join(&of.new), within, disk.cache, Use::Write)?;
    let (is, was) = (fstat(&image.fd), fstat(&made));
    let same = is.and_then(|is| Ok((is, was?)));
    let (is, was) = same.map_err(|errno| failed(errno.into()))?;
    if (is.st_dev, is.st_ino) != (was.st_dev, was.st_ino)
        || !files::lock(&image, Locks::Take, false, &host.ledger).map_err(failed)?
    {
        return Err(failed(Errno::STALE.into()));
    }
    checked.replaced.push(mem::replace(&mut opened.fd, image.fd));
    if let Some(id) = opened.ids.first_mut() {
        *id = image.id;
    }
    let known = files::any_of_disks(spec);
    let field = format!("spec.disks[{}]", of.index);
    checked.known.extend(files::learn(&known, &field, disk, opened)?);
    Ok(())
}

fn copy_beside(of: &Replacement, image: &OwnedFd, control: &Control) -> io::Result<File> {
    let Replacement { folder, new, .. } = of;
    // Removes the copy of an earlier attempt whose daemon was killed.
    match unlinkat(folder, new, AtFlags::empty()) {
        Err(errno) if errno != Errno::NOENT => return Err(errno.into()),
        _ => {}
    }
    let (from, like) = (File::open(&of.copy)?, fstat(image)?);
    if FileType::from_raw_mode(like.st_mode) != FileType::RegularFile {
        return Err(io::Error::other("it is not a regular file any more"));
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let to = File::from(openat(folder, new, flags, Mode::RUSR | Mode::WUSR)?);
    disk::copy(&from, &to, from.metadata()?.len(), true, control)?;
    fchown(&to, Some(like.st_uid), Some(like.st_gid))?;
    fchmod(&to, Mode::from_raw_mode(like.st_mode))?;
    to.sync_all()?;
    Ok(to)
}

/// The machine runs with the copies: they get the names of the images. Returns what of that could not be done, for the next start.
pub(super) async fn commit(
    host: &Arc<Host>,
    record: &mut VmRecord,
    cancel: &CancellationToken,
) -> Result<Option<ReplacingRecord>, Failure> {
    let Some(mut replacing) = record.replacing.clone() else {
        return Ok(None);
    };
    fault::hold(&host.config.run_dir, "put-back").await;
    replacing.committed = true;
    record.replacing = Some(replacing.clone());
    let written = host.store.put_unless(cancel, record).await;
    if !written.map_err(store_failure)? {
        return Err(cancelled(&record.name));
    }
    fault::hold(&host.config.run_dir, "put-back-committed").await;
    match resolve(host, replacing.clone(), true).await {
        Ok(()) => Ok(None),
        Err(failure) => {
            tracing::error!(vm = record.name, %failure, "a restored VM runs with images that do not have their names yet");
            Ok(Some(replacing))
        }
    }
}

/// Ends the restore of an earlier start; `ran`: whether the machine has run with the copies. When that is unknown, whole copies are put in place:
/// they may have writes of the guest.
pub(in crate::vm) async fn take_up(
    host: &Arc<Host>,
    record: &mut VmRecord,
    ran: Option<bool>,
) -> Result<(), Failure> {
    if let Some(replacing) = record.replacing.clone() {
        let put_in_place = replacing.committed || ran.unwrap_or(replacing.copied);
        resolve(host, replacing, put_in_place).await?;
        record.replacing = None;
    }
    Ok(())
}

/// Removes the copies of a start that has failed.
pub(super) async fn remove(host: &Arc<Host>, vm: &str, replacing: ReplacingRecord) {
    if let Err(failure) = resolve(host, replacing, false).await {
        tracing::error!(vm, %failure, "remove the images of a VM that could not be restored");
    }
}

/// Renames the copies to the images' names, or removes them. Idempotent.
async fn resolve(host: &Arc<Host>, replacing: ReplacingRecord, put_in_place: bool) -> Result<(), Failure> {
    let host = Arc::clone(host);
    blocking(move || {
        for image in &replacing.images {
            let name = OsStr::from_bytes(&image.name);
            resolve_one(&host, image, put_in_place).map_err(|error| failed(name, &error))?;
        }
        Ok(())
    })
    .await
}

fn resolve_one(host: &Host, image: &ReplacedImage, put_in_place: bool) -> io::Result<()> {
    let path = Path::new(OsStr::from_bytes(&image.folder));
    let (name, new) = (OsStr::from_bytes(&image.name), OsStr::from_bytes(&image.new));
    let folder = roots::open_folder(path, within(host, image.own))?;
    let done = match put_in_place {
        true => renameat(&folder, new, &folder, name),
        false => unlinkat(&folder, new, AtFlags::empty()),
    };
    match done {
        Ok(()) => Ok(fsync(&folder)?),
        Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
