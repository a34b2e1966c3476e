//! Bounds the log files that a `vmm` writes: its serial log, and its stdout and stderr.
//!
//! A correct `vmm` keeps its serial log within 1 MiB per file and writes little else. A `vmm`
//! compromised by its guest can write to the same descriptors until the file system is full. No
//! limit of the kernel fits: RLIMIT_FSIZE would limit disk images too. One thread therefore watches
//! the folders of running VMs and shortens files above the limit. It is a thread and not a task,
//! since it accesses files.

use std::{
    collections::{BTreeSet, HashMap},
    fs::File,
    io::{self, Write as _},
    mem::MaybeUninit,
    os::{
        fd::OwnedFd,
        unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _},
    },
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use rustix::fs::{
    OFlags,
    inotify::{self, CreateFlags, ReadFlags, WatchFlags},
};
use uuid::Uuid;
use vmmd_objects::event::{Draft, Events, Object};

use crate::paths::LogDir;

/// Longest log file in bytes: twice the size at which a correct `vmm` switches to the other file.
const MOST: u64 = 2 << 20;
/// Bytes at the end of a `vmm`'s own log that remain after a cut.
const TAIL: u64 = 64 << 10;
/// Pause between two looks, so that a `vmm` which writes all the time does not keep a processor busy.
const PAUSE: Duration = Duration::from_millis(20);

/// Watches the logs of running VMs.
#[derive(Debug)]
pub struct LogGuard {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    inotify: OwnedFd,
    /// By watch descriptor.
    watched: Mutex<HashMap<i32, Watched>>,
    events: Events,
}

#[derive(Clone, Debug)]
struct Watched {
    uid: Uuid,
    name: String,
    logs: LogDir,
}

impl LogGuard {
    /// Starts the thread, which lives as long as the process.
    pub fn start(events: Events) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            inotify: inotify::init(CreateFlags::CLOEXEC)?,
            watched: Mutex::default(),
            events,
        });
        let guard = Arc::clone(&shared);
        thread::Builder::new()
            .name("logs".into())
            .spawn(move || guard.serve())?;
        Ok(Self { shared })
    }

    /// Watches the logs of a VM from now on. Blocking. That it can't is logged: the VM runs all the same.
    pub fn watch(&self, uid: Uuid, name: &str, logs: LogDir) {
        let watched = Watched {
            uid,
            name: name.to_owned(),
            logs,
        };
        let mut all = self.shared.lock();
        match inotify::add_watch(&self.shared.inotify, watched.logs.path(), WatchFlags::MODIFY) {
            Ok(descriptor) => drop(all.insert(descriptor, watched.clone())),
            Err(error) => tracing::warn!(vm = name, %error, "watch the VM's logs"),
        }
        drop(all);
        // It may have become long before.
        self.shared.check(&watched);
    }

    /// No process of the VM runs any more.
    pub fn forget(&self, uid: Uuid) {
        let mut all = self.shared.lock();
        let gone: Vec<_> = all
            .iter()
            .filter(|(_, watched)| watched.uid == uid)
            .map(|(descriptor, _)| *descriptor)
            .collect();
        for descriptor in gone {
            all.remove(&descriptor);
            // Fails when the folder is gone, and the watch with it.
            let _ = inotify::remove_watch(&self.shared.inotify, descriptor);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, HashMap<i32, Watched>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        loop {
            let changed = match changed(&self.inotify, &mut buffer) {
                Ok(changed) => changed,
                Err(error) => {
                    tracing::error!(%error, "watch the logs of VMs");
                    thread::sleep(Duration::from_secs(1));
                    continue;
                }
            };
            let watched: Vec<_> = {
                let all = self.lock();
                // After an overflow (descriptor -1) the changed folders are unknown.
                let any = changed.contains(&-1);
                all.iter()
                    .filter(|(descriptor, _)| any || changed.contains(descriptor))
                    .map(|(_, watched)| watched.clone())
                    .collect()
            };
            watched.iter().for_each(|watched| self.check(watched));
            thread::sleep(PAUSE);
        }
    }

    fn check(&self, watched: &Watched) {
        let Watched { uid, name, logs } = watched;
        let files = [(logs.serial(), 0), (logs.serial_old(), 0), (logs.vmm(), TAIL)];
        for (path, tail) in files {
            match shorten(&path, tail) {
                Ok(None) => {}
                Ok(Some(length)) => {
                    let message = format!(
                        "the vmm process wrote {length} bytes into {}: the file was cut",
                        path.file_name().unwrap_or_default().display()
                    );
                    let object = Object::Vm(name.clone(), *uid);
                    self.events.emit(Draft::warning(object, "LogTruncated", message));
                }
                Err(error) => tracing::warn!(vm = name, %error, path = %path.display(), "shorten a log"),
            }
        }
    }
}

/// Waits for changes; returns the watch descriptors of the folders that they are in.
fn changed(inotify: &OwnedFd, buffer: &mut [MaybeUninit<u8>]) -> rustix::io::Result<BTreeSet<i32>> {
    let mut reader = inotify::Reader::new(inotify, buffer);
    let mut changed = BTreeSet::new();
    loop {
        let event = reader.next()?;
        if !event.events().contains(ReadFlags::IGNORED) {
            changed.insert(event.wd());
        }
        if reader.is_buffer_empty() {
            return Ok(changed);
        }
    }
}

/// Cuts a file that is longer than [`MOST`], or takes more room, down to its last `tail` bytes. Returns how much it was.
fn shorten(path: &Path, tail: u64) -> io::Result<Option<u64>> {
    let flags = OFlags::NOFOLLOW.bits().cast_signed();
    let opened = File::options()
        .read(true)
        .append(true)
        .custom_flags(flags)
        .open(path);
    let mut file = match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let metadata = file.metadata()?;
    let length = metadata.len().max(metadata.blocks().saturating_mul(512));
    if length <= MOST {
        return Ok(None);
    }
    let mut last = vec![0; usize::try_from(tail.min(metadata.len())).unwrap_or(0)];
    let read = file.read_at(&mut last, metadata.len().saturating_sub(tail))?;
    last.truncate(read);
    file.set_len(0)?;
    // The vmm appends too: its concurrent lines come before or after these bytes.
    file.write_all(&last)?;
    Ok(Some(length))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn log_that_is_too_long_keeps_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        assert_eq!(shorten(&path, TAIL).unwrap(), None);
        fs::write(&path, vec![b'a'; 1 << 20]).unwrap();
        assert_eq!(shorten(&path, TAIL).unwrap(), None);
        let mut file = File::options().append(true).open(&path).unwrap();
        file.write_all(&vec![b'a'; 2 << 20]).unwrap();
        file.write_all(b"end").unwrap();
        assert!(shorten(&path, TAIL).unwrap().is_some());
        let left = fs::read(&path).unwrap();
        assert_eq!((left.len() as u64, left.ends_with(b"aend")), (TAIL, true));
    }

    #[test]
    fn a_sparse_log_counts_by_its_length_and_a_link_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("serial.log");
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(shorten(&path, 0).unwrap(), Some(1 << 40));
        assert_eq!(fs::metadata(&path).unwrap().len(), 0);
        let other = folder.path().join("other");
        fs::write(&other, vec![0; 3 << 20]).unwrap();
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        assert!(shorten(&path, 0).is_err());
        assert_eq!(fs::metadata(&other).unwrap().len(), 3 << 20);
    }
}
