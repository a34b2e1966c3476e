//! Kinds of objects of the node, and the calls that every kind has.

use std::future::Future;

use serde::Serialize;
use tonic::{Response, Status, Streaming};
use vmmd_api::v1::{self, ObjectFilter, VmFilter, WatchEventType};

use super::{
    Client, QUICK, WORK, about_disk, about_image, about_network, about_snapshot, about_vm, call,
    empty_answer, send,
};
use crate::failure::{Failure, Result};

/// Selects objects of a kind; all conditions must hold.
#[derive(Clone, Debug, Default)]
pub struct Query {
    /// One of these names; any when empty.
    pub names: Vec<String>,
    /// Selectors of labels.
    pub labels: Vec<String>,
    /// One of these phases, for VMs only; any when empty.
    pub phases: Vec<v1::VmPhase>,
    /// The caller needs only the names of the objects.
    pub only_names: bool,
}

impl From<&Query> for ObjectFilter {
    fn from(query: &Query) -> Self {
        Self {
            labels: query.labels.clone(),
            names: query.names.clone(),
        }
    }
}

impl From<&Query> for VmFilter {
    fn from(query: &Query) -> Self {
        Self {
            labels: query.labels.clone(),
            phases: query.phases.iter().map(|phase| (*phase).into()).collect(),
            names: query.names.clone(),
        }
    }
}

/// A kind of objects of the node. Objects of a kind differ in their names.
pub trait Kind: Clone + Default + Serialize + std::fmt::Debug + Send + Sync + 'static {
    /// Word before a name, as in `vm/web`.
    const WORD: &'static str;
    /// Kind in references and events.
    const KIND: &'static str;
    /// One object, in a sentence.
    const ONE: &'static str;
    /// Several objects, in a sentence.
    const MANY: &'static str;

    /// Metadata of the object.
    fn metadata(&self) -> Option<&v1::ObjectMetadata>;

    /// Adds the object and a command that helps to a failure.
    fn about(failure: Failure, name: &str) -> Failure;

    /// Asks for one object.
    fn fetch(client: &Client, name: &str) -> impl Future<Output = Result<Option<Self>>> + Send;

    /// Asks for a page of a list; also returns the token of the next page.
    fn page(
        client: &Client,
        query: &Query,
        token: String,
    ) -> impl Future<Output = Result<(Vec<Self>, String)>> + Send;

    /// Deletes an object.
    fn delete(client: &Client, name: &str) -> impl Future<Output = Result<()>> + Send;

    /// Name of the object.
    fn name(&self) -> &str {
        self.metadata().map_or("", |metadata| &metadata.name)
    }
}

/// A kind whose objects can be watched. The second column of its table is the phase or readiness.
pub trait Watched: Kind {
    /// Event of a watch.
    type Change: 'static;

    /// Opens a watch after a cursor.
    fn watch(
        client: &Client,
        query: &Query,
        cursor: String,
    ) -> impl Future<Output = Result<Response<Streaming<Self::Change>>, Status>>;

    /// Type, object and cursor of an event.
    fn parts(change: Self::Change) -> (WatchEventType, Option<Self>, String);
}

impl Client {
    /// Returns the object with this name.
    pub async fn object<K: Kind>(&self, name: &str) -> Result<K> {
        let found = K::fetch(self, name).await;
        found
            .map_err(|failure| K::about(failure, name))?
            .ok_or_else(empty_answer)
    }

    /// Returns all objects of a query, sorted by name.
    pub async fn objects<K: Kind>(&self, query: &Query) -> Result<Vec<K>> {
        let (mut objects, mut token) = (Vec::new(), String::new());
        loop {
            let (page, next) = K::page(self, query, token).await?;
            objects.extend(page);
            if next.is_empty() {
                return Ok(objects);
            }
            token = next;
        }
    }
}

