//! Opens what a VM's spec names, with a precise refusal for whatever can't be used. Blocking; nothing is changed on
//! the node, and a disk's lock goes away with its descriptor.

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileTypeExt,
    },
    path::Path,
};

use proto::model::{
    disk::{Disk, Source},
    vm::{Boot, VmSpec},
};
use rustix::fs::{Mode, OFlags};

use crate::{
    failure::Failure,
    ledger::{FileId, Ledger},
    sys::{self, LockKind},
    text,
};

/// Disk sizes are multiples of this many bytes (virtio 1.3, 5.2: sectors).
const SECTOR: u64 = 512;

/// All files of a VM, open.
#[derive(Debug)]
pub struct Files {
    /// The kernel image.
    pub kernel: OwnedFd,
    /// The initial RAM disk.
    pub initrd: Option<OwnedFd>,
    /// In the order of the spec, each locked.
    pub disks: Vec<OwnedFd>,
    /// What is behind them.
    pub ids: Vec<FileId>,
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
pub fn open(spec: &VmSpec, ledger: &Ledger, locks: Locks) -> Result<Files, Failure> {
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
        ids: Vec::new(),
    };
    for (index, disk) in spec.disks.iter().enumerate() {
        let (fd, id) = open_disk(&format!("spec.disks[{index}].path"), disk, ledger, locks)?;
        files.disks.push(fd);
        files.ids.push(id);
    }
    Ok(files)
}

/// What the disks of a VM are on, as far as that can be told without opening them.
pub fn identify(spec: &VmSpec) -> Vec<FileId> {
    let stats = spec.disks.iter().filter_map(|disk| match &disk.source {
        Source::Path { path, .. } => rustix::fs::stat(path).ok(),
        Source::Disk { .. } => None,
    });
    stats.map(|stat| identity(&stat)).collect()
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
    let fd = open_file(path, OFlags::RDONLY).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            refuse(missing, "does not exist on the node")
        }
        _ => refuse(unusable, &format!("can't be opened: {}", text::words(&error))),
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

fn open_disk(field: &str, disk: &Disk, ledger: &Ledger, locks: Locks) -> Result<(OwnedFd, FileId), Failure> {
    let Source::Path { path: file, .. } = &disk.source else {
        let message = format!("{field}: disks of the DiskService can't be attached yet");
        return Err(Failure::precondition("DISK_UNUSABLE", message));
    };
    let path = file.display();
    let refuse = |reason, problem: &str| {
        Failure::precondition(
            reason,
            format!("{field}: disk \"{}\": \"{path}\" {problem}", disk.name),
        )
    };
    let access = if disk.read_only {
        OFlags::RDONLY
    } else {
        OFlags::RDWR
    };
    let fd = open_file(file, access).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            refuse("DISK_NOT_FOUND", "does not exist on the node")
        }
        io::ErrorKind::IsADirectory => refuse("DISK_UNUSABLE", "is a directory"),
        io::ErrorKind::ReadOnlyFilesystem => refuse(
            "DISK_UNUSABLE",
            "is on a read-only file system: set `readOnly` or move it",
        ),
        _ => refuse(
            "DISK_UNUSABLE",
            &format!("can't be opened: {}", text::words(&error)),
        ),
    })?;
    let unreadable = |error: io::Error| refuse("DISK_UNUSABLE", &text::words(&error));
    let metadata = metadata(&fd).map_err(unreadable)?;
    let size = if metadata.is_file() {
        metadata.len()
    } else if metadata.is_dir() {
        return Err(refuse("DISK_UNUSABLE", "is a directory"));
    } else if metadata.file_type().is_block_device() {
        rustix::fs::seek(&fd, rustix::fs::SeekFrom::End(0)).map_err(|errno| unreadable(errno.into()))?
    } else {
        return Err(refuse(
            "DISK_UNUSABLE",
            "is neither a regular file nor a block device",
        ));
    };
    if size == 0 || !size.is_multiple_of(SECTOR) {
        let problem = format!("has {size} bytes, which is not a multiple of {SECTOR} above 0");
        return Err(refuse("DISK_SIZE_INVALID", &problem));
    }
    let id = identity(&rustix::fs::fstat(&fd).map_err(|errno| unreadable(errno.into()))?);
    let kind = if disk.read_only {
        LockKind::Shared
    } else {
        LockKind::Exclusive
    };
    let user = ledger.user_of(id).map(|vm| format!("VM \"{vm}\""));
    let free = match locks {
        Locks::Take => sys::lock_file(&fd, kind).map_err(unreadable)?,
        Locks::Look => user.is_none() || disk.read_only,
    };
    if !free {
        let user = user.unwrap_or_else(|| "another program".to_owned());
        return Err(refuse("DISK_IN_USE", &format!("is in use by {user}")));
    }
    Ok((fd, id))
}

/// Opens without waiting for the other end of a FIFO or a carrier.
fn open_file(path: &Path, access: OFlags) -> io::Result<OwnedFd> {
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

        fn refused(&self) -> (&'static str, String) {
            let failure = open(&self.spec, &self.ledger, Locks::Take).unwrap_err();
            (failure.reason, failure.message)
        }
    }

    #[test]
    fn a_good_spec_is_opened() {
        let case = case();
        let files = open(&case.spec, &case.ledger, Locks::Take).unwrap();
        assert_eq!((files.disks.len(), files.initrd.is_some()), (1, false));
        assert_eq!(files.ids, identify(&case.spec));
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
        let files = open(&case.spec, &case.ledger, Locks::Take).unwrap();
        assert!(case.refused().1.contains("another program"));
        let claim = case.ledger.claim("other", 1).unwrap();
        claim.set_disks(files.ids.clone());
        assert!(case.refused().1.contains("in use by VM \"other\""));
        drop(files);
        case.spec.disks[0].read_only = true;
        let _first = open(&case.spec, &case.ledger, Locks::Take).unwrap();
        let _second = open(&case.spec, &case.ledger, Locks::Take).unwrap();
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
