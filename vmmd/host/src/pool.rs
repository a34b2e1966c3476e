//! Pools for blocking work on files outside the daemon's own folders.
//!
//! A file system whose server is gone does not answer, and its callers wait in the kernel without a
//! way to end the wait. Such work therefore has its own places: a total number, and of these a few
//! for work on the same file systems. A dead file system takes only its few places, and work on
//! other file systems continues. A VM whose kernel is on a good file system and whose disk is on a
//! dead one takes no places of VMs that use the good one alone. A place is taken until the work has
//! really ended, even when its caller has stopped waiting.
//!
//! The deadline applies to the work alone. Work that waits for a place is refused when no other
//! work ends within the deadline. The queue is bounded: many starts at once on slow storage take
//! their time and do not fail.
//!
//! Work on the daemon's own files (its folders, cgroups, /proc) uses the runtime's other blocking
//! threads.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
    pin::pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::spawn_blocking,
    time::timeout,
};

use crate::failure::{Failure, Kind};

/// Blocking threads of the runtime: those of all pools, and [`OTHERS`].
pub const THREADS: usize = STARTS + FILES + BULK + OTHERS;
/// Threads for what touches nothing but the daemon's own files.
const OTHERS: usize = 32;
/// Starts that look for their files at once.
const STARTS: usize = 96;
/// Concurrent look-ups of files for requests.
const FILES: usize = 96;
/// Concurrent copies, reservations and similar work.
const BULK: usize = 32;
/// Work on the same file systems gets one of so many places of a pool.
const SHARE: usize = 6;

/// All pools.
#[derive(Debug)]
pub struct Pools {
    /// The files of VMs that are being started.
    pub starts: Pool,
    /// Files that somebody asks about.
    pub files: Pool,
    /// Work on whole disks. It has no deadline: a copy takes as long as it takes.
    pub bulk: Pool,
}

/// Work that waits for a place of one pool at most: some times the VMs of a large node.
const QUEUE: usize = 8192;

/// Places for one kind of work.
#[derive(Debug)]
pub struct Pool {
    places: Arc<Places>,
    /// For work that waits.
    queue: Semaphore,
    /// For work on the same file systems.
    each: usize,
    deadline: Option<Duration>,
    /// By the mount points that work is on.
    shares: Mutex<HashMap<BTreeSet<PathBuf>, Arc<Places>>>,
}

/// Places, and how much work has left them.
#[derive(Debug)]
struct Places {
    free: Arc<Semaphore>,
    left: AtomicU64,
}

/// A place that is taken.
struct Place {
    of: Arc<Places>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.of.left.fetch_add(1, Ordering::Relaxed);
    }
}

impl Places {
    fn new(count: usize) -> Arc<Self> {
        Arc::new(Self {
            free: Arc::new(Semaphore::new(count)),
            left: AtomicU64::new(0),
        })
    }

    /// Waits for a place; `None` when no work leaves one for as long as `patience`.
    async fn take(self: &Arc<Self>, patience: Option<Duration>) -> Option<Place> {
        let mut taking = pin!(Arc::clone(&self.free).acquire_owned());
        let permit = loop {
            let left = self.left.load(Ordering::Relaxed);
            let Some(patience) = patience else {
                break taking.await;
            };
            match timeout(patience, &mut taking).await {
                Ok(permit) => break permit,
                Err(_) if self.left.load(Ordering::Relaxed) == left => return None,
                Err(_) => {}
            }
        };
        Some(Place {
            of: Arc::clone(self),
            // The semaphore is never closed.
            _permit: permit.ok()?,
        })
    }
}

impl Pools {
    /// Pools in which a file may take as long as `deadline` to be found and opened.
    pub fn new(deadline: Duration) -> Self {
        Self {
            starts: Pool::new(STARTS, Some(deadline)),
            files: Pool::new(FILES, Some(deadline)),
            bulk: Pool::new(BULK, None),
        }
    }
}

impl Pool {
    fn new(places: usize, deadline: Option<Duration>) -> Self {
        Self {
            places: Places::new(places),
            queue: Semaphore::new(QUEUE),
            each: (places / SHARE).max(1),
            deadline,
            shares: Mutex::default(),
        }
    }

