//! Disks that vmmd manages: created, changed, made larger.

use vmmd_api::{
    v1::{self, volume_spec::Source},
    well_known,
};

use super::{disk_spec::valid, keys::usage};
use crate::{
    args::{Output, disk::CreateDisk},
    client::{COPY, Client, about_disk, empty_answer, send},
    failure::{Result, printable},
    manifest::disk,
    output::{self, format::Layout, print_documents},
};

/// Mask of the metadata fields that a client may change.
const METADATA: [&str; 3] = ["metadata.labels", "metadata.annotations", "metadata.owner"];
const SIZE: &str = "spec.size_bytes";

/// Number of events to search for warnings.
const LAST_EVENTS: u32 = 10;

/// Limit on attempts to apply a change after concurrent changes by others.
const TRIES: u32 = 5;

/// The request that the flags describe.
pub fn from_flags(args: &CreateDisk) -> Result<v1::CreateDiskRequest> {
    for (option, path) in [("--from-file", &args.from_file), ("--adopt", &args.adopt)] {
        if let Some(path) = path.as_ref().filter(|path| !path.starts_with('/')) {
            let message = format!("{option} must be an absolute path on the node, is \"{path}\"");
            return Err(usage(message));
        }
    }
    let from_image = args.from_image.as_ref().map(|name| v1::ImageClone {
        name: name.clone(),
        clone: args.clone.unwrap_or_default().into(),
    });
    let source = match (&args.from_file, &args.overlay_of, &args.adopt) {
        _ if from_image.is_some() => from_image.map(Source::Image),
        (Some(path), ..) => Some(Source::RawFile(path.clone())),
        (None, Some(disk), _) => Some(Source::OverlayOf(disk.clone())),
        (None, None, Some(path)) => Some(Source::Adopt(path.clone())),
        (None, None, None) => None,
    };
    let format = match (args.format, &source) {
        (Some(v1::DiskFormat::Raw), Some(Source::OverlayOf(_))) => {
            return Err(usage("the format of an overlay is qcow2: remove --format raw"));
        }
        (Some(format), _) => format,
        (None, Some(Source::Adopt(_) | Source::Image(_))) => v1::DiskFormat::Unspecified,
        (None, Some(Source::OverlayOf(_))) => v1::DiskFormat::Qcow2,
        (None, _) => v1::DiskFormat::Raw,
    };
    let request = v1::CreateDiskRequest {
        disk: Some(v1::Disk {
            metadata: super::metadata(args.name.as_deref().unwrap_or_default(), &args.labels),
            spec: Some(v1::VolumeSpec {
                format: format.into(),
                size_bytes: args.size.unwrap_or_default(),
                preallocation: args.preallocation.unwrap_or_default().into(),
                source,
                any_content: args.any_content,
            }),
            status: None,
        }),
        no_wait: args.no_wait,
        ..Default::default()
    };
    let found = disk::check(&request);
    valid(found, "the disk is not valid")?;
    Ok(request)
}

/// Asks the daemon to create a disk; returns it, and with `no_wait` the operation that creates it.
pub async fn create(
    client: &Client,
    request: v1::CreateDiskRequest,
) -> Result<(v1::Disk, Option<v1::Operation>)> {
    let name = request.disk.as_ref().map_or("", disk::name).to_owned();
    let no_wait = request.no_wait;
    let response = send!(client.limit(COPY), client.disks, create_disk, request).await;
    let response = response.map_err(|failure| about_disk(failure, &name))?;
    let disk = response.disk.ok_or_else(empty_answer)?;
    if !no_wait {
        warn(client, disk::name(&disk)).await;
    }
    Ok((disk, response.operation.filter(|_| no_wait)))
}

/// Prints the warnings of vmmd about a disk that was created or changed just now.
pub async fn warn(client: &Client, name: &str) {
    // A failure to read events is no failure of the disk.
    let events = client
        .events_of("Disk", name, LAST_EVENTS)
        .await
        .unwrap_or_default();
    for warning in last_warnings(&events) {
        eprintln!("warning: disk/{name}: {}", printable(&warning.message));
    }
}

