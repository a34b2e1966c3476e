//! Sends a snapshot to a client as an archive.

use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    sync::Arc,
    time::Duration,
};

use prost::Message as _;
use tokio::{
    sync::mpsc::{self, OwnedPermit},
    time::timeout,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use vmmd_api::v1::{self, export_snapshot_response::Message};
use vmmd_host::{
    failure::{Failure, Kind},
    fault,
};
use vmmd_store::SnapshotRecord;

use super::{
    Folder, Held,
    archive::{MAX_DATA, MAX_RECORD, Part, Writer},
    blocking, describe,
    described::Described,
    failed,
};
use crate::{disk, host::Host};

/// The stream of an export.
pub type Stream = ReceiverStream<Result<v1::ExportSnapshotResponse, Status>>;

/// Messages ready for a client that reads slowly.
const READY: usize = 4;
/// How long a client may take nothing.
const PATIENCE: Duration = Duration::from_secs(60);

/// Starts to send a snapshot. The task reads data only when the client has room for it. A client
/// that does not read costs neither a thread nor more memory, and its export fails after a minute.
pub async fn export(host: &Arc<Host>, name: &str) -> Result<Stream, Failure> {
    let held = Held::new(host, name)?;
    let record = held.record.clone();
    let source = blocking(host, move |folder| Source::open(&folder, &record)).await?;
    let open = v1::ExportSnapshotOpen {
        snapshot: Some(describe(&held.record, host.store.key())),
        size_bytes: source.allocated,
    };
    let (sender, receiver) = mpsc::channel(READY + 1);
    let last = sender.clone().try_reserve_owned();
    let mut end = End(Some(
        last.map_err(|_| Failure::internal("an export without room"))?,
    ));
    let stopping = host.stopping.clone();
    tokio::spawn(async move {
        let sent = tokio::select! {
            sent = send(&held.host, open, source, &sender) => sent,
            () = stopping.cancelled() => Err(Failure::stopping()),
            () = sender.closed() => return,
        };
        drop(held);
        match sent {
            Ok(()) => end.whole(),
            Err(failure) => end.fail(failure),
        }
    });
    Ok(ReceiverStream::new(receiver))
}

/// Reserved last place of the stream, for a failure. A stalled client receives it too when it
/// continues. A stream without a failure at its end would look like a complete archive, so the drop
/// sends one also after a panic of the task.
struct End(Option<OwnedPermit<Result<v1::ExportSnapshotResponse, Status>>>);

impl End {
    /// Nothing has failed.
    fn whole(&mut self) {
        self.0 = None;
    }

    fn fail(&mut self, failure: Failure) {
        if let Some(place) = self.0.take() {
            place.send(Err(failure.into()));
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.fail(Failure::internal("the export ended before the archive was whole"));
    }
}

async fn send(
    host: &Arc<Host>,
    open: v1::ExportSnapshotOpen,
    mut source: Source,
    sender: &mpsc::Sender<Result<v1::ExportSnapshotResponse, Status>>,
) -> Result<(), Failure> {
    let mut message = Some(Message::Open(open));
    loop {
        let patience = fault::patience(&host.config.run_dir, "export-patience", PATIENCE);
        let room = match timeout(patience, sender.reserve()).await {
            Ok(Ok(room)) => room,
            // The client has gone.
            Ok(Err(_)) => return Ok(()),
            Err(_) => {
                let message = format!(
                    "the client has taken nothing of the archive for {} s",
                    patience.as_secs()
                );
                return Err(Failure::new(Kind::Deadline, "EXPORT_STALLED", message));
            }
        };
        let next = match message.take() {
            Some(message) => message,
            None => {
                let (back, bytes) = blocking(host, move |_| {
                    let read = source.read();
                    let bytes = read.map_err(|error| failed("read the snapshot", &error))?;
                    Ok((source, bytes))
                })
                .await?;
                source = back;
                match bytes {
                    Some(bytes) if bytes.is_empty() => continue,
                    Some(bytes) => Message::Data(bytes),
                    None => return Ok(()),
                }
            }
        };
        room.send(Ok(v1::ExportSnapshotResponse { message: Some(next) }));
    }
}

/// Where the bytes of an archive come from. Blocking.
#[derive(Debug)]
struct Source {
    writer: Writer,
    next: Next,
    /// Memory file, then disk files, with their lengths.
    files: Vec<(File, u64)>,
    /// Bytes that are not holes, about.
    allocated: u64,
}

/// Next item of the archive.
#[derive(Debug)]
enum Next {
    /// These bytes.
    Begin(Vec<u8>),
    /// The beginning of the file with this number; the end when there is none.
    File(usize),
    /// Content of this file from a position on.
    Data(usize, u64),
    /// Nothing.
    End,
}

impl Source {
    fn open(folder: &Folder, record: &SnapshotRecord) -> Result<Self, Failure> {
        let disks = (0..record.disks.len()).map(|number| folder.disk(record, number));
        let (mut files, mut allocated) = (Vec::new(), 0_u64);
        for path in std::iter::once(folder.path(record)).chain(disks) {
            let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
            let (metadata, file) = opened.map_err(|error| failed("open the snapshot's files", &error))?;
            let blocks = metadata.blocks().saturating_mul(512);
            allocated = allocated.saturating_add(blocks.min(metadata.len()));
            files.push((file, metadata.len()));
        }
        let described = Described::of(record, allocated)?.encode_to_vec();
        if described.len() > MAX_RECORD {
            return Err(Failure::internal(
                "the record of the snapshot is too long for an archive",
            ));
        }
        let (mut writer, mut begin) = Writer::begin();
        begin.extend(writer.part(&Part::Record(described)));
        Ok(Self {
            writer,
            next: Next::Begin(begin),
            files,
            allocated,
        })
    }

    /// The bytes that follow, at most about [`MAX_DATA`]; none when only zeroes were found, and `None` at the end.
    fn read(&mut self) -> io::Result<Option<Vec<u8>>> {
        let (part, next) = match &mut self.next {
            Next::Begin(bytes) => {
                let bytes = std::mem::take(bytes);
                self.next = Next::File(0);
                return Ok(Some(bytes));
            }
            Next::File(number) => match self.files.get(*number) {
                Some((_, length)) => {
                    let part = Part::File {
                        number: u32::try_from(*number).map_err(io::Error::other)?,
                        length: *length,
                    };
                    (part, Next::Data(*number, 0))
                }
                None => (Part::End, Next::End),
            },
            Next::Data(number, from) => match data(self.files.get(*number), *from)? {
                None => {
                    self.next = Next::File(*number + 1);
                    return Ok(Some(Vec::new()));
                }
                Some((offset, bytes)) => {
                    *from = offset.saturating_add(bytes.len() as u64);
                    if bytes.iter().all(|byte| *byte == 0) {
                        return Ok(Some(Vec::new()));
                    }
                    let next = Next::Data(*number, *from);
                    (Part::Data { offset, bytes }, next)
                }
            },
            Next::End => return Ok(None),
        };
        self.next = next;
        Ok(Some(self.writer.part(&part)))
    }
}

/// Data of a file at or after a position, up to the next multiple of [`MAX_DATA`]; `None` when only
/// holes follow.
fn data(file: Option<&(File, u64)>, from: u64) -> io::Result<Option<(u64, Vec<u8>)>> {
    let Some((file, length)) = file else {
        return Ok(None);
    };
    let Some((start, end)) = disk::extent(file, from, *length)? else {
        return Ok(None);
    };
    let step = MAX_DATA as u64;
    let end = end.min((start / step).saturating_add(1).saturating_mul(step));
    let mut bytes = vec![0; usize::try_from(end - start).map_err(io::Error::other)?];
    file.read_exact_at(&mut bytes, start)?;
    Ok(Some((start, bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::archive::Reader;

    fn source(files: Vec<(File, u64)>) -> Source {
        let (mut writer, mut begin) = Writer::begin();
        begin.extend(writer.part(&Part::Record(b"record".to_vec())));
        Source {
            writer,
            next: Next::Begin(begin),
            files,
            allocated: 0,
        }
    }

    #[test]
    fn holes_and_written_zeroes_are_not_sent_and_everything_else_is() {
        let (sparse, empty) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let length = (1 << 40) + 100;
        sparse.set_len(length).unwrap();
        sparse.write_all_at(&vec![7; 300_000], 1 << 30).unwrap();
        sparse.write_all_at(&vec![0; 1 << 20], 1 << 31).unwrap();
        sparse.write_all_at(b"end", length - 3).unwrap();
        let mut source = source(vec![(sparse, length), (empty, 0)]);
        let (mut reader, mut sent, mut parts) = (Reader::new(), 0, Vec::new());
        while let Some(bytes) = source.read().unwrap() {
            assert!(bytes.len() <= MAX_DATA + 64);
            sent += bytes.len();
            let mut bytes = bytes.as_slice();
            while let Some(part) = reader.next(&mut bytes).unwrap() {
                parts.push(part);
            }
        }
        reader.finish().unwrap();
        assert!((300_000..320_000).contains(&sent), "{sent}");
        let there: u64 = parts
            .iter()
            .filter_map(|part| match part {
                Part::Data { bytes, .. } => Some(bytes.iter().filter(|byte| **byte == 7).count() as u64),
                _ => None,
            })
            .sum();
        assert_eq!(there, 300_000);
        assert!(parts.contains(&Part::File { number: 0, length }));
        assert!(parts.contains(&Part::File { number: 1, length: 0 }));
        let last = parts.iter().rev().find_map(|part| match part {
            Part::Data { offset, bytes } => Some((*offset + bytes.len() as u64, bytes.ends_with(b"end"))),
            _ => None,
        });
        assert_eq!(last, Some((length, true)));
    }
}