macro_rules! kind {
    (
        $Object:ident: $word:literal, $kind:literal, $one:literal, $many:literal, $about:ident;
        $service:ident . $get:ident($Get:ident) -> $object:ident;
        $list:ident($request:expr) -> $objects:ident;
        $delete:ident($Delete:ident)
    ) => {
        impl Kind for v1::$Object {
            const WORD: &'static str = $word;
            const KIND: &'static str = $kind;
            const ONE: &'static str = $one;
            const MANY: &'static str = $many;

            fn metadata(&self) -> Option<&v1::ObjectMetadata> {
                self.metadata.as_ref()
            }

            fn about(failure: Failure, name: &str) -> Failure {
                $about(failure, name)
            }

            async fn fetch(client: &Client, name: &str) -> Result<Option<Self>> {
                let name = name.to_owned();
                let mut service = client.$service.clone();
                Ok(call(QUICK, service.$get(v1::$Get { name })).await?.$object)
            }

            async fn page(client: &Client, query: &Query, token: String) -> Result<(Vec<Self>, String)> {
                let mut service = client.$service.clone();
                let page = call(QUICK, service.$list($request(query, token))).await?;
                Ok((page.$objects, page.next_page_token))
            }

            async fn delete(client: &Client, name: &str) -> Result<()> {
                let request = v1::$Delete {
                    name: name.to_owned(),
                    ..Default::default()
                };
                let answer = send!(client.limit(WORK), client.$service, $delete, request).await;
                answer.map(drop)
            }
        }
    };
}

macro_rules! watched {
    ($Object:ident . $object:ident: $service:ident . $watch:ident($Request:ident) -> $Change:ident) => {
        impl Watched for v1::$Object {
            type Change = v1::$Change;

            async fn watch(
                client: &Client,
                query: &Query,
                cursor: String,
            ) -> Result<Response<Streaming<Self::Change>>, Status> {
                #[allow(clippy::needless_update, reason = "requests for VMs have more fields")]
                let request = v1::$Request {
                    filter: Some(query.into()),
                    cursor,
                    ..Default::default()
                };
                client.$service.clone().$watch(request).await
            }

            fn parts(change: Self::Change) -> (WatchEventType, Option<Self>, String) {
                (change.r#type(), change.$object, change.cursor)
            }
        }
    };
}

kind! {
    Vm: "vm", "Vm", "a VM", "VMs", about_vm;
    vms.get_vm(GetVmRequest) -> vm;
    list_vms(|query: &Query, page_token| v1::ListVmsRequest {
        filter: Some(query.into()),
        fields: query.only_names.then(|| "metadata.name".to_owned()).into_iter().collect(),
        page_token,
        ..Default::default()
    }) -> vms;
    delete_vm(DeleteVmRequest)
}
kind! {
    Disk: "disk", "Disk", "a disk", "disks", about_disk;
    disks.get_disk(GetDiskRequest) -> disk;
    list_disks(|query: &Query, page_token| v1::ListDisksRequest {
        filter: Some(query.into()),
        page_token,
        ..Default::default()
    }) -> disks;
    delete_disk(DeleteDiskRequest)
}
kind! {
    Image: "image", "Image", "an image", "images", about_image;
    images.get_image(GetImageRequest) -> image;
    list_images(|query: &Query, page_token| v1::ListImagesRequest {
        filter: Some(query.into()),
        page_token,
        ..Default::default()
    }) -> images;
    delete_image(DeleteImageRequest)
}
kind! {
    Network: "network", "Network", "a network", "networks", about_network;
    networks.get_network(GetNetworkRequest) -> network;
    list_networks(|query: &Query, page_token| v1::ListNetworksRequest {
        filter: Some(query.into()),
        page_token,
        ..Default::default()
    }) -> networks;
    delete_network(DeleteNetworkRequest)
}
kind! {
    Snapshot: "snapshot", "Snapshot", "a snapshot", "snapshots", about_snapshot;
    snapshots.get_snapshot(GetSnapshotRequest) -> snapshot;
    list_snapshots(|_: &Query, page_token| v1::ListSnapshotsRequest {
        page_token,
        ..Default::default()
    }) -> snapshots;
    delete_snapshot(DeleteSnapshotRequest)
}
watched!(Vm.vm: vms.watch_vms(WatchVmsRequest) -> WatchVmsResponse);
watched!(Disk.disk: disks.watch_disks(WatchDisksRequest) -> WatchDisksResponse);
watched!(Image.image: images.watch_images(WatchImagesRequest) -> WatchImagesResponse);
watched!(Network.network: networks.watch_networks(WatchNetworksRequest) -> WatchNetworksResponse);
