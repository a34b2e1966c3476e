//! UpdateVm: what is checked before a VM's actor is asked.

use std::sync::Arc;

use proto::{
    model::{Violations, vm::Manifest},
    v1::{self, ApplyMode},
};

use crate::{
    context::Context,
    failure::Failure,
    host::Host,
    node::placement,
    vm::{Update, files},
};

/// The VM that a request is about, and what it is to be; all wrong fields at once.
pub fn parse(
    host: &Host,
    request: v1::UpdateVmRequest,
    context: Context,
) -> Result<(String, Box<Update>), Failure> {
    let v1::UpdateVmRequest {
        vm,
        apply,
        grace_period,
        ..
    } = request;
    let mut found = Violations::default();
    let mode = ApplyMode::try_from(apply).unwrap_or_else(|_| {
        found.add("apply", format_args!("unknown value {apply}"));
        ApplyMode::Unspecified
    });
    let grace = super::period::period("gracePeriod", grace_period).unwrap_or_else(|failure| {
        found.0.extend(failure.violations.0);
        None
    });
    let Some(mut vm) = vm else {
        found.add("vm", "must be given");
        return Err(found.into());
    };
    for disk in vm.spec.iter_mut().flat_map(|spec| &mut spec.disks) {
        host.disks.fill_format(disk);
    }
    if vm.status.is_some() {
        found.add("status", "is set by the daemon: leave it out");
    }
    let manifest = Manifest::try_from(&vm);
    let manifest = match (manifest, found.0.is_empty()) {
        (Ok(manifest), true) => manifest,
        (Ok(_), false) => return Err(found.into()),
        (Err(more), _) => {
            found.0.extend(more.0);
            return Err(found.into());
        }
    };
    let metadata = vm.metadata.unwrap_or_default();
    let update = Update {
        manifest,
        spec: vm.spec.unwrap_or_default(),
        uid: metadata.uid,
        create_time: metadata.create_time,
        generation: (metadata.generation != 0).then_some(metadata.generation),
        mode,
        grace,
        context,
    };
    Ok((metadata.name, Box::new(update)))
}

/// For a dry run: whether the files are there.
pub async fn check_files(host: &Arc<Host>, name: &str, update: &Update) -> Result<(), Failure> {
    let (of, name, spec) = (Arc::clone(host), name.to_owned(), update.manifest.spec.clone());
    let paths = files::named(&spec, &host.sources());
    let looking = host
        .pools
        .files
        .run(&paths, move || files::look(&spec, &of.sources(), &name));
    placement::refuse(&looking.await?)
}
