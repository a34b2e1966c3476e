//! Tasks that plug, unplug and change disks. The tasks are independent of the actor and report an
//! [`Outcome`].

use std::{collections::BTreeMap, os::fd::OwnedFd, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep_until, timeout};
use vmm_protocol::vmm::{
    self, AttachDisk, ChangeMedium, DetachDisk, DiskStats, ErrorKind, MachineStats, ResizeDisk, SetRateLimit,
    Status, UpdateNic, request::Op, set_rate_limit::Target,
};
use vmmd_api::v1::GuestInfo;
use vmmd_host::{
    failure::{Failure, Kind},
    ledger::FileId,
};
use vmmd_objects::operation::Control;
use vmmd_spec::disk::{Disk, Format, RateLimit, Source};
use vmmd_store::Hardware;

use crate::{
    control::{self, Client},
    disk,
    files::{self, Known, Locks},
    host::Host,
    registry::vms::command::Reply,
    share::Unkept,
    vm::{
        machine::{self, change::Live},
        start,
    },
};

/// How long a `vmm` may take for one request about disks: opening an image with large tables is the longest.
/// A client has more patience than that, so that it hears whose fault it is.
pub(super) const TIMEOUT: Duration = Duration::from_secs(20);

/// Result of a task.
#[derive(Debug)]
pub enum Outcome {
    /// An attach.
    Attached(String, u64, Result<Plugged, AttachError>),
    /// A detach.
    Detached(String, u64, Result<(), Failure>),
    /// A resize: the disk's new size.
    Resized(String, Reply, Result<u64, Failure>),
    /// Another medium in a drive: as [`Self::Applied`], with the files of the medium.
    Medium(String, Live, serde_json::Value, Result<Plugged, Failure>),
    /// Another live change: its path, its kind and the value that was requested.
    Applied(String, Live, serde_json::Value, Result<(), Failure>),
    /// The guest, by its agent.
    Guest(Result<Box<GuestInfo>, Failure>),
    /// Passwords and keys of the guest's users, set by its agent: the number of the reason.
    Access(u64, Result<(), Failure>),
    /// Status of the `vmm`.
    State(Result<Status, control::Error>),
    /// Files behind the disks that the machine had when the daemon started.
    Identified(BTreeMap<String, Vec<FileId>>),
    /// A share more: as [`Self::Applied`], with the process that serves it.
    ShareAttached(String, Live, serde_json::Value, Result<Option<Unkept>, Failure>),
    /// Which NICs and shares the machine has, asked after so many changes of them.
    PluggedLooked(u64, Result<MachineStats, control::Error>),
    /// Disks of the machine, with the generation at the time of the request.
    Looked(u64, Result<Vec<DiskStats>, control::Error>),
}

/// A disk that was plugged in.
#[derive(Debug)]
pub struct Plugged {
    /// Files behind the disk.
    pub ids: Vec<FileId>,
    /// Which file is at its path, if it has one.
    pub known: Known,
}

/// Why a disk could not be plugged in.
#[derive(Debug)]
pub enum AttachError {
    /// The machine does not have it.
    Refused(Failure),
    /// Nobody knows: the `vmm` does not answer.
    Unknown(Failure),
}

/// Opens the files of a disk, and describes the disk for the machine. `known` are the files that the VM has had.
async fn open(
    host: &Arc<Host>,
    disk: Disk,
    known: Known,
    hardware: Hardware,
) -> Result<((vmm::Disk, Vec<OwnedFd>), Plugged), Failure> {
    let (of, paths) = (Arc::clone(host), files::paths(&disk, &host.sources()));
    let opening = host.pools.files.run(&paths, move || {
        let opened = files::open_disk("disk", &disk, &of.sources(), Locks::Take)?;
        let plugged = Plugged {
            ids: opened.ids.clone(),
            known: files::learn(&known, "disk", &disk, &opened)?,
        };
        Ok((machine::plug(&hardware, &disk, opened), plugged))
    });
    opening.await.and_then(|opened| opened)
}

