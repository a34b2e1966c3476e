//! `cp`: a file to or from a guest, by the guest's agent.

use std::{
    fs::File,
    io::{self, Read, Write},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use vmmd_api::v1::{
    GuestFileEnd, ReadGuestFileRequest, WriteGuestFileOpen, WriteGuestFileRequest, read_guest_file_response,
    write_guest_file_request::Message,
};

use super::{keys::usage, progress::Transfer, snapshot::archive::Partial};
use crate::{
    args::{verbs::Cp, vm_name},
    client::{Client, about_vm},
    failure::{Code, Failure, Result},
    manifest::quantity,
    output,
};

/// Bytes of a message.
const PIECE: usize = 128 << 10;
/// Messages that are read ahead.
const AHEAD: usize = 4;

/// A file of a guest.
#[derive(Debug, PartialEq, Eq)]
struct InGuest {
    vm: String,
    path: String,
}

/// Copies a file.
pub async fn cp(client: &Client, args: &Cp) -> Result<()> {
    match (in_guest(&args.source)?, in_guest(&args.target)?) {
        (None, Some(target)) => upload(client, Path::new(&args.source), target, args.quiet).await,
        (Some(source), None) => download(client, &source, Path::new(&args.target), args.quiet).await,
        (Some(_), Some(_)) => Err(usage("copy from one guest to another in two steps")),
        (None, None) => Err(usage("name a file of a guest: VM:PATH")),
    }
}

/// Reads `VM:PATH`; `None` for a file of this machine, such as `./a:b`.
fn in_guest(text: &str) -> Result<Option<InGuest>> {
    let Some((vm, path)) = text.split_once(':').filter(|(vm, _)| !vm.contains('/')) else {
        return Ok(None);
    };
    if vm.is_empty() {
        return Err(usage(format!("\"{text}\": name the VM, as in web:{path}")));
    }
    if !path.starts_with('/') {
        return Err(usage(format!(
            "\"{text}\": a path in the guest must be absolute, as in {vm}:/root/notes.txt"
        )));
    }
    Ok(Some(InGuest {
        vm: vm_name(vm).map_err(usage)?,
        path: path.to_owned(),
    }))
}

fn failed(path: &Path, error: &io::Error) -> Failure {
    Failure::new(Code::Other, format!("{}: {error}", path.display()))
}

/// Where a file of a guest is written.
enum Target {
    /// Replaced when the copy is complete.
    File(Partial),
    /// Standard output, or a file that is not regular.
    Stream(Box<dyn Write + Send>),
}

impl Target {
    fn open(path: &Path) -> Result<Self> {
        if path.as_os_str() == "-" {
            return Ok(Self::Stream(Box::new(io::stdout())));
        }
        match path.metadata() {
            Ok(metadata) if !metadata.is_file() => {
                let file = File::options().write(true).open(path);
                let file = file.map_err(|error| failed(path, &error))?;
                Ok(Self::Stream(Box::new(file)))
            }
            _ => Ok(Self::File(Partial::create(path)?)),
        }
    }

    fn write(&mut self, data: &[u8]) -> io::Result<()> {
        match self {
            Self::File(partial) => partial.file.write_all(data),
            Self::Stream(stream) => stream.write_all(data),
        }
    }

    fn finish(self) -> io::Result<()> {
        match self {
            Self::File(partial) => partial.finish(),
            Self::Stream(mut stream) => stream.flush(),
        }
    }
}

async fn download(client: &Client, source: &InGuest, target: &Path, quiet: bool) -> Result<()> {
    let target = match target.is_dir() {
        true => target.join(file_name(Path::new(&source.path))?),
        false => target.to_owned(),
    };
    let about = |status: tonic::Status| about_vm(status.into(), &source.vm);
    let request = ReadGuestFileRequest {
        name: source.vm.clone(),
        path: source.path.clone(),
    };
    let stream = client.vms.clone().read_guest_file(request).await;
    let mut stream = stream.map_err(about)?.into_inner();
    let mut file = Target::open(&target)?;
    let mut transfer = Transfer::new("copying", 0, quiet);
    let mut bytes = 0_u64;
    let is_whole = loop {
        match stream
            .message()
            .await
            .map_err(about)?
            .map(|message| message.message)
        {
            Some(Some(read_guest_file_response::Message::Data(data))) => {
                bytes += data.len() as u64;
                transfer.add(data.len());
                file.write(&data).map_err(|error| failed(&target, &error))?;
            }
            Some(Some(read_guest_file_response::Message::End(end))) => break end.bytes == bytes,
            Some(None) | None => break false,
        }
    };
    drop(transfer);
    if !is_whole {
        let message = format!(
            "the copy of {}:{} is incomplete: it ended early",
            source.vm, source.path
        );
        return Err(Failure::new(Code::Unavailable, message));
    }
    let to_stdout = target.as_os_str() == "-";
    file.finish().map_err(|error| failed(&target, &error))?;
    if to_stdout {
        return Ok(());
    }
    let from = format!("{}:{}", source.vm, source.path);
    output::line(format!(
        "{from} copied to {} ({})",
        target.display(),
        quantity::show(bytes)
    ))
}

async fn upload(client: &Client, source: &Path, target: InGuest, quiet: bool) -> Result<()> {
    let InGuest { vm, mut path } = target;
    if path.ends_with('/') {
        path.push_str(file_name(source)?);
    }
    let file: Box<dyn Read + Send> = match source.as_os_str() == "-" {
        true => Box::new(io::stdin()),
        false => Box::new(File::open(source).map_err(|error| Failure {
            code: Code::NotFound,
            ..failed(source, &error)
        })?),
    };
    let size = source.metadata().map_or(0, |metadata| metadata.len());
    let open = WriteGuestFileOpen {
        name: vm.clone(),
        path: path.clone(),
    };
    let (sender, receiver) = mpsc::channel(AHEAD);
    let unreadable = Arc::new(Mutex::new(None));
    let result = Arc::clone(&unreadable);
    // No thread of the runtime: the program does not wait for standard input at its end.
    std::thread::spawn(move || {
        let mut transfer = Transfer::new("copying", size, quiet);
        if let Err(error) = send(open, file, &sender, &mut transfer) {
            *result.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        }
    });
    let sent = client
        .vms
        .clone()
        .write_guest_file(ReceiverStream::new(receiver))
        .await;
    if let Some(error) = unreadable.lock().unwrap_or_else(PoisonError::into_inner).take() {
        let message = format!("{}: {error}: {vm}:{path} is incomplete", source.display());
        return Err(Failure::new(Code::Other, message));
    }
    let written = sent.map_err(|status| about_vm(status.into(), &vm))?.into_inner();
    let size = quantity::show(written.bytes);
    output::line(format!("{} copied to {vm}:{path} ({size})", source.display()))
}

/// Sends a file. Without the end, the daemon reports the copy as incomplete.
fn send(
    open: WriteGuestFileOpen,
    mut file: Box<dyn Read + Send>,
    sender: &mpsc::Sender<WriteGuestFileRequest>,
    transfer: &mut Transfer,
) -> io::Result<()> {
    let put = |message| {
        let message = Some(message);
        sender.blocking_send(WriteGuestFileRequest { message }).is_ok()
    };
    if !put(Message::Open(open)) {
        return Ok(());
    }
    let mut bytes = 0_u64;
    loop {
        let mut piece = vec![0; PIECE];
        let count = match file.read(&mut piece) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            read => read?,
        };
        if count == 0 {
            // A closed receiver has the reason.
            let _sent = put(Message::End(GuestFileEnd { bytes }));
            return Ok(());
        }
        piece.truncate(count);
        bytes += count as u64;
        transfer.add(count);
        if !put(Message::Data(piece)) {
            return Ok(());
        }
    }
}

fn file_name(path: &Path) -> Result<&str> {
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .filter(|name| *name != "-");
    name.ok_or_else(|| {
        usage(format!(
            "{} has no name for the copy: name the whole path",
            path.display()
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_guests_are_told_from_local_ones() {
        let file = in_guest("web:/a:b").unwrap().unwrap();
        assert_eq!((file.vm.as_str(), file.path.as_str()), ("web", "/a:b"));
        for local in ["-", "notes.txt", "./a:b", "/a:b"] {
            assert_eq!(in_guest(local).unwrap(), None, "{local}");
        }
        for wrong in ["web:notes.txt", "web:", ":/a"] {
            assert!(in_guest(wrong).is_err(), "{wrong}");
        }
    }
}
