//! Opens the directory of a share.

use std::os::fd::OwnedFd;

use rustix::fs::{OFlags, fstat};
use vmmd_host::{
    failure::Failure,
    roots::{self, Refused, Within},
    text,
};
use vmmd_spec::share::{IdRange, Share, Source};

use super::{PATH_NOT_ALLOWED, Sources, pod};

/// Open directory of a share. A later replacement of the path has no effect.
#[derive(Debug)]
pub struct Opened {
    /// The directory itself.
    pub directory: OwnedFd,
    /// User ids of the guest and of the node.
    pub uids: Vec<IdRange>,
    /// The same of groups.
    pub gids: Vec<IdRange>,
    /// All users of the guest are the one of `uids`.
    pub squash: bool,
    /// Which directory it is.
    pub inode: Inode,
}

/// Which directory something is, while it is open somewhere: device and inode number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inode(pub u64, pub u64);

/// Opens the directory of a share: below one of the folders that the node's configuration allows, or a volume of the VM's pod. Refused
/// as PATH_NOT_ALLOWED, SHARE_NOT_USABLE, SHARE_OWNED_BY_ROOT, POD_NOT_CONNECTED or POD_VOLUME_NOT_FOUND. Blocking.
pub fn open(share: &Share, sources: &Sources<'_>) -> Result<Opened, Failure> {
    let (pod, path, within) = match &share.source {
        Source::Path(path) => (None, path.clone(), Within::NoLinks(&sources.roots.shares)),
        Source::Pod(volume) => {
            let (pod, path) = pod::share_folder(volume, sources)?;
            (Some(pod), path, Within::Own)
        }
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory =
        roots::open(&path, within, flags).map_err(|refused| not_opened(share, &refused, within))?;
    // The path has led to its descriptor.
    drop(pod);
    let stat = fstat(&directory).map_err(|errno| not_opened(share, &Refused::Errno(errno), within))?;
    let inode = Inode(stat.st_dev, stat.st_ino);
    if !share.uids.is_empty() {
        return Ok(Opened {
            directory,
            uids: share.uids.clone(),
            gids: share.gids.clone(),
            squash: false,
            inode,
        });
    }
    if stat.st_uid == 0 || stat.st_gid == 0 {
        let message = format!(
            "share \"{}\": the directory belongs to the node's root user or group, which no guest acts as: give it to another user \
             and group (chown), or give the share `uidMap` and `gidMap`",
            share.name
        );
        return Err(Failure::precondition("SHARE_OWNED_BY_ROOT", message));
    }
    let only = |node| {
        vec![IdRange {
            guest: 0,
            node,
            count: 1,
        }]
    };
    Ok(Opened {
        directory,
        uids: only(stat.st_uid),
        gids: only(stat.st_gid),
        squash: true,
        inode,
    })
}

/// The directory is not there, or is no directory.
pub const NOT_USABLE: &str = "SHARE_NOT_USABLE";

fn not_opened(share: &Share, refused: &Refused, within: Within<'_>) -> Failure {
    let name = &share.name;
    if let Some(about) = refused.about_roots(within, "shares") {
        return Failure::precondition(PATH_NOT_ALLOWED, format!("share \"{name}\": its path {about}"));
    }
    let error = match refused {
        Refused::Errno(errno) => text::words(&(*errno).into()),
        _ => "it is not below an allowed folder".to_owned(),
    };
    let message = format!("share \"{name}\": its directory can't be opened: {error}");
    Failure::precondition(NOT_USABLE, message)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, path::Path};

    use vmmd_api::v1;
    use vmmd_host::{
        ledger::{Ledger, UidRange},
        roots::Roots,
    };
    use vmmd_spec::Violations;

    use super::*;
    use crate::{
        paths::disk::Folder,
        registry::{disks::Disks, pods::Pods},
    };

    fn share(path: &Path, map: &[v1::IdRange]) -> Share {
        let wire = v1::ShareSpec {
            name: "data".into(),
            path: path.display().to_string(),
            uid_map: map.to_vec(),
            gid_map: map.to_vec(),
            ..Default::default()
        };
        Share::new(&mut Violations::default(), "", &wire).unwrap()
    }

    const MAP: [v1::IdRange; 1] = [v1::IdRange {
        guest: 0,
        node: 100_000,
        count: 65_536,
    }];

    fn reason(path: &Path, allowed: &Path) -> Option<&'static str> {
        let found = open_below(&share(path, &MAP), allowed);
        found.err().map(|failure| failure.reason)
    }

    fn open_below(share: &Share, allowed: &Path) -> Result<Opened, Failure> {
        let roots = Roots {
            shares: vec![allowed.to_owned()],
            ..Roots::default()
        };
        let sources = Sources {
            ledger: &Ledger::new(UidRange::default()),
            disks: &Disks::default(),
            pods: &Pods::default(),
            folder: Folder::of(allowed),
            roots: &roots,
        };
        open(share, &sources)
    }

    #[test]
    fn directory_is_opened_without_following_links() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("srv/data/sub")).unwrap();
        fs::create_dir(at("secret")).unwrap();
        fs::write(at("srv/file"), "").unwrap();
        symlink("data", at("srv/inside")).unwrap();
        symlink("../secret", at("srv/outside")).unwrap();
        symlink(at("secret"), at("srv/data/absolute")).unwrap();
        let srv = at("srv");
        for path in ["srv", "srv/data", "srv/data/sub"] {
            assert_eq!(reason(&at(path), &srv), None, "{path}");
        }
        for path in [
            "secret",
            "srv/inside",
            "srv/inside/sub",
            "srv/outside",
            "srv/data/absolute",
            "srvx",
        ] {
            assert_eq!(reason(&at(path), &srv), Some("PATH_NOT_ALLOWED"), "{path}");
        }
        for path in ["srv/file", "srv/none"] {
            assert_eq!(reason(&at(path), &srv), Some("SHARE_NOT_USABLE"), "{path}");
        }
    }

    #[test]
    fn without_maps_the_guest_is_the_owner_and_never_root() {
        let folder = tempfile::tempdir().unwrap();
        let allowed = folder.path();
        let plain = share(folder.path(), &[]);
        let own = rustix::process::getuid();
        if !own.is_root() {
            let opened = open_below(&plain, allowed).unwrap();
            assert_eq!((opened.uids[0].node, opened.squash), (own.as_raw(), true));
            return;
        }
        assert_eq!(
            open_below(&plain, allowed).unwrap_err().reason,
            "SHARE_OWNED_BY_ROOT"
        );
        std::os::unix::fs::chown(folder.path(), Some(1234), Some(0)).unwrap();
        assert_eq!(
            open_below(&plain, allowed).unwrap_err().reason,
            "SHARE_OWNED_BY_ROOT"
        );
        std::os::unix::fs::chown(folder.path(), Some(1234), Some(1235)).unwrap();
        let opened = open_below(&plain, allowed).unwrap();
        let ids = |ranges: &[IdRange]| (ranges[0].guest, ranges[0].node, ranges[0].count);
        assert_eq!(ids(&opened.uids), (0, 1234, 1));
        assert_eq!(ids(&opened.gids), (0, 1235, 1));
        let mapped = open_below(&share(folder.path(), &MAP), allowed).unwrap();
        assert_eq!((ids(&mapped.uids), mapped.squash), ((0, 100_000, 65_536), false));
    }
}
