//! Disks and images of the mock: disks exist at once, images when the test says so.

use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{Arc, Mutex},
};

use tokio_stream::Stream;
use tonic::{Request, Response, Status, Streaming};
use vmmd_api::v1::{
    self, DiskPhase, ImagePhase, OperationPhase, disk_service_server::DiskService,
    image_service_server::ImageService, operation_service_server::OperationService,
};

use super::vmmd::lock;

type Answer<T> = Result<Response<T>, Status>;
type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[derive(Clone, Default)]
pub struct Storage(Arc<Mutex<Kept>>);

#[derive(Default)]
struct Kept {
    disks: BTreeMap<String, v1::Disk>,
    images: BTreeMap<String, v1::Image>,
    operations: BTreeMap<String, v1::Operation>,
    /// Refusal for the creation of a disk.
    refusal: Option<Status>,
    /// Names of the disks of VMs, by VM.
    used: BTreeMap<String, Vec<String>>,
}

impl Storage {
    pub fn disks(&self) -> Vec<v1::Disk> {
        lock(&self.0).disks.values().cloned().collect()
    }

    pub fn images(&self) -> Vec<v1::Image> {
        lock(&self.0).images.values().cloned().collect()
    }

    pub fn refuse(&self, refusal: Status) {
        lock(&self.0).refusal = Some(refusal);
    }

    /// A VM has these disks from now on.
    pub fn use_by(&self, vm: &str, disks: Vec<String>) {
        lock(&self.0).used.insert(vm.to_owned(), disks);
    }

    /// Ends the imports that are under way, with an error when one is given.
    pub fn end_imports(&self, error: Option<&str>) {
        let kept = &mut *lock(&self.0);
        for operation in kept.operations.values_mut() {
            if operation.phase() != OperationPhase::InProgress {
                continue;
            }
            let name = operation.target.clone().unwrap().name;
            if let Some(error) = error {
                operation.set_phase(OperationPhase::Failed);
                operation.error = Some(vmmd_api::rpc::Status {
                    message: error.to_owned(),
                    ..vmmd_api::rpc::Status::default()
                });
                kept.images.remove(&name);
            } else {
                operation.set_phase(OperationPhase::Completed);
                let image = kept.images.get_mut(&name).unwrap();
                image.status.get_or_insert_default().set_phase(ImagePhase::Ready);
            }
        }
    }

    /// An operation as it is from now on.
    pub fn put_operation(&self, operation: v1::Operation) {
        lock(&self.0).operations.insert(operation.id.clone(), operation);
    }

    /// Lets failed imports be forgotten, as the daemon does after an hour.
    pub fn forget_operations(&self) {
        lock(&self.0).operations.clear();
    }
}

fn unused<T>() -> Answer<T> {
    Err(Status::unimplemented("the agent does not use it"))
}

fn name(metadata: Option<&v1::ObjectMetadata>) -> String {
    metadata.unwrap().name.clone()
}

fn selected(metadata: Option<&v1::ObjectMetadata>, filter: Option<&v1::ObjectFilter>) -> bool {
    let wanted = filter.map(|filter| filter.labels.clone()).unwrap_or_default();
    wanted.iter().all(|one| {
        let (key, value) = one.split_once('=').unwrap();
        metadata
            .unwrap()
            .labels
            .get(key)
            .is_some_and(|found| found == value)
    })
}

#[tonic::async_trait]
impl DiskService for Storage {
    async fn create_disk(&self, request: Request<v1::CreateDiskRequest>) -> Answer<v1::CreateDiskResponse> {
        let mut disk = request.into_inner().disk.unwrap();
        let kept = &mut *lock(&self.0);
        if let Some(refusal) = &kept.refusal {
            return Err(refusal.clone());
        }
        let name = name(disk.metadata.as_ref());
        if kept.disks.contains_key(&name) {
            return Err(Status::already_exists("there is one"));
        }
        if let Some(v1::volume_spec::Source::Image(clone)) = &disk.spec.as_ref().unwrap().source {
            let image = kept.images.get(&clone.name);
            let ready =
                image.is_some_and(|image| image.status.as_ref().unwrap().phase() == ImagePhase::Ready);
            if !ready {
                return Err(Status::failed_precondition("there is no such image"));
            }
        }
        disk.metadata.as_mut().unwrap().uid = format!("disk-{name}");
        disk.status.get_or_insert_default().set_phase(DiskPhase::Ready);
        kept.disks.insert(name, disk.clone());
        Ok(Response::new(v1::CreateDiskResponse {
            disk: Some(disk),
            operation: None,
        }))
    }

    async fn get_disk(&self, request: Request<v1::GetDiskRequest>) -> Answer<v1::GetDiskResponse> {
        let disk = lock(&self.0).disks.get(&request.get_ref().name).cloned();
        let disk = disk.ok_or_else(|| Status::not_found("there is none"))?;
        Ok(Response::new(v1::GetDiskResponse { disk: Some(disk) }))
    }

    /// One on a page.
    async fn list_disks(&self, request: Request<v1::ListDisksRequest>) -> Answer<v1::ListDisksResponse> {
        let request = request.into_inner();
        let mut found = self.disks().into_iter().filter(|disk| {
            selected(disk.metadata.as_ref(), request.filter.as_ref())
                && name(disk.metadata.as_ref()) > request.page_token
        });
        let disks: Vec<_> = found.by_ref().take(1).collect();
        let more = found.next().is_some();
        let last = disks.last().map(|disk| name(disk.metadata.as_ref()));
        Ok(Response::new(v1::ListDisksResponse {
            disks,
            next_page_token: last.filter(|_| more).unwrap_or_default(),
            ..v1::ListDisksResponse::default()
        }))
    }

