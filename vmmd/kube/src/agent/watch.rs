//! The watch of the pods of the node.

use std::pin::pin;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt as _,
    runtime::{WatchStreamExt as _, watcher},
};
use tokio::sync::mpsc::Sender;

use crate::{
    backoff::{Watches, watching},
    vms,
};

/// Message from the watches.
#[derive(Debug)]
pub enum News {
    /// All pods of the node.
    Pods(Vec<Pod>),
    /// A pod as it is now.
    Pod(Box<Pod>),
    /// The pod with this uid is gone.
    PodGone(String),
    /// Of the VMs.
    Vms(vms::News),
}

impl From<vms::News> for News {
    fn from(news: vms::News) -> Self {
        Self::Vms(news)
    }
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
