//! Restarts the task of a VM after a panic, from the store and the process, as a new daemon would.
//! Meanwhile the VM keeps its name, user id and room, and requests for it are refused as
//! temporarily unavailable.

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use tokio::time::sleep;
use uuid::Uuid;
use vmmd_objects::event::{Draft, Object};

use super::reconcile::restore;
use crate::host::Host;

/// The wait before the first of several attempts in a row; each is twice the one before.
const FIRST: Duration = Duration::from_millis(50);
/// The longest wait.
const LONGEST: Duration = Duration::from_secs(30);

/// Runs the task that manages the VM `name`.
pub fn spawn(
    host: Arc<Host>,
    uid: Uuid,
    name: String,
    looks_after: impl Future<Output = ()> + Send + 'static,
) {
    let task = tokio::spawn(looks_after);
    tokio::spawn(async move {
        if let Err(error) = task.await
            && error.is_panic()
        {
            // Boxed to keep the outer task small: it lives as long as the VM.
            Box::pin(again(&host, uid, &name)).await;
        }
    });
}

async fn again(host: &Arc<Host>, uid: Uuid, name: &str) {
    let message = "the task of the VM has failed and is restarted; the log has the cause";
    let object = Object::Vm(name.to_owned(), uid);
    host.events
        .emit(Draft::warning(object, "SupervisorFailed", message));
    let failures = host.vms.failed(name);
    sleep(
        FIRST
            .saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1)))
            .min(LONGEST),
    )
    .await;
    let record = loop {
        match host.store.vm(uid.as_bytes()).await {
            Ok(record) => break record,
            Err(error) => {
                tracing::error!(vm = name, %error, "read a VM's record");
                sleep(FIRST).await;
            }
        }
    };
    match record {
        Some(record) => {
            // In a task of its own: it may panic too.
            let restoring: Pin<Box<dyn Future<Output = ()> + Send>> =
                Box::pin(restore(Arc::clone(host), uid, record.clone()));
            if tokio::spawn(restoring).await.is_err() {
                super::unusable::not_restored(host, uid, record);
            }
        }
        // It was being deleted, and that is done.
        None => {
            host.disks.give_back(name, None);
            host.ledger.expect(name, None);
            host.vms.drop_out(name);
        }
    }
    // Frees the claims of the previous task that the new task does not have.
    host.ledger.release_abandoned(name);
}
