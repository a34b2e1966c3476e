//! The connection to vmmd, and the calls on it.

mod about;
mod call;
mod connect;
mod kind;

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use tonic::transport::Channel;
use vmmd_api::v1::{
    self, disk_service_client::DiskServiceClient, event_service_client::EventServiceClient,
    image_service_client::ImageServiceClient, migration_service_client::MigrationServiceClient,
    network_service_client::NetworkServiceClient, node_service_client::NodeServiceClient,
    operation_service_client::OperationServiceClient, snapshot_service_client::SnapshotServiceClient,
    vm_service_client::VmServiceClient,
};

pub(crate) use self::call::send;
pub use self::{
    about::{DISKS, about_disk, about_image, about_network, about_snapshot, about_vm, empty_answer},
    call::{COPY, RESTART, TRIES_TO_GO_ON, WORK, call, over_restarts, watch_ended, went_away},
    kind::{Kind, Query, Watched},
};
pub use crate::tls::QUICK;
use crate::{
    contexts::{self, Connection, Target},
    failure::Result,
};

/// A connected daemon.
#[derive(Clone, Debug)]
pub struct Client {
    /// Its VMs.
    pub vms: VmServiceClient<Channel>,
    /// Its disks.
    pub disks: DiskServiceClient<Channel>,
    /// Its snapshots.
    pub snapshots: SnapshotServiceClient<Channel>,
    /// Its networks.
    pub networks: NetworkServiceClient<Channel>,
    /// Moves its VMs to other nodes.
    pub migrations: MigrationServiceClient<Channel>,
    /// Its images.
    pub images: ImageServiceClient<Channel>,
    /// Its node.
    pub nodes: NodeServiceClient<Channel>,
    /// Client for the node's events.
    pub events: EventServiceClient<Channel>,
    /// Client for the node's operations.
    pub operations: OperationServiceClient<Channel>,
    /// Time limit for each change; the default of the change when not given.
    timeout: Option<Duration>,
    /// Ids of the changes in progress.
    under_way: Arc<Mutex<BTreeSet<String>>>,
}

impl Client {
    /// Connects to the daemon that the command line selects.
    pub async fn connect(given: &Connection) -> Result<Self> {
        let channel = match contexts::target(given)? {
            Target::Socket(socket) => connect::local(&socket).await?,
            Target::Remote(remote) => connect::over_tcp(remote).await?,
        };
        Ok(Self {
            vms: VmServiceClient::new(channel.clone()),
            disks: DiskServiceClient::new(channel.clone()),
            snapshots: SnapshotServiceClient::new(channel.clone()),
            networks: NetworkServiceClient::new(channel.clone()),
            migrations: MigrationServiceClient::new(channel.clone()),
            images: ImageServiceClient::new(channel.clone()),
            nodes: NodeServiceClient::new(channel.clone()),
            events: EventServiceClient::new(channel.clone()),
            operations: OperationServiceClient::new(channel),
            timeout: None,
            under_way: Arc::default(),
        })
    }

    /// A client with a time limit for changes.
    pub fn with_timeout(&self, timeout: Option<Duration>) -> Self {
        Self {
            timeout: timeout.or(self.timeout),
            ..self.clone()
        }
    }

    /// The VM with this name.
    pub async fn get(&self, name: &str) -> Result<v1::Vm> {
        self.object(name).await
    }

    /// Returns the usage and counters of a running VM.
    pub async fn stats(&self, name: &str) -> Result<v1::VmStats> {
        let request = v1::GetVmStatsRequest {
            name: name.to_owned(),
        };
        let response = call(QUICK, self.vms.clone().get_vm_stats(request)).await;
        let stats = response.map_err(|failure| about_vm(failure, name))?.stats;
        stats.ok_or_else(empty_answer)
    }

    /// The newest events of an object.
    pub async fn events_of(&self, kind: &str, name: &str, most: u32) -> Result<Vec<v1::Event>> {
        let filter = v1::EventFilter {
            object: Some(reference(kind, name)),
            ..Default::default()
        };
        let request = v1::ListEventsRequest {
            filter: Some(filter),
            page_size: most,
            ..Default::default()
        };
        Ok(call(QUICK, self.events.clone().list_events(request))
            .await?
            .events)
    }

    /// All operations of a filter, the newest first.
    pub async fn operations(&self, filter: v1::OperationFilter) -> Result<Vec<v1::Operation>> {
        let mut request = v1::ListOperationsRequest {
            filter: Some(filter),
            ..Default::default()
        };
        let mut operations = Vec::new();
        loop {
            let page = call(QUICK, self.operations.clone().list_operations(request.clone())).await?;
            operations.extend(page.operations);
            if page.next_page_token.is_empty() {
                return Ok(operations);
            }
            request.page_token = page.next_page_token;
        }
    }

    /// The node.
    pub async fn node(&self) -> Result<v1::Node> {
        let response = call(QUICK, self.nodes.clone().get_node(v1::GetNodeRequest {})).await?;
        response.node.ok_or_else(empty_answer)
    }
}

/// The operations in progress on a VM.
pub fn in_progress(vm: &str) -> v1::OperationFilter {
    v1::OperationFilter {
        target: Some(reference("Vm", vm)),
        active: true,
        ..Default::default()
    }
}

/// A reference to an object of the node.
pub fn reference(kind: &str, name: &str) -> v1::ObjectReference {
    v1::ObjectReference {
        kind: kind.to_owned(),
        name: name.to_owned(),
        uid: String::new(),
    }
}
