//! Facts about the node, and the check whether a VM fits. The check changes nothing on the node.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use tokio::task::spawn_blocking;
use uuid::Uuid;
use vmmd_host::{
    capacity::{
        Demand, Facts, Resources, allocatable,
        placement::{self, Picture, Problem, decide},
        sizing,
    },
    cgroup::{
        self,
        facts::{self, SYSFS},
    },
    failure::{Failure, Kind},
    text,
};
use vmmd_spec::{
    nic::{Mac, PublishedPort},
    vm::{Attachment, Manifest, Nic, VmSpec},
};

use super::conditions;
use crate::{files, host::Host};

/// State of the node for a placement.
#[derive(Clone, Debug)]
pub struct Look {
    /// What it has.
    pub facts: Facts,
    /// Reason why KVM is unusable.
    pub no_kvm: Option<Failure>,
}

impl Look {
    /// Looks. Blocking.
    pub fn now(host: &Host) -> Self {
        Self {
            facts: Facts::read(Path::new("/"), &host.config.state_dir),
            no_kvm: files::open_kvm(&host.config.kvm_device).err(),
        }
    }

    /// Returns the input for the placement decision, with the resources of the other VMs.
    pub fn picture(&self, host: &Host, committed: Resources) -> Picture {
        let config = &host.config;
        Picture {
            cordoned: host.schedulable().err(),
            no_kvm: self.no_kvm.clone(),
            allocatable: allocatable(&self.facts, &config.overcommit, &config.reserved),
            committed,
            disk_available: self.facts.disk_available,
            disk_reserved: config.reserved.disk_bytes(),
        }
    }

    /// Returns the node's conditions with their times. Stores changed conditions and emits an event
    /// for each.
    pub async fn conditions(&self, host: &Host) -> Vec<vmmd_api::v1::Condition> {
        let cordoned = host.schedulable().err();
        let mut found = conditions::judge(
            &self.facts,
            self.no_kvm.as_ref(),
            cordoned.as_ref(),
            &host.config.pressure,
        );
        let (now, mut news) = (text::now_ms(), Vec::new());
        let noted = host.node.change(|record| {
            news = conditions::stamp(&mut found, &mut record.conditions, now);
            Ok(())
        });
        match noted.await {
            Ok(_) => news.into_iter().for_each(|draft| host.events.emit(draft)),
            Err(error) => tracing::warn!(%error, "note the node's conditions"),
        }
        found
    }
}

/// [`Look::now`] from an async task.
pub async fn look(host: &Arc<Host>) -> Result<Look, Failure> {
    let host = Arc::clone(host);
    let looked = spawn_blocking(move || Look::now(&host)).await;
    looked.map_err(|error| Failure::internal(error.to_string()))
}

/// Kind of a placement check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// Could it be created and started?
    Start,
    /// Could it be created? Whether there is room for it now is not asked.
    Create,
    /// Could it come from another node, where it runs with its disks?
    Receive,
}

/// Refused when a VM like this can never be here: its size is not allowed, or it is larger than the node.
pub async fn could_ever(host: &Arc<Host>, spec: &VmSpec) -> Result<(), Failure> {
    sizing::check(&host.config.sizing, spec).map_err(|violations| Failure {
        reason: "SIZE_NOT_ALLOWED",
        ..violations.into()
    })?;
    let mut alone = Picture {
        cordoned: None,
        no_kvm: None,
        disk_reserved: 0,
        ..look(host).await?.picture(host, Resources::default())
    };
    // An operator can set more of them aside at any time.
    alone.allocatable.huge_2m = u64::MAX;
    alone.allocatable.huge_1g = u64::MAX;
    let problems = decide(&Demand::of(spec).resources, &alone);
    let mut refused = placement::refuse(&problems).map_err(|failure| Failure {
        kind: Kind::Precondition,
        ..failure
    });
    if let Err(failure) = &mut refused {
        for problem in problems {
            failure.violations.add(problem.field, problem.message);
        }
    }
    refused
}

