//! The pod as the launcher passes it to vmmd: descriptors of the network namespace and the volumes, files of Secrets and ConfigMaps,
//! and the content of resolv.conf. All of it is gathered once.

use std::{
    fs::{self, File},
    io::{self, Read},
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, StatVfsMountFlags};
use vmmd_pod::{
    FIXED_FDS, MAX_DOMAIN, MAX_FILE, MAX_FILES, MAX_FILES_TOTAL, MAX_SEARCH, MAX_SERVERS, MAX_VOLUMES,
    message::{Resolver, Volume},
};

/// See the module.
#[derive(Debug)]
pub struct Pod {
    network: OwnedFd,
    /// Volumes with their descriptors.
    volumes: Vec<(Volume, OwnedFd)>,
    /// Path and content.
    pub files: Vec<(String, Vec<u8>)>,
    /// Of resolv.conf.
    pub resolver: Resolver,
}

impl Pod {
    /// Gathers all below `folder`. The error names the fault of the pod.
    pub fn gather(folder: &Path) -> Result<Self, String> {
        let path = "/proc/self/ns/net";
        let network = File::open(path).map_err(|error| format!("open {path}: {error}"))?;
        let mut volumes = volumes(&folder.join("volumes"), false)?;
        volumes.extend(self::volumes(&folder.join("devices"), true)?);
        if volumes.len() > MAX_VOLUMES {
            return Err(format!(
                "the pod has {} volumes: at most {MAX_VOLUMES} are possible",
                volumes.len()
            ));
        }
        let resolv_conf = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
        Ok(Self {
            network: network.into(),
            volumes,
            files: files(&folder.join("secrets"))?,
            resolver: resolver(&resolv_conf),
        })
    }

    /// The volumes, in the order of their descriptors.
    pub fn volumes(&self) -> Vec<Volume> {
        self.volumes.iter().map(|(volume, _)| volume.clone()).collect()
    }

    /// The descriptors of Hello.
    pub fn descriptors<'a>(&'a self, lifeline: BorrowedFd<'a>) -> Vec<BorrowedFd<'a>> {
        let mut fds = Vec::with_capacity(FIXED_FDS + self.volumes.len());
        fds.extend([self.network.as_fd(), lifeline]);
        fds.extend(self.volumes.iter().map(|(_, fd)| fd.as_fd()));
        fds
    }
}

/// Names of a folder's entries, sorted; none when there is no folder.
fn names(folder: &Path) -> Result<Vec<String>, String> {
    let failed = |error: io::Error| format!("read {}: {error}", folder.display());
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry.map_err(failed)?.file_name();
        let name = name.into_string().map_err(|name| {
            let name = name.display();
            format!("{}: the name \"{name}\" is not UTF-8", folder.display())
        })?;
        names.push(name);
    }
    names.sort();
    Ok(names)
}

/// The mounted directories, or the block devices, in `folder`. O_PATH needs no permission on the content.
fn volumes(folder: &Path, devices: bool) -> Result<Vec<(Volume, OwnedFd)>, String> {
    let mut volumes = Vec::new();
    for name in names(folder)? {
        let path = folder.join(&name);
        let opened = || {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let fd = rustix::fs::open(&path, flags, Mode::empty())?;
            let kind = FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode);
            let mount = rustix::fs::fstatvfs(&fd)?;
            Ok::<_, rustix::io::Errno>((kind, mount.f_flag.contains(StatVfsMountFlags::RDONLY), fd))
        };
        let (kind, read_only, fd) = opened().map_err(|error| format!("open {}: {error}", path.display()))?;
        match (devices, kind) {
            (false, FileType::Directory) | (true, FileType::BlockDevice) => {}
            (false, _) => return Err(format!("{} is not a directory", path.display())),
            (true, _) => return Err(format!("{} is not a block device", path.display())),
        }
        let volume = Volume {
            name,
            block_device: devices,
            // The node of a device is in the container's own file system, whose mount says nothing about the device.
            read_only: read_only && !devices,
        };
        volumes.push((volume, fd));
    }
    Ok(volumes)
}

/// Files of Secrets and ConfigMaps: `NAME/KEY` below `folder`.
fn files(folder: &Path) -> Result<Vec<(String, Vec<u8>)>, String> {
    let (mut files, mut total) = (Vec::new(), 0);
    for name in names(folder)? {
        let folder = folder.join(&name);
        let opened = rustix::fs::open(
            &folder,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        );
        let opened = opened.map_err(|error| format!("open {}: {error}", folder.display()))?;
        // The kubelet keeps the content in folders such as `..data`, to which the names of the keys are links.
        for key in names(&folder)?.into_iter().filter(|key| !key.starts_with("..")) {
            let path = format!("{name}/{key}");
            let content = content(&opened, &key).map_err(|error| format!("secret {path}: {error}"))?;
            let Some(content) = content else { continue };
            total += content.len();
            files.push((path, content));
        }
    }
    if files.len() > MAX_FILES || total > MAX_FILES_TOTAL {
        return Err(format!(
            "the pod's Secrets and ConfigMaps have {} keys with {total} bytes: at most {MAX_FILES} keys with {MAX_FILES_TOTAL} bytes \
             are possible",
            files.len()
        ));
    }
    Ok(files)
}

