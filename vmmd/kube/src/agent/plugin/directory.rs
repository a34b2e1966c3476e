//! The kubelet's directory: sockets in it, and notice of its changes (inotify(7)).

use std::{
    fs,
    io::{self, ErrorKind},
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
};

use rustix::{
    fs::inotify::{self, CreateFlags, WatchFlags},
    io::Errno,
};
use tokio::{io::unix::AsyncFd, net::UnixListener};

/// Watches a directory.
pub struct Directory(AsyncFd<OwnedFd>);

impl Directory {
    /// Watches a directory from now on.
    ///
    /// # Errors
    ///
    /// Fails when the directory does not exist.
    pub fn watch(path: &Path) -> io::Result<Self> {
        let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let changes = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MOVE | WatchFlags::DELETE_SELF;
        inotify::add_watch(&fd, path, changes)?;
        Ok(Self(vmmd_host::sys::watch(fd)?))
    }

    /// Waits until files were made or removed.
    ///
    /// # Errors
    ///
    /// Fails when the notices cannot be read.
    pub async fn changed(&self) -> io::Result<()> {
        loop {
            let mut ready = self.0.readable().await?;
            let mut buffer = [MaybeUninit::uninit(); 4096];
            let mut reader = inotify::Reader::new(&self.0, &mut buffer);
            match reader.next() {
                Ok(_) => return Ok(()),
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Listens on a socket, and replaces the socket of an earlier agent.
///
/// # Errors
///
/// Fails when the directory does not exist, or cannot be written to.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    UnixListener::bind(path)
}

/// Identities of files, which later files of the same names do not have.
pub fn identities(paths: &[PathBuf]) -> Vec<Option<(u64, i64, i64)>> {
    let identity = |path: &PathBuf| {
        let metadata = fs::symlink_metadata(path).ok()?;
        Some((metadata.ino(), metadata.ctime(), metadata.ctime_nsec()))
    };
    paths.iter().map(identity).collect()
}
