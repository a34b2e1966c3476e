//! Makes an image: the file comes, is checked, becomes a raw image, and gets its place by its content.

use std::{fs::File, io, os::fd::OwnedFd, path::Path, sync::Arc, time::Duration};

use prost::Message as _;
use reqwest::{Url, header::HeaderMap};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use uuid::Uuid;
use vmmd_api::v1;
use vmmd_host::{
    failure::{Failure, Kind, file_failed},
    fault,
    image_process::Job,
    sys::clone::FIRST_FD,
    text,
};
use vmmd_objects::{
    context::Context,
    operation::{Begun, Control, Handle, Progress, Type, cancelled, follow},
};
use vmmd_spec::image::{NewImage, Source as NewSource, checksum_text};
use vmmd_store::store_failure;
use vmmd_store::{
    ImageRecord, ImageSource, ImageStage, OciLayoutSource, OciSource, RegistryCredentials,
    image_source::Source,
};

use super::{
    digest::{self, Checksum},
    discard,
    fetch::{self, Download},
    object, oci,
    reach::Reach,
    tell,
};
use crate::Ports;

/// How long it may take to make a raw image of a file.
const DEADLINE: Duration = Duration::from_secs(4 * 3600);
/// How long an import may take with its download: a server that sends a byte a minute must not occupy a place forever.
pub const WHOLE_DEADLINE: Duration = Duration::from_secs(24 * 3600);

/// Begins to make the image that is asked for. The operation leaves nothing when it fails or is cancelled.
pub async fn import<H: Ports>(
    host: &Arc<H>,
    request: &v1::ImportImageRequest,
    context: &Context,
    for_tenant: bool,
) -> Result<Begun, Failure> {
    if let Some(uid) = host.requests().made(context, "ImportImage")
        && let Some(seen) = host.images().registry.find(&uid)
    {
        let pending = host.images().import_of(&seen.record.uid);
        return Ok(Begun { uid, pending });
    }
    let mut new = NewImage::imported(request.image.as_ref(), "image")?;
    if for_tenant {
        new.max_size = new.max_size.min(host.rules().agent_max_bytes);
    }
    let (record, handle) = begin(host, &new, context, for_tenant).await?;
    let begun = Begun {
        uid: record.uid.clone(),
        pending: Some(handle.pending()),
    };
    tokio::spawn(carry_out(Arc::clone(host), record, handle));
    Ok(begun)
}

/// Notes an image that is to be made, and the operation that makes it.
pub async fn begin<H: Ports>(
    host: &Arc<H>,
    new: &NewImage,
    context: &Context,
    for_tenant: bool,
) -> Result<(ImageRecord, Handle), Failure> {
    host.images().check_imports(&context.initiator.to_string())?;
    let now = text::now_ms();
    let source = match &new.source {
        NewSource::Url(url) => Some(Source::Url(url.clone())),
        NewSource::Path(path) => Some(Source::Path(path.display().to_string())),
        NewSource::Oci(oci) => Some(Source::Oci(OciSource {
            reference: oci.reference.to_string(),
            platform: oci.platform.as_ref().map(ToString::to_string).unwrap_or_default(),
            plain_http: oci.plain_http,
        })),
        NewSource::OciLayout {
            path,
            target,
            platform,
        } => Some(Source::OciLayout(OciLayoutSource {
            path: path.display().to_string(),
            reference: target.to_string(),
            platform: platform.as_ref().map(ToString::to_string).unwrap_or_default(),
        })),
        NewSource::Upload => None,
    };
    let uid = Uuid::new_v4().as_bytes().to_vec();
    let sealed_credentials = sealed(host, &uid, new)?;
    let record = host.images().reserve(ImageRecord {
        uid,
        sealed_credentials,
        name: new.name.to_string(),
        created_ms: now,
        stage_ms: now,
        labels: new.labels.clone(),
        annotations: new.annotations.clone(),
        owner: new.owner.clone(),
        source: source.map(|source| ImageSource { source: Some(source) }),
        checksum: new.checksum.clone().unwrap_or_default(),
        max_size: new.max_size,
        for_tenant,
        stage: ImageStage::Importing.into(),
        begun: host.requests().mark(context).into_iter().collect(),
        ..ImageRecord::default()
    })?;
    let deadline = fault::patience(host.run_dir(), "import-patience", WHOLE_DEADLINE);
    let operations = &host.operations();
    let handle = operations.begin(Type::ImageImport, &object(&record), context, Some(deadline));
    host.images().begin(&record.name, handle.pending());
    if let Err(error) = host.store().put(&record).await {
        let tombstone = host.images().registry.bury(&record);
        host.images().registry.forget(&record.uid, tombstone);
        let failure = store_failure(error);
        handle.fail(&failure);
        return Err(failure);
    }
    Ok((record, handle))
}

