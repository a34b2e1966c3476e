//! A VM as the API shows it.

use std::{net::IpAddr, time::Duration};

use uuid::Uuid;
use vm_lifecycle::handover::{Source, Target};
use vmmd_api::v1::{self, AttachmentPhase, ConditionStatus, VmPhase};
use vmmd_spec::{
    Violations,
    disk::Source as DiskSource,
    pci,
    vm::{Attachment, Boot, Nic, VmSpec},
};

pub use vm_lifecycle::pause::{DISK_ERROR, MIGRATING, SNAPSHOT};

use vm_lifecycle::{exit::PANICKED, policy};
use vmmd_host::{clock, text};
use vmmd_store::{
    HandoverRecord, HandoverStage, InstanceRecord, Key, VmRecord,
    handover::{self, Handover},
};

use crate::{
    host::Host,
    vm::{
        actor::Attachments,
        instance::{AgentState, Instance, Unreaped, link::State},
        machine::{
            self,
            change::{self, Change},
            secret,
        },
        migratable::migratable,
    },
};

/// Reason of a `vmm` that lives and does not answer.
pub const UNRESPONSIVE: &str = "Unresponsive";
/// Message of that.
pub const NO_ANSWER: &str = "the vmm process lives but does not answer: a stop by force ends it";
/// Message of a machine that was started before the spec had a channel.
const NO_CHANNEL: &str = "the running machine has no channel to an agent: restart the VM";
/// Message of an agent that has not opened its channel.
const NO_AGENT: &str =
    "no program of the guest has opened the agent's channel: does qemu-guest-agent run in it?";
/// Why a VM is not ready whose guest's kernel has panicked.
pub const GUEST_PANICKED: &str = "GuestPanicked";

/// State of an actor in addition to the record.
#[derive(Clone, Debug)]
pub struct View {
    /// The phase.
    pub phase: VmPhase,
    /// Why, one CamelCase word.
    pub reason: String,
    /// For people.
    pub message: String,
    /// When the phase was entered, in milliseconds of Unix time.
    pub phase_ms: u64,
    /// Part of a failed start that was killed and has not died, if any.
    pub lingering: Option<Unreaped>,
    /// Last status and time of the condition `Ready`.
    ready: (ConditionStatus, u64),
    /// The same of `BlockDevicesReady`.
    block_devices: (ConditionStatus, u64),
    /// Id of the operation under way; empty when there is none.
    pub operation: String,
    /// The same of `RestartRequired`.
    restart_required: (ConditionStatus, u64),
    /// The same of `Migratable`.
    migratable: (ConditionStatus, u64),
    /// The same of `AgentReady`.
    agent_ready: (ConditionStatus, u64),
    /// The same of `AccessCredentialsSynchronized`.
    access: (ConditionStatus, u64),
    /// The spec without its secrets, by generation: each change of the spec is another generation.
    shown: Option<(u64, Option<v1::VmSpec>)>,
}

impl View {
    /// A VM in this phase from now on.
    pub fn new(phase: VmPhase, reason: impl Into<String>, message: impl Into<String>) -> Self {
        let now = text::now_ms();
        let (reason, message) = (reason.into(), message.into());
        Self {
            phase,
            reason,
            message,
            phase_ms: now,
            lingering: None,
            ready: (ConditionStatus::Unspecified, now),
            block_devices: (ConditionStatus::Unspecified, now),
            operation: String::new(),
            restart_required: (ConditionStatus::Unspecified, now),
            migratable: (ConditionStatus::Unspecified, now),
            agent_ready: (ConditionStatus::Unspecified, now),
            access: (ConditionStatus::Unspecified, now),
            shown: None,
        }
    }

    /// The VM's spec without its secrets.
    fn spec(&mut self, record: &VmRecord, key: &Key) -> Option<v1::VmSpec> {
        match &self.shown {
            Some((generation, spec)) if *generation == record.generation => spec.clone(),
            _ => {
                let spec = secret::shown(record.spec.as_ref(), key);
                self.shown = Some((record.generation, spec.clone()));
                spec
            }
        }
    }