/// All that stands against a VM of this manifest, as if it were new; one that is here is left out of the count.
pub async fn problems(
    host: &Arc<Host>,
    manifest: &Manifest,
    question: Question,
) -> Result<Vec<Problem>, Failure> {
    let (name, spec) = (manifest.metadata.name.as_str(), &manifest.spec);
    let look = look(host).await?;
    look.conditions(host).await;
    let demand = Demand::of(spec).resources;
    let mut found = decide(&demand, &look.picture(host, host.ledger.committed_beside(name)));
    if question == Question::Create {
        found.retain(|problem| !problem.is_shortage());
    }
    if let Err(violations) = sizing::check(&host.config.sizing, spec) {
        found.extend(violations.0.into_iter().map(|violation| Problem {
            kind: Kind::Invalid,
            reason: "SIZE_NOT_ALLOWED",
            message: violation.to_string(),
            field: violation.field,
        }));
    }
    if let Err(failure) = host.cpus.check(spec.processor.features()) {
        found.push(Problem::of(failure, "spec.cpu.model"));
    }
    let uid = host.vms.get(name).map_or(Uuid::nil(), |entry| entry.uid);
    found.extend(nics(host, (uid, name), spec, |_| false).await);
    let (blocking, manifest) = (Arc::clone(host), manifest.clone());
    let paths = files::named(spec, &host.sources());
    let files = host.pools.files.run(&paths, move || {
        let mut found = disks(&blocking, &manifest);
        let files = files::look(
            &manifest.spec,
            &blocking.sources(),
            (
                manifest.metadata.name.as_str(),
                &files::had(&blocking.vms, manifest.metadata.name.as_str()),
            ),
            question == Question::Receive,
        );
        // A disk that is not there is missed by both.
        let known: Vec<_> = found.iter().map(|problem| problem.message.clone()).collect();
        found.extend(
            files
                .into_iter()
                .filter(|problem| !known.contains(&problem.message)),
        );
        found
    });
    found.extend(files.await?);
    Ok(found)
}

/// Problems that the DiskService finds with the disks.
fn disks(host: &Host, manifest: &Manifest) -> Vec<Problem> {
    let field = |index| format!("spec.disks[{index}].disk");
    let refused = host.disks.refusals(&manifest.spec.disks, field);
    let problems = refused
        .into_iter()
        .map(|(index, failure)| Problem::of(failure, field(index)));
    problems.collect()
}

/// Problems of the parts of `spec` that differ from `present`: the next start of the VM with this UUID and name would fail with them. All parts
/// of a new VM differ, except its files: these may come before its start.
pub async fn changed(
    host: &Arc<Host>,
    (uid, name): (Uuid, &str),
    spec: &VmSpec,
    present: Option<&VmSpec>,
) -> Result<Vec<Problem>, Failure> {
    let same = |one: &Nic, other: &Nic| {
        (&one.name, &one.attachment, one.mac, one.vhost)
            == (&other.name, &other.attachment, other.mac, other.vhost)
    };
    let has = |nic: &Nic| present.is_some_and(|present| present.nics.iter().any(|other| same(nic, other)));
    let mut found = nics(host, (uid, name), spec, has).await;
    let processors = |spec: &VmSpec| (spec.host_cpus.clone(), spec.memory.numa_node, spec.cpu);
    let placed = match present {
        Some(present) => processors(spec) != processors(present),
        None => spec.host_cpus.is_some() || spec.memory.numa_node.is_some(),
    };
    let present = present.unwrap_or(spec);
    let had = files::named(present, &host.sources());
    let mut paths = files::named(spec, &host.sources());
    paths.retain(|path| !had.contains(path));
    if !paths.is_empty() || placed {
        let (of, spec, present) = (Arc::clone(host), spec.clone(), present.clone());
        let name = name.to_owned();
        let looking = host.pools.files.run(&paths, move || {
            let (sources, had) = (of.sources(), files::had(&of.vms, &name));
            let mut found = files::look_beside(&spec, Some(&present), &sources, (&name, &had), false);
            if placed && let Err(failure) = limits(&of, &spec) {
                found.push(Problem::of(failure, "spec"));
            }
            found
        });
        found.extend(looking.await?);
    }
    for problem in found.iter_mut().filter(|problem| problem.kind == Kind::NotFound) {
        // The VM of the request exists.
        problem.kind = Kind::Precondition;
    }
    Ok(found)
}

