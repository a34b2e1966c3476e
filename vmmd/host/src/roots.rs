//! Allowed locations for the files of VMs: below folders that the node's operator allows, without a
//! symbolic link that leads out of them. Where guests write, no link is allowed at all. The check
//! is part of the open, by the kernel (openat2(2)), or by [`walk`] where a filter forbids that
//! call. No process can therefore replace the file between check and use. Blocking.

use std::{
    ffi::OsString,
    io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::ffi::OsStringExt,
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags},
    io::Errno,
};
use serde::{Deserialize, Serialize};
use vmmd_api::v1;

mod walk;

/// How often a path is tried again whose folders are being renamed meanwhile.
const RACES: u32 = 100;

/// Folders below which the files of VMs may be.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Roots {
    /// Images and block devices that a spec or a request names by path. Default `["/"]`: anywhere.
    pub disks: Vec<PathBuf>,
    /// Kernels and initial RAM disks. Default `["/"]`: anywhere.
    pub kernels: Vec<PathBuf>,
    /// Directories that are shared with guests. Default `["/srv"]`.
    pub shares: Vec<PathBuf>,
}

impl Default for Roots {
    fn default() -> Self {
        Self {
            disks: vec!["/".into()],
            kernels: vec!["/".into()],
            shares: vec!["/srv".into()],
        }
    }
}

impl Roots {
    /// Checks that all paths are absolute.
    pub fn check(&self) -> Result<(), &'static str> {
        let mut all = self.disks.iter().chain(&self.kernels).chain(&self.shares);
        match all.all(|root| root.is_absolute()) {
            true => Ok(()),
            false => Err("must have absolute paths only"),
        }
    }
}

impl From<&Roots> for v1::Roots {
    fn from(roots: &Roots) -> Self {
        let named = |roots: &[PathBuf]| roots.iter().map(|root| root.display().to_string()).collect();
        Self {
            disks: named(&roots.disks),
            kernels: named(&roots.kernels),
            shares: named(&roots.shares),
        }
    }
}

/// Where a path may lead.
#[derive(Clone, Copy, Debug)]
pub enum Within<'a> {
    /// It is a file of the daemon's own folder.
    Own,
    /// One of these folders.
    Roots(&'a [PathBuf]),
    /// One of these folders, in which guests can make symbolic links: none below it is followed.
    NoLinks(&'a [PathBuf]),
    /// A folder below one of the roots, in which guests or other users of the node can make files of any type: no link below the folder is
    /// followed, and only a regular file is opened.
    Beneath {
        /// The folder. Links above it, and itself, are followed as for [`Within::Roots`].
        folder: &'a Path,
        /// The roots.
        roots: &'a [PathBuf],
    },
}

impl<'a> Within<'a> {
    /// The allowed folders; `None` of the daemon's own.
    fn roots(self) -> Option<&'a [PathBuf]> {
        match self {
            Self::Own => None,
            Self::Roots(roots) | Self::NoLinks(roots) | Self::Beneath { roots, .. } => Some(roots),
        }
    }
}

/// Reason for a refused open.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    /// The path is below none of the folders.
    Outside,
    /// The path leads out of its folder: through `..`, a symbolic link, or a link of procfs.
    LeadsOut,
    /// The path has a symbolic link where none is followed.
    Link,
    /// The file is a device or another special file where only a regular one is opened.
    Special,
    /// The kernel says so.
    Errno(Errno),
}

impl Refused {
    /// For a message, when it is about the folders: what stands after the path. `key` is that of the configuration.
    pub fn about_roots(&self, within: Within<'_>, key: &str) -> Option<String> {
        let roots = within.roots()?;
        let named: Vec<_> = roots.iter().map(|root| root.display().to_string()).collect();
        let named = named.join(", ");
        match (self, within) {
            (Self::Outside, _) => Some(format!(
                "is not below a folder that this node allows: `roots.{key}` in config.toml has {named}"
            )),
            (Self::LeadsOut, _) => Some(format!(
                "leads out of the folders that this node allows, through `..`, a link of /proc, an absolute symbolic link or one that points outside: \
                 `roots.{key}` in config.toml has {named}"
            )),
            (Self::Link, Within::Beneath { folder, .. }) => Some(format!(
                "has a symbolic link below \"{}\", where others than the node's operator make files: no link is followed there; make it a regular \
                 file",
                folder.display()
            )),
            (Self::Special, _) => Some(
                "is neither a regular file nor a directory, in a folder where others than the node's operator make files: make it a regular file"
                    .to_owned(),
            ),
            (Self::Link, _) => Some(format!(
                "has a symbolic link in it, which is not followed below the folders of `roots.{key}` in config.toml ({named}), since a guest may \
                 have made it: name the directory that the link leads to"
            )),
            (Self::Errno(_), _) => None,
        }
    }
}

