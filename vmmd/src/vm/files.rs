//! Opens what a VM's spec names, with a precise refusal for whatever can't be used. Blocking; nothing is changed on
//! the node, and a disk's lock goes away with its descriptor.

use std::{
    collections::BTreeMap,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileTypeExt,
    },
    path::Path,
};

use proto::{
    model::{
        disk::{Cache, Disk, Format, SECTOR, Source},
        vm::{Boot, VmSpec},
    },
    wire::MAX_FDS,
};
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};

use crate::{
    disk::{Folder, Registry},
    failure::{Failure, Kind},
    ledger::{FileId, Ledger},
    sys::{self, LockKind},
    text,
};

/// Descriptors with a machine beside those of disks, NICs and the initrd: /dev/kvm, kernel, random source, two logs.
const OTHER_FDS: usize = 5;

/// All files of a VM, open.
#[derive(Debug)]
pub struct Files {
    /// The kernel image.
    pub kernel: OwnedFd,
    /// The initial RAM disk.
    pub initrd: Option<OwnedFd>,
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
    /// What is below it, the nearest first, open for reading.
    pub backing: Vec<(OwnedFd, Format)>,
    /// What is behind all of them.
    pub ids: Vec<FileId>,
}

/// An image or block device, open.
#[derive(Debug)]
pub struct OpenFile {
    /// The descriptor.
    pub fd: OwnedFd,
    /// What is behind it.
    pub id: FileId,
    /// Its length in bytes.
    pub size: u64,
    /// It is no file but a device.
    pub block_device: bool,
}

/// Where the daemon looks for what a spec names, and who has it.
#[derive(Debug)]
pub struct Sources<'a> {
    /// Who uses which files.
    pub ledger: &'a Ledger,
    /// Disks of the DiskService.
    pub disks: &'a Registry,
    /// Where their files are.
    pub folder: Folder,
}

/// What to do about locks of the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Locks {
    /// Take them; they stay with the descriptors.
    Take,
    /// Only look whether another VM of this daemon has the disk. For a check that must not disturb a start.
    Look,
}

/// Opens and checks everything.
pub fn open(spec: &VmSpec, sources: &Sources<'_>, locks: Locks) -> Result<Files, Failure> {
    let Boot::Linux { kernel, initrd, .. } = &spec.boot;
    let kernel = open_image("spec.boot.linux.kernel", "KERNEL", kernel)?;
    let initrd = initrd
        .as_ref()
        .map(|initrd| open_image("spec.boot.linux.initrd", "INITRD", initrd))
        .transpose()?;
    let mut files = Files {
        kernel,
        initrd,
        disks: Vec::new(),
    };
    for (index, disk) in spec.disks.iter().enumerate() {
        let opened = open_disk(&format!("spec.disks[{index}]"), disk, sources, locks)?;
        files.disks.push(opened);
    }
    let of_disks: usize = files.disks.iter().map(|disk| 1 + disk.backing.len()).sum();
    let all = OTHER_FDS + usize::from(files.initrd.is_some()) + spec.nics.len() + of_disks;
    if all > MAX_FDS {
        let message = format!(
            "spec.disks: the disks and the disks below their overlays are {of_disks} files, {} too many: copy overlays \
             into disks of their own",
            all - MAX_FDS
        );
        return Err(Failure::new(Kind::Exhausted, "TOO_MANY_FILES", message));
    }
    Ok(files)
}

/// What each disk of a VM is on, by its name, as far as that can be told without opening it.
pub fn identify(spec: &VmSpec, sources: &Sources<'_>) -> BTreeMap<String, Vec<FileId>> {
    let ids = |path: &Path| rustix::fs::stat(path).ok().map(|stat| identity(&stat));
    let disks = spec.disks.iter().map(|disk| {
        let found = match &disk.source {
            Source::Path { path, .. } => ids(path).into_iter().collect(),
            Source::Disk { name, .. } => {
                let resolved = sources.disks.resolve(&sources.folder, name.as_str()).ok();
                let paths = resolved.map(|disk| {
                    let below = disk.backing.into_iter().map(|(path, _)| path);
                    std::iter::once(disk.path).chain(below).collect::<Vec<_>>()
                });
                paths
                    .into_iter()
                    .flatten()
                    .filter_map(|path| ids(&path))
                    .collect()
            }
        };
        (disk.name.to_string(), found)
    });
    disks.collect()
}

