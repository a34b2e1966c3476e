//! Operations, which end when somebody watches or cancels them.

use tonic::{Code, Request, Response, Status};
use vmmd_api::v1::{self, OperationPhase, operation_service_server::OperationService};

use super::{Answer, Events, State, lock, refusal};

impl State {
    /// Begins one on a VM.
    pub fn operation(&self, id: &str, vm: &str) {
        self.operation_of(id, vm, "");
    }

    /// Begins one for a request.
    pub fn operation_of(&self, id: &str, vm: &str, request_id: &str) {
        let operation = v1::Operation {
            id: id.into(),
            r#type: "vm.start".into(),
            target: Some(v1::ObjectReference {
                kind: "Vm".into(),
                name: vm.into(),
                ..Default::default()
            }),
            request_id: request_id.into(),
            phase: OperationPhase::InProgress.into(),
            ..Default::default()
        };
        lock(&self.operations).insert(id.into(), operation);
    }

    /// Refuses this number of watches of operations, as during a restart of the daemon.
    pub fn refuse_watches(&self, times: usize) {
        lock(&self.play).refused_watches = times;
    }

    pub(super) fn find_operation(&self, id: &str) -> Result<v1::Operation, Status> {
        let found = lock(&self.operations).get(id).cloned();
        let message = || format!("there is no operation \"{id}\"");
        found.ok_or_else(|| refusal(Code::NotFound, "OPERATION_NOT_FOUND", message()))
    }

    fn end(&self, id: &str, phase: OperationPhase) -> Result<v1::Operation, Status> {
        let mut operation = self.find_operation(id)?;
        operation.phase = phase.into();
        lock(&self.operations).insert(id.into(), operation.clone());
        Ok(operation)
    }
}

#[tonic::async_trait]
impl OperationService for State {
    async fn get_operation(
        &self,
        request: Request<v1::GetOperationRequest>,
    ) -> Answer<v1::GetOperationResponse> {
        let operation = Some(self.find_operation(&request.get_ref().id)?);
        Ok(Response::new(v1::GetOperationResponse { operation }))
    }

    async fn list_operations(
        &self,
        request: Request<v1::ListOperationsRequest>,
    ) -> Answer<v1::ListOperationsResponse> {
        let filter = request.into_inner().filter.unwrap_or_default();
        let name = |target: &Option<v1::ObjectReference>| target.clone().unwrap_or_default().name;
        let vm = name(&filter.target);
        let operations = lock(&self.operations).values().cloned().collect::<Vec<_>>();
        let wanted = |operation: &v1::Operation| {
            let under_way = operation.phase() == OperationPhase::InProgress;
            (vm.is_empty() || name(&operation.target) == vm) && (under_way || !filter.active)
        };
        Ok(Response::new(v1::ListOperationsResponse {
            operations: operations.into_iter().filter(wanted).collect(),
            ..Default::default()
        }))
    }

    type WatchOperationsStream = Events<v1::WatchOperationsResponse>;

    async fn watch_operations(
        &self,
        _: Request<v1::WatchOperationsRequest>,
    ) -> Answer<Self::WatchOperationsStream> {
        Err(Status::unimplemented("vmmctl does not watch them together"))
    }

    type WatchOperationStream = Events<v1::WatchOperationResponse>;

    async fn watch_operation(
        &self,
        request: Request<v1::WatchOperationRequest>,
    ) -> Answer<Self::WatchOperationStream> {
        let left = &mut lock(&self.play).refused_watches;
        if *left > 0 {
            *left -= 1;
            let message = "the daemon is being stopped";
            return Err(refusal(Code::Unavailable, "DAEMON_STOPPING", message.into()));
        }
        let id = request.into_inner().id;
        let seen = [
            self.find_operation(&id)?,
            self.end(&id, OperationPhase::Completed)?,
        ];
        let sent = seen.map(|operation| {
            Ok(v1::WatchOperationResponse {
                operation: Some(operation),
            })
        });
        Ok(Response::new(Box::pin(tokio_stream::iter(sent))))
    }

    async fn cancel_operation(
        &self,
        request: Request<v1::CancelOperationRequest>,
    ) -> Answer<v1::CancelOperationResponse> {
        let operation = Some(self.end(&request.get_ref().id, OperationPhase::Cancelled)?);
        Ok(Response::new(v1::CancelOperationResponse { operation }))
    }
}
