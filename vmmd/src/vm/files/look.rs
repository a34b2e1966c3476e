//! Looks for everything that a spec names, and says all that is wrong with it. Blocking.

use proto::model::{
    disk::Disk,
    vm::{Boot, VmSpec},
};

use super::{Locks, OpenDisk, Sources, Within, beyond, open_disk, open_image};
use crate::{
    failure::{Failure, Kind},
    node::placement::Problem,
    sys::{self, LockKind},
};

/// All that stands in the way of opening the files of a VM called `name`. What that VM has itself is no hindrance. No lock
/// is taken, so that no start is disturbed.
pub fn look(spec: &VmSpec, sources: &Sources<'_>, name: &str) -> Vec<Problem> {
    let Boot::Linux { kernel, initrd, .. } = &spec.boot;
    let kernels = Within::Roots(&sources.roots.kernels);
    let mut found = Vec::new();
    let mut note = |field: &str, failure: Failure| found.push(Problem::of(failure, field));
    let field = "spec.boot.linux.kernel";
    if let Err(failure) = open_image(field, "KERNEL", kernel, kernels) {
        note(field, failure);
    }
    let field = "spec.boot.linux.initrd";
    if let Some(Err(failure)) = initrd
        .as_ref()
        .map(|initrd| open_image(field, "INITRD", initrd, kernels))
    {
        note(field, failure);
    }
    let mut of_disks = 0;
    for (index, disk) in spec.disks.iter().enumerate() {
        let field = format!("spec.disks[{index}]");
        match look_at_disk(&field, disk, sources, name) {
            Ok(files) => of_disks += files,
            Err(failure) => note(&field, failure),
        }
    }
    if let Some(too_many) = beyond(spec, of_disks) {
        note("spec.disks", too_many);
    }
    found
}

/// How many files a disk is.
fn look_at_disk(field: &str, disk: &Disk, sources: &Sources<'_>, name: &str) -> Result<usize, Failure> {
    let OpenDisk { fd, backing, ids, .. } = open_disk(field, disk, sources, Locks::None)?;
    let kind = |read_only| {
        if read_only {
            LockKind::Shared
        } else {
            LockKind::Exclusive
        }
    };
    let all = std::iter::once((&fd, disk.read_only)).chain(backing.iter().map(|(fd, _)| (fd, true)));
    for ((fd, read_only), id) in all.zip(&ids) {
        let unlocked = sys::could_lock(fd, kind(read_only)).unwrap_or(true);
        let user = match sources.ledger.user_of(*id) {
            Some(vm) if vm == name || unlocked => continue,
            Some(vm) => format!("VM \"{vm}\""),
            // What has a lock and is not seen is a process that has just ended: its lock is waited for at a start.
            None if unlocked => continue,
            None => match sys::lock_holder(fd) {
                Some(holder) => holder,
                None => continue,
            },
        };
        let message = format!("{field}: disk \"{}\" is in use by {user}", disk.name);
        return Err(Failure::new(Kind::Precondition, "DISK_IN_USE", message));
    }
    Ok(ids.len())
}