/// Opens the device through which KVM is used.
pub fn open_kvm(device: &Path) -> Result<OwnedFd, Failure> {
    rustix::fs::open(device, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|errno| {
        let message = match errno {
            rustix::io::Errno::NOENT | rustix::io::Errno::NODEV | rustix::io::Errno::NXIO => {
                "the node has no /dev/kvm: switch on VT-x or AMD-V in its firmware (or nesting in its hypervisor) and \
                 load the kernel module kvm_intel or kvm_amd"
                    .to_owned()
            }
            rustix::io::Errno::ACCESS | rustix::io::Errno::PERM => {
                "no permission to open /dev/kvm: run vmmd as root, with the device allowed in its container or unit"
                    .to_owned()
            }
            errno => format!("/dev/kvm can't be opened: {}", text::words(&errno.into())),
        };
        Failure::precondition("KVM_UNAVAILABLE", message)
    })
}

fn open_image(field: &str, what: &'static str, path: &Path) -> Result<OwnedFd, Failure> {
    let is_kernel = what == "KERNEL";
    let (missing, unusable) = if is_kernel {
        ("KERNEL_NOT_FOUND", "KERNEL_UNUSABLE")
    } else {
        ("INITRD_NOT_FOUND", "INITRD_UNUSABLE")
    };
    let refuse = |reason, problem: &str| {
        Failure::precondition(reason, format!("{field}: \"{}\" {problem}", path.display()))
    };
    let fd = open_file(path, OFlags::RDONLY).map_err(|errno| {
        let error = io::Error::from(errno);
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                refuse(missing, "does not exist on the node")
            }
            _ => refuse(unusable, &format!("can't be opened: {}", text::words(&error))),
        }
    })?;
    let metadata = metadata(&fd).map_err(|error| refuse(unusable, &text::words(&error)))?;
    if metadata.is_dir() {
        return Err(refuse(unusable, "is a directory"));
    }
    if !metadata.is_file() {
        return Err(refuse(unusable, "is not a regular file"));
    }
    if metadata.len() == 0 {
        return Err(refuse(unusable, "is empty"));
    }
    Ok(fd)
}

/// Opens and locks a disk with all that is below it; `field` is its path in the request.
pub fn open_disk(field: &str, disk: &Disk, sources: &Sources<'_>, locks: Locks) -> Result<OpenDisk, Failure> {
    let (label, path, format, below) = match &disk.source {
        Source::Path { path, format } => (
            format!("{field}.path: disk \"{}\": \"{}\"", disk.name, path.display()),
            path.clone(),
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
            (label, resolved.path, resolved.format, resolved.backing)
        }
    };
    let image = open_image_file(&label, &path, disk.cache, disk.read_only)?;
    // The length of a qcow2 file says nothing about what is in it.
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
    take(&label, &image, disk.read_only, sources.ledger, locks)?;
    let mut opened = OpenDisk {
        fd: image.fd,
        format,
        backing: Vec::new(),
        ids: vec![image.id],
    };
    for (path, format) in below {
        let label = format!("{label}: a disk below it");
        let image = open_image_file(&label, &path, disk.cache, true)?;
        take(&label, &image, true, sources.ledger, locks)?;
        opened.ids.push(image.id);
        opened.backing.push((image.fd, format));
    }
    Ok(opened)
}

/// Locks an image, or says who has it.
fn take(
    label: &str,
    image: &OpenFile,
    read_only: bool,
    ledger: &Ledger,
    locks: Locks,
) -> Result<(), Failure> {
    let free = lock(image, locks, read_only, ledger).map_err(|error| {
        Failure::precondition("DISK_UNUSABLE", format!("{label} {}", text::words(&error)))
    })?;
    if free {
        return Ok(());
    }
    let user = user(image, ledger);
    Err(Failure::precondition(
        "DISK_IN_USE",
        format!("{label} is in use by {user}"),
    ))
}

/// Who has an image that can't be locked, for a message.
pub fn user(image: &OpenFile, ledger: &Ledger) -> String {
    match ledger.user_of(image.id) {
        Some(vm) => format!("VM \"{vm}\""),
        None => sys::lock_holder(&image.fd).unwrap_or_else(|| "another program".to_owned()),
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
        Locks::Take => sys::lock_file(&image.fd, kind),
        Locks::Look => Ok(read_only || ledger.user_of(image.id).is_none()),
    }
}

