//! Downloads a file by HTTP or HTTPS into one that may hold its beginning already; also a blob of an OCI image, whose digest its caller compares.
//!
//! A connection that breaks is made again, and goes on where it broke, as long as the server says that the file is the same (RFC 9110, 8.8
//! and 13.1.5: `If-Range`). Nothing that a server says is trusted: what comes is counted.

use std::{fs::File, io, os::unix::fs::FileExt, time::Duration};

use reqwest::{
    Client, Response, StatusCode, Url,
    header::{ACCEPT_ENCODING, CONTENT_RANGE, ETAG, HeaderMap, IF_RANGE, LAST_MODIFIED, RANGE},
    redirect,
};
use sha2::{Digest, Sha256};
use tokio::{task::spawn_blocking, time::sleep};

use crate::{
    disk::Control,
    failure::{Failure, Kind, file_failed},
    text,
};

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(30);
/// How long a server may send nothing.
const SILENCE: Duration = Duration::from_secs(60);
/// Most redirects that are followed.
const REDIRECTS: usize = 10;
/// Most tries in a row of which none brought a byte.
const TRIES: u32 = 8;
/// Most tries.
const ALL_TRIES: u32 = 10_000;
/// The usual wait before the second try; each one is twice as long, up to [`LAST_WAIT`].
pub const FIRST_WAIT: Duration = Duration::from_millis(200);
const LAST_WAIT: Duration = Duration::from_secs(10);
/// The reason of a failure: the server does not give the file, or not as it should.
pub const REFUSED: &str = "DOWNLOAD_REFUSED";
/// Bytes that are received before they are written, and after which the room on the file system is looked at.
const BATCH: usize = 4 << 20;

/// What is to be downloaded.
#[derive(Debug)]
pub struct Download<'a> {
    /// Of [`client`].
    pub client: Client,
    /// Its address.
    pub url: &'a str,
    /// What else each request says.
    pub headers: HeaderMap,
    /// The reason of the failure when the server answers 401; [`REFUSED`] when that is no case of its own.
    pub unauthorized: &'static str,
    /// The same for 404.
    pub missing: &'static str,
    /// When it is a blob: it can be gone on with whatever the server calls it.
    pub blob: Option<Blob>,
    /// Where it goes: what is there is its beginning.
    pub file: File,
    /// What the server called it when that came; empty when it had no name.
    pub validator: String,
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
    /// SHA-256.
    pub checksum: [u8; 32],
    /// Its length.
    pub bytes: u64,
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
    hash: Sha256,
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
}

/// Downloads it. `named` is told what the server calls the file, before anything of it is written, and has to remember it.
pub async fn fetch<F: Future<Output = Result<(), Failure>>>(
    download: Download<'_>,
    control: &Control,
    named: impl Fn(String) -> F,
) -> Result<Downloaded, Failure> {
    let (hash, have) = beginning(&download, control).await?;
    let mut state = State { download, have, hash };
    if state.download.blob.is_some_and(|blob| blob.size == have) {
        return Ok(Downloaded {
            checksum: state.hash.finalize().into(),
            bytes: have,
        });
    }
    let first_wait = state.download.first_wait;
    let (mut wait, mut vain) = (first_wait, 0);
    for _ in 0..ALL_TRIES {
        let before = state.have;
        let problem = match attempt(&mut state, control, &named).await {
            Ok(()) => {
                return Ok(Downloaded {
                    checksum: state.hash.finalize().into(),
                    bytes: state.have,
                });
            }
            Err(Broken::Final(failure)) => return Err(failure),
            Err(Broken::Passing(problem)) => problem,
        };
        if state.have > before {
            (wait, vain) = (first_wait, 0);
        }
        vain += 1;
        tracing::info!(problem, bytes = state.have, "a download broke off");
        if vain >= TRIES {
            let message = format!("the image can't be downloaded: {problem} ({vain} tries in a row)");
            return Err(Failure::new(Kind::Unavailable, "DOWNLOAD_FAILED", message));
        }
        tokio::select! {
            () = sleep(wait) => {}
            () = control.cancel().cancelled() => return Err(cancelled()),
        }
        wait = (wait * 2).min(LAST_WAIT);
    }
    let message = "the image can't be downloaded: the connection breaks again and again";
    Err(Failure::new(Kind::Unavailable, "DOWNLOAD_FAILED", message))
}

pub fn cancelled() -> Failure {
    Failure::new(Kind::Aborted, "CANCELLED", "the operation was cancelled")
}