    /// Another phase, or the same for another reason.
    pub fn enter(&mut self, phase: VmPhase, reason: impl Into<String>, message: impl Into<String>) {
        if self.phase != phase {
            self.phase_ms = text::now_ms();
        }
        self.phase = phase;
        self.reason = reason.into();
        self.message = message.into();
    }

    /// All of it as a message.
    pub fn describe(
        &mut self,
        host: &Host,
        uid: Uuid,
        record: &VmRecord,
        spec: &VmSpec,
        instance: Option<&Instance>,
        attached: &Attachments,
    ) -> v1::Vm {
        let metadata = v1::ObjectMetadata {
            name: record.name.clone(),
            uid: uid.to_string(),
            generation: record.generation,
            labels: record.labels.clone(),
            annotations: record.annotations.clone(),
            owner: record.owner.clone(),
            create_time: text::timestamp(record.created_ms),
        };
        let run = record.instance.as_ref().filter(|_| instance.is_some());
        let left = if run.is_some() {
            attached.left(record)
        } else {
            Vec::new()
        };
        let status = v1::VmStatus {
            phase: self.phase.into(),
            reason: self.reason.clone(),
            message: self.message.clone(),
            observed_generation: run.map_or(0, |run| run.generation),
            instance: instance.map(|instance| v1::InstanceStatus {
                pid: instance.process.pid(),
                uid: instance.claim.user(),
                start_time: run.and_then(started),
                guest_resets: instance.guest_resets,
                crash_resets: instance.crash_resets,
                vmm_version: instance.version.clone(),
            }),
            last_exit: record.last_exit.clone(),
            conditions: [
                Some(self.ready(instance)),
                Some(self.block_devices(instance, attached)),
                Some(self.restart_required(&left)),
                Some(self.migratable(host, record, spec)),
                self.agent_ready(spec, run, instance),
                self.access(record, spec, instance),
            ]
            .into_iter()
            .flatten()
            .collect(),
            nics: nics(host, uid, record, spec, run, attached),
            phase_time: text::timestamp(self.phase_ms),
            disks: disks(host, record, spec, instance.is_some(), attached),
            restart: restart(record, spec),
            counts: Some(counts(record, instance)),
            operation: self.operation.clone(),
            shares: shares(spec, instance, attached, &left),
            migration: record.handover.as_ref().and_then(migration),
            pending_changes: left
                .into_iter()
                .map(|left| pending_change(left, host.store.key()))
                .collect(),
            guest: guest(instance),
            firmware: firmware(record, spec).into(),
            channels: channels(spec, instance),
        };
        v1::Vm {
            metadata: Some(metadata),
            spec: self.spec(record, host.store.key()),
            status: Some(status),
        }
    }

    /// `BlockDevicesReady`: no disk has failed since the run began, or since the guest was resumed after one had.
    fn block_devices(&mut self, instance: Option<&Instance>, attached: &Attachments) -> v1::Condition {
        let errors = attached.errors();
        let (status, reason, message) = match (instance, errors.count) {
            (None, _) => (ConditionStatus::Unknown, "NotRunning", String::new()),
            // An error that an earlier daemon has heard of counts too.
            (Some(_), 0) if self.phase == VmPhase::Paused && self.reason == DISK_ERROR => {
                (ConditionStatus::False, "DeviceError", self.message.clone())
            }
            (Some(_), 0) => (ConditionStatus::True, "NoErrors", String::new()),
            (Some(_), 1) => (ConditionStatus::False, "DeviceError", errors.last.clone()),
            (Some(_), count) => {
                let message = format!("{} ({count} errors)", errors.last);
                (ConditionStatus::False, "DeviceError", message)
            }
        };
        condition(
            &mut self.block_devices,
            "BlockDevicesReady",
            status,
            reason,
            message,
        )
    }

