//! The watch of the VMs of pods in vmmd.

use std::time::Duration;

use tokio::sync::mpsc::Sender;
use tonic::Status;
use vmmd_api::v1::{self, WatchEventType};

use crate::{
    daemon::{CALL, Daemon, within},
    names,
};

/// How soon a vmmd that does not answer is asked again.
const RETRY: Duration = Duration::from_secs(1);

/// Message from the watch.
#[derive(Debug)]
pub enum News {
    /// All VMs of agents.
    All(Vec<v1::Vm>),
    /// A VM as it is now.
    Vm(Box<v1::Vm>),
    /// This VM is gone.
    Gone(Box<v1::Vm>),
    /// vmmd does not answer.
    Away,
}

/// Watches the VMs. Returns when the receiver is closed. After each interruption all VMs are listed
/// again, as they are few.
pub async fn watch<N: From<News>>(daemon: Daemon, news: Sender<N>) {
    loop {
        if let Err(status) = watch_vms(&daemon, &news).await {
            tracing::warn!("watch of VMs: {}: {}", status.code(), status.message());
        }
        // Changes before the next list are unknown.
        if news.send(News::Away.into()).await.is_err() {
            return;
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn watch_vms<N: From<News>>(daemon: &Daemon, news: &Sender<N>) -> Result<(), Status> {
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
                Some(vms) => News::All(vms),
                None => continue,
            },
            (WatchEventType::Added | WatchEventType::Modified, Some(vm), Some(listed)) => {
                listed.push(*vm);
                continue;
            }
            (WatchEventType::Added | WatchEventType::Modified, Some(vm), None) => News::Vm(vm),
            (WatchEventType::Deleted, Some(vm), None) => News::Gone(vm),
            (WatchEventType::Deleted, Some(vm), Some(listed)) => {
                listed.retain(|one| {
                    one.metadata.as_ref().map(|one| &one.uid) != vm.metadata.as_ref().map(|vm| &vm.uid)
                });
                continue;
            }
            _ => continue,
        };
        if news.send(said.into()).await.is_err() {
            return Ok(());
        }
    }
    Ok(())
}