/// Encrypts the request's registry credentials for the record. A restarted daemon needs them too.
fn sealed<H: Ports>(host: &Arc<H>, uid: &[u8], new: &NewImage) -> Result<Vec<u8>, Failure> {
    let NewSource::Oci(oci) = &new.source else {
        return Ok(Vec::new());
    };
    let Some(given) = &oci.credentials else {
        return Ok(Vec::new());
    };
    let credentials = RegistryCredentials {
        username: given.username.clone(),
        password: given.password.clone(),
    };
    host.store()
        .seal(uid, credentials.encode_to_vec())
        .map_err(store_failure)
}

/// Makes an image whose file comes from elsewhere.
pub async fn carry_out<H: Ports>(host: Arc<H>, mut record: ImageRecord, handle: Handle) {
    let making = follow(host.stopping(), &handle, "waiting for the file", |control| {
        make(&host, &mut record, &handle, control)
    });
    let made = making.await;
    end(&host, record, handle, made).await;
}

/// Makes an image of the file that an upload has left.
pub async fn finish_upload<H: Ports>(host: Arc<H>, mut record: ImageRecord, handle: Handle) {
    let making = follow(host.stopping(), &handle, "making the image", |control| {
        uploaded(&host, &mut record, &handle, control)
    });
    let made = making.await;
    end(&host, record, handle, made).await;
}

async fn uploaded<H: Ports>(
    host: &Arc<H>,
    record: &mut ImageRecord,
    handle: &Handle,
    control: Control,
) -> Result<(), Failure> {
    let folder = host.folder();
    let source = folder.source(record);
    let opened = host
        .pools()
        .bulk
        .run(&[folder.root()], move || File::open(source));
    let source = opened.await?.map_err(|error| failed(&error))?;
    check(record)?;
    convert(host, record, source.into(), &[], handle, &control).await
}

/// Ends an import. When the daemon stops, the downloaded data stays for the next daemon.
pub async fn end<H: Ports>(host: &Arc<H>, record: ImageRecord, handle: Handle, made: Result<(), Failure>) {
    let made = match made {
        Ok(()) if handle.commit() => place(host, record.clone()).await,
        Ok(()) => Err(cancelled(host.stopping())),
        Err(failure) => Err(failure),
    };
    match made {
        Ok(message) => {
            tell(host, &record, "ImageImported", &message);
            handle.complete(message);
        }
        Err(_) if host.stopping().is_cancelled() && handle.cause().is_none() && record.source.is_some() => {
            handle.leave();
        }
        Err(failure) => {
            discard(host, &record).await;
            match handle.cause() {
                Some(_) => handle.cancelled("the image was not made: nothing is left of it"),
                None => handle.fail(&failure),
            }
        }
    }
}

async fn make<H: Ports>(
    host: &Arc<H>,
    record: &mut ImageRecord,
    handle: &Handle,
    control: Control,
) -> Result<(), Failure> {
    match record.source.clone().and_then(|source| source.source) {
        Some(Source::Url(url)) => {
            handle.progress(Progress::bytes(0, 0), "downloading");
            let source = download(host, record, &url, &control).await?;
            check(record)?;
            convert(host, record, source.into(), &[], handle, &control).await
        }
        Some(Source::Path(path)) => {
            let source = open(host, record, &path, handle, &control).await?;
            check(record)?;
            convert(host, record, source, &[], handle, &control).await
        }
        Some(Source::Oci(_) | Source::OciLayout(_)) => {
            let layers = oci::layers(host, record, handle, &control).await?;
            convert(
                host,
                record,
                layers.file.into(),
                &layers.lengths,
                handle,
                &control,
            )
            .await
        }
        None => Err(Failure::internal("an upload can't be gone on with")),
    }
}

fn failed(error: &io::Error) -> Failure {
    file_failed("make the image", error)
}

async fn download<H: Ports>(
    host: &Arc<H>,
    record: &mut ImageRecord,
    url: &str,
    control: &Control,
) -> Result<File, Failure> {
    let folder = host.folder();
    let (of, path) = (folder.clone(), folder.source(record));
    let opened = host
        .pools()
        .bulk
        .run(&[folder.root()], move || of.open(&path, false));
    let file = opened.await?.map_err(|error| failed(&error))?;
    let address = Url::parse(url).map_err(|error| Failure::field("image.spec.url", error))?;
    let given = address.host_str().unwrap_or_default();
    let reach = Reach::new(host.rules(), given, !record.for_tenant);
    reach.check(&address)?;
    let download = Download {
        client: reach.client()?,
        url,
        headers: HeaderMap::new(),
        unauthorized: fetch::REFUSED,
        missing: fetch::REFUSED,
        blob: None,
        file: file.try_clone().map_err(|error| failed(&error))?,
        version: record.source_version.clone().unwrap_or_default(),
        hash: Checksum::like(&record.checksum),
        max_size: record.max_size,
        first_wait: fetch::FIRST_WAIT,
        room: has_room,
    };
    let named = std::sync::Mutex::new(record.clone());
    let fetched = fetch::fetch(download, control, |version| {
        let mut record = named.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        record.source_version = Some(version);
        let (host, record) = (Arc::clone(host), record.clone());
        async move {
            let written = host.store().put(&record).await;
            written.map_err(store_failure)
        }
    });
    let fetched = fetched.await?;
    *record = named
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    record.source_bytes = fetched.bytes;
    record.source_checksum = fetched.checksum;
    Ok(file)
}

