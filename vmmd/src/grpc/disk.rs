//! `vmmd.v1.DiskService`.

mod kind;

use std::sync::Arc;

use tonic::{Request, Response, Status};
use vmmd_api::v1::{self, disk_service_server::DiskService};
use vmmd_objects::{
    registry::Kind as _,
    request::{once, to_completion},
};

use super::{
    filter::Filter,
    mask::Mask,
    objects::{Stream, Wanted, finished, get, list, watch},
};
use crate::{disk, host::Host, registry::disks::DiskKind};

/// The service.
#[derive(Debug)]
pub struct Disks {
    host: Arc<Host>,
}

impl Disks {
    /// Over the disks of `host`.
    pub fn new(host: Arc<Host>) -> Self {
        Self { host }
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
            let begun = to_completion(async move { disk::create(&of, &request, &context).await }).await?;
            let (disk, operation) = finished::<DiskKind>(&host, begun, no_wait).await?;
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
        let disk = get::<DiskKind>(&self.host, &request.get_ref().name).await?;
        Ok(Response::new(v1::GetDiskResponse { disk: Some(disk) }))
    }

    async fn list_disks(
        &self,
        request: Request<v1::ListDisksRequest>,
    ) -> Result<Response<v1::ListDisksResponse>, Status> {
        let request = request.get_ref();
        let wanted = Wanted {
            filter: Filter::of_objects(DiskKind::NAME, request.filter.as_ref())?,
            mask: Mask::default(),
            page_size: request.page_size,
            page_token: &request.page_token,
        };
        let page = list::<DiskKind>(&self.host, wanted).await?;
        Ok(Response::new(v1::ListDisksResponse {
            disks: page.objects,
            next_page_token: page.next_page_token,
            cursor: page.cursor,
        }))
    }

    type WatchDisksStream = Stream<DiskKind>;

    async fn watch_disks(
        &self,
        request: Request<v1::WatchDisksRequest>,
    ) -> Result<Response<Self::WatchDisksStream>, Status> {
        let request = request.get_ref();
        let filter = Filter::of_objects(DiskKind::NAME, request.filter.as_ref())?;
        let stream = watch::<DiskKind>(&self.host, filter, Mask::default(), &request.cursor)?;
        Ok(Response::new(stream))
    }

    async fn update_disk(
        &self,
        request: Request<v1::UpdateDiskRequest>,
    ) -> Result<Response<v1::UpdateDiskResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let of = Arc::clone(&host);
            let no_wait = request.no_wait;
            let begun = to_completion(async move { disk::update(&of, &request, &context).await }).await?;
            let (disk, operation) = finished::<DiskKind>(&host, begun, no_wait).await?;
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
            to_completion(async move { disk::delete(&host, &request.name, &context).await }).await?;
            Ok(v1::DeleteDiskResponse {})
        })
        .await
    }
}
