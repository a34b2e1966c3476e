//! Drop of the process's rights, and the check that no unexpected rights remain.
//!
//! Order: descriptors (inherited, or opened by `vmm run`), uid and capabilities
//! ([`check_inherited`], [`drop_rights`]), Landlock and the main thread's seccomp filter
//! ([`close_in`]), then threads, each with the filter of its kind.

mod capabilities;
pub mod lists;
mod seccomp;
#[cfg(test)]
mod tests;

use std::os::fd::RawFd;

use anyhow::{Context, Result, bail};
use caps::{CapSet, Capability};
use rustix::{
    io::Errno,
    process::getuid,
    thread::{CapabilitySet, remove_capability_from_bounding_set},
};
use tracing::warn;
#[cfg(debug_assertions)]
use vmm_base::thread::{self, ThreadKind};
#[cfg(debug_assertions)]
use vmm_core::memory::locate;
use vmm_sandbox::{
    landlock::{self, Level},
    process::{forbid_backtraces, lock_down},
};

use crate::{args::Seccomp, sys};

/// The user that `vmm run` becomes when it was started as root: "nobody".
const NOBODY: u32 = 65534;

/// Under the daemon: everything was dropped before the exec. Checks that it was.
pub fn check_inherited(keep: &[RawFd]) -> Result<()> {
    if getuid().is_root() {
        bail!("`vmm serve` does not run as root: start it under a user of its own (vmmd does)");
    }
    let sets = capabilities::held().context("reading the capability sets")?;
    if let Some(set) = sets.into_iter().find(|set| set.bits != 0) {
        bail!(
            "`vmm serve` runs without capabilities, but its {} set holds {:?}: clear it before the exec",
            set.name,
            set.known().collect::<Vec<_>>()
        );
    }
    sys::close_others(keep).context("closing inherited descriptors")?;
    lock_down()
}

/// For `vmm run`: drops all droppable rights, after all files are open. A root process becomes the
/// user `nobody`.
pub fn drop_rights() -> Result<()> {
    let root = getuid().is_root();
    if let Err(error) = sys::leave_network(root) {
        warn!(%error, "the kernel gives this process no network namespace of its own: it stays in the host's network");
    }
    drop_bounding_set()?;
    if root {
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

/// From now on this process opens nothing and makes nothing but threads. To be called when everything is open, before
/// the first thread is made.
pub fn close_in(mode: Seccomp) -> Result<Sandbox> {
    let landlock = landlock::enforce()?;
    match landlock {
        Level::Full => {}
        Level::Partial => {
            warn!("the host's kernel has an early Landlock: it does not limit all that this one can");
        }
        Level::None => {
            warn!("the host's kernel has no Landlock: paths are kept from this process by seccomp alone");
        }
    }
    forbid_backtraces();
    seccomp::enforce(mode)?;
    Ok(Sandbox {
        landlock,
        seccomp: mode,
    })
}

/// Restrictions of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sandbox {
    /// Landlock support of the kernel.
    pub landlock: Level,
    /// Action on a system call outside a thread's list.
    pub seccomp: Seccomp,
}

impl Sandbox {
    /// Restrictions as features of this process, which the daemon reports to an operator.
    pub fn features(self) -> Vec<&'static str> {
        let landlock = match self.landlock {
            Level::Full => Some("landlock"),
            Level::Partial => Some("landlock-partial"),
            Level::None => None,
        };
        let seccomp = match self.seccomp {
            Seccomp::On => Some("seccomp"),
            Seccomp::Log => Some("seccomp-log"),
            Seccomp::Off => None,
        };
        landlock.into_iter().chain(seccomp).collect()
    }
}

fn drop_bounding_set() -> Result<()> {
    let [_, bounding, effective, ..] = capabilities::held().context("reading the capability sets")?;
    // In a container, some capabilities may be missing, among them CAP_SETPCAP, the right to drop
    // others. The process cannot regain a capability that stays in the set, since no_new_privs is
    // set below.
    if effective.bits & Capability::CAP_SETPCAP.bitmask() == 0 {
        return Ok(());
    }
    for capability in bounding.known() {
        let bit = CapabilitySet::from_bits_retain(capability.bitmask());
        match remove_capability_from_bounding_set(bit) {
            // A security module may take all rights in a user namespace (kernel.apparmor_restrict_unprivileged_userns).
            Err(Errno::PERM) => {
                warn!(
                    "the kernel gives this process no rights in its user namespace: its bounding set stays"
                );
                return Ok(());
            }
            result => result.with_context(|| format!("dropping {capability} from the bounding set"))?,
        }
    }
    Ok(())
}

/// Runs the forbidden operations that a test asks for in a thread of this kind.
#[cfg(debug_assertions)]
fn attempt(kind: ThreadKind) {
    // Workers create the threads of images only for a guest with requests. This thread needs no
    // guest.
    let wants_storage = |wanted: &str| wanted.starts_with(ThreadKind::Storage.name());
    if kind == ThreadKind::Worker && std::env::var("VMM_ATTEMPT").is_ok_and(|wanted| wants_storage(&wanted)) {
        let _ = thread::spawn(ThreadKind::Storage, "blk-pool", || ());
    }
    vmm_sandbox::attempt::run(kind.name(), |page, length| locate::insert(page, length, 0x7000));
}