/// The warnings after the last other event, which reports the creation or change of the disk.
fn last_warnings(events: &[v1::Event]) -> &[v1::Event] {
    let is_other = |event: &v1::Event| event.severity() != v1::EventSeverity::Warning;
    let begin = events.iter().rposition(is_other).map_or(0, |at| at + 1);
    events.get(begin..).unwrap_or_default()
}

/// Reports that a disk was created, or is being created.
pub fn report(disk: &v1::Disk, operation: Option<&v1::Operation>, output: Option<&Output>) -> Result<()> {
    let name = disk::name(disk);
    match (output, operation) {
        (Some(output), _) if *output != Output::Wide => print_documents(&[disk], output, Layout::default()),
        (_, Some(operation)) => {
            output::line(format!("disk/{name} being created (operation/{})", operation.id))
        }
        (_, None) => output::line(format!("disk/{name} created")),
    }
}

/// Makes a disk larger.
pub async fn resize(client: &Client, name: &str, size: u64) -> Result<v1::Disk> {
    let disk = v1::Disk {
        metadata: super::metadata(name, &[]),
        spec: Some(v1::VolumeSpec {
            size_bytes: size,
            ..Default::default()
        }),
        status: None,
    };
    let disk = update(client, disk, &[SIZE], None).await?;
    warn(client, name).await;
    Ok(disk)
}

/// Changes labels, annotations and owner of a disk to those of `wanted`, and with `grow` its size.
/// With `seen`, only a disk in that state is changed.
pub async fn change(
    client: &Client,
    wanted: &v1::Disk,
    grow: bool,
    seen: Option<v1::Preconditions>,
) -> Result<v1::Disk> {
    let fields: Vec<_> = METADATA.into_iter().chain(grow.then_some(SIZE)).collect();
    update(client, wanted.clone(), &fields, seen).await
}

/// Applies `wanted` to the metadata of a disk; returns whether the metadata changed. After a
/// concurrent change by another client, the disk is read and changed again.
pub async fn rewrite(client: &Client, name: &str, wanted: impl Fn(&mut v1::ObjectMetadata)) -> Result<bool> {
    let mut tries = 0;
    loop {
        tries += 1;
        let there = client.object::<v1::Disk>(name).await?;
        let before = there.metadata.clone().unwrap_or_default();
        let mut after = before.clone();
        wanted(&mut after);
        if after == before {
            return Ok(false);
        }
        let seen = v1::Preconditions {
            uid: before.uid,
            generation: Some(before.generation),
        };
        let disk = v1::Disk {
            metadata: Some(after),
            ..Default::default()
        };
        match update(client, disk, &METADATA, Some(seen)).await {
            Err(failure) if &*failure.reason == "GENERATION_MISMATCH" && tries < TRIES => {}
            done => return done.map(|_| true),
        }
    }
}

async fn update(
    client: &Client,
    mut disk: v1::Disk,
    fields: &[&str],
    preconditions: Option<v1::Preconditions>,
) -> Result<v1::Disk> {
    disk::strip(&mut disk);
    let name = disk::name(&disk).to_owned();
    let request = v1::UpdateDiskRequest {
        preconditions,
        disk: Some(disk),
        update_mask: Some(well_known::FieldMask {
            paths: fields.iter().map(|field| (*field).to_owned()).collect(),
        }),
        ..Default::default()
    };
    let response = send!(client.limit(COPY), client.disks, update_disk, request).await;
    let response = response.map_err(|failure| about_disk(failure, &name))?;
    response.disk.ok_or_else(empty_answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_after_the_last_change_are_shown() {
        use v1::EventSeverity::{Normal, Warning};
        let shown = |severities: &[v1::EventSeverity]| {
            let events = severities.iter().map(|severity| v1::Event {
                severity: (*severity).into(),
                ..Default::default()
            });
            last_warnings(&events.collect::<Vec<_>>()).len()
        };
        assert_eq!(shown(&[]), 0);
        assert_eq!(shown(&[Normal, Warning]), 1);
        assert_eq!(shown(&[Normal, Warning, Normal]), 0);
        assert_eq!(shown(&[Normal, Warning, Normal, Warning, Warning]), 2);
    }
}
