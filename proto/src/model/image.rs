//! Images that the ImageService is to make.

use std::{collections::BTreeMap, path::PathBuf};

use super::{
    Violations,
    metadata::{self, Metadata},
    name::Name,
    vm::absolute,
};
use crate::v1::{self, image_spec::Source as WireSource};

/// Most bytes of an image, when nobody says anything else.
pub const DEFAULT_MAX_SIZE: u64 = 1 << 40;
/// Longest address in bytes.
pub const MAX_URL: usize = 4096;

/// An image that is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewImage {
    /// Unique among the node's images.
    pub name: Name,
    /// For selecting images.
    pub labels: BTreeMap<String, String>,
    /// For clients to keep.
    pub annotations: BTreeMap<String, String>,
    /// Whom the image belongs to; empty when nobody says.
    pub owner: String,
    /// Where it comes from.
    pub source: Source,
    /// SHA-256 of the file.
    pub checksum: Option<[u8; 32]>,
    /// Most bytes of the file, and of the disk in it.
    pub max_size: u64,
}

/// Where an image comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// An http or https address.
    Url(String),
    /// A file of the node.
    Path(PathBuf),
    /// The client sends it.
    Upload,
}

impl NewImage {
    /// Validates an image that is to be imported; `field` is its path in the request.
    ///
    /// # Errors
    ///
    /// All that is wrong with it.
    pub fn imported(image: Option<&v1::Image>, field: &str) -> Result<Self, Violations> {
        Self::new(image, field, false)
    }

    /// The same for one that the client sends.
    ///
    /// # Errors
    ///
    /// All that is wrong with it.
    pub fn uploaded(image: Option<&v1::Image>, field: &str) -> Result<Self, Violations> {
        Self::new(image, field, true)
    }

    fn new(image: Option<&v1::Image>, field: &str, upload: bool) -> Result<Self, Violations> {
        let mut found = Violations::default();
        let Some(image) = image else {
            found.add(field, "must be given");
            return Err(found);
        };
        if image.status.is_some() {
            found.add(
                format_args!("{field}.status"),
                "is set by the daemon: leave it out",
            );
        }
        let given = image.metadata.clone().unwrap_or_default();
        metadata::refuse_given(&mut found, &format!("{field}.metadata"), &given);
        let metadata = Metadata::new(&mut found, &format!("{field}.metadata"), &given);
        let spec = image.spec.clone().unwrap_or_default();
        let source = source(&mut found, field, spec.source.as_ref(), upload);
        let checksum = match spec.checksum.as_str() {
            "" => None,
            text => {
                let parsed = checksum(text);
                if parsed.is_none() {
                    found.add(
                        format_args!("{field}.spec.checksum"),
                        "must be \"sha256:\" and 64 hexadecimal digits",
                    );
                }
                parsed
            }
        };
        let max_size = match spec.max_size_bytes {
            0 => DEFAULT_MAX_SIZE,
            size => size.min(super::disk::MAX_SIZE),
        };
        match (metadata, source) {
            (Some(metadata), Some(source)) => found.or(Self {
                name: metadata.name,
                labels: metadata.labels,
                annotations: metadata.annotations,
                owner: metadata.owner,
                source,
                checksum,
                max_size,
            }),
            _ => Err(found),
        }
    }
}

fn source(found: &mut Violations, field: &str, source: Option<&WireSource>, upload: bool) -> Option<Source> {
    match source {
        None if upload => Some(Source::Upload),
        None => {
            found.add(
                format_args!("{field}.spec"),
                "must have a `url` or a `path`; an image that the client has is sent by UploadImage",
            );
            None
        }
        Some(_) if upload => {
            found.add(
                format_args!("{field}.spec"),
                "must have no source: the client sends the image",
            );
            None
        }
        Some(WireSource::Path(path)) => absolute(found, format!("{field}.spec.path"), path).map(Source::Path),
        Some(WireSource::Url(url)) => match wrong(url) {
            Some(problem) => {
                found.add(format_args!("{field}.spec.url"), problem);
                None
            }
            None => Some(Source::Url(url.clone())),
        },
    }
}