    /// Runs work that blocks on `paths`. When the deadline passes, or the caller drops the future,
    /// the work continues alone, and its result is dropped. Refused as FILES_DO_NOT_ANSWER when
    /// this work, or all other work on the same file systems, exceeds the deadline, and as
    /// NODE_BUSY when the pool has no place.
    pub fn run<'a, T: Send + 'static, W: FnOnce() -> T + Send + 'static>(
        &'a self,
        paths: &[PathBuf],
        work: W,
    ) -> impl Future<Output = Result<T, Failure>> + Send + use<'a, T, W> {
        let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        self.run_on(mounts(&mountinfo, paths), work)
    }

    async fn run_on<T: Send + 'static>(
        &self,
        mounts: BTreeSet<PathBuf>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failure> {
        let places = self.take(&mounts).await?;
        let done = spawn_blocking(move || {
            let _places = places;
            work()
        });
        let done = match self.deadline {
            None => done.await,
            Some(deadline) => {
                let done = timeout(deadline, done).await;
                done.map_err(|_| no_answer(&mounts, deadline))?
            }
        };
        done.map_err(|error| Failure::internal(error.to_string()))
    }

    /// Takes the place of these file systems first, so that work waiting for a slow file system
    /// takes no place of the pool.
    async fn take(&self, mounts: &BTreeSet<PathBuf>) -> Result<[Place; 2], Failure> {
        let _waits = self.queue.try_acquire().map_err(|_| busy())?;
        let like = {
            let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
            // Drops the entries of unused file systems.
            shares.retain(|_, places| Arc::strong_count(places) > 1);
            let new = || Places::new(self.each);
            Arc::clone(shares.entry(mounts.clone()).or_insert_with(new))
        };
        let stuck = || no_answer(mounts, self.deadline.unwrap_or_default());
        let like = like.take(self.deadline).await.ok_or_else(stuck)?;
        let all = self.places.take(self.deadline).await.ok_or_else(busy)?;
        Ok([like, all])
    }
}

fn no_answer(mounts: &BTreeSet<PathBuf>, deadline: Duration) -> Failure {
    let names: Vec<_> = mounts.iter().map(|mount| mount.display().to_string()).collect();
    let message = format!(
        "the files on {} did not answer within {} s: check the mount, and try again",
        names.join(", "),
        deadline.as_secs()
    );
    Failure::new(Kind::Unavailable, "FILES_DO_NOT_ANSWER", message)
}

fn busy() -> Failure {
    let message = "the node is busy with the files of other VMs, and none of that work ends: try again later, or look at what the \
                   node has mounted";
    Failure::new(Kind::Unavailable, "NODE_BUSY", message)
}

/// Where the file systems of `paths` are mounted, by the paths alone: a link may lead elsewhere, but to follow it would be to
/// ask the file system.
fn mounts(mountinfo: &str, paths: &[PathBuf]) -> BTreeSet<PathBuf> {
    // proc_pid_mountinfo(5): field 5 is the mount point.
    let points: Vec<_> = mountinfo
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(unescaped)
        .collect();
    let of = |path: &PathBuf| {
        let above = points.iter().filter(|point| path.starts_with(point));
        above
            .max_by_key(|point| point.components().count())
            .map_or_else(|| Path::new("/").to_owned(), Clone::clone)
    };
    paths.iter().map(of).collect()
}

