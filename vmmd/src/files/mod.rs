//! Opens the files of a VM's spec, with a precise refusal for each unusable file. Blocking. The
//! functions change no state of the node. The lock of a disk ends when its descriptor is closed.

mod file;
pub mod firmware;
mod in_use;
mod known;
mod look;
mod pod;
pub mod share;
pub mod signature;
pub mod state_dir;

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::fs::OFlags;
use vmm_protocol::wire::MAX_FDS;
use vmmd_spec::{
    disk::{Cache, Disk, Format, SECTOR, Source},
    vm::{Boot, VmSpec},
};

pub use self::{
    file::{OpenFile, PATH_NOT_ALLOWED, Use, node_user_of, open_image_file, open_kvm},
    known::{Known, any_of, any_of_disks, key},
    look::{had, look, look_beside, outside},
};
use self::{
    file::{identity, identity_at, open_image},
    firmware::FirmwareFiles,
};
use vmmd_host::{
    failure::{Failure, Kind},
    ledger::{FileId, Ledger},
    roots::{self, Roots, Within},
    sys::{self, LockKind},
    text,
};

use crate::{
    paths::disk::Folder,
    registry::{disks::Disks, pods::Pods},
};

/// Descriptors with a machine beside those of disks, NICs and the initrd: /dev/kvm, kernel, random source, two logs.
const OTHER_FDS: usize = 5;

/// Wait for a lock without a visible holder. The kernel ends a killed process's io_uring, which
/// holds its files, a moment after the process has ended.
const ENDING: Duration = Duration::from_secs(2);

/// Of statfs(2).
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

/// All files of a VM, open.
#[derive(Debug)]
pub struct Files {
    /// The kernel image; none while it is only on a disk.
    pub kernel: Option<OwnedFd>,
    /// The initial RAM disk.
    pub initrd: Option<OwnedFd>,
    /// The kernel's command line.
    pub cmdline: String,
    /// The firmware, of a VM that boots through it. [`open`] leaves it to the start of the VM.
    pub firmware: Option<FirmwareFiles>,
    /// In the order of the spec, each locked.
    pub disks: Vec<OpenDisk>,
}

/// A disk of a VM, open and locked.
#[derive(Debug)]
pub struct OpenDisk {
    /// Its image or block device.
    pub fd: OwnedFd,
    /// How it is to be read.
    pub format: Format,
    /// Backing files, nearest first, open for reading.
    pub backing: Vec<(OwnedFd, Format)>,
    /// Discard granularity of its queue, if it is a block device.
    pub discard_granularity: Option<u32>,
    /// Identities of all these files.
    pub ids: Vec<FileId>,
}

/// Locations of the files that a spec names, and their users.
#[derive(Debug)]
pub struct Sources<'a> {
    /// Users of files.
    pub ledger: &'a Ledger,
    /// Disks of the DiskService.
    pub disks: &'a Disks,
    /// Pods, for their volumes.
    pub pods: &'a Pods,
    /// Where their files are.
    pub folder: Folder,
    /// Where all other files may be.
    pub roots: &'a Roots,
}

/// Handling of the locks of disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Locks {
    /// Take them; they stay with the descriptors.
    Take,
    /// Neither take nor check locks.
    None,
    /// For a disk by path, or in a directory of a pod, that is open for writing: take no lock. Another node's VM must hold it,
    /// otherwise the open is refused. Take all other locks.
    Elsewhere,
}

