//! The connection to vmmd, on its UNIX socket or over TCP.

use std::{fmt, future::Future, io, path::Path, sync::Arc, time::Duration};

use hyper_util::rt::TokioIo;
use proto::{
    rule::Mutation,
    v1::{
        self, disk_service_client::DiskServiceClient, event_service_client::EventServiceClient,
        node_service_client::NodeServiceClient, operation_service_client::OperationServiceClient,
        vm_service_client::VmServiceClient,
    },
};
use tokio::net::UnixStream;
use tonic::{
    Response, Status,
    codegen::http::Uri,
    transport::{Channel, Endpoint},
};

use uuid::Uuid;

use crate::{
    args::Connection,
    contexts::{self, Target},
    failure::{Code, Failure, Result},
    tls::Remote,
};

/// How long the daemon may take to answer what is no work for it.
pub const QUICK: Duration = Duration::from_secs(30);
/// How long it may take for what is: building a machine, ending a process, on a loaded node.
pub const WORK: Duration = Duration::from_secs(180);
/// How long it may take to copy or reserve the whole of a disk. A daemon that ends is noticed at once in any case.
pub const COPY: Duration = Duration::from_secs(24 * 3600);

/// How long a daemon that went away is given to come back before it is asked again.
pub const RESTART: Duration = Duration::from_secs(1);

/// The command that helps who names a disk that is not there.
pub const DISKS: &str = "`vmmctl get disk` lists the disks there are";

/// A connected daemon.
#[derive(Clone, Debug)]
pub struct Client {
    /// Its VMs.
    pub vms: VmServiceClient<Channel>,
    /// Its disks.
    pub disks: DiskServiceClient<Channel>,
    /// Its node.
    pub nodes: NodeServiceClient<Channel>,
    /// What has happened on it.
    pub events: EventServiceClient<Channel>,
    /// What takes long there.
    pub operations: OperationServiceClient<Channel>,
}

impl Client {
    /// Connects to the daemon that the command line means.
    pub async fn connect(given: &Connection) -> Result<Self> {
        let channel = match contexts::target(given)? {
            Target::Socket(socket) => local(&socket).await?,
            Target::Remote(remote) => over_tcp(remote).await?,
        };
        Ok(Self {
            vms: VmServiceClient::new(channel.clone()),
            disks: DiskServiceClient::new(channel.clone()),
            nodes: NodeServiceClient::new(channel.clone()),
            events: EventServiceClient::new(channel.clone()),
            operations: OperationServiceClient::new(channel),
        })
    }

    /// The VM with this name.
    pub async fn get(&self, name: &str) -> Result<v1::Vm> {
        let request = v1::GetVmRequest {
            name: name.to_owned(),
        };
        let response = call(QUICK, self.vms.clone().get_vm(request)).await;
        let vm = response.map_err(|failure| about_vm(failure, name))?.vm;
        vm.ok_or_else(empty_answer)
    }

    /// All VMs of a filter, by name.
    pub async fn list(&self, filter: v1::VmFilter) -> Result<Vec<v1::Vm>> {
        let mut request = v1::ListVmsRequest {
            filter: Some(filter),
            ..Default::default()
        };
        let mut vms = Vec::new();
        loop {
            let page = call(QUICK, self.vms.clone().list_vms(request.clone())).await?;
            vms.extend(page.vms);
            if page.next_page_token.is_empty() {
                return Ok(vms);
            }
            request.page_token = page.next_page_token;
        }
    }

    /// The disk with this name.
    pub async fn disk(&self, name: &str) -> Result<v1::Disk> {
        let request = v1::GetDiskRequest {
            name: name.to_owned(),
        };
        let response = call(QUICK, self.disks.clone().get_disk(request)).await;
        let disk = response.map_err(|failure| about_disk(failure, name))?.disk;
        disk.ok_or_else(empty_answer)
    }

    /// All disks.
    pub async fn list_disks(&self) -> Result<Vec<v1::Disk>> {
        let request = v1::ListDisksRequest {};
        Ok(call(QUICK, self.disks.clone().list_disks(request)).await?.disks)
    }

    /// What a running VM uses and has done.
    pub async fn stats(&self, name: &str) -> Result<v1::VmStats> {
        let request = v1::GetVmStatsRequest {
            name: name.to_owned(),
        };
        let response = call(QUICK, self.vms.clone().get_vm_stats(request)).await;
        let stats = response.map_err(|failure| about_vm(failure, name))?.stats;
        stats.ok_or_else(empty_answer)
    }

    /// The newest events of a VM.
    pub async fn events_of(&self, vm: &str, limit: u32) -> Result<Vec<v1::Event>> {
        let filter = v1::EventFilter {
            object_kind: "Vm".into(),
            object_name: vm.to_owned(),
            ..Default::default()
        };
        let request = v1::ListEventsRequest {
            filter: Some(filter),
            limit,
        };
        Ok(call(QUICK, self.events.clone().list_events(request))
            .await?
            .events)
    }

    /// The node.
    pub async fn node(&self) -> Result<v1::Node> {
        let response = call(QUICK, self.nodes.clone().get_node(v1::GetNodeRequest {})).await?;
        response.node.ok_or_else(empty_answer)
    }
}

/// To the daemon that listens on `socket`.
async fn local(socket: &Path) -> Result<Channel> {
    let first = tokio::time::timeout(QUICK, UnixStream::connect(socket)).await;
    let first = first.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    let mut first = Some(first.map_err(|error| unreachable(socket, &error))?);
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let (first, path) = (first.take(), path.clone());
        async move {
            let stream = match first {
                Some(stream) => stream,
                None => UnixStream::connect(path).await?,
            };
            Ok::<_, io::Error>(TokioIo::new(stream))
        }
    });
    // The address is not used: the connector knows where to go.
    let endpoint = Endpoint::from_static("http://vmmd").connect_timeout(QUICK);
    let channel = endpoint.connect_with_connector(connector).await;
    channel.map_err(|error| no_vmmd(socket.display(), &error))
}

