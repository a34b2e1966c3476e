//! One cgroup (v2) per VM, below a parent directory.
//!
//! # Location of the parent
//!
//! A `vmm` must survive a stop, restart or upgrade of the daemon's unit. There are three
//! candidates:
//!
//! - *Below the daemon's own unit* (`Delegate=yes`, `KillMode=process`): the default, since it
//!   needs no other unit. systemd keeps the subtree on stop and restart, and only logs the
//!   remaining processes. Its limit: the unit's own cgroup contains the daemon, so it cannot
//!   delegate controllers (the "no internal processes" rule of
//!   Documentation/admin-guide/cgroup-v2.rst). With enabled controllers, systemd before version 254
//!   cannot place the restarted daemon there (EBUSY).
//! - *A transient scope per VM* by D-Bus: most robust, but needs a D-Bus client, a running bus and
//!   a round trip of some milliseconds in each start.
//! - *A holder unit*: a service with `Delegate=yes`, `KillMode=process` and one idle process in a
//!   sub-cgroup. Its own cgroup has no processes and can delegate controllers. Operations on the
//!   daemon's unit do not affect it. The idle process is necessary: systemd removes the cgroup of a
//!   unit without processes between two VMs.
//!
//! The parent is therefore the daemon's own cgroup, unless `cgroup` in the configuration names
//! another, for example that of a holder unit. The daemon enables controllers there as far as the
//! kernel permits.
//!
//! # Content
//!
//! A VM of a pod has its cgroup elsewhere, below that of the launcher ([`Parent::place`]): limits and accounting are the pod's.
//!
//! [`plan`] computes the settings of a VM's cgroup from its spec and from the [`facts`] of the
//! node. [`Group::apply`] writes them. On a node without a controller its limits are absent, unless
//! the spec requires that controller.

pub mod facts;
pub mod plan;

use std::{
    collections::HashMap,
    fs,
    io::{self, Write as _},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{Mode, OFlags},
};
use tokio::{
    io::Interest,
    time::{sleep, timeout},
};
use uuid::Uuid;

use self::plan::Setting;
use crate::fault;

use crate::sys;

/// How long a process may count after its end.
pub const LEAVING: Duration = Duration::from_secs(2);
/// After this time a cgroup that could not be read is read again.
const RETRY: Duration = Duration::from_secs(1);

/// The directory below which the VMs' cgroups are.
#[derive(Clone, Debug)]
pub struct Parent {
    dir: PathBuf,
    /// Where the cgroup v2 hierarchy is mounted.
    mount: PathBuf,
    /// Cgroups of VMs that are not below `dir`.
    placed: Arc<Mutex<HashMap<Uuid, PathBuf>>>,
}