/// Opens a disk and plugs it in. `known` are the files that the VM has had.
pub async fn attach(
    host: Arc<Host>,
    client: Client,
    disk: Disk,
    known: Known,
    hardware: Hardware,
) -> Result<Plugged, AttachError> {
    let name = disk.name.to_string();
    let opened = open(&host, disk, known, hardware).await;
    let ((wire, fds), plugged) = opened.map_err(AttachError::Refused)?;
    let op = Op::AttachDisk(AttachDisk { disk: Some(wire) });
    let answer = timeout(TIMEOUT, client.request(op, &fds)).await;
    drop(fds);
    match answer {
        Ok(Ok(_)) => Ok(plugged),
        Ok(Err(control::Error::Refused(error))) => {
            let failure = about(&name, refused(&control::Error::Refused(error)));
            Err(AttachError::Refused(failure))
        }
        unclear => match has(&client, &name).await {
            Some(true) => Ok(plugged),
            _ => Err(AttachError::Unknown(unclear_failure(&name, unclear))),
        },
    }
}

/// Opens the medium of a CD-ROM drive and puts it into the drive. With `force` the guest cannot prevent that.
pub async fn change_medium(
    host: Arc<Host>,
    client: Client,
    disk: Disk,
    hardware: Hardware,
    force: bool,
) -> Result<Plugged, Failure> {
    let name = disk.name.to_string();
    let ((wire, fds), plugged) = open(&host, disk, Known::new(), hardware).await?;
    let op = Op::ChangeMedium(ChangeMedium {
        disk: Some(wire),
        force,
    });
    match timeout(TIMEOUT, client.request(op, &fds)).await {
        Ok(Ok(_)) => Ok(plugged),
        Ok(Err(error @ control::Error::Refused(_))) => Err(about(&name, refused(&error))),
        unclear => Err(unclear_failure(&name, unclear)),
    }
}

/// Asks the guest to eject a disk, waits until `deadline`, and then, with `force`, takes it away. That the guest has
/// ejected it is news that comes to the actor, which ends this.
pub async fn detach(client: Client, name: String, deadline: Instant, force: bool) -> Result<(), Failure> {
    let began = Instant::now();
    if began < deadline || !force {
        let asked = timeout(TIMEOUT, client.request(detach_op(&name, false), &[])).await;
        match asked {
            Ok(Ok(_)) => {}
            Ok(Err(control::Error::Refused(error))) if error.kind() == ErrorKind::NotFound => return Ok(()),
            // A forced detach does not need the guest's cooperation.
            Ok(Err(control::Error::Refused(_))) if force => {}
            Ok(Err(control::Error::Refused(error))) => {
                return Err(about(&name, refused(&control::Error::Refused(error))));
            }
            unclear => return Err(unclear_failure(&name, unclear)),
        }
        sleep_until(deadline).await;
        // An event can be lost.
        if has(&client, &name).await == Some(false) {
            return Ok(());
        }
    }
    if force {
        return match timeout(TIMEOUT, client.request(detach_op(&name, true), &[])).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(control::Error::Refused(error))) if error.kind() == ErrorKind::NotFound => Ok(()),
            Ok(Err(control::Error::Refused(error))) => {
                Err(about(&name, refused(&control::Error::Refused(error))))
            }
            unclear => Err(unclear_failure(&name, unclear)),
        };
    }
    let message = format!(
        "the guest did not eject disk \"{name}\" within {:.0?}: it stays attached; try again, with more time or with force",
        deadline.saturating_duration_since(began)
    );
    Err(Failure::new(Kind::Deadline, "EJECT_TIMEOUT", message))
}

fn detach_op(name: &str, force: bool) -> Op {
    Op::DetachDisk(DetachDisk {
        name: name.to_owned(),
        force,
    })
}

