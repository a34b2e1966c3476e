//! Directories of the node that guests mount: what is shared, and the processes that serve it.
//!
//! Each share of a running VM is served by a `virtiofsd` of its own, which the daemon starts before the `vmm` and hands a
//! connection to. It runs in the VM's cgroup and in namespaces of its own (users, processes, network), with its root in the shared directory,
//! as a user that is never the node's root. It ends when its `vmm` does: that closes the connection. [`keeper`] makes it anew when it
//! ends before.

mod keeper;
mod process;

use std::{os::fd::OwnedFd, path::PathBuf, sync::Arc};

use proto::model::{
    share::{IdRange, Share},
    vm::VmSpec,
};
use rustix::fs::{OFlags, fstat};

pub use self::{
    keeper::Keepers,
    process::{Serving, serve},
};
use tokio::task::spawn_blocking;

use crate::{
    capacity::placement::Problem,
    failure::Failure,
    files::PATH_NOT_ALLOWED,
    host::Host,
    roots::{self, Refused, Within},
    text,
};

/// A directory that is to be shared, opened: nobody can put another one in its place any more.
#[derive(Debug)]
pub struct Opened {
    directory: OwnedFd,
    uids: Vec<IdRange>,
    gids: Vec<IdRange>,
    /// All users of the guest are the one of `uids`.
    squash: bool,
    /// Which directory it is.
    inode: Inode,
}

/// Which directory something is, while it is open somewhere: device and inode number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inode(u64, u64);

/// Opens the directory of a share below one of the folders `allowed`. Refused as PATH_NOT_ALLOWED, SHARE_NOT_USABLE or
/// SHARE_OWNED_BY_ROOT. Blocking.
pub fn open(share: &Share, allowed: &[PathBuf]) -> Result<Opened, Failure> {
    let within = Within::Roots(allowed);
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory =
        roots::open(&share.path, within, flags).map_err(|refused| not_opened(share, &refused, within))?;
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

/// What is wrong with the directories of a spec that are there, but for those that `had` shares too. One that is not there yet may come until the
/// start.
pub async fn check(host: &Arc<Host>, spec: &VmSpec, had: Option<&VmSpec>) -> Result<Vec<Problem>, Failure> {
    let had: Vec<_> = had.iter().flat_map(|had| &had.shares).cloned().collect();
    let numbered = spec.shares.iter().cloned().enumerate();
    let fresh: Vec<_> = numbered.filter(|(_, share)| !had.contains(share)).collect();
    if fresh.is_empty() {
        return Ok(Vec::new());
    }
    let host = Arc::clone(host);
    let looked = spawn_blocking(move || {
        let problem = |(index, share): (usize, Share)| {
            let failure = open(&share, &host.config.roots.shares).err()?;
            (failure.reason != NOT_USABLE).then(|| Problem::of(failure, format!("spec.shares[{index}]")))
        };
        fresh.into_iter().filter_map(problem).collect()
    });
    looked.await.map_err(|error| Failure::internal(error.to_string()))
}

/// The directory is not there, or is no directory.
const NOT_USABLE: &str = "SHARE_NOT_USABLE";

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

    use proto::{model::Violations, v1};

    use super::*;

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
        open(&share(path, &MAP), &[allowed.to_owned()])
            .err()
            .map(|failure| failure.reason)
    }

    #[test]
    fn a_directory_below_the_folders_is_opened_and_no_link_leads_out_of_them() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("srv/data/sub")).unwrap();
        fs::create_dir(at("secret")).unwrap();
        fs::write(at("srv/file"), "").unwrap();
        symlink("data", at("srv/inside")).unwrap();
        symlink("../secret", at("srv/outside")).unwrap();
        symlink(at("secret"), at("srv/data/absolute")).unwrap();
        let srv = at("srv");
        for path in ["srv", "srv/data", "srv/data/sub", "srv/inside"] {
            assert_eq!(reason(&at(path), &srv), None, "{path}");
        }
        for path in ["secret", "srv/outside", "srv/data/absolute", "srvx"] {
            assert_eq!(reason(&at(path), &srv), Some("PATH_NOT_ALLOWED"), "{path}");
        }
        for path in ["srv/file", "srv/none"] {
            assert_eq!(reason(&at(path), &srv), Some("SHARE_NOT_USABLE"), "{path}");
        }
    }

    #[test]
    fn without_maps_the_guest_is_the_owner_and_never_root() {
        let folder = tempfile::tempdir().unwrap();
        let allowed = [folder.path().to_owned()];
        let plain = share(folder.path(), &[]);
        let own = rustix::process::getuid();
        if !own.is_root() {
            let opened = open(&plain, &allowed).unwrap();
            assert_eq!((opened.uids[0].node, opened.squash), (own.as_raw(), true));
            return;
        }
        assert_eq!(open(&plain, &allowed).unwrap_err().reason, "SHARE_OWNED_BY_ROOT");
        std::os::unix::fs::chown(folder.path(), Some(1234), Some(0)).unwrap();
        assert_eq!(open(&plain, &allowed).unwrap_err().reason, "SHARE_OWNED_BY_ROOT");
        std::os::unix::fs::chown(folder.path(), Some(1234), Some(1235)).unwrap();
        let opened = open(&plain, &allowed).unwrap();
        let ids = |ranges: &[IdRange]| (ranges[0].guest, ranges[0].node, ranges[0].count);
        assert_eq!(ids(&opened.uids), (0, 1234, 1));
        assert_eq!(ids(&opened.gids), (0, 1235, 1));
        let mapped = open(&share(folder.path(), &MAP), &allowed).unwrap();
        assert_eq!((ids(&mapped.uids), mapped.squash), ((0, 100_000, 65_536), false));
    }
}
