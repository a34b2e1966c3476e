//! References to OCI images (OCI Distribution Specification 1.1, "Pulling manifests").

use std::{fmt, net::IpAddr};

use super::image::{checksum, checksum_text};

/// Longest reference in bytes.
const MAX_REFERENCE: usize = 1024;
/// Longest tag in bytes.
const MAX_TAG: usize = 128;
/// The tag when a reference has neither a tag nor a digest.
const LATEST: &str = "latest";
/// Name of Docker Hub in references, and its host.
const DOCKER_HUB: (&str, &str) = ("docker.io", "registry-1.docker.io");

/// An image in a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// Host, and port if there is one.
    registry: String,
    repository: String,
    tag: String,
    digest: Option<[u8; 32]>,
}

impl Reference {
    /// Reads `HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST]`.
    ///
    /// # Errors
    ///
    /// The problem with the reference.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        if text.len() > MAX_REFERENCE {
            return Err("must have at most 1,024 bytes");
        }
        let (name, digest) = match text.split_once('@') {
            Some((name, digest)) => {
                let digest = checksum(digest)
                    .ok_or("must have \"sha256:\" and 64 hexadecimal digits after its \"@\"")?;
                (name, Some(digest))
            }
            None => (text, None),
        };
        let (registry, path) = name.split_once('/').unwrap_or(("", name));
        if !is_registry(registry) {
            return Err(
                "must begin with the host of a registry and a \"/\", as in \"registry.example/debian:13\"",
            );
        }
        let (repository, tag) = match path.split_once(':') {
            Some((repository, tag)) if is_tag(tag) => (repository, tag),
            Some(_) => {
                return Err(
                    "must have a tag of at most 128 letters, digits, \"_\", \".\" and \"-\" after its \":\"",
                );
            }
            None if digest.is_some() => (path, ""),
            None => (path, LATEST),
        };
        if !repository.split('/').all(is_component) {
            return Err(
                "must have a repository of lower-case letters, digits, \".\", \"_\" and \"-\" in parts that \"/\" divides",
            );
        }
        Ok(Self {
            registry: registry.to_owned(),
            repository: repository.to_owned(),
            tag: tag.to_owned(),
            digest,
        })
    }

    /// Host, and port if there is one, of the registry.
    pub fn host(&self) -> &str {
        match self.registry.as_str() {
            registry if registry == DOCKER_HUB.0 => DOCKER_HUB.1,
            registry => registry,
        }
    }

    /// The name of the repository in the registry.
    pub fn repository(&self) -> String {
        match self.registry == DOCKER_HUB.0 && !self.repository.contains('/') {
            true => format!("library/{}", self.repository),
            false => self.repository.clone(),
        }
    }

    /// The tag; empty when there is a digest alone.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// SHA-256 of the manifest or index.
    pub fn digest(&self) -> Option<[u8; 32]> {
        self.digest
    }

    /// Whether the registry is on this machine.
    pub fn is_loopback(&self) -> bool {
        let (host, _) = split_port(&self.registry);
        host == "localhost" || address(host).is_some_and(|address| address.is_loopback())
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        if !self.tag.is_empty() {
            write!(f, ":{}", self.tag)?;
        }
        match self.digest {
            Some(digest) => write!(f, "@{}", checksum_text(&digest)),
            None => Ok(()),
        }
    }
}

/// Host and port: `[::1]:5000` has both.
fn split_port(registry: &str) -> (&str, Option<&str>) {
    match registry.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port)),
        _ => (registry, None),
    }
}

fn address(host: &str) -> Option<IpAddr> {
    let v6 = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    match v6 {
        Some(v6) => v6.parse().ok().map(IpAddr::V6),
        None => host.parse().ok().map(IpAddr::V4),
    }
}

/// Whether the first part of a name is a host, and no part of a repository.
fn is_registry(text: &str) -> bool {
    let (host, port) = split_port(text);
    let is_name = |host: &str| {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
        !host.is_empty() && host.bytes().all(known) && !host.starts_with(['-', '.']) && !host.contains("..")
    };
    let meant = host == "localhost" || host.contains(['.', '[']) || port.is_some();
    let port = port
        .is_none_or(|port| port.bytes().all(|digit| digit.is_ascii_digit()) && port.parse::<u16>().is_ok());
    meant && port && (is_name(host) || address(host).is_some())
}

fn is_tag(text: &str) -> bool {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
    !text.is_empty() && text.len() <= MAX_TAG && text.bytes().all(known) && !text.starts_with(['.', '-'])
}

/// One part of a repository's name: letters and digits, and between them ".", "_", "__" or any number of "-".
fn is_component(text: &str) -> bool {
    let is_word = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    let ends = bytes.first().is_some_and(is_word) && bytes.last().is_some_and(is_word);
    let mut between = bytes.split(is_word).filter(|separator| !separator.is_empty());
    ends && between.all(|separator| {
        matches!(separator, b"." | b"_" | b"__") || separator.iter().all(|byte| *byte == b'-')
    })
}

/// Which image in a layout folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayoutTarget {
    /// The only one.
    Only,
    /// Tag of the image in the folder.
    Tag(String),
    /// SHA-256 of its manifest or index.
    Digest([u8; 32]),
}

impl LayoutTarget {
    /// Reads a tag, a digest, or nothing.
    ///
    /// # Errors
    ///
    /// The problem with the text.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        if text.is_empty() {
            return Ok(Self::Only);
        }
        if let Some(digest) = checksum(text) {
            return Ok(Self::Digest(digest));
        }
        // The specification of layouts has more characters in it than a tag has, since it may be a whole reference.
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:@/+".contains(&byte);
        match text.len() <= MAX_REFERENCE && text.bytes().all(known) {
            true => Ok(Self::Tag(text.to_owned())),
            false => Err("must be a tag, or \"sha256:\" and 64 hexadecimal digits"),
        }
    }
}

