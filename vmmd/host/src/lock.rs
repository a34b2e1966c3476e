//! flock(2) locks on files, which the kernel gives back when the last descriptor of the open file is closed, however
//! its holders end.
//!
//! A child that has been forked and not yet executed its program holds copies of all locks of the daemon for a
//! moment, also when the daemon itself was just killed. So a lock that must be free by now is waited for, not
//! refused at once.

use std::{fs::File, io, path::Path, thread, time::Duration};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};
use tokio::{sync::oneshot, time::timeout};

/// Far longer than a fork takes to become an exec.
const PATIENCE: Duration = Duration::from_secs(2);

/// True while somebody holds a lock on the file; false when there is no such file.
pub fn is_held(path: &Path) -> io::Result<bool> {
    let Some(file) = open(path)? else { return Ok(false) };
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(false),
        Err(Errno::WOULDBLOCK) => Ok(true),
        Err(errno) => Err(errno.into()),
    }
}

/// Makes the file and takes the lock on an open file that is to be passed on.
pub fn create(path: &Path) -> io::Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    Ok(file)
}

/// Takes the lock of an open file, waiting a moment for it; `None` when somebody keeps it.
pub async fn take(file: File) -> io::Result<Option<File>> {
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => return Ok(Some(file)),
        Err(Errno::WOULDBLOCK) => {}
        Err(errno) => return Err(errno.into()),
    }
    let (sender, receiver) = oneshot::channel();
    // Not one of the runtime's threads: should the lock never come free, the process must still be able to end.
    thread::Builder::new().name("lock".into()).spawn(move || {
        let _ = sender.send(flock(&file, FlockOperation::LockExclusive).map(|()| file));
    })?;
    match timeout(PATIENCE, receiver).await {
        Ok(Ok(result)) => Ok(Some(result?)),
        Ok(Err(_)) | Err(_) => Ok(None),
    }
}

/// Waits a moment for the release of the lock on the file; false when it stays locked.
pub async fn released(path: &Path) -> io::Result<bool> {
    match open(path)? {
        Some(file) => Ok(take(file).await?.is_some()),
        None => Ok(true),
    }
}

fn open(path: &Path) -> io::Result<Option<File>> {
    match File::options().read(true).write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        file => Ok(Some(file?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_lock_is_held_until_the_last_copy_of_its_descriptor_is_closed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        assert!(!is_held(&path).unwrap());
        let ours = create(&path).unwrap();
        let passed_on = ours.try_clone().unwrap();
        drop(ours);
        assert!(is_held(&path).unwrap());
        drop(passed_on);
        assert!(!is_held(&path).unwrap());
        assert!(released(&path).await.unwrap());
    }

    #[tokio::test]
    async fn a_lock_that_comes_free_in_a_moment_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = create(&path).unwrap();
        let second = File::options().write(true).open(&path).unwrap();
        let taking = tokio::spawn(take(second));
        tokio::task::yield_now().await;
        drop(held);
        assert!(taking.await.unwrap().unwrap().is_some());
    }

    #[tokio::test]
    async fn a_lock_that_is_kept_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let _held = create(&path).unwrap();
        assert!(!released(&path).await.unwrap());
    }
}
