//! `vmmd.v1.OperationService`.

use std::sync::Arc;

use proto::v1::{self, operation_service_server::OperationService};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::{failure::Failure, host::Host, operation::has_ended};

/// The service.
#[derive(Debug)]
pub struct Operations {
    host: Arc<Host>,
}

impl Operations {
    /// Over the operations of `host`.
    pub fn new(host: Arc<Host>) -> Self {
        Self { host }
    }
}

#[tonic::async_trait]
impl OperationService for Operations {
    async fn get_operation(
        &self,
        request: Request<v1::GetOperationRequest>,
    ) -> Result<Response<v1::GetOperationResponse>, Status> {
        let operation = self.host.operations.get(&request.get_ref().id)?;
        Ok(Response::new(v1::GetOperationResponse {
            operation: Some(operation),
        }))
    }

    async fn list_operations(
        &self,
        request: Request<v1::ListOperationsRequest>,
    ) -> Result<Response<v1::ListOperationsResponse>, Status> {
        let v1::ListOperationsRequest { vm, active } = request.into_inner();
        let operations = self.host.operations.list(&vm, active);
        Ok(Response::new(v1::ListOperationsResponse { operations }))
    }

    async fn cancel_operation(
        &self,
        request: Request<v1::CancelOperationRequest>,
    ) -> Result<Response<v1::CancelOperationResponse>, Status> {
        let mut state = self.host.operations.cancel(&request.get_ref().id)?;
        let operation = tokio::select! {
            ended = state.wait_for(has_ended) => {
                ended.map_err(|error| Failure::internal(error.to_string()))?.clone()
            }
            () = self.host.stopping.cancelled() => return Err(Failure::stopping().into()),
        };
        Ok(Response::new(v1::CancelOperationResponse {
            operation: Some(operation),
        }))
    }

    type WatchOperationStream = ReceiverStream<Result<v1::WatchOperationResponse, Status>>;

    async fn watch_operation(
        &self,
        request: Request<v1::WatchOperationRequest>,
    ) -> Result<Response<Self::WatchOperationStream>, Status> {
        let mut state = self.host.operations.watch(&request.get_ref().id)?;
        let stopping = self.host.stopping.clone();
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move {
            loop {
                let operation = state.borrow_and_update().clone();
                let ended = has_ended(&operation);
                let response = v1::WatchOperationResponse {
                    operation: Some(operation),
                };
                if sender.send(Ok(response)).await.is_err() || ended {
                    return;
                }
                tokio::select! {
                    changed = state.changed() => if changed.is_err() { return },
                    () = sender.closed() => return,
                    () = stopping.cancelled() => {
                        let _ = sender.send(Err(Failure::stopping().into())).await;
                        return;
                    }
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}
