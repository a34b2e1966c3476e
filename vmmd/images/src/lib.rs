//! Images of the ImageService. Each has a record in the store. The content is a raw image
//! `<state_dir>/images/<digest>.raw`, which images with the same content share ([`folder`]).
//!
//! ```text
//!  (none) ──record──▶ Importing ──file in its place──▶ Ready ──record──▶ Deleting ──file gone──▶ (none)
//! ```
//!
//! Invariants: each file in the folder belongs to a record. The daemon removes content only when no
//! record has its digest (placement and removal both hold [`names`](registry::Images::names)). At its start the
//! daemon continues interrupted imports. An unprivileged process parses images
//! ([`vmmd_host::image_process`]): this crate never does. It never knows a VM or a disk: [`Ports`] has the parts of
//! the daemon that it works with.
//!
//! A reader starts at `import.rs`, which follows one image from its request to its place, and
//! continues with `fetch.rs` for downloads and `oci` for registries.

pub mod describe;
mod digest;
mod fetch;
pub mod folder;
mod import;
mod oci;
mod ports;
mod prune;
mod reach;
pub mod registry;
pub mod rules;
mod upload;

use std::sync::Arc;

use uuid::Uuid;
use vmmd_api::v1;

pub use self::{
    fetch::words as http_words,
    import::{has_room, import, room},
    ports::{Ports, SourceFile},
    prune::prune,
    upload::upload,
};
use vmmd_host::{failure::Failure, text};
use vmmd_objects::{
    context::Context,
    event::{Draft, Object},
    operation::{Type, interrupted},
    request::{self, preconditions},
};
use vmmd_store::store_failure;
use vmmd_store::{ImageRecord, ImageStage, RequestRecord};

use crate::registry::Deletion;

/// Deletes an image; an import that is under way is cancelled.
pub async fn delete<H: Ports>(host: &Arc<H>, name: &str, context: &Context) -> Result<(), Failure> {
    let found = host.images().begin_delete(name, |record| {
        let now = (record.uid.as_slice(), record.generation, record.begun.as_slice());
        preconditions::check_record("image", name, now, context)
    })?;
    let record = match found {
        Deletion::Ready(record) => record,
        Deletion::Importing(operation) => {
            let mut state = host.operations().cancel(&operation)?;
            let _ = state
                .wait_for(|operation| vmmd_objects::operation::has_ended(operation))
                .await;
            return match host.images().registry.see(name) {
                // It was whole before it could be cancelled.
                Ok(seen) if seen.view.is_empty() => Box::pin(delete(host, name, context)).await,
                _ => Ok(()),
            };
        }
    };
    let mark = host.requests().mark(context);
    let answer = mark.map(|mark| request::done(mark, &v1::DeleteImageResponse::default()));
    remove(host, *record, answer).await
}

/// Deletes an image that is out of use. `answer` is the response to the delete request.
async fn remove<H: Ports>(
    host: &Arc<H>,
    before: ImageRecord,
    answer: Option<RequestRecord>,
) -> Result<(), Failure> {
    let (disks, vms) = host.users(&before);
    let snapshot = host.snapshot_with(&before.uid);
    if !disks.is_empty() || !vms.is_empty() || snapshot.is_some() {
        let quoted = |what: &str, names: &[String]| {
            let names = names.iter().map(|name| format!("{what} \"{name}\""));
            names.collect::<Vec<_>>()
        };
        let snapshots = quoted("snapshot", snapshot.as_slice());
        let users = [quoted("disk", &disks), quoted("VM", &vms), snapshots]
            .concat()
            .join(", ");
        let message = format!(
            "image \"{}\" is used by {users}: delete or change those first",
            before.name
        );
        host.images().settle(before);
        return Err(Failure::precondition("IMAGE_IN_USE", message));
    }
    let mut record = before.clone();
    record.stage = ImageStage::Deleting.into();
    record.stage_ms = text::now_ms();
    let mut answered: Vec<_> = answer.into_iter().collect();
    // A retry of the import must not make another one.
    let import = request::unanswered(host, &record.begun, "ImportImage").await;
    if let Some(mark) = import.map_err(store_failure)? {
        let image = describe::by_uid(host, &record.uid).await.transpose()?;
        let response = v1::ImportImageResponse {
            image,
            operation: None,
        };
        answered.push(request::done(mark, &response));
    }
    if let Err(error) = host.store().put_with(&record, None, answered).await {
        host.images().settle(before);
        return Err(store_failure(error));
    }
    discard(host, &record).await;
    tell(host, &record, "ImageDeleted", "the image was deleted");
    Ok(())
}

