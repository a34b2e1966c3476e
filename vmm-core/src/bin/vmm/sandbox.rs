//! The rights that the process gives up, and the check that it has none that it should not have.
//!
//! Order: descriptors (inherited, or opened by `vmm run`), then uid and capabilities, then threads. Landlock comes
//! before the threads and seccomp in each of them, when they come.

use std::os::fd::RawFd;

use anyhow::{Context, Result, bail};
use caps::{CapSet, Capability};
use rustix::process::{DumpableBehavior, Resource, Rlimit, getuid, set_dumpable_behavior, setrlimit};

use crate::sys;

/// The user that `vmm run` becomes when it was started as root: "nobody".
const NOBODY: u32 = 65534;

const SETS: [CapSet; 5] = [
    CapSet::Ambient,
    CapSet::Bounding,
    CapSet::Effective,
    CapSet::Inheritable,
    CapSet::Permitted,
];

/// Under the daemon: everything was dropped before the exec. Checks that it was.
pub fn check_inherited(keep: &[RawFd]) -> Result<()> {
    if getuid().is_root() {
        bail!("`vmm serve` does not run as root: start it under a user of its own (vmmd does)");
    }
    for set in SETS {
        let held = caps::read(None, set).context("reading the capability sets")?;
        if !held.is_empty() {
            bail!(
                "`vmm serve` runs without capabilities, but its {set:?} set holds {held:?}: clear it before the exec"
            );
        }
    }
    sys::close_others(keep).context("closing inherited descriptors")?;
    lock_down()
}

/// Alone: drops what can be dropped, once everything is open. As root it becomes "nobody".
pub fn drop_rights() -> Result<()> {
    if getuid().is_root() {
        drop_bounding_set()?;
        sys::become_user(NOBODY, NOBODY).context("changing to the user nobody")?;
    }
    for set in [
        CapSet::Ambient,
        CapSet::Inheritable,
        CapSet::Effective,
        CapSet::Permitted,
    ] {
        caps::clear(None, set).with_context(|| format!("clearing the {set:?} capability set"))?;
    }
    lock_down()
}

fn drop_bounding_set() -> Result<()> {
    let held: Vec<Capability> = caps::read(None, CapSet::Bounding)
        .context("reading the bounding set")?
        .into_iter()
        .collect();
    // In a container some may be missing, among them the right to drop others; what can't be dropped can't be
    // gained back either, since no_new_privs is set below.
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP).unwrap_or(false) {
        for capability in held {
            caps::drop(None, CapSet::Bounding, capability)
                .with_context(|| format!("dropping {capability} from the bounding set"))?;
        }
    }
    Ok(())
}

/// No new rights through an exec, no core dumps with guest data, no ptrace by other processes of the same user.
fn lock_down() -> Result<()> {
    rustix::thread::set_no_new_privs(true).context("setting no_new_privs")?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).context("clearing the dumpable flag")?;
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    setrlimit(Resource::Core, none).context("forbidding core dumps")
}
