//! Standard health service (grpc.health.v1). The daemon's health is checked on request, and
//! periodically only while a client watches, so that an unused daemon sleeps.

use std::time::Duration;

use tokio::{sync::mpsc, time::sleep};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tonic_health::pb::{
    HealthCheckRequest, HealthCheckResponse, health_check_response::ServingStatus, health_server::Health,
};
use vmmd_api::v1::{
    disk_service_server::SERVICE_NAME as DISKS, event_service_server::SERVICE_NAME as EVENTS,
    image_service_server::SERVICE_NAME as IMAGES, migration_service_server::SERVICE_NAME as MIGRATIONS,
    network_service_server::SERVICE_NAME as NETWORKS, node_service_server::SERVICE_NAME as NODE,
    operation_service_server::SERVICE_NAME as OPERATIONS, peer_service_server::SERVICE_NAME as PEERS,
    pod_service_server::SERVICE_NAME as PODS, snapshot_service_server::SERVICE_NAME as SNAPSHOTS,
    vm_service_server::SERVICE_NAME as VMS,
};
use vmmd_store::Store;

use crate::service;

/// How often it is asked for a client that watches.
const PERIOD: Duration = Duration::from_secs(5);

/// Known services; "" is the server as a whole. All services need the same parts of the daemon.
const SERVICES: [&str; 12] = [
    "", VMS, NODE, DISKS, NETWORKS, IMAGES, OPERATIONS, EVENTS, SNAPSHOTS, MIGRATIONS, PEERS, PODS,
];

/// The service.
#[derive(Clone)]
pub struct Healths(Store);

impl Healths {
    pub fn new(store: Store) -> Self {
        Self(store)
    }
}

/// Whether the daemon works; it takes 5 s at the most to find out.
async fn look(store: &Store) -> ServingStatus {
    match service::works(store).await {
        true => ServingStatus::Serving,
        false => ServingStatus::NotServing,
    }
}

fn is_known(request: &Request<HealthCheckRequest>) -> bool {
    SERVICES.contains(&request.get_ref().service.as_str())
}

fn answer(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse {
        status: status.into(),
    }
}

#[tonic::async_trait]
impl Health for Healths {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        if !is_known(&request) {
            return Err(Status::not_found(
                "no such service: reflection lists those there are",
            ));
        }
        Ok(Response::new(answer(look(&self.0).await)))
    }

    type WatchStream = ReceiverStream<Result<HealthCheckResponse, Status>>;

    /// Sends the current status and each change. The protocol requires a status for an unknown
    /// service, not a refusal.
    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let (sender, stream) = mpsc::channel(1);
        let store = self.0.clone();
        let is_known = is_known(&request);
        tokio::spawn(async move {
            let mut told = None;
            loop {
                let status = match is_known {
                    true => look(&store).await,
                    false => ServingStatus::ServiceUnknown,
                };
                if told != Some(status) && sender.send(Ok(answer(status))).await.is_err() {
                    return;
                }
                told = Some(status);
                tokio::select! {
                    () = sender.closed() => return,
                    () = sleep(PERIOD), if is_known => {}
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}