impl Parent {
    /// Finds or makes it. `None` when the node has no cgroup v2 hierarchy: then VMs run without.
    pub fn open(configured: Option<&Path>) -> io::Result<Option<Self>> {
        let dir = match configured {
            Some(dir) => dir.to_owned(),
            None => match own()? {
                Some(dir) => dir,
                None => return Ok(None),
            },
        };
        fs::create_dir_all(&dir)?;
        if !dir.join("cgroup.procs").exists() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{} is not in a cgroup v2 file system", dir.display()),
            ));
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let parent = Self::new(dir, mount_point(&mounts).unwrap_or_default());
        parent.hand_down();
        Ok(Some(parent))
    }

    fn new(dir: PathBuf, mount: PathBuf) -> Self {
        Self {
            dir,
            mount,
            placed: Arc::default(),
        }
    }

    /// The directory of the cgroup with this path in the hierarchy, as /proc/PID/cgroup has it.
    pub fn at(&self, path: &Path) -> PathBuf {
        self.mount.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// From now on the cgroup of `vm` is the directory `dir`; with `None` one below the parent. The counters of a cgroup that was
    /// placed are those of the directory above, whose limits it has.
    pub fn place(&self, vm: Uuid, dir: Option<PathBuf>) {
        let mut placed = self.placed.lock().unwrap_or_else(PoisonError::into_inner);
        match dir {
            Some(dir) => drop(placed.insert(vm, dir)),
            None => drop(placed.remove(&vm)),
        }
    }

    /// Where the cgroup of `vm` is, if it was placed.
    pub fn placed(&self, vm: Uuid) -> Option<PathBuf> {
        let placed = self.placed.lock().unwrap_or_else(PoisonError::into_inner);
        placed.get(&vm).cloned()
    }

    /// Lets the cgroups of VMs have the controllers that there are, from the top of the hierarchy down. A cgroup on the way
    /// with processes of its own (the daemon's, say) is left as it is.
    fn hand_down(&self) {
        let is_cgroup = |dir: &&Path| dir.join("cgroup.subtree_control").exists();
        let mut way: Vec<_> = self.dir.ancestors().take_while(is_cgroup).collect();
        way.reverse();
        for (depth, dir) in way.into_iter().enumerate() {
            let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap_or_default();
            if depth > 0 && !read("cgroup.procs").trim().is_empty() {
                continue;
            }
            let (there, handed) = (read("cgroup.controllers"), read("cgroup.subtree_control"));
            let has = |list: &str, name: &str| list.split_whitespace().any(|word| word == name);
            for controller in plan::Controller::ALL.map(plan::Controller::name) {
                if has(&there, controller) && !has(&handed, controller) {
                    // Some controllers are not available everywhere. A VM that requires one gets an
                    // error later.
                    let _ = fs::write(dir.join("cgroup.subtree_control"), format!("+{controller}"));
                }
            }
        }
    }

    /// Where it is, with the controllers that it can have.
    pub fn ready(&self) -> io::Result<&Path> {
        // systemd removes the parent when its last process ends (the package's holder was killed, say).
        if !self.dir.exists() {
            fs::create_dir_all(&self.dir)?;
        }
        self.hand_down();
        Ok(&self.dir)
    }

    /// Makes the cgroup of a VM, empty, with counters from 0: one of an earlier run would say how that ended.
    pub fn create(&self, vm: Uuid) -> io::Result<Group> {
        let group = self.group(vm);
        if self.placed(vm).is_none() {
            self.ready()?;
        }
        group.clear()?;
        fs::create_dir(&group.dir)?;
        Ok(group)
    }

    /// The cgroup `name` of processes that work for the daemon, with these limits. Made when there is none. Without a controller the node
    /// does without its limit.
    pub fn for_helpers(&self, name: &str, limits: plan::Limits) -> io::Result<OwnedFd> {
        let group = Group::new(self.dir.join(name));
        match fs::create_dir(&group.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::create_dir_all(self.ready()?.join(name))?;
            }
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        for (setting, error) in group.apply(&limits.settings(), true) {
            if error.kind() != io::ErrorKind::NotFound {
                tracing::warn!(%error, cgroup = name, file = setting.file, "limit the daemon's helpers");
            }
        }
        group.descriptor()
    }

    /// The cgroup of a VM, whether or not it exists.
    pub fn group(&self, vm: Uuid) -> Group {
        match self.placed(vm) {
            Some(dir) => Group {
                counters: dir.parent().unwrap_or(&dir).to_owned(),
                dir,
            },
            None => Group::new(self.dir.join(vm.to_string())),
        }
    }

    /// VMs that have a cgroup.
    pub fn list(&self) -> io::Result<Vec<Uuid>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let name = entry?.file_name();
            found.extend(name.to_str().and_then(|name| Uuid::try_parse(name).ok()));
        }
        Ok(found)
    }
}

/// A VM's cgroup.
#[derive(Debug)]
pub struct Group {
    dir: PathBuf,
    /// The directory whose files have the counters of controllers.
    counters: PathBuf,
}

impl Group {
    /// The cgroup at `dir`, with counters of its own.
    fn new(dir: PathBuf) -> Self {
        Self {
            counters: dir.clone(),
            dir,
        }
    }

