//! Differences between the machine of a running VM and its spec, and how each one can be applied.
//!
//! Both sides are compared in their canonical JSON, after unset fields have received their defaults
//! ([`effective`]). A field that is added to the spec is therefore compared automatically, and
//! requires a restart until it has a [`Live`] variant. Lists are compared by the names of their
//! items. Their order is irrelevant to a machine, because its addresses are stored separately.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value as Json;
use uuid::Uuid;
use vmmd_api::v1::{
    self, ClockOnResume, CrashPolicy, DiskErrorPolicy, DiskFormat, NicBackend, RunPolicy, ShareCache, VmSpec,
};
use vmmd_network::tap_name;
use vmmd_spec::{
    Violations,
    cpu::Model,
    disk::{Disk, MAX_SERIAL},
    share::MAX_TAG,
};
use vmmd_store::{Hardware, VmRecord};

use crate::host::Host;

/// Something of the spec that the machine has otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// `spec.cpu.cores`, `spec.disks[data].queues`.
    pub path: String,
    /// Value in the machine; null if absent.
    pub current: Json,
    /// Value in the spec; null if absent.
    pub desired: Json,
    /// How the change can be applied.
    pub verdict: Verdict,
}

/// How a change can be applied to a running VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It can be applied at once.
    Live(Live),
    /// The next start has it.
    Restart,
}

/// A change that a running machine can take over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Live {
    /// Means nothing to the machine.
    RunPolicy,
    /// Means nothing to the machine either.
    StateDir,
    /// The same: it is the daemon that acts.
    OnPanic,
    /// The same.
    Probes,
    /// The same: the daemon gives them to the agent of the guest.
    AccessCredentials,
    /// The limit of a disk's own.
    DiskLimit(String),
    /// The limit of a rate group.
    GroupLimit(String),
    /// A NIC more.
    AttachNic(String),
    /// A NIC less.
    DetachNic(String),
    /// Whether a NIC's link is up.
    NicLink(String),
    /// Receive rate limit of a NIC, from the guest's view.
    NicReceiveLimit(String),
    /// Transmit rate limit of a NIC, from the guest's view.
    NicTransmitLimit(String),
    /// Connections of a guest over a NIC in a network of the node: the fields [`ACCESS`], which change together.
    NicAccess(String),
    /// A rate group that no disk of the machine is in.
    DropGroup(String),
    /// Memory that the balloon leaves to the guest.
    BalloonTarget,
    /// Shares and caps of the node's processors, and which of them.
    Processors,
    /// A disk more.
    Attach(String),
    /// A disk less.
    Detach(String),
    /// A share more. Not in a machine whose memory is private.
    AttachShare(String),
    /// A share less.
    DetachShare(String),
    /// The medium of a CD-ROM drive.
    Medium(String),
}

/// Fields of a disk that name the medium of a CD-ROM drive.
const MEDIUM: [&str; 5] = ["path", "disk", "podVolume", "format", "beneath"];

/// Fields of a NIC that [`Live::NicAccess`] covers.
const ACCESS: [&str; 5] = [
    "publishedPorts",
    "firewall",
    "routedSubnets",
    "floatingAddresses",
    "securityGroups",
];

/// Messages without required fields that a machine has or does not have. For other messages an empty one and none are the same.
const PRESENT: [&str; 5] = [
    "spec.display",
    "spec.guestAgent",
    "spec.tpm",
    "spec.virtioConsole",
    "spec.vsock",
];

/// Paths that [`Live::Processors`] covers.
const PROCESSORS: [&str; 3] = [
    "spec.cpu.coreFractionPercent",
    "spec.cpu.coreLimitPercent",
    "spec.cpu.hostCpus",
];

/// Lists whose items have names.
const NAMED: [&str; 7] = [
    "spec.accessCredentials",
    "spec.channels",
    "spec.credentials",
    "spec.disks",
    "spec.nics",
    "spec.rateGroups",
    "spec.shares",
];

