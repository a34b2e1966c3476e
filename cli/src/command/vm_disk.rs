//! Disks of a VM: attached, detached, resized, limited; counters of a VM.

use std::time::Duration;

use vmmd_api::v1;

use super::{
    disk_spec,
    keys::usage,
    update::{self, Change, How},
};
use crate::{
    args::{
        Output,
        disk::{Detach, Limit, Stats},
    },
    client::{Client, DISKS, QUICK, WORK, about_vm, call, send},
    failure::{Code, Failure, Result},
    manifest::{quantity, schema},
    output::{self, format},
};

/// Time limit that the daemon uses for the release of a disk by default.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// `attach`.
pub async fn attach(client: &Client, vm: &str, disk: v1::DiskSpec) -> Result<()> {
    let name = disk.name.clone();
    let done = add(client, vm, disk).await.map_err(disk_spec::in_options)?;
    output::line(format!("vm/{vm} disk {name} {done}"))
}

/// Adds a disk to a VM; returns the result in words.
pub async fn add(client: &Client, vm: &str, disk: v1::DiskSpec) -> Result<&'static str> {
    let name = disk.name.clone();
    let kept = !disk.disk().is_empty();
    let request = v1::AttachDiskRequest {
        vm: vm.to_owned(),
        disk: Some(disk),
        ..Default::default()
    };
    let answer = send!(client.limit(WORK), client.vms, attach_disk, request).await;
    let answer = answer.map_err(|failure| match failure.code {
        Code::NotFound if !is_about_vm(&failure) => failure.hint(DISKS),
        _ if kept && &*failure.reason == "DISK_NOT_FOUND" => failure.hint(DISKS),
        Code::Exhausted if &*failure.reason == "NO_FREE_SLOT" => {
            failure.hint(format!("`vmmctl describe vm {vm}` shows them"))
        }
        _ => about_vm(failure, vm),
    })?;
    let there = answer.vm.and_then(|vm| vm.status).unwrap_or_default();
    let there = there.disks.into_iter().find(|disk| disk.name == name);
    match there.map(|disk| disk.phase()) {
        Some(v1::AttachmentPhase::Pending) => Ok("will be attached at the next start"),
        _ => Ok("attached"),
    }
}

/// Takes disks from a VM, one after another.
pub async fn detach(client: &Client, args: &Detach) -> Result<(), Vec<Failure>> {
    let mut failures = Vec::new();
    for disk in &args.disks {
        let request = v1::DetachDiskRequest {
            vm: args.vm.clone(),
            disk: disk.clone(),
            timeout: args.timeout.map(Into::into),
            force: args.force,
            ..Default::default()
        };
        let limit = args.timeout.unwrap_or(DEFAULT_TIMEOUT) + WORK;
        match send!(client.limit(limit), client.vms, detach_disk, request).await {
            Ok(_) => output::line(format!("vm/{} disk {disk} detached", args.vm))?,
            Err(failure) if failure.code == Code::Timeout && !args.force => {
                let hint = format!(
                    "unmount it in the guest first, or use `vmmctl detach {} {disk} --force`",
                    args.vm
                );
                failures.push(about(failure, &args.vm, disk).hint(hint));
            }
            Err(failure) => failures.push(about(failure, &args.vm, disk)),
        }
    }
    super::all(failures)
}