/// Opens and checks everything for a start; a path with another file than the `known` one is refused. Returns also which files those
/// are that the spec names by path.
/// `seed` makes the seed of cloud-init.
pub fn open(
    spec: &VmSpec,
    sources: &Sources<'_>,
    known: &Known,
    locks: Locks,
    seed: impl Fn() -> io::Result<OwnedFd>,
) -> Result<(Files, Known), Failure> {
    let (kernel, initrd) = spec.boot.files();
    let kernels = Within::Roots(&sources.roots.kernels);
    let mut found = Known::new();
    let mut open_boot = |field: &str, what, path: &Path| {
        let fd = open_image(field, what, path, kernels)?;
        found.extend([known::check(known, field, path, &fd)?]);
        Ok::<_, Failure>(fd)
    };
    let kernel = kernel
        .map(|kernel| open_boot("spec.boot.linux.kernel", "KERNEL", kernel))
        .transpose()?;
    let initrd = initrd
        .map(|initrd| open_boot("spec.boot.linux.initrd", "INITRD", initrd))
        .transpose()?;
    let mut disks = Vec::new();
    for (index, disk) in spec.disks.iter().enumerate() {
        let field = format!("spec.disks[{index}]");
        if disk.source == Source::Seed {
            let fd = seed().map_err(|error| {
                Failure::internal(format!("make the seed of cloud-init: {}", text::words(&error)))
            })?;
            disks.push(OpenDisk {
                fd,
                format: Format::Raw,
                backing: Vec::new(),
                discard_granularity: None,
                ids: Vec::new(),
            });
            continue;
        }
        let opened = open_disk(&field, disk, sources, locks)?;
        found.extend(known::check_disk(known, &field, disk, &opened)?);
        disks.push(opened);
    }
    let cmdline = match &spec.boot {
        Boot::Linux { cmdline, .. } => cmdline.clone(),
        Boot::Disk { .. } | Boot::Firmware { .. } => String::new(),
    };
    let files = Files {
        kernel,
        initrd,
        cmdline,
        firmware: None,
        disks,
    };
    let of_disks: usize = files.disks.iter().map(|disk| 1 + disk.backing.len()).sum();
    beyond(spec, of_disks).map_or(Ok((files, found)), Err)
}

/// Which file a disk is on that is attached by path; empty for a disk of the DiskService.
pub fn learn(known: &Known, field: &str, disk: &Disk, opened: &OpenDisk) -> Result<Known, Failure> {
    let found = known::check_disk(known, field, disk, opened)?;
    Ok(found.into_iter().collect())
}

/// Refused as TOO_MANY_FILES when a VM whose disks are this many files has more than a `vmm` can be given.
fn beyond(spec: &VmSpec, of_disks: usize) -> Option<Failure> {
    let has_initrd = match &spec.boot {
        Boot::Linux { initrd, .. } => initrd.is_some(),
        // As many: the code and the variables.
        Boot::Disk { .. } | Boot::Firmware { .. } => true,
    };
    let all = OTHER_FDS + usize::from(has_initrd) + nic_queues(spec) + of_disks + spec.shares.len();
    let too_many = all.checked_sub(MAX_FDS).filter(|too_many| *too_many > 0)?;
    let message = format!(
        "spec.disks: the disks and the disks below their overlays are {of_disks} files, {too_many} too many: copy overlays \
         into disks of their own"
    );
    Some(Failure::new(Kind::Exhausted, "TOO_MANY_FILES", message))
}

/// Descriptors of the VM's taps.
fn nic_queues(spec: &VmSpec) -> usize {
    spec.nics.iter().map(|nic| usize::from(nic.queues)).sum()
}

/// Identities of the files of each disk of a VM, by the disk's name, as far as they are known
/// without opening the files.
pub fn identify(disks: &[Disk], sources: &Sources<'_>) -> BTreeMap<String, Vec<FileId>> {
    let disks = disks.iter().map(|disk| {
        let ids = match &disk.source {
            Source::Path {
                path,
                beneath: Some(folder),
                ..
            } => {
                let within = sources.roots.of_disk(Some(folder));
                let found = roots::open(path, within, OFlags::PATH | OFlags::CLOEXEC).ok();
                let stat = found.and_then(|fd| rustix::fs::fstat(fd).ok());
                stat.iter().map(identity).collect()
            }
            Source::Pod { volume, .. } => {
                let opened = pod::open_volume("", volume, sources).ok();
                let found = opened.and_then(|opened| opened.stat());
                found.iter().map(identity).collect()
            }
            _ => paths(disk, sources)
                .iter()
                .filter_map(|path| identity_at(path))
                .collect(),
        };
        (disk.name.to_string(), ids)
    });
    disks.collect()
}

/// All that a VM's spec names, for choosing where to look for it.
pub fn named(spec: &VmSpec, sources: &Sources<'_>) -> Vec<PathBuf> {
    let (kernel, initrd) = spec.boot.files();
    let boot = kernel.into_iter().chain(initrd).map(Path::to_owned);
    let disks = spec.disks.iter().flat_map(|disk| paths(disk, sources));
    let shares = spec
        .shares
        .iter()
        .filter_map(|share| share.path().map(Path::to_owned));
    boot.chain(disks)
        .chain(shares)
        .chain(spec.state_dir.clone())
        .collect()
}