/// To the daemon of another node.
async fn over_tcp(remote: Remote) -> Result<Channel> {
    let config = remote.config()?;
    let mut first = Some(remote.open(Arc::clone(&config)).await?);
    let address = remote.address();
    let connector = tower::service_fn(move |_: Uri| {
        let (first, remote, config) = (first.take(), remote.clone(), Arc::clone(&config));
        async move {
            let stream = match first {
                Some(stream) => stream,
                None => {
                    let opened = remote.open(config).await;
                    opened.map_err(|failure| io::Error::other(failure.to_string()))?
                }
            };
            Ok::<_, io::Error>(TokioIo::new(stream))
        }
    });
    let endpoint = Endpoint::from_static("http://vmmd").connect_timeout(QUICK);
    let channel = endpoint.connect_with_connector(connector).await;
    channel.map_err(|error| no_vmmd(address, &error))
}

fn no_vmmd(place: impl fmt::Display, error: &tonic::transport::Error) -> Failure {
    Failure::new(
        Code::Unavailable,
        format!("{place} does not answer as vmmd: {error}"),
    )
}

/// Waits for the answer of a call, at most `limit`.
pub async fn call<T>(limit: Duration, call: impl Future<Output = Result<Response<T>, Status>>) -> Result<T> {
    match tokio::time::timeout(limit, call).await {
        Ok(answer) => Ok(answer?.into_inner()),
        Err(_) => {
            let message = format!("no answer from vmmd within {} s", limit.as_secs());
            Err(Failure::new(Code::Timeout, message).hint("see `journalctl -u vmmd`"))
        }
    }
}

/// Sends a request that changes something, with an id of its own; and once more when the daemon goes away before it has
/// answered: with the id it is not carried out twice.
pub async fn change<Q: Mutation, T, F>(limit: Duration, mut request: Q, send: impl Fn(Q) -> F) -> Result<T>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    request.set_request_id(Uuid::now_v7().to_string());
    match call(limit, send(request.clone())).await {
        Err(failure) if went_away(&failure) => {
            tokio::time::sleep(RESTART).await;
            call(limit, send(request)).await
        }
        answer => answer,
    }
}

/// Whether the daemon was stopped or killed before it answered.
pub fn went_away(failure: &Failure) -> bool {
    failure.code == Code::Unavailable && matches!(&*failure.reason, "" | "DAEMON_STOPPING")
}

/// Sends a request with [`change`]: `send!(limit, client.vms, start_vm, request)`.
macro_rules! send {
    ($limit:expr, $client:ident.$service:ident, $method:ident, $request:expr) => {
        $crate::client::change($limit, $request, |request| {
            let mut service = $client.$service.clone();
            async move { service.$method(request).await }
        })
    };
}
pub(crate) use send;

/// Adds to a failure about a VM its name, and the command that helps.
pub fn about_vm(failure: Failure, name: &str) -> Failure {
    let hint = match &*failure.reason {
        "STILL_RUNNING" => format!("`vmmctl stop {name}`, or `vmmctl delete --force {name}`"),
        "NOT_RUNNING" => format!("`vmmctl start {name}`"),
        "RUN_POLICY" => format!("`vmmctl describe vm {name}` shows the run policy"),
        "VMM_TOO_OLD" => format!("`vmmctl restart {name}`"),
        "VM_PAUSED" => format!("`vmmctl resume {name}`"),
        "VM_EXISTS" => format!("`vmmctl describe vm {name}` shows it"),
        "KVM_UNAVAILABLE" | "KVM_UNUSABLE" | "INSUFFICIENT_MEMORY" => {
            "`vmmctl node` shows what there is".into()
        }
        _ if failure.code == Code::NotFound => "`vmmctl get vm` lists the VMs there are".into(),
        _ => return failure.about("vm", name),
    };
    failure.about("vm", name).hint(hint)
}

/// Adds to a failure about a disk of the node its name, and the command that helps.
pub fn about_disk(failure: Failure, name: &str) -> Failure {
    let hint = match failure.code {
        Code::NotFound => DISKS.into(),
        Code::Conflict => format!("`vmmctl describe disk {name}` shows it"),
        _ => return failure.about("disk", name),
    };
    failure.about("disk", name).hint(hint)
}

/// An answer without its content, which a daemon never sends.
pub fn empty_answer() -> Failure {
    Failure::new(Code::Other, "vmmd sent an empty answer").hint("compare versions with `vmmctl version`")
}

fn unreachable(socket: &Path, error: &io::Error) -> Failure {
    let socket = socket.display();
    match error.kind() {
        io::ErrorKind::NotFound => Failure::new(
            Code::Unavailable,
            format!("vmmd is not running: there is no socket {socket}"),
        )
        .hint("start it with `systemctl start vmmd`, or name another socket with --socket"),
        io::ErrorKind::ConnectionRefused => Failure::new(
            Code::Unavailable,
            format!("vmmd is not running: nobody listens on {socket}"),
        )
        .hint("start it with `systemctl start vmmd`; `journalctl -u vmmd` says why it ended"),
        io::ErrorKind::PermissionDenied => {
            Failure::new(Code::Permission, format!("no permission to use {socket}")).hint(
                "run as root, or as a member of the group vmmd (`usermod -aG vmmd USER`, then log in again)",
            )
        }
        _ => Failure::new(Code::Unavailable, format!("can't connect to {socket}: {error}"))
            .hint("is that the socket of vmmd? --socket names another"),
    }
}