/// Opens an image file or block device; `label` begins the message when that can't be.
pub fn open_image_file(label: &str, path: &Path, cache: Cache, read_only: bool) -> Result<OpenFile, Failure> {
    let refuse = |reason, problem: &str| Failure::precondition(reason, format!("{label} {problem}"));
    let access = if read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let opened = match cache {
        Cache::Writeback => open_file(path, access),
        Cache::None => open_file(path, access | OFlags::DIRECT),
        Cache::Auto => match open_file(path, access | OFlags::DIRECT) {
            // open(2): what is behind the path can't do O_DIRECT.
            Err(Errno::INVAL) => open_file(path, access),
            opened => opened,
        },
    };
    let fd = opened.map_err(|errno| match errno {
        Errno::NOENT | Errno::NOTDIR => refuse("DISK_NOT_FOUND", "does not exist on the node"),
        Errno::ISDIR => refuse("DISK_UNUSABLE", "is a directory"),
        Errno::ROFS => refuse(
            "DISK_UNUSABLE",
            "is on a read-only file system: set `readOnly` or move it",
        ),
        Errno::INVAL if cache == Cache::None => refuse(
            "DIRECT_IO_UNSUPPORTED",
            "is on a file system without direct I/O, which DISK_CACHE_NONE needs: leave `cache` out, or set \
             DISK_CACHE_WRITEBACK",
        ),
        Errno::PERM => refuse(
            "DISK_UNUSABLE",
            "can't be opened: operation not permitted; a block device must be in DeviceAllow= of vmmd.service, and a \
             file not immutable",
        ),
        errno => refuse(
            "DISK_UNUSABLE",
            &format!("can't be opened: {}", text::words(&errno.into())),
        ),
    })?;
    let unreadable = |error: io::Error| refuse("DISK_UNUSABLE", &text::words(&error));
    let metadata = metadata(&fd).map_err(unreadable)?;
    let block_device = metadata.file_type().is_block_device();
    let size = if metadata.is_file() {
        metadata.len()
    } else if block_device {
        rustix::fs::seek(&fd, rustix::fs::SeekFrom::End(0)).map_err(|errno| unreadable(errno.into()))?
    } else if metadata.is_dir() {
        return Err(refuse("DISK_UNUSABLE", "is a directory"));
    } else {
        return Err(refuse(
            "DISK_UNUSABLE",
            "is neither a regular file nor a block device",
        ));
    };
    let stat = rustix::fs::fstat(&fd).map_err(|errno| unreadable(errno.into()))?;
    Ok(OpenFile {
        id: identity(&stat),
        fd,
        size,
        block_device,
    })
}

/// Opens without waiting for the other end of a FIFO or a carrier.
fn open_file(path: &Path, access: OFlags) -> Result<OwnedFd, Errno> {
    let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let fd = rustix::fs::open(path, flags, Mode::empty())?;
    rustix::fs::fcntl_setfl(&fd, access)?;
    Ok(fd)
}

fn metadata(fd: &OwnedFd) -> io::Result<std::fs::Metadata> {
    std::fs::File::from(fd.as_fd().try_clone_to_owned()?).metadata()
}

