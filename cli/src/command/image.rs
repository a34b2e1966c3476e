//! Images of the node: imported, uploaded, pruned.

mod checksums;
mod source;

use std::{fs::File, io::Read, path::Path};

use sha2::{Digest, Sha256};
use vmmd_api::v1::{self, upload_image_request::Message};
use vmmd_spec::image::checksum_text;

use super::progress;
use crate::{
    args::image::{CreateImage, Prune, Upload},
    client::{Client, WORK, about_image, send},
    failure::{Code, Failure, Result},
    manifest::quantity,
    output,
};

/// Bytes of a file in a message.
const PIECE: usize = 128 << 10;
/// Messages that are read ahead.
const AHEAD: usize = 16;

fn wanted(name: &str, labels: &[crate::args::Label], spec: v1::ImageSpec) -> v1::Image {
    v1::Image {
        metadata: super::metadata(name, labels),
        spec: Some(spec),
        status: None,
    }
}

/// Imports an image.
pub async fn import(client: &Client, args: &CreateImage) -> Result<()> {
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
    // A retry may find the complete image.
    let Some(operation) = response.operation else {
        return report(client, &args.name, "imported").await;
    };
    if args.no_wait {
        return output::line(format!(
            "image/{} being imported (operation/{})",
            args.name, operation.id
        ));
    }
    let followed = progress::follow(client, &operation, args.quiet).await;
    followed.map_err(|failure| about_image(failure, &args.name))?;
    report(client, &args.name, "imported").await
}

async fn report(client: &Client, name: &str, done: &str) -> Result<()> {
    let status = client.object::<v1::Image>(name).await?.status.unwrap_or_default();
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

/// `image upload`.
pub async fn upload(client: &Client, args: &Upload) -> Result<()> {
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
    report(client, &args.name, "uploaded").await
}

/// `image prune`.
pub async fn prune(client: &Client, args: &Prune) -> Result<()> {
    let request = v1::PruneImagesRequest {
        filter: Some(v1::ObjectFilter {
            labels: args.selector.iter().map(ToString::to_string).collect(),
            names: Vec::new(),
        }),
        older_than: args.older_than.map(Into::into),
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