/// Returns the differences between the machine and the spec. Empty without a run.
pub fn pending(record: &VmRecord) -> Vec<Change> {
    let (Some(run), Some(desired)) = (&record.instance, &record.spec) else {
        return Vec::new();
    };
    let running = run.spec.as_ref().unwrap_or(desired);
    let none = Hardware::default();
    let hardware = record.hardware.as_ref().unwrap_or(&none);
    let of_run = run.hardware.as_ref().unwrap_or(hardware);
    if running == desired && of_run == hardware {
        return Vec::new();
    }
    let mut changes = compare(&effective(running, of_run), &effective(desired, hardware));
    for change in &mut changes {
        if matches!(change.verdict, Verdict::Live(Live::AttachShare(_))) && !run.shared_memory {
            change.verdict = Verdict::Restart;
        }
    }
    changes
}

impl Change {
    /// Why it waits for a restart, where that is not plain.
    pub fn why_restart(&self) -> Option<&'static str> {
        let is_whole = self.verdict == Verdict::Restart && self.path.ends_with(']');
        if is_whole && self.path.starts_with("spec.shares[") {
            Some(
                "the machine was started with private memory, and what serves a share has to map it: restart the VM",
            )
        } else if is_whole && self.desired.get("metadata").is_some() {
            Some("the documents of the metadata service are made at the start of the VM: restart the VM")
        } else if is_whole && self.path.starts_with("spec.nics[") {
            Some(
                "a NIC in the network of the VM's pod is attached and detached by a start of the VM: restart the VM",
            )
        } else {
            None
        }
    }
}

/// Records the spec's generation for the run if no change is pending.
pub fn settle(record: &mut VmRecord) {
    let generation = record.generation;
    let settled = pending(record).is_empty();
    if let Some(run) = &mut record.instance
        && settled
        && run.attaching.is_empty()
    {
        run.generation = generation;
    }
}

/// Returns the spec with its unset fields filled in, from the addresses of its NICs and the
/// documented defaults.
pub fn effective(spec: &VmSpec, hardware: &Hardware) -> VmSpec {
    let mut spec = spec.clone();
    super::secret::redact(&mut spec);
    if spec.run_policy() == RunPolicy::Unspecified {
        spec.set_run_policy(RunPolicy::AlwaysOnUnlessStopped);
    }
    if spec.on_crash() == CrashPolicy::Unspecified {
        spec.set_on_crash(CrashPolicy::Restart);
    }
    let clock = spec.clock.get_or_insert_default();
    if clock.on_resume() == ClockOnResume::Unspecified {
        clock.set_on_resume(ClockOnResume::Keep);
    }
    if let Some(cpu) = &mut spec.cpu {
        if cpu.core_fraction_percent == 0 {
            cpu.core_fraction_percent = 100;
        }
        if cpu.model.is_empty() {
            Model::Host.name().clone_into(&mut cpu.model);
        }
        if let Some(features) = &mut cpu.features {
            for names in [&mut features.add, &mut features.remove] {
                names.sort_unstable();
                names.dedup();
            }
        }
        cpu.features = cpu.features.take().filter(|it| *it != v1::CpuFeatures::default());
    }
    for nic in &mut spec.nics {
        nic.mac = match super::mac(hardware, &nic.name) {
            Some(mac) => mac.to_string(),
            None => nic.mac.to_lowercase(),
        };
        nic.queues = nic.queues.max(1);
        if nic.backend() == NicBackend::Unspecified {
            nic.set_backend(NicBackend::Userspace);
        }
        nic.disabled_offloads.sort_unstable();
        nic.disabled_offloads.dedup();
        nic.receive_limit = nic.receive_limit.filter(limits);
        nic.transmit_limit = nic.transmit_limit.filter(limits);
    }
    for disk in &mut spec.disks {
        if disk.serial.is_empty() {
            disk.serial = disk.name.chars().take(MAX_SERIAL).collect();
        }
        disk.read_only |= disk.format() == DiskFormat::Iso || disk.cdrom;
        if disk.bus() == v1::DiskBus::Unspecified {
            disk.set_bus(if disk.cdrom {
                v1::DiskBus::Sata
            } else {
                v1::DiskBus::Virtio
            });
        }
        disk.logical_block_bytes = disk.logical_block_bytes.max(512);
        if disk.on_error() == DiskErrorPolicy::Unspecified {
            disk.set_on_error(DiskErrorPolicy::Report);
        }
        disk.rate_limit = disk.rate_limit.filter(limits);
        // It matters when the disk is new.
        disk.any_content = false;
    }
    for share in &mut spec.shares {
        if share.tag.is_empty() {
            share.tag = share.name.chars().take(MAX_TAG).collect();
        }
        if share.cache() == ShareCache::Unspecified {
            share.set_cache(ShareCache::Auto);
        }
    }
    for group in &mut spec.rate_groups {
        group.limit = group.limit.filter(limits);
    }
    spec
}

