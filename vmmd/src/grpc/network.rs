//! `vmmd.v1.NetworkService`.

mod kind;

use std::sync::Arc;

use tonic::{Request, Response, Status};
use vmmd_api::v1::{self, network_service_server::NetworkService};
use vmmd_network::NetworkKind;
use vmmd_objects::{
    registry::Kind as _,
    request::{once, to_completion},
};

use super::{
    filter::Filter,
    mask::Mask,
    objects::{Stream, Wanted, get, list, watch},
};
use crate::host::Host;

/// The service.
#[derive(Debug)]
pub struct Networks {
    host: Arc<Host>,
}

impl Networks {
    /// Over the networks of `host`.
    pub fn new(host: Arc<Host>) -> Self {
        Self { host }
    }
}

#[tonic::async_trait]
impl NetworkService for Networks {
    async fn create_network(
        &self,
        request: Request<v1::CreateNetworkRequest>,
    ) -> Result<Response<v1::CreateNetworkResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let create = async move { host.networks.create(host.for_networks(), request, &context).await };
            let network = to_completion(create).await?;
            Ok(v1::CreateNetworkResponse {
                network: Some(network),
            })
        })
        .await
    }

    async fn get_network(
        &self,
        request: Request<v1::GetNetworkRequest>,
    ) -> Result<Response<v1::GetNetworkResponse>, Status> {
        let network = get::<NetworkKind>(&self.host, &request.get_ref().name).await?;
        Ok(Response::new(v1::GetNetworkResponse {
            network: Some(network),
        }))
    }

    async fn list_networks(
        &self,
        request: Request<v1::ListNetworksRequest>,
    ) -> Result<Response<v1::ListNetworksResponse>, Status> {
        let request = request.get_ref();
        let wanted = Wanted {
            filter: Filter::of_objects(NetworkKind::NAME, request.filter.as_ref())?,
            mask: Mask::default(),
            page_size: request.page_size,
            page_token: &request.page_token,
        };
        let page = list::<NetworkKind>(&self.host, wanted).await?;
        Ok(Response::new(v1::ListNetworksResponse {
            networks: page.objects,
            next_page_token: page.next_page_token,
            cursor: page.cursor,
        }))
    }

    type WatchNetworksStream = Stream<NetworkKind>;

    async fn watch_networks(
        &self,
        request: Request<v1::WatchNetworksRequest>,
    ) -> Result<Response<Self::WatchNetworksStream>, Status> {
        let request = request.get_ref();
        let filter = Filter::of_objects(NetworkKind::NAME, request.filter.as_ref())?;
        let stream = watch::<NetworkKind>(&self.host, filter, Mask::default(), &request.cursor)?;
        Ok(Response::new(stream))
    }

    async fn update_network(
        &self,
        request: Request<v1::UpdateNetworkRequest>,
    ) -> Result<Response<v1::UpdateNetworkResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let update = async move {
                host.networks
                    .update(host.for_networks(), &request, &context)
                    .await
            };
            let network = to_completion(update).await?;
            Ok(v1::UpdateNetworkResponse {
                network: Some(network),
            })
        })
        .await
    }

    async fn delete_network(
        &self,
        request: Request<v1::DeleteNetworkRequest>,
    ) -> Result<Response<v1::DeleteNetworkResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let delete = async move {
                host.networks
                    .delete(host.for_networks(), &request.name, &context)
                    .await
            };
            to_completion(delete).await?;
            Ok(v1::DeleteNetworkResponse {})
        })
        .await
    }
}