/// Puts a medium into the drive of a VM, or ejects the present one.
pub async fn medium(
    client: &Client,
    (vm, drive): (&str, &str),
    medium: Option<&str>,
    force: bool,
) -> Result<()> {
    let (source, format) = match medium {
        Some(medium) => disk_spec::medium(medium),
        None => Default::default(),
    };
    let disk = v1::DiskSpec {
        name: drive.to_owned(),
        source,
        format: format.into(),
        ..Default::default()
    };
    let change = Change {
        vm: v1::Vm {
            metadata: super::metadata(vm, &[]),
            spec: Some(v1::VmSpec {
                disks: vec![disk],
                ..Default::default()
            }),
            ..Default::default()
        },
        paths: ["path", "disk", "format", "beneath"]
            .map(|field| format!("spec.disks[{drive}].{field}"))
            .to_vec(),
    };
    let how = How {
        force_media: force,
        ..How::default()
    };
    let now = update::change(client, change, how).await;
    let now = now.map_err(|failure| about(failure, vm, drive))?;
    let status = now.status.unwrap_or_default();
    let field = format!("spec.disks[{drive}].");
    let mut pending = status.pending_changes.into_iter();
    if let Some(left) = pending.find(|change| change.path.starts_with(&field)) {
        let message = format!(
            "drive \"{drive}\" keeps its medium until the next start: {}",
            left.message
        );
        return Err(Failure::new(Code::Precondition, message).about("vm", vm));
    }
    let done = match medium {
        Some(medium) => format!("has {medium}"),
        None => "is empty".to_owned(),
    };
    output::line(format!("vm/{vm} drive {drive} {done}"))
}

/// Makes a disk of a VM larger; without `size`, takes over the size of its block device.
pub async fn resize(client: &Client, vm: &str, disk: &str, size: Option<u64>) -> Result<()> {
    let request = v1::ResizeVmDiskRequest {
        vm: vm.to_owned(),
        disk: disk.to_owned(),
        size_bytes: size,
        ..Default::default()
    };
    let answer = send!(client.limit(WORK), client.vms, resize_vm_disk, request).await;
    let answer = answer.map_err(|failure| about(failure, vm, disk))?;
    let status = answer.vm.and_then(|vm| vm.status).unwrap_or_default();
    let now = status.disks.iter().find(|status| status.name == disk);
    let size = now.and_then(|status| status.capacity_bytes).or(size);
    let size = size
        .map(|size| format!(" to {}", quantity::show(size)))
        .unwrap_or_default();
    output::line(format!("vm/{vm} disk {disk} resized{size}"))
}

/// Returns the target of a limit change.
pub fn target(args: &Limit) -> Result<Target> {
    if args.limits.is_empty() && !args.none {
        let message =
            "no change is given: use --bps, --iops, --burst, --burst-ops, or --none to remove all limits";
        return Err(usage(message));
    }
    match (&args.disk, &args.group) {
        (Some(disk), _) => Ok(Target::Disk(disk.clone())),
        (None, Some(group)) => Ok(Target::Group(group.clone())),
        (None, None) => Err(usage("--disk or --group is required")),
    }
}

/// Changes a limit; fields that are not named stay unchanged.
pub async fn limit(client: &Client, args: &Limit, target: Target) -> Result<()> {
    let (path, shown) = match &target {
        Target::Disk(name) => (
            format!("spec.disks[{name}].rate_limit"),
            format!("spec.disks[{name}].rateLimit"),
        ),
        Target::Group(name) => (
            format!("spec.rate_groups[{name}].limit"),
            format!("spec.rateGroups[{name}].limit"),
        ),
    };
    let paths = match args.limits.named() {
        _ if args.none => vec![path],
        named => named.into_iter().map(|field| format!("{path}.{field}")).collect(),
    };
    let wanted = args.limits.over(v1::RateLimit::default());
    let mut spec = v1::VmSpec::default();
    match &target {
        Target::Disk(name) => spec.disks.push(v1::DiskSpec {
            name: name.clone(),
            rate_limit: (!args.none).then_some(wanted),
            ..Default::default()
        }),
        Target::Group(name) => spec.rate_groups.push(v1::RateGroup {
            name: name.clone(),
            limit: (!args.none).then_some(wanted),
        }),
    }
    let change = Change {
        vm: v1::Vm {
            metadata: super::metadata(&args.vm, &[]),
            spec: Some(spec),
            ..Default::default()
        },
        paths,
    };
    let (Target::Disk(name) | Target::Group(name)) = &target;
    let vm = update::change(client, change, How::default()).await;
    let vm = vm.map_err(|failure| about(failure, &args.vm, name))?;
    let done = limit_text(&target, &present(&vm, &target));
    let waits = update::waits(&vm, &shown);
    output::line(format!("vm/{} {done}{waits}", args.vm))
}

