//! Verbs for the node: show, cordon, drain, label, check.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use vmmd_api::v1;
use vmmd_spec::cpu::baseline;

use super::{act, apply, migration, operation, work::guarded_operation};
use crate::{
    args::{
        LabelChange, Output,
        node::{CpuBaseline, Drain, Node},
        vm::Files,
    },
    client::{Client, Kind as _, QUICK, Query, call, send},
    contexts::Connection,
    failure::{Code, Failure, Result},
    manifest::{Object, schema},
    output::{self, format},
};

/// Time limit for a drain; several guests are stopped at once.
const DRAIN: Duration = Duration::from_secs(24 * 3600);

/// Runs a verb for the node.
pub async fn run(given: &Connection, verb: Node) -> Result<(), Vec<Failure>> {
    let client = || Client::connect(given);
    match verb {
        Node::Cordon { reason, timeout } => {
            cordon(&client().await?.with_timeout(timeout.timeout), reason).await?;
        }
        Node::Uncordon(timeout) => {
            let client = client().await?.with_timeout(timeout.timeout);
            let request = v1::UncordonNodeRequest::default();
            let answer = send!(client.limit(QUICK), client.nodes, uncordon_node, request).await?;
            output::line(format!("node/{} uncordoned", name(answer.node)))?;
        }
        Node::Drain(args) => {
            let client = client().await?;
            evacuate(&client, &args).await?;
            drain(&client, args).await?;
        }
        Node::Check(Files { files }) => check(&client().await?, &files).await?,
        Node::CpuBaseline(CpuBaseline { contexts }) => cpu_baseline(given, contexts).await?,
    }
    Ok(())
}

/// Prints the processor that the nodes of these contexts have in common; of the selected node without any.
async fn cpu_baseline(given: &Connection, contexts: Vec<String>) -> Result<()> {
    let of_context = |name| Connection {
        context: Some(name),
        ..given.clone()
    };
    let connections = match contexts.is_empty() {
        true => vec![given.clone()],
        false => contexts.into_iter().map(of_context).collect(),
    };
    let mut nodes = Vec::new();
    for connection in &connections {
        let node = Client::connect(connection).await?.node().await?;
        let features = node.status.unwrap_or_default().guest_cpu_features;
        if features.is_empty() {
            let name = node.metadata.unwrap_or_default().name;
            let message = format!("node \"{name}\" does not know which processor features guests can have");
            return Err(Failure::new(Code::Precondition, message)
                .hint("check that /dev/kvm exists there, and that its vmmd is of this version"));
        }
        nodes.push(features);
    }
    match baseline(&nodes) {
        Some((model, further)) => output::print(&output::node::baseline(model, &further)),
        None => {
            let message = "the nodes have no processor model in common: VMs with the model \"host\" move only between nodes that are alike";
            Err(Failure::new(Code::Precondition, message))
        }
    }
}

/// Prints the node.
pub async fn show(client: &Client, output: Option<&Output>) -> Result<()> {
    let node = client.node().await?;
    match output {
        None | Some(Output::Wide) => output::print(&output::node::node(&node, jiff::Timestamp::now())),
        Some(output) => {
            let title = format!("node/{}", node.metadata.clone().unwrap_or_default().name);
            format::one(title, &node, schema::NODE, output)
        }
    }
}

async fn cordon(client: &Client, reason: String) -> Result<()> {
    let request = v1::CordonNodeRequest {
        reason,
        ..Default::default()
    };
    let answer = send!(client.limit(QUICK), client.nodes, cordon_node, request).await?;
    output::line(format!("node/{} cordoned", name(answer.node)))
}

/// Changes labels of the node.
pub async fn label(client: &Client, labels: Vec<LabelChange>) -> Result<()> {
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
    let answer = send!(client.limit(QUICK), client.nodes, update_node_labels, request).await?;
    output::line(format!("node/{} labelled", name(answer.node)))
}

/// Moves the VMs that have a destination. The failures are those of the VMs that stay and must not be stopped.
async fn evacuate(client: &Client, args: &Drain) -> Result<(), Vec<Failure>> {
    if args.migrate_to.is_none() && args.destinations.is_empty() {
        return Ok(());
    }
    cordon(client, args.reason.clone()).await?;
    let vms = client.objects::<v1::Vm>(&Query::default()).await?;
    let mut failures = Vec::new();
    for vm in vms {
        let name = vm.name();
        let runs = act::phase(&vm) == v1::VmPhase::Running;
        let Some(to) = args.destination(name).filter(|_| runs) else {
            continue;
        };
        let request = v1::MigrateVmRequest {
            name: name.to_owned(),
            target: to.to_owned(),
            ..Default::default()
        };
        match migration::migrate(client, request, false).await {
            Err(failure) if args.stop_rest => {
                eprintln!("vm/{name} will be stopped, as it cannot be moved: {failure}");
            }
            Err(failure) => failures.push(failure),
            Ok(()) => {}
        }
    }
    if failures.is_empty() {
        return Ok(());
    }
    let hint = "the node is cordoned, and no VM was stopped; --stop-rest stops VMs that cannot be moved";
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
    match guarded_operation(&hint, watched).await {
        Ok(ended) => operation::outcome(ended?).map(drop)?,
        Err(_) => return Err(Failure::new(Code::Timeout, "the drain continues").hint(hint)),
    }
    output::line("the node is drained")
}

async fn check(client: &Client, files: &[PathBuf]) -> Result<(), Vec<Failure>> {
    let mut failures = Vec::new();
    for document in apply::read(files)? {
        // Only VMs have a placement.
        let Object::Vm(vm) = document.object.clone() else {
            continue;
        };
        let request = v1::CheckPlacementRequest { vm: Some(*vm) };
        match call(QUICK, client.nodes.clone().check_placement(request)).await {
            Ok(answer) if answer.fits => {
                output::line(format!("{} fits", document.title()))?;
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
