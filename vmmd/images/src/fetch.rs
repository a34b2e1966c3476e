//! Downloads a file by HTTP or HTTPS into one that may hold its beginning already; also a blob of an OCI image, whose digest its caller compares.
//!
//! After a broken connection the download continues where it broke when the server sends the same version of the file (`If-Range`, and the
//! validators of the part are compared: servers and caches exist that ignore `If-Range`). For a blob, the digest decides instead.
//!
//! No server keeps a download alive without progress. A try makes progress when the file becomes longer than in all earlier tries. Tries
//! without progress, changes of the version, and the bytes of all tries together are limited.

mod version;

use std::{fs::File, io, os::unix::fs::FileExt, time::Duration};

use reqwest::{
    Client, Response, StatusCode,
    header::{ACCEPT_ENCODING, CONTENT_TYPE, HeaderMap, IF_RANGE, RANGE},
};
use tokio::{task::spawn_blocking, time::sleep};
use vmmd_host::{
    failure::{Failure, Kind, file_failed},
    text,
};
use vmmd_objects::operation::Control;
use vmmd_store::SourceVersion;

use self::version::{Part, version_of};
use super::digest::Checksum;

/// Most tries in a row that do not bring the file further.
const TRIES: u32 = 8;
/// Most changes of the file on the server during a download.
const CHANGES: u32 = 8;
/// Most bytes received, in lengths of the file: a server without ranges starts again after each broken connection.
const LENGTHS: u64 = 8;
/// Received beside that, so that small files have all their tries, in bytes.
const BESIDE: u64 = 64 << 20;
/// Most tries.
const ALL_TRIES: u32 = 10_000;
/// The usual wait before the second try; each one is twice as long, up to [`LAST_WAIT`].
pub const FIRST_WAIT: Duration = Duration::from_millis(200);
const LAST_WAIT: Duration = Duration::from_secs(10);
/// The reason of a failure: the server does not give the file, or not as it should.
pub const REFUSED: &str = "DOWNLOAD_REFUSED";
/// Bytes that are received before they are written, and after which the room on the file system is looked at.
const BATCH: usize = 4 << 20;

/// Parameters of a download.
#[derive(Debug)]
pub struct Download<'a> {
    /// Of [`Reach::client`](super::reach::Reach::client).
    pub client: Client,
    /// Its address.
    pub url: &'a str,
    /// Additional headers of each request.
    pub headers: HeaderMap,
    /// The reason of the failure when the server answers 401; [`REFUSED`] when that is no case of its own.
    pub unauthorized: &'static str,
    /// The same for 404.
    pub missing: &'static str,
    /// Set for a blob. Its download can continue without regard to the server's version of the
    /// file.
    pub blob: Option<Blob>,
    /// Target file. Its present content is the beginning of the download.
    pub file: File,
    /// Version of the beginning; empty when it is not known.
    pub version: SourceVersion,
    /// For its checksum.
    pub hash: Checksum,
    /// Most bytes that it may have.
    pub max_size: u64,
    /// The wait before the second try.
    pub first_wait: Duration,
    /// Whether the file system has room for more. Blocking.
    pub room: fn(&File) -> io::Result<bool>,
}

/// Content that has a length and a digest before it comes, and a place between others in one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blob {
    /// Where in the file it begins, in bytes.
    pub base: u64,
    /// Its length in bytes.
    pub size: u64,
    /// Bytes of all of them together, for the progress.
    pub all: u64,
}

/// What was downloaded.
#[derive(Debug, PartialEq, Eq)]
pub struct Downloaded {
    /// Checksum of the wanted kind.
    pub checksum: Vec<u8>,
    /// Its length.
    pub bytes: u64,
    /// It came in several parts, or its beginning was there.
    pub resumed: bool,
}

/// Why a try has ended.
enum Broken {
    /// The next one may do better.
    Passing(String),
    /// It won't.
    Final(Failure),
}

impl From<Failure> for Broken {
    fn from(failure: Failure) -> Self {
        Self::Final(failure)
    }
}

struct State<'a> {
    download: Download<'a>,
    have: u64,
    hash: Checksum,
    resumed: bool,
    /// Most bytes that any try had of this version.
    furthest: u64,
    /// Bytes of all tries.
    received: u64,
    /// How often the file was another one.
    changes: u32,
}