/// Target of a limit change.
#[derive(Clone, Debug)]
pub enum Target {
    /// A disk in the VM.
    Disk(String),
    /// A rate group of the VM.
    Group(String),
}

/// `disk data: 100Mi/s`.
fn limit_text(target: &Target, limit: &v1::RateLimit) -> String {
    let (what, name) = match target {
        Target::Disk(name) => ("disk", name),
        Target::Group(name) => ("group", name),
    };
    match output::disk::limit(limit) {
        none if none.is_empty() => format!("{what} {name}: no limit"),
        limit => format!("{what} {name}: {limit}"),
    }
}

/// The limit of a disk or group in the VM's spec; no limit when it is missing.
fn present(vm: &v1::Vm, target: &Target) -> v1::RateLimit {
    let spec = vm.spec.clone().unwrap_or_default();
    let limit = match target {
        Target::Disk(name) => {
            let disk = spec.disks.into_iter().find(|disk| disk.name == *name);
            disk.and_then(|disk| disk.rate_limit)
        }
        Target::Group(name) => {
            let group = spec.rate_groups.into_iter().find(|group| group.name == *name);
            group.and_then(|group| group.limit)
        }
    };
    limit.unwrap_or_default()
}

/// Prints the counters of a VM's disks.
pub async fn stats(client: &Client, args: &Stats) -> Result<(), Vec<Failure>> {
    if args.disks.is_empty() {
        return Ok(vm_stats(client, args).await?);
    }
    let request = v1::GetVmDiskStatsRequest { vm: args.vm.clone() };
    let answer = call(QUICK, client.vms.clone().get_vm_disk_stats(request)).await;
    let mut stats = answer.map_err(|failure| vec![about_vm(failure, &args.vm)])?;
    let there = |name: &String| stats.disks.iter().any(|disk| disk.name == *name);
    let missing = args.disks.iter().filter(|name| !there(name)).map(|name| {
        let message = format!("the run of vm/{} has no disk \"{name}\"", args.vm);
        Failure::new(Code::NotFound, message).hint(disks_of(&args.vm))
    });
    let failures = missing.collect();
    stats.disks.retain(|disk| args.disks.contains(&disk.name));
    let title = || format!("vm/{}", args.vm);
    let print = || match &args.output {
        None if stats.disks.is_empty() => Ok(()),
        None | Some(Output::Wide) => output::print(&output::stats::table(&stats.disks)),
        Some(output) => format::one(title(), &stats, schema::DISK_STATS, output),
    };
    print()?;
    super::all(failures)
}

/// Prints the counters of the whole VM.
async fn vm_stats(client: &Client, args: &Stats) -> Result<()> {
    let stats = client.stats(&args.vm).await?;
    match &args.output {
        None | Some(Output::Wide) => output::print(&output::stats::vm(&stats)),
        Some(output) => format::one(format!("vm/{}", args.vm), &stats, schema::VM_STATS, output),
    }
}

/// Adds to a failure about a VM's disk the command that helps.
fn about(failure: Failure, vm: &str, disk: &str) -> Failure {
    if failure.code == Code::NotFound && !is_about_vm(&failure) {
        return failure.about("disk", disk).hint(disks_of(vm));
    }
    about_vm(failure, vm)
}

/// Whether the missing object is the VM.
fn is_about_vm(failure: &Failure) -> bool {
    failure.reason.is_empty() || &*failure.reason == "VM_NOT_FOUND"
}

fn disks_of(vm: &str) -> String {
    format!("`vmmctl describe vm {vm}` shows its disks")
}
