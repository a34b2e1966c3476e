//! State directory of a VM: vmmd writes files about the VM there. vmmd opens it beneath the allowed
//! folders of shares. Its owner, and a guest that mounts it, may change its content at any time.
//! vmmd therefore writes a new file with a temporary name and renames it. It never follows a link,
//! and a reader sees the old file or the complete new one.

use std::{
    fs::File,
    io::{self, Write},
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, Gid, Mode, OFlags, Uid, fchmod, fchown, fstat, openat, renameat, unlinkat},
    io::Errno,
};
use vmmd_host::{
    failure::Failure,
    roots::{self, Refused, Within},
    text,
};

use super::PATH_NOT_ALLOWED;

/// The directory is not there, or is no directory.
pub const NOT_USABLE: &str = "STATE_DIR_NOT_USABLE";
/// Of a file: its owner reads and writes it, the directory's group reads it.
const MODE: u32 = 0o640;

/// An open directory.
#[derive(Debug)]
pub struct StateDir {
    directory: OwnedFd,
    /// Owner and group of the directory and of its files.
    owner: (Uid, Gid),
}

impl StateDir {
    /// Opens it below one of the folders `allowed`. Refused as PATH_NOT_ALLOWED or STATE_DIR_NOT_USABLE. Blocking.
    pub fn open(path: &Path, allowed: &[PathBuf]) -> Result<Self, Failure> {
        let within = Within::NoLinks(allowed);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = roots::open(path, within, flags).and_then(|directory| {
            let stat = fstat(&directory).map_err(Refused::Errno)?;
            Ok((directory, stat))
        });
        let (directory, stat) = opened.map_err(|refused| not_opened(&refused, within))?;
        Ok(Self {
            directory,
            owner: (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid)),
        })
    }

    /// Atomically replaces the file `name` with this content. Blocking.
    pub fn write(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let new = format!(".{name}.new");
        self.remove(&new)?;
        let written = self.write_new(&new, content).and_then(|()| {
            renameat(&self.directory, &new, &self.directory, name)?;
            Ok(())
        });
        if written.is_err() {
            self.remove(&new)?;
        }
        written
    }

    fn write_new(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&self.directory, name, flags, Mode::RUSR | Mode::WUSR)?;
        let mut file = File::from(file);
        file.write_all(content)?;
        fchown(file.as_fd(), Some(self.owner.0), Some(self.owner.1))?;
        fchmod(file.as_fd(), Mode::from_raw_mode(MODE))?;
        file.sync_data()
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match unlinkat(&self.directory, name, AtFlags::empty()) {
            Err(errno) if errno != Errno::NOENT => Err(errno.into()),
            _ => Ok(()),
        }
    }
}

fn not_opened(refused: &Refused, within: Within<'_>) -> Failure {
    if let Some(about) = refused.about_roots(within, "shares") {
        return Failure::precondition(PATH_NOT_ALLOWED, format!("spec.stateDir {about}"));
    }
    let error = match refused {
        Refused::Errno(errno) => text::words(&(*errno).into()),
        _ => "it is not below an allowed folder".to_owned(),
    };
    Failure::precondition(
        NOT_USABLE,
        format!("spec.stateDir: the directory can't be opened ({error}): make it, or name another one"),
    )
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    };

    use super::*;

    fn reason(path: &Path, allowed: &Path) -> Option<&'static str> {
        let opened = StateDir::open(path, &[allowed.to_owned()]);
        opened.err().map(|failure| failure.reason)
    }

    #[test]
    fn directory_is_opened_without_following_links() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("srv/job")).unwrap();
        fs::create_dir(at("secret")).unwrap();
        fs::write(at("srv/file"), "").unwrap();
        symlink("../secret", at("srv/outside")).unwrap();
        symlink("job", at("srv/inside")).unwrap();
        for (path, expected) in [
            ("srv/job", None),
            ("secret", Some("PATH_NOT_ALLOWED")),
            ("srv/outside", Some("PATH_NOT_ALLOWED")),
            ("srv/inside", Some("PATH_NOT_ALLOWED")),
            ("srv/job/../../secret", Some("PATH_NOT_ALLOWED")),
            ("srv/file", Some("STATE_DIR_NOT_USABLE")),
            ("srv/none", Some("STATE_DIR_NOT_USABLE")),
        ] {
            assert_eq!(reason(&at(path), &at("srv")), expected, "{path}");
        }
    }

    #[test]
    fn file_has_the_owner_of_its_folder_and_is_replaced_whole() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let is_root = rustix::process::getuid().is_root();
        if is_root {
            std::os::unix::fs::chown(folder.path(), Some(1234), Some(1235)).unwrap();
        }
        let expected = fs::metadata(folder.path()).unwrap();
        let dir = StateDir::open(folder.path(), &[folder.path().to_owned()]).unwrap();
        dir.write("vm.json", b"one").unwrap();
        let mut reader = File::open(at("vm.json")).unwrap();
        dir.write("vm.json", b"two").unwrap();
        assert_eq!(io::read_to_string(&mut reader).unwrap(), "one");
        assert_eq!(fs::read_to_string(at("vm.json")).unwrap(), "two");
        let is = fs::metadata(at("vm.json")).unwrap();
        assert_eq!((is.uid(), is.gid()), (expected.uid(), expected.gid()));
        assert_eq!(is.permissions().mode() & 0o7777, MODE);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn links_instead_of_files_are_replaced_and_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("job")).unwrap();
        fs::write(at("secret"), "secret").unwrap();
        for name in ["vm.json", ".vm.json.new"] {
            symlink("../secret", at("job").join(name)).unwrap();
        }
        let dir = StateDir::open(&at("job"), &[folder.path().to_owned()]).unwrap();
        dir.write("vm.json", b"new").unwrap();
        assert_eq!(fs::read_to_string(at("secret")).unwrap(), "secret");
        assert!(fs::symlink_metadata(at("job/vm.json")).unwrap().is_file());
        // A directory at the path stays, and no temporary file remains.
        fs::remove_file(at("job/vm.json")).unwrap();
        fs::create_dir(at("job/vm.json")).unwrap();
        assert!(dir.write("vm.json", b"new").is_err());
        assert_eq!(fs::read_dir(at("job")).unwrap().count(), 1);
    }
}