impl State<'_> {
    /// Where in the file it begins.
    fn base(&self) -> u64 {
        self.download.blob.map_or(0, |blob| blob.base)
    }

    /// Says how far it is.
    fn progress(&self, have: u64, total: u64, control: &Control) {
        match self.download.blob {
            Some(blob) => control.progress(blob.base + have, blob.all),
            None => control.progress(have, total),
        }
    }

    /// The reason to give up a server whose answers bring nothing more.
    fn wasted(&self) -> Option<&'static str> {
        let length = self.furthest.max(self.download.version.length);
        let most = length.saturating_mul(LENGTHS).saturating_add(BESIDE);
        match () {
            () if self.changes > CHANGES => Some("the file changes on the server again and again"),
            () if self.received > most => Some("the server does not continue where a connection broke"),
            () => None,
        }
    }

    /// The file on the server is another one than the one that was begun.
    fn changed(&mut self) {
        self.changes += 1;
        self.furthest = 0;
    }

    fn downloaded(self) -> Downloaded {
        Downloaded {
            checksum: self.hash.finalize(),
            bytes: self.have,
            resumed: self.resumed,
        }
    }
}

/// Downloads it. `named` gets the version of the file before anything of it is written, and has to record it.
pub async fn fetch<F: Future<Output = Result<(), Failure>>>(
    download: Download<'_>,
    control: &Control,
    named: impl Fn(SourceVersion) -> F,
) -> Result<Downloaded, Failure> {
    let (hash, have) = beginning(&download, control).await?;
    let whole = match download.blob {
        Some(blob) => blob.size == have,
        None => have > 0 && download.version.length == have,
    };
    let mut state = State {
        download,
        have,
        hash,
        resumed: have > 0,
        furthest: have,
        received: 0,
        changes: 0,
    };
    if whole {
        return Ok(state.downloaded());
    }
    let first_wait = state.download.first_wait;
    let (mut wait, mut vain) = (first_wait, 0);
    for _ in 0..ALL_TRIES {
        let problem = match attempt(&mut state, control, &named).await {
            Ok(()) => return Ok(state.downloaded()),
            Err(Broken::Final(failure)) => return Err(failure),
            Err(Broken::Passing(problem)) => problem,
        };
        state.resumed = true;
        if state.have > state.furthest {
            (wait, vain) = (first_wait, 0);
        }
        state.furthest = state.furthest.max(state.have);
        vain += 1;
        tracing::info!(problem, bytes = state.have, "a download broke off");
        let wasted = state.wasted().map(|reason| format!("{reason} ({problem})"));
        let in_vain = (vain >= TRIES).then(|| format!("{problem} ({vain} tries in a row)"));
        if let Some(problem) = wasted.or(in_vain) {
            return Err(failed_download(&problem));
        }
        let next = vain + 1;
        control.say(&format!(
            "downloading: {problem}; try {next} of {TRIES} follows in {wait:.1?}"
        ));
        tokio::select! {
            () = sleep(wait) => {}
            () = control.cancel().cancelled() => return Err(cancelled()),
        }
        control.say("downloading");
        wait = (wait * 2).min(LAST_WAIT);
    }
    Err(failed_download("the connection breaks again and again"))
}

fn failed_download(problem: &str) -> Failure {
    let message = format!("the image can't be downloaded: {problem}");
    Failure::new(Kind::Unavailable, "DOWNLOAD_FAILED", message)
}

pub fn cancelled() -> Failure {
    Failure::new(Kind::Aborted, "CANCELLED", "the operation was cancelled")
}

/// Reads what an earlier daemon has downloaded.
async fn beginning(download: &Download<'_>, control: &Control) -> Result<(Checksum, u64), Failure> {
    let file = download.file.try_clone().map_err(|error| failed(&error))?;
    let (control, mut hash) = (control.clone(), download.hash.clone());
    let keep = download.version.validator().is_some() || download.blob.is_some();
    let (base, most) = download.blob.map_or((0, u64::MAX), |blob| (blob.base, blob.size));
    let read = spawn_blocking(move || {
        if !keep {
            file.set_len(0)?;
            return Ok((hash, 0));
        }
        let mut buffer = vec![0; BATCH];
        let mut have = 0;
        loop {
            control.wanted()?;
            let wanted = usize::try_from(most - have).unwrap_or(usize::MAX).min(BATCH);
            let count = file.read_at(buffer.get_mut(..wanted).unwrap_or_default(), base + have)?;
            if count == 0 {
                return Ok((hash, have));
            }
            hash.update(buffer.get(..count).unwrap_or_default());
            have += count as u64;
        }
    });
    read.await
        .unwrap_or_else(|error| Err(io::Error::other(error)))
        .map_err(|error: io::Error| failed(&error))
}

