//! The watch of the pods whose launchers are connected.

use std::time::Duration;

use tokio::sync::mpsc::Sender;
use tonic::Status;
use vmmd_api::v1::{self, watch_pods_response::Change};

use super::vms;
use crate::daemon::{CALL, Daemon, within};

/// How soon a vmmd that does not answer is asked again.
const RETRY: Duration = Duration::from_secs(1);

/// Message from the watches.
#[derive(Debug)]
pub enum News {
    /// All pods.
    Pods(Vec<v1::Pod>),
    /// A pod whose launcher has connected, or has connected again.
    Connected(Box<v1::Pod>),
    /// The launcher of the pod with this uid is not connected any more.
    Disconnected(String),
    /// vmmd does not answer.
    PodsAway,
    /// Of the VMs.
    Vms(vms::News),
}

impl From<vms::News> for News {
    fn from(news: vms::News) -> Self {
        Self::Vms(news)
    }
}

/// Watches the pods. Returns when the receiver is closed.
pub async fn pods(daemon: Daemon, news: Sender<News>) {
    loop {
        if let Err(status) = watch(&daemon, &news).await {
            tracing::warn!("watch of pods: {}: {}", status.code(), status.message());
        }
        // Changes before the next list are unknown.
        if news.send(News::PodsAway).await.is_err() {
            return;
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn watch(daemon: &Daemon, news: &Sender<News>) -> Result<(), Status> {
    let request = v1::WatchPodsRequest {};
    let mut changes = within(CALL, daemon.pods.clone().watch_pods(request)).await?;
    while let Some(response) = changes.message().await? {
        let said = match response.change {
            Some(Change::All(set)) => News::Pods(set.pods),
            Some(Change::Connected(pod)) => News::Connected(Box::new(pod)),
            Some(Change::Disconnected(uid)) => News::Disconnected(uid),
            None => continue,
        };
        if news.send(said).await.is_err() {
            return Ok(());
        }
    }
    Ok(())
}
