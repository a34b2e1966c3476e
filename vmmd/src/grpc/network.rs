//! `vmmd.v1.NetworkService`.

use std::sync::Arc;

use proto::v1::{self, network_service_server::NetworkService};
use tonic::{Request, Response, Status};

use crate::{failure::Failure, host::Host, request::once};

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
            // In a task of its own, which ends what it began when the caller goes away.
            let create = async move { host.networks.create(host.for_networks(), request, &context).await };
            let made = tokio::spawn(create).await;
            let network = made.unwrap_or_else(|error| Err(Failure::internal(error.to_string())))?;
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
        let network = self.host.networks.get(&request.get_ref().name)?;
        Ok(Response::new(v1::GetNetworkResponse {
            network: Some(network),
        }))
    }

    async fn list_networks(
        &self,
        _: Request<v1::ListNetworksRequest>,
    ) -> Result<Response<v1::ListNetworksResponse>, Status> {
        let networks = self.host.networks.list();
        Ok(Response::new(v1::ListNetworksResponse { networks }))
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
            let deleted = tokio::spawn(delete).await;
            deleted.unwrap_or_else(|error| Err(Failure::internal(error.to_string())))?;
            Ok(v1::DeleteNetworkResponse {})
        })
        .await
    }
}