fn failed(error: &io::Error) -> Failure {
    file_failed("write the download", error)
}

/// One connection.
async fn attempt<F: Future<Output = Result<(), Failure>>>(
    state: &mut State<'_>,
    control: &Control,
    named: &impl Fn(SourceVersion) -> F,
) -> Result<(), Broken> {
    let mut request = state
        .download
        .client
        .get(state.download.url)
        .headers(state.download.headers.clone())
        .header(ACCEPT_ENCODING, "identity");
    let validator = state.download.version.validator();
    if state.have > 0 && (validator.is_some() || state.download.blob.is_some()) {
        request = request.header(RANGE, format!("bytes={}-", state.have));
        if let Some(validator) = validator {
            request = request.header(IF_RANGE, validator);
        }
    }
    let answer = tokio::select! {
        answer = request.send() => answer,
        () = control.cancel().cancelled() => return Err(cancelled().into()),
    };
    let mut response = answer.map_err(|error| broken(&error))?;
    let Begun { total, mut skip } = begin(state, &response, named).await?;
    let total = match state.download.blob {
        Some(blob) if total != 0 && total != blob.size => {
            let message = format!("the server sends {total} bytes of what is to have {}", blob.size);
            return Err(Failure::precondition(REFUSED, message).into());
        }
        Some(blob) => blob.size,
        None => total,
    };
    if total > state.download.max_size {
        return Err(too_large(total, state.download.max_size).into());
    }
    let mut batch = Vec::new();
    let ended = loop {
        state.progress(state.have + batch.len() as u64, total, control);
        let next = tokio::select! {
            next = response.chunk() => next,
            () = control.cancel().cancelled() => return Err(cancelled().into()),
        };
        let data = match next {
            Ok(Some(data)) => data,
            Ok(None) => break Ok(()),
            Err(error) => break Err(Broken::Passing(words(&error))),
        };
        state.received = state.received.saturating_add(data.len() as u64);
        // The overlap with the present bytes is dropped.
        let overlap = usize::try_from(skip).unwrap_or(usize::MAX).min(data.len());
        skip -= overlap as u64;
        batch.extend_from_slice(data.get(overlap..).unwrap_or_default());
        let sent = state.have + batch.len() as u64;
        if sent > state.download.max_size {
            return Err(too_large(sent, state.download.max_size).into());
        }
        if total > 0 && sent > total {
            let problem = format!("the server sends more than the {total} bytes that it has announced");
            return Err(failed_download(&problem).into());
        }
        if batch.len() >= BATCH {
            write(state, std::mem::take(&mut batch)).await?;
        }
    };
    write(state, batch).await?;
    ended?;
    match total {
        total if total > state.have => {
            let problem = format!(
                "the server sent {} of {total} bytes and closed the connection",
                state.have
            );
            Err(Broken::Passing(problem))
        }
        _ => Ok(()),
    }
}

/// Extent of a response.
struct Begun {
    /// Length of the whole file in bytes; 0 when the server does not say.
    total: u64,
    /// Bytes of the response that the file has already.
    skip: u64,
}