/// Path of a disk, followed by the paths of its backing files.
pub fn paths(disk: &Disk, sources: &Sources<'_>) -> Vec<PathBuf> {
    match &disk.source {
        // The mounts of a pod are not those of the node.
        Source::Seed | Source::Empty | Source::Pod { .. } => Vec::new(),
        Source::Path { path, .. } => vec![path.clone()],
        Source::Disk { name, .. } => {
            let resolved = sources.disks.resolve(&sources.folder, name.as_str()).ok();
            let paths = resolved.map(|disk| {
                let below = disk.backing.into_iter().map(|(path, _)| path);
                std::iter::once(disk.path).chain(below).collect()
            });
            paths.unwrap_or_default()
        }
    }
}

/// Size in bytes of the VM's disks in the node's memory. The kernel charges the content of a file
/// on tmpfs to its writer while the file exists.
pub fn bytes_in_memory(spec: &VmSpec, sources: &Sources<'_>) -> u64 {
    let in_memory = |path: &PathBuf| rustix::fs::statfs(path).is_ok_and(|fs| fs.f_type == TMPFS_MAGIC);
    let paths = spec.disks.iter().flat_map(|disk| paths(disk, sources));
    paths
        .filter(in_memory)
        .filter_map(|path| u64::try_from(rustix::fs::stat(&path).ok()?.st_size).ok())
        .fold(0, u64::saturating_add)
}

/// Opens and locks a disk with all that is below it; `field` is its path in the request.
pub fn open_disk(field: &str, disk: &Disk, sources: &Sources<'_>, locks: Locks) -> Result<OpenDisk, Failure> {
    let volume = match &disk.source {
        Source::Pod { volume, .. } => {
            let field = format!("{field}.podVolume: disk \"{}\"", disk.name);
            Some(pod::open_volume(&field, volume, sources)?)
        }
        _ => None,
    };
    let arrives = locks == Locks::Elsewhere;
    let locks = match (&disk.source, &volume) {
        // A disk of this node's DiskService: no other node has locked it.
        (Source::Disk { .. }, _) if arrives => Locks::Take,
        // No node knows the locks that another one has on a block device. The cluster gives both pods the same device.
        (_, Some(volume)) if arrives && volume.block_device => Locks::Take,
        _ => locks,
    };
    let (label, path, within, format, below) = match &disk.source {
        // Made when the VM starts, and opened nowhere else.
        Source::Seed => return Err(Failure::internal("the seed of cloud-init can't be opened")),
        Source::Empty => return empty().map_err(|error| no_medium(field, &error)),
        Source::Pod { format, .. } => {
            let Some(volume) = &volume else {
                return Err(Failure::internal("the volume is not open"));
            };
            let (path, within) = volume.path();
            (volume.label.clone(), path.to_owned(), within, *format, Vec::new())
        }
        Source::Path {
            path,
            format,
            beneath,
        } => (
            format!("{field}.path: disk \"{}\": \"{}\"", disk.name, path.display()),
            path.clone(),
            sources.roots.of_disk(beneath.as_deref()),
            *format,
            Vec::new(),
        ),
        Source::Disk { name, .. } => {
            let resolved = sources.disks.resolve(&sources.folder, name.as_str());
            let resolved = resolved.map_err(|failure| Failure {
                kind: Kind::Precondition,
                message: format!("{field}.disk: {}", failure.message),
                ..failure
            })?;
            let label = format!("{field}.disk: disk \"{}\" (\"{name}\")", disk.name);
            (
                label,
                resolved.path,
                Within::Own,
                resolved.format,
                resolved.backing,
            )
        }
    };
    let how = match (disk.read_only, locks) {
        (true, _) => Use::Read,
        (false, Locks::Take | Locks::Elsewhere) => Use::Write,
        (false, Locks::None) => Use::Look,
    };
    let image = open_image_file(&label, &path, within, disk.cache, how).map_err(|failure| {
        if let Some(volume) = volume.as_ref().filter(|_| failure.reason == PATH_NOT_ALLOWED) {
            return volume.not_allowed();
        }
        // A block device that another VM has.
        let id = Some(failure.reason).filter(|reason| *reason == "DISK_IN_USE");
        let vm = id.and_then(|_| sources.ledger.user_of(identity_at(&path)?));
        match vm {
            Some(vm) => Failure {
                message: format!("{label} is in use by VM \"{vm}\""),
                ..failure
            },
            None => failure,
        }
    })?;
    // The length of a qcow2 file does not show the size of its content.
    if format != Format::Qcow2 {
        let unit = u64::from(disk.logical_block).max(SECTOR);
        if image.size == 0 || !image.size.is_multiple_of(unit) {
            let problem = format!(
                "{label} has {} bytes, which is not a multiple of {unit} above 0",
                image.size
            );
            return Err(Failure::precondition("DISK_SIZE_INVALID", problem));
        }
    }
    if arrives && image.block_device && disk.cache == Cache::Writeback && !disk.read_only {
        let problem = format!(
            "{label} is a block device behind the node's page cache, which does not see what another node writes: a VM whose disk it is moves \
             with `cache: none`"
        );
        return Err(Failure::precondition("MIGRATION_DISKS", problem));
    }
    take(&label, &image, disk.read_only, sources.ledger, locks)?;
    let mut opened = OpenDisk {
        discard_granularity: image.discard_granularity(),
        fd: image.fd,
        format,
        backing: Vec::new(),
        ids: vec![image.id],
    };
    for (path, format) in below {
        let label = format!("{label}: a disk below it");
        let image = open_image_file(&label, &path, Within::Own, disk.cache, Use::Read)?;
        take(&label, &image, true, sources.ledger, locks)?;
        opened.ids.push(image.id);
        opened.backing.push((image.fd, format));
    }
    Ok(opened)
}