/// Content of the regular file `key` in a folder, with links within the folder's mount; `None` for anything but a file.
fn content(folder: &OwnedFd, key: &str) -> io::Result<Option<Vec<u8>>> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let within = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
    let file = File::from(rustix::fs::openat2(folder, key, flags, Mode::empty(), within)?);
    if !file.metadata()?.is_file() {
        return Ok(None);
    }
    let mut content = Vec::new();
    file.take(MAX_FILE as u64 + 1).read_to_end(&mut content)?;
    if content.len() > MAX_FILE {
        let message = format!("has more than {MAX_FILE} bytes");
        return Err(io::Error::other(message));
    }
    Ok(Some(content))
}

/// Reads resolv.conf(5): lines `nameserver` and the last line `search` or `domain`.
fn resolver(text: &str) -> Resolver {
    let mut resolver = Resolver::default();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("nameserver") => {
                let server = words.next().filter(|word| word.parse::<IpAddr>().is_ok());
                resolver.servers.extend(server.map(str::to_owned));
            }
            Some("search" | "domain") => {
                let domains = words.filter(|domain| domain.len() <= MAX_DOMAIN);
                resolver.search = domains.take(MAX_SEARCH).map(str::to_owned).collect();
            }
            _ => {}
        }
    }
    resolver.servers.truncate(MAX_SERVERS);
    resolver
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn resolver_has_servers_and_the_last_search_list() {
        let found = resolver(
            "# by the kubelet\nsearch old\nnameserver 10.96.0.10\nnameserver fe80::1%eth0\nnameserver fd00::a\n\
             search ns.svc.cluster.local cluster.local\noptions ndots:5\n",
        );
        assert_eq!(found.servers, ["10.96.0.10", "fd00::a"]);
        assert_eq!(found.search, ["ns.svc.cluster.local", "cluster.local"]);
    }

    #[test]
    fn keys_of_secrets_follow_the_links_of_the_kubelet_only() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join("secrets").join(name);
        fs::create_dir_all(at("init/..2026")).unwrap();
        fs::create_dir_all(at("init/folder")).unwrap();
        fs::write(at("init/..2026/userData"), "#cloud-config\n").unwrap();
        symlink("..2026", at("init/..data")).unwrap();
        symlink("..data/userData", at("init/userData")).unwrap();
        let pod = Pod::gather(folder.path()).unwrap();
        assert_eq!(
            pod.files,
            [("init/userData".to_owned(), b"#cloud-config\n".to_vec())]
        );
        symlink("/etc/passwd", at("init/out")).unwrap();
        let refused = Pod::gather(folder.path()).unwrap_err();
        assert!(refused.starts_with("secret init/out"), "{refused}");
    }

    #[test]
    fn files_and_volumes_beyond_the_bounds_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("secrets/a")).unwrap();
        fs::write(at("secrets/a/b"), vec![0; MAX_FILE]).unwrap();
        assert!(Pod::gather(folder.path()).is_ok());
        fs::write(at("secrets/a/b"), vec![0; MAX_FILE + 1]).unwrap();
        let refused = Pod::gather(folder.path()).unwrap_err();
        assert!(refused.contains("more than 1048576 bytes"), "{refused}");
        for key in ["b", "c", "d", "e", "f"] {
            fs::write(at("secrets/a").join(key), vec![0; MAX_FILE]).unwrap();
        }
        let refused = Pod::gather(folder.path()).unwrap_err();
        assert!(refused.contains("at most 256 keys"), "{refused}");
        fs::remove_dir_all(at("secrets")).unwrap();
        for number in 0..=MAX_VOLUMES {
            fs::create_dir_all(at("volumes").join(format!("v{number}"))).unwrap();
        }
        let refused = Pod::gather(folder.path()).unwrap_err();
        assert!(refused.contains("at most 64"), "{refused}");
        fs::remove_dir_all(at("volumes")).unwrap();
        fs::create_dir(at("volumes")).unwrap();
        fs::write(at("volumes/file"), "").unwrap();
        let refused = Pod::gather(folder.path()).unwrap_err();
        assert!(refused.contains("is not a directory"), "{refused}");
    }
}
