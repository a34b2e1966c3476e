//! The metadata service of a network: HTTP at 169.254.169.254 for the guests whose NICs ask for it.
//!
//! The packet filter leads connections of these NICs to a socket on the bridge, and drops those of
//! all others. It also guarantees the source address, by which the [`Table`] names the VM. The
//! documents of a VM are a file that the daemon writes for the length of a run, in a folder that
//! only this helper can enter. The service reads the file for each request, and keeps nothing.
//!
//! - [`http`]: the parser of a request, and the form of an answer.
//! - [`tree`]: the documents by their paths.
//! - [`token`]: tokens of a session.

mod http;
mod token;
mod tree;

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use rustix::{
    event::{PollFd, PollFlags},
    net::{SocketFlags, accept_with},
};
use serde::{Deserialize, Serialize};

use self::{
    http::{Method, Outcome, Request, Response},
    token::Tokens,
    tree::Requester,
};
use super::{Host, Table};

/// Folder of the documents, in that of the helper. Only the helper can enter it.
pub const FOLDER: &str = "metadata";
/// Address of the service for guests (RFC 3927).
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
/// Port of the helper on the bridge, where the packet filter leads connections to port 80 of
/// [`ADDRESS`]. Only root of the node can open it.
pub const PORT: u16 = 254;
/// Connections of all guests, and of one.
const MAX_CONNECTIONS: usize = 32;
const MAX_CONNECTIONS_OF_GUEST: usize = 4;
/// Time for a request and its answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest file of documents in bytes: four documents of 128 KiB in base64, and 64 keys.
const MAX_FILE: u64 = 2 << 20;

/// Documents of a VM, as those of its NoCloud disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instance {
    /// `instance-id` of cloud-init.
    pub instance_id: String,
    /// Host name of the guest.
    pub hostname: String,
    /// Lines of authorized_keys.
    pub public_keys: Vec<String>,
    /// By name: `meta-data`, `user-data`, `vendor-data`, `network-config`, as far as they exist.
    pub documents: BTreeMap<String, Document>,
}

/// A document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Document(pub Vec<u8>);

impl Serialize for Document {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let coded = String::deserialize(deserializer)?;
        STANDARD.decode(coded).map(Self).map_err(serde::de::Error::custom)
    }
}

/// The service of a network.
#[derive(Debug)]
pub struct Service {
    listener: Option<TcpListener>,
    folder: PathBuf,
    tokens: Tokens,
    clients: Vec<Client>,
}

/// A connection with one request.
#[derive(Debug)]
struct Client {
    address: Ipv4Addr,
    stream: TcpStream,
    input: Vec<u8>,
    /// The rest of the answer; `None` before the request is complete.
    output: Option<Vec<u8>>,
    deadline: Instant,
}

/// State of a connection after a read.
#[derive(Debug)]
enum Read {
    /// The client may send more.
    More,
    /// The client sends no more.
    End,
}

impl Service {
    /// The service on a listening socket, with the documents in `folder`.
    ///
    /// # Errors
    ///
    /// The system has no random numbers.
    pub fn open(listener: Option<TcpListener>, folder: impl Into<PathBuf>) -> io::Result<Self> {
        Ok(Self {
            listener,
            folder: folder.into(),
            tokens: Tokens::new()?,
            clients: Vec::new(),
        })
    }

    /// Adds the sockets that a [`Self::turn`] waits for.
    pub fn watch<'a>(&'a self, watched: &mut Vec<PollFd<'a>>) {
        watched.extend(
            self.listener
                .iter()
                .map(|listener| PollFd::new(listener, PollFlags::IN)),
        );
        watched.extend(self.clients.iter().map(|client| {
            let sends = client.output.is_some();
            PollFd::new(&client.stream, if sends { PollFlags::OUT } else { PollFlags::IN })
        }));
    }

    /// When [`Self::turn`] has something to do without a packet.
    pub fn deadline(&self) -> Option<Instant> {
        self.clients.iter().map(|client| client.deadline).min()
    }

    /// Accepts, reads and answers what can be.
    pub fn turn(&mut self, table: &Table, now: Instant) {
        self.accept(table, now);
        let (folder, tokens) = (&self.folder, &self.tokens);
        self.clients.retain_mut(|client| {
            let read = client.read();
            let lives = client.deadline > now && read.is_ok();
            if lives && client.output.is_none() {
                client.output = answer(&client.input, client.address, table, folder, tokens, now);
            }
            let is_cut = client.output.is_none() && matches!(read, Ok(Read::End));
            lives && !is_cut && client.write().is_ok_and(|sent| !sent)
        });
    }

    fn accept(&mut self, table: &Table, now: Instant) {
        let Some(listener) = &self.listener else {
            return;
        };
        while let Ok(stream) = accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
            let stream = TcpStream::from(stream);
            let Ok(IpAddr::V4(address)) = stream.peer_addr().map(|peer| peer.ip()) else {
                continue;
            };
            let own = self.clients.iter().filter(|client| client.address == address);
            let is_full = self.clients.len() >= MAX_CONNECTIONS || own.count() >= MAX_CONNECTIONS_OF_GUEST;
            if is_full || host(table, address).is_none() {
                continue;
            }
            self.clients.push(Client {
                address,
                stream,
                input: Vec::new(),
                output: None,
                deadline: now + PATIENCE,
            });
        }
    }
}

