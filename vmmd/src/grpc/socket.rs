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

use super::{authority::LocalStream, connection::Connection};
use crate::{
    auth::{Bucket, Caller, Places, Role},
    config::{Config, Limits},
    context::Initiator,
    sys,
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
    groups: Groups,
}

/// Which groups have which role on the socket. Root is an admin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Groups {
    admin: Option<u32>,
    operator: Option<u32>,
    viewer: Option<u32>,
}

impl Groups {
    /// Asks the name service. A group that is configured must exist; the default one need not.
    fn find(config: &Config) -> io::Result<Self> {
        let configured = |name: &Option<String>| name.as_deref().map(group_id).transpose();
        let admin = match &config.socket_group {
            Some(name) => Some(group_id(name)?),
            None => sys::group_id(DEFAULT_GROUP)?,
        };
        if admin.is_none() {
            tracing::info!("there is no group \"{DEFAULT_GROUP}\": on the socket only root is an admin");
        }
        Ok(Self {
            admin,
            operator: configured(&config.operator_group)?,
            viewer: configured(&config.viewer_group)?,
        })
    }

    /// The mode of the socket: whoever may have a role must be able to open it, and a file has one group only. What others than
    /// these open is closed at once.
    fn mode(&self) -> u32 {
        match self {
            Self {
                operator: None,
                viewer: None,
                admin,
            } => {
                if admin.is_some() {
                    0o660
                } else {
                    0o600
                }
            }
            _ => 0o666,
        }
    }

    /// The role of a peer by its user id and all of its groups: the highest that it can have.
    fn role(&self, uid: u32, groups: &[u32]) -> Option<Role> {
        let is_in = |group: Option<u32>| group.is_some_and(|group| groups.contains(&group));
        if uid == 0 || is_in(self.admin) {
            Some(Role::Admin)
        } else if is_in(self.operator) {
            Some(Role::Operator)
        } else {
            is_in(self.viewer).then_some(Role::Viewer)
        }
    }
}

impl Socket {
    /// Binds `path`, for root and the groups of the configuration. A file that an earlier daemon has left is replaced; the caller
    /// holds the daemon's lock, so there is no other daemon with this path.
    pub fn bind(path: &Path, config: &Config) -> io::Result<Self> {
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
        let groups = Groups::find(config)?;
        chown(&new, None, groups.admin)?;
        fs::set_permissions(&new, fs::Permissions::from_mode(groups.mode()))?;
        fs::rename(&new, path)?;
        Ok(Self {
            listener,
            path: path.to_owned(),
            groups,
        })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The id of a group that is configured, by name or number.
fn group_id(name: &str) -> io::Result<u32> {
    if let Ok(id) = name.parse() {
        return Ok(id);
    }
    let found = sys::group_id(name)?;
    found.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("there is no group \"{name}\"")))
}

/// Accepts connections for as long as the server takes them. No error of one ends the others.
pub async fn accept(
    socket: Socket,
    limits: Limits,
    sender: mpsc::Sender<io::Result<Connection<LocalStream>>>,
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
        let Some(connection) = connection(stream, &socket.groups, &places, &limits) else {
            continue;
        };
        if sender.send(Ok(connection)).await.is_err() {
            return;
        }
    }
}

/// Who has no role here has no connection.
fn connection(
    stream: UnixStream,
    groups: &Groups,
    places: &Arc<Places>,
    limits: &Limits,
) -> Option<Connection<LocalStream>> {
    let peer = stream.peer_cred().ok()?;
    let mut its_groups = sys::peer_groups(&stream).unwrap_or_default();
    its_groups.push(peer.gid());
    let role = groups.role(peer.uid(), &its_groups);
    if role.is_none() {
        tracing::info!(target: "audit", uid = peer.uid(), "connection to the socket refused: no role");
        return None;
    }
    let initiator = Initiator::User(peer.uid());
    let place = places.take(&initiator);
    let place = place
        .inspect_err(|full| tracing::debug!(%initiator, "close a connection: {full}"))
        .ok()?;
    let caller = Caller {
        initiator,
        role,
        address: peer
            .pid()
            .map_or("unix".into(), |pid| format!("unix, process {pid}")),
        bucket: Bucket::new(limits.calls_per_second),
    };
    let stream = LocalStream::new(stream);
    Some(Connection::new(stream, caller, place, limits.request()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(group: &str) -> Config {
        Config {
            socket_group: Some(group.to_owned()),
            ..Config::default()
        }
    }

    #[test]
    fn a_peer_has_the_highest_role_that_its_groups_give() {
        let groups = Groups {
            admin: Some(10),
            operator: Some(20),
            viewer: Some(30),
        };
        for (uid, of, role) in [
            (0, &[][..], Some(Role::Admin)),
            (1, &[10, 30], Some(Role::Admin)),
            (1, &[30, 20], Some(Role::Operator)),
            (1, &[30], Some(Role::Viewer)),
            (1, &[1], None),
            (1, &[], None),
        ] {
            assert_eq!(groups.role(uid, of), role, "{uid} {of:?}");
        }
        assert_eq!(Groups::default().role(1, &[0]), None);
        assert_eq!((groups.mode(), Groups::default().mode()), (0o666, 0o600));
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_living_or_foreign_file_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let socket = Socket::bind(&path, &config("0")).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
        assert!(
            Socket::bind(&path, &config("0"))
                .unwrap_err()
                .to_string()
                .contains("another program")
        );
        drop(socket);
        assert!(!path.exists());
        fs::write(&path, "x").unwrap();
        assert!(
            Socket::bind(&path, &config("0"))
                .unwrap_err()
                .to_string()
                .contains("no socket")
        );
    }

    #[test]
    fn a_configured_group_must_exist() {
        assert!(Groups::find(&config("nonexistent-group")).is_err());
        let viewers = Config {
            viewer_group: Some("nonexistent-group".into()),
            ..config("1234")
        };
        assert!(Groups::find(&viewers).is_err());
        assert_eq!(Groups::find(&config("1234")).unwrap().admin, Some(1234));
        assert_eq!(Groups::find(&config("root")).unwrap().admin, Some(0));
    }
}
