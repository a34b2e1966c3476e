//! Images from a real registry of OCI images, and from a folder with them.

use std::io::Write as _;

use prost::Message as _;
use serde_json::json;
use vmmd_spec::oci::Platform;
use vmmd_testing::registry::{
    Between, INDEX, Image, MANIFEST, PASSWORD, Registry, USER, descriptor, digest, layer,
};

use super::*;
use crate::operation_records::ended;

fn oci(name: &str, reference: &str) -> v1::Image {
    with_platform(name, reference, "")
}

fn with_platform(name: &str, reference: &str, platform: &str) -> v1::Image {
    let source = v1::OciSource {
        reference: reference.into(),
        platform: platform.into(),
        ..Default::default()
    };
    image(name, Some(Source::Oci(source)))
}

fn with_password(name: &str, reference: &str, password: &str) -> v1::Image {
    let source = v1::OciSource {
        reference: reference.into(),
        credentials: Some(v1::OciCredentials {
            username: USER.into(),
            password: password.into(),
        }),
        ..Default::default()
    };
    image(name, Some(Source::Oci(source)))
}

fn native() -> String {
    Platform::native().architecture
}

/// Digest of the disk in these layers, which the mock treats as the disk itself.
async fn content_digest(daemon: &Daemon, name: &str, layers: &[u8]) -> String {
    let file = daemon.file(name, layers);
    let made = daemon.import(of_path(name, &file)).await.unwrap();
    made.status.unwrap().digest
}