    /// Condition `RestartRequired`: the spec has changes that the running machine lacks.
    fn restart_required(&mut self, left: &[(Change, String)]) -> v1::Condition {
        let paths: Vec<_> = left.iter().map(|(change, _)| change.path.as_str()).collect();
        let (status, reason, message) = if left.is_empty() {
            (ConditionStatus::False, "UpToDate", String::new())
        } else {
            let message = format!("the next start changes {}", paths.join(", "));
            (ConditionStatus::True, "PendingChanges", message)
        };
        condition(
            &mut self.restart_required,
            "RestartRequired",
            status,
            reason,
            message,
        )
    }

    /// `Migratable`: whether a migration would be accepted.
    fn migratable(&mut self, host: &Host, record: &VmRecord, spec: &VmSpec) -> v1::Condition {
        let (status, reason, message) = match migratable(host, record, spec) {
            Ok(()) => {
                let message = match &spec.pod {
                    Some(_) => "to a pod on another node that has no VM: `target_pod` of MigrateVm",
                    None => "",
                };
                (ConditionStatus::True, "Migratable".to_owned(), message.to_owned())
            }
            Err(failure) => (
                ConditionStatus::False,
                camel_case(failure.reason),
                failure.message,
            ),
        };
        condition(&mut self.migratable, "Migratable", status, reason, message)
    }

    /// `AgentReady`: the agent in the guest has its channel open, and answers. `None` for a VM
    /// without such a channel.
    fn agent_ready(
        &mut self,
        spec: &VmSpec,
        run: Option<&InstanceRecord>,
        instance: Option<&Instance>,
    ) -> Option<v1::Condition> {
        let of_run = run.and_then(|run| run.spec.as_ref());
        let in_machine = of_run.is_some_and(|spec| spec.guest_agent.is_some());
        if !spec.guest_agent && !in_machine {
            return None;
        }
        let agent = instance.map(|instance| &instance.agent);
        let (status, reason, message) = match agent {
            None => (ConditionStatus::False, "NotRunning", ""),
            Some(_) if !in_machine => (ConditionStatus::False, "NoChannel", NO_CHANNEL),
            Some(AgentState { open: false, .. }) => (ConditionStatus::False, "AgentNotConnected", NO_AGENT),
            Some(AgentState {
                guest: Some(Err(failure)),
                ..
            }) => (ConditionStatus::False, "AgentSilent", failure.message.as_str()),
            Some(_) => (ConditionStatus::True, "AgentConnected", ""),
        };
        Some(condition(
            &mut self.agent_ready,
            "AgentReady",
            status,
            reason,
            message,
        ))
    }

    /// `AccessCredentialsSynchronized`: the guest has the passwords and SSH keys of the spec, and no keys
    /// of an earlier one. `None` for a VM without users in the present and in an earlier spec.
    fn access(
        &mut self,
        record: &VmRecord,
        spec: &VmSpec,
        instance: Option<&Instance>,
    ) -> Option<v1::Condition> {
        if spec.access.is_empty() && record.access_keys.is_empty() {
            return None;
        }
        let of_run = record.instance.as_ref().and_then(|run| run.spec.as_ref());
        let in_machine = of_run.is_some_and(|spec| spec.guest_agent.is_some());
        let (status, reason, message) = match instance.map(|instance| &instance.agent) {
            None => (ConditionStatus::False, "NotRunning", ""),
            Some(_) if !in_machine => (ConditionStatus::False, "NoChannel", NO_CHANNEL),
            Some(AgentState { open: false, .. }) => (ConditionStatus::False, "AgentNotConnected", NO_AGENT),
            Some(AgentState { access: None, .. }) => (ConditionStatus::False, "Pending", ""),
            Some(AgentState {
                access: Some(Err(failure)),
                ..
            }) => (ConditionStatus::False, "Failed", failure.message.as_str()),
            Some(_) => (ConditionStatus::True, "Synchronized", ""),
        };
        let kind = "AccessCredentialsSynchronized";
        Some(condition(&mut self.access, kind, status, reason, message))
    }

