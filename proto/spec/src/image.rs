//! Images that the ImageService is to make.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use vmmd_api::v1::{self, image_spec::Source as WireSource};

use super::{
    Violations,
    metadata::{self, Metadata},
    name::Name,
    oci::{self, LayoutTarget, Platform, Reference},
    vm::absolute,
};

/// Default maximum size of an image in bytes.
pub const DEFAULT_MAX_SIZE: u64 = 1 << 40;
/// Longest address in bytes.
pub const MAX_URL: usize = 4096;
/// Longest password in bytes: tokens of registries have a few thousand.
const MAX_PASSWORD: usize = 64 << 10;

/// An image that is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewImage {
    /// Unique among the node's images.
    pub name: Name,
    /// For selecting images.
    pub labels: BTreeMap<String, String>,
    /// For clients to keep.
    pub annotations: BTreeMap<String, String>,
    /// Owner of the image; empty if not set.
    pub owner: String,
    /// Where it comes from.
    pub source: Source,
    /// SHA-256 or SHA-512 of the file: its length says which.
    pub checksum: Option<Vec<u8>>,
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
    /// An OCI image in a registry.
    Oci(Box<Oci>),
    /// An OCI image in a folder of the node.
    OciLayout {
        /// The folder.
        path: PathBuf,
        /// Which image in it.
        target: LayoutTarget,
        /// Platform of the image; the node's if `None`.
        platform: Option<Platform>,
    },
    /// The client sends it.
    Upload,
}

/// An OCI image in a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Oci {
    /// Which image.
    pub reference: Reference,
    /// Platform of the image; the node's if `None`.
    pub platform: Option<Platform>,
    /// Whether the registry is spoken to by HTTP.
    pub plain_http: bool,
    /// For a registry that asks for them.
    pub credentials: Option<Credentials>,
}

/// A user's name and password.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// Without a colon.
    pub username: String,
    /// Never shown.
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials")
    }
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
            text => file_checksum(text)
                .map_err(|problem| found.add(format_args!("{field}.spec.checksum"), problem))
                .ok(),
        };
        if checksum.is_some() && matches!(source, Some(Source::Oci(_) | Source::OciLayout { .. })) {
            let problem = "is of a single file: an OCI image is named by its digest, as in NAME@sha256:…";
            found.add(format_args!("{field}.spec.checksum"), problem);
        }
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
                "must have a `url`, a `path`, `oci` or `ociLayout`; an image that the client has is sent by UploadImage",
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
        Some(WireSource::Oci(source)) => registry(found, &format!("{field}.spec.oci"), source),
        Some(WireSource::OciLayout(source)) => layout(found, &format!("{field}.spec.ociLayout"), source),
    }
}

fn registry(found: &mut Violations, field: &str, source: &v1::OciSource) -> Option<Source> {
    let reference = Reference::parse(&source.reference)
        .map_err(|problem| found.add(format_args!("{field}.reference"), problem));
    let credentials = source.credentials.as_ref().map(|given| {
        let control = |text: &str| text.chars().any(char::is_control);
        let field = format!("{field}.credentials");
        if given.username.is_empty() || given.username.contains(':') || control(&given.username) {
            let problem = "must be given, without a colon and control characters";
            found.add(format_args!("{field}.username"), problem);
        }
        if given.password.is_empty() || control(&given.password) {
            let problem = "must be given, without control characters";
            found.add(format_args!("{field}.password"), problem);
        }
        if given.username.len() > MAX_URL || given.password.len() > MAX_PASSWORD {
            found.add(
                field,
                "must have at most 4,096 bytes of a name and 65,536 of a password",
            );
        }
        Credentials {
            username: given.username.clone(),
            password: given.password.clone(),
        }
    });
    let platform = platform(found, field, &source.platform)?;
    Some(Source::Oci(Box::new(Oci {
        reference: reference.ok()?,
        platform,
        plain_http: source.plain_http,
        credentials,
    })))
}

fn layout(found: &mut Violations, field: &str, source: &v1::OciLayoutSource) -> Option<Source> {
    let path = absolute(found, format!("{field}.path"), &source.path);
    let target = LayoutTarget::parse(&source.reference)
        .map_err(|problem| found.add(format_args!("{field}.reference"), problem));
    let platform = platform(found, field, &source.platform)?;
    Some(Source::OciLayout {
        path: path?,
        target: target.ok()?,
        platform,
    })
}

/// Returns `None` for an invalid platform.
fn platform(found: &mut Violations, field: &str, text: &str) -> Option<Option<Platform>> {
    if text.is_empty() {
        return Some(None);
    }
    let parsed = oci::Platform::parse(text);
    if parsed.is_none() {
        let problem = "must be \"OS/ARCHITECTURE\" or \"OS/ARCHITECTURE/VARIANT\", as in \"linux/amd64\"";
        found.add(format_args!("{field}.platform"), problem);
    }
    parsed.map(Some)
}

/// Returns the problem with an address, if any. Whether the address is reachable is checked later.
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
    digits::<32>(text.strip_prefix("sha256:")?)
}

