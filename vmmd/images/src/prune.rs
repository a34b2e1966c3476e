//! Deletes images that nothing uses.

use std::sync::Arc;

use vmmd_api::v1;
use vmmd_host::{failure::Failure, text};
use vmmd_store::ImageStage;

use super::{describe, remove};
use crate::{
    Ports,
    registry::{Deletion, Seen},
};

/// Deletes the images that `matches` selects, least recently used first. An image that comes into
/// use meanwhile stays.
pub async fn prune<H: Ports>(
    host: &Arc<H>,
    request: &v1::PruneImagesRequest,
    matches: impl Fn(&Seen) -> bool,
) -> Result<v1::PruneImagesResponse, Failure> {
    let age_ms = match &request.older_than {
        None => 0,
        Some(age) if age.seconds < 0 || age.nanos < 0 => {
            return Err(Failure::field("olderThan", "must not be negative"));
        }
        Some(age) => u64::try_from(age.seconds).unwrap_or(0).saturating_mul(1000),
    };
    let now_ms = text::now_ms();
    let latest = now_ms.saturating_sub(age_ms);
    // A time in the future was noted while the clock was wrong: the image was used at some time until now.
    let used = |seen: &Seen| seen.record.used_ms.max(seen.record.stage_ms).min(now_ms);
    let mut all = host.images().registry.after(None).objects;
    all.retain(|seen| seen.record.stage() == ImageStage::Ready && used(seen) <= latest && matches(seen));
    all.sort_by_key(|seen| used(seen));
    let mut response = v1::PruneImagesResponse::default();
    for seen in all {
        let (disks, vms) = host.users(&seen.record);
        if !disks.is_empty() || !vms.is_empty() || host.snapshot_with(&seen.record.uid).is_some() {
            continue;
        }
        if request.free_bytes > 0 && response.freed_bytes >= request.free_bytes {
            break;
        }
        let name = seen.record.name.clone();
        let shared = host.images().is_shared(&seen.record);
        let looked = describe::look_at(host, vec![Arc::clone(&seen)]).await?.pop();
        let bytes = looked
            .and_then(|image| image.status)
            .map_or(0, |status| status.allocated_bytes);
        if !request.dry_run {
            let deletion = host.images().begin_delete(&name, |record| {
                let same = record.uid == seen.record.uid;
                same.then_some(()).ok_or_else(|| crate::registry::no_image(&name))
            });
            let Ok(Deletion::Ready(record)) = deletion else {
                continue;
            };
            match remove(host, *record, None).await {
                Ok(()) => {}
                Err(failure) if failure.reason == "IMAGE_IN_USE" => continue,
                Err(failure) => return Err(failure),
            }
        }
        response.deleted.push(name);
        // Content that another image has stays.
        response.freed_bytes += if shared { 0 } else { bytes };
    }
    Ok(response)
}
