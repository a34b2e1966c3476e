//! Replacement for openat2(2) with RESOLVE_BENEATH and RESOLVE_NO_MAGICLINKS, and with
//! RESOLVE_NO_SYMLINKS when links are refused, for systems that forbid that call. A filter of
//! system calls cannot read the call's structure. The filter of systemd's `RestrictSUIDSGID=`,
//! which the daemon's unit has, therefore refuses it with ENOSYS.
//!
//! The walk opens the path name by name. Invariants during concurrent renames and replacements:
//!
//! - The kernel receives single names only, never `..`, and follows no symbolic link (O_NOFOLLOW).
//! - The target of a link is read from the open link, and its names are walked from the folder of
//!   the link. An absolute target is refused, and so are all magic links of procfs.
//! - All folders on the way stay open. `..` returns to the previous folder of the walk, and before
//!   the first one it is refused.

use std::{
    ffi::{OsStr, OsString},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Component, Path},
};

use rustix::{
    fs::{FileType, Mode, OFlags},
    io::Errno,
};

use super::Links;

/// Links on the way, as Linux allows them (path_resolution(7)), and names that something else took while they were opened.
const MAX_LINKS: u32 = 40;
/// Folders on the way. Each is a descriptor of the daemon for that long.
const MAX_DEPTH: usize = 256;

/// Opens `rest` beneath `folder`. XDEV says that it leads out, LOOP that there are too many links, or one where they are refused, NAMETOOLONG that
/// it is too deep.
pub(super) fn open(
    folder: BorrowedFd<'_>,
    rest: &Path,
    flags: OFlags,
    links: Links,
) -> Result<OwnedFd, Errno> {
    // Where the walk is, and the folders that it has come through.
    let mut folders: Vec<OwnedFd> = Vec::new();
    // The last one is walked next.
    let mut names = Vec::new();
    put(&mut names, rest)?;
    let mut followed = 0;
    loop {
        let here = folders.last().map_or(folder, OwnedFd::as_fd);
        let Some(name) = names.pop() else {
            return rustix::fs::openat(here, ".", flags, Mode::empty());
        };
        if name == ".." {
            folders.pop().ok_or(Errno::XDEV)?;
            continue;
        }
        // With O_DIRECTORY the kernel mounts what an automounter has there.
        match rustix::fs::openat(here, &name, LOOK | OFlags::DIRECTORY, Mode::empty()) {
            Ok(_) if folders.len() == MAX_DEPTH => return Err(Errno::NAMETOOLONG),
            Ok(found) => {
                folders.push(found);
                continue;
            }
            Err(Errno::NOTDIR) => {}
            Err(errno) => return Err(errno),
        }
        let found = rustix::fs::openat(here, &name, LOOK, Mode::empty())?;
        match FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) {
            FileType::Symlink if links == Links::Refused => return Err(Errno::LOOP),
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(&found, "", Vec::new())?;
                put(&mut names, Path::new(OsStr::from_bytes(target.to_bytes())))?;
            }
            // It has come this very moment.
            FileType::Directory => names.push(name),
            _ if !names.is_empty() || flags.contains(OFlags::DIRECTORY) => return Err(Errno::NOTDIR),
            _ if flags.contains(OFlags::PATH) => return Ok(found),
            _ => match rustix::fs::openat(here, &name, flags | OFlags::NOFOLLOW, Mode::empty()) {
                // A link has taken its place.
                Err(Errno::LOOP) => names.push(name),
                opened => return opened,
            },
        }
        followed += 1;
        if followed > MAX_LINKS {
            return Err(Errno::LOOP);
        }
    }
}

/// Opens the object of this name itself, of any type, without following a link.
const LOOK: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Puts the names of a path before the remaining names.
fn put(names: &mut Vec<OsString>, path: &Path) -> Result<(), Errno> {
    for component in path.components().rev() {
        match component {
            Component::Normal(name) => names.push(name.to_owned()),
            Component::ParentDir => names.push("..".into()),
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return Err(Errno::XDEV),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