/// What is wrong with an address, if anything. Whether it leads anywhere is seen later.
fn wrong(url: &str) -> Option<&'static str> {
    let rest = ["http://", "https://"]
        .iter()
        .find_map(|scheme| {
            url.get(..scheme.len())
                .filter(|start| start.eq_ignore_ascii_case(scheme))
        })
        .and_then(|scheme| url.get(scheme.len()..));
    let Some(rest) = rest else {
        return Some("must begin with \"http://\" or \"https://\"");
    };
    let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if url.len() > MAX_URL {
        return Some("must have at most 4,096 bytes");
    }
    if !url.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Some("must have printable ASCII characters without blanks only: write others as %XX");
    }
    if host.is_empty() {
        return Some("must name a host");
    }
    if host.contains('@') {
        return Some("must not have a user or a password: it is shown to others");
    }
    None
}

/// The digest in "sha256:…".
pub fn checksum(text: &str) -> Option<[u8; 32]> {
    let digits = text.strip_prefix("sha256:").filter(|digits| digits.len() == 64)?;
    let mut bytes = [0; 32];
    for (byte, at) in bytes.iter_mut().zip((0..64).step_by(2)) {
        let pair = digits.get(at..at + 2)?;
        if !pair.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        *byte = u8::from_str_radix(pair, 16).ok()?;
    }
    Some(bytes)
}

/// "sha256:…" of a digest.
pub fn checksum_text(digest: &[u8]) -> String {
    let digits: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digits}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(source: Option<WireSource>, checksum: &str) -> v1::Image {
        v1::Image {
            metadata: Some(v1::ObjectMetadata {
                name: "debian".into(),
                ..Default::default()
            }),
            spec: Some(v1::ImageSpec {
                source,
                checksum: checksum.into(),
                ..Default::default()
            }),
            status: None,
        }
    }

    #[test]
    fn an_image_is_taken_with_the_defaults() {
        let url = "https://example.org/debian-13.qcow2?x=1";
        let digest = format!("sha256:{}", "aB".repeat(32));
        let new =
            NewImage::imported(Some(&image(Some(WireSource::Url(url.into())), &digest)), "image").unwrap();
        assert_eq!(
            (new.source, new.max_size),
            (Source::Url(url.into()), DEFAULT_MAX_SIZE)
        );
        assert_eq!(new.checksum, Some([0xab; 32]));
        assert_eq!(checksum_text(&[0xab; 32]), digest.to_lowercase());
        assert_eq!(
            NewImage::uploaded(Some(&image(None, "")), "open.image")
                .unwrap()
                .source,
            Source::Upload
        );
    }

    #[test]
    fn what_is_wrong_is_said_by_field() {
        for (url, checksum, field) in [
            ("file:///etc/shadow", "", "image.spec.url"),
            ("ftp://a/b", "", "image.spec.url"),
            ("http:///b", "", "image.spec.url"),
            ("http://me:secret@a/b", "", "image.spec.url"),
            ("http://a/ b", "", "image.spec.url"),
            ("http://a/b", "md5:00", "image.spec.checksum"),
            (
                "http://a/b",
                &format!("sha256:+{}", "0".repeat(63)),
                "image.spec.checksum",
            ),
        ] {
            let image = image(Some(WireSource::Url(url.into())), checksum);
            let found = NewImage::imported(Some(&image), "image").unwrap_err();
            assert_eq!(found.0[0].field, field, "{url}");
        }
        let found = NewImage::imported(Some(&image(None, "")), "image").unwrap_err();
        assert_eq!(found.0[0].field, "image.spec");
        let path = Some(WireSource::Path("/a".into()));
        assert!(NewImage::uploaded(Some(&image(path, "")), "image").is_err());
    }
}