    /// `Ready`: the guest runs, its kernel has not panicked, and its `vmm` answers.
    fn ready(&mut self, instance: Option<&Instance>) -> v1::Condition {
        let link = instance.map(|instance| &instance.link.state);
        let panicked = instance.is_some_and(|instance| instance.panicked);
        let silent = instance.is_some_and(|instance| instance.silent);
        let lingering = instance.map_or(self.lingering, |instance| instance.lingering);
        let (status, reason, message) = match (lingering, self.phase, link) {
            (Some(what), ..) => (ConditionStatus::False, what.reason(), what.message()),
            (_, VmPhase::Running | VmPhase::Paused, Some(State::Up(..))) if silent => {
                (ConditionStatus::Unknown, UNRESPONSIVE, NO_ANSWER)
            }
            (_, VmPhase::Running, Some(State::Up(..))) if panicked => {
                (ConditionStatus::False, GUEST_PANICKED, PANICKED)
            }
            (_, VmPhase::Running, Some(State::Up(..))) => healthy(instance),
            (_, VmPhase::Running | VmPhase::Paused, Some(State::Connecting(_))) => {
                (ConditionStatus::Unknown, UNRESPONSIVE, NO_ANSWER)
            }
            (_, VmPhase::Running | VmPhase::Paused, Some(State::Unreachable)) => (
                ConditionStatus::Unknown,
                "ControlLost",
                "the vmm process lives but can't be controlled: it can only be stopped with force",
            ),
            (_, phase, _) => (ConditionStatus::False, phase_word(phase), ""),
        };
        condition(&mut self.ready, "Ready", status, reason, message)
    }
}

/// A condition. `last` is its last status, and the time of the change to that.
fn condition(
    last: &mut (ConditionStatus, u64),
    kind: &str,
    status: ConditionStatus,
    reason: impl Into<String>,
    message: impl Into<String>,
) -> v1::Condition {
    if last.0 != status {
        *last = (status, text::now_ms());
    }
    v1::Condition {
        r#type: kind.to_owned(),
        status: status.into(),
        reason: reason.into(),
        message: message.into(),
        transition_time: text::timestamp(last.1),
    }
}

/// Status, reason and message of `Ready` while the machine runs: by the probes of the guest.
fn healthy(instance: Option<&Instance>) -> (ConditionStatus, &'static str, &str) {
    let health = instance.map(|instance| &instance.health);
    match health.map(|health| (&health.prober, &health.ready)) {
        None | Some((None, _) | (_, Some(Ok(())))) => (ConditionStatus::True, "Running", ""),
        Some((_, Some(Err(message)))) => (ConditionStatus::False, "ProbeFailed", message),
        Some((_, None)) => (
            ConditionStatus::False,
            "Probing",
            "no probe of the guest has a result yet",
        ),
    }
}

/// The guest as its agent described it last.
fn guest(instance: Option<&Instance>) -> Option<v1::GuestInfo> {
    let guest = instance?.agent.guest.as_ref()?.as_ref();
    Some(guest.ok()?.as_ref().clone())
}

/// The channels of the spec.
fn channels(spec: &VmSpec, instance: Option<&Instance>) -> Vec<v1::ChannelStatus> {
    let open = instance.map_or(&[][..], |instance| &instance.open_channels);
    let status = |name: &String| v1::ChannelStatus {
        name: name.clone(),
        open: open.contains(name),
    };
    spec.channels.iter().map(status).collect()
}

/// The firmware that the VM starts with.
fn firmware(record: &VmRecord, spec: &VmSpec) -> v1::FirmwareType {
    match spec.boot {
        Boot::Firmware { kind: Some(kind), .. } => kind.into(),
        Boot::Firmware { kind: None, .. } => {
            let chosen = record.hardware.as_ref().map_or(0, |hardware| hardware.firmware);
            v1::FirmwareType::try_from(chosen).unwrap_or_default()
        }
        Boot::Linux { .. } | Boot::Disk { .. } => v1::FirmwareType::Unspecified,
    }
}

