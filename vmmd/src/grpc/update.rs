//! UpdateVm: the checks before a VM's actor receives the request.

use tonic::Status;
use vmmd_api::v1::{self, ApplyMode};
use vmmd_host::failure::Failure;
use vmmd_objects::context::Context;
use vmmd_spec::{Violations, mask::UpdateMask, vm::Manifest};

use crate::{auth, host::Host, registry::vms::command::Update};

/// Path of UpdateVm.
const PATH: &str = "/vmmd.v1.VmService/UpdateVm";

/// Refuses an update whose mask names fields that the caller may not change. An update without a
/// mask requires an admin.
pub fn permit(request: &tonic::Request<v1::UpdateVmRequest>) -> Result<(), Status> {
    let mask = mask(request.get_ref())?;
    auth::require(request, PATH, mask.map(|mask| mask.role().into()))
}

fn mask(request: &v1::UpdateVmRequest) -> Result<Option<UpdateMask>, Failure> {
    let mask = request.update_mask.as_ref();
    let parsed = mask.map(|mask| UpdateMask::new("updateMask", &mask.paths));
    Ok(parsed.transpose()?)
}

/// Returns the name of the request's VM and the update. Reports all invalid fields at once.
pub fn parse(
    host: &Host,
    request: v1::UpdateVmRequest,
    context: Context,
) -> Result<(String, Box<Update>), Failure> {
    let mask = mask(&request)?;
    let v1::UpdateVmRequest {
        vm,
        apply,
        grace_period,
        no_wait,
        force_media,
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
    let Some(vm) = vm else {
        found.add("vm", "must be given");
        return Err(found.into());
    };
    if vm.status.is_some() {
        found.add("status", "is set by the daemon: leave it out");
    }
    let name = vm
        .metadata
        .as_ref()
        .map_or("", |metadata| &metadata.name)
        .to_owned();
    let update = Update {
        vm,
        mask,
        mode,
        grace,
        no_wait,
        force_media,
        context,
    };
    // The result of a mask is only known when it is applied.
    if update.mask.is_none() {
        let whole = update.desired(&v1::Vm::default(), &host.disks)?;
        found
            .0
            .extend(Manifest::try_from(&whole).err().unwrap_or_default().0);
    }
    Ok(found.or((name, Box::new(update)))?)
}
