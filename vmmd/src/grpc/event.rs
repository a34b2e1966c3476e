//! `vmmd.v1.EventService`.

use std::sync::Arc;

use proto::v1::{self, event_service_server::EventService};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::{failure::Failure, host::Host};

/// The service.
#[derive(Debug)]
pub struct EventLog {
    _host: Arc<Host>,
}

impl EventLog {
    /// Over the events of `host`.
    pub fn new(host: Arc<Host>) -> Self {
        Self { _host: host }
    }
}

#[tonic::async_trait]
impl EventService for EventLog {
    async fn list_events(
        &self,
        _: Request<v1::ListEventsRequest>,
    ) -> Result<Response<v1::ListEventsResponse>, Status> {
        Err(Failure::unimplemented("list events").into())
    }

    type WatchEventsStream = ReceiverStream<Result<v1::WatchEventsResponse, Status>>;

    async fn watch_events(
        &self,
        _: Request<v1::WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        Err(Failure::unimplemented("watch events").into())
    }
}
