//! The firmware of a VM that boots through it. For FIRMWARE_TYPE_AUTO the first start chooses the firmware by the content of the disks: a
//! process without rights looks at each disk in the boot order until one can be booted. The choice is a part of the VM's hardware, because
//! an installed system expects the same firmware at its next start.

use std::{sync::Arc, time::Duration};

use serde::Deserialize;
use vmmd_api::v1;
use vmmd_host::{failure::Failure, image_process::Job};
use vmmd_spec::{
    disk::{BootOrder, Bus, Disk, Source},
    vm::{Boot, FirmwareType},
};
use vmmd_store::VmRecord;

use super::{Plan, blocking, disk_job, failures::failed};
use crate::{
    files::{self, Files, OpenDisk},
    host::Host,
    paths::NonVolatileDir,
};

/// How long a look at a disk may take.
const DEADLINE: Duration = Duration::from_secs(20);

/// Answer of `vmm-image firmware`.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase", tag = "firmware")]
enum Answer {
    Uefi,
    Bios,
}

/// Opens the firmware of the VM, if it boots through one. Notes a choice in the record.
///
/// # Errors
///
/// `BOOT_LOADER_NOT_FOUND` when no disk can be booted, and `FIRMWARE_NOT_FOUND`.
pub(super) async fn open(host: &Arc<Host>, plan: &mut Plan, files: &mut Files) -> Result<(), Failure> {
    let Boot::Firmware { kind: wanted, .. } = plan.spec.boot else {
        note(&mut plan.record, None);
        return Ok(());
    };
    let reset = plan.reset_nvram;
    let chosen = noted(&plan.record).filter(|_| !reset);
    let kind = match wanted.or(chosen) {
        Some(kind) => kind,
        None => choose(host, &plan.spec.disks, &files.disks).await?,
    };
    note(&mut plan.record, Some(kind).filter(|_| wanted.is_none()));
    let (host, uid) = (Arc::clone(host), plan.uid);
    let opened = blocking(move || {
        let variables = NonVolatileDir::of(&host.config, uid);
        if reset {
            variables
                .remove_variables()
                .map_err(|error| failed("remove the firmware's variables", &error))?;
        }
        files::firmware::open(&host.config.firmware, kind, &variables)
    });
    files.firmware = Some(opened.await?);
    Ok(())
}

/// The choice of an earlier start.
fn noted(record: &VmRecord) -> Option<FirmwareType> {
    let hardware = record.instance.as_ref().and_then(|run| run.hardware.as_ref());
    let wire = v1::FirmwareType::try_from(hardware?.firmware);
    FirmwareType::of(wire.ok()?)
}

fn note(record: &mut VmRecord, kind: Option<FirmwareType>) {
    let firmware = kind.map_or(0, |kind| v1::FirmwareType::from(kind).into());
    let run = record.instance.as_mut().and_then(|run| run.hardware.as_mut());
    for hardware in run.into_iter().chain(record.hardware.as_mut()) {
        hardware.firmware = firmware;
    }
}

/// The firmware of the first disk in the boot order that can be booted.
async fn choose(host: &Arc<Host>, disks: &[Disk], opened: &[OpenDisk]) -> Result<FirmwareType, Failure> {
    let bootable = disks.iter().zip(opened);
    let mut bootable: Vec<_> = bootable
        .filter(|(disk, _)| !matches!(disk.source, Source::Seed | Source::Empty))
        .collect();
    BootOrder::sort(&mut bootable, |(disk, _)| disk.boot_order);
    let mut reasons = Vec::new();
    for (disk, opened) in bootable {
        let job = job(disk, opened).map_err(|error| failed("look for a boot loader on a disk", &error))?;
        match host.image_processes.run(job, |_| ()).await {
            Ok(answer) => {
                let answer = serde_json::from_str(&answer);
                let answer = answer.map_err(|error| {
                    Failure::internal(format!("unexpected answer of `vmm-image firmware`: {error}"))
                });
                return Ok(match answer? {
                    Answer::Uefi => FirmwareType::Uefi,
                    Answer::Bios => FirmwareType::Bios,
                });
            }
            Err(failure) if failure.reason == "IMAGE_UNUSABLE" => {
                reasons.push(format!("disk \"{}\": {}", disk.name, failure.message));
            }
            Err(failure) => return Err(failure),
        }
    }
    let reasons = match reasons.is_empty() {
        true => "the VM has no disk".to_owned(),
        false => reasons.join("; "),
    };
    let message = format!(
        "spec.boot.firmware: no firmware boots the VM: {reasons}. Set the type of the firmware (UEFI or BIOS) for a disk that is to be \
         installed, or use spec.boot.fromDisk for a disk with a Linux kernel and no boot loader"
    );
    Err(Failure::precondition("BOOT_LOADER_NOT_FOUND", message))
}

fn job(disk: &Disk, opened: &OpenDisk) -> std::io::Result<Job> {
    let mut job = disk_job("firmware", opened, disk.logical_block, Vec::new(), DEADLINE)?;
    if disk.bus == (Bus::Sata { cdrom: true }) {
        job.arguments.push("--cdrom".to_owned());
    }
    Ok(job)
}