    /// For starting a process in it.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(rustix::fs::open(&self.dir, flags, Mode::empty())?)
    }

    /// True when the kernel ran out of memory and killed a process in it.
    pub fn oom_killed(&self) -> bool {
        let events = self.read("memory.events").unwrap_or_default();
        count(&events, "oom_kill") > 0
    }

    /// Writes the planned settings. Returns the settings that failed, with the error. With
    /// `running`, a memory limit that would shrink stays unchanged, because the kernel would kill
    /// the VM.
    pub fn apply(&self, settings: &[Setting], running: bool) -> Vec<(Setting, io::Error)> {
        let mut refused = Vec::new();
        for setting in settings {
            if running && setting.file == "memory.max" && self.would_shrink(&setting.value) {
                continue;
            }
            let value = if running && setting.value.is_empty() {
                self.all_there_are(&setting.file)
            } else {
                setting.value.clone()
            };
            // An empty value has to be written too.
            let written = fs::OpenOptions::new()
                .write(true)
                .open(self.dir.join(&setting.file))
                .and_then(|mut file| file.write_all(format!("{value}\n").as_bytes()));
            if let Err(error) = written {
                refused.push((setting.clone(), error));
            }
        }
        refused
    }

    /// Value for "same as the parent" in a group with processes. The kernel refuses an empty set
    /// there when the file has another value (ENOSPC, `validate_change` in kernel/cgroup/cpuset.c).
    fn all_there_are(&self, file: &str) -> String {
        let read = |dir: &Path, file: &str| fs::read_to_string(dir.join(file)).unwrap_or_default();
        if read(&self.dir, file).trim().is_empty() {
            return String::new();
        }
        let parent = self.dir.parent().unwrap_or(&self.dir);
        read(parent, &format!("{file}.effective")).trim().to_owned()
    }

    /// True when the limit of memory is higher now, or more is used than the new one allows. No limit at all is the sign of
    /// a daemon that set none.
    fn would_shrink(&self, limit: &str) -> bool {
        let number = |name: &str| {
            let text = fs::read_to_string(self.dir.join(name)).unwrap_or_default();
            text.trim().parse::<u64>().ok()
        };
        let limit = limit.parse().unwrap_or(u64::MAX);
        number("memory.max").is_some_and(|now| now > limit)
            || number("memory.current").is_some_and(|used| used > limit)
    }

    /// Reads a file with counters; `None` when that fails.
    pub fn read(&self, file: &str) -> Option<String> {
        fs::read_to_string(self.counters.join(file)).ok()
    }

    /// Processes in it.
    pub fn processes(&self) -> Vec<u32> {
        let text = fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// Kills every process in the cgroup, including processes that a fork is creating (cgroup.kill,
    /// Linux 5.14). Does nothing when the cgroup does not exist.
    fn kill(&self) {
        let killed = fs::write(self.dir.join("cgroup.kill"), "1");
        if let Err(error) = killed
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, cgroup = %self.dir.display(), "kill the processes of a cgroup");
        }
    }

    /// Kills the remaining processes and waits until the cgroup is empty. Only then has the run of
    /// a VM ended, and others may use its resources. A `vmm` that a guest has compromised may have
    /// forked; its children are in the same cgroup.
    ///
    /// The wait has no time limit: a process in uninterruptible sleep (on a dead file system, for
    /// example) still holds its open files. Cancel-safe.
    pub async fn end(&self) {
        while let Err(error) = self.ending().await {
            // Not known to be empty, as when the daemon has no descriptor left.
            tracing::warn!(%error, cgroup = %self.dir.display(), "watch a cgroup");
            self.kill();
            sleep(RETRY).await;
        }
    }

    async fn ending(&self) -> io::Result<()> {
        loop {
            let opened = fs::File::open(self.dir.join("cgroup.events"));
            let found = opened.and_then(|events| Ok((io::read_to_string(&events)?, events)));
            let (text, events) = match found {
                Ok(found) => found,
                Err(error) if is_removed(&error) => return Ok(()),
                Err(error) => return Err(error),
            };
            // Poll reports a change after this read.
            if count(&text, "populated") == 0 {
                return Ok(());
            }
            self.kill();
            let changed = async {
                let events = sys::watch_changes(events.into())?;
                events.ready(Interest::PRIORITY).await.map(drop)
            };
            if let Ok(changed) = timeout(LEAVING, changed).await {
                changed?;
            }
        }
    }

    /// Kills the processes of the cgroup and removes it. Blocking.
    pub fn clear(&self) -> io::Result<()> {
        self.kill();
        self.remove()
    }

    /// Removes the cgroup, which must not contain running processes. Blocking.
    ///
    /// The kernel may count a process for a moment after the notice of its end. The function waits
    /// at most [`LEAVING`] for this.
    pub fn remove(&self) -> io::Result<()> {
        if fault::deliberate("cgroup-left") {
            return Ok(());
        }
        let deadline = Instant::now() + LEAVING;
        loop {
            match fs::remove_dir(&self.dir) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                    self.wait_until_empty(deadline)?;
                }
                result => return result,
            }
        }
    }

    /// Waits for `populated 0` (Documentation/admin-guide/cgroup-v2.rst, "\[Un\]populated Notification").
    fn wait_until_empty(&self, deadline: Instant) -> io::Result<()> {
        let events = fs::File::open(self.dir.join("cgroup.events"))?;
        // Poll reports the next change after this read.
        if count(&io::read_to_string(&events)?, "populated") == 0 {
            return Ok(());
        }
        let mut fds = [PollFd::new(&events, PollFlags::PRI)];
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut fds, Some(&left)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// A cgroup that is not there is empty; a file of one that was removed has no device (ENODEV).
fn is_removed(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
        || error.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error())
}

