//! An image as the API shows it.

use std::{io, os::unix::fs::MetadataExt, sync::Arc};

use vmmd_api::v1::{self, ConditionStatus, ImagePhase};
use vmmd_host::{failure::Failure, text};
use vmmd_objects::registry::Record as _;
use vmmd_spec::image::checksum_text;
use vmmd_store::{ImageStage, image_source::Source};

use crate::{Ports, folder::Folder, registry::Seen};

/// "blocks-sha256:…".
pub fn digest_text(digest: &[u8]) -> String {
    match digest {
        [] => String::new(),
        digest => format!("blocks-{}", checksum_text(digest)),
    }
}

/// Describes an image with the state of its file. Blocking.
fn look(folder: &Folder, seen: &Seen, disks: Vec<String>, vms: Vec<String>) -> v1::Image {
    let record = &seen.record;
    let stage = record.stage();
    let (phase, status, reason, mut message) = match stage {
        ImageStage::Importing => {
            let message = "the image is being imported".to_owned();
            (
                ImagePhase::Importing,
                ConditionStatus::False,
                "Importing",
                message,
            )
        }
        ImageStage::Ready => (ImagePhase::Ready, ConditionStatus::True, "Ready", String::new()),
        ImageStage::Deleting => {
            let message = "the image is being deleted".to_owned();
            (ImagePhase::Deleting, ConditionStatus::False, "Deleting", message)
        }
    };
    let (mut status, mut reason) = (status, reason);
    let file = match stage {
        ImageStage::Importing => folder.new_image(record),
        _ => folder.content(&record.digest),
    };
    let mut allocated = 0;
    match std::fs::metadata(file) {
        // stat(2): blocks of 512 bytes.
        Ok(metadata) => allocated = metadata.blocks().saturating_mul(512),
        Err(error) if stage == ImageStage::Ready => {
            status = ConditionStatus::False;
            let missing = error.kind() == io::ErrorKind::NotFound;
            reason = if missing { "FileMissing" } else { "FileUnusable" };
            message = format!("the image's file: {}", text::words(&error));
        }
        Err(_) => {}
    }
    let checksum = |digest: &[u8]| match digest {
        [] => String::new(),
        digest => checksum_text(digest),
    };
    v1::Image {
        metadata: Some(record.metadata()),
        spec: Some(v1::ImageSpec {
            source: record.source.as_ref().and_then(source),
            checksum: checksum(&record.checksum),
            max_size_bytes: record.max_size,
        }),
        status: Some(v1::ImageStatus {
            phase: phase.into(),
            digest: digest_text(&record.digest),
            virtual_size_bytes: record.size_bytes,
            allocated_bytes: allocated,
            source_format: record.source_format.clone(),
            source_compression: record.source_compression.clone(),
            source_bytes: record.source_bytes,
            source_checksum: checksum(&record.source_checksum),
            used_by_disks: disks,
            used_by_vms: vms,
            last_used_time: text::timestamp(record.used_ms.max(record.stage_ms)),
            operation: seen.view.clone(),
            source_manifest: checksum(&record.source_manifest),
            logical_block_bytes: match stage {
                ImageStage::Ready => record.logical_block.max(512),
                _ => 0,
            },
            conditions: vec![v1::Condition {
                r#type: "Ready".to_owned(),
                status: status.into(),
                reason: reason.to_owned(),
                message,
                transition_time: text::timestamp(record.stage_ms.max(record.created_ms)),
            }],
        }),
    }
}

/// What stands after a "?" may be a secret; credentials are one.
fn source(source: &vmmd_store::ImageSource) -> Option<v1::image_spec::Source> {
    match source.source.as_ref()? {
        Source::Url(url) => {
            let shown = url.split(['?', '#']).next().unwrap_or_default();
            Some(v1::image_spec::Source::Url(shown.to_owned()))
        }
        Source::Path(path) => Some(v1::image_spec::Source::Path(path.clone())),
        Source::Oci(oci) => Some(v1::image_spec::Source::Oci(v1::OciSource {
            reference: oci.reference.clone(),
            platform: oci.platform.clone(),
            plain_http: oci.plain_http,
            credentials: None,
        })),
        Source::OciLayout(layout) => Some(v1::image_spec::Source::OciLayout(v1::OciLayoutSource {
            path: layout.path.clone(),
            reference: layout.reference.clone(),
            platform: layout.platform.clone(),
        })),
    }
}

/// Images as they are now.
pub async fn look_at<H: Ports>(host: &Arc<H>, seen: Vec<Arc<Seen>>) -> Result<Vec<v1::Image>, Failure> {
    let seen: Vec<_> = seen
        .into_iter()
        .map(|seen| {
            let (disks, vms) = host.users(&seen.record);
            (seen, disks, vms)
        })
        .collect();
    let folder = host.folder();
    let paths = [folder.root()];
    let looking = host.pools().files.run(&paths, move || {
        let images = seen.into_iter();
        images
            .map(|(seen, disks, vms)| look(&folder, &seen, disks, vms))
            .collect()
    });
    looking.await
}

/// The image with this UUID, as it is now.
pub async fn by_uid<H: Ports>(host: &Arc<H>, uid: &[u8]) -> Option<Result<v1::Image, Failure>> {
    let seen = host.images().registry.find(uid)?;
    let looked = look_at(host, vec![seen]).await;
    Some(looked.map(|mut images| images.pop().unwrap_or_default()))
}