/// The migration that is under way, if one is.
pub fn migration(record: &HandoverRecord) -> Option<v1::MigrationStatus> {
    use v1::{MigrationPhase as Phase, MigrationRole as Role};
    let (role, phase) = match handover::of(Some(record)) {
        Handover::Source(Source::Owner { migrating: false, .. }) => return None,
        Handover::Source(Source::Owner { migrating: true, .. }) => (Role::Source, Phase::Transfer),
        Handover::Source(Source::Given(_)) => (Role::Source, Phase::HandedOver),
        Handover::Source(Source::Gone(_)) => (Role::Source, Phase::Removal),
        // One that is offered has the number of the migration before.
        Handover::Target(Target::Idle(_)) => (Role::Target, Phase::Transfer),
        Handover::Target(Target::Prepared(_)) => (Role::Target, Phase::Prepared),
        Handover::Target(Target::Owned(_)) => (Role::Target, Phase::HandedOver),
    };
    let is_offered = record.stage() == HandoverStage::Idle;
    Some(v1::MigrationStatus {
        number: record.migration.saturating_add(u64::from(is_offered)),
        role: role.into(),
        peer: record.peer.clone(),
        phase: phase.into(),
        waits_for_decision: handover::of(Some(record)).waits(),
        start_time: text::timestamp(record.began_ms),
    })
}

/// Starts by the run policy, when it makes any.
fn restart(record: &VmRecord, spec: &VmSpec) -> Option<v1::RestartStatus> {
    let restart = record.restart.clone().unwrap_or_default();
    let waits = restart.next_ms != 0;
    let pending = record.restart.is_some();
    let policy = policy::after(spec.run_policy, spec.on_panic, record.exit_reason(), pending);
    policy::starts(policy).then(|| v1::RestartStatus {
        attempts: restart.attempts,
        next_start_time: text::timestamp(restart.next_ms),
        back_off: waits.then(|| Duration::from_millis(restart.back_off_ms).into()),
    })
}

/// Counters of all runs, including the current one.
fn counts(record: &VmRecord, instance: Option<&Instance>) -> v1::RunCounts {
    let mut counts = record.counts.unwrap_or_default();
    counts.guest_resets += instance.map_or(0, |instance| instance.guest_resets);
    counts.crash_resets += instance.map_or(0, |instance| instance.crash_resets);
    counts
}

fn pending_change((change, message): (Change, String), key: &Key) -> v1::PendingChange {
    let value = |json: serde_json::Value| match secret::shown_value(&change.path, json, key) {
        serde_json::Value::Null => None,
        json => serde_json::from_value(json).ok(),
    };
    v1::PendingChange {
        current: value(change.current),
        desired: value(change.desired),
        path: change.path,
        message,
    }
}