/// Whether the disk of that name is at a port of the SATA controller, where no disk is hot-plugged.
pub fn is_on_sata(disks: &[v1::DiskSpec], name: &str) -> bool {
    let disk = disks.iter().find(|disk| disk.name == name);
    disk.is_some_and(|disk| disk.cdrom || disk.bus() == v1::DiskBus::Sata)
}

/// Whether the NIC of that name is in the network of the VM's pod, where no NIC is hot-plugged.
fn is_in_pod(spec: &VmSpec, name: &str) -> bool {
    let nic = spec.nics.iter().find(|nic| nic.name == name);
    nic.is_some_and(|nic| matches!(nic.attachment, Some(v1::nic_spec::Attachment::PodNetwork(_))))
}

/// Whether the NIC of that name has the metadata service, whose documents are made at a start.
fn has_metadata(spec: &VmSpec, name: &str) -> bool {
    spec.nics.iter().any(|nic| nic.name == name && nic.metadata)
}

fn limits(limit: &v1::RateLimit) -> bool {
    *limit != v1::RateLimit::default()
}

/// Returns each difference between a machine's spec and its desired spec once, sorted by path.
pub fn compare(running: &VmSpec, desired: &VmSpec) -> Vec<Change> {
    let json = |spec| serde_json::to_value(spec).unwrap_or_default();
    let mut changes = Vec::new();
    walk("spec".to_owned(), &json(running), &json(desired), &mut changes);
    let regrouped: BTreeSet<_> = changes
        .iter()
        .filter_map(|change| change.path.strip_suffix(".rateGroup").map(str::to_owned))
        .collect();
    join_media(running, desired, &mut changes);
    for change in &mut changes {
        let possible = match &change.verdict {
            // Between a limit of its own and that of a group it is never without one.
            Verdict::Live(Live::DiskLimit(_)) => change
                .path
                .strip_suffix(".rateLimit")
                .is_none_or(|disk| !regrouped.contains(disk)),
            // The groups of a machine are made when it is built.
            Verdict::Live(Live::Attach(name)) => {
                let disk = desired.disks.iter().find(|disk| disk.name == *name);
                disk.is_some_and(|disk| {
                    let mut groups = running.rate_groups.iter();
                    let grouped =
                        disk.rate_group.is_empty() || groups.any(|group| group.name == disk.rate_group);
                    grouped && !is_on_sata(&desired.disks, name)
                })
            }
            Verdict::Live(Live::Detach(name)) => !is_on_sata(&running.disks, name),
            Verdict::Live(Live::DropGroup(name)) => running.disks.iter().all(|disk| disk.rate_group != *name),
            Verdict::Live(Live::BalloonTarget) => {
                let balloon = running.balloon.unwrap_or_default();
                !balloon.disabled && !desired.balloon.unwrap_or_default().disabled
            }
            Verdict::Live(Live::AttachNic(name)) => !is_in_pod(desired, name) && !has_metadata(desired, name),
            Verdict::Live(Live::DetachNic(name)) => !is_in_pod(running, name),
            // The NIC has to stay in its network.
            Verdict::Live(Live::NicAccess(name)) => {
                let attachment = |spec: &VmSpec| {
                    let nic = spec.nics.iter().find(|nic| nic.name == *name);
                    nic.and_then(|nic| nic.attachment.clone())
                };
                let now = attachment(running);
                matches!(now, Some(v1::nic_spec::Attachment::Network(_))) && now == attachment(desired)
            }
            Verdict::Live(_) | Verdict::Restart => true,
        };
        if !possible {
            change.verdict = Verdict::Restart;
        }
    }
    changes
}

/// Makes the changed fields of a drive's medium one change, which a machine with the drive takes over.
fn join_media(running: &VmSpec, desired: &VmSpec, changes: &mut Vec<Change>) {
    let is_drive = |spec: &VmSpec, name: &str| spec.disks.iter().any(|disk| disk.name == name && disk.cdrom);
    let mut joined = BTreeSet::new();
    changes.retain_mut(|change| {
        let medium = change.path.strip_prefix("spec.disks[").and_then(|rest| {
            let (name, field) = rest.split_once("].")?;
            MEDIUM.contains(&field).then(|| name.to_owned())
        });
        let Some(name) = medium.filter(|name| is_drive(running, name) && is_drive(desired, name)) else {
            return true;
        };
        change.verdict = Verdict::Live(Live::Medium(name.clone()));
        joined.insert(name)
    });
}

