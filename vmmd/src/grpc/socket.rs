//! The API's UNIX socket.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use rustix::{fs::XattrFlags, io::Errno};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::mpsc,
    time::sleep,
};
use vmmd_host::{socket, sys};
use vmmd_objects::context::Initiator;

use super::{authority::LocalStream, connection::Connection};
use crate::{
    auth::{Bucket, Caller, Places, Role},
    config::{Config, Limits},
};

/// After a failed accept, as when descriptors have run out.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The group of admins when none is configured.
const DEFAULT_GROUP: &str = "vmmd";

/// The group of agents when none is configured. The package makes it, and the unit of the Kubernetes agent is in it.
const DEFAULT_AGENT_GROUP: &str = "vmmd-agents";

/// The extended attribute that has a file's access control list (acl(5)), and the numbers of its format
/// (`linux/posix_acl_xattr.h`).
const ACL: &str = "system.posix_acl_access";
const ACL_VERSION: u32 = 2;
const ACL_USER_OBJ: u16 = 0x01;
const ACL_GROUP_OBJ: u16 = 0x04;
const ACL_GROUP: u16 = 0x08;
const ACL_MASK: u16 = 0x10;
const ACL_OTHER: u16 = 0x20;
const ACL_UNDEFINED_ID: u32 = u32::MAX;
/// Read and write, as in a mode. A connect to the socket needs write permission.
const READ_WRITE: u16 = 0o6;

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
    agent: Option<u32>,
}

impl Groups {
    /// Asks the name service. A group that is configured must exist; the default ones need not.
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
            agent: match &config.agent_group {
                Some(name) => Some(group_id(name)?),
                None => sys::group_id(DEFAULT_AGENT_GROUP)?,
            },
        })
    }

    /// The mode of the socket without what [`Groups::acl`] adds.
    fn mode(&self) -> u32 {
        if self.admin.is_some() { 0o660 } else { 0o600 }
    }

    /// The groups beside that of admins, each once and in the order of their numbers.
    fn others(&self) -> BTreeSet<u32> {
        let groups = [self.operator, self.viewer, self.agent];
        groups.into_iter().flatten().collect()
    }

    /// The access control list of the socket: a file has one group only, and each of the other groups has an entry. `None`
    /// when there are no other groups.
    fn acl(&self) -> Option<Vec<u8>> {
        let others = self.others();
        if others.is_empty() {
            return None;
        }
        let of_group = if self.admin.is_some() { READ_WRITE } else { 0 };
        let mut list = ACL_VERSION.to_le_bytes().to_vec();
        // In the order of the tags, as the kernel wants them.
        let mut add = |tag: u16, rights: u16, id: u32| {
            list.extend(tag.to_le_bytes());
            list.extend(rights.to_le_bytes());
            list.extend(id.to_le_bytes());
        };
        add(ACL_USER_OBJ, READ_WRITE, ACL_UNDEFINED_ID);
        add(ACL_GROUP_OBJ, of_group, ACL_UNDEFINED_ID);
        for group in others {
            add(ACL_GROUP, READ_WRITE, group);
        }
        add(ACL_MASK, READ_WRITE, ACL_UNDEFINED_ID);
        add(ACL_OTHER, 0, ACL_UNDEFINED_ID);
        Some(list)
    }

    /// Lets only root and the configured groups open the socket. A file system without access
    /// control lists cannot express several groups. Then the socket is open to all users, and the
    /// daemon closes the connections of users without a role at once.
    fn permit(&self, path: &Path) -> io::Result<()> {
        chown(path, None, self.admin)?;
        fs::set_permissions(path, fs::Permissions::from_mode(self.mode()))?;
        let Some(list) = self.acl() else { return Ok(()) };
        match rustix::fs::setxattr(path, ACL, &list, XattrFlags::empty()) {
            Err(Errno::OPNOTSUPP) => {
                tracing::info!(
                    "{}: no access control lists: everybody can connect",
                    path.display()
                );
                fs::set_permissions(path, fs::Permissions::from_mode(0o666))
            }
            result => Ok(result?),
        }
    }

    /// Returns the highest role of a peer by its user id and all of its groups. Agent precedes
    /// operator: an agent can create VMs, which an operator cannot, and a program in the agents'
    /// group must work regardless of its user's other groups. A user that needs both roles must be
    /// an admin.
    fn role(&self, uid: u32, groups: &[u32]) -> Option<Role> {
        let is_in = |group: Option<u32>| group.is_some_and(|group| groups.contains(&group));
        if uid == 0 || is_in(self.admin) {
            Some(Role::Admin)
        } else if is_in(self.agent) {
            Some(Role::Agent)
        } else if is_in(self.operator) {
            Some(Role::Operator)
        } else {
            is_in(self.viewer).then_some(Role::Viewer)
        }
    }
}