/// Whether a path, which has no `..`, is below one of the folders as it is written; where its links lead, only [`open`] finds out.
pub fn allows(roots: &[PathBuf], path: &Path) -> Result<(), Refused> {
    match roots.iter().any(|root| path.starts_with(root)) {
        true => Ok(()),
        false => Err(Refused::Outside),
    }
}

fn is_everything(root: &Path) -> bool {
    root.parent().is_none()
}

impl Roots {
    /// Where the path of a VM's disk may lead; `beneath` as in its spec.
    pub fn of_disk<'a>(&'a self, beneath: Option<&'a Path>) -> Within<'a> {
        match beneath {
            None => Within::Roots(&self.disks),
            Some(folder) => Within::Beneath {
                folder,
                roots: &self.disks,
            },
        }
    }
}

/// Opens a file by its absolute path. One allowed folder from which the open succeeds is enough.
pub fn open(path: &Path, within: Within<'_>, flags: OFlags) -> Result<OwnedFd, Refused> {
    let (roots, links) = match within {
        Within::Own => return rustix::fs::open(path, flags, Mode::empty()).map_err(Refused::Errno),
        Within::Roots(roots) => (roots, Links::Followed),
        Within::NoLinks(roots) => (roots, Links::Refused),
        Within::Beneath { folder, roots } => return open_regular(path, folder, roots, flags),
    };
    let mut refused = Refused::Outside;
    for root in roots {
        let Ok(rest) = path.strip_prefix(root) else {
            continue;
        };
        match open_beneath(root, rest, path, flags, links) {
            Err(leads @ (Refused::LeadsOut | Refused::Link)) => refused = leads,
            opened => return opened,
        }
    }
    Err(refused)
}

/// Opens the regular file at `path` below `folder`. It is looked at before it is opened: to open a device can have an effect.
fn open_regular(path: &Path, folder: &Path, roots: &[PathBuf], flags: OFlags) -> Result<OwnedFd, Refused> {
    let rest = path.strip_prefix(folder).map_err(|_| Refused::Outside)?;
    let folder = open(folder, Within::Roots(roots), FOLDER)?;
    let found = resolve(&folder, rest, OFlags::PATH | OFlags::CLOEXEC, Links::Refused)?;
    let stat = rustix::fs::fstat(&found).map_err(Refused::Errno)?;
    match FileType::from_raw_mode(stat.st_mode) {
        _ if flags.contains(OFlags::PATH) => Ok(found),
        FileType::RegularFile | FileType::Directory => {
            rustix::fs::open(link_of(&found), flags, Mode::empty()).map_err(Refused::Errno)
        }
        _ => Err(Refused::Special),
    }
}

/// Opens the folder of an open regular file, and returns the file's name in it. The folder is
/// beneath one of the allowed ones, independent of the links followed when the file was opened.
/// Refused as stale when the name belongs to another file.
pub fn open_folder_of(file: &OwnedFd, within: Within<'_>) -> Result<(OwnedFd, OsString), Refused> {
    let path = path_of(file).map_err(Refused::Errno)?;
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Refused::Errno(Errno::STALE));
    };
    let folder = open_folder(parent, within)?;
    let there = rustix::fs::statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW).map_err(Refused::Errno)?;
    let file = rustix::fs::fstat(file).map_err(Refused::Errno)?;
    match (there.st_dev, there.st_ino) == (file.st_dev, file.st_ino) {
        true => Ok((folder, name.to_owned())),
        false => Err(Refused::Errno(Errno::STALE)),
    }
}

/// The path of an open file, without symbolic links.
pub fn path_of(file: &OwnedFd) -> Result<PathBuf, Errno> {
    let path = rustix::fs::readlink(link_of(file), Vec::new())?;
    Ok(PathBuf::from(OsString::from_vec(path.into_bytes())))
}