/// Reads what an earlier daemon has downloaded.
async fn beginning(download: &Download<'_>, control: &Control) -> Result<(Sha256, u64), Failure> {
    let file = download.file.try_clone().map_err(|error| failed(&error))?;
    let control = control.clone();
    let keep = !download.validator.is_empty() || download.blob.is_some();
    let (base, most) = download.blob.map_or((0, u64::MAX), |blob| (blob.base, blob.size));
    let read = spawn_blocking(move || {
        let mut hash = Sha256::new();
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
    file_failed("write what is downloaded", error)
}

/// What makes connections: all of one import have it in common.
pub fn client() -> Result<Client, Failure> {
    let policy = || {
        redirect::Policy::custom(|attempt| {
            let came = attempt.previous().last().map(Url::scheme);
            let refused = match attempt.url().scheme() {
                _ if attempt.previous().len() > REDIRECTS => "it redirects too often",
                "https" => return attempt.follow(),
                "http" if came == Some("http") => return attempt.follow(),
                "http" => "it redirects from https to http, where anybody could change what comes",
                _ => "it redirects to an address that is neither http nor https",
            };
            attempt.error(io::Error::new(io::ErrorKind::InvalidInput, refused))
        })
    };
    let builder = || {
        Client::builder()
            .redirect(policy())
            .connect_timeout(CONNECT)
            .read_timeout(SILENCE)
            .user_agent(concat!("vmmd/", env!("CARGO_PKG_VERSION")))
    };
    // A node without certificates of authorities downloads by http all the same: by https it trusts nobody then.
    let client = builder()
        .build()
        .or_else(|_| builder().tls_certs_only([]).build());
    client.map_err(|error| Failure::internal(format!("prepare a download: {}", words(&error))))
}

/// One connection.
async fn attempt<F: Future<Output = Result<(), Failure>>>(
    state: &mut State<'_>,
    control: &Control,
    named: &impl Fn(String) -> F,
) -> Result<(), Broken> {
    let mut request = state
        .download
        .client
        .get(state.download.url)
        .headers(state.download.headers.clone())
        .header(ACCEPT_ENCODING, "identity");
    // Without a name of the file nobody knows whether the rest is that of the same one. Of a blob the digest tells.
    let named_file = !state.download.validator.is_empty();
    if state.have > 0 && (named_file || state.download.blob.is_some()) {
        request = request.header(RANGE, format!("bytes={}-", state.have));
        if named_file {
            request = request.header(IF_RANGE, &state.download.validator);
        }
    }
    let answer = tokio::select! {
        answer = request.send() => answer,
        () = control.cancel().cancelled() => return Err(cancelled().into()),
    };
    let mut response = answer.map_err(|error| broken(&error))?;
    let said = begin(state, &response, named).await?;
    let total = match state.download.blob {
        Some(blob) if said != 0 && said != blob.size => {
            let message = format!("the server sends {said} bytes of what is to have {}", blob.size);
            return Err(Failure::precondition(REFUSED, message).into());
        }
        Some(blob) => blob.size,
        None => said,
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
        match next {
            Ok(Some(data)) => batch.extend_from_slice(&data),
            Ok(None) => break Ok(()),
            Err(error) => break Err(Broken::Passing(words(&error))),
        }
        if state.have + batch.len() as u64 > state.download.max_size {
            let sent = state.have + batch.len() as u64;
            return Err(too_large(sent, state.download.max_size).into());
        }
        if batch.len() >= BATCH {
            write(state, std::mem::take(&mut batch)).await?;
        }
    };
    write(state, batch).await?;
    ended?;
    match total {
        0 => Ok(()),
        total if state.have == total => Ok(()),
        total if state.have < total => {
            let problem = format!(
                "the server sent {} of {total} bytes and closed the connection",
                state.have
            );
            Err(Broken::Passing(problem))
        }
        total => {
            let message = format!("the server sent {} bytes and had announced {total}", state.have);
            Err(Failure::new(Kind::Unavailable, "DOWNLOAD_FAILED", message).into())
        }
    }
}

/// Looks at the head of a response, and makes the file what the response goes on from. Returns how long the whole is to be; 0 when the
/// server does not say.
async fn begin<F: Future<Output = Result<(), Failure>>>(
    state: &mut State<'_>,
    response: &Response,
    named: &impl Fn(String) -> F,
) -> Result<u64, Broken> {
    let status = response.status();
    let length = response.content_length().unwrap_or(0);
    match status {
        StatusCode::PARTIAL_CONTENT => {
            let (start, whole) = range(response.headers()).unwrap_or((u64::MAX, 0));
            if start == state.have {
                return Ok(whole.max(state.have.saturating_add(length)));
            }
            restart(state)?;
            Err(Broken::Passing(
                "the server sent another part than was asked for".to_owned(),
            ))
        }
        StatusCode::OK => {
            restart(state)?;
            let validator = match state.download.blob {
                Some(_) => String::new(),
                None => validator(response.headers()),
            };
            if validator != state.download.validator {
                state.download.validator.clone_from(&validator);
                named(validator).await?;
            }
            Ok(length)
        }
        StatusCode::RANGE_NOT_SATISFIABLE => {
            restart(state)?;
            state.download.validator.clear();
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

/// What the server calls the file; a weak ETag says too little (RFC 9110, 13.1.5).
fn validator(headers: &HeaderMap) -> String {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let strong = text(ETAG).filter(|tag| !tag.starts_with("W/"));
    let found = strong.or_else(|| text(LAST_MODIFIED)).unwrap_or_default();
    if found.len() > 1024 {
        return String::new();
    }
    found.to_owned()
}

/// First byte and whole length in "bytes 5-9/10"; 0 for a length that is not known.
fn range(headers: &HeaderMap) -> Option<(u64, u64)> {
    let text = headers.get(CONTENT_RANGE)?.to_str().ok()?;
    let (part, whole) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (start, _) = part.split_once('-')?;
    Some((start.parse().ok()?, whole.parse().unwrap_or(0)))
}

fn restart(state: &mut State<'_>) -> Result<(), Broken> {
    state.have = 0;
    state.hash = Sha256::new();
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
    if error.is_redirect() || error.is_builder() {
        return Broken::Final(Failure::precondition(REFUSED, message));
    }
    Broken::Passing(words(error))
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