#[tokio::test(flavor = "multi_thread")]
async fn registry_image_is_imported_by_tag_and_digest_and_kept_once() {
    let (daemon, registry) = (Daemon::start().await, Registry::start(false));
    let layers = [layer(&content()), layer(b"more")];
    let pushed = Image::new(&native(), layers.to_vec());
    registry.push("debian/trixie", "cloud", &pushed).await;
    let wanted = content_digest(&daemon, "file", &layers.concat()).await;
    let manifest = digest(&pushed.manifest);
    let name = format!("{}/debian/trixie", registry.address);
    for (number, reference) in [
        format!("{name}:cloud"),
        format!("{name}@{manifest}"),
        // The digest takes precedence over the tag.
        format!("{name}:nothing@{manifest}"),
    ]
    .iter()
    .enumerate()
    {
        let made = daemon
            .import(oci(&format!("image-{number}"), reference))
            .await
            .unwrap();
        let status = made.status.unwrap();
        assert_eq!((status.phase(), &status.digest), (ImagePhase::Ready, &wanted));
        assert_eq!(status.source_manifest, manifest);
        assert_eq!(status.source_bytes, layers.concat().len() as u64);
        let Some(Source::Oci(shown)) = made.spec.unwrap().source else {
            panic!("it has another source");
        };
        assert_eq!(&shown.reference, reference);
    }
    assert_eq!(daemon.image_files().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn unusable_registry_content_is_refused_and_leaves_nothing() {
    let (daemon, registry) = (Daemon::start().await, Registry::start(false));
    let pushed = Image::new(&native(), vec![layer(&content())]);
    registry.push("debian", "13", &pushed).await;
    let foreign = Image::new("s390x", vec![layer(b"other")]);
    registry.push("debian", "s390x", &foreign).await;
    let name = format!("{}/debian", registry.address);
    let wrong = digest(b"nothing");
    let mut limited = oci("a", &format!("{name}:13"));
    limited.spec.as_mut().unwrap().max_size_bytes = 1000;
    for (image, expected, words) in [
        (
            oci("a", &format!("{name}@{wrong}")),
            "OCI_IMAGE_NOT_FOUND",
            wrong.as_str(),
        ),
        (
            oci("a", &format!("{name}:14")),
            "OCI_IMAGE_NOT_FOUND",
            "manifests/14",
        ),
        (
            oci("a", &format!("{name}:s390x")),
            "PLATFORM_NOT_FOUND",
            "linux/s390x",
        ),
        (limited, "IMAGE_TOO_LARGE", "1000"),
        (oci("a", "debian:13"), "INVALID_FIELDS", "registry"),
    ] {
        let status = daemon.import(image).await.unwrap_err();
        assert_eq!(reason(&status), expected, "{status}");
        assert_says(&status, words);
        assert_eq!(daemon.image("a").await.unwrap_err().code(), Code::NotFound);
        assert_eq!(daemon.image_files(), Vec::<String>::new());
    }
}

/// A registry that gives another content than the digest says: a real one does not.
#[tokio::test(flavor = "multi_thread")]
async fn a_manifest_or_layer_with_another_digest_is_refused() {
    let daemon = Daemon::start().await;
    let image = Image::new(&native(), vec![layer(&content())]);
    let mut changed = image.blobs[0].clone();
    changed[600] ^= 1;
    let manifest = image.manifest.clone();
    let server = Server::start(vec![Box::new(move |head, stream| {
        let config = head.contains(&digest(&image.blobs[1]));
        let body = match head.contains("/blobs/") {
            true if config => &image.blobs[1],
            true => &changed,
            false => &manifest,
        };
        let _ = write!(
            stream,
            "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        let _ = stream.write_all(body);
    })]);
    let host = server.address.strip_prefix("http://").unwrap();
    for (reference, words) in [
        (format!("{host}/debian:13"), "a layer has the digest"),
        (
            format!("{host}/debian@{}", digest(b"another")),
            "the manifest has the digest",
        ),
    ] {
        let status = daemon.import(oci("a", &reference)).await.unwrap_err();
        assert_eq!(reason(&status), "DIGEST_MISMATCH", "{status}");
        assert_says(&status, words);
        assert_eq!(daemon.image_files(), Vec::<String>::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn image_of_the_nodes_or_the_requested_platform_is_taken() {
    let (daemon, registry) = (Daemon::start().await, Registry::start(false));
    let images = [native(), "s390x".to_owned()].map(|architecture| {
        (
            Image::new(&architecture, vec![layer(architecture.as_bytes())]),
            architecture,
        )
    });
    let mut manifests = Vec::new();
    for (image, architecture) in &images {
        registry.push("debian", architecture, image).await;
        let mut one = descriptor(MANIFEST, &image.manifest);
        one["platform"] = json!({"os": "linux", "architecture": architecture});
        manifests.push(one);
    }
    let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}).to_string();
    registry
        .put_manifest("debian", "13", INDEX, index.as_bytes())
        .await;
    let reference = format!("{}/debian:13", registry.address);
    let by_index = format!("{}/debian@{}", registry.address, digest(index.as_bytes()));
    for (number, (reference, platform, image)) in [
        (&reference, "", &images[0].0),
        (&reference, "linux/s390x", &images[1].0),
        (&by_index, "", &images[0].0),
    ]
    .into_iter()
    .enumerate()
    {
        let made = daemon
            .import(with_platform(&format!("image-{number}"), reference, platform))
            .await
            .unwrap();
        assert_eq!(made.status.unwrap().source_manifest, digest(&image.manifest));
    }
    let status = daemon
        .import(with_platform("a", &reference, "linux/riscv64"))
        .await
        .unwrap_err();
    assert_eq!(reason(&status), "PLATFORM_NOT_FOUND");
    assert!(
        status
            .message()
            .ends_with(&format!("linux/{}, linux/s390x", native())),
        "{status}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn registry_password_is_sent_to_its_registry_only() {
    let (daemon, registry) = (Daemon::with_log("").await, Registry::start(true));
    let pushed = Image::new(&native(), vec![layer(&content())]);
    registry.push("debian", "13", &pushed).await;
    let reference = format!("{}/debian:13", registry.address);
    for (image, words) in [
        (oci("a", &reference), "only with a user name and password"),
        (
            with_password("a", &reference, "wrong horse"),
            "to this user name and password",
        ),
    ] {
        let status = daemon.import(image).await.unwrap_err();
        assert_eq!(reason(&status), "REGISTRY_UNAUTHORIZED", "{status}");
        assert!(
            status.message().contains(words) && !status.message().contains("horse"),
            "{status}"
        );
        assert_eq!(daemon.image_files(), Vec::<String>::new());
    }
    let made = daemon
        .import(with_password("a", &reference, PASSWORD))
        .await
        .unwrap();
    assert_eq!(
        made.status.as_ref().unwrap().source_manifest,
        digest(&pushed.manifest)
    );
    let listed = daemon
        .images()
        .await
        .list_images(v1::ListImagesRequest::default())
        .await
        .unwrap();
    let shown = format!(
        "{made:?} {:?} {:?}",
        daemon.image("a").await.unwrap(),
        listed.into_inner()
    );
    assert!(
        shown.contains(&reference) && !shown.contains("horse") && !shown.contains("credentials: Some"),
        "{shown}"
    );
    let mut looked_at = 0;
    for file in all_files(daemon.folder.path()) {
        let content = fs::read(&file).unwrap();
        looked_at += 1;
        let has = content
            .windows(PASSWORD.len())
            .any(|window| window == PASSWORD.as_bytes());
        assert!(!has, "{} has the password", file.display());
    }
    assert!(looked_at > 3);
}

fn all_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.is_symlink() {
            files.extend(all_files(&path));
        } else if path.is_file() {
            files.push(path);
        }
    }
    files
}

/// With a password too, which is sealed meanwhile, and though the tag means another image by then.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_daemons_import_goes_on_in_the_middle_of_a_layer() {
    let (mut daemon, registry) = (Daemon::start().await, Registry::start(true));
    let disk: Vec<u8> = (0..4_000_000_u32).flat_map(u32::to_le_bytes).collect();
    let pushed = Image::new(&native(), vec![layer(b"small"), layer(&disk)]);
    registry.push("debian", "13", &pushed).await;
    let between = Between::new(&registry, 9 << 20);
    let request = v1::ImportImageRequest {
        image: Some(with_password(
            "web",
            &format!("{}/debian:13", between.address),
            PASSWORD,
        )),
        no_wait: false,
        request_id: "import-oci".into(),
    };
    let (mut client, first) = (daemon.images().await, request.clone());
    let waiting = tokio::spawn(async move { client.import_image(first).await });
    daemon.downloaded(8 << 20).await;
    let status = daemon.image("web").await.unwrap().status.unwrap();
    assert_eq!(status.source_manifest, digest(&pushed.manifest));
    let operation = status.operation;
    daemon.kill();
    waiting.await.unwrap().unwrap_err();
    // A hash of the request is not stored either, as it would allow tests of password guesses.
    let without_id = v1::ImportImageRequest {
        request_id: String::new(),
        ..request.clone()
    };
    let hash = Sha256::digest(without_id.encode_to_vec());
    for secret in [PASSWORD.as_bytes(), hash.as_slice()] {
        for file in all_files(&daemon.path("state")) {
            let content = fs::read(&file).unwrap();
            assert!(
                !content.windows(secret.len()).any(|window| window == secret),
                "{}",
                file.display()
            );
        }
    }
    registry
        .push("debian", "13", &Image::new(&native(), vec![layer(b"another")]))
        .await;
    between.requests.lock().unwrap().clear();
    between.let_through();
    daemon.relaunch().await;
    let answer = daemon.images().await.import_image(request).await.unwrap();
    let made = answer.into_inner().image.unwrap();
    let status = made.status.unwrap();
    assert_eq!(
        (status.phase(), status.source_manifest),
        (ImagePhase::Ready, digest(&pushed.manifest))
    );
    let requests = between.requests.lock().unwrap().clone();
    let start = requests
        .split("range: bytes=")
        .nth(1)
        .and_then(|rest| rest.split('-').next());
    let start: u64 = start.and_then(|start| start.parse().ok()).unwrap_or(0);
    assert!(start >= 4 << 20, "{requests}");
    assert!(!requests.contains("manifests/13"), "{requests}");
    assert_eq!(
        daemon.operation(&operation).await.phase(),
        OperationPhase::Completed
    );
    assert_eq!(daemon.image_files().len(), 1);
    let layers = pushed.blobs[..2].concat();
    assert_eq!(status.digest, content_digest(&daemon, "file", &layers).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn import_with_a_password_of_another_key_fails_with_a_reason() {
    let (mut daemon, registry) = (Daemon::start().await, Registry::start(true));
    registry
        .push("debian", "13", &Image::new(&native(), vec![layer(&content())]))
        .await;
    let between = Between::new(&registry, 300_000);
    let reference = format!("{}/debian:13", between.address);
    let request = v1::ImportImageRequest {
        image: Some(with_password("web", &reference, PASSWORD)),
        no_wait: true,
        request_id: "import-oci".into(),
    };
    let begun = daemon.images().await.import_image(request.clone()).await.unwrap();
    let operation = begun.into_inner().operation.unwrap().id;
    daemon.kill();
    fs::write(daemon.path("state/secrets.key"), [7; 32]).unwrap();
    between.let_through();
    daemon.relaunch().await;
    let ended = ended(&daemon, &operation).await;
    assert_eq!(ended.phase(), OperationPhase::Failed, "{ended:?}");
    let error = ended.error.unwrap();
    assert!(error.message.contains("`secrets_key`"), "{error:?}");
    assert_eq!(error.reason(), "CREDENTIALS_LOST");
    assert_eq!(daemon.image("web").await.unwrap_err().code(), Code::NotFound);
    assert_eq!(daemon.image_files(), Vec::<String>::new());
    // Another request brings the password again.
    let again = v1::ImportImageRequest {
        no_wait: false,
        request_id: "import-again".into(),
        ..request
    };
    daemon.images().await.import_image(again).await.unwrap();
    assert_eq!(
        daemon.image("web").await.unwrap().status.unwrap().phase(),
        ImagePhase::Ready
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelling_an_import_from_a_registry_leaves_nothing() {
    let (daemon, registry) = (Daemon::start().await, Registry::start(false));
    registry
        .push("debian", "13", &Image::new(&native(), vec![layer(&content())]))
        .await;
    let between = Between::new(&registry, 300_000);
    let begun = daemon
        .begin_import(oci("web", &format!("{}/debian:13", between.address)))
        .await
        .unwrap();
    within(async || (between.requests.lock().unwrap().matches("/blobs/").count() >= 2).then_some(())).await;
    daemon.remove_image("web").await.unwrap();
    let operation = daemon.operation(&begun.id).await;
    assert_eq!(operation.phase(), OperationPhase::Cancelled);
    assert_eq!(daemon.image_files(), Vec::<String>::new());
}

/// A folder with images, each with a tag.
fn layout(folder: &Path, images: &[(&str, &Image)]) {
    let blobs = folder.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let put = |content: &[u8]| {
        let name = digest(content);
        fs::write(blobs.join(name.strip_prefix("sha256:").unwrap()), content).unwrap();
    };
    let mut manifests = Vec::new();
    for (tag, image) in images {
        image.blobs.iter().for_each(|blob| put(blob));
        put(&image.manifest);
        let mut one = descriptor(MANIFEST, &image.manifest);
        one["annotations"] = json!({"org.opencontainers.image.ref.name": tag});
        manifests.push(one);
    }
    let index = json!({"schemaVersion": 2, "manifests": manifests}).to_string();
    fs::write(folder.join("index.json"), index).unwrap();
    fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion": "1.0.0"}"#).unwrap();
}

fn of_layout(name: &str, path: &Path, reference: &str) -> v1::Image {
    let source = v1::OciLayoutSource {
        path: path.display().to_string(),
        reference: reference.into(),
        ..Default::default()
    };
    image(name, Some(Source::OciLayout(source)))
}

#[tokio::test(flavor = "multi_thread")]
async fn image_layout_is_imported_and_a_damaged_one_is_refused() {
    let folder = temporary_folder();
    let allowed = folder.path().join("allowed");
    fs::create_dir(&allowed).unwrap();
    let daemon = Daemon::in_folder(folder, &format!("[roots]\ndisks = [{allowed:?}]\n")).await;
    let images = ["12", "13"].map(|tag| Image::new(&native(), vec![layer(tag.as_bytes())]));
    let path = allowed.join("debian");
    layout(&path, &[("12", &images[0]), ("13", &images[1])]);
    for (name, reference, image) in [
        ("by-tag", "13".to_owned(), &images[1]),
        ("by-digest", digest(&images[0].manifest), &images[0]),
    ] {
        let made = daemon.import(of_layout(name, &path, &reference)).await.unwrap();
        assert_eq!(made.status.unwrap().source_manifest, digest(&image.manifest));
    }
    let kept = daemon.image_files();
    let blob = |image: &Image| {
        path.join("blobs/sha256")
            .join(&digest(&image.blobs[0])["sha256:".len()..])
    };
    let mut damaged = fs::read(blob(&images[1])).unwrap();
    damaged[600] ^= 1;
    fs::write(blob(&images[1]), damaged).unwrap();
    fs::write(blob(&images[0]), b"shorter").unwrap();
    let outside = daemon.path("outside");
    layout(&outside, &[("13", &images[1])]);
    std::os::unix::fs::symlink(&outside, allowed.join("link")).unwrap();
    for (path, reference, expected) in [
        (path.clone(), "13", "DIGEST_MISMATCH"),
        (path.clone(), "12", "IMAGE_UNUSABLE"),
        (path.clone(), "14", "OCI_IMAGE_NOT_FOUND"),
        (path.clone(), "", "OCI_IMAGE_AMBIGUOUS"),
        (outside, "13", "PATH_NOT_ALLOWED"),
        (allowed.join("link"), "13", "PATH_NOT_ALLOWED"),
        (allowed.join("missing"), "13", "DISK_NOT_FOUND"),
    ] {
        let status = daemon.import(of_layout("a", &path, reference)).await.unwrap_err();
        assert_eq!(reason(&status), expected, "{status}");
        assert_eq!(daemon.image_files(), kept);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn disk_in_layers_is_the_image_and_hostile_layers_are_refused() {
    let daemon = with_converter().await;
    let registry = Registry::start(false);
    registry
        .push("debian", "13", &Image::new(&native(), vec![layer(&content())]))
        .await;
    let mut out = layer(&content());
    out[..16].copy_from_slice(b"../etc/passwd\0\0\0");
    let sum: u32 = out[..512].iter().map(|byte| u32::from(*byte)).sum();
    let field: u32 = out[148..156].iter().map(|byte| u32::from(*byte)).sum();
    let sum = sum - field + 8 * u32::from(b' ');
    out[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    registry
        .push("debian", "hostile", &Image::new(&native(), vec![out]))
        .await;
    let reference = format!("{}/debian", registry.address);
    let made = daemon
        .import(oci("debian", &format!("{reference}:13")))
        .await
        .unwrap();
    let wanted = content_digest(&daemon, "file", &content()).await;
    assert_eq!(made.status.unwrap().digest, wanted);
    let kept = daemon.image_files();
    let status = daemon
        .import(oci("a", &format!("{reference}:hostile")))
        .await
        .unwrap_err();
    assert_eq!(reason(&status), "IMAGE_UNUSABLE", "{status}");
    assert_says(&status, "\"../etc/passwd\" is refused");
    assert_eq!(daemon.image_files(), kept);
}