impl Client {
    /// Reads at most a request.
    fn read(&mut self) -> io::Result<Read> {
        let mut chunk = [0; 1024];
        while self.output.is_none() && self.input.len() <= http::MAX_HEAD {
            match self.stream.read(&mut chunk) {
                Ok(0) => return Ok(Read::End),
                Ok(length) => self.input.extend(chunk.get(..length).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(Read::More)
    }

    /// Writes as much as the socket takes. True when all is written.
    fn write(&mut self) -> io::Result<bool> {
        let Some(output) = &mut self.output else {
            return Ok(false);
        };
        while !output.is_empty() {
            match self.stream.write(output) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(length) => drop(output.drain(..length)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

/// The NIC with an address and the service: its MAC address and the rest.
fn host(table: &Table, address: Ipv4Addr) -> Option<(&str, &Host)> {
    let mut hosts = table.hosts.iter();
    let (mac, host) = hosts.find(|(_, host)| host.address == Some(address))?;
    host.metadata.as_ref().map(|_| (mac.as_str(), host))
}

/// The bytes of the answer to a request from this address; `None` while it is incomplete.
fn answer(
    input: &[u8],
    address: Ipv4Addr,
    table: &Table,
    folder: &Path,
    tokens: &Tokens,
    now: Instant,
) -> Option<Vec<u8>> {
    let request = match http::parse(input) {
        Outcome::Incomplete => return None,
        Outcome::Refused(status) => return Some(Response::empty(status).bytes(false)),
        Outcome::Request(request) => request,
    };
    let response = match host(table, address) {
        Some((mac, host)) => {
            let vm = host.metadata.as_deref().unwrap_or_default();
            let requester = Requester {
                mac,
                address,
                mask: table.ipv4.as_ref().map(|ipv4| ipv4.mask),
            };
            let load = || load(&folder.join(vm));
            respond(&request, &format!("{vm} {mac}"), &requester, load, tokens, now)
        }
        None => Response::empty(404),
    };
    Some(response.bytes(request.method == Method::Head))
}

/// The answer to a guest. A token is valid for the NIC `owner`.
fn respond(
    request: &Request,
    owner: &str,
    requester: &Requester<'_>,
    load: impl FnOnce() -> Option<Instance>,
    tokens: &Tokens,
    now: Instant,
) -> Response {
    // A proxy in the guest forwards requests of others.
    if request.is_forwarded {
        return Response::empty(403);
    }
    if request.method == Method::Put {
        return match request.ttl.map(Duration::from_secs) {
            _ if request.path != token::PATH => Response::empty(405),
            Some(ttl) if token::TTL.contains(&ttl) => Response::token(tokens.make(owner, ttl, now), ttl),
            _ => Response::empty(400),
        };
    }
    if let Some(token) = &request.token
        && !tokens.is_valid(token, owner, now)
    {
        return Response::empty(401);
    }
    let content = load().and_then(|instance| tree::get(&instance, requester, &request.path));
    content.map_or(Response::empty(404), Response::content)
}

/// The documents of a running VM.
fn load(path: &Path) -> Option<Instance> {
    let mut text = Vec::new();
    let file = File::open(path).ok()?;
    file.take(MAX_FILE).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

/// Parses a request, and makes the answer of a service with a document. For fuzzing.
///
/// # Panics
///
/// The answer is not an answer of HTTP.
#[cfg(any(test, feature = "fuzzing"))]
#[allow(clippy::expect_used, reason = "panics are the result of fuzzing")]
pub fn fuzz(data: &[u8]) {
    let tokens = Tokens::new().expect("random numbers");
    let Outcome::Request(request) = http::parse(data) else {
        return;
    };
    let requester = Requester {
        mac: "52:54:00:00:00:01",
        address: Ipv4Addr::new(10, 80, 0, 2),
        mask: None,
    };
    let load = || Some(Instance::default());
    let response = respond(&request, "vm", &requester, load, &tokens, Instant::now());
    let bytes = response.bytes(request.method == Method::Head);
    assert!(bytes.starts_with(b"HTTP/1.1 ") && bytes.windows(4).any(|end| end == b"\r\n\r\n"));
}

#[cfg(test)]
mod tests;
