//! Notices of writes to the files of a folder (inotify(7)).

use std::{io, os::fd::OwnedFd, path::Path};

use rustix::{
    fs::inotify::{self, CreateFlags, WatchFlags},
    io::Errno,
};
use tokio::io::unix::AsyncFd;

use crate::sys;

/// Notifies of writes to files of a folder, of new files and of files that are moved there.
#[derive(Debug)]
pub struct FolderWatch(AsyncFd<OwnedFd>);

impl FolderWatch {
    /// Watches `folder`. Without such a folder there are no notices.
    pub fn new(folder: &Path) -> io::Result<Self> {
        let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let events = WatchFlags::MODIFY | WatchFlags::CREATE | WatchFlags::MOVED_TO;
        match inotify::add_watch(&fd, folder, events) {
            Err(Errno::NOENT) | Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(Self(sys::watch(fd)?))
    }

    /// Waits for the next notices. Cancel-safe.
    pub async fn changed(&self) -> io::Result<()> {
        loop {
            let mut ready = self.0.readable().await?;
            match rustix::io::read(self.0.get_ref(), &mut [0; 4096]) {
                Ok(_) => return Ok(()),
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(error) => return Err(error.into()),
            }
        }
    }
}
