//! Disks of placeholder pods that are gone.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, ResourceExt as _};

use crate::{
    names,
    provision::{Error, Provisioner, disks},
};

/// How often disks without a pod are searched.
const SWEEP: Duration = Duration::from_secs(300);
/// How soon the search is repeated when vmmd or the API server did not answer.
const RETRY: Duration = Duration::from_secs(30);

/// Deletes disks that were created for pods that are gone. Never returns.
pub async fn run(client: Client, provisioner: Provisioner) {
    loop {
        let wait = match once(&client, &provisioner).await {
            Ok(()) => SWEEP,
            Err(error) => {
                tracing::debug!("disks of pods that are gone: {error}");
                RETRY
            }
        };
        tokio::time::sleep(wait).await;
    }
}

async fn once(client: &Client, provisioner: &Provisioner) -> Result<(), Error> {
    for disk in provisioner.disks().await? {
        let metadata = disk.metadata.clone().unwrap_or_default();
        let place = metadata
            .annotations
            .get(names::POD)
            .and_then(|place| place.split_once('/'));
        let Some((namespace, pod)) = place else { continue };
        let pods = Api::<Pod>::namespaced(client.clone(), namespace);
        let pod = pods.get_opt(pod).await?;
        if pod.and_then(|pod| pod.uid()).as_ref() == metadata.labels.get(names::POD_UID) {
            continue;
        }
        tracing::info!(disk = metadata.name, "its pod is gone: it is deleted");
        if let Err(status) = disks::delete(&provisioner.daemon, &disk).await {
            tracing::debug!(disk = metadata.name, "{}", status.message());
        }
    }
    provisioner.prune_images().await
}
