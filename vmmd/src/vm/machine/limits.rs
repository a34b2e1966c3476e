//! Resource limits of a VM: applied at its start, with another disk or other processor settings,
//! and when a daemon finds it running. All functions block.

use std::{io, path::Path};

use uuid::Uuid;
use vmmd_host::{
    cgroup::{
        Group,
        facts::{self, SYSFS},
        huge_pages_are_memory,
        plan::{self, Plan},
    },
    failure::Failure,
    text,
};
use vmmd_spec::vm::VmSpec;

use crate::{files, host::Host};

/// Plans the settings of a VM's cgroup. Fails if the node does not support the spec.
pub fn plan(host: &Host, spec: &VmSpec) -> Result<Plan, Failure> {
    let parent = host.cgroups.as_ref().map(|parent| parent.ready()).transpose();
    let parent = parent.map_err(|error| unusable(&error))?;
    let mut facts = facts::read(Path::new(SYSFS), parent, spec);
    facts.huge_pages_are_memory = huge_pages_are_memory();
    facts.disks_in_memory = files::bytes_in_memory(spec, &host.sources());
    plan::plan(spec, &facts)
}

/// The same for a VM that is about to start: it also needs room for its memory.
pub fn plan_start(host: &Host, spec: &VmSpec) -> Result<Plan, Failure> {
    let plan = plan(host, spec)?;
    plan::check_room(spec, &facts::room(Path::new(SYSFS), spec))?;
    Ok(plan)
}

/// Makes the cgroup of a VM that is about to start. That of a VM of a pod has no limits of its own.
pub fn create(host: &Host, uid: Uuid, plan: &Plan) -> Result<Option<Group>, Failure> {
    if let Some(parent) = host
        .cgroups
        .as_ref()
        .filter(|parent| parent.placed(uid).is_some())
    {
        return parent.create(uid).map(Some).map_err(|error| unusable(&error));
    }
    if !plan.missing.is_empty() {
        let missing: Vec<_> = plan.missing.iter().map(|controller| controller.name()).collect();
        tracing::warn!(%uid, missing = missing.join(", "), "the VM runs without limits of controllers that its cgroup lacks");
    }
    let Some(parent) = &host.cgroups else {
        return Ok(None);
    };
    let group = parent.create(uid).map_err(|error| unusable(&error))?;
    apply(&group, uid, plan, false)?;
    Ok(Some(group))
}

/// Applies the limits of a running VM.
pub fn set(host: &Host, uid: Uuid, spec: &VmSpec) -> Result<(), Failure> {
    if spec.pod.is_some() {
        return Ok(());
    }
    let plan = plan(host, spec)?;
    match &host.cgroups {
        Some(parent) => apply(&parent.group(uid), uid, &plan, true),
        None => Ok(()),
    }
}

/// Applies the limits of a running VM again. A failure is logged, and the VM continues.
pub fn renew(host: &Host, uid: Uuid, spec: &VmSpec) {
    if host.cgroups.is_none() {
        return;
    }
    if let Err(failure) = set(host, uid, spec) {
        tracing::warn!(%uid, %failure, "the limits of a running VM could not be set again");
    }
}

fn unusable(error: &io::Error) -> Failure {
    Failure::internal(format!("make the VM's cgroup: {}", text::words(error)))
}

/// A limit that the spec asks for must be; others are a loss that is logged.
fn apply(group: &Group, uid: Uuid, plan: &Plan, running: bool) -> Result<(), Failure> {
    for (setting, error) in group.apply(&plan.settings, running) {
        let (file, value) = (&setting.file, &setting.value);
        if let Some(field) = setting.field {
            let message = format!(
                "{field}: the node's kernel does not take \"{value}\" for {file} ({}): give another value",
                text::words(&error)
            );
            return Err(Failure::precondition("LIMIT_REFUSED", message));
        }
        // A kernel without `io.weight` or swap is nothing to worry about.
        if error.kind() == io::ErrorKind::NotFound {
            tracing::debug!(%uid, file, "the kernel has no such limit");
        } else {
            tracing::warn!(%uid, file, value, %error, "a limit of the VM could not be set");
        }
    }
    Ok(())
}
