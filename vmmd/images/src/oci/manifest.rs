//! Manifests and indexes (OCI Image Format Specification 1.1; those of Docker, version 2 schema 2,
//! have the same fields). They are untrusted: the transport bounds their size, and the code checks
//! numbers in them against the limits before any use.

use std::collections::BTreeMap;

use serde::Deserialize;
use vmmd_host::{failure::Failure, text};
use vmmd_spec::{
    image::{checksum, checksum_text},
    oci::{LayoutTarget, Platform},
};

/// Most layers of an image: Linux mounts no more one over the other.
const MAX_LAYERS: usize = 128;
/// Most images that a message names.
const MAX_NAMED: usize = 20;
/// How an index of a folder calls an image (OCI Image Format Specification, "Pre-Defined Annotation Keys").
const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// Beginnings and ends of the media types of layers that are archives.
const LAYER_STARTS: [&str; 2] = [
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.docker.image.rootfs.diff.tar",
];
const LAYER_ENDS: [&str; 4] = ["", "+gzip", "+zstd", ".gzip"];
/// Media types of configurations that say for which platform an image is.
const CONFIGS: [&str; 2] = [
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
];

/// Accept header of requests for a manifest.
pub const ACCEPT: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json";

/// Refusal of an unusable image.
pub fn unusable(problem: &str) -> Failure {
    Failure::precondition(
        "IMAGE_UNUSABLE",
        format!("the OCI image can't be used: {problem}"),
    )
}

/// As it is written.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Wire {
    #[serde(default)]
    schema_version: u64,
    manifests: Option<Vec<Descriptor>>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    platform: Option<WirePlatform>,
    annotations: Option<BTreeMap<String, String>>,
}

/// Platform of a descriptor or a configuration.
#[derive(Clone, Default, Deserialize)]
struct WirePlatform {
    #[serde(default)]
    os: String,
    #[serde(default)]
    architecture: String,
    variant: Option<String>,
}

impl WirePlatform {
    fn matches(&self, wanted: &Platform) -> bool {
        self.os == wanted.os
            && self.architecture == wanted.architecture
            && (wanted.variant.is_empty() || self.variant.as_deref() == Some(&wanted.variant))
    }

    fn text(&self) -> String {
        let variant = self.variant.iter().filter(|variant| !variant.is_empty());
        let variant: String = variant.map(|variant| format!("/{variant}")).collect();
        text::brief_line(&format!("{}/{}{variant}", self.os, self.architecture))
    }

    /// False for a descriptor that is not an image, such as a build attestation.
    fn is_known(&self) -> bool {
        !self.os.is_empty() && self.os != "unknown"
    }
}

impl Descriptor {
    fn digest(&self) -> Result<[u8; 32], Failure> {
        checksum(&self.digest).ok_or_else(|| {
            let digest = text::brief_line(text::brief(&self.digest));
            unusable(&format!(
                "it has the digest \"{digest}\", and only those of SHA-256 are understood"
            ))
        })
    }

    fn platform(&self) -> Option<&WirePlatform> {
        self.platform.as_ref().filter(|platform| !platform.os.is_empty())
    }

    fn ref_name(&self) -> Option<&str> {
        self.annotations.as_ref()?.get(REF_NAME).map(String::as_str)
    }
}

/// A manifest or an index.
#[derive(Debug)]
pub enum Document {
    /// Names several images.
    Index(Index),
    /// Is one.
    Manifest(Manifest),
}

impl Document {
    /// Reads one.
    pub fn read(bytes: &[u8]) -> Result<Self, Failure> {
        let wire: Wire = serde_json::from_slice(bytes).map_err(|error| {
            let error = text::brief_line(&error.to_string());
            unusable(&format!("its manifest is none: {error}"))
        })?;
        if wire.schema_version != 2 {
            return Err(unusable(
                "the version of its manifest is not 2: push the image again with a newer tool",
            ));
        }
        match (wire.manifests, wire.layers) {
            (Some(manifests), None) => Ok(Self::Index(Index(manifests))),
            (None, Some(layers)) => {
                let config = wire
                    .config
                    .filter(|config| CONFIGS.contains(&config.media_type.as_str()));
                Ok(Self::Manifest(Manifest {
                    config: config.map(|config| config.digest()).transpose()?,
                    layers,
                }))
            }
            // Two readers must not see two images in one document.
            (Some(_), Some(_)) => Err(unusable("its manifest has both layers and manifests")),
            (None, None) => Err(unusable("its manifest has neither layers nor manifests")),
        }
    }
}

/// An image of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Digest of the image's manifest or index.
    pub digest: [u8; 32],
    /// Whether the index says that it is for the platform.
    pub has_platform: bool,
}

/// Images for several platforms, or of a folder.
#[derive(Clone)]
pub struct Index(Vec<Descriptor>);

impl std::fmt::Debug for Index {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Index of {}", self.0.len())
    }
}

