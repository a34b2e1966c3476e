//! The API's socket and the server behind it.

use std::{
    fs, io,
    os::unix::fs::{FileTypeExt, PermissionsExt, chown},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use proto::v1::{
    disk_service_server::DiskServiceServer, event_service_server::EventServiceServer,
    node_service_server::NodeServiceServer, operation_service_server::OperationServiceServer,
    vm_service_server::VmServiceServer,
};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::sleep,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;

use super::{
    connection::Connection, disk::Disks, event::EventLog, node::Nodes, operation::Operations, vm::Vms,
};
use crate::host::Host;

/// Most connections at once; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 256;
/// Most calls at once on one connection, streams included.
const MAX_STREAMS: u32 = 1024;
/// Largest request in bytes; a manifest with everything in it has some 100 KiB.
const MAX_REQUEST: usize = 256 << 10;
/// After a failed accept, as when descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long open streams may take to end when the daemon ends.
const SHUTDOWN: Duration = Duration::from_millis(500);

/// The group that may use the socket when none is configured.
const DEFAULT_GROUP: &str = "vmmd";

/// The bound socket; its file is removed when it is dropped.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    path: PathBuf,
}

impl Socket {
    /// Binds `path`, mode 0660, for root and `group`. A file that an earlier daemon has left is replaced; the caller
    /// holds the daemon's lock, so there is no other daemon with this path.
    pub fn bind(path: &Path, group: Option<&str>) -> io::Result<Self> {
        if let Ok(metadata) = fs::symlink_metadata(path) {
            if !metadata.file_type().is_socket() {
                let message = format!("{} exists and is no socket", path.display());
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
            }
            if std::os::unix::net::UnixStream::connect(path).is_ok() {
                let message = format!("another program listens on {}", path.display());
                return Err(io::Error::new(io::ErrorKind::AddrInUse, message));
            }
        }
        // Under another name until the rights are right.
        let mut new = path.as_os_str().to_owned();
        new.push(".new");
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&new)?;
        match group_id(group)? {
            Some(gid) => {
                chown(&new, None, Some(gid))?;
                fs::set_permissions(&new, fs::Permissions::from_mode(0o660))?;
            }
            None => fs::set_permissions(&new, fs::Permissions::from_mode(0o600))?,
        }
        fs::rename(&new, path)?;
        Ok(Self {
            listener,
            path: path.to_owned(),
        })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The id of the configured group, which must exist, or of the default one, which need not.
fn group_id(configured: Option<&str>) -> io::Result<Option<u32>> {
    let name = configured.unwrap_or(DEFAULT_GROUP);
    if let Ok(id) = name.parse() {
        return Ok(Some(id));
    }
    match find_group(&fs::read_to_string("/etc/group").unwrap_or_default(), name) {
        None if configured.is_some() => Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!("there is no group \"{name}\""),
        )),
        None => {
            tracing::info!("there is no group \"{name}\": only root can use the socket");
            Ok(None)
        }
        id => Ok(id),
    }
}

/// group(5): name, password, id, members.
fn find_group(groups: &str, name: &str) -> Option<u32> {
    let mut lines = groups.lines().map(|line| line.split(':').collect::<Vec<_>>());
    lines
        .find(|fields| fields.first() == Some(&name))?
        .get(2)?
        .parse()
        .ok()
}

/// Serves the API until the daemon ends.
pub async fn serve(host: Arc<Host>, socket: Socket) -> anyhow::Result<()> {
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<VmServiceServer<Vms>>().await;
    reporter.set_serving::<NodeServiceServer<Nodes>>().await;
    reporter.set_serving::<DiskServiceServer<Disks>>().await;
    reporter.set_serving::<OperationServiceServer<Operations>>().await;
    reporter.set_serving::<EventServiceServer<EventLog>>().await;
    let reflection = |builder: tonic_reflection::server::Builder<'static>| {
        builder
            .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let (sender, incoming) = mpsc::channel(1);
    let accepting = tokio::spawn(accept(socket, sender));
    let stopping = host.stopping.clone();
    let serving = Server::builder()
        .max_concurrent_streams(MAX_STREAMS)
        .add_service(health)
        .add_service(reflection(tonic_reflection::server::Builder::configure()).build_v1()?)
        .add_service(reflection(tonic_reflection::server::Builder::configure()).build_v1alpha()?)
        .add_service(VmServiceServer::new(Vms::new(Arc::clone(&host))).max_decoding_message_size(MAX_REQUEST))
        .add_service(
            DiskServiceServer::new(Disks::new(Arc::clone(&host))).max_decoding_message_size(MAX_REQUEST),
        )
        .add_service(
            OperationServiceServer::new(Operations::new(Arc::clone(&host)))
                .max_decoding_message_size(MAX_REQUEST),
        )
        .add_service(
            EventServiceServer::new(EventLog::new(Arc::clone(&host))).max_decoding_message_size(MAX_REQUEST),
        )
        .add_service(NodeServiceServer::new(Nodes::new(host)).max_decoding_message_size(MAX_REQUEST))
        .serve_with_incoming_shutdown(ReceiverStream::new(incoming), stopping.clone().cancelled_owned());
    let result = tokio::select! {
        result = serving => result,
        () = async { stopping.cancelled().await; sleep(SHUTDOWN).await } => Ok(()),
    };
    accepting.abort();
    Ok(result?)
}

/// Accepts connections for as long as the server takes them. No error of one ends the others.
async fn accept(socket: Socket, sender: mpsc::Sender<io::Result<Connection>>) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return;
        };
        let (stream, place): (UnixStream, OwnedSemaphorePermit) = match socket.listener.accept().await {
            Ok((stream, _)) => (stream, place),
            Err(error) => {
                tracing::warn!(%error, "accept a connection");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        if sender.send(Ok(Connection::new(stream, place))).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_by_their_whole_name() {
        let text = "root:x:0:\nvmmd-x:x:7:\nvmmd:x:998:alice,bob\nbroken\n";
        assert_eq!(find_group(text, "vmmd"), Some(998));
        assert_eq!((find_group(text, "vm"), find_group(text, "broken")), (None, None));
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_living_or_foreign_file_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let socket = Socket::bind(&path, Some("0")).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
        assert!(
            Socket::bind(&path, Some("0"))
                .unwrap_err()
                .to_string()
                .contains("another program")
        );
        drop(socket);
        assert!(!path.exists());
        fs::write(&path, "x").unwrap();
        assert!(
            Socket::bind(&path, Some("0"))
                .unwrap_err()
                .to_string()
                .contains("no socket")
        );
    }

    #[test]
    fn a_configured_group_must_exist() {
        assert!(group_id(Some("nonexistent-group")).is_err());
        assert_eq!(group_id(Some("1234")).unwrap(), Some(1234));
    }
}
