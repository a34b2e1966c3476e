//! Prometheus metrics, on a separate listener. docs/src/metrics.md documents them, and a test
//! compares the two.
//!
//! The daemon keeps no metrics for VMs: each scrape queries all of them at once. The series of a VM
//! end with the VM. A VM that does not answer within [`SCRAPE`] loses only its own series.

mod families;
mod listener;
mod node;
mod process;
mod rpc;
mod vm;

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use tokio::task::{JoinSet, spawn_blocking};
use vmmd_api::v1;
use vmmd_objects::operation::has_ended;

use self::families::{Families, as_f64};
use crate::{host::Host, node::describe, stats};

pub use self::{listener::Listener, rpc::Counted};

/// How long a `vmm` may take for a scrape; Prometheus waits 10 s.
const SCRAPE: Duration = Duration::from_secs(3);

/// Counters of the daemon's own calls, for its whole life.
static RPCS: OnceLock<rpc::Calls> = OnceLock::new();

fn rpcs() -> &'static rpc::Calls {
    RPCS.get_or_init(rpc::Calls::default)
}

/// A VM in a scrape.
struct Sample {
    vm: Arc<v1::Vm>,
    /// Counters of a running VM that answers.
    stats: Option<v1::VmStats>,
}

/// All figures as they are now, in the text format (OpenMetrics 1.0).
pub async fn gather(host: &Arc<Host>) -> String {
    let mut asked = JoinSet::new();
    for vm in host.vms.list() {
        let host = Arc::clone(host);
        asked.spawn(async move {
            let name = vm.metadata.as_ref().map_or("", |metadata| metadata.name.as_str());
            let runs = vm.status.as_ref().is_some_and(|status| status.instance.is_some());
            let entry = host.vms.get(name).filter(|_| runs);
            let stats = match &entry {
                Some(entry) => tokio::time::timeout(SCRAPE, stats::of(&host, name, entry))
                    .await
                    .inspect_err(|_| stats::probe(entry))
                    .ok(),
                None => None,
            };
            let stats = stats.and_then(Result::ok);
            Sample { vm, stats }
        });
    }
    let mut samples = asked.join_all().await;
    samples.sort_by(|one, other| name(&one.vm).cmp(name(&other.vm)));
    let mut families = Families::default();
    vm::add(&mut families, &samples);
    match describe(host).await {
        Ok(node) => node::add(&mut families, &node.status.unwrap_or_default()),
        Err(failure) => tracing::warn!(error = failure.message, "figures of the node"),
    }
    rpcs().add(&mut families);
    daemon(&mut families, host);
    certificates(&mut families, &ends(host).await);
    process::add(&mut families);
    families.text()
}

fn name(vm: &v1::Vm) -> &str {
    vm.metadata.as_ref().map_or("", |metadata| metadata.name.as_str())
}

fn daemon(families: &mut Families, host: &Host) {
    families.gauge(
        "vmmd_build_info",
        "The daemon's version; always 1",
        &[("version", env!("CARGO_PKG_VERSION"))],
        1.0,
    );
    host.operations.each(None, |operation| {
        if !has_ended(operation) {
            families.gauge_add(
                "vmmd_operations_active",
                "Operations that have not ended",
                &[("type", &operation.r#type)],
                1.0,
            );
        }
        true
    });
    for (reason, count) in host.events.counts() {
        families.counter(
            "vmmd_events",
            "Events since the daemon's start, those of a flood all counted; reason Repaired is what it has repaired",
            &[("reason", &reason)],
            count,
        );
    }
    families.counter(
        "vmmd_store_commits",
        "Transactions that the store has made durable since the daemon's start",
        &[],
        host.store.commits(),
    );
}

/// When certificates end, by the key of the configuration.
async fn ends(host: &Arc<Host>) -> Vec<(&'static str, i64)> {
    let mut ends = host.certificates.get().map_or_else(Vec::new, |all| all.ends());
    let of_peers = Arc::clone(host);
    let peer = spawn_blocking(move || of_peers.peers.ends()).await;
    ends.extend(peer.ok().flatten().map(|end| ("peer_certificate", end)));
    ends
}

/// The ends of the certificates of the API over TCP.
fn certificates(families: &mut Families, ends: &[(&'static str, i64)]) {
    for (key, end) in ends {
        families.gauge(
            "vmmd_certificate_expiry_timestamp_seconds",
            "When a certificate of the API over TCP ends, in Unix time",
            &[("certificate", key)],
            as_f64(u64::try_from(*end).unwrap_or(0)),
        );
    }
}

#[cfg(test)]
mod tests;