/// Checks the head of a response, and empties the file when the response begins it again.
async fn begin<F: Future<Output = Result<(), Failure>>>(
    state: &mut State<'_>,
    response: &Response,
    named: &impl Fn(SourceVersion) -> F,
) -> Result<Begun, Broken> {
    let status = response.status();
    let length = response.content_length().unwrap_or(0);
    match status {
        StatusCode::PARTIAL_CONTENT => {
            let Some(part) = Part::of(response.headers()).filter(|part| part.start <= state.have) else {
                restart(state)?;
                return Err(Broken::Passing(
                    "the server sent another part than was asked for".to_owned(),
                ));
            };
            let version = version_of(response.headers(), part.whole);
            let same = state.have == 0 || state.download.version.has_part(&version);
            if state.download.blob.is_none() && !same {
                restart(state)?;
                state.changed();
                state.download.version = SourceVersion::default();
                return Err(Broken::Passing(
                    "the server has another version of the file than at the beginning".to_owned(),
                ));
            }
            let known = part.whole.max(state.download.version.length);
            Ok(Begun {
                total: match known {
                    0 => part.start.saturating_add(length),
                    known => known,
                },
                skip: state.have - part.start,
            })
        }
        StatusCode::OK => {
            restart(state)?;
            if state.download.blob.is_none() {
                refuse_page(response.headers())?;
                let version = version_of(response.headers(), length);
                if version != state.download.version {
                    if state.furthest > 0 {
                        state.changed();
                    }
                    state.download.version = version.clone();
                    named(version).await?;
                }
            }
            Ok(Begun {
                total: length,
                skip: 0,
            })
        }
        StatusCode::RANGE_NOT_SATISFIABLE => {
            restart(state)?;
            state.changed();
            state.download.version = SourceVersion::default();
            Err(Broken::Passing("the file has become another one".to_owned()))
        }
        status if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
            Err(Broken::Passing(format!("the server says {status}")))
        }
        status => {
            // One to http or https would have been followed.
            let problem = match status.is_redirection() {
                true => "it redirects to an address that is neither http nor https".to_owned(),
                false => format!("the server says {status}"),
            };
            let message = format!("the image can't be downloaded: {problem}");
            let reason = match status {
                StatusCode::UNAUTHORIZED => state.download.unauthorized,
                StatusCode::NOT_FOUND => state.download.missing,
                _ => REFUSED,
            };
            Err(Failure::precondition(reason, message).into())
        }
    }
}

/// Refuses a web page: servers send pages for logins and expired links with the status of success.
fn refuse_page(headers: &HeaderMap) -> Result<(), Failure> {
    let value = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let kind = value.unwrap_or_default().split(';').next().unwrap_or_default();
    let kind = kind.trim().to_ascii_lowercase();
    if !matches!(kind.as_str(), "text/html" | "application/xhtml+xml") {
        return Ok(());
    }
    let message = format!(
        "the image can't be downloaded: the server sends a web page ({kind}) instead of an image; open the address in a browser: \
         the link may have expired, or lead to a login"
    );
    Err(Failure::precondition(REFUSED, message))
}

fn restart(state: &mut State<'_>) -> Result<(), Broken> {
    state.have = 0;
    state.hash = state.hash.restarted();
    let base = state.base();
    state
        .download
        .file
        .set_len(base)
        .map_err(|error| Broken::Final(failed(&error)))
}

async fn write(state: &mut State<'_>, data: Vec<u8>) -> Result<(), Broken> {
    if data.is_empty() {
        return Ok(());
    }
    let file = state.download.file.try_clone();
    let file = file.map_err(|error| Broken::Final(failed(&error)))?;
    let at = state.base() + state.have;
    let (room, mut hash) = (state.download.room, state.hash.clone());
    let written = spawn_blocking(move || {
        if !room(&file)? {
            return Err(io::ErrorKind::StorageFull.into());
        }
        file.write_all_at(&data, at)?;
        hash.update(&data);
        Ok((hash, data.len() as u64))
    });
    let written = written.await.unwrap_or_else(|error| Err(io::Error::other(error)));
    let (hash, count) = written.map_err(|error| Broken::Final(failed(&error)))?;
    state.hash = hash;
    state.have += count;
    Ok(())
}

fn too_large(bytes: u64, most: u64) -> Failure {
    let message = format!("the file has {bytes} bytes or more, and may have {most}");
    Failure::precondition("IMAGE_TOO_LARGE", message)
}

fn broken(error: &reqwest::Error) -> Broken {
    let message = format!("the image can't be downloaded: {}", words(error));
    if error.is_redirect() || error.is_builder() || is_denied(error) {
        return Broken::Final(Failure::precondition(REFUSED, message));
    }
    Broken::Passing(words(error))
}

/// Whether the server may not be connected to, which no further try changes.
fn is_denied(error: &reqwest::Error) -> bool {
    let first: &dyn std::error::Error = error;
    let mut causes = std::iter::successors(Some(first), |cause| cause.source());
    causes.any(|cause| {
        let cause = cause.downcast_ref::<io::Error>();
        cause.is_some_and(|cause| cause.kind() == io::ErrorKind::PermissionDenied)
    })
}

/// The innermost cause, which says most, without the address: that may hold a secret.
pub fn words(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    let own = std::ptr::eq(
        std::ptr::from_ref(cause).cast::<u8>(),
        std::ptr::from_ref(error).cast::<u8>(),
    );
    match own {
        true if error.is_timeout() => "the server does not answer in time".to_owned(),
        true => "the connection broke".to_owned(),
        false => text::brief_line(&cause.to_string()),
    }
}

#[cfg(test)]
pub mod tests;
