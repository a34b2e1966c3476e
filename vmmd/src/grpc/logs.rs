//! `GetVmLogs`: contents of a VM's log files, and later additions.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::{sync::mpsc, task::spawn_blocking};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use uuid::Uuid;
use vmmd_api::v1::{GetVmLogsRequest, GetVmLogsResponse, VmLog};
use vmmd_host::{failure::Failure, folder_watch::FolderWatch, text};

use crate::{host::Host, paths::LogDir};

/// The stream of a log.
pub type Stream = ReceiverStream<Result<GetVmLogsResponse, Status>>;

type Sender = mpsc::Sender<Result<GetVmLogsResponse, Status>>;

/// Bytes in one message.
const CHUNK: usize = 64 << 10;
/// Messages ready for a caller that reads slowly.
const READY: usize = 4;

/// Opens a log. One that does not exist (yet) is empty.
pub async fn open(host: &Arc<Host>, uid: Uuid, request: &GetVmLogsRequest) -> Result<Stream, Failure> {
    let dir = LogDir::of(&host.config, uid);
    let (follow, previous, tail) = (request.follow, request.previous, request.tail_bytes);
    let paths = match VmLog::try_from(request.log) {
        Ok(VmLog::Serial | VmLog::Unspecified) if follow => {
            let problem = "only the vmm's log can be followed; for the serial port there is the console";
            return Err(Failure::field("follow", problem));
        }
        Ok(VmLog::Serial | VmLog::Unspecified) if previous => vec![dir.serial_previous()],
        Ok(VmLog::Serial | VmLog::Unspecified) => vec![dir.serial_old(), dir.serial()],
        Ok(VmLog::Vmm) if previous && follow => {
            return Err(Failure::field(
                "follow",
                "nothing is added to the log of a run that has ended",
            ));
        }
        Ok(VmLog::Vmm) if previous => vec![dir.vmm_previous()],
        Ok(VmLog::Vmm) => vec![dir.vmm()],
        Err(_) => return Err(Failure::field("log", "is none that this vmmd knows")),
    };
    let (sender, receiver) = mpsc::channel(READY);
    let stopping = host.stopping.clone();
    tokio::spawn(async move {
        let last = paths.last().cloned();
        // Watched before it is read: nothing that is written meanwhile is missed.
        let watch = last
            .filter(|_| follow)
            // The folder: the file may not exist yet, and is another in the next run.
            .map(|path| FolderWatch::new(path.parent().unwrap_or(&path)).map(|watch| (watch, path)));
        let sent = tokio::select! {
            sent = send(paths, tail, &sender) => sent,
            () = sender.closed() => return,
        };
        let result = match (sent, watch.transpose()) {
            (Ok(position), Ok(Some((watch, path)))) => tokio::select! {
                result = send_additions(watch, path, position, &sender) => result,
                () = sender.closed() => return,
                () = stopping.cancelled() => {
                    let _ = sender.send(Err(Failure::stopping().into())).await;
                    return;
                }
            },
            (Ok(_), Ok(None)) => Ok(()),
            (Err(error), _) | (_, Err(error)) => Err(error),
        };
        if let Err(error) = result {
            let failure = Failure::internal(format!("read the log: {}", text::words(&error)));
            let _ = sender.send(Err(failure.into())).await;
        }
    });
    Ok(ReceiverStream::new(receiver))
}

/// Does what blocks for a moment.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    let done = spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(io::Error::other(error)))
}

/// Sends files one after the other; gives how far the last one was read.
async fn send(paths: Vec<PathBuf>, tail: Option<u64>, sender: &Sender) -> io::Result<u64> {
    let of = paths.clone();
    let lengths: Vec<u64> = blocking(move || Ok(of.iter().map(|path| length(path)).collect())).await?;
    let all: u64 = lengths.iter().sum();
    let mut skip = tail.map_or(0, |tail| all.saturating_sub(tail));
    let mut position = 0;
    for (path, length) in paths.into_iter().zip(lengths) {
        let from = skip.min(length);
        skip -= from;
        position = send_from(path, from, sender).await?;
    }
    Ok(position)
}

fn length(path: &Path) -> u64 {
    path.metadata().map_or(0, |metadata| metadata.len())
}

/// Sends a file from a position to its end, where that is. Each chunk is read when the caller has room for it: one that
/// does not read costs neither a thread nor more memory.
async fn send_from(path: PathBuf, from: u64, sender: &Sender) -> io::Result<u64> {
    let opened = blocking(move || match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        file => {
            let mut file = file?;
            // Another run's, which has begun meanwhile.
            let from = if file.metadata()?.len() < from { 0 } else { from };
            file.seek(SeekFrom::Start(from))?;
            Ok(Some((file, from)))
        }
    });
    let Some((mut file, mut position)) = opened.await? else {
        return Ok(0);
    };
    loop {
        let Ok(room) = sender.reserve().await else {
            return Ok(position);
        };
        let (back, data) = blocking(move || {
            let mut data = Vec::with_capacity(CHUNK);
            file.by_ref().take(CHUNK as u64).read_to_end(&mut data)?;
            Ok((file, data))
        })
        .await?;
        file = back;
        if data.is_empty() {
            return Ok(position);
        }
        position += data.len() as u64;
        room.send(Ok(GetVmLogsResponse { data }));
    }
}

/// Sends additions until the caller disconnects.
async fn send_additions(
    watch: FolderWatch,
    path: PathBuf,
    mut position: u64,
    sender: &Sender,
) -> io::Result<()> {
    loop {
        watch.changed().await?;
        position = send_from(path.clone(), position, sender).await?;
    }
}