/// `vms` below the daemon's own cgroup, or `vmmd` when that is the root.
fn own() -> io::Result<Option<PathBuf>> {
    let Some(mount) = mount_point(&fs::read_to_string("/proc/self/mountinfo")?) else {
        return Ok(None);
    };
    let cgroups = fs::read_to_string("/proc/self/cgroup")?;
    // The v2 hierarchy's line is "0::/path" (cgroups(7)).
    let path = cgroups
        .lines()
        .find_map(|line| line.strip_prefix("0::/"))
        .unwrap_or_default();
    let below = if path.is_empty() { "vmmd" } else { "vms" };
    Ok(Some(mount.join(path).join(below)))
}

/// Where the cgroup v2 hierarchy is mounted (proc_pid_mountinfo(5): the mount point is field 5, the file system's
/// type the first after the hyphen).
fn mount_point(mountinfo: &str) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (mount, filesystem) = line.split_once(" - ")?;
        let point = mount.split(' ').nth(4)?;
        filesystem.starts_with("cgroup2 ").then(|| PathBuf::from(point))
    })
}

/// Whether the memory controller counts huge pages of hugetlbfs too: an option of the mount, from Linux 6.6 on.
pub fn huge_pages_are_memory() -> bool {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut options = mountinfo
        .lines()
        .filter_map(|line| line.split_once(" - cgroup2 "));
    options.any(|(_, rest)| rest.contains("memory_hugetlb_accounting"))
}

