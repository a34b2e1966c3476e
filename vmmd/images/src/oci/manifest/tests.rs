//! Documents as tools write them, and malformed ones.

use serde_json::{Value, json};

use super::*;

const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

fn digest(byte: u8) -> String {
    checksum_text(&[byte; 32])
}

fn descriptor(kind: &str, byte: u8, size: impl Into<Value>) -> Value {
    json!({"mediaType": kind, "digest": digest(byte), "size": size.into()})
}

fn manifest(layers: &[Value]) -> Vec<u8> {
    json!({"schemaVersion": 2, "config": descriptor(CONFIGS[0], 9, 2), "layers": layers})
        .to_string()
        .into_bytes()
}

fn layers(bytes: &[u8]) -> Result<Vec<Blob>, Failure> {
    match Document::read(bytes)? {
        Document::Manifest(manifest) => manifest.layers(1000),
        Document::Index(_) => panic!("it is no index"),
    }
}

fn index(images: &Value) -> Result<Index, Failure> {
    let bytes = json!({"schemaVersion": 2, "manifests": images}).to_string();
    match Document::read(bytes.as_bytes())? {
        Document::Index(index) => Ok(index),
        Document::Manifest(_) => panic!("it is no manifest"),
    }
}

/// Descriptor of an image in an index, with platform and tag.
fn image(byte: u8, platform: &str, tag: &str) -> Value {
    let mut image = descriptor("application/vnd.oci.image.manifest.v1+json", byte, 500);
    let mut parts = platform.split('/');
    if !platform.is_empty() {
        image["platform"] = json!({"os": parts.next(), "architecture": parts.next()});
        if let Some(variant) = parts.next() {
            image["platform"]["variant"] = variant.into();
        }
    }
    if !tag.is_empty() {
        image["annotations"] = json!({REF_NAME: tag});
    }
    image
}

fn platform(text: &str) -> Platform {
    Platform::parse(text).unwrap()
}

#[test]
fn the_layers_of_a_manifest_are_those_of_archives() {
    let docker = "application/vnd.docker.image.rootfs.diff.tar.gzip";
    let plain = "application/vnd.oci.image.layer.v1.tar";
    let zstd = "application/vnd.oci.image.layer.v1.tar+zstd";
    let all: Vec<_> = [LAYER, docker, plain, zstd]
        .iter()
        .zip(1..)
        .map(|(kind, byte)| descriptor(kind, byte, 250))
        .collect();
    let found = layers(&manifest(&all)).unwrap();
    let expected: Vec<_> = (1..=4)
        .map(|byte| Blob {
            digest: [byte; 32],
            size: 250,
        })
        .collect();
    assert_eq!(found, expected);
}

#[test]
fn a_hostile_manifest_is_refused_with_the_reason() {
    let layer = || descriptor(LAYER, 1, 10);
    let with = |key: &str, value: Value| {
        let mut layer = layer();
        layer[key] = value;
        manifest(&[layer])
    };
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000)).into_bytes();
    for (bytes, reason, words) in [
        (b"<html>".to_vec(), "IMAGE_UNUSABLE", "its manifest is none"),
        (deep, "IMAGE_UNUSABLE", "its manifest is none"),
        (b"{}".to_vec(), "IMAGE_UNUSABLE", "version of its manifest"),
        (
            br#"{"schemaVersion":1,"fsLayers":[]}"#.to_vec(),
            "IMAGE_UNUSABLE",
            "version of its manifest",
        ),
        (br#"{"schemaVersion":2}"#.to_vec(), "IMAGE_UNUSABLE", "neither"),
        (
            br#"{"schemaVersion":2,"layers":[],"manifests":[]}"#.to_vec(),
            "IMAGE_UNUSABLE",
            "both",
        ),
        (manifest(&[]), "IMAGE_UNUSABLE", "0 layers"),
        (manifest(&vec![layer(); 129]), "IMAGE_UNUSABLE", "129 layers"),
        (with("size", 1001.into()), "IMAGE_TOO_LARGE", "1001"),
        (
            with("size", u64::MAX.into()),
            "IMAGE_TOO_LARGE",
            "18446744073709551615",
        ),
        (
            manifest(&[descriptor(LAYER, 1, u64::MAX), descriptor(LAYER, 2, u64::MAX)]),
            "IMAGE_TOO_LARGE",
            "more than the 1000",
        ),
        (
            manifest(&[descriptor(LAYER, 1, 600), descriptor(LAYER, 2, 600)]),
            "IMAGE_TOO_LARGE",
            "more than the 1000",
        ),
        (with("size", json!(-1)), "IMAGE_UNUSABLE", "its manifest is none"),
        (
            with("size", json!(1e300)),
            "IMAGE_UNUSABLE",
            "its manifest is none",
        ),
        (with("digest", "sha256:12".into()), "IMAGE_UNUSABLE", "sha256:12"),
        (
            with("digest", "sha256:../../../etc/shadow".into()),
            "IMAGE_UNUSABLE",
            "only those of SHA-256",
        ),
        (
            with("digest", format!("sha512:{}", "a".repeat(128)).into()),
            "IMAGE_UNUSABLE",
            "only those of SHA-256",
        ),
        (
            with("mediaType", "application/octet-stream".into()),
            "IMAGE_UNUSABLE",
            "octet-stream",
        ),
        (
            with("mediaType", format!("{LAYER}+encrypted").into()),
            "IMAGE_UNUSABLE",
            "encrypted",
        ),
        (
            with(
                "mediaType",
                "application/vnd.oci.image.layer.nondistributable.v1.tar".into(),
            ),
            "IMAGE_UNUSABLE",
            "nondistributable",
        ),
    ] {
        let failure = layers(&bytes).unwrap_err();
        assert_eq!(failure.reason, reason, "{failure}");
        assert!(
            failure.message.contains(words) && failure.message.len() < 500,
            "{failure}"
        );
    }
}