fn walk(path: String, running: &Json, desired: &Json, found: &mut Vec<Change>) {
    if running == desired {
        return;
    }
    if NAMED.contains(&path.as_str()) {
        let (running, desired) = (by_name(running), by_name(desired));
        let names: BTreeSet<_> = running.keys().chain(desired.keys()).copied().collect();
        for name in names {
            let path = format!("{path}[{name}]");
            match (running.get(name), desired.get(name)) {
                (Some(running), Some(desired)) => walk(path, running, desired, found),
                (running, desired) => {
                    let value = |side: Option<&&Json>| side.map(|json| (*json).clone()).unwrap_or_default();
                    note(path, value(running), value(desired), found);
                }
            }
        }
        return;
    }
    let is_empty = |json: &Json| json.as_object().is_none_or(serde_json::Map::is_empty);
    if PRESENT.contains(&path.as_str()) && is_empty(running) && is_empty(desired) {
        return note(path, running.clone(), desired.clone(), found);
    }
    let fields = |json: &Json| match json {
        Json::Object(fields) => Some(fields.keys().cloned().collect()),
        Json::Null => Some(BTreeSet::new()),
        _ => None,
    };
    match (fields(running), fields(desired)) {
        (Some(mut keys), Some(more)) if !whole(&path) && (running.is_object() || desired.is_object()) => {
            keys.extend(more);
            let none = &Json::Null;
            for key in keys {
                let (running, desired) = (running.get(&key), desired.get(&key));
                let path = format!("{path}.{key}");
                walk(path, running.unwrap_or(none), desired.unwrap_or(none), found);
            }
        }
        _ => note(path, running.clone(), desired.clone(), found),
    }
}

fn note(path: String, current: Json, desired: Json, found: &mut Vec<Change>) {
    let verdict = verdict(&path, !current.is_null(), !desired.is_null());
    found.push(Change {
        path,
        current,
        desired,
        verdict,
    });
}

fn by_name(list: &Json) -> BTreeMap<&str, &Json> {
    let items = list.as_array().into_iter().flatten();
    items
        .filter_map(|item| Some((item.get("name")?.as_str()?, item)))
        .collect()
}

/// Whether a path is changed as a whole: a limit is one request, and so are all rules of a NIC.
fn whole(path: &str) -> bool {
    let wholes = ["].rateLimit", "].receiveLimit", "].transmitLimit", "].firewall"];
    path == "spec.probes"
        || wholes.iter().any(|limit| path.ends_with(limit))
        || path.starts_with("spec.rateGroups[") && path.ends_with("].limit")
}

fn verdict(path: &str, was: bool, is: bool) -> Verdict {
    let item = |list: &str, field: &str| {
        let name = path.strip_prefix(list)?.strip_prefix('[')?;
        Some(name.strip_suffix(field)?.strip_suffix(']')?.to_owned())
    };
    let live = match (was, is) {
        _ if path == "spec.runPolicy" => Some(Live::RunPolicy),
        _ if path == "spec.stateDir" => Some(Live::StateDir),
        _ if path == "spec.onPanic" => Some(Live::OnPanic),
        _ if path == "spec.probes" => Some(Live::Probes),
        _ if path.starts_with("spec.accessCredentials[") => Some(Live::AccessCredentials),
        _ if path == "spec.balloon.targetBytes" => Some(Live::BalloonTarget),
        _ if PROCESSORS.contains(&path) => Some(Live::Processors),
        (false, true) if path.ends_with(']') => item("spec.disks", "")
            .map(Live::Attach)
            .or_else(|| item("spec.nics", "").map(Live::AttachNic))
            .or_else(|| item("spec.shares", "").map(Live::AttachShare)),
        (true, false) if path.ends_with(']') => item("spec.disks", "")
            .map(Live::Detach)
            .or_else(|| item("spec.nics", "").map(Live::DetachNic))
            .or_else(|| item("spec.shares", "").map(Live::DetachShare))
            .or_else(|| item("spec.rateGroups", "").map(Live::DropGroup)),
        _ => item("spec.disks", ".rateLimit")
            .map(Live::DiskLimit)
            .or_else(|| item("spec.rateGroups", ".limit").map(Live::GroupLimit))
            .or_else(|| item("spec.nics", ".linkDown").map(Live::NicLink))
            .or_else(|| item("spec.nics", ".receiveLimit").map(Live::NicReceiveLimit))
            .or_else(|| item("spec.nics", ".transmitLimit").map(Live::NicTransmitLimit))
            .or_else(|| {
                let mut fields = ACCESS.iter();
                fields.find_map(|field| item("spec.nics", &format!(".{field}")).map(Live::NicAccess))
            }),
    };
    live.map_or(Verdict::Restart, Verdict::Live)
}