/// Disks of a VM for the API: the disks of the spec, then the disks that only the machine has.
fn disks(
    host: &Host,
    record: &VmRecord,
    spec: &VmSpec,
    running: bool,
    attached: &Attachments,
) -> Vec<v1::DiskStatus> {
    let slots = record.hardware.as_ref().map(|hardware| &hardware.disk_slots);
    let run = record.instance.as_ref().filter(|_| running);
    let of_run = run.and_then(|run| run.hardware.as_ref().map(|hardware| &hardware.disk_slots));
    let in_machine = if running {
        change::running_disks(record)
    } else {
        &[]
    };
    let only_there = in_machine
        .iter()
        .filter(|wire| !spec.disks.iter().any(|disk| disk.name.as_str() == wire.name))
        .filter_map(change::validated);
    let own = spec.disks.iter().filter(|disk| disk.source != DiskSource::Seed);
    let described = own.cloned().chain(only_there).map(|disk| {
        let name = disk.name.as_str();
        let known = attached.get(name).filter(|_| running);
        let (path, size) = match &disk.source {
            DiskSource::Seed | DiskSource::Empty => (String::new(), 0),
            DiskSource::Path { path, .. } => (path.display().to_string(), 0),
            DiskSource::Pod { .. } => (String::new(), 0),
            DiskSource::Disk { name, .. } => {
                let resolved = host.disks.resolve(&host.disk_folder(), name.as_str());
                resolved.map_or_else(
                    |_| (String::new(), 0),
                    |disk| (disk.path.display().to_string(), disk.size),
                )
            }
        };
        let phase = match known {
            Some(known) => known.phase,
            None if in_machine.iter().any(|wire| wire.name == name) => AttachmentPhase::Attached,
            None => AttachmentPhase::Pending,
        };
        let address = of_run.and_then(|slots| slots.get(name));
        let address = address.or_else(|| slots?.get(name)).copied();
        v1::DiskStatus {
            name: name.to_owned(),
            phase: phase.into(),
            message: known.map(|known| known.message.clone()).unwrap_or_default(),
            path,
            capacity_bytes: Some(known.map_or(0, |known| known.capacity).max(size))
                .filter(|bytes| *bytes != 0),
            pci_slot: address.filter(|address| pci::sata_port(*address).is_none()),
            sata_port: address.and_then(pci::sata_port),
        }
    });
    described.collect()
}

/// The phase as people write it.
pub fn phase_word(phase: VmPhase) -> &'static str {
    match phase {
        VmPhase::Unspecified => "Unknown",
        VmPhase::Pending => "Pending",
        VmPhase::Starting => "Starting",
        VmPhase::Running => "Running",
        VmPhase::Paused => "Paused",
        VmPhase::Stopping => "Stopping",
        VmPhase::Stopped => "Stopped",
        VmPhase::Failed => "Failed",
        VmPhase::Terminating => "Terminating",
    }
}

/// `KERNEL_NOT_FOUND` as a status has it: `KernelNotFound`.
pub fn camel_case(reason: &str) -> String {
    let words = reason.split('_').filter(|word| !word.is_empty());
    words
        .flat_map(|word| {
            let (first, rest) = word.split_at(1);
            [first.to_owned(), rest.to_lowercase()]
        })
        .collect()
}

/// When a run began, by today's wall clock.
pub fn started(run: &InstanceRecord) -> Option<vmmd_api::well_known::Timestamp> {
    text::timestamp(clock::shown_ms(run.started_ms, run.started_since_boot))
}

/// NICs of a VM for the API: the NICs of the machine, then the NICs that only the spec has.
fn nics(
    host: &Host,
    uid: Uuid,
    record: &VmRecord,
    spec: &VmSpec,
    run: Option<&InstanceRecord>,
    attached: &Attachments,
) -> Vec<v1::NicStatus> {
    let valid = |nic: &v1::NicSpec| vmmd_spec::vm::nic(&mut Violations::default(), "nic", nic);
    let running = run.and_then(|run| run.spec.as_ref());
    let running = running.iter().flat_map(|spec| &spec.nics);
    let in_machine: Vec<_> = running.filter_map(valid).collect();
    let wanted = |nic: &&Nic| in_machine.iter().all(|other| other.name != nic.name);
    let nics = in_machine.iter().chain(spec.nics.iter().filter(wanted));
    let known = [
        run.and_then(|run| run.hardware.as_ref()),
        record.hardware.as_ref(),
    ];
    let described = nics.enumerate().map(|(index, nic)| {
        let name = nic.name.as_str();
        let plugged = index < in_machine.len();
        let made = run.and_then(|run| run.taps.get(name)).cloned();
        let (tap, bridge, network) = match &nic.attachment {
            Attachment::Bridge(bridge) => (made.unwrap_or_default(), bridge.clone(), ""),
            Attachment::Tap(tap) => (tap.clone(), String::new(), ""),
            Attachment::PodNetwork { .. } => (made.unwrap_or_default(), String::new(), ""),
            Attachment::Network { name, .. } => {
                let bridge = host.networks.bridge(name.as_str()).unwrap_or_default();
                (made.unwrap_or_default(), bridge, name.as_str())
            }
        };
        let mac = known
            .into_iter()
            .flatten()
            .find_map(|hardware| machine::mac(hardware, name));
        let address = host.networks.address(network, uid, name);
        let address6 = host.networks.address6(network, uid, name);
        let path = format!("spec.nics[{name}]");
        let under_way = attached.live.is_under_way(&path);
        let phase = match (plugged, spec.nics.iter().any(|other| other.name == nic.name)) {
            (true, false) if under_way => AttachmentPhase::Detaching,
            (true, _) => AttachmentPhase::Attached,
            (false, _) if under_way && run.is_some() => AttachmentPhase::InProgress,
            (false, _) => AttachmentPhase::Pending,
        };
        v1::NicStatus {
            name: name.to_owned(),
            mac: mac.map(|mac| mac.to_string()).unwrap_or_default(),
            tap: if plugged { tap } else { String::new() },
            bridge,
            link_down: !nic.link_up,
            network: network.to_owned(),
            addresses: address
                .map(IpAddr::from)
                .into_iter()
                .chain(address6.map(IpAddr::from))
                .map(|address| address.to_string())
                .collect(),
            phase: phase.into(),
            message: attached.live.failed.get(&path).cloned().unwrap_or_default(),
            routed: host.networks.is_routed(network),
        }
    });
    described.collect()
}