impl fmt::Display for LayoutTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Only => Ok(()),
            Self::Tag(tag) => f.write_str(tag),
            Self::Digest(digest) => f.write_str(&checksum_text(digest)),
        }
    }
}

/// Platform of an image, in Go's terms (OCI Image Index Specification, "platform").
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Platform {
    /// Such as "linux".
    pub os: String,
    /// Such as "amd64".
    pub architecture: String,
    /// Such as "v7"; any when empty.
    pub variant: String,
}

impl Platform {
    /// Reads `OS/ARCHITECTURE[/VARIANT]`.
    pub fn parse(text: &str) -> Option<Self> {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        let mut parts = text.split('/');
        let mut part = || {
            let part = parts.next()?;
            (!part.is_empty() && part.len() <= 64 && part.bytes().all(known)).then(|| part.to_owned())
        };
        let (os, architecture) = (part()?, part()?);
        let variant = match text.matches('/').count() {
            1 => String::new(),
            2 => part()?,
            _ => return None,
        };
        Some(Self {
            os,
            architecture,
            variant,
        })
    }

    /// Returns this node's platform.
    pub fn native() -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        Self {
            os: "linux".to_owned(),
            architecture: architecture.to_owned(),
            variant: String::new(),
        }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        match self.variant.as_str() {
            "" => Ok(()),
            variant => write!(f, "/{variant}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_is_taken_apart() {
        let digest = format!("sha256:{}", "ab".repeat(32));
        for (text, host, repository, tag, has_digest) in [
            (
                "registry.example/debian",
                "registry.example",
                "debian",
                "latest",
                false,
            ),
            (
                "localhost/a/b__c/d-e.f:1",
                "localhost",
                "a/b__c/d-e.f",
                "1",
                false,
            ),
            (
                "127.0.0.1:5000/a:T_1.x-y",
                "127.0.0.1:5000",
                "a",
                "T_1.x-y",
                false,
            ),
            ("[::1]:5000/a", "[::1]:5000", "a", "latest", false),
            ("node5:5000/a", "node5:5000", "a", "latest", false),
            (&format!("a.b/c@{digest}"), "a.b", "c", "", true),
            (&format!("a.b/c:d@{digest}"), "a.b", "c", "d", true),
            (
                "docker.io/debian:13",
                "registry-1.docker.io",
                "library/debian",
                "13",
                false,
            ),
            (
                "docker.io/kubevirt/x:13",
                "registry-1.docker.io",
                "kubevirt/x",
                "13",
                false,
            ),
        ] {
            let reference = Reference::parse(text).unwrap_or_else(|problem| panic!("{text}: {problem}"));
            assert_eq!(
                (reference.host(), reference.repository().as_str(), reference.tag()),
                (host, repository, tag)
            );
            assert_eq!(reference.digest().is_some(), has_digest);
            assert_eq!(Reference::parse(&reference.to_string()), Ok(reference), "{text}");
        }
    }

    #[test]
    fn what_is_no_reference_is_refused() {
        let digest = "ab".repeat(32);
        for text in [
            "",
            "debian",
            "debian:13",
            "library/debian",
            "a.b",
            "a.b/",
            "a.b/Debian",
            "a.b/c/",
            "a.b//c",
            "a.b/../c",
            "a.b/c..d",
            "a.b/-c",
            "a.b/c?d",
            "a.b/c:",
            "a.b/c:.x",
            "a.b/c:x/y",
            "a.b/c:x y",
            "a.b:99999/c",
            "a.b:/c",
            "a.b:+1/c",
            "me@a.b/c",
            "me:secret@a.b/c",
            "a.b/c@sha256:12",
            &format!("a.b/c@sha512:{digest}"),
            &format!("a.b/{}", "c".repeat(1024)),
            "[::1/c",
            "a_b.c/d",
            "https://a.b/c",
        ] {
            assert!(Reference::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_registry_on_this_machine_is_known_by_its_address() {
        for (registry, loopback) in [
            ("localhost:5000", true),
            ("127.8.9.1", true),
            ("[::1]:1", true),
            ("localhost.example", false),
            ("127.0.0.1.example", false),
            ("10.0.0.1:5000", false),
        ] {
            let reference = Reference::parse(&format!("{registry}/a")).unwrap();
            assert_eq!(reference.is_loopback(), loopback, "{registry}");
        }
    }

    #[test]
    fn a_platform_has_two_or_three_parts() {
        for text in ["linux/amd64", "linux/arm/v7", "windows/amd64"] {
            assert_eq!(Platform::parse(text).unwrap().to_string(), text);
        }
        for text in [
            "",
            "linux",
            "linux/",
            "/amd64",
            "linux/arm/",
            "linux/arm/v7/x",
            "linux/a b",
        ] {
            assert_eq!(Platform::parse(text), None, "{text}");
        }
        assert!(Platform::parse(&Platform::native().to_string()).is_some());
    }

    #[test]
    fn an_image_of_a_folder_is_named_by_tag_or_digest() {
        let digest = format!("sha256:{}", "ab".repeat(32));
        for text in ["", "13", "registry.example/debian:13", &digest] {
            assert_eq!(LayoutTarget::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(LayoutTarget::parse(&digest), Ok(LayoutTarget::Digest([0xab; 32])));
        assert!(LayoutTarget::parse("a b").is_err());
    }
}
