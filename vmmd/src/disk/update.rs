//! Changes fields of a disk that a client may change.

use std::sync::Arc;

use proto::{
    model::{Violations, metadata::Metadata},
    v1,
};
use uuid::Uuid;

use super::{
    create::{Begun, write_beside},
    resize, tell,
};
use crate::{
    context::Context,
    failure::{Failure, store_failure},
    host::Host,
    request::preconditions,
    store::DiskRecord,
    text,
};

/// What may be in a mask.
const FIELDS: [&str; 4] = [LABELS, ANNOTATIONS, OWNER, SIZE];
const LABELS: &str = "metadata.labels";
const ANNOTATIONS: &str = "metadata.annotations";
const OWNER: &str = "metadata.owner";
const SIZE: &str = "spec.size_bytes";

/// Changes a disk. What is left of it when it is an operation is begun.
pub async fn update(
    host: &Arc<Host>,
    request: &v1::UpdateDiskRequest,
    context: &Context,
) -> Result<Begun, Failure> {
    let (metadata, size, mask) = parse(request)?;
    let name = metadata.name.as_str();
    let edit = host.disks.edit().await;
    let before = host.disks.get(name)?;
    expected(&before, context)?;
    let grows = match size {
        Some(size) => resize::may_grow(host, &before, size)?,
        None => false,
    };
    let mut record = before.clone();
    for field in mask {
        match field {
            LABELS => record.labels.clone_from(&metadata.labels),
            ANNOTATIONS => record.annotations.clone_from(&metadata.annotations),
            OWNER => record.owner.clone_from(&metadata.owner),
            _ => {}
        }
    }
    let changed = record != before;
    if changed {
        record.generation = record.generation.max(1) + 1;
    }
    if changed || grows {
        // With an id, a retry after the end of the daemon is known to have begun.
        host.requests.note(context, &mut record.begun);
        host.store.put_disk(&record).await.map_err(store_failure)?;
        host.disks.settle(record.clone());
    }
    drop(edit);
    if changed {
        let message = format!("the disk has generation {} now", record.generation);
        tell(host, &record, "DiskChanged", message);
        if let Err(failure) = write_beside(host, &record).await {
            tracing::warn!(disk = record.name, %failure, "what is beside the disk's file is out of date");
        }
    }
    let uid = record.uid.clone();
    let pending = match size.filter(|_| grows) {
        Some(size) => Some(resize::begin(host, record, size, context)?),
        None => None,
    };
    Ok(Begun { uid, pending })
}

/// Checks the preconditions of a request. The generation is not compared again for a request that was begun already: the
/// request may have changed it itself.
pub fn expected(record: &DiskRecord, context: &Context) -> Result<(), Failure> {
    let begun = !context.request_id.is_empty() && record.begun.iter().any(|mark| mark.key() == context.key());
    let present = v1::Preconditions {
        uid: Uuid::from_slice(&record.uid).unwrap_or_default().to_string(),
        generation: (!begun).then_some(record.generation.max(1)),
    };
    preconditions::check("disk", &record.name, &context.preconditions, &present)
}

/// What is to be changed, with the fields of the mask.
fn parse(request: &v1::UpdateDiskRequest) -> Result<(Metadata, Option<u64>, Vec<&'static str>), Failure> {
    let mut found = Violations::default();
    let disk = request.disk.clone().unwrap_or_default();
    let paths = request.update_mask.clone().unwrap_or_default().paths;
    let mut mask = Vec::new();
    for (index, path) in paths.iter().enumerate() {
        match FIELDS.iter().find(|field| *field == path) {
            Some(field) => mask.push(*field),
            None => {
                let problem = format_args!(
                    "\"{}\" can't be changed: give some of {}",
                    text::brief(path),
                    FIELDS.join(", ")
                );
                found.add(format_args!("updateMask.paths[{index}]"), problem);
            }
        }
    }
    if paths.is_empty() {
        let problem = format_args!("must have at least one of {}", FIELDS.join(", "));
        found.add("updateMask", problem);
    }
    // Fields beside the mask mean nothing, and are not looked at.
    let given = disk.metadata.unwrap_or_default();
    let mut metadata = v1::ObjectMetadata {
        name: given.name,
        ..Default::default()
    };
    for field in &mask {
        match *field {
            LABELS => metadata.labels.clone_from(&given.labels),
            ANNOTATIONS => metadata.annotations.clone_from(&given.annotations),
            OWNER => metadata.owner.clone_from(&given.owner),
            _ => {}
        }
    }
    let metadata = Metadata::new(&mut found, "disk.metadata", &metadata);
    let size = mask
        .contains(&SIZE)
        .then(|| disk.spec.map_or(0, |spec| spec.size_bytes));
    match metadata {
        Some(metadata) => Ok(found.or((metadata, size, mask))?),
        None => Err(found.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(paths: &[&str]) -> Result<(Metadata, Option<u64>, Vec<&'static str>), Failure> {
        parse(&v1::UpdateDiskRequest {
            disk: Some(v1::Disk {
                metadata: Some(v1::ObjectMetadata {
                    name: "data".into(),
                    labels: [("=".to_owned(), String::new())].into(),
                    owner: "me".into(),
                    ..Default::default()
                }),
                spec: Some(v1::VolumeSpec {
                    size_bytes: 4096,
                    ..Default::default()
                }),
                status: None,
            }),
            update_mask: Some(proto::well_known::FieldMask {
                paths: paths.iter().map(|path| (*path).to_owned()).collect(),
            }),
            ..Default::default()
        })
    }

    #[test]
    fn what_is_not_in_the_mask_means_nothing() {
        let (metadata, size, _) = parsed(&[SIZE]).unwrap();
        assert_eq!((metadata.owner.as_str(), size), ("", Some(4096)));
        let (metadata, size, _) = parsed(&[OWNER]).unwrap();
        assert_eq!((metadata.owner.as_str(), size), ("me", None));
    }

    #[test]
    fn what_cannot_be_changed_is_refused_by_field() {
        for (paths, field) in [
            (&[][..], "updateMask"),
            (&[OWNER, "spec.format"], "updateMask.paths[1]"),
            (&["spec"], "updateMask.paths[0]"),
            (&[LABELS], "disk.metadata.labels[\"=\"]"),
        ] {
            let failure = parsed(paths).unwrap_err();
            let fields: Vec<_> = failure.violations.0.iter().map(|wrong| &wrong.field).collect();
            assert_eq!(fields, [field]);
        }
    }
}
