//! Keeps the node object and its lease current.

use std::{collections::BTreeMap, path::Path, pin::pin, time::Duration};

use anyhow::Context as _;
use jiff::Timestamp;
use k8s_openapi::{
    api::{
        coordination::v1::{Lease, LeaseSpec},
        core::v1::Node,
    },
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference},
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::sync::watch;
use vmmd_api::v1;

use super::node::{self, Settings};
use crate::{
    daemon::{CALL, Daemon, within},
    described::{Described, describe},
    names,
};

/// Namespace of the nodes' leases.
const LEASES: &str = "kube-node-lease";
/// How often a lease is renewed.
const RENEW: Duration = Duration::from_secs(10);
/// How long it lasts, in seconds.
const LENGTH: i32 = 40;
/// How often the status is written although nothing has changed.
const HEARTBEAT: Duration = Duration::from_secs(60);
/// Wait before a failed action is retried.
const RETRY: Duration = Duration::from_secs(2);

/// Keeps the node as vmmd describes it. Never returns.
pub async fn run(client: Client, daemon: Daemon, settings: Settings) {
    let nodes = Api::<Node>::all(client);
    let (send, mut described) = watch::channel(Described::NotYet);
    let mut describing = pin!(describe(daemon, send));
    loop {
        let now = described.borrow_and_update().clone();
        let written = async {
            let node = match &now {
                Described::NotYet => return HEARTBEAT,
                Described::Away => None,
                Described::As(node) => Some(&**node),
            };
            match write(&nodes, &settings, node).await {
                Ok(()) => HEARTBEAT,
                Err(error) => {
                    tracing::warn!("node {}: {error}", settings.name);
                    RETRY
                }
            }
        };
        let wait = tokio::select! {
            wait = written => wait,
            () = &mut describing => return,
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            _ = described.changed() => {}
            () = &mut describing => return,
        }
    }
}

/// Waits until vmmd says where disks by path may be.
///
/// # Errors
///
/// Anywhere: then nothing but the agent confines VMs to their volumes.
pub async fn confined(daemon: &Daemon) -> anyhow::Result<()> {
    let node = loop {
        let request = v1::WatchNodeRequest {};
        let stream = within(CALL, daemon.nodes.clone().watch_node(request)).await;
        let first = match stream {
            Ok(mut stream) => stream.message().await,
            Err(status) => Err(status),
        };
        match first {
            Ok(Some(v1::WatchNodeResponse { node: Some(node) })) => break node,
            Ok(_) => {}
            Err(status) => tracing::warn!("ask vmmd for the roots of disks: {}", status.message()),
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    };
    let roots = node.spec.and_then(|spec| spec.roots);
    let roots =
        roots.context("--no-node-files: this vmmd does not say where disks may be: install a newer one")?;
    if roots.disks.iter().any(|root| Path::new(root).parent().is_none()) {
        anyhow::bail!(
            "--no-node-files: vmmd opens disks anywhere on the node: set `roots.disks` in its config.toml to the folders of the volumes and the \
             block devices of VMs, and restart vmmd"
        );
    }
    Ok(())
}

async fn write(nodes: &Api<Node>, settings: &Settings, described: Option<&v1::Node>) -> kube::Result<()> {
    let name = &settings.name;
    let node = match nodes.get_opt(name).await? {
        Some(node) => node,
        None => match nodes
            .create(&PostParams::default(), &node::new(settings, described))
            .await
        {
            Err(kube::Error::Api(status)) if status.is_already_exists() => nodes.get(name).await?,
            made => made?,
        },
    };
    // Features are known only while vmmd describes them.
    let own = |key: &str| key == names::MIGRATION || described.is_some() && node::is_feature(key);
    let labels = changes(node.labels(), node::labels(settings, described), own);
    let own = |key: &str| key == names::MIGRATION_ADDRESS;
    let annotations = changes(node.annotations(), node::annotations(settings), own);
    if !labels.is_empty() || !annotations.is_empty() {
        let patch = json!({"metadata": {"uid": node.uid(), "labels": labels, "annotations": annotations}});
        nodes
            .patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await?;
    }
    let status = node::status(settings, described, node.status.as_ref(), Timestamp::now());
    let patch = json!({"metadata": {"uid": node.uid()}, "status": status});
    nodes
        .patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
        .await?;
    Ok(())
}

/// Changes to write: values of others stay. The agent's own values are removed when they are not
/// set any longer.
fn changes(
    old: &BTreeMap<String, String>,
    new: BTreeMap<String, String>,
    own: impl Fn(&str) -> bool,
) -> BTreeMap<String, Option<String>> {
    let gone = old.keys().filter(|key| own(key) && !new.contains_key(*key));
    let gone: Vec<_> = gone.map(|key| (key.clone(), None)).collect();
    let changed = new.into_iter().filter(|(key, value)| old.get(key) != Some(value));
    changed
        .map(|(key, value)| (key, Some(value)))
        .chain(gone)
        .collect()
}

/// Keeps the lease that marks this node as alive. Never returns.
pub async fn renew(client: Client, name: String) {
    let leases = Api::<Lease>::namespaced(client.clone(), LEASES);
    let nodes = Api::<Node>::all(client);
    loop {
        let wait = match renew_once(&leases, &nodes, &name).await {
            Ok(true) => RENEW,
            // A new node: its lease is created once the node exists.
            Ok(false) => RETRY,
            Err(error) => {
                tracing::warn!("lease of the node: {error}");
                RETRY
            }
        };
        tokio::time::sleep(wait).await;
    }
}

/// False when there is no such node.
async fn renew_once(leases: &Api<Lease>, nodes: &Api<Node>, name: &str) -> kube::Result<bool> {
    let spec = LeaseSpec {
        holder_identity: Some(name.to_owned()),
        lease_duration_seconds: Some(LENGTH),
        renew_time: Some(MicroTime(Timestamp::now())),
        ..LeaseSpec::default()
    };
    let patch = json!({"spec": spec});
    match leases
        .patch(name, &PatchParams::default(), &Patch::Merge(patch))
        .await
    {
        Err(kube::Error::Api(status)) if status.is_not_found() => {}
        patched => return patched.map(|_| true),
    }
    // It goes with the node.
    let Some(node) = nodes.get_opt(name).await? else {
        return Ok(false);
    };
    let owner = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: name.to_owned(),
        uid: node.uid().unwrap_or_default(),
        ..OwnerReference::default()
    };
    let lease = Lease {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        spec: Some(spec),
    };
    leases.create(&PostParams::default(), &lease).await.map(|_| true)
}
