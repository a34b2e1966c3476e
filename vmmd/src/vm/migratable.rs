//! Whether a VM can be moved to another node, for the admission of a migration and for the condition `Migratable`.

use vmmd_host::failure::Failure;
use vmmd_spec::{
    disk::{Disk, Format, Source},
    vm::VmSpec,
};
use vmmd_store::VmRecord;

use super::actor::runs_as_wanted;
use crate::host::Host;

/// Refused for a VM that cannot be moved now, with the reason. `spec` is that of the record.
pub fn migratable(host: &Host, record: &VmRecord, spec: &VmSpec) -> Result<(), Failure> {
    host.peers.takes_part()?;
    refuse_what_stays(spec)?;
    runs_as_wanted(record)
}

/// Refused for a VM that has something which can't go to another node.
pub fn refuse_what_stays(spec: &VmSpec) -> Result<(), Failure> {
    let refuse = |disk: &Disk, why: &str| {
        let message = format!("the guest can write to disk \"{}\", {why}", disk.name);
        Err(Failure::precondition("MIGRATION_DISKS", message))
    };
    for disk in spec.disks.iter().filter(|disk| !disk.read_only) {
        match &disk.source {
            Source::Path {
                format: Format::Raw, ..
            }
            | Source::Pod {
                format: Format::Raw, ..
            }
            | Source::Seed
            | Source::Empty
            | Source::Disk { .. } => {}
            Source::Path { .. } | Source::Pod { .. } => {
                let why = "and a qcow2 image by path or on a volume can't go to another node while it is written to: raw disks on storage that both \
                           nodes share can, and disks that vmmd keeps";
                return refuse(disk, why);
            }
        }
    }
    if let Some(share) = spec.shares.first() {
        let message = format!(
            "share \"{}\" is a directory of this node, whose state in the guest can't go to another one: VMs with shares can't be migrated",
            share.name
        );
        return Err(Failure::precondition("MIGRATION_SHARES", message));
    }
    Ok(())
}
