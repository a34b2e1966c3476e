//! Detection of uses of a block device or file other than as a VM's disk: a mounted file system,
//! another device above it, swap. A guest that writes to it as well would destroy its data.
//! Blocking; also produces text for messages.
//!
//! The kernel decides for block devices: an exclusive open (O_EXCL) fails while the device is
//! mounted or held. This module finds the reason. It also finds files behind loop devices, which no
//! flag protects.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rustix::fs::{FileType, Stat, major, minor};

/// The user of an open file, as text for a sentence; `None` without a user.
pub fn user(stat: &Stat) -> Option<String> {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
        let devices = with_partitions(stat.st_rdev);
        return mounted(&mountinfo, &devices, rdev_of)
            .map(|point| format!("the node, which has it mounted at \"{}\"", point.display()))
            .or_else(|| holder(&devices).map(|name| format!("the device \"{name}\" above it")))
            .or_else(|| swap(|of| devices.contains(&of.st_rdev)));
    }
    let same = |of: &Stat| (of.st_dev, of.st_ino) == (stat.st_dev, stat.st_ino);
    if let Some(name) = loop_device(same) {
        let device = rdev_of(&Path::new("/dev").join(&name));
        let devices: Vec<_> = device.into_iter().flat_map(with_partitions).collect();
        let point = mounted(&mountinfo, &devices, rdev_of);
        let mounted = point.map(|point| format!(", which is mounted at \"{}\"", point.display()));
        return Some(format!(
            "the loop device \"{name}\"{}",
            mounted.unwrap_or_default()
        ));
    }
    swap(same)
}

fn rdev_of(path: &Path) -> Option<u64> {
    let stat = rustix::fs::stat(path).ok()?;
    let block = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
    block.then_some(stat.st_rdev)
}

/// The folder of a block device in sysfs.
fn folder(device: u64) -> PathBuf {
    format!("/sys/dev/block/{}:{}", major(device), minor(device)).into()
}

/// A device, and those of its partitions.
fn with_partitions(device: u64) -> Vec<u64> {
    let entries = fs::read_dir(folder(device)).into_iter().flatten().flatten();
    let partitions = entries.filter(|entry| entry.path().join("partition").exists());
    let numbers = partitions.filter_map(|entry| number(&fs::read_to_string(entry.path().join("dev")).ok()?));
    std::iter::once(device).chain(numbers).collect()
}

/// "8:1".
fn number(text: &str) -> Option<u64> {
    let (major, minor) = text.trim().split_once(':')?;
    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// Where one of the devices is mounted. proc_pid_mountinfo(5): field 3 is the device's number, field 5 the mount point, and
/// after the hyphen come type and source. File systems of several devices have a number of their own, and one of the devices as
/// source.
fn mounted(mountinfo: &str, devices: &[u64], rdev_of: impl Fn(&Path) -> Option<u64>) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(2);
        let (device, point) = (number(fields.next()?)?, fields.nth(1)?);
        let source = file_system
            .split(' ')
            .nth(1)
            .filter(|source| source.starts_with("/dev/"));
        let source = || rdev_of(Path::new(source?));
        let ours = devices.contains(&device) || source().is_some_and(|source| devices.contains(&source));
        ours.then(|| vmmd_host::pool::unescaped(point))
    })
}

/// A device above one of these: of the device mapper, of a RAID.
fn holder(devices: &[u64]) -> Option<String> {
    devices.iter().find_map(|device| {
        let mut holders = fs::read_dir(folder(*device).join("holders")).ok()?.flatten();
        Some(holders.next()?.file_name().to_string_lossy().into_owned())
    })
}

/// The loop device that has the file behind it.
fn loop_device(same: impl Fn(&Stat) -> bool) -> Option<String> {
    let mut devices = fs::read_dir("/sys/block").ok()?.flatten();
    let found = devices.find(|entry| {
        let backing = fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
        let backing = backing.trim_end_matches('\n');
        !backing.is_empty() && rustix::fs::stat(backing).is_ok_and(|of| same(&of))
    });
    Some(found?.file_name().to_string_lossy().into_owned())
}

fn swap(same: impl Fn(&Stat) -> bool) -> Option<String> {
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    // proc_swaps(5): a line of titles, then the path first.
    let mut paths = swaps
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().next());
    let swaps =
        paths.any(|path| rustix::fs::stat(vmmd_host::pool::unescaped(path)).is_ok_and(|of| same(&of)));
    swaps.then(|| "the node, which swaps to it".to_owned())
}

#[cfg(test)]
mod tests {
    use rustix::fs::makedev;

    use super::*;

    const MOUNTINFO: &str = "\
        22 1 8:2 / / rw shared:1 - ext4 /dev/sda2 rw\n\
        23 22 0:40 / /data\\040disk rw - btrfs /dev/sdc rw\n\
        24 22 0:5 / /dev rw - devtmpfs udev rw\n";

    fn find(devices: &[u64]) -> Option<String> {
        let sdc = |path: &Path| (path == Path::new("/dev/sdc")).then(|| makedev(8, 32));
        Some(mounted(MOUNTINFO, devices, sdc)?.display().to_string())
    }

    #[test]
    fn a_mounted_device_is_found_by_its_number_and_by_its_source() {
        assert_eq!(find(&[makedev(8, 2)]).as_deref(), Some("/"));
        assert_eq!(
            find(&[makedev(8, 0), makedev(8, 1), makedev(8, 2)]).as_deref(),
            Some("/")
        );
        assert_eq!(find(&[makedev(8, 32)]).as_deref(), Some("/data disk"));
        assert_eq!(find(&[makedev(8, 16)]), None);
    }

    #[test]
    fn a_file_of_its_own_is_nobodys() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(user(&rustix::fs::stat(file.path()).unwrap()), None);
    }
}
