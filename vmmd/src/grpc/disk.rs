//! `vmmd.v1.DiskService`.

use std::sync::Arc;

use proto::v1::{self, disk_service_server::DiskService};
use tokio::task::JoinError;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::{disk, failure::Failure, host::Host, request::once, store::DiskRecord};

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

    async fn describe(&self, records: Vec<DiskRecord>) -> Result<Vec<v1::Disk>, Failure> {
        let host = Arc::clone(&self.host);
        let described = self.host.pools.files.run(&[host.disk_folder().root()], move || {
            let folder = host.disk_folder();
            let described = records.iter().map(|record| host.disks.describe(&folder, record));
            described.collect()
        });
        described.await
    }
}

#[tonic::async_trait]
impl DiskService for Disks {
    async fn create_disk(
        &self,
        request: Request<v1::CreateDiskRequest>,
    ) -> Result<Response<v1::CreateDiskResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let cancel = host.stopping.child_token();
            // In a task of its own, which cleans up when the caller goes away, or the daemon ends.
            let _gone = CancellationToken::clone(&cancel).drop_guard();
            let create = async move { disk::create(&host, request, &context, cancel).await };
            let disk = finished(tokio::spawn(create).await)?;
            Ok(v1::CreateDiskResponse { disk: Some(disk) })
        })
        .await
    }

    async fn get_disk(
        &self,
        request: Request<v1::GetDiskRequest>,
    ) -> Result<Response<v1::GetDiskResponse>, Status> {
        let record = self.host.disks.get(&request.get_ref().name)?;
        let disk = self.describe(vec![record]).await?.pop();
        Ok(Response::new(v1::GetDiskResponse { disk }))
    }

    async fn list_disks(
        &self,
        _: Request<v1::ListDisksRequest>,
    ) -> Result<Response<v1::ListDisksResponse>, Status> {
        let disks = self.describe(self.host.disks.list()).await?;
        Ok(Response::new(v1::ListDisksResponse { disks }))
    }

    async fn resize_disk(
        &self,
        request: Request<v1::ResizeDiskRequest>,
    ) -> Result<Response<v1::ResizeDiskResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let v1::ResizeDiskRequest { name, size_bytes, .. } = request;
            let resize = async move { disk::resize(&host, &name, size_bytes, &context).await };
            let disk = finished(tokio::spawn(resize).await)?;
            Ok(v1::ResizeDiskResponse { disk: Some(disk) })
        })
        .await
    }

    async fn delete_disk(
        &self,
        request: Request<v1::DeleteDiskRequest>,
    ) -> Result<Response<v1::DeleteDiskResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            let delete = async move { disk::delete(&host, &request.name, &context).await };
            finished(tokio::spawn(delete).await)?;
            Ok(v1::DeleteDiskResponse {})
        })
        .await
    }
}

/// What came of a task.
fn finished<T>(task: Result<Result<T, Failure>, JoinError>) -> Result<T, Failure> {
    task.unwrap_or_else(|error| Err(Failure::internal(error.to_string())))
}
