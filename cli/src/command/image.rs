//! Images that the node keeps.

mod checksums;
mod source;

use std::{fs::File, io::Read, path::Path};

use proto::{model::image::checksum_text, v1, v1::upload_image_request::Message};
use sha2::{Digest, Sha256};

use super::{
    get, progress,
    watch::{self, print_documents},
};
use crate::{
    args::{
        Output,
        image::{Image, Import, Ls, Prune, Rm, Upload},
    },
    client::{Client, WORK, about_image, send},
    failure::{Code, Failure, Result},
    manifest::quantity,
    output::{self, describe::Lines, format::Layout},
};

/// Bytes of a file in a message.
const PIECE: usize = 128 << 10;
/// Messages that are read ahead.
const AHEAD: usize = 16;

/// `image …`.
pub async fn image(client: &Client, what: &Image) -> Result<(), Vec<Failure>> {
    match what {
        Image::Import(args) => {
            let client = client.with_timeout(args.timeout.timeout);
            import(&client, args).await.map_err(super::one)
        }
        Image::Upload(args) => upload(client, args).await.map_err(super::one),
        Image::Ls(args) => list(client, args).await,
        Image::Describe(args) => describe(client, &args.names).await,
        Image::Rm(args) => delete(&client.with_timeout(args.timeout.timeout), args).await,
        Image::Prune(args) => prune(client, args).await.map_err(super::one),
    }
}

fn wanted(name: &str, labels: &[crate::args::Label], spec: v1::ImageSpec) -> v1::Image {
    let labels = labels
        .iter()
        .map(|label| (label.key.clone(), label.value.clone()));
    v1::Image {
        metadata: Some(v1::ObjectMetadata {
            name: name.to_owned(),
            labels: labels.collect(),
            ..Default::default()
        }),
        spec: Some(spec),
        status: None,
    }
}

async fn import(client: &Client, args: &Import) -> Result<()> {
    let checksum = match &args.source.checksum_file {
        Some(path) => checksums::of(path, &args.from)?,
        None => args.source.checksum.clone().unwrap_or_default(),
    };
    let spec = v1::ImageSpec {
        source: Some(source::from_text(&args.from, &args.oci)?),
        checksum,
        max_size_bytes: args.source.max_size.unwrap_or_default(),
    };
    let request = v1::ImportImageRequest {
        image: Some(wanted(&args.name, &args.source.labels, spec)),
        no_wait: true,
        ..Default::default()
    };
    let response = send!(client.limit(WORK), client.images, import_image, request).await;
    let response = response.map_err(|failure| about_image(failure, &args.name))?;
    // A retry may find it whole.
    let Some(operation) = response.operation else {
        return say(client, &args.name, "imported").await;
    };
    if args.no_wait {
        return output::line(format!(
            "image/{} being imported (operation/{})",
            args.name, operation.id
        ));
    }
    let followed = progress::follow(client, &operation, args.quiet).await;
    followed.map_err(|failure| about_image(failure, &args.name))?;
    say(client, &args.name, "imported").await
}

async fn say(client: &Client, name: &str, done: &str) -> Result<()> {
    let status = client.image(name).await?.status.unwrap_or_default();
    let size = quantity::show(status.virtual_size_bytes);
    output::line(format!("image/{name} {done}, {size}, {}", status.digest))
}

/// SHA-256 of a file, and its length.
fn checksum(path: &Path) -> Result<(String, u64)> {
    let failed = |error: std::io::Error| {
        let message = format!("{}: {error}", path.display());
        Failure::new(Code::NotFound, message)
    };
    let mut file = File::open(path).map_err(failed)?;
    let (mut hash, mut length) = (Sha256::new(), 0);
    let mut buffer = vec![0; PIECE];
    loop {
        let count = file.read(&mut buffer).map_err(failed)?;
        if count == 0 {
            return Ok((checksum_text(&hash.finalize()), length));
        }
        hash.update(buffer.get(..count).unwrap_or_default());
        length += count as u64;
    }
}

async fn upload(client: &Client, args: &Upload) -> Result<()> {
    let (checksum, size_bytes) = checksum(&args.file)?;
    let spec = v1::ImageSpec {
        checksum,
        max_size_bytes: args.max_size.unwrap_or_default(),
        ..Default::default()
    };
    let open = v1::UploadImageOpen {
        image: Some(wanted(&args.name, &args.labels, spec)),
        size_bytes,
    };
    let (sender, receiver) = tokio::sync::mpsc::channel(AHEAD);
    let message = |message| v1::UploadImageRequest {
        message: Some(message),
    };
    let path = args.file.clone();
    let reading = tokio::task::spawn_blocking(move || {
        if sender.blocking_send(message(Message::Open(open))).is_err() {
            return Ok(());
        }
        let mut file = File::open(path)?;
        loop {
            let mut piece = vec![0; PIECE];
            let count = file.read(&mut piece)?;
            piece.truncate(count);
            // A closed receiver ends the read; the upload call returns the reason.
            if count == 0 || sender.blocking_send(message(Message::Data(piece))).is_err() {
                return Ok::<_, std::io::Error>(());
            }
        }
    });
    let stream = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let uploaded = client.images.clone().upload_image(stream).await;
    let read = reading
        .await
        .unwrap_or_else(|error| Err(std::io::Error::other(error)));
    read.map_err(|error| Failure::new(Code::Other, format!("{}: {error}", args.file.display())))?;
    uploaded.map_err(|status| about_image(status.into(), &args.name))?;
    say(client, &args.name, "uploaded").await
}

