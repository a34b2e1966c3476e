//! Creates an image from an upload.

use std::{fs::File, io, os::unix::fs::FileExt, sync::Arc};

use tokio_stream::{Stream, StreamExt};
use tonic::Status;
use vmmd_api::v1::{self, upload_image_request::Message};
use vmmd_host::failure::{Failure, file_failed};
use vmmd_objects::{
    context::Context,
    operation::{Begun, Control, Handle, cancelled, follow},
};
use vmmd_spec::image::NewImage;
use vmmd_store::ImageRecord;

use super::{
    digest::Checksum,
    import::{begin, cut_off, end, finish_upload, has_room, same},
};
use crate::Ports;

/// Bytes that are received before they are written.
const BATCH: usize = 4 << 20;

/// Receives a file, and begins to make an image of it. When the client goes away before the end, nothing is left.
pub async fn upload<H: Ports, S>(host: &Arc<H>, mut stream: S, context: &Context) -> Result<Begun, Failure>
where
    S: Stream<Item = Result<v1::UploadImageRequest, Status>> + Unpin + Send,
{
    let first = stream.next().await;
    let Some(Ok(v1::UploadImageRequest {
        message: Some(Message::Open(open)),
    })) = first
    else {
        return Err(Failure::field("open", "must be in the first message"));
    };
    let new = NewImage::uploaded(open.image.as_ref(), "open.image")?;
    if open.size_bytes > new.max_size {
        let problem = format_args!("is more than the {} bytes that the image may have", new.max_size);
        return Err(Failure::field("open.sizeBytes", problem));
    }
    if let Some(uid) = same(host, &new) {
        return Ok(Begun { uid, pending: None });
    }
    let (mut record, handle) = begin(host, &new, context, false).await?;
    // When this is dropped with its caller, nothing is left either.
    let mut guard = Guard(Some((Arc::clone(host), record.clone(), handle)));
    let received = match &guard.0 {
        Some((host, _, handle)) => {
            let receiving = follow(host.stopping(), handle, "receiving", |control| {
                receive(host, &mut record, &mut stream, open.size_bytes, control)
            });
            receiving.await
        }
        None => return Err(Failure::internal("an upload without an operation")),
    };
    let Some((host, _, handle)) = guard.0.take() else {
        return Err(Failure::internal("an upload without an operation"));
    };
    let begun = Begun {
        uid: record.uid.clone(),
        pending: Some(handle.pending()),
    };
    match received {
        Ok(()) => drop(tokio::spawn(finish_upload(host, record, handle))),
        Err(failure) => end(&host, record, handle, Err(failure)).await,
    }
    Ok(begun)
}

/// Ends the operation of an upload whose client has gone.
struct Guard<H: Ports>(Option<(Arc<H>, ImageRecord, Handle)>);

impl<H: Ports> Drop for Guard<H> {
    fn drop(&mut self) {
        if let Some((host, record, handle)) = self.0.take() {
            let gone = Failure::new(
                vmmd_host::failure::Kind::Aborted,
                "UPLOAD_CUT_OFF",
                "the client went away in the middle of the upload: nothing is left of the image",
            );
            tokio::spawn(async move { end(&host, record, handle, Err(gone)).await });
        }
    }
}

async fn receive<H: Ports, S>(
    host: &Arc<H>,
    record: &mut ImageRecord,
    stream: &mut S,
    wanted: u64,
    control: Control,
) -> Result<(), Failure>
where
    S: Stream<Item = Result<v1::UploadImageRequest, Status>> + Unpin + Send,
{
    let folder = host.folder();
    let (of, path) = (folder.clone(), folder.source(record));
    let opened = host
        .pools()
        .bulk
        .run(&[folder.root()], move || of.open(&path, true));
    let file = opened.await?.map_err(|error| failed(&error))?;
    let (mut have, mut hash, mut batch) = (0_u64, Checksum::like(&record.checksum), Vec::new());
    loop {
        let next = tokio::select! {
            next = stream.next() => next,
            () = control.cancel().cancelled() => return Err(cancelled(host.stopping())),
        };
        match next {
            Some(Ok(message)) => match message.message {
                Some(Message::Data(data)) => batch.extend_from_slice(&data),
                _ => return Err(Failure::field("data", "must be in each message after the first")),
            },
            Some(Err(_)) => return Err(cut_off(have, wanted)),
            None => break,
        }
        control.progress(have + batch.len() as u64, wanted);
        if have + batch.len() as u64 > record.max_size {
            let message = format!(
                "the file is longer than the {} bytes that it may have",
                record.max_size
            );
            return Err(Failure::precondition("IMAGE_TOO_LARGE", message));
        }
        if batch.len() >= BATCH {
            (hash, have) = write(host, &file, hash, have, std::mem::take(&mut batch)).await?;
        }
    }
    (hash, have) = write(host, &file, hash, have, batch).await?;
    if wanted > 0 && have != wanted {
        return Err(cut_off(have, wanted));
    }
    record.source_bytes = have;
    record.source_checksum = hash.finalize();
    Ok(())
}

async fn write<H: Ports>(
    host: &Arc<H>,
    file: &File,
    mut hash: Checksum,
    at: u64,
    data: Vec<u8>,
) -> Result<(Checksum, u64), Failure> {
    let file = file.try_clone().map_err(|error| failed(&error))?;
    let writing = host.pools().bulk.run(&[host.folder().root()], move || {
        if !has_room(&file)? {
            return Err(io::ErrorKind::StorageFull.into());
        }
        file.write_all_at(&data, at)?;
        hash.update(&data);
        Ok((hash, at + data.len() as u64))
    });
    writing.await?.map_err(|error| failed(&error))
}

fn failed(error: &io::Error) -> Failure {
    file_failed("write the upload", error)
}