impl Index {
    /// The image for a platform.
    pub fn of_platform(&self, wanted: &Platform) -> Result<Found, Failure> {
        let matching = self
            .0
            .iter()
            .find(|image| image.platform().is_some_and(|platform| platform.matches(wanted)));
        if let Some(image) = matching {
            return Ok(Found {
                digest: image.digest()?,
                has_platform: true,
            });
        }
        match self.0.as_slice() {
            [only] if only.platform().is_none() => {
                return Ok(Found {
                    digest: only.digest()?,
                    has_platform: false,
                });
            }
            _ => {}
        }
        let platforms = self.0.iter().filter_map(Descriptor::platform);
        let platforms = platforms
            .filter(|platform| platform.is_known())
            .map(WirePlatform::text);
        Err(no_platform(wanted, &listed(platforms)))
    }

    /// The image that a folder has under a tag or digest, or the only one.
    pub fn tagged(&self, target: &LayoutTarget, platform: &Platform) -> Result<Found, Failure> {
        let wanted = |image: &&Descriptor| match target {
            LayoutTarget::Only => true,
            LayoutTarget::Tag(tag) => image.ref_name() == Some(tag.as_str()),
            LayoutTarget::Digest(digest) => image.digest().is_ok_and(|found| found == *digest),
        };
        let images: Vec<_> = self.0.iter().filter(wanted).cloned().collect();
        if images.is_empty() {
            let names = listed(
                self.0
                    .iter()
                    .filter_map(Descriptor::ref_name)
                    .map(text::brief_line),
            );
            let message = format!("the folder has no image \"{target}\"; it has {names}");
            return Err(Failure::precondition("OCI_IMAGE_NOT_FOUND", message));
        }
        let mut names: Vec<_> = images.iter().filter_map(Descriptor::ref_name).collect();
        names.dedup();
        if *target == LayoutTarget::Only && names.len() > 1 {
            let names = listed(names.into_iter().map(text::brief_line));
            let message = format!("the folder has several images: name one of {names}");
            return Err(Failure::precondition("OCI_IMAGE_AMBIGUOUS", message));
        }
        Self(images).of_platform(platform)
    }
}

/// Names in a message: sorted, each once, not too many.
fn listed(names: impl Iterator<Item = String>) -> String {
    let mut names: Vec<_> = names.collect();
    names.sort();
    names.dedup();
    let more = names.len().saturating_sub(MAX_NAMED);
    names.truncate(MAX_NAMED);
    match (names.is_empty(), more) {
        (true, _) => "none with a name".to_owned(),
        (false, 0) => names.join(", "),
        (false, more) => format!("{} and {more} more", names.join(", ")),
    }
}

fn no_platform(wanted: &Platform, there: &str) -> Failure {
    let message = format!("the OCI image is not for {wanted}; what there is: {there}");
    Failure::precondition("PLATFORM_NOT_FOUND", message)
}

/// Refuses an image whose configuration says that it is for another platform.
pub fn check_config(bytes: &[u8], wanted: &Platform) -> Result<(), Failure> {
    let config: WirePlatform = serde_json::from_slice(bytes).unwrap_or_default();
    let says = config.is_known() && !config.architecture.is_empty();
    match says && !config.matches(wanted) {
        true => Err(no_platform(wanted, &config.text())),
        false => Ok(()),
    }
}

/// One image.
#[derive(Clone)]
pub struct Manifest {
    /// Digest of the configuration, if it is one that says something of platforms.
    pub config: Option<[u8; 32]>,
    layers: Vec<Descriptor>,
}

impl std::fmt::Debug for Manifest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Manifest with {} layers", self.layers.len())
    }
}

/// A layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blob {
    /// SHA-256.
    pub digest: [u8; 32],
    /// Bytes.
    pub size: u64,
}

impl Manifest {
    /// Its layers, which have `max_size` bytes together at most.
    pub fn layers(&self, max_size: u64) -> Result<Vec<Blob>, Failure> {
        if self.layers.is_empty() || self.layers.len() > MAX_LAYERS {
            let problem = format!(
                "it has {} layers, and may have 1 to {MAX_LAYERS}",
                self.layers.len()
            );
            return Err(unusable(&problem));
        }
        let mut all = 0_u64;
        let mut layers = Vec::new();
        for layer in &self.layers {
            let end = LAYER_STARTS
                .iter()
                .find_map(|start| layer.media_type.strip_prefix(start));
            if !end.is_some_and(|end| LAYER_ENDS.contains(&end)) {
                let kind = text::brief_line(text::brief(&layer.media_type));
                return Err(unusable(&format!(
                    "a layer of it is \"{kind}\", and no archive of tar with gzip, zstd or neither"
                )));
            }
            let blob = Blob {
                digest: layer.digest()?,
                size: layer.size,
            };
            all = all.saturating_add(blob.size);
            if all > max_size {
                let digest = checksum_text(&blob.digest);
                let message = format!(
                    "the layers have more than the {max_size} bytes that the image may have: {digest} has {}",
                    blob.size
                );
                return Err(Failure::precondition("IMAGE_TOO_LARGE", message));
            }
            layers.push(blob);
        }
        Ok(layers)
    }
}

#[cfg(test)]
mod tests;
