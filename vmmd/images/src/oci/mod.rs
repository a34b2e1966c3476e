//! OCI images: from a reference to the layers of one manifest. The file from which the image is
//! made contains the layers in order.
//!
//! ```text
//!  reference ──▶ index ──platform──▶ manifest, noted in the record ──▶ layer, layer, … ──▶ the converter, which looks for the disk
//! ```
//!
//! The digest of each document except the first is known before its download, and each byte is
//! counted and hashed on arrival. An interrupted import therefore continues with the recorded
//! manifest, even when the tag has changed, and in the middle of a layer. Only the converter reads
//! the content of the layers.
//!
//! The HTTP client is that of other downloads ([`super::fetch`]): it bounds the response, continues
//! after a broken connection, and can be cancelled. The library oci-client does not bound
//! documents, sends credentials to any token server that a registry names, and adds 100 crates.

mod challenge;
mod layout;
mod manifest;
mod registry;

use std::{fs::File, sync::Arc};

use prost::Message as _;
use vmmd_host::failure::{Failure, Kind, file_failed};
use vmmd_objects::operation::{Control, Handle, Progress};
use vmmd_spec::{
    image::checksum_text,
    oci::{Platform, Reference},
};
use vmmd_store::store_failure;
use vmmd_store::{ImageRecord, RegistryCredentials, image_source::Source};

use self::{
    layout::Layout,
    manifest::{Blob, Document, Manifest},
    registry::Registry,
};
use super::fetch::Downloaded;
use crate::Ports;

/// Documents that lead to a manifest at most: an index of a folder, an index of platforms, the manifest.
const MOST_STEPS: usize = 3;
/// Most bytes of a manifest, an index or a configuration (OCI Distribution Specification, "Pushing manifests").
pub const MAX_DOCUMENT: u64 = 4 << 20;
/// The reason of a failure: a blob, manifest or index is another one than was asked for.
const MISMATCH: &str = "DIGEST_MISMATCH";

/// The layers of an image.
#[derive(Debug)]
pub struct Layers {
    /// Has them one after the other.
    pub file: File,
    /// How long each is, in bytes.
    pub lengths: Vec<u64>,
}

/// Where an image comes from.
enum Origin {
    Registry(Box<Registry>),
    Layout(Layout),
}

/// Requested document.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Target {
    /// The document that the reference names.
    Named,
    /// A manifest or index.
    Manifest([u8; 32]),
    /// A blob, which is a document.
    Blob([u8; 32]),
}

impl Origin {
    /// A document and its digest, which is compared with that of the target.
    async fn document<H: Ports>(
        &mut self,
        host: &Arc<H>,
        target: &Target,
        control: &Control,
    ) -> Result<(Vec<u8>, [u8; 32]), Failure> {
        let (bytes, digest) = match self {
            Self::Registry(registry) => registry.document(host, target, control).await?,
            Self::Layout(layout) => layout.document(host, target).await?,
        };
        let wanted = match (target, self) {
            (Target::Manifest(wanted) | Target::Blob(wanted), _) => Some(*wanted),
            (Target::Named, Self::Registry(registry)) => registry.reference().digest(),
            (Target::Named, Self::Layout(_)) => None,
        };
        match wanted {
            Some(wanted) if wanted != digest => Err(mismatch("the manifest", &wanted, &digest)),
            _ => Ok((bytes, digest)),
        }
    }

    async fn blob<H: Ports>(
        &mut self,
        host: &Arc<H>,
        layer: &Blob,
        file: &File,
        (base, all): (u64, u64),
        control: &Control,
    ) -> Result<Downloaded, Failure> {
        let place = super::fetch::Blob {
            base,
            size: layer.size,
            all,
        };
        match self {
            Self::Registry(registry) => registry.blob(&layer.digest, file, place, control).await,
            Self::Layout(layout) => layout.blob(host, &layer.digest, file, place, control).await,
        }
    }
}

fn mismatch(what: &str, wanted: &[u8], found: &[u8]) -> Failure {
    let message = format!(
        "{what} has the digest {}, and {} was asked for: it is another one, or was changed on its way",
        checksum_text(found),
        checksum_text(wanted)
    );
    Failure::precondition(MISMATCH, message)
}

