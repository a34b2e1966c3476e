//! `vmmd.v1.DiskService`.

mod kind;

use std::sync::Arc;

use tonic::{Request, Response, Status};
use vmmd_api::v1::{self, disk_service_server::DiskService};
use vmmd_host::failure::{Failure, Kind};
use vmmd_objects::request::once;

use self::kind::Disk;
use super::objects::{Shared, Stream, Wanted, list, watch};
use crate::{
    disk::{self, Begun, describe},
    host::Host,
};

/// The service.
#[derive(Debug)]
pub struct Disks {
    host: Arc<Host>,
    shared: Arc<Shared<Disk>>,
}

impl Disks {
    /// Over the disks of `host`.
    pub fn new(host: Arc<Host>) -> Self {
        Self {
            host,
            shared: Arc::default(),
        }
    }
}

/// Waits for the end of the operation unless `no_wait`. Returns the disk in its new state.
async fn answered(
    host: &Arc<Host>,
    begun: Begun,
    no_wait: bool,
) -> Result<(v1::Disk, Option<v1::Operation>), Failure> {
    let Begun { uid, pending } = begun;
    if let Some(pending) = pending.clone().filter(|_| !no_wait) {
        tokio::select! {
            ended = pending.ended() => drop(ended?),
            () = host.stopping.cancelled() => return Err(Failure::stopping()),
        }
    }
    if no_wait && pending.is_some() {
        host.operations.recorded().await;
    }
    let operation = pending.map(|pending| pending.operation());
    match describe::by_uid(host, &uid).await {
        Some(disk) => Ok((disk?, operation)),
        None => {
            let message = "the disk was deleted meanwhile";
            Err(Failure::new(Kind::NotFound, "DISK_NOT_FOUND", message))
        }
    }
}

#[tonic::async_trait]
impl DiskService for Disks {
    async fn create_disk(
        &self,
        request: Request<v1::CreateDiskRequest>,
    ) -> Result<Response<v1::CreateDiskResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let of = Arc::clone(&host);
            let no_wait = request.no_wait;
            // In a task of its own: a caller that goes away must not leave it half begun.
            let begun = whole(async move { disk::create(&of, &request, &context).await }).await?;
            let (disk, operation) = answered(&host, begun, no_wait).await?;
            Ok(v1::CreateDiskResponse {
                disk: Some(disk),
                operation,
            })
        })
        .await
    }

    async fn get_disk(
        &self,
        request: Request<v1::GetDiskRequest>,
    ) -> Result<Response<v1::GetDiskResponse>, Status> {
        let seen = self
            .host
            .disks
            .see(&self.host.disk_folder(), &request.get_ref().name)?;
        let disk = describe::look_at(&self.host, vec![seen]).await?.pop();
        Ok(Response::new(v1::GetDiskResponse { disk }))
    }

    async fn list_disks(
        &self,
        request: Request<v1::ListDisksRequest>,
    ) -> Result<Response<v1::ListDisksResponse>, Status> {
        let request = request.get_ref();
        let wanted = Wanted {
            filter: request.filter.as_ref(),
            page_size: request.page_size,
            page_token: &request.page_token,
        };
        let page = list::<Disk>(&self.host, wanted).await?;
        Ok(Response::new(v1::ListDisksResponse {
            disks: page.objects,
            next_page_token: page.next_page_token,
            cursor: page.cursor,
        }))
    }

    type WatchDisksStream = Stream<Disk>;

    async fn watch_disks(
        &self,
        request: Request<v1::WatchDisksRequest>,
    ) -> Result<Response<Self::WatchDisksStream>, Status> {
        let request = request.get_ref();
        let stream = watch(&self.host, &self.shared, request.filter.as_ref(), &request.cursor)?;
        Ok(Response::new(stream))
    }

    async fn update_disk(
        &self,
        request: Request<v1::UpdateDiskRequest>,
    ) -> Result<Response<v1::UpdateDiskResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let of = Arc::clone(&host);
            let no_wait = request.no_wait;
            let begun = whole(async move { disk::update(&of, &request, &context).await }).await?;
            let (disk, operation) = answered(&host, begun, no_wait).await?;
            Ok(v1::UpdateDiskResponse {
                disk: Some(disk),
                operation,
            })
        })
        .await
    }

    async fn delete_disk(
        &self,
        request: Request<v1::DeleteDiskRequest>,
    ) -> Result<Response<v1::DeleteDiskResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            whole(async move { disk::delete(&host, &request.name, &context).await }).await?;
            Ok(v1::DeleteDiskResponse {})
        })
        .await
    }
}

/// Runs work that continues if the caller disconnects.
pub(super) async fn whole<T: Send + 'static>(
    work: impl Future<Output = Result<T, Failure>> + Send + 'static,
) -> Result<T, Failure> {
    let done = tokio::spawn(work).await;
    done.unwrap_or_else(|error| Err(Failure::internal(error.to_string())))
}