/// Reasons of problems that end when another VM or a program of the node gives something back.
const HELD: [&str; 4] = ["ADDRESS_IN_USE", "MAC_IN_USE", "NO_FREE_ADDRESS", "PORT_IN_USE"];

/// Problems of a new VM that is not started yet: the ones that stay, and the ones that another VM or program can end.
pub async fn created(
    host: &Arc<Host>,
    name: &str,
    spec: &VmSpec,
) -> Result<(Vec<Problem>, Vec<Problem>), Failure> {
    let found = changed(host, (Uuid::nil(), name), spec, None).await?;
    let own: Vec<_> = twice(spec, |_: &Nic| false)
        .into_iter()
        .map(|it| it.message)
        .collect();
    let can_stay = |problem: &Problem| !HELD.contains(&problem.reason) || own.contains(&problem.message);
    Ok(found.into_iter().partition(can_stay))
}

/// Whether the node has the processors and the memory node that a VM is to run on, and can set its limits. Blocking.
fn limits(host: &Host, spec: &VmSpec) -> Result<(), Failure> {
    let ready = host.cgroups.as_ref().map(|parent| parent.ready()).transpose();
    let parent =
        ready.map_err(|error| Failure::internal(format!("the control group of all VMs: {error}")))?;
    cgroup::plan::plan(spec, &facts::read(Path::new(SYSFS), parent, spec)).map(drop)
}

/// Problems of the NICs of a VM, except the NICs that `left_out` selects.
async fn nics(
    host: &Arc<Host>,
    vm: (Uuid, &str),
    spec: &VmSpec,
    left_out: impl Fn(&Nic) -> bool,
) -> Vec<Problem> {
    let mut found = twice(spec, &left_out);
    for (index, nic) in spec.nics.iter().enumerate() {
        if left_out(nic) {
            continue;
        }
        let part = match nic.attachment {
            Attachment::Bridge(_) => "bridge",
            Attachment::Tap(_) => "tap",
            Attachment::Network { .. } => "network",
            Attachment::PodNetwork { .. } => "podNetwork",
        };
        // vmmd chooses an address that no other NIC has.
        let [a, b, c, d, e, f, ..] = Uuid::new_v4().into_bytes();
        let mac = nic
            .mac
            .or_else(|| vmmd_network::reserved_mac(&host.networks, nic));
        let mac = mac.unwrap_or_else(|| Mac::local([a, b, c, d, e, f]));
        let looked = vmmd_network::look(host.for_networks(), vm, index, nic, mac).await;
        if let Err(failure) = looked {
            found.push(Problem::of(failure, format!("spec.nics[{index}].{part}")));
        }
    }
    found
}

/// Addresses and published ports that two NICs of the VM claim: the second one gets none at the start.
fn twice(spec: &VmSpec, left_out: impl Fn(&Nic) -> bool) -> Vec<Problem> {
    let (mut seen, mut found) = (BTreeSet::new(), Vec::new());
    for (index, nic) in spec.nics.iter().enumerate() {
        let Attachment::Network {
            name,
            address,
            access,
        } = &nic.attachment
        else {
            continue;
        };
        let address = address.as_ref().map(|address| {
            let what = format!("the address {address} of the network \"{name}\"");
            (what, "ADDRESS_IN_USE", "address")
        });
        let ports: BTreeSet<_> = access.ports.iter().map(PublishedPort::of_node).collect();
        let ports = ports.into_iter().map(|port| {
            (
                format!("the port {port} of the node"),
                "PORT_IN_USE",
                "publishedPorts",
            )
        });
        for (what, reason, part) in address.into_iter().chain(ports) {
            let message = format!(
                "NIC \"{}\": another NIC of the VM has {what}: choose another one",
                nic.name
            );
            if !seen.insert(what) && !left_out(nic) {
                let failure = Failure::precondition(reason, message);
                found.push(Problem::of(failure, format!("spec.nics[{index}].{part}")));
            }
        }
    }
    found
}
