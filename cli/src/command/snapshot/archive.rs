//! Snapshots go to files and come from them.

use std::{
    fs::{self, File},
    io::{self, IsTerminal as _, Read, Write},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use vmmd_api::v1::{self, export_snapshot_response as exported, import_snapshot_request as imported};

use crate::{
    args::snapshot::{ExportSnapshot, ImportSnapshot},
    client::{COPY, Client, about_snapshot, empty_answer},
    command::progress::Transfer,
    failure::{Code, Failure, Result},
    manifest::quantity,
    output,
};

/// Bytes of a file in a message.
const PIECE: usize = 128 << 10;
/// Messages that are read ahead.
const AHEAD: usize = 16;

/// Writes a snapshot to a file.
pub async fn export(client: &Client, args: &ExportSnapshot) -> Result<()> {
    let path = match &args.output {
        Some(path) => path.clone(),
        None => PathBuf::from(format!("{}.vmmsnapshot", args.name)),
    };
    let to_stdout = path.as_os_str() == "-";
    if to_stdout && io::stdout().is_terminal() {
        let message =
            "a snapshot is not for a terminal: give a file with -o, or send standard output elsewhere";
        return Err(Failure::new(Code::Usage, message));
    }
    let request = v1::ExportSnapshotRequest {
        name: args.name.clone(),
    };
    let about = |status: Status| about_snapshot(status.into(), &args.name);
    let stream = client.snapshots.clone().export_snapshot(request).await;
    let mut stream = stream.map_err(about)?.into_inner();
    let first = stream.message().await.map_err(about)?;
    let Some(exported::Message::Open(open)) = first.and_then(|first| first.message) else {
        return Err(empty_answer());
    };
    let mut transfer = Transfer::new("exporting", open.size_bytes, args.quiet);
    let mut target = match to_stdout {
        true => Target::Stdout(io::stdout()),
        false => Target::File(Partial::create(&path)?),
    };
    let mut length = 0_u64;
    while let Some(message) = stream.message().await.map_err(about)? {
        let Some(exported::Message::Data(data)) = message.message else {
            return Err(empty_answer());
        };
        length += data.len() as u64;
        transfer.add(data.len());
        let written = target.write(&data);
        written.map_err(|error| failed(&path, &error))?;
    }
    drop(transfer);
    match target {
        Target::Stdout(mut stdout) => stdout.flush().map_err(|error| failed(&path, &error)),
        Target::File(partial) => {
            partial.finish().map_err(|error| failed(&path, &error))?;
            let (name, size) = (&args.name, quantity::show(length));
            output::line(format!("snapshot/{name} exported to {} ({size})", path.display()))
        }
    }
}

/// Failure of the user's file, or of standard input or output.
fn failed(path: &Path, error: &io::Error) -> Failure {
    if path.as_os_str() == "-" && error.kind() == io::ErrorKind::BrokenPipe {
        return Failure::new(
            Code::Other,
            "the reader of standard output went away before the snapshot was whole",
        );
    }
    Failure::new(Code::Other, format!("{}: {error}", path.display()))
}

/// Where a snapshot is written.
enum Target {
    Stdout(io::Stdout),
    File(Partial),
}

impl Target {
    fn write(&mut self, data: &[u8]) -> io::Result<()> {
        match self {
            Self::Stdout(stdout) => stdout.write_all(data),
            Self::File(partial) => partial.file.write_all(data),
        }
    }
}

/// A file that is not whole yet: `<path>.partial`. It is removed unless it becomes whole.
pub struct Partial {
    /// For the content.
    pub file: File,
    partial: PathBuf,
    path: PathBuf,
    whole: bool,
}

impl Partial {
    /// Makes the file, for its owner only.
    pub fn create(path: &Path) -> Result<Self> {
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        // Removes the partial file of a killed export, which may have wider permissions.
        let _ = fs::remove_file(&partial);
        let file = File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&partial)
            .map_err(|error| failed(&partial, &error))?;
        Ok(Self {
            file,
            partial,
            path: path.to_owned(),
            whole: false,
        })
    }

    /// The file is whole.
    pub fn finish(mut self) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.partial, &self.path)?;
        self.whole = true;
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.whole {
            let _ = fs::remove_file(&self.partial);
        }
    }
}