/// Grows a disk of a running machine and returns the new size. Size 0 takes the size of the block
/// device.
pub async fn resize(host: Arc<Host>, client: Client, disk: Disk, size: u64) -> Result<u64, Failure> {
    let name = disk.name.to_string();
    let record = match &disk.source {
        Source::Disk { name, .. } => Some(host.disks.get(name.as_str())?),
        Source::Path { .. } | Source::Pod { .. } => None,
        Source::Seed => return Err(is_seed()),
        Source::Empty => return Err(is_empty(&name)),
    };
    let stats = stats(&client)
        .await
        .map_err(|error| about(&name, refused(&error)))?;
    let present = stats
        .iter()
        .find(|stats| stats.name == name)
        .map_or(0, |stats| stats.capacity_bytes);
    let block_device = match &disk.source {
        Source::Path {
            path, beneath: None, ..
        } => {
            let (path, paths) = (path.clone(), [path.clone()]);
            let looking = host.pools.files.run(&paths, move || {
                use std::os::unix::fs::FileTypeExt;
                std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_block_device())
            });
            looking.await?
        }
        Source::Pod { volume, .. } => {
            let pod = volume.pod.as_ref().and_then(|uid| host.pods.get(uid.as_str()));
            pod.is_some_and(|pod| {
                pod.volume(volume.name.as_str())
                    .is_ok_and(|volume| volume.block_device)
            })
        }
        // Beneath a folder of others only a regular file is opened.
        Source::Path { .. } | Source::Disk { .. } | Source::Seed | Source::Empty => false,
    };
    if block_device && size != 0 {
        return Err(disk::block_device(&name, present));
    }
    if !block_device {
        let mut found = vmmd_spec::Violations::default();
        vmmd_spec::disk::size(&mut found, "sizeBytes", size);
        found.or(())?;
        if size < present {
            return Err(disk::shrink_refused(&name, present, size));
        }
    }
    if let Some(record) = &record {
        disk::reserve_growth(&host, record, size).await?;
    }
    let op = Op::ResizeDisk(ResizeDisk {
        name: name.clone(),
        capacity_bytes: size,
    });
    let answer = timeout(TIMEOUT, client.request(op, &[])).await;
    match answer {
        Ok(Ok(_)) => {}
        Ok(Err(error @ control::Error::Refused(_))) => return Err(about(&name, refused(&error))),
        unclear => return Err(unclear_failure(&name, unclear)),
    }
    let grown = if block_device {
        let stats = self::stats(&client).await.unwrap_or_default();
        let disk = stats.iter().find(|stats| stats.name == name);
        disk.map_or(present, |stats| stats.capacity_bytes)
    } else {
        size
    };
    if let Some(record) = record {
        disk::note(&host, &record.name, grown).await?;
    }
    Ok(grown)
}

fn is_seed() -> Failure {
    Failure::precondition(
        "DISK_IS_SEED",
        "the disk is made by the daemon at each start and has a fixed size",
    )
}

fn is_empty(disk: &str) -> Failure {
    let message = format!("disk \"{disk}\" is a CD-ROM drive without a medium");
    Failure::precondition("NO_MEDIUM", message)
}

/// Makes a disk of a VM without a process larger; returns the size.
pub async fn resize_file(host: &Arc<Host>, disk: &Disk, size: u64) -> Result<u64, Failure> {
    match &disk.source {
        Source::Disk { name, .. } => {
            let mut found = vmmd_spec::Violations::default();
            vmmd_spec::disk::size(&mut found, "sizeBytes", size);
            found.or(())?;
            let record = host.disks.get(name.as_str())?;
            if size < record.size_bytes {
                return Err(disk::shrink_refused(name.as_str(), record.size_bytes, size));
            }
            disk::grow_record(host, &record, size, Control::default()).await
        }
        Source::Path {
            path,
            format,
            beneath,
        } => {
            let growing = disk::Growing {
                name: disk.name.to_string(),
                path: path.clone(),
                own: false,
                beneath: beneath.clone(),
                format: *format,
                size: None,
                preallocation: vmmd_spec::disk::Preallocation::Off,
                backing: Vec::<(std::path::PathBuf, Format)>::new(),
            };
            disk::grow(host, growing, size, Control::default()).await
        }
        Source::Pod { .. } => {
            let message = format!(
                "disk \"{}\" is on a volume of the VM's pod: make it larger while the VM runs, or resize the volume",
                disk.name
            );
            Err(Failure::precondition("VM_NOT_RUNNING", message))
        }
        Source::Seed => Err(is_seed()),
        Source::Empty => Err(is_empty(disk.name.as_str())),
    }
}