/// The link of procfs to an open file (proc(5)).
fn link_of(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Opens a folder by a path that has no symbolic links, and follows none. The folder is beneath one of the allowed ones.
pub fn open_folder(path: &Path, within: Within<'_>) -> Result<OwnedFd, Refused> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match real(within) {
        None => open(path, Within::Own, flags),
        Some(real) => open(path, Within::NoLinks(&real), flags),
    }
}

/// The allowed folders without symbolic links; `None` of the daemon's own.
pub fn real(within: Within<'_>) -> Option<Vec<PathBuf>> {
    let real = within.roots()?.iter().filter_map(|root| root.canonicalize().ok());
    Some(real.collect())
}

/// Handling of symbolic links below a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Links {
    /// They are followed as long as they stay below it.
    Followed,
    /// ELOOP.
    Refused,
}

/// Opens `path`, which is `rest` below `root`.
fn open_beneath(
    root: &Path,
    rest: &Path,
    path: &Path,
    flags: OFlags,
    links: Links,
) -> Result<OwnedFd, Refused> {
    if is_everything(root) && links == Links::Followed {
        return rustix::fs::open(path, flags, Mode::empty()).map_err(Refused::Errno);
    }
    // Each call opens the folder: it may be mounted, or mounted over, while the daemon runs.
    let folder = rustix::fs::open(root, FOLDER, Mode::empty()).map_err(Refused::Errno)?;
    resolve(&folder, rest, flags, links)
}

/// Flags of a folder beneath which something is looked for.
const FOLDER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Opens the path `rest` below an open folder.
fn resolve(folder: &OwnedFd, rest: &Path, flags: OFlags, links: Links) -> Result<OwnedFd, Refused> {
    let mut how = ResolveFlags::NO_MAGICLINKS | ResolveFlags::BENEATH;
    how.set(ResolveFlags::NO_SYMLINKS, links == Links::Refused);
    let rest = if rest.as_os_str().is_empty() {
        Path::new(".")
    } else {
        rest
    };
    let mut tries = 0;
    loop {
        let opened = match rustix::fs::openat2(folder, rest, flags, Mode::empty(), how) {
            // A filter of system calls forbids it, such as that of the daemon's unit.
            Err(Errno::NOSYS) => walk::open(folder.as_fd(), rest, flags, links),
            opened => opened,
        };
        match opened {
            Err(Errno::LOOP) if links == Links::Refused => return Err(Refused::Link),
            Err(Errno::XDEV | Errno::LOOP) => return Err(Refused::LeadsOut),
            // openat2(2): something was renamed or mounted while a `..` was followed.
            Err(Errno::AGAIN) if tries < RACES => tries += 1,
            opened => return opened.map_err(Refused::Errno),
        }
    }
}

impl From<Refused> for io::Error {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Errno(errno) => errno.into(),
            Refused::Outside => Self::new(io::ErrorKind::PermissionDenied, "not below an allowed folder"),
            Refused::LeadsOut => Self::new(io::ErrorKind::PermissionDenied, "leads out of an allowed folder"),
            Refused::Link => Self::new(io::ErrorKind::PermissionDenied, "has a symbolic link in it"),
            Refused::Special => Self::new(io::ErrorKind::PermissionDenied, "is no regular file"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use rustix::fs::CWD;
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

    use super::*;

    struct Case(tempfile::TempDir);

    impl Case {
        /// `allowed/{in,sub/in,inside,outside,absolute}` and `other/out`.
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = |name: &str| folder.path().join(name);
            fs::create_dir_all(path("allowed/sub")).unwrap();
            fs::create_dir(path("other")).unwrap();
            for file in ["allowed/in", "allowed/sub/in", "other/out"] {
                fs::write(path(file), "x").unwrap();
            }
            symlink("sub/in", path("allowed/inside")).unwrap();
            symlink("../other/out", path("allowed/outside")).unwrap();
            symlink(path("other/out"), path("allowed/absolute")).unwrap();
            symlink("../other", path("allowed/folder")).unwrap();
            Self(folder)
        }

        fn open(&self, root: &str, file: &str) -> Result<(), Refused> {
            let roots = [self.0.path().join(root)];
            let path = self.0.path().join(file);
            open(&path, Within::Roots(&roots), OFlags::RDONLY).map(drop)
        }
    }

    #[test]
    fn what_is_below_a_folder_is_opened_and_what_leads_out_is_not() {
        opened_and_refused();
    }

