//! Where the files of VMs may be: below folders that the node's operator allows, and not behind a symbolic link that leads out
//! of them. The kernel decides that while it opens a file (openat2(2)), so that nobody can put another file in its place between
//! a check and the use. Blocking.

use std::{
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{CWD, Mode, OFlags, ResolveFlags},
    io::Errno,
};
use serde::Deserialize;

/// Folders below which the files of VMs may be.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Roots {
    /// Images and block devices that a spec or a request names by path. Default `/`: anywhere.
    pub disks: Vec<PathBuf>,
    /// Kernels and initial RAM disks. Default `/`: anywhere.
    pub kernels: Vec<PathBuf>,
}

impl Default for Roots {
    fn default() -> Self {
        Self {
            disks: vec!["/".into()],
            kernels: vec!["/".into()],
        }
    }
}

impl Roots {
    /// What is wrong with them, if anything.
    pub fn check(&self) -> Result<(), &'static str> {
        let mut all = self.disks.iter().chain(&self.kernels);
        match all.all(|root| root.is_absolute()) {
            true => Ok(()),
            false => Err("must have absolute paths only"),
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
}

/// Why a file can't be opened.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    /// The path is below none of the folders.
    Outside,
    /// It leads out of its folder through a symbolic link, or through one of procfs.
    LeadsOut,
    /// The kernel says so.
    Errno(Errno),
}

impl Refused {
    /// For a message, when it is about the folders: what stands after the path. `key` is that of the configuration.
    pub fn about_roots(&self, within: Within<'_>, key: &str) -> Option<String> {
        let Within::Roots(roots) = within else {
            return None;
        };
        let named: Vec<_> = roots.iter().map(|root| root.display().to_string()).collect();
        match self {
            Self::Outside => Some(format!(
                "is not below a folder that this node allows ({}; roots.{key} in config.toml)",
                named.join(", ")
            )),
            Self::LeadsOut => Some(format!(
                "leads out of its folder through a symbolic link (roots.{key} in config.toml allows {})",
                named.join(", ")
            )),
            Self::Errno(_) => None,
        }
    }
}

/// Opens a file by its absolute path.
pub fn open(path: &Path, within: Within<'_>, flags: OFlags) -> Result<OwnedFd, Refused> {
    let Within::Roots(roots) = within else {
        return rustix::fs::open(path, flags, Mode::empty()).map_err(Refused::Errno);
    };
    let root = roots
        .iter()
        .filter(|root| path.starts_with(root))
        .max_by_key(|root| root.components().count())
        .ok_or(Refused::Outside)?;
    let rest = path.strip_prefix(root).map_err(|_| Refused::Outside)?;
    let anywhere = root.parent().is_none();
    let mut resolve = ResolveFlags::NO_MAGICLINKS;
    if !anywhere {
        resolve |= ResolveFlags::BENEATH;
    }
    // Opened anew each time: the folder may be mounted, or mounted over, while the daemon runs.
    let folder_flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::openat(CWD, root, folder_flags, Mode::empty()).map_err(Refused::Errno)?;
    let rest = if rest.as_os_str().is_empty() {
        Path::new(".")
    } else {
        rest
    };
    match rustix::fs::openat2(&folder, rest, flags, Mode::empty(), resolve) {
        Err(Errno::XDEV | Errno::LOOP) => Err(Refused::LeadsOut),
        // Not in old kernels, and not allowed in some containers.
        Err(Errno::NOSYS) if anywhere => rustix::fs::open(path, flags, Mode::empty()).map_err(Refused::Errno),
        opened => opened.map_err(Refused::Errno),
    }
}

impl From<Refused> for io::Error {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Errno(errno) => errno.into(),
            Refused::Outside => Self::new(io::ErrorKind::PermissionDenied, "not below an allowed folder"),
            Refused::LeadsOut => Self::new(io::ErrorKind::PermissionDenied, "leads out of an allowed folder"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

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
        let case = Case::new();
        for file in ["allowed/in", "allowed/sub/in", "allowed/inside"] {
            assert_eq!(case.open("allowed", file), Ok(()), "{file}");
        }
        for file in ["allowed/outside", "allowed/absolute", "allowed/folder/out"] {
            assert_eq!(case.open("allowed", file), Err(Refused::LeadsOut), "{file}");
        }
        assert_eq!(case.open("allowed", "other/out"), Err(Refused::Outside));
        // A name that begins like the folder's.
        assert_eq!(case.open("allow", "allowed/in"), Err(Refused::Outside));
        assert_eq!(
            case.open("allowed", "allowed/none"),
            Err(Refused::Errno(Errno::NOENT))
        );
    }

    #[test]
    fn anywhere_is_everything_but_links_of_procfs() {
        let case = Case::new();
        for file in ["allowed/outside", "allowed/absolute", "other/out"] {
            assert_eq!(case.open("/", file), Ok(()), "{file}");
        }
        let file = fs::File::open(case.0.path().join("other/out")).unwrap();
        let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        assert_eq!(case.open("/", &link), Err(Refused::LeadsOut));
    }
}