/// Whether a file may become longer. Blocking.
pub fn has_room(file: &File) -> io::Result<bool> {
    Ok(room(file)? > 0)
}

/// Free bytes on the file system of a file, minus the space that must stay free. Blocking.
pub fn room(file: &File) -> io::Result<u64> {
    let stat = rustix::fs::fstatvfs(file)?;
    let all = stat.f_blocks.saturating_mul(stat.f_frsize);
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    Ok(free.saturating_sub(crate::folder::keep_free(all)))
}

async fn open<H: Ports>(
    host: &Arc<H>,
    record: &mut ImageRecord,
    path: &str,
    handle: &Handle,
    control: &Control,
) -> Result<OwnedFd, Failure> {
    let (of, path) = (Arc::clone(host), Path::new(path).to_owned());
    let beneath = [path.clone()];
    let opened = host.pools().bulk.run(&beneath, move || {
        let label = format!("path: \"{}\"", path.display());
        of.open_source(&label, &path)
    });
    let opened = opened.await??;
    record.source_bytes = opened.size;
    if record.checksum.is_empty() {
        return Ok(opened.file.into());
    }
    handle.progress(Progress::bytes(0, 0), "checking the file");
    let file = opened.file.try_clone().map_err(|error| failed(&error))?;
    let (control, hash) = (control.clone(), Checksum::like(&record.checksum));
    let hashing = host
        .pools()
        .bulk
        .run(&[], move || digest::of_file(&file, hash, &control));
    let (checksum, bytes) = hashing.await?.map_err(|error| failed(&error))?;
    record.source_checksum = checksum;
    record.source_bytes = bytes;
    Ok(opened.file.into())
}

/// Refuses a file that is not the one that was wanted.
fn check(record: &ImageRecord) -> Result<(), Failure> {
    if record.checksum.is_empty() || record.checksum == record.source_checksum {
        return Ok(());
    }
    let message = format!(
        "the file has the checksum {}, and {} was asked for: it is another file, or was changed on its way",
        checksum_text(&record.source_checksum),
        checksum_text(&record.checksum)
    );
    Err(Failure::precondition("CHECKSUM_MISMATCH", message))
}

/// Final report of the converter.
#[derive(Deserialize)]
struct Found {
    format: String,
    compression: Option<String>,
    virtual_size: u64,
    #[serde(default)]
    logical_block: u32,
}

/// Progress report of the converter.
#[derive(Deserialize)]
struct Step {
    done: u64,
    total: u64,
}

