//! `node`: shows it, cordons it, drains it, labels it, asks it.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use vmmd_api::v1;

use super::{apply, interrupt, migration, operation};
use crate::{
    args::node::{Drain, LabelChange, LabelNode, NodeVerb},
    client::{Client, QUICK, Query, call, send},
    failure::{Code, Failure, Result},
    manifest::Object,
    output,
};

/// How long a drain may take beyond the guests' grace period; several guests are stopped at once.
const DRAIN: Duration = Duration::from_secs(24 * 3600);

/// Does it.
pub async fn run(client: &Client, verb: NodeVerb) -> Result<(), Vec<Failure>> {
    match verb {
        NodeVerb::Cordon { reason, timeout } => {
            let client = &client.with_timeout(timeout.timeout);
            cordon(client, reason).await.map_err(super::one)
        }
        NodeVerb::Uncordon(timeout) => {
            let client = &client.with_timeout(timeout.timeout);
            uncordon(client).await.map_err(super::one)
        }
        NodeVerb::Drain(args) => {
            evacuate(client, &args).await?;
            drain(client, args).await.map_err(super::one)
        }
        NodeVerb::Label(LabelNode { labels, timeout }) => {
            let client = &client.with_timeout(timeout.timeout);
            label(client, labels).await.map_err(super::one)
        }
        NodeVerb::Check { files } => check(client, &files).await,
    }
}

async fn cordon(client: &Client, reason: String) -> Result<()> {
    let request = v1::CordonNodeRequest {
        reason,
        ..Default::default()
    };
    let node = send!(client.limit(QUICK), client.nodes, cordon_node, request)
        .await?
        .node;
    output::line(format!("node/{} cordoned", name(node)))
}

async fn uncordon(client: &Client) -> Result<()> {
    let request = v1::UncordonNodeRequest::default();
    let node = send!(client.limit(QUICK), client.nodes, uncordon_node, request)
        .await?
        .node;
    output::line(format!("node/{} uncordoned", name(node)))
}

async fn label(client: &Client, labels: Vec<LabelChange>) -> Result<()> {
    let (mut set, mut remove) = (BTreeMap::new(), Vec::new());
    for change in labels {
        match change {
            LabelChange::Set(key, value) => drop(set.insert(key, value)),
            LabelChange::Remove(key) => remove.push(key),
        }
    }
    let request = v1::UpdateNodeLabelsRequest {
        set,
        remove,
        ..Default::default()
    };
    let node = send!(client.limit(QUICK), client.nodes, update_node_labels, request)
        .await?
        .node;
    output::line(format!("node/{} labelled", name(node)))
}

/// Moves the VMs that are to be moved. The failures are those of the VMs that stay and are not to be stopped.
async fn evacuate(client: &Client, args: &Drain) -> Result<(), Vec<Failure>> {
    if args.migrate_to.is_none() && args.destinations.is_empty() {
        return Ok(());
    }
    cordon(client, args.reason.clone()).await.map_err(super::one)?;
    let vms = client
        .objects::<v1::Vm>(&Query::default())
        .await
        .map_err(super::one)?;
    let mut failures = Vec::new();
    for vm in vms {
        let runs = vm
            .status
            .is_some_and(|status| status.phase() == v1::VmPhase::Running);
        let name = vm.metadata.unwrap_or_default().name;
        let Some(to) = args.destination(&name).filter(|_| runs) else {
            continue;
        };
        match migration::move_to(client, &name, to).await {
            Err(failure) if args.stop_rest => {
                eprintln!("vm/{name} will be stopped, since it can't be moved: {failure}");
            }
            Err(failure) => failures.push(failure),
            Ok(()) => {}
        }
    }
    if failures.is_empty() {
        return Ok(());
    }
    let hint = "the node is cordoned, and nothing was stopped: with --stop-rest, VMs that can't be moved are stopped";
    Err(failures.into_iter().map(|failure| failure.hint(hint)).collect())
}

async fn drain(client: &Client, args: Drain) -> Result<()> {
    let request = v1::DrainNodeRequest {
        reason: args.reason,
        grace_period: args.grace.map(Into::into),
        no_wait: true,
        ..Default::default()
    };
    let begun = send!(QUICK, client.nodes, drain_node, request).await?;
    let operation = begun.operation.unwrap_or_default();
    if args.no_wait {
        return output::line(format!("operation/{} drains the node", operation.id));
    }
    let limit = args.timeout.timeout.unwrap_or(DRAIN);
    let id = operation.id;
    let mut last = (0, String::new());
    let watched = operation::follow(client, &id, |now| {
        let percent = now.progress.unwrap_or_default().percent;
        if (percent, &now.message) != (last.0, &last.1) {
            output::line(format!("{percent:3} %  {}", now.message))?;
            last = (percent, now.message.clone());
        }
        Ok(())
    });
    let hint = format!("`vmmctl get operation {id} -w` follows it, `vmmctl operation cancel {id}` ends it");
    let watched = tokio::time::timeout(limit, watched);
    match interrupt::guarded_operation(&hint, watched).await {
        Ok(ended) => operation::outcome(ended?).map(drop)?,
        Err(_) => return Err(Failure::new(Code::Timeout, "the drain goes on").hint(hint)),
    }
    output::line("the node is drained")
}

async fn check(client: &Client, files: &[PathBuf]) -> Result<(), Vec<Failure>> {
    let mut failures = Vec::new();
    for document in apply::read(files)? {
        // Disks are not placed.
        let Object::Vm(vm) = document.object.clone() else {
            continue;
        };
        let request = v1::CheckPlacementRequest { vm: Some(*vm) };
        match call(QUICK, client.nodes.clone().check_placement(request)).await {
            Ok(answer) if answer.fits => {
                output::line(format!("{} fits", document.title())).map_err(super::one)?;
            }
            Ok(answer) => failures.extend(answer.problems.into_iter().map(|problem| {
                let message = format!(
                    "{} does not fit: {} ({})",
                    document.title(),
                    problem.message,
                    problem.reason
                );
                let missing = problem.reason.ends_with("_NOT_FOUND");
                Failure::new(if missing { Code::NotFound } else { Code::Exhausted }, message)
            })),
            Err(failure) => failures.push(document.locate(failure)),
        }
    }
    super::all(failures)
}

fn name(node: Option<v1::Node>) -> String {
    let metadata = node.and_then(|node| node.metadata);
    metadata.unwrap_or_default().name
}
