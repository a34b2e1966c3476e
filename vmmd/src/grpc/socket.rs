//! The API's UNIX socket.

use std::{
    fs, io,
    os::unix::fs::{FileTypeExt, PermissionsExt, chown},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::{
    net::{UnixListener, UnixStream},
    sync::mpsc,
    time::sleep,
};

use super::connection::Connection;
use crate::{
    auth::{Bucket, Caller, Places, Role},
    config::Limits,
    context::Initiator,
};

/// After a failed accept, as when descriptors have run out.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

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

/// Accepts connections for as long as the server takes them. No error of one ends the others.
pub async fn accept(
    socket: Socket,
    limits: Limits,
    sender: mpsc::Sender<io::Result<Connection<UnixStream>>>,
) {
    let places = Places::new(limits.connections, limits.connections_per_client);
    loop {
        let stream = match socket.listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "accept a connection");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // The client sees that it is closed.
        let Some(connection) = connection(stream, &places, &limits) else {
            continue;
        };
        if sender.send(Ok(connection)).await.is_err() {
            return;
        }
    }
}

/// Who may open the socket is an admin: its mode decides who that is.
fn connection(stream: UnixStream, places: &Arc<Places>, limits: &Limits) -> Option<Connection<UnixStream>> {
    let peer = stream.peer_cred().ok()?;
    let initiator = Initiator::User(peer.uid());
    let place = places.take(&initiator);
    let place = place
        .inspect_err(|full| tracing::debug!(%initiator, "close a connection: {full}"))
        .ok()?;
    let caller = Caller {
        initiator,
        role: Some(Role::Admin),
        address: peer
            .pid()
            .map_or("unix".into(), |pid| format!("unix, process {pid}")),
        bucket: Bucket::new(limits.calls_per_second),
    };
    Some(Connection::new(stream, caller, place, limits.request()))
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