/// Creates a snapshot from a file. When the daemon goes away before its answer, the file is sent
/// again, but standard input cannot be sent twice.
pub async fn import(client: &Client, args: &ImportSnapshot) -> Result<()> {
    let from_stdin = args.file.as_os_str() == "-";
    if from_stdin && io::stdin().is_terminal() {
        let message = "a snapshot does not come from a terminal: give a file, or have standard input come from elsewhere";
        return Err(Failure::new(Code::Usage, message));
    }
    let size_bytes = match from_stdin {
        true => 0,
        false => {
            let opened = File::open(&args.file).and_then(|file| file.metadata());
            let metadata = opened.map_err(|error| Failure {
                code: Code::NotFound,
                ..failed(&args.file, &error)
            })?;
            metadata.len()
        }
    };
    let open = v1::ImportSnapshotOpen {
        name: args.name.clone().unwrap_or_default(),
        size_bytes,
    };
    let request = v1::ImportSnapshotRequest {
        message: Some(imported::Message::Open(open)),
        ..Default::default()
    };
    let unreadable = Arc::new(Mutex::new(None));
    let stdin_used = AtomicBool::new(false);
    let sent = client.change(client.limit(COPY), request, |first| {
        let again = from_stdin && stdin_used.swap(true, Ordering::Relaxed);
        let stream = stream(first, size_bytes, args, &unreadable);
        let mut snapshots = client.snapshots.clone();
        async move {
            match again {
                true => Err(Status::aborted(
                    "lost the connection to vmmd, and standard input cannot be read again",
                )),
                false => snapshots.import_snapshot(stream).await,
            }
        }
    });
    let sent = sent.await;
    let unreadable = unreadable.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(error) = unreadable {
        return Err(failed(&args.file, &error));
    }
    let named = args.name.as_deref().unwrap_or_default();
    let response = sent.map_err(|failure| match named {
        "" => failure,
        name => about_snapshot(failure, name),
    })?;
    let snapshot = response.snapshot.ok_or_else(empty_answer)?;
    let size = quantity::show(snapshot.status.unwrap_or_default().size_bytes);
    let name = snapshot.metadata.unwrap_or_default().name;
    output::line(format!("snapshot/{name} imported ({size})"))
}

/// The messages of an import, which a thread reads as far ahead as there is room.
fn stream(
    first: v1::ImportSnapshotRequest,
    size: u64,
    args: &ImportSnapshot,
    unreadable: &Arc<Mutex<Option<io::Error>>>,
) -> ReceiverStream<v1::ImportSnapshotRequest> {
    let (sender, receiver) = mpsc::channel(AHEAD);
    let (path, quiet, unreadable) = (args.file.clone(), args.quiet, Arc::clone(unreadable));
    // No thread of the runtime: the program does not wait for standard input at its end.
    std::thread::spawn(move || {
        let mut transfer = Transfer::new("importing", size, quiet);
        if let Err(error) = read(first, &path, &sender, &mut transfer) {
            *unreadable.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        }
    });
    ReceiverStream::new(receiver)
}

fn read(
    first: v1::ImportSnapshotRequest,
    path: &Path,
    sender: &mpsc::Sender<v1::ImportSnapshotRequest>,
    transfer: &mut Transfer,
) -> io::Result<()> {
    let mut input: Box<dyn Read> = match path.as_os_str() == "-" {
        true => Box::new(io::stdin().lock()),
        false => Box::new(File::open(path)?),
    };
    if sender.blocking_send(first).is_err() {
        return Ok(());
    }
    loop {
        let mut piece = vec![0; PIECE];
        let count = input.read(&mut piece)?;
        piece.truncate(count);
        transfer.add(count);
        let message = v1::ImportSnapshotRequest {
            message: Some(imported::Message::Data(piece)),
            ..Default::default()
        };
        // A closed receiver ends the read; the import call returns the reason.
        if count == 0 || sender.blocking_send(message).is_err() {
            return Ok(());
        }
    }
}
