//! Finds out about the node, and whether a VM fits. Nothing is changed on the node by it.

use std::{path::Path, sync::Arc};

use proto::model::vm::{Attachment, Manifest, VmSpec};
use tokio::task::spawn_blocking;

use super::conditions;
use crate::{
    capacity::{
        Demand, Facts, Resources, allocatable,
        placement::{self, Picture, Problem, decide},
        sizing,
    },
    failure::{Failure, Kind},
    files,
    host::Host,
    text,
};

/// What was found out about the node.
#[derive(Clone, Debug)]
pub struct Look {
    /// What it has.
    pub facts: Facts,
    /// Why KVM can't be used.
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

    /// What the decision is made of, with what other VMs have.
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

    /// The node's conditions, with their times. Those that have changed are noted in the store and told.
    pub async fn conditions(&self, host: &Host) -> Vec<proto::v1::Condition> {
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

/// What is asked about.
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
    found.extend(nics(host, spec).await?);
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

/// What the DiskService has against it.
fn disks(host: &Host, manifest: &Manifest) -> Vec<Problem> {
    let field = |index| format!("spec.disks[{index}].disk");
    let refused = host.disks.refusals(&manifest.spec.disks, field);
    let problems = refused
        .into_iter()
        .map(|(index, failure)| Problem::of(failure, field(index)));
    problems.collect()
}

async fn nics(host: &Host, spec: &VmSpec) -> Result<Vec<Problem>, Failure> {
    let mut found = Vec::new();
    for (index, nic) in spec.nics.iter().enumerate() {
        let part = match nic.attachment {
            Attachment::Bridge(_) => "bridge",
            Attachment::Tap(_) => "tap",
            Attachment::Network { .. } => "network",
        };
        if let Err(failure) = crate::network::look(host.for_networks(), index, nic).await {
            found.push(Problem::of(failure, format!("spec.nics[{index}].{part}")));
        }
    }
    Ok(found)
}
