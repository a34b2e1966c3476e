//! The server of one resource.

use std::pin::Pin;

use futures::{Stream, stream};
use tokio::{net::UnixListener, sync::watch};
use tonic::{Request, Response, Status, transport::Server};

use super::{
    Described, Health, Resource, Settings,
    proto::{
        AllocateRequest, AllocateResponse, ContainerAllocateResponse, DevicePluginOptions, Empty,
        ListAndWatchResponse, Mount, PreStartContainerRequest, PreStartContainerResponse,
        PreferredAllocationRequest, PreferredAllocationResponse,
        device_plugin_server::{DevicePlugin, DevicePluginServer},
    },
};
use crate::launcher::SOCKET_DIRECTORY;

/// Serves a resource on a socket. Returns only after a failure.
pub async fn run(
    listener: UnixListener,
    resource: Resource,
    settings: Settings,
    described: watch::Receiver<Described>,
) -> Result<(), tonic::transport::Error> {
    let connections = stream::unfold(listener, |listener| async {
        let accepted = listener.accept().await.map(|(connection, _)| connection);
        Some((accepted, listener))
    });
    let plugin = Plugin {
        resource,
        settings,
        described,
    };
    Server::builder()
        .add_service(DevicePluginServer::new(plugin))
        .serve_with_incoming(connections)
        .await
}

struct Plugin {
    resource: Resource,
    settings: Settings,
    described: watch::Receiver<Described>,
}

type Lists = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

#[tonic::async_trait]
impl DevicePlugin for Plugin {
    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions::default()))
    }

    type ListAndWatchStream = Lists;

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Lists>, Status> {
        let (resource, max_vms) = (self.resource.clone(), self.settings.max_vms);
        let state = (self.described.clone(), None::<Health>);
        let lists = stream::unfold(state, move |(mut described, mut known)| {
            let resource = resource.clone();
            async move {
                // Most descriptions of the node change nothing here.
                loop {
                    let health = Health::of(&described.borrow_and_update());
                    if known.as_ref() != Some(&health) {
                        let devices = resource.devices(max_vms, &health);
                        known = Some(health);
                        return Some((Ok(ListAndWatchResponse { devices }), (described, known)));
                    }
                    described.changed().await.ok()?;
                }
            }
        });
        Ok(Response::new(Box::pin(lists)))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        Ok(Response::new(PreferredAllocationResponse::default()))
    }

    /// Access to vmmd is given by the mount of its directory.
    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let mount = Mount {
            container_path: SOCKET_DIRECTORY.to_owned(),
            host_path: self.settings.pods.clone(),
            read_only: true,
        };
        let response = ContainerAllocateResponse {
            mounts: match self.resource.model {
                None => vec![mount],
                Some(_) => Vec::new(),
            },
        };
        let count = request.get_ref().container_requests.len();
        Ok(Response::new(AllocateResponse {
            container_responses: vec![response; count],
        }))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse::default()))
    }
}
