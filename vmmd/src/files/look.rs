//! Looks for everything that a spec names, and says all that is wrong with it. Blocking.

use std::{path::Path, sync::Arc};

use vmmd_host::{
    capacity::placement::Problem,
    failure::{Failure, Kind},
    roots::{self, Roots, Within},
    sys::{self, LockKind},
};
use vmmd_spec::{
    disk::{Disk, Source},
    vm::VmSpec,
};
use vmmd_store::FileRecord;

use super::{
    Known, Locks, OpenDisk, PATH_NOT_ALLOWED, Sources, beyond, known, open_disk, open_image,
    state_dir::StateDir,
};
use crate::registry::vms::Vms;

/// Returns all problems with the files of a VM called `name`. Files that the VM itself uses are no
/// problem. `had` contains the paths of its disks. `elsewhere`: the VM runs on another node, which
/// has locked its disks. The function takes no lock, so it does not disturb a start.
pub fn look(
    spec: &VmSpec,
    sources: &Sources<'_>,
    (name, had): (&str, &Known),
    elsewhere: bool,
) -> Vec<Problem> {
    look_beside(spec, None, sources, (name, had), elsewhere)
}

/// The same for the files that `spec` names and `present` does not.
pub fn look_beside(
    spec: &VmSpec,
    present: Option<&VmSpec>,
    sources: &Sources<'_>,
    (name, had): (&str, &Known),
    elsewhere: bool,
) -> Vec<Problem> {
    let (kernel, initrd) = match present {
        Some(present) if present.boot.files() == spec.boot.files() => (None, None),
        _ => spec.boot.files(),
    };
    let kernels = Within::Roots(&sources.roots.kernels);
    let mut found = Vec::new();
    let mut note = |field: &str, failure: Failure| found.push(Problem::of(failure, field));
    let field = "spec.boot.linux.kernel";
    if let Some(Err(failure)) = kernel.map(|kernel| open_image(field, "KERNEL", kernel, kernels)) {
        note(field, failure);
    }
    let field = "spec.boot.linux.initrd";
    if let Some(Err(failure)) = initrd.map(|initrd| open_image(field, "INITRD", initrd, kernels)) {
        note(field, failure);
    }
    let mut of_disks = 0;
    for (index, disk) in spec.disks.iter().enumerate() {
        let field = format!("spec.disks[{index}]");
        // The DiskService says whether a VM can get one of its disks.
        let skipped =
            |present: &VmSpec| present.disks.contains(disk) || matches!(disk.source, Source::Disk { .. });
        let looked = if present.is_some_and(skipped) {
            Ok(1)
        } else if elsewhere && !disk.read_only {
            open_disk(&field, disk, sources, Locks::Elsewhere).map(|opened| opened.ids.len())
        } else {
            look_at_disk(&field, disk, sources, name, had)
        };
        match looked {
            Ok(files) => of_disks += files,
            Err(failure) => note(&field, failure),
        }
    }
    if let Some(too_many) = beyond(spec, of_disks) {
        note("spec.disks", too_many);
    }
    for (index, share) in spec.shares.iter().enumerate() {
        if present.is_some_and(|present| present.shares.contains(share)) {
            continue;
        }
        if let Err(failure) = super::share::open(share, sources) {
            note(&format!("spec.shares[{index}]"), failure);
        }
    }
    if let Some(path) = &spec.state_dir
        && present.is_none_or(|present| present.state_dir != spec.state_dir)
        && let Err(failure) = StateDir::open(path, &sources.roots.shares)
    {
        note("spec.stateDir", failure);
    }
    found
}

/// The paths of the disks that a VM has, each with any file; empty when there is no such VM.
pub fn had(table: &Vms, name: &str) -> Known {
    let vm = table.get(name).map(|entry| Arc::clone(&entry.state.borrow()));
    let disks = vm.iter().flat_map(|vm| &vm.spec).flat_map(|spec| &spec.disks);
    disks
        .map(|disk| (disk.path().to_owned(), FileRecord::default()))
        .collect()
}

/// Returns the paths of a spec that are outside the node's roots by their text, except paths that
/// `had` names too: an existing path must not block another change. The function accesses no file.
pub fn outside(spec: &VmSpec, roots: &Roots, had: Option<&VmSpec>) -> Vec<Problem> {
    let had: Vec<_> = had.into_iter().flat_map(named_by_path).collect();
    let fresh = named_by_path(spec)
        .into_iter()
        .filter(|(_, path, _)| had.iter().all(|(_, known, _)| known != path));
    let problems = fresh.filter_map(|(field, path, kind)| {
        let (within, key) = match kind {
            Named::Disk => (&roots.disks, "disks"),
            Named::Kernel => (&roots.kernels, "kernels"),
            Named::Share => (&roots.shares, "shares"),
        };
        let refused = roots::allows(within, path).err()?;
        let problem = refused.about_roots(Within::Roots(within), key)?;
        let message = format!("{field}: \"{}\" {problem}", path.display());
        Some(Problem::of(
            Failure::precondition(PATH_NOT_ALLOWED, message),
            field,
        ))
    });
    problems.collect()
}

/// Purpose of a path in a spec.
#[derive(Clone, Copy)]
enum Named {
    Kernel,
    Disk,
    Share,
}

/// Field, path and purpose of each path in a spec.
fn named_by_path(spec: &VmSpec) -> Vec<(String, &Path, Named)> {
    let (kernel, initrd) = spec.boot.files();
    let kernel = kernel.map(|kernel| ("spec.boot.linux.kernel".to_owned(), kernel, Named::Kernel));
    let initrd = initrd.map(|initrd| ("spec.boot.linux.initrd".to_owned(), initrd, Named::Kernel));
    let disks = spec.disks.iter().enumerate();
    let disks = disks.filter_map(|(index, disk)| match &disk.source {
        Source::Path { path, beneath, .. } => {
            let path = beneath.as_ref().unwrap_or(path);
            Some((format!("spec.disks[{index}].path"), path.as_path(), Named::Disk))
        }
        Source::Disk { .. } | Source::Pod { .. } | Source::Seed | Source::Empty => None,
    });
    let shares = spec.shares.iter().enumerate();
    let shares = shares.filter_map(|(index, share)| {
        let field = format!("spec.shares[{index}].path");
        Some((field, share.path()?, Named::Share))
    });
    let state_dir = spec.state_dir.iter();
    let state_dir = state_dir.map(|path| ("spec.stateDir".to_owned(), path.as_path(), Named::Share));
    kernel
        .into_iter()
        .chain(initrd)
        .chain(disks)
        .chain(shares)
        .chain(state_dir)
        .collect()
}

/// How many files a disk is.
fn look_at_disk(
    field: &str,
    disk: &Disk,
    sources: &Sources<'_>,
    name: &str,
    had: &Known,
) -> Result<usize, Failure> {
    if disk.source == Source::Seed {
        return Ok(1);
    }
    let opened = open_disk(field, disk, sources, Locks::None)?;
    known::check_disk(had, field, disk, &opened)?;
    let OpenDisk { fd, backing, ids, .. } = opened;
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
            // A lock without a visible holder belongs to a process that has just ended. A start
            // waits for such a lock.
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
