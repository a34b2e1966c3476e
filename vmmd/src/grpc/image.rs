//! `vmmd.v1.ImageService`.

mod kind;

use std::sync::Arc;

use tonic::{Request, Response, Status, Streaming};
use vmmd_api::v1::{self, image_service_server::ImageService};
use vmmd_images::{
    self as image,
    registry::{ImageKind, Seen},
};
use vmmd_objects::{
    context::{Context, Initiator},
    registry::{Kind as _, Record as _},
    request::{once, to_completion},
};

use super::{
    filter::Filter,
    mask::Mask,
    objects::{Stream, Wanted, finished, get, list, watch},
};
use crate::{
    auth::{Caller, Role},
    host::Host,
};

/// The service.
#[derive(Debug)]
pub struct Images {
    host: Arc<Host>,
}

impl Images {
    /// Over the images of `host`.
    pub fn new(host: Arc<Host>) -> Self {
        Self { host }
    }
}

#[tonic::async_trait]
impl ImageService for Images {
    async fn import_image(
        &self,
        request: Request<v1::ImportImageRequest>,
    ) -> Result<Response<v1::ImportImageResponse>, Status> {
        let caller = request.extensions().get::<Arc<Caller>>();
        let for_tenant = caller.is_some_and(|caller| caller.role == Some(Role::Agent));
        once(&self.host, request, move |host, request, context| async move {
            let of = Arc::clone(&host);
            let no_wait = request.no_wait;
            let begun =
                to_completion(async move { image::import(&of, &request, &context, for_tenant).await })
                    .await?;
            let (image, operation) = finished::<ImageKind>(&host, begun, no_wait).await?;
            Ok(v1::ImportImageResponse {
                image: Some(image),
                operation,
            })
        })
        .await
    }

    async fn upload_image(
        &self,
        request: Request<Streaming<v1::UploadImageRequest>>,
    ) -> Result<Response<v1::UploadImageResponse>, Status> {
        let context = Context {
            initiator: request
                .extensions()
                .get::<Initiator>()
                .cloned()
                .unwrap_or_default(),
            trace: uuid::Uuid::new_v4().simple().to_string(),
            ..Context::default()
        };
        let begun = image::upload(&self.host, request.into_inner(), &context).await?;
        let (image, _) = finished::<ImageKind>(&self.host, begun, false).await?;
        Ok(Response::new(v1::UploadImageResponse { image: Some(image) }))
    }

    async fn get_image(
        &self,
        request: Request<v1::GetImageRequest>,
    ) -> Result<Response<v1::GetImageResponse>, Status> {
        let image = get::<ImageKind>(&self.host, &request.get_ref().name).await?;
        Ok(Response::new(v1::GetImageResponse { image: Some(image) }))
    }

    async fn list_images(
        &self,
        request: Request<v1::ListImagesRequest>,
    ) -> Result<Response<v1::ListImagesResponse>, Status> {
        let request = request.get_ref();
        let wanted = Wanted {
            filter: Filter::of_objects(ImageKind::NAME, request.filter.as_ref())?,
            mask: Mask::default(),
            page_size: request.page_size,
            page_token: &request.page_token,
        };
        let page = list::<ImageKind>(&self.host, wanted).await?;
        Ok(Response::new(v1::ListImagesResponse {
            images: page.objects,
            next_page_token: page.next_page_token,
            cursor: page.cursor,
        }))
    }

    type WatchImagesStream = Stream<ImageKind>;

    async fn watch_images(
        &self,
        request: Request<v1::WatchImagesRequest>,
    ) -> Result<Response<Self::WatchImagesStream>, Status> {
        let request = request.get_ref();
        let filter = Filter::of_objects(ImageKind::NAME, request.filter.as_ref())?;
        let stream = watch::<ImageKind>(&self.host, filter, Mask::default(), &request.cursor)?;
        Ok(Response::new(stream))
    }

    async fn delete_image(
        &self,
        request: Request<v1::DeleteImageRequest>,
    ) -> Result<Response<v1::DeleteImageResponse>, Status> {
        once(&self.host, request, |host, request, context| async move {
            to_completion(async move { image::delete(&host, &request.name, &context).await }).await?;
            Ok(v1::DeleteImageResponse {})
        })
        .await
    }

    async fn prune_images(
        &self,
        request: Request<v1::PruneImagesRequest>,
    ) -> Result<Response<v1::PruneImagesResponse>, Status> {
        once(&self.host, request, |host, request, _| async move {
            let filter = Filter::of_objects(ImageKind::NAME, request.filter.as_ref())?;
            let pruned = to_completion(async move {
                let matches = |seen: &Seen| filter.matches_object(Some(&seen.record.metadata()));
                image::prune(&host, &request, matches).await
            });
            Ok(pruned.await?)
        })
        .await
    }
}
