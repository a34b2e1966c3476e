//! One cgroup (v2) per VM, below a parent directory.
//!
//! # Where the parent is
//!
//! A `vmm` must survive a stop, restart or upgrade of the daemon's unit. Three places were weighed:
//!
//! - *Below the daemon's own unit* (`Delegate=yes`, `KillMode=process`): the default, since it needs nothing else.
//!   systemd leaves the subtree alone on stop and restart, and only remarks on left-over processes. Its limit: the
//!   unit's own cgroup holds the daemon, so no controllers can be handed down from it (the "no internal processes"
//!   rule of Documentation/admin-guide/cgroup-v2.rst): enabling them would make systemd before version 254 fail to
//!   put the restarted daemon there (EBUSY).
//! - *A transient scope per VM* by D-Bus: survives best, but needs a D-Bus client, a running bus and a round trip of
//!   some milliseconds in each start.
//! - *A holder unit*: a service with `Delegate=yes`, `KillMode=process` and one idle process in a sub-cgroup, so that
//!   its cgroup itself holds none and can hand down controllers; nothing done to the daemon's unit concerns it. The
//!   idle process is needed: systemd removes the cgroup of a unit without processes between two VMs.
//!
//! So: the daemon's own cgroup unless the configuration names another with `cgroup`, which is how a holder unit is
//! used. Controllers are handed down there as far as the kernel lets us.

use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{Mode, OFlags},
};
use uuid::Uuid;

/// Controllers handed down to the VMs where that is possible.
const CONTROLLERS: [&str; 5] = ["+cpu", "+io", "+memory", "+pids", "+cpuset"];

/// How long a process may count after its end.
const LEAVING: Duration = Duration::from_secs(2);

/// The directory below which the VMs' cgroups are.
#[derive(Clone, Debug)]
pub struct Parent {
    dir: PathBuf,
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
        let parent = Self { dir };
        parent.hand_down();
        Ok(Some(parent))
    }

    /// Lets the cgroups of VMs have the controllers that there are.
    fn hand_down(&self) {
        for controller in CONTROLLERS {
            // Not all controllers are there on all nodes and in all parents.
            let _ = fs::write(self.dir.join("cgroup.subtree_control"), controller);
        }
    }

    /// Makes the cgroup of a VM, empty.
    pub fn create(&self, vm: Uuid) -> io::Result<Group> {
        let group = self.group(vm);
        // systemd removes the parent when its last process ends (the package's holder was killed, say).
        if !self.dir.exists() {
            fs::create_dir_all(&self.dir)?;
            self.hand_down();
        }
        fs::create_dir_all(&group.dir)?;
        Ok(group)
    }

    /// The cgroup of a VM, whether or not it exists.
    pub fn group(&self, vm: Uuid) -> Group {
        Group {
            dir: self.dir.join(vm.to_string()),
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
}

impl Group {
    /// For starting a process in it.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(rustix::fs::open(&self.dir, flags, Mode::empty())?)
    }

    /// True when the kernel has killed a process in it for want of memory.
    pub fn oom_killed(&self) -> bool {
        let events = fs::read_to_string(self.dir.join("memory.events")).unwrap_or_default();
        count(&events, "oom_kill") > 0
    }

    /// Processes in it.
    pub fn processes(&self) -> Vec<u32> {
        let text = fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// Removes it; nothing may run in it any more. Blocking.
    ///
    /// A process may count for a moment after its end was told: that is waited for, but not long.
    pub fn remove(&self) -> io::Result<()> {
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

    /// Waits for `populated 0` (Documentation/admin-guide/cgroup-v2.rst, "[Un]populated Notification").
    fn wait_until_empty(&self, deadline: Instant) -> io::Result<()> {
        let events = fs::File::open(self.dir.join("cgroup.events"))?;
        // The next change after this read is told by poll.
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

/// A counter of a flat keyed file.
fn count(text: &str, key: &str) -> u64 {
    let lines = text.lines().filter_map(|line| line.split_once(' '));
    lines
        .filter(|(name, _)| *name == key)
        .find_map(|(_, value)| value.parse().ok())
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

    #[test]
    fn the_oom_counter_is_read_by_its_whole_name() {
        let text = "low 0\noom 7\noom_kill 2\noom_group_kill 5\n";
        assert_eq!(count(text, "oom_kill"), 2);
        assert_eq!(count("", "oom_kill"), 0);
    }

    #[test]
    fn a_folder_outside_of_a_cgroup_file_system_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Parent::open(Some(folder.path())).is_err());
    }
}