/// The checksum of a file: "sha256:…", "sha512:…", or the digits alone, as `sha256sum` and `sha512sum` print them.
///
/// # Errors
///
/// The form is another one; the text names the right ones.
pub fn file_checksum(text: &str) -> Result<Vec<u8>, &'static str> {
    let (kind, hexadecimal) = text.split_once(':').unwrap_or(("", text));
    let sha256 = || digits::<32>(hexadecimal).map(|bytes| bytes.to_vec());
    let sha512 = || digits::<64>(hexadecimal).map(|bytes| bytes.to_vec());
    let found = match kind.to_ascii_lowercase().as_str() {
        "sha256" => sha256(),
        "sha512" => sha512(),
        "" => sha256().or_else(sha512),
        _ => None,
    };
    found.ok_or_else(|| {
        let weak = ["md5", "sha1"].iter().any(|weak| kind.eq_ignore_ascii_case(weak));
        match weak || (kind.is_empty() && matches!(hexadecimal.len(), 32 | 40)) {
            true => {
                "must be SHA-256 or SHA-512: files with equal MD5 or SHA-1 can be made, so those prove nothing"
            }
            false => {
                "must be \"sha256:\" and 64 hexadecimal digits, or \"sha512:\" and 128, or the digits alone"
            }
        }
    })
}

/// Bytes in hexadecimal digits.
fn digits<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else {
        return None;
    };
    if pairs.len() != N {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(pairs) {
        let [high, low] = pair.map(|digit| char::from(digit).to_digit(16));
        *byte = u8::try_from((high? << 4) | low?).ok()?;
    }
    Some(bytes)
}

/// "sha256:…" or "sha512:…" of a digest.
pub fn checksum_text(digest: &[u8]) -> String {
    let kind = if digest.len() == 64 { "sha512" } else { "sha256" };
    let digits: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{kind}:{digits}")
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
        assert_eq!(new.checksum, Some(vec![0xab; 32]));
        assert_eq!(checksum_text(&[0xab; 32]), digest.to_lowercase());
        assert_eq!(
            NewImage::uploaded(Some(&image(None, "")), "open.image")
                .unwrap()
                .source,
            Source::Upload
        );
    }

    #[test]
    fn file_checksum_is_sha256_or_sha512_with_or_without_a_name() {
        for (text, length) in [
            (format!("sha256:{}", "aB".repeat(32)), 32),
            (format!("SHA512:{}", "aB".repeat(64)), 64),
            ("ab".repeat(32), 32),
            ("ab".repeat(64), 64),
        ] {
            assert_eq!(file_checksum(&text), Ok(vec![0xab; length]), "{text}");
        }
        assert_eq!(checksum_text(&[1; 64]), format!("sha512:{}", "01".repeat(64)));
        for (text, words) in [
            (format!("sha1:{}", "ab".repeat(20)), "prove nothing"),
            (format!("MD5:{}", "ab".repeat(16)), "prove nothing"),
            ("ab".repeat(20), "prove nothing"),
            ("ab".repeat(16), "prove nothing"),
            (format!("sha512:{}", "ab".repeat(32)), "hexadecimal"),
            (format!("sha256:{}", "ab".repeat(64)), "hexadecimal"),
            (format!("sha256:+{}", "0".repeat(63)), "hexadecimal"),
            ("\u{e9}".repeat(32), "hexadecimal"),
            (String::new(), "hexadecimal"),
        ] {
            let problem = file_checksum(&text).unwrap_err();
            assert!(problem.contains(words), "{text}: {problem}");
        }
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

    #[test]
    fn an_oci_image_is_taken_by_its_reference_and_what_is_wrong_is_said_by_field() {
        let source = |reference: &str, platform: &str, user: &str| v1::OciSource {
            reference: reference.into(),
            platform: platform.into(),
            credentials: (!user.is_empty()).then(|| v1::OciCredentials {
                username: user.into(),
                password: "secret".into(),
            }),
            ..Default::default()
        };
        let right = source("registry.example/debian:13", "linux/arm64", "me");
        let new = NewImage::imported(Some(&image(Some(WireSource::Oci(right)), "")), "image").unwrap();
        let shown = format!("{new:?}");
        assert!(!shown.contains("secret"), "{shown}");
        let Source::Oci(oci) = new.source else {
            panic!("{shown}");
        };
        assert_eq!(oci.reference.to_string(), "registry.example/debian:13");
        assert_eq!(oci.platform.unwrap().to_string(), "linux/arm64");
        let checksum = format!("sha256:{}", "0".repeat(64));
        for (reference, platform, user, checksum, field) in [
            ("debian:13", "", "", "", "image.spec.oci.reference"),
            ("a.b/debian", "linux", "", "", "image.spec.oci.platform"),
            ("a.b/debian", "", "a:b", "", "image.spec.oci.credentials.username"),
            ("a.b/debian", "", "", checksum.as_str(), "image.spec.checksum"),
        ] {
            let wrong = WireSource::Oci(source(reference, platform, user));
            let found = NewImage::imported(Some(&image(Some(wrong), checksum)), "image").unwrap_err();
            assert_eq!(found.0[0].field, field, "{reference} {platform} {user}");
        }
        for (path, reference, field) in [
            ("relative", "", "image.spec.ociLayout.path"),
            ("/a", "no tag", "image.spec.ociLayout.reference"),
        ] {
            let wrong = WireSource::OciLayout(v1::OciLayoutSource {
                path: path.into(),
                reference: reference.into(),
                ..Default::default()
            });
            let found = NewImage::imported(Some(&image(Some(wrong), "")), "image").unwrap_err();
            assert_eq!(found.0[0].field, field);
        }
    }
}