impl Socket {
    /// Binds `path`, for root and the groups of the configuration: see [`socket::bind`].
    pub fn bind(path: &Path, config: &Config) -> io::Result<Self> {
        let groups = Groups::find(config)?;
        Ok(Self {
            listener: socket::bind(path, |path| groups.permit(path))?,
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

/// Returns the connection of a peer with a role. A peer without a role is disconnected.
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
    fn a_peer_has_the_role_of_its_groups_that_may_most() {
        let groups = Groups {
            admin: Some(10),
            operator: Some(20),
            viewer: Some(30),
            agent: Some(40),
        };
        for (uid, of, role) in [
            (0, &[][..], Some(Role::Admin)),
            (1, &[10, 30], Some(Role::Admin)),
            (1, &[30, 20], Some(Role::Operator)),
            (1, &[30], Some(Role::Viewer)),
            (1, &[40], Some(Role::Agent)),
            (1, &[40, 10], Some(Role::Admin)),
            (1, &[20, 40], Some(Role::Agent)),
            (1, &[30, 40], Some(Role::Agent)),
            (1, &[1], None),
            (1, &[], None),
        ] {
            assert_eq!(groups.role(uid, of), role, "{uid} {of:?}");
        }
        assert_eq!(Groups::default().role(1, &[0]), None);
        assert_eq!((groups.mode(), Groups::default().mode()), (0o660, 0o600));
    }

    #[test]
    fn groups_other_than_admins_are_in_the_access_control_list() {
        assert_eq!(Groups::default().acl(), None);
        let only_admins = Groups {
            admin: Some(10),
            ..Groups::default()
        };
        assert_eq!(only_admins.acl(), None);
        let groups = Groups {
            admin: None,
            operator: Some(0x0102),
            viewer: Some(7),
            agent: Some(7),
        };
        let entries = [
            [1, 0, 6, 0, 255, 255, 255, 255],
            [4, 0, 0, 0, 255, 255, 255, 255],
            [8, 0, 6, 0, 7, 0, 0, 0],
            [8, 0, 6, 0, 2, 1, 0, 0],
            [16, 0, 6, 0, 255, 255, 255, 255],
            [32, 0, 0, 0, 255, 255, 255, 255],
        ];
        assert_eq!(
            groups.acl(),
            Some([&[2, 0, 0, 0], entries.as_flattened()].concat())
        );
    }

    #[tokio::test]
    async fn others_than_the_groups_can_not_open_the_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let config = Config {
            agent_group: Some("990018".into()),
            ..config("0")
        };
        let _socket = Socket::bind(&path, &config).unwrap();
        let mut list = [0; 128];
        let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        match rustix::fs::getxattr(&path, ACL, &mut list) {
            Ok(length) => {
                assert_eq!(mode, 0o660);
                let groups = Groups::find(&config).unwrap();
                assert_eq!(list.get(..length), groups.acl().as_deref());
            }
            // A file system without access control lists.
            Err(_) => assert_eq!(mode, 0o666),
        }
    }

    #[tokio::test]
    async fn stale_socket_is_replaced_and_other_files_are_not() {
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
        let agents = Config {
            agent_group: Some("nonexistent-group".into()),
            ..config("1234")
        };
        assert!(Groups::find(&agents).is_err());
        assert_eq!(Groups::find(&config("1234")).unwrap().admin, Some(1234));
        assert_eq!(Groups::find(&config("root")).unwrap().admin, Some(0));
    }
}