/// Changes a rate limit of a running machine.
pub async fn limit(client: Client, target: Target, limit: RateLimit) -> Result<(), Failure> {
    let (Target::Disk(name) | Target::Group(name)) = &target;
    let what = &name.clone();
    let op = Op::SetRateLimit(SetRateLimit {
        target: Some(target),
        limit: Some(limit.into()),
    });
    match timeout(TIMEOUT, client.request(op, &[])).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error @ control::Error::Refused(_))) => Err(about(what, refused(&error))),
        unclear => Err(unclear_failure(what, unclear)),
    }
}

/// Changes a NIC of a machine.
pub async fn update_nic(client: Client, update: UpdateNic) -> Result<(), Failure> {
    let name = update.name.clone();
    match timeout(TIMEOUT, client.request(Op::UpdateNic(update), &[])).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error @ control::Error::Refused(_))) => Err(refused(&error)),
        unclear => Err(unclear_about(&format!("NIC \"{name}\""), unclear)),
    }
}

/// The disks that a machine has. Waits as long as the `vmm` lives.
pub async fn look(client: Client) -> Result<Vec<DiskStats>, control::Error> {
    client.disk_stats().await
}

/// The VM has no disk of this name.
pub fn no_disk(name: &str) -> Failure {
    let message = format!("the VM has no disk \"{}\"", vmmd_host::text::brief(name));
    Failure::new(Kind::NotFound, "DISK_NOT_FOUND", message)
}

async fn stats(client: &Client) -> Result<Vec<DiskStats>, control::Error> {
    let stats = timeout(TIMEOUT, client.disk_stats()).await;
    stats.unwrap_or(Err(control::Error::Timeout(TIMEOUT)))
}

/// Whether a machine has a disk, where it says so.
async fn has(client: &Client, name: &str) -> Option<bool> {
    let stats = stats(client).await.ok()?;
    Some(stats.iter().any(|stats| stats.name == name))
}

/// Failure for the client when a `vmm` refuses a disk request.
pub(super) fn refused(error: &control::Error) -> Failure {
    let control::Error::Refused(remote) = error else {
        return start::refused(error);
    };
    let message = remote.message.clone();
    match remote.kind() {
        ErrorKind::Invalid => Failure::precondition("DISK_REFUSED", message),
        ErrorKind::State => Failure::precondition("NOT_NOW", message),
        ErrorKind::NotFound => Failure::new(Kind::NotFound, "DISK_NOT_FOUND", message),
        _ => start::refused(error),
    }
}

fn about(name: &str, failure: Failure) -> Failure {
    if failure.message.contains(name) {
        return failure;
    }
    Failure {
        message: format!("disk \"{name}\": {}", failure.message),
        ..failure
    }
}

fn unclear_failure<T, E>(name: &str, answer: Result<Result<T, control::Error>, E>) -> Failure {
    unclear_about(&format!("disk \"{name}\""), answer)
}

pub(super) fn unclear_about<T, E>(what: &str, answer: Result<Result<T, control::Error>, E>) -> Failure {
    let why = match answer {
        Ok(Err(error)) => vmmd_host::text::chain(&error),
        Ok(Ok(_)) | Err(_) => format!("the vmm did not answer within {} s", TIMEOUT.as_secs()),
    };
    let message = format!("{what}: {why}; look at the VM's status for what has become of it");
    Failure::new(Kind::Unavailable, "VMM_UNRESPONSIVE", message)
}