/// Makes the raw image, and finds out what names its content. With `layers`, the source has layers of these lengths.
async fn convert<H: Ports>(
    host: &Arc<H>,
    record: &mut ImageRecord,
    source: OwnedFd,
    layers: &[u64],
    handle: &Handle,
    control: &Control,
) -> Result<(), Failure> {
    handle.progress(Progress::bytes(0, 0), "waiting for other images to be made");
    let _turn = tokio::select! {
        turn = host.images().turn() => turn,
        () = control.cancel().cancelled() => return Err(cancelled(host.stopping())),
    };
    handle.progress(Progress::bytes(0, 0), "making the image");
    let folder = host.folder();
    let (of, path) = (folder.clone(), folder.new_image(record));
    let opening = host.pools().bulk.run(&[folder.root()], move || {
        let (keep_free, free) = of.room()?;
        if free <= keep_free {
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok((of.open(&path, true)?, of.scratch()?, keep_free))
    });
    let (image, scratch, keep_free) = opening.await?.map_err(|error| failed(&error))?;
    let target = image.try_clone().map_err(|error| failed(&error))?;
    let job = Job {
        command: "import",
        arguments: [
            ("--fd", FIRST_FD as u64),
            ("--to-fd", FIRST_FD as u64 + 1),
            ("--scratch-fd", FIRST_FD as u64 + 2),
            ("--max-size", record.max_size),
            ("--keep-free", keep_free),
        ]
        .into_iter()
        .chain(layers.iter().map(|length| ("--layer", *length)))
        .flat_map(|(option, value)| [option.to_owned(), value.to_string()])
        .collect(),
        fds: vec![source, target.into(), scratch.into()],
        deadline: fault::patience(host.run_dir(), "conversion-patience", DEADLINE),
    };
    let reporter = control.clone();
    let running = host.image_processes().run(job, move |line| {
        if let Ok(step) = serde_json::from_str::<Step>(line) {
            reporter.progress(step.done, step.total);
        }
    });
    let last = tokio::select! {
        last = running => last?,
        () = control.cancel().cancelled() => return Err(cancelled(host.stopping())),
    };
    let found: Found = serde_json::from_str(&last).map_err(|error| {
        Failure::internal(format!("`vmm-image import` said something unexpected: {error}"))
    })?;
    handle.progress(
        Progress::bytes(0, found.virtual_size),
        "finding out what names the content",
    );
    let size = found.virtual_size;
    record.digest = content(host, image, size, control).await?.to_vec();
    record.size_bytes = size;
    record.logical_block = found.logical_block;
    record.source_format = found.format;
    record.source_compression = found.compression.unwrap_or_default();
    Ok(())
}

/// Brings the image to stable storage, and makes the digest of its content meanwhile.
async fn content<H: Ports>(
    host: &Arc<H>,
    image: File,
    size: u64,
    control: &Control,
) -> Result<[u8; 32], Failure> {
    let image = Arc::new(image);
    let looked_at = Arc::clone(&image);
    let length = on_disk(host, move || Ok(looked_at.metadata()?.len())).await?;
    if length != size || size == 0 || !size.is_multiple_of(512) {
        return Err(Failure::internal("the image has another length than was said"));
    }
    let written = Arc::clone(&image);
    let writing = on_disk(host, move || written.sync_all());
    let mut whole = Sha256::new();
    let mut start = 0;
    while start < size {
        control.progress(start, size);
        let parts = digest::parts(start, size).map(|part| {
            let (image, control) = (Arc::clone(&image), control.clone());
            on_disk(host, move || digest::of_blocks(&image, size, part, &control))
        });
        for hashes in parts.collect::<Vec<_>>() {
            whole.update(hashes.await?.as_flattened());
        }
        start = start.saturating_add(digest::WINDOW);
    }
    writing.await?;
    Ok(whole.finalize().into())
}

/// Begins work on the file of an image, beside other work on it.
fn on_disk<H: Ports, T: Send + 'static, W: FnOnce() -> io::Result<T> + Send + 'static>(
    host: &Arc<H>,
    work: W,
) -> impl Future<Output = Result<T, Failure>> + use<H, T, W> {
    let host = Arc::clone(host);
    let begun = tokio::spawn(async move {
        let done = host.pools().bulk.run(&[host.folder().root()], work).await?;
        done.map_err(|error| failed(&error))
    });
    async {
        begun
            .await
            .map_err(|error| Failure::internal(error.to_string()))?
    }
}

/// Moves the image to its final path and durably marks it as ready. Returns the message for the
/// operation.
async fn place<H: Ports>(host: &Arc<H>, mut record: ImageRecord) -> Result<String, Failure> {
    let folder = host.folder();
    let names = host.images().names().await;
    let shared = host.images().is_shared(&record);
    record.stage = ImageStage::Ready.into();
    record.stage_ms = text::now_ms();
    let (of, moved) = (folder.clone(), record.clone());
    let placing = host.pools().bulk.run(&[folder.root()], move || {
        // Existing content of another image stays unchanged. Missing content is restored.
        if !(shared && of.content(&moved.digest).exists()) {
            of.keep(&moved)?;
        }
        of.clear(&moved, true)
    });
    placing.await?.map_err(|error| failed(&error))?;
    host.store().put(&record).await.map_err(store_failure)?;
    host.images().settle(record.clone());
    drop(names);
    let which = if shared {
        ", which another image has too"
    } else {
        ""
    };
    let blocks = match record.logical_block {
        0 | 512 => String::new(),
        block => format!("; its disks have logical blocks of {block} bytes"),
    };
    Ok(format!(
        "the image can be used: {} bytes, {}{which}{blocks}",
        record.size_bytes,
        super::describe::digest_text(&record.digest)
    ))
}

/// A name that is taken: that image, if it was made of the same file.
pub fn same<H: Ports>(host: &Arc<H>, new: &NewImage) -> Option<Vec<u8>> {
    let there = host.images().get(new.name.as_str()).ok()?;
    let wanted = new.checksum.clone()?;
    (there.source_checksum == wanted).then_some(there.uid)
}

/// The stream of an upload ended before the file did.
pub fn cut_off(bytes: u64, wanted: u64) -> Failure {
    let message = format!("the upload ended after {bytes} of {wanted} bytes: send the file again");
    Failure::new(Kind::Aborted, "UPLOAD_CUT_OFF", message)
}
