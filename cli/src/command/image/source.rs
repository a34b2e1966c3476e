//! Where an image comes from, as it stands on the command line.

use std::{
    fs,
    io::{self, Read as _},
    path::Path,
};

use vmmd_api::v1::{self, image_spec::Source};

use crate::{
    args::image::Oci,
    failure::{Code, Failure, Result},
};

/// Before an image of a registry.
const REGISTRY: &str = "oci://";
/// Before a folder with OCI images.
const LAYOUT: &str = "oci-layout:";

/// Parses the source, with the options for an OCI image.
pub fn from_text(from: &str, oci: &Oci) -> Result<Source> {
    let platform = oci.platform.clone().unwrap_or_default();
    if let Some(reference) = from.strip_prefix(REGISTRY) {
        return Ok(Source::Oci(v1::OciSource {
            reference: reference.to_owned(),
            platform,
            plain_http: oci.plain_http,
            credentials: credentials(oci)?,
        }));
    }
    if oci.plain_http || oci.username.is_some() {
        return Err(wrong(
            "--plain-http and --username are for an image of a registry: oci://…",
        ));
    }
    if let Some(folder) = from.strip_prefix(LAYOUT) {
        let (path, reference) = divided(folder);
        return Ok(Source::OciLayout(v1::OciLayoutSource {
            path: path.to_owned(),
            reference: reference.to_owned(),
            platform,
        }));
    }
    if oci.platform.is_some() {
        return Err(wrong("--platform is for an OCI image: oci://… or oci-layout:…"));
    }
    if from.starts_with('/') {
        return Ok(Source::Path(from.to_owned()));
    }
    if let Some(reference) = from.strip_prefix("docker://") {
        return Err(wrong(&format!(
            "an image of a registry is named \"{REGISTRY}{reference}\""
        )));
    }
    if !from.contains("://") {
        return Err(wrong(&format!(
            "\"{from}\" is neither an address (http://…, https://…, oci://…, oci-layout:…) nor the absolute path of a file of the node; \
             `vmmctl image upload NAME FILE` sends a file of yours"
        )));
    }
    Ok(Source::Url(from.to_owned()))
}

fn wrong(message: &str) -> Failure {
    Failure::new(Code::Usage, message)
}

/// The folder, and the tag or digest behind it.
fn divided(folder: &str) -> (&str, &str) {
    if let Some((path, digest)) = folder.split_once("@sha256:") {
        return (path, folder.get(path.len() + 1..).unwrap_or(digest));
    }
    match folder.rsplit_once(':') {
        Some((path, tag)) if !tag.contains('/') => (path, tag),
        _ => (folder, ""),
    }
}

fn credentials(oci: &Oci) -> Result<Option<v1::OciCredentials>> {
    let (Some(username), Some(path)) = (&oci.username, &oci.password_file) else {
        return Ok(None);
    };
    Ok(Some(v1::OciCredentials {
        username: username.clone(),
        password: password(path)?,
    }))
}

/// The one line of the file.
fn password(path: &Path) -> Result<String> {
    let mut text = String::new();
    let read = match path.as_os_str() == "-" {
        true => io::stdin().read_to_string(&mut text).map(|_| text),
        false => fs::read_to_string(path),
    };
    let text = read.map_err(|error| Failure::new(Code::NotFound, format!("{}: {error}", path.display())))?;
    let line = text.strip_suffix('\n').unwrap_or(&text);
    Ok(line.strip_suffix('\r').unwrap_or(line).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn oci() -> Oci {
        Oci {
            platform: None,
            plain_http: false,
            username: None,
            password_file: None,
        }
    }

    #[test]
    fn a_source_is_known_by_how_it_begins() {
        let digest = format!("sha256:{}", "ab".repeat(32));
        let layout = |path: &str, reference: &str| {
            Source::OciLayout(v1::OciLayoutSource {
                path: path.into(),
                reference: reference.into(),
                platform: String::new(),
            })
        };
        for (text, expected) in [
            ("/srv/a.raw", Source::Path("/srv/a.raw".into())),
            ("https://a.b/c:d", Source::Url("https://a.b/c:d".into())),
            (
                "oci://a.b:5000/c:d",
                Source::Oci(v1::OciSource {
                    reference: "a.b:5000/c:d".into(),
                    ..Default::default()
                }),
            ),
            ("oci-layout:/srv/a", layout("/srv/a", "")),
            ("oci-layout:/srv/a:13", layout("/srv/a", "13")),
            ("oci-layout:/srv/a:b/c", layout("/srv/a:b/c", "")),
            (&format!("oci-layout:/srv/a@{digest}"), layout("/srv/a", &digest)),
        ] {
            assert_eq!(from_text(text, &oci()).unwrap(), expected);
        }
    }

    #[test]
    fn what_is_no_source_is_refused_with_what_was_meant() {
        for (text, meant) in [
            ("disk.qcow2", "absolute path"),
            ("./disk.qcow2", "`vmmctl image upload NAME FILE`"),
            ("debian:13", "oci://…"),
            ("docker://a.b/c:d", "\"oci://a.b/c:d\""),
        ] {
            let failure = from_text(text, &oci()).unwrap_err();
            assert_eq!(failure.code, Code::Usage);
            assert!(failure.message.contains(meant), "{}", failure.message);
        }
    }

    #[test]
    fn flags_of_oci_images_are_refused_with_other_sources() {
        let platform = || Oci {
            platform: Some("linux/arm64".into()),
            ..oci()
        };
        let plain = || Oci {
            plain_http: true,
            ..oci()
        };
        for (text, flags, right) in [
            ("oci://a.b/c", platform(), true),
            ("oci-layout:/a", platform(), true),
            ("https://a.b/c", platform(), false),
            ("/a", platform(), false),
            ("oci://a.b/c", plain(), true),
            ("oci-layout:/a", plain(), false),
            ("https://a.b/c", plain(), false),
        ] {
            assert_eq!(from_text(text, &flags).is_ok(), right, "{text}");
        }
    }
}
