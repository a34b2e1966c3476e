//! The two watches of the agent: the pods of its node, and its VMs.

use std::{pin::pin, time::Duration};

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt as _,
    runtime::{WatchStreamExt as _, watcher},
};
use tokio::sync::mpsc::Sender;
use tonic::Status;
use vmmd_api::v1::{self, WatchEventType};

use crate::{
    backoff::{Watches, watching},
    daemon::{CALL, Daemon, within},
    names,
};

/// How soon a vmmd that does not answer is asked again.
const RETRY: Duration = Duration::from_secs(1);

/// Message from the watches.
#[derive(Debug)]
pub enum News {
    /// All pods of the node.
    Pods(Vec<Pod>),
    /// A pod as it is now.
    Pod(Box<Pod>),
    /// The pod with this uid is gone.
    PodGone(String),
    /// All VMs of agents.
    Vms(Vec<v1::Vm>),
    /// A VM as it is now.
    Vm(Box<v1::Vm>),
    /// This VM is gone.
    VmGone(Box<v1::Vm>),
    /// vmmd does not answer.
    VmmdAway,
}

/// Watches the pods. Returns when the receiver is closed.
pub async fn pods(client: Client, node: String, news: Sender<News>) {
    let config = watching().fields(&format!("spec.nodeName={node}"));
    let mut events = pin!(watcher(Api::<Pod>::all(client), config).backoff(Watches::new()));
    let mut listed = Vec::new();
    while let Some(event) = events.next().await {
        let said = match event {
            Ok(watcher::Event::Init) => {
                listed.clear();
                continue;
            }
            Ok(watcher::Event::InitApply(pod)) => {
                listed.push(pod);
                continue;
            }
            Ok(watcher::Event::InitDone) => News::Pods(std::mem::take(&mut listed)),
            Ok(watcher::Event::Apply(pod)) => News::Pod(Box::new(pod)),
            Ok(watcher::Event::Delete(pod)) => News::PodGone(pod.uid().unwrap_or_default()),
            Err(error) => {
                tracing::warn!("watch of pods: {error}");
                continue;
            }
        };
        if news.send(said).await.is_err() {
            return;
        }
    }
}

/// Watches the VMs. Returns when the receiver is closed. After each interruption all VMs are listed
/// again, as they are few.
pub async fn vms(daemon: Daemon, news: Sender<News>) {
    loop {
        if let Err(status) = watch_vms(&daemon, &news).await {
            tracing::warn!("watch of VMs: {}: {}", status.code(), status.message());
        }
        // Changes before the next list are unknown.
        if news.send(News::VmmdAway).await.is_err() {
            return;
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn watch_vms(daemon: &Daemon, news: &Sender<News>) -> Result<(), Status> {
    // Also those of other nodes' agents, which are moved here.
    let filter = v1::VmFilter {
        labels: vec![names::MACHINE_UID.to_owned()],
        ..v1::VmFilter::default()
    };
    let request = v1::WatchVmsRequest {
        filter: Some(filter),
        ..v1::WatchVmsRequest::default()
    };
    let mut events = within(CALL, daemon.vms.clone().watch_vms(request)).await?;
    let mut listed = Some(Vec::new());
    while let Some(event) = events.message().await? {
        let kind = event.r#type();
        let vm = event.vm.map(Box::new);
        let said = match (kind, vm, &mut listed) {
            (WatchEventType::Synced, ..) => match listed.take() {
                Some(vms) => News::Vms(vms),
                None => continue,
            },
            (WatchEventType::Added | WatchEventType::Modified, Some(vm), Some(listed)) => {
                listed.push(*vm);
                continue;
            }
            (WatchEventType::Added | WatchEventType::Modified, Some(vm), None) => News::Vm(vm),
            (WatchEventType::Deleted, Some(vm), None) => News::VmGone(vm),
            (WatchEventType::Deleted, Some(vm), Some(listed)) => {
                listed.retain(|one| {
                    one.metadata.as_ref().map(|one| &one.uid) != vm.metadata.as_ref().map(|vm| &vm.uid)
                });
                continue;
            }
            _ => continue,
        };
        if news.send(said).await.is_err() {
            return Ok(());
        }
    }
    Ok(())
}
