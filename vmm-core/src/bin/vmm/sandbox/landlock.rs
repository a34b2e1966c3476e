//! Landlock without a single rule: no file is opened, made, removed, run or truncated by path, no TCP port is bound
//! or connected to; where the kernel knows scopes (ABI 6, Linux 6.12), no signal goes to a process outside and no
//! abstract UNIX socket of others is connected to. Descriptors that are open stay usable.

use anyhow::{Context, Result};
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetStatus, Scope,
};

use super::Level;

/// Newest ABI that is asked for. What the kernel has not of it is left out, and told.
const NEWEST: ABI = ABI::V6;

/// Restricts this thread and all that it makes. Says how much of it the kernel does.
pub fn enforce() -> Result<Level> {
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))
        .and_then(|rules| rules.handle_access(AccessNet::from_all(NEWEST)))
        .and_then(|rules| rules.scope(Scope::from_all(NEWEST)))
        .and_then(|rules| rules.create())
        .and_then(|rules| rules.restrict_self())
        .context("restricting the process with Landlock")?;
    Ok(match status.ruleset {
        RulesetStatus::FullyEnforced => Level::Full,
        RulesetStatus::PartiallyEnforced => Level::Partial,
        RulesetStatus::NotEnforced => Level::None,
    })
}
