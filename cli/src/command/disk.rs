//! Disks that the node keeps: made, made larger, listed, deleted.

use proto::v1::{self, create_disk_request::Source};

use super::{
    disk_spec::{usage, valid},
    get,
};
use crate::{
    args::{
        Output,
        disk::{CreateDisk, DiskFormat, GetDisk, Preallocation},
    },
    client::{COPY, Client, WORK, about_disk, empty_answer, send},
    failure::{Code, Failure, Result},
    manifest::{disk, schema},
    output::{
        self,
        format::{self, Document, Layout},
    },
};

/// The request that the flags describe.
pub fn from_flags(args: &CreateDisk) -> Result<v1::CreateDiskRequest> {
    if let Some(path) = args.from_file.as_ref().filter(|path| !path.starts_with('/')) {
        let message = format!("--from-file must be an absolute path on the node, is \"{path}\"");
        return Err(usage(message));
    }
    let source = match (&args.from_file, &args.overlay_of) {
        (Some(path), _) => Some(Source::RawFile(path.clone())),
        (None, Some(disk)) => Some(Source::OverlayOf(disk.clone())),
        (None, None) => None,
    };
    let format = match (args.format, &source) {
        (Some(DiskFormat::Raw), Some(Source::OverlayOf(_))) => {
            return Err(usage("an overlay is qcow2: leave out --format raw".into()));
        }
        (Some(DiskFormat::Qcow2), _) | (None, Some(Source::OverlayOf(_))) => v1::DiskFormat::Qcow2,
        (Some(DiskFormat::Raw) | None, _) => v1::DiskFormat::Raw,
    };
    let preallocation = match args.preallocation {
        None => v1::DiskPreallocation::Unspecified,
        Some(Preallocation::Off) => v1::DiskPreallocation::Off,
        Some(Preallocation::Metadata) => v1::DiskPreallocation::Metadata,
        Some(Preallocation::Full) => v1::DiskPreallocation::Full,
    };
    let labels = args
        .labels
        .iter()
        .map(|label| (label.key.clone(), label.value.clone()));
    let request = v1::CreateDiskRequest {
        disk: Some(v1::Disk {
            name: args.name.clone(),
            format: format.into(),
            size_bytes: args.size.unwrap_or_default(),
            labels: labels.collect(),
            preallocation: preallocation.into(),
            ..v1::Disk::default()
        }),
        source,
        ..Default::default()
    };
    let found = disk::check(&request);
    valid(found, "the disk is not valid")?;
    Ok(request)
}

/// Asks the daemon to make a disk.
pub async fn create(client: &Client, request: v1::CreateDiskRequest) -> Result<v1::Disk> {
    let name = request.disk.as_ref().map(|disk| disk.name.clone());
    let response = send!(client.limit(COPY), client.disks, create_disk, request).await;
    let response = response.map_err(|failure| about_disk(failure, &name.unwrap_or_default()))?;
    response.disk.ok_or_else(empty_answer)
}

/// Says that a disk was made.
pub fn report(disk: &v1::Disk, output: Option<&Output>) -> Result<()> {
    match output {
        Some(output) if *output != Output::Wide => print_documents(&[disk], output, Layout::default()),
        _ => output::line(format!("disk/{} created", disk.name)),
    }
}

/// Makes a disk larger.
pub async fn resize(client: &Client, name: &str, size: u64) -> Result<v1::Disk> {
    let request = v1::ResizeDiskRequest {
        name: name.to_owned(),
        size_bytes: size,
        ..Default::default()
    };
    let response = send!(client.limit(WORK), client.disks, resize_disk, request).await;
    let response = response.map_err(|failure| about_disk(failure, name))?;
    response.disk.ok_or_else(empty_answer)
}

/// Deletes disks, one after another: an overlay may come before the disk below it.
pub async fn delete(client: &Client, names: &[String], ignore_not_found: bool) -> Result<(), Vec<Failure>> {
    let mut failures = Vec::new();
    for name in names {
        let request = v1::DeleteDiskRequest {
            name: name.to_owned(),
            ..Default::default()
        };
        match send!(client.limit(WORK), client.disks, delete_disk, request).await {
            Ok(_) => output::line(format!("disk/{name} deleted")).map_err(super::one)?,
            Err(failure) if ignore_not_found && failure.code == Code::NotFound => {}
            Err(failure) => failures.push(about_disk(failure, name)),
        }
    }
    super::all(failures)
}

/// Lists disks.
pub async fn list(client: &Client, args: &GetDisk) -> Result<(), Vec<Failure>> {
    let mut failures = Vec::new();
    let disks = if args.names.is_empty() {
        client.list_disks().await.map_err(super::one)?
    } else {
        named(client, &args.names, &mut failures).await
    };
    let selected = |disk: &&v1::Disk| get::all_hold(&args.selectors, &disk.labels);
    let disks: Vec<_> = disks.iter().filter(selected).collect();
    print(&disks, args).map_err(super::one)?;
    super::all(failures)
}

/// Shows everything about disks.
pub async fn describe(client: &Client, names: &[String]) -> Result<(), Vec<Failure>> {
    let mut failures = Vec::new();
    let disks = named(client, names, &mut failures).await;
    let now = jiff::Timestamp::now();
    let texts: Vec<_> = disks
        .iter()
        .map(|disk| output::disk::describe(disk, now))
        .collect();
    output::print(&texts.join("\n")).map_err(super::one)?;
    super::all(failures)
}

async fn named(client: &Client, names: &[String], failures: &mut Vec<Failure>) -> Vec<v1::Disk> {
    let mut disks = Vec::new();
    for name in names {
        match client.disk(name).await {
            Ok(disk) => disks.push(disk),
            Err(failure) => failures.push(failure),
        }
    }
    disks
}

fn print(disks: &[&v1::Disk], args: &GetDisk) -> Result<()> {
    if let Some(output) = args.output.as_ref().filter(|output| **output != Output::Wide) {
        let layout = Layout {
            list: args.names.len() != 1,
            no_headers: args.no_headers,
            ..Layout::default()
        };
        return print_documents(disks, output, layout);
    }
    let wide = args.output.is_some();
    if disks.is_empty() {
        if args.names.is_empty() {
            let which = if args.selectors.is_empty() {
                ""
            } else {
                " with these labels"
            };
            eprintln!("There are no disks{which}.");
        }
        return Ok(());
    }
    let now = jiff::Timestamp::now();
    let rows: Vec<_> = disks
        .iter()
        .map(|disk| output::disk::row(disk, wide, now))
        .collect();
    output::print(&output::disk::table(wide).whole(&rows, !args.no_headers))
}

/// Prints disks as documents one after another.
fn print_documents(disks: &[&v1::Disk], output: &Output, layout: Layout) -> Result<()> {
    let document = |disk: &&v1::Disk| {
        Ok(Document {
            title: format!("disk/{}", disk.name),
            json: disk::manifest(disk)?,
            schema: schema::DISK,
        })
    };
    let documents: Vec<_> = disks.iter().map(document).collect::<Result<_>>()?;
    format::documents(&documents, output, layout)
}