#[test]
fn an_index_has_the_image_of_a_platform_or_says_what_it_has() {
    let all = index(&json!([
        image(1, "linux/arm/v6", ""),
        image(2, "linux/arm/v7", ""),
        image(3, "linux/amd64", ""),
        image(4, "unknown/unknown", ""),
        image(5, "linux/amd64", ""),
    ]))
    .unwrap();
    for (wanted, byte) in [("linux/amd64", 3), ("linux/arm", 1), ("linux/arm/v7", 2)] {
        let found = all.of_platform(&platform(wanted)).unwrap();
        assert_eq!((found.digest, found.has_platform), ([byte; 32], true), "{wanted}");
    }
    let failure = all.of_platform(&platform("linux/s390x")).unwrap_err();
    assert_eq!(failure.reason, "PLATFORM_NOT_FOUND");
    let listed = "not for linux/s390x; what there is: linux/amd64, linux/arm/v6, linux/arm/v7";
    assert!(failure.message.ends_with(listed), "{failure}");
    // Tools that write one image for no platform in particular leave it out.
    let only = index(&json!([image(1, "", "")])).unwrap();
    let found = only.of_platform(&platform("linux/amd64")).unwrap();
    assert_eq!((found.digest, found.has_platform), ([1; 32], false));
    let several = index(&json!([image(1, "", ""), image(2, "", "")])).unwrap();
    assert!(several.of_platform(&platform("linux/amd64")).is_err());
    assert!(
        index(&json!([]))
            .unwrap()
            .of_platform(&platform("linux/amd64"))
            .is_err()
    );
    let many: Vec<_> = (0..200)
        .map(|number| image(1, &format!("os{number}/x"), ""))
        .collect();
    let failure = index(&json!(many))
        .unwrap()
        .of_platform(&platform("linux/amd64"))
        .unwrap_err();
    assert!(failure.message.ends_with("and 180 more"), "{failure}");
}

#[test]
fn a_folder_has_images_by_tag_and_digest() {
    let native = platform("linux/amd64");
    let all = index(&json!([
        image(1, "", "12"),
        image(2, "linux/arm64", "13"),
        image(3, "linux/amd64", "13"),
    ]))
    .unwrap();
    let tag = |text: &str| LayoutTarget::parse(text).unwrap();
    for (target, byte) in [("12", 1), ("13", 3), (digest(1).as_str(), 1)] {
        assert_eq!(
            all.tagged(&tag(target), &native).unwrap().digest,
            [byte; 32],
            "{target}"
        );
    }
    for (target, reason, words) in [
        ("", "OCI_IMAGE_AMBIGUOUS", "12, 13"),
        ("14", "OCI_IMAGE_NOT_FOUND", "it has 12, 13"),
        (digest(7).as_str(), "OCI_IMAGE_NOT_FOUND", "it has 12, 13"),
        (digest(2).as_str(), "PLATFORM_NOT_FOUND", "linux/arm64"),
    ] {
        let failure = all.tagged(&tag(target), &native).unwrap_err();
        assert_eq!(failure.reason, reason, "{failure}");
        assert!(failure.message.contains(words), "{failure}");
    }
    let only = index(&json!([image(1, "", "")])).unwrap();
    assert_eq!(only.tagged(&LayoutTarget::Only, &native).unwrap().digest, [1; 32]);
}

#[test]
fn a_configuration_for_another_platform_is_refused() {
    let check = |config: &str| check_config(config.as_bytes(), &platform("linux/amd64"));
    for config in [
        r#"{"os":"linux","architecture":"amd64"}"#,
        "{}",
        r#"{"architecture":""}"#,
        "[]",
    ] {
        assert_eq!(check(config), Ok(()), "{config}");
    }
    let failure = check(r#"{"os":"linux","architecture":"arm64"}"#).unwrap_err();
    assert_eq!(failure.reason, "PLATFORM_NOT_FOUND");
    assert!(failure.message.contains("linux/arm64"), "{failure}");
}