/// Notes in the record of the run that the machine has taken over a change.
pub fn take_over(record: &mut VmRecord, live: &Live) {
    let desired = record.spec.clone().unwrap_or_default();
    let Hardware {
        disk_slots: slots,
        nics,
        share_slots,
        ..
    } = record.hardware.clone().unwrap_or_default();
    let uid = Uuid::from_slice(&record.uid).unwrap_or_default();
    let Some(run) = &mut record.instance else { return };
    let hardware = run.hardware.get_or_insert_default();
    let running = run.spec.get_or_insert_with(|| desired.clone());
    match live {
        Live::RunPolicy => running.run_policy = desired.run_policy,
        Live::StateDir => running.state_dir = desired.state_dir,
        Live::OnPanic => running.on_panic = desired.on_panic,
        Live::Probes => running.probes = desired.probes,
        Live::AccessCredentials => running.access_credentials = desired.access_credentials,
        Live::DiskLimit(name) => {
            let wanted = desired.disks.iter().find(|disk| disk.name == *name);
            let disk = running.disks.iter_mut().find(|disk| disk.name == *name);
            if let (Some(disk), Some(wanted)) = (disk, wanted) {
                disk.rate_limit = wanted.rate_limit;
            }
        }
        Live::GroupLimit(name) => {
            let wanted = desired.rate_groups.iter().find(|group| group.name == *name);
            let group = running.rate_groups.iter_mut().find(|group| group.name == *name);
            if let (Some(group), Some(wanted)) = (group, wanted) {
                group.limit = wanted.limit;
            }
        }
        Live::NicLink(name)
        | Live::NicReceiveLimit(name)
        | Live::NicTransmitLimit(name)
        | Live::NicAccess(name) => {
            let wanted = desired.nics.iter().find(|nic| nic.name == *name);
            let nic = running.nics.iter_mut().find(|nic| nic.name == *name);
            if let (Some(nic), Some(wanted)) = (nic, wanted) {
                match live {
                    Live::NicLink(_) => nic.link_down = wanted.link_down,
                    Live::NicReceiveLimit(_) => nic.receive_limit = wanted.receive_limit,
                    Live::NicAccess(_) => {
                        nic.published_ports.clone_from(&wanted.published_ports);
                        nic.firewall.clone_from(&wanted.firewall);
                        nic.routed_subnets.clone_from(&wanted.routed_subnets);
                        nic.floating_addresses.clone_from(&wanted.floating_addresses);
                        nic.security_groups.clone_from(&wanted.security_groups);
                    }
                    _ => nic.transmit_limit = wanted.transmit_limit,
                }
            }
        }
        Live::DropGroup(name) => running.rate_groups.retain(|group| group.name != *name),
        Live::BalloonTarget => {
            let target = desired.balloon.unwrap_or_default().target_bytes;
            running.balloon.get_or_insert_default().target_bytes = target;
        }
        Live::Processors => {
            let wanted = desired.cpu.unwrap_or_default();
            let cpu = running.cpu.get_or_insert_default();
            cpu.core_fraction_percent = wanted.core_fraction_percent;
            cpu.core_limit_percent = wanted.core_limit_percent;
            cpu.host_cpus = wanted.host_cpus;
        }
        Live::Attach(name) => {
            running.disks.retain(|disk| disk.name != *name);
            let disk = desired.disks.iter().find(|disk| disk.name == *name);
            running.disks.extend(disk.cloned());
            if let Some(slot) = slots.get(name) {
                hardware.disk_slots.insert(name.clone(), *slot);
            }
        }
        Live::AttachNic(name) => {
            running.nics.retain(|nic| nic.name != *name);
            let nic = desired.nics.iter().find(|nic| nic.name == *name);
            running.nics.extend(nic.cloned());
            if let Some(nic) = nics.get(name) {
                hardware.nics.insert(name.clone(), nic.clone());
                run.taps.insert(name.clone(), tap_name(uid, nic.slot));
            }
        }
        Live::DetachNic(name) => {
            running.nics.retain(|nic| nic.name != *name);
            hardware.nics.remove(name);
            run.taps.remove(name);
        }
        Live::Detach(name) => {
            running.disks.retain(|disk| disk.name != *name);
            hardware.disk_slots.remove(name);
        }
        Live::Medium(name) => {
            let wanted = desired.disks.iter().find(|disk| disk.name == *name);
            let disk = running.disks.iter_mut().find(|disk| disk.name == *name);
            if let (Some(disk), Some(wanted)) = (disk, wanted) {
                disk.source.clone_from(&wanted.source);
                disk.format = wanted.format;
                disk.beneath.clone_from(&wanted.beneath);
                disk.any_content = wanted.any_content;
            }
        }
        Live::AttachShare(name) => {
            running.shares.retain(|share| share.name != *name);
            let share = desired.shares.iter().find(|share| share.name == *name);
            // cloud-init received the list of mounts at the start.
            running.shares.extend(share.cloned().map(without_mount));
            if let Some(slot) = share_slots.get(name) {
                hardware.share_slots.insert(name.clone(), *slot);
            }
        }
        Live::DetachShare(name) => {
            running.shares.retain(|share| share.name != *name);
            hardware.share_slots.remove(name);
        }
    }
}