/// Shares of a VM for the API: the shares of the spec, then the shares that only the machine has.
fn shares(
    spec: &VmSpec,
    instance: Option<&Instance>,
    attached: &Attachments,
    left: &[(Change, String)],
) -> Vec<v1::ShareStatus> {
    let wanted = spec
        .shares
        .iter()
        .map(|share| (share.name.as_str(), share.tag.as_str()));
    let is_wanted = |name: &str| spec.shares.iter().any(|share| share.name.as_str() == name);
    let leaving = instance
        .into_iter()
        .flat_map(|instance| instance.shares.kept())
        .filter(|(name, _)| !is_wanted(name));
    let described = wanted.chain(leaving).map(|(name, tag)| {
        let state = instance.and_then(|instance| instance.shares.state(name));
        let path = format!("spec.shares[{name}]");
        let under_way = instance.is_some() && attached.live.is_under_way(&path);
        let phase = match &state {
            None if under_way => v1::SharePhase::Attaching,
            None => v1::SharePhase::Pending,
            Some(_) if under_way && !is_wanted(name) => v1::SharePhase::Detaching,
            Some(state) if state.pid.is_some() => v1::SharePhase::Served,
            Some(_) => v1::SharePhase::Restarting,
        };
        let state = state.unwrap_or_default();
        let why = left.iter().find(|(change, _)| change.path == path);
        let why = why.map(|(_, why)| why.clone()).filter(|why| !why.is_empty());
        v1::ShareStatus {
            name: name.to_owned(),
            tag: tag.to_owned(),
            phase: phase.into(),
            message: why.unwrap_or(state.message),
            pid: state.pid.unwrap_or_default(),
            restarts: state.restarts,
        }
    });
    described.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_for_programs_become_words_of_a_status() {
        assert_eq!(camel_case("KERNEL_NOT_FOUND"), "KernelNotFound");
        assert_eq!(camel_case("INTERNAL"), "Internal");
        assert_eq!(camel_case("__"), "");
    }

    #[test]
    fn the_time_of_a_phase_is_that_of_its_beginning() {
        let mut view = View::new(VmPhase::Running, "Running", "");
        view.phase_ms = 5;
        view.enter(VmPhase::Running, "GuestPanicked", "x");
        assert_eq!((view.phase_ms, view.reason.as_str()), (5, "GuestPanicked"));
        view.enter(VmPhase::Stopped, "Killed", "");
        assert!(view.phase_ms > 5);
    }
}