/// A path of mountinfo, with escapes such as `\040` for a blank.
pub fn unescaped(text: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let octal = after.get(..3).filter(|_| *first == b'\\');
        let octal = octal.and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = octal.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        rest = if byte.is_some() {
            rest.get(4..).unwrap_or_default()
        } else {
            after
        };
        bytes.push(byte.unwrap_or(*first));
    }
    std::ffi::OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const MOUNTINFO: &str = "\
        22 1 254:0 / / rw - ext4 /dev/vda rw\n\
        23 22 0:40 / /mnt/nfs rw - nfs4 server:/a rw\n\
        24 22 0:41 / /mnt/nfs\\040two rw - nfs4 server:/b rw\n\
        25 23 0:42 / /mnt/nfs/below rw - nfs4 server:/c rw\n";

    fn of(paths: &[&str]) -> BTreeSet<PathBuf> {
        mounts(MOUNTINFO, &paths.iter().map(PathBuf::from).collect::<Vec<_>>())
    }

    #[test]
    fn a_path_is_on_the_mount_nearest_above_it() {
        for (path, mount) in [
            ("/a", "/"),
            ("/mnt/nfs/a", "/mnt/nfs"),
            ("/mnt/nfsx", "/"),
            ("/mnt/nfs two/a", "/mnt/nfs two"),
            ("/mnt/nfs/below/a/b", "/mnt/nfs/below"),
        ] {
            assert_eq!(of(&[path]), [PathBuf::from(mount)].into(), "{path}");
        }
        assert_eq!(of(&["/a", "/b", "/mnt/nfs/c"]).len(), 2);
    }

    #[tokio::test]
    async fn queue_longer_than_the_deadline_fails_no_work() {
        let pool = Arc::new(Pool::new(SHARE, Some(Duration::from_secs(1))));
        let mut all = tokio::task::JoinSet::new();
        for number in 0..200 {
            let pool = Arc::clone(&pool);
            // One place, so that all of them take three times the deadline.
            let work = move || {
                std::thread::sleep(Duration::from_millis(15));
                number
            };
            all.spawn(async move { pool.run_on(of(&["/mnt/nfs/a"]), work).await });
        }
        let mut done: Vec<_> = all.join_all().await.into_iter().map(Result::unwrap).collect();
        done.sort_unstable();
        assert_eq!(done, (0..200).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn work_that_finds_no_place_is_refused_with_its_cause() {
        let mut pool = Pool {
            deadline: Some(Duration::from_millis(1)),
            queue: Semaphore::new(1),
            ..Pool::new(SHARE, None)
        };
        let hung = pool.places.take(None).await.unwrap();
        let places: Vec<_> = (1..SHARE).map(|_| pool.places.take(None)).collect();
        let mut taken = vec![hung];
        for place in places {
            taken.push(place.await.unwrap());
        }
        let failure = pool.run_on(of(&["/a"]), || ()).await.unwrap_err();
        assert_eq!((failure.kind, failure.reason), (Kind::Unavailable, "NODE_BUSY"));
        drop(taken);
        // The refusals need no time, a thread does.
        let short = pool.deadline.replace(Duration::from_secs(60));
        assert_eq!(pool.run_on(of(&["/a"]), || 7).await, Ok(7));
        pool.deadline = short;
        let like = pool.take(&of(&["/mnt/nfs/a"])).await.unwrap();
        let failure = pool.run_on(of(&["/mnt/nfs/b"]), || ()).await.unwrap_err();
        assert_eq!(failure.reason, "FILES_DO_NOT_ANSWER");
        drop(like);
        let waits = pool.queue.acquire().await.unwrap();
        let failure = pool.run_on(of(&["/a"]), || ()).await.unwrap_err();
        assert_eq!(failure.reason, "NODE_BUSY");
        drop(waits);
    }

    #[tokio::test]
    async fn a_file_system_that_hangs_takes_its_own_places_and_no_others() {
        let pool = Arc::new(Pool::new(SHARE * 2, Some(Duration::from_secs(10))));
        let short = Pool {
            deadline: Some(Duration::from_millis(1)),
            ..Pool::new(SHARE, None)
        };
        let (end, hang) = mpsc::channel::<()>();
        let hang = Arc::new(Mutex::new(hang));
        let mut hanging = Vec::new();
        for _ in 0..10 {
            let (pool, hang) = (Arc::clone(&pool), Arc::clone(&hang));
            hanging.push(tokio::spawn(async move {
                let work = move || hang.lock().unwrap().recv().is_err();
                pool.run_on(of(&["/mnt/nfs/a"]), work).await
            }));
        }
        // Both places of the file system are taken; eight more wait for them.
        while pool.places.free.available_permits() > SHARE * 2 - 2 {
            tokio::task::yield_now().await;
        }
        assert_eq!(pool.run_on(of(&["/a"]), || 7).await, Ok(7));
        let of_hang = Arc::clone(&hang);
        let failed = short
            .run_on(of(&["/mnt/nfs/a"]), move || drop(of_hang.lock()))
            .await;
        let failure = failed.unwrap_err();
        assert_eq!(failure.reason, "FILES_DO_NOT_ANSWER");
        assert!(failure.message.contains("/mnt/nfs"), "{failure}");
        assert_eq!(
            short.places.free.available_permits(),
            SHARE - 1,
            "it is still at work"
        );
        drop(end);
        for hanging in hanging {
            assert!(hanging.await.unwrap().unwrap());
        }
    }
}
