//! Opens a path beneath a folder without openat2(2), name by name. A filter of system calls can't see what is in that call's structure, so the one of
//! systemd's `RestrictSUIDSGID=`, which the daemon's unit has, answers it with ENOSYS.
//!
//! Each folder on the way is held open, and `..` goes back to the one that the walk has come from, never to one that the kernel finds. No link is followed by the
//! kernel: its target is read and walked, from the folder that it is in. So whatever is renamed or replaced meanwhile, the walk stays beneath the folder.

use std::{
    ffi::{OsStr, OsString},
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Component, Path},
};

use rustix::{
    fs::{FileType, Mode, OFlags},
    io::Errno,
};

use super::roots::Refused;

/// Links on the way, as Linux allows them (path_resolution(7)).
const MAX_LINKS: u32 = 40;

/// Opens `rest` beneath `folder`.
pub(super) fn open(folder: OwnedFd, rest: &Path, flags: OFlags) -> Result<OwnedFd, Refused> {
    // The last is where the walk is.
    let mut folders = vec![folder];
    // The next name is the last.
    let mut names = Vec::new();
    put(&mut names, rest)?;
    let mut links = 0;
    while let Some(here) = folders.last() {
        let Some(name) = names.pop() else {
            return rustix::fs::openat(here, ".", flags, Mode::empty()).map_err(Refused::Errno);
        };
        if name == ".." {
            folders.pop();
            continue;
        }
        let look = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let entry = rustix::fs::openat(here, &name, look, Mode::empty()).map_err(Refused::Errno)?;
        let stat = rustix::fs::fstat(&entry).map_err(Refused::Errno)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Symlink => {
                links += 1;
                if links > MAX_LINKS {
                    return Err(Refused::Errno(Errno::LOOP));
                }
                let target = rustix::fs::readlinkat(&entry, "", Vec::new()).map_err(Refused::Errno)?;
                put(&mut names, Path::new(OsStr::from_bytes(target.to_bytes())))?;
            }
            FileType::Directory => folders.push(entry),
            _ if names.is_empty() => {
                let opened = rustix::fs::openat(here, &name, flags | OFlags::NOFOLLOW, Mode::empty());
                return opened.map_err(|errno| match errno {
                    // A link has taken its place.
                    Errno::LOOP => Refused::LeadsOut,
                    errno => Refused::Errno(errno),
                });
            }
            _ => return Err(Refused::Errno(Errno::NOTDIR)),
        }
    }
    // A `..` of the folder itself.
    Err(Refused::LeadsOut)
}

/// Puts the names of a path before those that are left.
fn put(names: &mut Vec<OsString>, path: &Path) -> Result<(), Refused> {
    for component in path.components().rev() {
        match component {
            Component::Normal(name) => names.push(name.to_owned()),
            Component::ParentDir => names.push("..".into()),
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return Err(Refused::LeadsOut),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::symlink,
        sync::atomic::{AtomicBool, Ordering},
        thread,
    };

    use rustix::fs::ResolveFlags;

    use super::*;

    /// What the kernel says of the same.
    fn by_kernel(folder: &OwnedFd, rest: &Path, flags: OFlags) -> Result<OwnedFd, Refused> {
        let resolve = ResolveFlags::NO_MAGICLINKS | ResolveFlags::BENEATH;
        rustix::fs::openat2(folder, rest, flags, Mode::empty(), resolve).map_err(|errno| match errno {
            Errno::XDEV => Refused::LeadsOut,
            errno => Refused::Errno(errno),
        })
    }

    fn folder(path: &Path) -> OwnedFd {
        rustix::fs::open(
            path,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .unwrap()
    }

    #[test]
    fn each_path_leads_where_the_kernel_would_lead_it() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        fs::create_dir_all(at("in/sub/deep")).unwrap();
        fs::create_dir(at("out")).unwrap();
        for file in ["in/file", "in/sub/file", "in/sub/deep/file", "out/secret"] {
            fs::write(at(file), file).unwrap();
        }
        for (target, link) in [
            ("sub", "in/link"),
            ("sub/../sub/deep", "in/around"),
            ("../file", "in/sub/up"),
            ("../../out", "in/sub/escape"),
            ("../out/secret", "in/secret"),
            ("deep/../../../out", "in/sub/far"),
            ("/", "in/absolute"),
            ("/proc/self/root", "in/magic"),
            ("none", "in/dangling"),
            ("loop", "in/loop"),
            (".", "in/here"),
        ] {
            symlink(target, at(link)).unwrap();
        }
        let inside = folder(&at("in"));
        let same = |one: &OwnedFd, other: &OwnedFd| {
            let (one, other) = (rustix::fs::fstat(one).unwrap(), rustix::fs::fstat(other).unwrap());
            assert_eq!((one.st_dev, one.st_ino), (other.st_dev, other.st_ino));
        };
        let paths = [
            ".",
            "file",
            "sub",
            "sub/file",
            "sub/deep/file",
            "link/file",
            "around/file",
            "sub/up",
            "sub/escape",
            "sub/escape/secret",
            "secret",
            "sub/far",
            "absolute",
            "magic",
            "magic/etc",
            "dangling",
            "loop",
            "here/here/file",
            "sub/../file",
            "..",
            "../out",
            "sub/../../out",
            "file/below",
            "file/..",
            "none",
            "none/..",
            "link/..",
            "link/../file",
            "around/../../..",
            "here/..",
        ];
        for path in paths {
            for flags in [
                OFlags::PATH | OFlags::DIRECTORY,
                OFlags::RDONLY,
                OFlags::RDWR,
                OFlags::PATH,
            ] {
                let flags = flags | OFlags::CLOEXEC;
                let kernel = by_kernel(&inside, Path::new(path), flags);
                let walked = open(inside.try_clone().unwrap(), Path::new(path), flags);
                match (&kernel, &walked) {
                    (Ok(one), Ok(other)) => same(one, other),
                    (one, other) => assert_eq!(one.as_ref().err(), other.as_ref().err(), "{path} {flags:?}"),
                }
            }
        }
    }

    #[test]
    fn whatever_is_renamed_meanwhile_nothing_outside_is_opened() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        fs::create_dir_all(at("in/a/b/c")).unwrap();
        fs::create_dir_all(at("out/b/c")).unwrap();
        fs::write(at("in/name"), "inside").unwrap();
        fs::write(at("in/a/name"), "inside").unwrap();
        fs::write(at("in/a/b/name"), "inside").unwrap();
        fs::write(at("name"), "outside").unwrap();
        fs::write(at("out/name"), "outside").unwrap();
        fs::write(at("out/b/name"), "outside").unwrap();
        let over = AtomicBool::new(false);
        let mut opened = 0;
        thread::scope(|scope| {
            let (over, at) = (&over, &at);
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    // A folder of the way moves out, and a link takes its place.
                    let _ = fs::rename(at("in/a/b"), at("moved"));
                    let _ = symlink("../../out/b", at("in/a/b"));
                    let _ = fs::remove_file(at("in/a/b"));
                    let _ = fs::rename(at("moved"), at("in/a/b"));
                }
            });
            for _ in 0..20_000 {
                for path in ["a/b/name", "a/b/c/../../name", "a/b/c/../name"] {
                    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
                    if let Ok(file) = open(folder(&at("in")), Path::new(path), flags) {
                        let text = std::io::read_to_string(fs::File::from(file)).unwrap();
                        assert_eq!(text, "inside", "{path}");
                        opened += 1;
                    }
                }
            }
            over.store(true, Ordering::Relaxed);
        });
        assert!(opened > 0);
    }
}
