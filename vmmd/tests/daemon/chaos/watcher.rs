//! A client that watches all VMs and resumes at its cursor, from daemon to daemon.

use std::collections::BTreeMap;

use tokio::{task::JoinHandle, time::timeout};
use tokio_stream::StreamExt;
use tonic::Streaming;
use vmmd_api::v1::{self, WatchEventType};

use crate::harness::{Daemon, PATIENCE};

/// VMs as the watch has reported them.
#[derive(Debug, Default)]
pub struct Watcher {
    cursor: String,
    /// By their UUIDs: of two VMs with one name the later may be told of first.
    vms: BTreeMap<String, v1::Vm>,
}

impl Watcher {
    async fn open(&self, daemon: &Daemon) -> Streaming<v1::WatchVmsResponse> {
        let request = v1::WatchVmsRequest {
            cursor: self.cursor.clone(),
            ..Default::default()
        };
        daemon.client().watch_vms(request).await.unwrap().into_inner()
    }

    fn take(&mut self, event: v1::WatchVmsResponse) {
        if !event.cursor.is_empty() {
            self.cursor.clone_from(&event.cursor);
        }
        let kind = event.r#type();
        let Some(vm) = event.vm else { return };
        let uid = vm.metadata.as_ref().unwrap().uid.clone();
        if kind == WatchEventType::Deleted {
            self.vms.remove(&uid);
        } else {
            self.vms.insert(uid, vm);
        }
    }

    /// Follows a daemon for as long as it lives.
    pub async fn follow(&mut self, daemon: &Daemon) -> JoinHandle<Self> {
        let mut watcher = std::mem::take(self);
        let mut events = watcher.open(daemon).await;
        tokio::spawn(async move {
            while let Some(Ok(event)) = events.next().await {
                watcher.take(event);
            }
            watcher
        })
    }

    /// Reads events until the reported VMs match the daemon's.
    pub async fn catch_up(&mut self, daemon: &Daemon) {
        let mut events = self.open(daemon).await;
        let caught_up = async {
            loop {
                let there = daemon.list().await;
                let told = self.vms.values();
                if there.len() == self.vms.len() && there.iter().all(|vm| told.clone().any(|told| told == vm))
                {
                    return;
                }
                let event = events.next().await.expect("the watch goes on").unwrap();
                self.take(event);
            }
        };
        if timeout(PATIENCE, caught_up).await.is_err() {
            panic!(
                "the watch told of {:#?}, there is {:#?}",
                self.vms,
                daemon.list().await
            );
        }
    }
}
