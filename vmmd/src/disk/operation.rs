//! Operations of disks: begun, followed, ended early.

use vmmd_host::failure::Failure;
use vmmd_objects::{
    context::Context,
    operation::{Handle, Type},
};
use vmmd_store::DiskRecord;

use super::object;
use crate::host::Host;

/// Notes an operation of a disk that begins. Refused as BUSY while another one is under way.
pub fn begin(host: &Host, what: Type, record: &DiskRecord, context: &Context) -> Result<Handle, Failure> {
    let handle = host.operations.begin(what, &object(record), context, None);
    if let Err(failure) = host.disks.begin(&record.name, handle.id()) {
        handle.fail(&failure);
        return Err(failure);
    }
    Ok(handle)
}