/// Brings the layers of the image of the record, of which the file may have the beginning.
pub async fn layers<H: Ports>(
    host: &Arc<H>,
    record: &mut ImageRecord,
    handle: &Handle,
    control: &Control,
) -> Result<Layers, Failure> {
    handle.progress(Progress::bytes(0, 0), "finding the image");
    let (mut origin, platform) = origin(host, record)?;
    let (manifest, digest) = resolve(host, &mut origin, record, &platform, control).await?;
    let layers = manifest.layers(record.max_size)?;
    if record.source_manifest != digest {
        record.source_manifest = digest.to_vec();
        host.store().put(record).await.map_err(store_failure)?;
        host.images().settle(record.clone());
    }
    let folder = host.folder();
    let (of, path) = (folder.clone(), folder.source(record));
    let opened = host
        .pools()
        .bulk
        .run(&[folder.root()], move || of.open(&path, false));
    let failed = |error| file_failed("write the layers of the image", &error);
    let file = opened.await?.map_err(failed)?;
    handle.progress(Progress::bytes(0, 0), "downloading");
    let all = layers.iter().map(|layer| layer.size).sum();
    let mut base = 0;
    for layer in &layers {
        let mut came = origin.blob(host, layer, &file, (base, all), control).await?;
        if came.resumed && came.checksum != layer.digest {
            // The parts are not of one blob, or what an earlier daemon had written was lost with the node's power.
            file.set_len(base).map_err(failed)?;
            came = origin.blob(host, layer, &file, (base, all), control).await?;
        }
        if came.checksum != layer.digest {
            return Err(mismatch("a layer", &layer.digest, &came.checksum));
        }
        base += layer.size;
    }
    record.source_bytes = all;
    record.sealed_credentials.clear();
    Ok(Layers {
        file,
        lengths: layers.iter().map(|layer| layer.size).collect(),
    })
}

fn origin<H: Ports>(host: &Arc<H>, record: &ImageRecord) -> Result<(Origin, Platform), Failure> {
    let source = record.source.as_ref().and_then(|source| source.source.as_ref());
    let (origin, platform) = match source {
        Some(Source::Oci(source)) => {
            let reference = Reference::parse(&source.reference).map_err(Failure::internal)?;
            let credentials = credentials(host, record)?;
            let registry = Registry::new(
                reference,
                host.rules(),
                source.plain_http,
                record.for_tenant,
                credentials,
            )?;
            (Origin::Registry(Box::new(registry)), &source.platform)
        }
        Some(Source::OciLayout(source)) => {
            let layout = Layout::new(&source.path, &source.reference)?;
            (Origin::Layout(layout), &source.platform)
        }
        _ => return Err(Failure::internal("it is no OCI image")),
    };
    let platform = Platform::parse(platform).unwrap_or_else(Platform::native);
    Ok((origin, platform))
}

/// Decrypts the registry credentials of the request.
fn credentials<H: Ports>(
    host: &Arc<H>,
    record: &ImageRecord,
) -> Result<Option<RegistryCredentials>, Failure> {
    if record.sealed_credentials.is_empty() {
        return Ok(None);
    }
    let plain = host.store().unseal(&record.uid, &record.sealed_credentials);
    let opened = plain.and_then(|plain| RegistryCredentials::decode(plain.as_slice()).ok());
    match opened {
        Some(credentials) => Ok(Some(credentials)),
        None => Err(Failure::precondition(
            "CREDENTIALS_LOST",
            "the user name and password for the registry were sealed with another key (`secrets_key`): import the image again",
        )),
    }
}

/// From the reference, or what an earlier daemon has found, to the manifest and its digest.
async fn resolve<H: Ports>(
    host: &Arc<H>,
    origin: &mut Origin,
    record: &ImageRecord,
    platform: &Platform,
    control: &Control,
) -> Result<(Manifest, [u8; 32]), Failure> {
    let known = record.source_manifest.as_slice().try_into().ok();
    let mut target = known.map_or(Target::Named, Target::Manifest);
    // The folder's index names images by tag, and an index of platforms by platform.
    let mut by_tag = matches!(origin, Origin::Layout(_)) && known.is_none();
    let mut by_platform = known.is_some();
    for _ in 0..MOST_STEPS {
        let (bytes, digest) = origin.document(host, &target, control).await?;
        match Document::read(&bytes)? {
            Document::Index(index) => {
                let found = match origin {
                    Origin::Layout(layout) if by_tag => index.tagged(layout.target(), platform)?,
                    _ => index.of_platform(platform)?,
                };
                by_platform |= found.has_platform;
                by_tag = false;
                target = Target::Manifest(found.digest);
            }
            Document::Manifest(manifest) => {
                if let Some(config) = manifest.config.filter(|_| !by_platform) {
                    let (bytes, _) = origin.document(host, &Target::Blob(config), control).await?;
                    manifest::check_config(&bytes, platform)?;
                }
                return Ok((manifest, digest));
            }
        }
    }
    Err(manifest::unusable(
        "its index leads to further indexes and to no image",
    ))
}

/// There is no such manifest or blob.
fn not_found(reference: &Reference, path: &str) -> Failure {
    let message = format!("the registry does not have {reference} ({path})");
    Failure::new(Kind::NotFound, "OCI_IMAGE_NOT_FOUND", message)
}
