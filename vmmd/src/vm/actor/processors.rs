//! CPU share and limits of a running VM. A change applies to the cgroup at once; the machine is not
//! involved.

use std::sync::Arc;

use vmmd_api::v1::EventSeverity;
use vmmd_host::{
    capacity::{Demand, placement},
    failure::Failure,
};
use vmmd_store::VmRecord;

use super::Actor;
use crate::{
    files,
    node::check,
    vm::machine::{
        change::{self, Live, Verdict},
        limits,
    },
};

impl Actor {
    /// Applies the processor settings of the spec to a running VM. If the node has too little CPU,
    /// the VM keeps its old share and the status has the reason.
    pub(super) async fn apply_processors(&mut self) {
        let ours = |change: &change::Change| change.verdict == Verdict::Live(Live::Processors);
        let paths: Vec<_> = change::pending(&self.record)
            .into_iter()
            .filter(ours)
            .map(|change| change.path)
            .collect();
        if paths.is_empty() || self.instance.is_none() {
            return;
        }
        let mut record = self.record.clone();
        change::take_over(&mut record, &Live::Processors);
        match self.give_processors(&record).await {
            Ok(()) => {
                change::settle(&mut record);
                self.record = record;
                self.persist().await;
            }
            Err(failure) => {
                let message = format!("{} could not be applied: {}", paths.join(", "), failure.message);
                self.tell(EventSeverity::Warning, "LiveChangeFailed", &message);
                for path in paths {
                    self.disks.live.failed.insert(path, failure.message.clone());
                }
            }
        }
    }

    /// All of it, or nothing.
    async fn give_processors(&self, record: &VmRecord) -> Result<(), Failure> {
        let Some(instance) = &self.instance else {
            return Ok(());
        };
        let before = change::machine(&self.record, &self.spec);
        let wanted = change::machine(record, &self.spec);
        let (held, demand) = (Demand::of(&before), Demand::of(&wanted));
        let look = check::look(&self.host).await?;
        instance.claim.take(demand, |others| {
            if demand.resources.cpu_millis <= held.resources.cpu_millis {
                return Ok(());
            }
            // Only CPU is checked. The VM already has its other resources, and keeps them even on a
            // cordoned node.
            let picture = look.picture(&self.host, others);
            let mut problems = placement::decide(&demand.resources, &picture);
            problems.retain(|problem| problem.reason == "INSUFFICIENT_CPU");
            placement::refuse(&problems)
        })?;
        let (host, uid) = (Arc::clone(&self.host), self.uid);
        let paths = files::named(&wanted, &self.host.sources());
        let setting = self.host.pools.files.run(&paths, move || {
            limits::set(&host, uid, &wanted).inspect_err(|_| limits::renew(&host, uid, &before))
        });
        let set = self.unless_stopped(async { setting.await? }).await;
        if set.is_err() {
            instance.claim.take(held, |_| Ok(()))?;
        }
        set
    }
}
