//! Makes what looks after a VM anew when it has panicked: from the store and from the process, as a new daemon would. Meanwhile
//! the VM keeps its name, its user id and its room, and who asks for it is told to come back.

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

/// Runs what looks after the VM `name`.
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
            // Boxed, as the task waits for this as long as the VM is there.
            Box::pin(again(&host, uid, &name)).await;
        }
    });
}

async fn again(host: &Arc<Host>, uid: Uuid, name: &str) {
    let message = "what looks after the VM has failed and is made anew; the log has the cause";
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
    // What the one before had and the new one does not is free.
    host.ledger.release_abandoned(name);
}
