//! Description of the node for clients.

use std::{fs, path::Path, sync::Arc};

use uuid::Uuid;
use vmmd_api::v1::{Node, NodeSpec, NodeStatus, ObjectMetadata};
use vmmd_host::{
    capacity::{Facts, allocatable, capacity},
    failure::Failure,
    text,
};

use super::check;
use crate::host::Host;

/// Minor version of `vmmd.v1`, for its extensions since the first release.
const API_MINOR: u32 = 1;
/// Features of this daemon on any host.
const FEATURES: [&str; 7] = [
    "balloon",
    "disk-hotplug",
    "disk-overlay",
    "disk-qcow2",
    "free-page-reporting",
    "rate-limit",
    "vnc",
];

/// Describes the node: identity, resources, and the share of the VMs.
pub async fn describe(host: &Arc<Host>) -> Result<Node, Failure> {
    let look = check::look(host).await?;
    let conditions = look.conditions(host).await;
    let system = rustix::system::uname();
    let (facts, config, record) = (&look.facts, &host.config, host.node.record());
    let vms = host.vms.list();
    let running = vms
        .iter()
        .filter(|vm| vm.status.as_ref().is_some_and(|status| status.instance.is_some()));
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    let mut committed = host.ledger.committed();
    committed.disk = host.disks.promised();
    let uid = Uuid::from_slice(&record.uid).map_or_else(|_| String::new(), |uid| uid.to_string());
    let metadata = ObjectMetadata {
        name: system.nodename().to_string_lossy().into_owned(),
        uid,
        generation: record.generation,
        labels: record.labels,
        ..Default::default()
    };
    let spec = NodeSpec {
        cordoned: record.cordoned,
        cordon_reason: record.cordon_reason,
        sizing_policies: config.sizing.iter().map(Into::into).collect(),
        roots: Some((&config.roots).into()),
    };
    let status = NodeStatus {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        api_minor_version: API_MINOR,
        features: features(host, facts, look.no_kvm.is_none()),
        boot_id: host.boot_id.clone(),
        daemon_start_time: text::timestamp(host.started_ms),
        kernel_version: system.release().to_string_lossy().into_owned(),
        cpu_model: host.cpus.model.clone(),
        cpu_features: host.cpus.features.clone(),
        cpus: facts.cpus,
        memory_bytes: facts.memory,
        memory_available_bytes: facts.memory_available,
        memory_committed_bytes: host.ledger.ram(),
        numa_nodes: facts.numa.iter().map(Into::into).collect(),
        vms: count(vms.len()),
        vms_running: count(running.count()),
        capacity: Some(capacity(facts).into()),
        allocatable: Some(allocatable(facts, &config.overcommit, &config.reserved).into()),
        committed: Some(committed.into()),
        conditions,
        cpu_models: host.cpus.models().iter().map(ToString::to_string).collect(),
        guest_cpu_features: host.cpus.of_guests.clone().unwrap_or_default(),
    };
    Ok(Node {
        metadata: Some(metadata),
        spec: Some(spec),
        status: Some(status),
    })
}

/// Features on this node, sorted.
fn features(host: &Host, facts: &Facts, kvm: bool) -> Vec<String> {
    // With 2, no process can create a ring (kernel.io_uring_disabled).
    let disabled = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    let of_host = [
        ("cgroup", host.cgroups.is_some()),
        ("huge-pages-1g", facts.huge_1g > 0),
        ("huge-pages-2m", facts.huge_2m > 0),
        ("io_uring", disabled.trim() != "2"),
        ("ksm", Path::new("/sys/kernel/mm/ksm/run").exists()),
        ("kvm", kvm),
        ("numa", facts.numa.len() > 1),
    ];
    let there = of_host.into_iter().filter(|(_, there)| *there);
    let mut features: Vec<_> = FEATURES.into_iter().chain(there.map(|(name, _)| name)).collect();
    features.sort_unstable();
    features.into_iter().map(str::to_owned).collect()
}