    type WatchDisksStream = Events<v1::WatchDisksResponse>;

    async fn watch_disks(&self, _: Request<v1::WatchDisksRequest>) -> Answer<Self::WatchDisksStream> {
        unused()
    }

    async fn update_disk(&self, _: Request<v1::UpdateDiskRequest>) -> Answer<v1::UpdateDiskResponse> {
        unused()
    }

    async fn delete_disk(&self, request: Request<v1::DeleteDiskRequest>) -> Answer<v1::DeleteDiskResponse> {
        let request = request.into_inner();
        let kept = &mut *lock(&self.0);
        if kept.used.values().flatten().any(|used| *used == request.name) {
            return Err(Status::failed_precondition("a VM has it"));
        }
        let disk = kept
            .disks
            .get(&request.name)
            .ok_or_else(|| Status::not_found("there is none"))?;
        assert_eq!(
            request.preconditions.unwrap().uid,
            disk.metadata.as_ref().unwrap().uid
        );
        kept.disks.remove(&request.name);
        Ok(Response::new(v1::DeleteDiskResponse {}))
    }
}

#[tonic::async_trait]
impl ImageService for Storage {
    async fn import_image(
        &self,
        request: Request<v1::ImportImageRequest>,
    ) -> Answer<v1::ImportImageResponse> {
        let request = request.into_inner();
        assert!(request.no_wait, "the agent has other things to do");
        let mut image = request.image.unwrap();
        let name = name(image.metadata.as_ref());
        let kept = &mut *lock(&self.0);
        if kept.images.contains_key(&name) {
            return Err(Status::already_exists("there is one"));
        }
        image
            .status
            .get_or_insert_default()
            .set_phase(ImagePhase::Importing);
        kept.images.insert(name.clone(), image.clone());
        let mut operation = v1::Operation {
            id: format!("import-{}", kept.operations.len()),
            target: Some(v1::ObjectReference {
                name,
                ..v1::ObjectReference::default()
            }),
            ..v1::Operation::default()
        };
        operation.set_phase(OperationPhase::InProgress);
        kept.operations.insert(operation.id.clone(), operation.clone());
        Ok(Response::new(v1::ImportImageResponse {
            image: Some(image),
            operation: Some(operation),
        }))
    }

    async fn upload_image(
        &self,
        _: Request<Streaming<v1::UploadImageRequest>>,
    ) -> Answer<v1::UploadImageResponse> {
        unused()
    }

    async fn get_image(&self, request: Request<v1::GetImageRequest>) -> Answer<v1::GetImageResponse> {
        let image = lock(&self.0).images.get(&request.get_ref().name).cloned();
        let image = image.ok_or_else(|| Status::not_found("there is none"))?;
        Ok(Response::new(v1::GetImageResponse { image: Some(image) }))
    }

    async fn list_images(&self, _: Request<v1::ListImagesRequest>) -> Answer<v1::ListImagesResponse> {
        unused()
    }

    type WatchImagesStream = Events<v1::WatchImagesResponse>;

    async fn watch_images(&self, _: Request<v1::WatchImagesRequest>) -> Answer<Self::WatchImagesStream> {
        unused()
    }

    async fn delete_image(&self, _: Request<v1::DeleteImageRequest>) -> Answer<v1::DeleteImageResponse> {
        unused()
    }

    /// None is old enough.
    async fn prune_images(
        &self,
        request: Request<v1::PruneImagesRequest>,
    ) -> Answer<v1::PruneImagesResponse> {
        let request = request.into_inner();
        assert!(request.older_than.is_some() && !request.filter.unwrap().labels.is_empty());
        Ok(Response::new(v1::PruneImagesResponse::default()))
    }
}

#[tonic::async_trait]
impl OperationService for Storage {
    async fn get_operation(
        &self,
        request: Request<v1::GetOperationRequest>,
    ) -> Answer<v1::GetOperationResponse> {
        let operation = lock(&self.0).operations.get(&request.get_ref().id).cloned();
        let operation = operation.ok_or_else(|| Status::not_found("there is none"))?;
        Ok(Response::new(v1::GetOperationResponse {
            operation: Some(operation),
        }))
    }

    async fn list_operations(
        &self,
        _: Request<v1::ListOperationsRequest>,
    ) -> Answer<v1::ListOperationsResponse> {
        unused()
    }

    type WatchOperationStream = Events<v1::WatchOperationResponse>;

    async fn watch_operation(
        &self,
        _: Request<v1::WatchOperationRequest>,
    ) -> Answer<Self::WatchOperationStream> {
        unused()
    }

    type WatchOperationsStream = Events<v1::WatchOperationsResponse>;

    async fn watch_operations(
        &self,
        _: Request<v1::WatchOperationsRequest>,
    ) -> Answer<Self::WatchOperationsStream> {
        unused()
    }

    async fn cancel_operation(
        &self,
        _: Request<v1::CancelOperationRequest>,
    ) -> Answer<v1::CancelOperationResponse> {
        unused()
    }
}
