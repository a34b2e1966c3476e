//! `vmmd.v1.OperationService`.

use std::sync::Arc;

use proto::v1::{self, operation_service_server::OperationService};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::{failure::Failure, host::Host};

/// The service.
#[derive(Debug)]
pub struct Operations {
    _host: Arc<Host>,
}

impl Operations {
    /// Over the operations of `host`.
    pub fn new(host: Arc<Host>) -> Self {
        Self { _host: host }
    }
}

#[tonic::async_trait]
impl OperationService for Operations {
    async fn get_operation(
        &self,
        _: Request<v1::GetOperationRequest>,
    ) -> Result<Response<v1::GetOperationResponse>, Status> {
        Err(Failure::unimplemented("show operations").into())
    }

    async fn list_operations(
        &self,
        _: Request<v1::ListOperationsRequest>,
    ) -> Result<Response<v1::ListOperationsResponse>, Status> {
        Err(Failure::unimplemented("list operations").into())
    }

    async fn cancel_operation(
        &self,
        _: Request<v1::CancelOperationRequest>,
    ) -> Result<Response<v1::CancelOperationResponse>, Status> {
        Err(Failure::unimplemented("cancel operations").into())
    }

    type WatchOperationStream = ReceiverStream<Result<v1::WatchOperationResponse, Status>>;

    async fn watch_operation(
        &self,
        _: Request<v1::WatchOperationRequest>,
    ) -> Result<Response<Self::WatchOperationStream>, Status> {
        Err(Failure::unimplemented("watch operations").into())
    }
}