/// A counter of a flat keyed file; 0 when it isn't there.
pub fn count(text: &str, key: &str) -> u64 {
    let lines = text.lines().filter_map(|line| line.split_once(' '));
    lines
        .filter(|(name, _)| *name == key)
        .find_map(|(_, value)| value.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_point_is_found_among_others() {
        let text = "30 23 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                    31 23 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";
        assert_eq!(mount_point(text), Some(PathBuf::from("/sys/fs/cgroup")));
        assert_eq!(mount_point("30 23 0:26 / / rw - ext4 /dev/vda rw\n"), None);
    }

    fn pretended() -> (tempfile::TempDir, Group) {
        let folder = tempfile::tempdir().unwrap();
        let group = Group::new(folder.path().to_owned());
        (folder, group)
    }

    fn set(file: &str, value: &str) -> Setting {
        Setting {
            file: file.into(),
            value: value.into(),
            field: None,
        }
    }

    #[test]
    fn what_is_planned_is_written_and_what_is_not_there_is_told() {
        let (_folder, group) = pretended();
        let read = |name: &str| fs::read_to_string(group.dir.join(name)).unwrap();
        for name in ["cpu.weight", "cpuset.cpus"] {
            fs::write(group.dir.join(name), "").unwrap();
        }
        let settings = [
            set("cpu.weight", "200"),
            set("io.weight", "1"),
            set("cpuset.cpus", ""),
        ];
        let refused = group.apply(&settings, false);
        assert_eq!(
            (read("cpu.weight").as_str(), read("cpuset.cpus").as_str()),
            ("200\n", "\n")
        );
        let refused: Vec<_> = refused
            .into_iter()
            .map(|(setting, error)| (setting.file, error.kind()))
            .collect();
        assert_eq!(refused, [("io.weight".to_owned(), io::ErrorKind::NotFound)]);
        assert!(!group.dir.join("io.weight").exists());
    }

    #[test]
    fn a_running_vm_that_may_have_all_processors_again_is_given_each() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("vm");
        fs::create_dir(&dir).unwrap();
        fs::write(parent.path().join("cpuset.cpus.effective"), "0-2\n").unwrap();
        let group = Group::new(dir);
        for (before, running, expected) in [("2\n", true, "0-2\n"), ("\n", true, "\n"), ("2\n", false, "\n")]
        {
            let file = group.dir.join("cpuset.cpus");
            // Unlike a cgroup file, a plain file keeps the tail of its old content. The test
            // compares the beginning only.
            fs::write(&file, before).unwrap();
            assert!(group.apply(&[set("cpuset.cpus", "")], running).is_empty());
            let found = fs::read_to_string(&file).unwrap();
            assert!(found.starts_with(expected), "{before:?} {running}: {found:?}");
        }
    }

    #[test]
    fn no_memory_is_taken_from_a_vm_that_runs() {
        for (max, used, running, expected) in [
            ("max", 10, true, "100\n"),
            ("max", 101, true, "max"),
            ("50", 10, true, "100\n"),
            ("200", 10, true, "200"),
            ("200", 101, false, "100\n"),
        ] {
            let (_folder, group) = pretended();
            fs::write(group.dir.join("memory.max"), max).unwrap();
            fs::write(group.dir.join("memory.current"), used.to_string()).unwrap();
            group.apply(&[set("memory.max", "100")], running);
            let found = fs::read_to_string(group.dir.join("memory.max")).unwrap();
            assert!(found.starts_with(expected), "{max} {used}: {found}");
        }
    }

    #[test]
    fn controllers_are_handed_down_from_the_top_but_not_past_processes() {
        let root = tempfile::tempdir().unwrap();
        let dirs = ["", "slice", "slice/unit"].map(|name| root.path().join(name));
        for (dir, processes) in dirs.iter().zip(["1\n", "", "7\n"]) {
            fs::create_dir_all(dir).unwrap();
            fs::write(dir.join("cgroup.controllers"), "memory misc").unwrap();
            fs::write(dir.join("cgroup.subtree_control"), "").unwrap();
            fs::write(dir.join("cgroup.procs"), processes).unwrap();
        }
        let parent = Parent::new(dirs[2].clone(), root.path().to_owned());
        parent.ready().unwrap();
        let handed = dirs.map(|dir| fs::read_to_string(dir.join("cgroup.subtree_control")).unwrap());
        assert_eq!(handed, ["+memory", "+memory", ""]);
    }

    #[test]
    fn placed_group_has_the_counters_of_the_directory_above() {
        let root = tempfile::tempdir().unwrap();
        let parent = Parent::new(root.path().join("vms"), root.path().to_owned());
        let vm = Uuid::new_v4();
        let pod = parent.at(Path::new("/kubepods/pod1"));
        assert_eq!(pod, root.path().join("kubepods/pod1"));
        fs::create_dir_all(&pod).unwrap();
        fs::write(pod.join("memory.events"), "oom_kill 1\n").unwrap();
        parent.place(vm, Some(pod.join("vmm")));
        let group = parent.create(vm).unwrap();
        assert!(pod.join("vmm").is_dir() && group.oom_killed());
        // The files of a cgroup go with it.
        for file in fs::read_dir(pod.join("vmm")).unwrap() {
            fs::remove_file(file.unwrap().path()).unwrap();
        }
        group.remove().unwrap();
        parent.place(vm, None);
        assert_eq!(parent.group(vm).dir, root.path().join("vms").join(vm.to_string()));
    }

    #[test]
    fn helpers_are_limited_in_a_group_that_is_made_when_it_is_missing() {
        let root = tempfile::tempdir().unwrap();
        let parent = Parent::new(root.path().join("vms"), root.path().to_owned());
        let limits = plan::Limits {
            memory: 1 << 20,
            tasks: 7,
        };
        parent.for_helpers("images", limits).unwrap();
        let dir = parent.dir.join("images");
        let files = ["memory.max", "pids.max", "cpu.weight"].map(|file| dir.join(file));
        // The kernel makes the files. Without a controller they are missing.
        assert!(files.iter().all(|file| !file.exists()));
        for file in &files {
            fs::write(file, "").unwrap();
        }
        parent.for_helpers("images", limits).unwrap();
        let written = files.map(|file| fs::read_to_string(file).unwrap());
        assert_eq!(written, ["1048576\n", "7\n", "100\n"]);
        fs::write(dir.join("memory.current"), (2 << 20).to_string()).unwrap();
        fs::write(dir.join("memory.max"), "max").unwrap();
        parent.for_helpers("images", limits).unwrap();
        assert_eq!(fs::read_to_string(dir.join("memory.max")).unwrap(), "max");
    }

    #[tokio::test]
    async fn group_that_cannot_be_read_has_not_ended() {
        let (folder, group) = pretended();
        let events = group.dir.join("cgroup.events");
        // It can be opened and not read.
        fs::create_dir(&events).unwrap();
        fs::create_dir(group.dir.join("cgroup.kill")).unwrap();
        let mut ending = std::pin::pin!(group.end());
        assert!(timeout(Duration::ZERO, &mut ending).await.is_err());
        fs::remove_dir(&events).unwrap();
        fs::write(&events, "populated 0\n").unwrap();
        ending.await;
        drop(folder);
        group.end().await;
    }

    #[test]
    fn a_folder_outside_of_a_cgroup_file_system_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Parent::open(Some(folder.path())).is_err());
    }
}