/// `image ls`.
pub async fn list(client: &Client, args: &Ls) -> Result<(), Vec<Failure>> {
    if args.watch {
        return watch(client, args).await.map_err(super::one);
    }
    let mut failures = Vec::new();
    let images = if args.names.is_empty() {
        client.list_images().await.map_err(super::one)?
    } else {
        named(client, &args.names, &mut failures).await
    };
    let selected = |image: &&v1::Image| {
        let labels = image.metadata.as_ref().map(|metadata| &metadata.labels);
        labels.is_some_and(|labels| get::all_hold(&args.selectors, labels))
    };
    let images: Vec<_> = images.iter().filter(selected).collect();
    print(&images, args).map_err(super::one)?;
    super::all(failures)
}

async fn watch(client: &Client, args: &Ls) -> Result<()> {
    if let [only] = args.names.as_slice() {
        client.image(only).await?;
    }
    let filter = v1::ObjectFilter {
        labels: args.selectors.iter().map(ToString::to_string).collect(),
        names: args.names.clone(),
    };
    watch::watch(args.output.as_ref(), args.no_headers, async |cursor| {
        let request = v1::WatchImagesRequest {
            filter: Some(filter.clone()),
            cursor,
        };
        client.images.clone().watch_images(request).await
    })
    .await
}

fn print(images: &[&v1::Image], args: &Ls) -> Result<()> {
    if let Some(output) = args.output.as_ref().filter(|output| **output != Output::Wide) {
        let layout = Layout {
            list: args.names.len() != 1,
            no_headers: args.no_headers,
            ..Layout::default()
        };
        return print_documents(images, output, layout);
    }
    let wide = args.output.is_some();
    if images.is_empty() {
        if args.names.is_empty() {
            eprintln!(
                "There are no images{}.",
                if args.selectors.is_empty() {
                    ""
                } else {
                    " with these labels"
                }
            );
        }
        return Ok(());
    }
    let now = jiff::Timestamp::now();
    let rows: Vec<_> = images
        .iter()
        .map(|image| output::image::row(image, wide, now))
        .collect();
    output::print(&output::image::table(wide).whole(&rows, !args.no_headers))
}

async fn describe(client: &Client, names: &[String]) -> Result<(), Vec<Failure>> {
    let mut failures = Vec::new();
    let images = named(client, names, &mut failures).await;
    let now = jiff::Timestamp::now();
    let mut texts = Vec::new();
    for image in &images {
        let mut text = Lines(output::image::describe(image, now));
        get::last_events(client, "Image", name(image), &mut text).await;
        texts.push(text.0);
    }
    output::print(&texts.join("\n")).map_err(super::one)?;
    super::all(failures)
}

/// The name of an image.
pub fn name(image: &v1::Image) -> &str {
    image.metadata.as_ref().map_or("", |metadata| &metadata.name)
}

async fn named(client: &Client, names: &[String], failures: &mut Vec<Failure>) -> Vec<v1::Image> {
    let mut images = Vec::new();
    for name in names {
        match client.image(name).await {
            Ok(image) => images.push(image),
            Err(failure) => failures.push(failure),
        }
    }
    images
}

async fn delete(client: &Client, args: &Rm) -> Result<(), Vec<Failure>> {
    let mut failures = Vec::new();
    for name in &args.images.names {
        let request = v1::DeleteImageRequest {
            name: name.clone(),
            ..Default::default()
        };
        match send!(client.limit(WORK), client.images, delete_image, request).await {
            Ok(_) => output::line(format!("image/{name} deleted")).map_err(super::one)?,
            Err(failure) if args.ignore_not_found && failure.code == Code::NotFound => {}
            Err(failure) => failures.push(about_image(failure, name)),
        }
    }
    super::all(failures)
}

async fn prune(client: &Client, args: &Prune) -> Result<()> {
    let older_than = args.older_than.map(|age| proto::well_known::Duration {
        seconds: i64::try_from(age.as_secs()).unwrap_or(i64::MAX),
        nanos: 0,
    });
    let request = v1::PruneImagesRequest {
        filter: Some(v1::ObjectFilter {
            labels: args.selectors.iter().map(ToString::to_string).collect(),
            names: Vec::new(),
        }),
        older_than,
        free_bytes: args.free.unwrap_or_default(),
        dry_run: args.dry_run,
        ..Default::default()
    };
    let response = send!(client.limit(WORK), client.images, prune_images, request).await?;
    let how = if args.dry_run { " (dry run)" } else { "" };
    for name in &response.deleted {
        output::line(format!("image/{name} deleted{how}"))?;
    }
    output::line(format!("{} freed{how}", quantity::show(response.freed_bytes)))
}