    /// Applies the filter of systemd's `RestrictSUIDSGID=yes` to this thread.
    fn forbid_openat2() {
        let rules = [(libc::SYS_openat2, Vec::new())].into_iter().collect();
        let errno = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, errno, TargetArch::x86_64).unwrap();
        seccompiler::apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
        let resolve = ResolveFlags::BENEATH;
        let refused = rustix::fs::openat2(rustix::fs::CWD, ".", OFlags::PATH, Mode::empty(), resolve);
        assert_eq!(refused.unwrap_err(), Errno::NOSYS);
    }

    #[test]
    fn the_same_is_opened_and_refused_where_openat2_is_forbidden() {
        let forbidden = std::thread::spawn(|| {
            forbid_openat2();
            opened_and_refused();
        });
        forbidden.join().unwrap();
    }

    fn opened_and_refused() {
        let case = Case::new();
        for file in ["allowed/in", "allowed/sub/in", "allowed/inside"] {
            assert_eq!(case.open("allowed", file), Ok(()), "{file}");
        }
        for file in ["allowed/outside", "allowed/absolute", "allowed/folder/out"] {
            assert_eq!(case.open("allowed", file), Err(Refused::LeadsOut), "{file}");
        }
        assert_eq!(case.open("allowed", "other/out"), Err(Refused::Outside));
        for file in ["allowed/../other/out", "allowed/sub/../../other/out"] {
            assert_eq!(case.open("allowed", file), Err(Refused::LeadsOut), "{file}");
        }
        assert_eq!(case.open("allowed", "allowed/sub/../in"), Ok(()));
        // A name that begins like the folder's.
        assert_eq!(case.open("allow", "allowed/in"), Err(Refused::Outside));
        assert_eq!(
            case.open("allowed", "allowed/none"),
            Err(Refused::Errno(Errno::NOENT))
        );
    }

    #[test]
    fn below_folders_of_guests_no_link_is_followed() {
        links_refused();
        let forbidden = std::thread::spawn(|| {
            forbid_openat2();
            links_refused();
        });
        forbidden.join().unwrap();
    }

    fn links_refused() {
        let case = Case::new();
        let path = |name: &str| case.0.path().join(name);
        symlink("allowed", path("root")).unwrap();
        symlink("sub", path("allowed/near")).unwrap();
        let open = |root: &Path, file: &str| {
            open(
                &path(file),
                Within::NoLinks(&[root.to_owned()]),
                OFlags::PATH | OFlags::CLOEXEC,
            )
            .map(drop)
        };
        for root in [path("allowed"), "/".into()] {
            for file in ["allowed/in", "allowed/sub/in", "allowed/sub"] {
                assert_eq!(open(&root, file), Ok(()), "{file}");
            }
            for file in [
                "allowed/inside",
                "allowed/near",
                "allowed/near/in",
                "allowed/outside",
                "allowed/absolute",
                "allowed/folder/out",
            ] {
                assert_eq!(open(&root, file), Err(Refused::Link), "{file}");
            }
        }
        let leads_out = open(&path("allowed"), "allowed/../other/out");
        assert_eq!(leads_out, Err(Refused::LeadsOut));
        // The folder itself is the operator's to choose.
        assert_eq!(open(&path("root"), "root/sub/in"), Ok(()));
    }

    #[test]
    fn a_folder_of_others_gives_regular_files_without_links() {
        regular_files_only();
        let forbidden = std::thread::spawn(|| {
            forbid_openat2();
            regular_files_only();
        });
        forbidden.join().unwrap();
    }

    fn regular_files_only() {
        let case = Case::new();
        let path = |name: &str| case.0.path().join(name);
        fs::create_dir(path("allowed/sub/folder")).unwrap();
        symlink("in", path("allowed/sub/link")).unwrap();
        symlink("../../other", path("allowed/sub/out")).unwrap();
        rustix::fs::mknodat(CWD, path("allowed/sub/fifo"), FileType::Fifo, Mode::RWXU, 0).unwrap();
        symlink("allowed", path("volumes")).unwrap();
        let opened = |roots: &Path, folder: &str, file: &str| {
            let (folder, roots) = (path(folder), [roots.to_owned()]);
            let within = Within::Beneath {
                folder: &folder,
                roots: &roots,
            };
            open(&path(file), within, OFlags::RDWR | OFlags::NONBLOCK).map(drop)
        };
        for roots in [path("allowed"), "/".into()] {
            let open = |file: &str| opened(&roots, "allowed/sub", file);
            assert_eq!(open("allowed/sub/in"), Ok(()));
            for link in ["allowed/sub/link", "allowed/sub/out/out"] {
                assert_eq!(open(link), Err(Refused::Link), "{link}");
            }
            assert_eq!(open("allowed/sub/fifo"), Err(Refused::Special));
            assert_eq!(open("allowed/sub/folder"), Err(Refused::Errno(Errno::ISDIR)));
            assert_eq!(open("allowed/in"), Err(Refused::Outside));
            assert_eq!(open("allowed/sub/../in"), Err(Refused::LeadsOut));
        }
        // The way to the folder is the operator's.
        assert_eq!(opened(Path::new("/"), "volumes/sub", "volumes/sub/in"), Ok(()));
        assert_eq!(
            opened(&path("other"), "allowed/sub", "allowed/sub/in"),
            Err(Refused::Outside)
        );
        // A path of a file, not its content.
        let (folder, roots) = (path("allowed/sub"), ["/".into()]);
        let within = Within::Beneath {
            folder: &folder,
            roots: &roots,
        };
        assert!(open(&path("allowed/sub/fifo"), within, OFlags::PATH).is_ok());
    }

    #[test]
    fn the_folder_of_an_open_file_is_the_one_that_its_name_is_in() {
        let case = Case::new();
        let path = |name: &str| case.0.path().join(name);
        let roots = [path("allowed")];
        let file: OwnedFd = fs::File::open(path("allowed/inside")).unwrap().into();
        let (folder, name) = open_folder_of(&file, Within::Roots(&roots)).unwrap();
        assert_eq!(name, "in");
        let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
        let sub = fs::File::open(path("allowed/sub")).unwrap().into();
        assert_eq!(inode(&folder), inode(&sub));
        // Another file has the name now.
        fs::write(path("new"), "y").unwrap();
        fs::rename(path("new"), path("allowed/sub/in")).unwrap();
        let stale = open_folder_of(&file, Within::Roots(&roots));
        assert!(matches!(stale, Err(Refused::Errno(_))), "{stale:?}");
        let outside: OwnedFd = fs::File::open(path("other/out")).unwrap().into();
        let refused = open_folder_of(&outside, Within::Roots(&roots));
        assert!(matches!(refused, Err(Refused::Outside)), "{refused:?}");
        assert!(open_folder_of(&outside, Within::Own).is_ok());
    }

    #[test]
    fn one_of_several_folders_is_enough() {
        let case = Case::new();
        let path = |name: &str| case.0.path().join(name);
        let open = |roots: &[&str], file: &str| {
            let roots: Vec<_> = roots.iter().map(|root| path(root)).collect();
            open(&path(file), Within::Roots(&roots), OFlags::RDONLY).map(drop)
        };
        assert_eq!(open(&["other", "allowed"], "allowed/in"), Ok(()));
        // The link leads out of the inner folder and stays in the outer one.
        for roots in [["allowed", "."], [".", "allowed"]] {
            assert_eq!(open(&roots, "allowed/outside"), Ok(()), "{roots:?}");
        }
        assert_eq!(
            open(&["other", "allowed"], "allowed/outside"),
            Err(Refused::LeadsOut)
        );
    }

    #[test]
    fn where_a_path_leads_as_it_is_written_is_known_without_the_file() {
        let roots = ["/srv/vms".into(), "/dev".into()];
        for (path, expected) in [
            ("/srv/vms/a", Ok(())),
            ("/dev/sda", Ok(())),
            ("/srv/vmsx/a", Err(Refused::Outside)),
            ("/etc/shadow", Err(Refused::Outside)),
        ] {
            assert_eq!(allows(&roots, Path::new(path)), expected, "{path}");
        }
        assert_eq!(allows(&["/".into()], Path::new("/a")), Ok(()));
    }

    #[test]
    fn anywhere_is_everything_also_behind_links_of_procfs() {
        let case = Case::new();
        let file = fs::File::open(case.0.path().join("other/out")).unwrap();
        let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        for file in ["allowed/outside", "allowed/absolute", "other/out", &link] {
            assert_eq!(case.open("/", file), Ok(()), "{file}");
        }
        assert_eq!(case.open("/proc", &link), Err(Refused::LeadsOut));
    }
}