fn identity(stat: &rustix::fs::Stat) -> FileId {
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::BlockDevice {
        FileId {
            device: stat.st_rdev,
            inode: 0,
        }
    } else {
        FileId {
            device: stat.st_dev,
            inode: stat.st_ino,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use proto::model::{Violations, topology::Topology, vm::Backing};
    use proto::v1;

    use super::*;
    use crate::config::UidRange;

    struct Case {
        folder: tempfile::TempDir,
        spec: VmSpec,
        ledger: std::sync::Arc<Ledger>,
        disks: Registry,
    }

    fn case() -> Case {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("kernel"), [1; 4096]).unwrap();
        fs::write(path("disk"), [0; 1024]).unwrap();
        let spec = VmSpec {
            topology: Topology::for_cores(1).unwrap(),
            memory_bytes: 128 << 20,
            backing: Backing::Auto,
            boot: Boot::Linux {
                kernel: path("kernel"),
                initrd: None,
                cmdline: String::new(),
            },
            disks: vec![disk(&path("disk"))],
            nics: Vec::new(),
            rate_groups: Vec::new(),
        };
        Case {
            folder,
            spec,
            ledger: Ledger::new(UidRange::default(), 1 << 30),
            disks: Registry::default(),
        }
    }

    fn disk(path: &Path) -> Disk {
        let wire = v1::DiskSpec {
            name: "root".into(),
            path: path.to_str().unwrap().into(),
            format: v1::DiskFormat::Raw.into(),
            ..Default::default()
        };
        Disk::new(&mut Violations::default(), "", &wire).unwrap()
    }

    impl Case {
        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn boot(&mut self, kernel: PathBuf, initrd: Option<PathBuf>) {
            self.spec.boot = Boot::Linux {
                kernel,
                initrd,
                cmdline: String::new(),
            };
        }

        fn open(&self) -> Result<Files, Failure> {
            open(&self.spec, &self.sources(), Locks::Take)
        }

        fn sources(&self) -> Sources<'_> {
            Sources {
                ledger: &self.ledger,
                disks: &self.disks,
                folder: Folder::of(self.folder.path()),
            }
        }

        fn refused(&self) -> (&'static str, String) {
            let failure = self.open().unwrap_err();
            (failure.reason, failure.message)
        }
    }

    #[test]
    fn a_good_spec_is_opened() {
        let case = case();
        let files = case.open().unwrap();
        assert_eq!((files.disks.len(), files.initrd.is_some()), (1, false));
        assert_eq!(files.disks[0].ids, identify(&case.spec, &case.sources())["root"]);
    }

    #[test]
    fn each_wrong_kernel_and_initrd_has_its_own_words() {
        let mut case = case();
        fs::write(case.path("empty"), []).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            case.path("fifo"),
            rustix::fs::FileType::Fifo,
            Mode::RUSR,
            0,
        )
        .unwrap();
        let kernel = case.path("kernel");
        for (path, reason, words) in [
            ("missing", "KERNEL_NOT_FOUND", "does not exist"),
            ("kernel/below", "KERNEL_NOT_FOUND", "does not exist"),
            ("", "KERNEL_UNUSABLE", "is a directory"),
            ("empty", "KERNEL_UNUSABLE", "is empty"),
            ("fifo", "KERNEL_UNUSABLE", "not a regular file"),
        ] {
            case.boot(case.path(path), None);
            let (found, message) = case.refused();
            assert!(
                found == reason && message.contains(words),
                "{path}: {found} {message}"
            );
        }
        case.boot(kernel, Some(case.path("missing")));
        assert_eq!(case.refused().0, "INITRD_NOT_FOUND");
    }

    #[test]
    fn each_wrong_disk_has_its_own_words() {
        let mut case = case();
        fs::write(case.path("odd"), [0; 1000]).unwrap();
        fs::write(case.path("empty"), []).unwrap();
        for (path, reason, words) in [
            ("missing", "DISK_NOT_FOUND", "does not exist"),
            ("", "DISK_UNUSABLE", "is a directory"),
            ("odd", "DISK_SIZE_INVALID", "1000 bytes"),
            ("empty", "DISK_SIZE_INVALID", "0 bytes"),
        ] {
            case.spec.disks[0] = disk(&case.path(path));
            let (found, message) = case.refused();
            assert!(
                found == reason && message.contains(words),
                "{path}: {found} {message}"
            );
            assert!(
                message.starts_with("spec.disks[0].path: disk \"root\""),
                "{message}"
            );
        }
        case.spec.disks[0] = disk(Path::new("/dev/null"));
        assert!(
            case.refused()
                .1
                .contains("neither a regular file nor a block device")
        );
    }

    #[test]
    fn a_disk_in_use_names_its_user_and_readers_share() {
        let mut case = case();
        let files = case.open().unwrap();
        assert!(case.refused().1.contains("another program"));
        let claim = case.ledger.claim("other", 1).unwrap();
        claim.set_disks(files.disks[0].ids.clone());
        assert!(case.refused().1.contains("in use by VM \"other\""));
        drop(files);
        case.spec.disks[0].read_only = true;
        let _first = case.open().unwrap();
        let _second = case.open().unwrap();
        case.spec.disks[0].read_only = false;
        assert_eq!(case.refused().0, "DISK_IN_USE");
    }

    #[test]
    fn a_missing_kvm_says_what_to_do() {
        let failure = open_kvm(Path::new("/nonexistent")).unwrap_err();
        assert!(
            failure.reason == "KVM_UNAVAILABLE" && failure.message.contains("kvm_amd"),
            "{failure}"
        );
    }
}
