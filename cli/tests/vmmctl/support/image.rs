//! Images, which are made at once.

use tonic::{Code, Request, Response, Status, Streaming};
use vmmd_api::v1::{self, ImagePhase, image_service_server::ImageService};

use super::{Answer, Events, State, lock, refusal};

/// The operation that makes an image.
pub const IMAGE_MADE: &str = "f3a1c2d4-93cb-4a9f-8ed4-0c4c2f3b7a61";
/// Digest of what every reference means here.
pub const MANIFEST: &str = "sha256:4f1c4f1c4f1c4f1c4f1c4f1c4f1c4f1c4f1c4f1c4f1c4f1c4f1c4f1c4f1c4f1c";

impl State {
    /// An image as requested.
    pub fn image(&self, name: &str) -> Option<v1::Image> {
        lock(&self.images).get(name).cloned()
    }
}

#[tonic::async_trait]
impl ImageService for State {
    async fn import_image(
        &self,
        request: Request<v1::ImportImageRequest>,
    ) -> Answer<v1::ImportImageResponse> {
        self.once(request.get_ref())?;
        let image = request.into_inner().image.unwrap();
        let name = image.metadata.clone().unwrap_or_default().name;
        lock(&self.images).insert(name.clone(), image.clone());
        self.operation_of(IMAGE_MADE, &name, "");
        Ok(Response::new(v1::ImportImageResponse {
            image: Some(image),
            operation: Some(v1::Operation {
                id: IMAGE_MADE.into(),
                ..Default::default()
            }),
        }))
    }

    async fn upload_image(
        &self,
        _: Request<Streaming<v1::UploadImageRequest>>,
    ) -> Answer<v1::UploadImageResponse> {
        Err(Status::unimplemented("no test uploads one"))
    }

    async fn get_image(&self, request: Request<v1::GetImageRequest>) -> Answer<v1::GetImageResponse> {
        let name = &request.get_ref().name;
        let message = || format!("there is no image \"{name}\" on this node");
        let mut image = self
            .image(name)
            .ok_or_else(|| refusal(Code::NotFound, "IMAGE_NOT_FOUND", message()))?;
        // As a daemon does.
        if let Some(v1::image_spec::Source::Oci(oci)) =
            image.spec.as_mut().and_then(|spec| spec.source.as_mut())
        {
            oci.credentials = None;
        }
        image.status = Some(v1::ImageStatus {
            phase: ImagePhase::Ready.into(),
            digest: "blocks-sha256:5d0c".into(),
            virtual_size_bytes: 3 << 30,
            source_manifest: MANIFEST.into(),
            ..Default::default()
        });
        Ok(Response::new(v1::GetImageResponse { image: Some(image) }))
    }

    async fn list_images(&self, _: Request<v1::ListImagesRequest>) -> Answer<v1::ListImagesResponse> {
        let images = lock(&self.images).values().cloned().collect();
        Ok(Response::new(v1::ListImagesResponse {
            images,
            ..Default::default()
        }))
    }

    type WatchImagesStream = Events<v1::WatchImagesResponse>;

    async fn watch_images(&self, _: Request<v1::WatchImagesRequest>) -> Answer<Self::WatchImagesStream> {
        Err(Status::unimplemented("no test watches them"))
    }

    async fn delete_image(&self, _: Request<v1::DeleteImageRequest>) -> Answer<v1::DeleteImageResponse> {
        Err(Status::unimplemented("no test deletes one"))
    }

    async fn prune_images(&self, _: Request<v1::PruneImagesRequest>) -> Answer<v1::PruneImagesResponse> {
        Err(Status::unimplemented("no test prunes them"))
    }
}