/// A drive without a medium has no file: the null device is in its place.
fn empty() -> io::Result<OpenDisk> {
    Ok(OpenDisk {
        fd: File::open("/dev/null")?.into(),
        format: Format::Iso,
        backing: Vec::new(),
        discard_granularity: None,
        ids: Vec::new(),
    })
}

fn no_medium(field: &str, error: &io::Error) -> Failure {
    Failure::internal(format!("{field}: open the null device: {}", text::words(error)))
}

/// Locks an image. The refusal names the holder of the lock.
fn take(
    label: &str,
    image: &OpenFile,
    read_only: bool,
    ledger: &Ledger,
    locks: Locks,
) -> Result<(), Failure> {
    let unusable = |error| Failure::precondition("DISK_UNUSABLE", format!("{label} {}", text::words(&error)));
    if locks == Locks::Elsewhere && !read_only {
        return match sys::could_lock(&image.fd, LockKind::Exclusive).map_err(unusable)? {
            false => Ok(()),
            true => Err(not_shared(label)),
        };
    }
    let free = lock(image, locks, read_only, ledger).map_err(unusable)?;
    if free {
        return Ok(());
    }
    let user = user(image, ledger);
    Err(Failure::precondition(
        "DISK_IN_USE",
        format!("{label} is in use by {user}"),
    ))
}

/// Refusal of a disk of an incoming VM that no other node has locked.
fn not_shared(label: &str) -> Failure {
    let message = format!(
        "{label} is not the file that the other node's VM writes to, or the storage of both keeps no locks: disks that the guest can write to must \
         be on storage that both nodes share, under the same path"
    );
    Failure::precondition("DISK_NOT_SHARED", message)
}

/// The holder of an image that cannot be locked, for a message.
pub fn user(image: &OpenFile, ledger: &Ledger) -> String {
    match ledger.user_of(image.id) {
        Some(vm) => format!("VM \"{vm}\""),
        None => sys::lock_holder(&image.fd).unwrap_or_else(|| {
            let user = match sys::is_locked_here(&image.fd) {
                true => "vmmd, for another operation: wait until that has ended",
                false => "another program",
            };
            user.to_owned()
        }),
    }
}

/// Locks an image; false when somebody else's lock is in the way.
pub fn lock(image: &OpenFile, locks: Locks, read_only: bool, ledger: &Ledger) -> io::Result<bool> {
    let kind = if read_only {
        LockKind::Shared
    } else {
        LockKind::Exclusive
    };
    match locks {
        Locks::Take | Locks::Elsewhere => {
            let known = || ledger.user_of(image.id).is_some() || sys::lock_holder(&image.fd).is_some();
            Ok(sys::lock_file(&image.fd, kind)?
                || !known() && sys::lock_file_within(&image.fd, kind, ENDING)?)
        }
        Locks::None => Ok(true),
    }
}

#[cfg(test)]
mod tests;