/// Removes the files of an image, then its record. The daemon's next start retries the steps that
/// failed.
async fn discard<H: Ports>(host: &Arc<H>, record: &ImageRecord) {
    let names = host.images().names().await;
    let (folder, of) = (host.folder(), record.clone());
    let shared = record.digest.is_empty() || host.images().is_shared(record);
    let removing = host.pools().bulk.run(&[folder.root()], move || {
        folder.clear(&of, true)?;
        match shared {
            true => Ok(()),
            false => folder.remove(&of),
        }
    });
    let removed = removing.await;
    let tombstone = host.images().registry.bury(record);
    match removed {
        Ok(Ok(())) => {
            if let Err(error) = host
                .store()
                .remove::<ImageRecord>(&record.uid, Some(tombstone.clone()), None)
                .await
            {
                tracing::error!(image = record.name, %error, "the image's record could not be removed");
            }
        }
        Ok(Err(error)) => {
            tracing::error!(image = record.name, %error, "the image's file could not be removed");
        }
        Err(error) => tracing::error!(image = record.name, %error, "remove an image"),
    }
    host.images().registry.forget(&record.uid, tombstone);
    drop(names);
}

/// Loads the images of the store at the daemon's start, and continues interrupted operations.
pub async fn restore<H: Ports>(host: &Arc<H>, records: Vec<ImageRecord>) {
    let records: Vec<_> = records
        .into_iter()
        .filter(|record| Uuid::from_slice(&record.uid).is_ok())
        .collect();
    // All of them are known before one is removed: they may have their content in common.
    for record in &records {
        host.requests().adopt(&record.begun, &record.uid);
        host.images().registry.restore(record.clone());
    }
    for record in records {
        let mut left = host.operations().left(&object(&record));
        match (record.stage(), &record.source) {
            (ImageStage::Ready, _) => {
                for operation in left {
                    operation.complete("the image can be used");
                }
            }
            (ImageStage::Importing, Some(_)) => {
                let handle = left.pop().unwrap_or_else(|| {
                    let context = Context::daemon();
                    let operations = &host.operations();
                    let deadline = Some(import::WHOLE_DEADLINE);
                    operations.begin(Type::ImageImport, &object(&record), &context, deadline)
                });
                host.images().begin(&record.name, handle.pending());
                tell(
                    host,
                    &record,
                    "Repaired",
                    "the import of the image was interrupted and continues",
                );
                tokio::spawn(import::carry_out(Arc::clone(host), record, handle));
            }
            (ImageStage::Importing, None) | (ImageStage::Deleting, _) => {
                let message =
                    "the image's upload or deletion had been interrupted: what was left of it is removed";
                tell(host, &record, "Repaired", message);
                discard(host, &record).await;
                for operation in left {
                    operation.fail(&interrupted(
                        "the daemon was restarted: nothing is left of the image",
                    ));
                }
            }
        }
    }
}

/// Emits an event of an image.
fn tell<H: Ports>(host: &Arc<H>, record: &ImageRecord, reason: &str, message: &str) {
    host.events().emit(Draft::normal(object(record), reason, message));
}

/// An image, as events and operations are about it.
fn object(record: &ImageRecord) -> Object {
    let uid = Uuid::from_slice(&record.uid).unwrap_or_default();
    Object::Image(record.name.clone(), uid)
}
