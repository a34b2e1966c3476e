//! The node as it is told to clients.

use std::sync::Arc;

use proto::v1::Node;

use super::{allocatable, capacity, check};
use crate::{failure::Failure, host::Host};

/// What the node is, has, and what of that the VMs have.
pub async fn describe(host: &Arc<Host>) -> Result<Node, Failure> {
    let look = check::look(host).await?;
    let conditions = look.conditions(host).await;
    let system = rustix::system::uname();
    let (facts, config, record) = (&look.facts, &host.config, host.node.record());
    let vms = host.table.list();
    let running = vms
        .iter()
        .filter(|vm| vm.status.as_ref().is_some_and(|status| status.instance.is_some()));
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    let mut committed = host.ledger.committed();
    committed.disk = host.disks.promised();
    Ok(Node {
        name: system.nodename().to_string_lossy().into_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        kernel_version: system.release().to_string_lossy().into_owned(),
        cpu_model: host.cpus.model.clone(),
        cpus: facts.cpus,
        memory_bytes: facts.memory,
        memory_available_bytes: facts.memory_available,
        memory_committed_bytes: host.ledger.ram(),
        vms: count(vms.len()),
        vms_running: count(running.count()),
        conditions,
        labels: record.labels,
        capacity: Some(capacity(facts).into()),
        allocatable: Some(allocatable(facts, &config.overcommit, &config.reserved).into()),
        committed: Some(committed.into()),
        cpu_features: host.cpus.features.clone(),
        sizing_policies: config.sizing.iter().map(Into::into).collect(),
        cordoned: record.cordoned,
        cordon_reason: record.cordon_reason,
        numa_nodes: facts.numa.iter().map(Into::into).collect(),
    })
}
