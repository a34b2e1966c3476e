//! Description of a guest by its agent. The guest chooses all texts and counts, so both are bounded.

use std::{net::IpAddr, sync::Arc, time::Duration};

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::json;
use tokio::time::timeout;
use vmmd_api::v1;
use vmmd_host::{failure::Failure, text};

use super::{Agent, Session, list::First, silent};
use crate::{
    host::Host,
    registry::vms::{Entry, command::Command},
};

/// Time limit for all questions about a guest.
const ALL: Duration = Duration::from_secs(10);
/// An answer is repeated for this time.
const FRESH: Duration = Duration::from_secs(2);
/// Most commands of an agent that are read. Version 9 has 60.
const COMMANDS: usize = 256;
/// Most objects that are passed on.
const INTERFACES: usize = 16;
const ADDRESSES: usize = 8;
const FILE_SYSTEMS: usize = 32;
const USERS: usize = 16;
/// Longest name in bytes, and longest path.
const NAME: usize = 64;
const PATH: usize = 128;

/// Returns the guest of a VM, for a client: as the agent described it a moment ago, or as it does
/// now. The VM's status gets a new answer.
pub async fn look(host: &Arc<Host>, entry: &Entry) -> Result<v1::GuestInfo, Failure> {
    let agent = Agent::of(host, entry)?;
    if let Some(known) = recent(entry) {
        return Ok(known);
    }
    let info = agent.info().await;
    entry.mailbox.offer(Command::Guest(Box::new(info.clone())));
    info
}

/// The guest in the VM's status, if it is fresh.
fn recent(entry: &Entry) -> Option<v1::GuestInfo> {
    let vm = entry.state.borrow();
    let guest = vm.status.as_ref()?.guest.as_ref()?;
    let age = text::now_ms().checked_sub(text::unix_ms(guest.query_time.as_ref()?))?;
    (Duration::from_millis(age) < FRESH).then(|| guest.clone())
}

impl<'a> Agent<'a> {
    /// The agent of a machine that has just opened its channel.
    pub fn new(host: &'a Host, entry: &'a Entry) -> Self {
        Self { host, entry }
    }

    /// Asks about the guest, once for all callers at the same time.
    pub async fn info(&self) -> Result<v1::GuestInfo, Failure> {
        let shared = self.host.agents.share(self.entry.uid);
        let ask = || async {
            // Without the wait for other users of the agent.
            let mut session = self.session().await?;
            let asked = timeout(ALL, ask(&mut session)).await;
            asked.unwrap_or_else(|_| Err(silent()))
        };
        shared.info.get(ask).await
    }
}

/// Asks all questions about the guest.
pub(super) async fn ask(session: &mut Session) -> Result<v1::GuestInfo, Failure> {
    let query_time = text::timestamp(text::now_ms());
    let about: About = session.ask("guest-info", json!({})).await?;
    let os: Option<Os> = optional(session, &about, "guest-get-osinfo").await?;
    let host_name: Option<HostName> = optional(session, &about, "guest-get-host-name").await?;
    let zone: Option<Zone> = optional(session, &about, "guest-get-timezone").await?;
    let interfaces = optional(session, &about, "guest-network-get-interfaces").await?;
    let file_systems = optional(session, &about, "guest-get-fsinfo").await?;
    let users = optional(session, &about, "guest-get-users").await?;
    let interfaces: First<Interface, INTERFACES> = interfaces.unwrap_or_default();
    let file_systems: First<FileSystem, FILE_SYSTEMS> = file_systems.unwrap_or_default();
    let users: First<User, USERS> = users.unwrap_or_default();
    let zone = zone.unwrap_or_default();
    let has_more = |interface: &Interface| interface.ip_addresses.more;
    Ok(v1::GuestInfo {
        query_time,
        agent_version: text::one_line(&about.version, NAME),
        os: os.map(Into::into),
        host_name: text::one_line(&host_name.unwrap_or_default().host_name, PATH),
        time_zone: text::one_line(&zone.zone, NAME),
        utc_offset_seconds: zone.offset,
        incomplete: interfaces.more
            || file_systems.more
            || users.more
            || interfaces.items.iter().any(has_more),
        interfaces: interfaces.items.into_iter().map(Into::into).collect(),
        file_systems: file_systems.items.into_iter().map(Into::into).collect(),
        users: users.items.into_iter().map(Into::into).collect(),
    })
}