fn without_mount(share: v1::ShareSpec) -> v1::ShareSpec {
    v1::ShareSpec {
        mount: String::new(),
        ..share
    }
}

/// Disks that the machine has, by the record; none without a run.
pub fn running_disks(record: &VmRecord) -> &[v1::DiskSpec] {
    let run = record.instance.as_ref();
    let spec = run.and_then(|run| run.spec.as_ref().or(record.spec.as_ref()));
    spec.map(|spec| spec.disks.as_slice()).unwrap_or_default()
}

/// Guest RAM of the machine in bytes, by the record; without a run that of the spec.
pub fn running_memory(record: &VmRecord) -> u64 {
    let run = record.instance.as_ref().and_then(|run| run.spec.as_ref());
    let memory = run.or(record.spec.as_ref()).and_then(|spec| spec.memory);
    memory.unwrap_or_default().size_bytes
}

/// Returns the spec of a run's machine with the devices that the machine is about to receive. The
/// VM's limits follow this spec, not the spec for the next start.
pub fn machine(record: &VmRecord, desired: &vmmd_spec::vm::VmSpec) -> vmmd_spec::vm::VmSpec {
    let Some(mut running) = record.instance.as_ref().and_then(|run| run.spec.clone()) else {
        return desired.clone();
    };
    let alone = running.clone();
    let wanted = record.spec.clone().unwrap_or_default();
    for disk in wanted.disks {
        if running.disks.iter().all(|other| other.name != disk.name) {
            running.disks.push(disk);
        }
    }
    for nic in wanted.nics {
        if running.nics.iter().all(|other| other.name != nic.name) {
            running.nics.push(nic);
        }
    }
    for share in wanted.shares {
        if running.shares.iter().all(|other| other.name != share.name) {
            running.shares.push(without_mount(share));
        }
    }
    for group in wanted.rate_groups {
        if running.rate_groups.iter().all(|other| other.name != group.name) {
            running.rate_groups.push(group);
        }
    }
    let found =
        vmmd_spec::vm::VmSpec::try_from(&running).or_else(|_| vmmd_spec::vm::VmSpec::try_from(&alone));
    found.unwrap_or_else(|_| desired.clone())
}

/// The validated form of a disk of a run; it was validated when it came.
pub fn validated(disk: &v1::DiskSpec) -> Option<Disk> {
    Disk::new(&mut Violations::default(), "disk", disk)
}

/// Reports a VM's disks to the DiskService: the disks of its spec and of its machine.
pub fn hold_disks(host: &Host, record: &VmRecord) {
    let spec = record.spec.as_ref();
    let disks = spec.map(|spec| spec.disks.as_slice()).unwrap_or_default();
    host.disks
        .hold(&record.name, disks.iter().chain(running_disks(record)));
}

#[cfg(test)]
mod tests;