/// Asks a question that not every agent, and not every guest, has an answer to.
async fn optional<T: DeserializeOwned>(
    session: &mut Session,
    about: &About,
    command: &str,
) -> Result<Option<T>, Failure> {
    let mut commands = about.supported_commands.items.iter();
    if !commands.any(|supported| supported.enabled && supported.name == command) {
        return Ok(None);
    }
    match session.ask(command, json!({})).await {
        Ok(answer) => Ok(Some(answer)),
        // An error or an invalid answer. The next question has its own answer.
        Err(failure) if failure.reason != "GUEST_AGENT_SILENT" => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// Answer to `guest-info`.
#[derive(Deserialize)]
struct About {
    #[serde(default)]
    version: String,
    #[serde(default)]
    supported_commands: First<Supported, COMMANDS>,
}

#[derive(Deserialize)]
struct Supported {
    name: String,
    enabled: bool,
}

/// Answer to `guest-get-osinfo`.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct Os {
    id: String,
    name: String,
    pretty_name: String,
    version: String,
    version_id: String,
    kernel_release: String,
    machine: String,
}

impl From<Os> for v1::GuestOs {
    fn from(os: Os) -> Self {
        let name = |name: &str| text::one_line(name, NAME);
        Self {
            id: name(&os.id),
            name: name(&os.name),
            pretty_name: text::one_line(&os.pretty_name, PATH),
            version: name(&os.version),
            version_id: name(&os.version_id),
            kernel_release: name(&os.kernel_release),
            machine: name(&os.machine),
        }
    }
}

/// Answer to `guest-get-host-name`.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct HostName {
    host_name: String,
}

/// Answer to `guest-get-timezone`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Zone {
    zone: String,
    offset: i32,
}

/// Element of the answer to `guest-network-get-interfaces`.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Interface {
    name: String,
    #[serde(default)]
    hardware_address: String,
    #[serde(default)]
    ip_addresses: First<Address, ADDRESSES>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Address {
    ip_address: String,
    #[serde(default)]
    prefix: u8,
}

impl From<Interface> for v1::GuestInterface {
    fn from(interface: Interface) -> Self {
        let addresses = interface.ip_addresses.items.iter().filter_map(|address| {
            // A scope (`%eth0`) is the guest's own matter.
            let bare = address.ip_address.split('%').next()?;
            let ip: IpAddr = bare.parse().ok()?;
            Some(format!("{ip}/{}", address.prefix))
        });
        Self {
            addresses: addresses.collect(),
            name: text::one_line(&interface.name, NAME),
            mac: text::one_line(&interface.hardware_address, NAME),
        }
    }
}

/// Element of the answer to `guest-get-fsinfo`.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct FileSystem {
    name: String,
    #[serde(default)]
    mountpoint: String,
    #[serde(default, rename = "type")]
    kind: String,
    total_bytes: Option<u64>,
    used_bytes: Option<u64>,
}

impl From<FileSystem> for v1::GuestFileSystem {
    fn from(file_system: FileSystem) -> Self {
        Self {
            name: text::one_line(&file_system.name, NAME),
            mount_point: text::one_line(&file_system.mountpoint, PATH),
            r#type: text::one_line(&file_system.kind, NAME),
            total_bytes: file_system.total_bytes,
            used_bytes: file_system.used_bytes,
        }
    }
}

/// Element of the answer to `guest-get-users`.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct User {
    user: String,
    /// Seconds of Unix time.
    #[serde(default)]
    login_time: f64,
}

impl From<User> for v1::GuestUser {
    fn from(user: User) -> Self {
        let time = Duration::try_from_secs_f64(user.login_time).ok();
        let time = time.and_then(|time| u64::try_from(time.as_millis()).ok());
        Self {
            name: text::one_line(&user.user, NAME),
            login_time: time.and_then(text::timestamp),
        }
    }
}
