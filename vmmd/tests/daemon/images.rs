//! The ImageService as a client sees it: imports, uploads, deletions, and disks that are made of images.

mod limits;
mod oci;

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::Duration,
};

use sha2::{Digest, Sha256};
use tokio::time::timeout;
use tokio_stream::StreamExt;
use tonic::{Code, Status, transport::Channel};
use tonic_types::StatusExt;
use vmmd_api::v1::{
    self, ImagePhase, OperationPhase, WatchEventType, image_service_client::ImageServiceClient,
    image_spec::Source, upload_image_request::Message, volume_spec::Source as DiskSource,
};

use crate::{
    disks::{named, raw},
    harness::{
        Daemon, PATIENCE, assert_refused, assert_says, connect, metadata_of, refusal, room, temporary_folder,
    },
    verbs::within,
};
use vmmd_testing::http::{Server, held, part, start};

impl Daemon {
    async fn images(&self) -> ImageServiceClient<Channel> {
        ImageServiceClient::new(connect(self.folder.path()).await)
    }

    pub async fn import(&self, image: v1::Image) -> Result<v1::Image, Status> {
        let request = v1::ImportImageRequest {
            image: Some(image),
            ..Default::default()
        };
        let response = self.images().await.import_image(request).await?;
        Ok(response.into_inner().image.unwrap())
    }

    /// Begins an import; its operation.
    async fn begin_import(&self, image: v1::Image) -> Result<v1::Operation, Status> {
        let request = v1::ImportImageRequest {
            image: Some(image),
            no_wait: true,
            ..Default::default()
        };
        let answer = self.images().await.import_image(request).await?;
        Ok(answer.into_inner().operation.unwrap())
    }

    async fn image(&self, name: &str) -> Result<v1::Image, Status> {
        let request = v1::GetImageRequest { name: name.into() };
        let response = self.images().await.get_image(request).await?;
        Ok(response.into_inner().image.unwrap())
    }

    pub async fn remove_image(&self, name: &str) -> Result<(), Status> {
        let request = v1::DeleteImageRequest {
            name: name.into(),
            ..Default::default()
        };
        self.images().await.delete_image(request).await.map(drop)
    }

    async fn upload(&self, image: v1::Image, size: u64, pieces: Vec<Vec<u8>>) -> Result<v1::Image, Status> {
        let open = v1::UploadImageOpen {
            image: Some(image),
            size_bytes: size,
        };
        let data = pieces.into_iter().map(Message::Data);
        let messages: Vec<_> = std::iter::once(Message::Open(open)).chain(data).collect();
        let stream = tokio_stream::iter(messages.into_iter().map(|message| v1::UploadImageRequest {
            message: Some(message),
        }));
        let response = self.images().await.upload_image(stream).await?;
        Ok(response.into_inner().image.unwrap())
    }

    /// Names in the folder of images, sorted.
    fn image_files(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.folder.path().join("state/images")) else {
            return Vec::new();
        };
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    pub fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::write(&path, content).unwrap();
        path
    }

    /// Waits until so many bytes of the one file that is being downloaded are on the disk.
    async fn downloaded(&self, bytes: u64) {
        within(async || {
            let files = self.image_files();
            let source = files.iter().find(|name| name.ends_with(".source"));
            let path = source.map(|name| self.path(&format!("state/images/{name}")));
            let written =
                path.is_some_and(|path| fs::metadata(path).is_ok_and(|metadata| metadata.size() >= bytes));
            written.then_some(())
        })
        .await;
    }
}

/// A daemon with the converter that is packaged, and not the mock of it.
async fn with_converter() -> Daemon {
    let program = Path::new(env!("CARGO_BIN_EXE_mock-vmm")).with_file_name("vmm-image");
    assert!(
        program.exists(),
        "{} is missing: build the whole workspace",
        program.display()
    );
    Daemon::configured(&format!("vmm_image = {program:?}\n")).await
}

fn image(name: &str, source: Option<Source>) -> v1::Image {
    v1::Image {
        metadata: metadata_of(name),
        spec: Some(v1::ImageSpec {
            source,
            ..Default::default()
        }),
        status: None,
    }
}

pub fn of_path(name: &str, path: &Path) -> v1::Image {
    image(name, Some(Source::Path(path.display().to_string())))
}

fn with_checksum(mut image: v1::Image, content: &[u8]) -> v1::Image {
    let checksum = vmmd_spec::image::checksum_text(&Sha256::digest(content));
    image.spec.as_mut().unwrap().checksum = checksum;
    image
}

fn content() -> Vec<u8> {
    (0..200_064_u32).flat_map(u32::to_le_bytes).collect()
}

fn reason(status: &Status) -> String {
    let details = status.get_error_details();
    details
        .error_info()
        .map(|info| info.reason.clone())
        .unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_image_is_not_imported_again_by_a_retry() {
    let daemon = Daemon::start().await;
    let file = daemon.file("disk.raw", &content());
    for no_wait in [false, true] {
        let request = v1::ImportImageRequest {
            image: Some(of_path("web", &file)),
            no_wait,
            request_id: format!("import, no_wait {no_wait}"),
        };
        let mut client = daemon.images().await;
        let first = client.import_image(request.clone()).await.unwrap().into_inner();
        let begun = first
            .operation
            .clone()
            .is_some_and(|operation| operation.phase() != v1::OperationPhase::Completed);
        let again = client.import_image(request.clone()).await.unwrap().into_inner();
        assert_eq!(again, first);
        // An import that is under way is cancelled, unless it is nearly done.
        while let Err(refused) = daemon.remove_image("web").await {
            assert_eq!(reason(&refused), "NOT_CANCELLABLE");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        match client.import_image(request).await {
            // The operation contains the result.
            Ok(again) => assert!(begun && again.into_inner() == first),
            Err(refused) => assert_eq!(refusal(&refused), crate::request::gone()),
        }
        assert!(daemon.image_files().is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_content_is_kept_once_until_its_last_image_goes() {
    let daemon = Daemon::start().await;
    let file = daemon.file("disk.raw", &content());
    let first = daemon.import(of_path("first", &file)).await.unwrap();
    let second = daemon
        .import(with_checksum(of_path("second", &file), &content()))
        .await
        .unwrap();
    let (first, second) = (first.status.unwrap(), second.status.unwrap());
    assert_eq!(
        (first.phase(), first.virtual_size_bytes),
        (ImagePhase::Ready, 800_256)
    );
    assert_eq!(
        (&first.digest, first.digest.len()),
        (&second.digest, "blocks-sha256:".len() + 64)
    );
    assert_eq!(daemon.image_files().len(), 1);
    daemon.remove_image("first").await.unwrap();
    assert_eq!(daemon.image_files().len(), 1);
    daemon.remove_image("second").await.unwrap();
    assert_eq!(daemon.image_files(), Vec::<String>::new());
    assert_eq!(
        daemon.remove_image("second").await.unwrap_err().code(),
        Code::NotFound
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_imported_is_refused_and_leaves_nothing() {
    let daemon = Daemon::start().await;
    let file = daemon.file("disk.raw", &content());
    let refused = daemon.file("refused.raw", b"refuse:the qcow2 image names a backing file");
    let missing = daemon.folder.path().join("missing");
    for (image, expected) in [
        (
            with_checksum(of_path("a", &file), b"another"),
            "CHECKSUM_MISMATCH",
        ),
        (of_path("a", &refused), "IMAGE_UNUSABLE"),
        (of_path("a", &missing), "DISK_NOT_FOUND"),
        (of_path("a", Path::new("/dev/null")), "DISK_UNUSABLE"),
    ] {
        let status = daemon.import(image).await.unwrap_err();
        assert_eq!(reason(&status), expected, "{status}");
        assert_eq!(daemon.image("a").await.unwrap_err().code(), Code::NotFound);
        assert_eq!(daemon.image_files(), Vec::<String>::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_uploaded_file_becomes_an_image_and_a_cut_off_one_nothing() {
    let daemon = Daemon::start().await;
    let content = content();
    let pieces: Vec<_> = content.chunks(100_000).map(<[u8]>::to_vec).collect();
    let wanted = || with_checksum(image("up", None), &content);
    let cut = daemon
        .upload(wanted(), content.len() as u64, pieces[..3].to_vec())
        .await;
    assert_eq!(reason(&cut.unwrap_err()), "UPLOAD_CUT_OFF");
    let wrong = with_checksum(image("up", None), b"another");
    let wrong = daemon.upload(wrong, 0, pieces.clone()).await;
    assert_eq!(reason(&wrong.unwrap_err()), "CHECKSUM_MISMATCH");
    assert_eq!(daemon.image_files(), Vec::<String>::new());
    let made = daemon
        .upload(wanted(), content.len() as u64, pieces.clone())
        .await
        .unwrap();
    assert_eq!(made.status.as_ref().unwrap().source_bytes, content.len() as u64);
    // The same again is the same image.
    let again = daemon.upload(wanted(), 0, pieces.clone()).await.unwrap();
    assert_eq!(again.metadata.unwrap().uid, made.metadata.unwrap().uid);
    let other = daemon.upload(image("up", None), 0, pieces).await.unwrap_err();
    assert_eq!(reason(&other), "IMAGE_EXISTS");
}

/// Waits until a server was asked so often.
async fn asked(server: &Server, times: usize) {
    within(async || (server.requests.lock().unwrap().len() >= times).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn import_of_a_killed_daemon_continues_and_answers_the_retry() {
    let mut daemon = Daemon::start().await;
    // More than is written at a time.
    let content: Vec<u8> = (0..4_000_000_u32).flat_map(u32::to_le_bytes).collect();
    let content = Arc::new(content);
    let (first, go) = held(part(&content, "one", 9 << 20));
    let server = Server::start(vec![first, part(&content, "one", usize::MAX)]);
    let url = format!("{}/disk.raw?token=secret", server.address);
    let request = v1::ImportImageRequest {
        image: Some(with_checksum(image("web", Some(Source::Url(url))), &content)),
        no_wait: false,
        request_id: "import-1".into(),
    };
    let (mut client, first) = (daemon.images().await, request.clone());
    let waiting = tokio::spawn(async move { client.import_image(first).await });
    asked(&server, 1).await;
    let shown = daemon.image("web").await.unwrap();
    let operation = shown.status.unwrap().operation;
    let shown = format!("{:?}", shown.spec);
    assert!(!shown.contains("secret"), "{shown}");
    daemon.downloaded(8 << 20).await;
    daemon.kill_and_restart().await;
    waiting.await.unwrap().unwrap_err();
    go.send(()).unwrap();
    let answer = daemon.images().await.import_image(request).await.unwrap();
    let response = answer.into_inner();
    let status = response.image.unwrap().status.unwrap();
    assert_eq!(
        (status.phase(), status.source_bytes),
        (ImagePhase::Ready, content.len() as u64)
    );
    let requests = server.requests.lock().unwrap().clone();
    assert_eq!(start(&requests[0]), None);
    assert!(
        start(&requests[1]) >= Some(8 << 20) && requests[1].contains("if-range: \"one\""),
        "{requests:?}"
    );
    let ended = daemon.operation(&operation).await;
    assert_eq!(ended.phase(), OperationPhase::Completed, "{ended:?}");
    assert_eq!(daemon.image_files().len(), 1);
}

/// A disk of 64 MiB with some incompressible data.
fn disk() -> Vec<u8> {
    let mut disk = vec![0; 64 << 20];
    let mut word = 1_u64;
    for piece in disk.chunks_mut(1 << 20).step_by(2) {
        for bytes in piece.chunks_mut(8) {
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }
    disk
}

/// The disk as Debian publishes those for clouds, packed with xz.
fn packed(daemon: &Daemon, disk: &Path) -> Vec<u8> {
    let qcow2 = daemon.path("disk.qcow2");
    let mut convert = Command::new("qemu-img");
    convert
        .args(["convert", "-f", "raw", "-O", "qcow2"])
        .args([disk, &qcow2]);
    assert!(convert.status().expect("install qemu-utils").success());
    let packed = Command::new("xz").args(["-0", "--stdout"]).arg(qcow2).output();
    let packed = packed.expect("install xz-utils");
    assert!(packed.status.success());
    packed.stdout
}

#[tokio::test(flavor = "multi_thread")]
async fn packed_image_arrives_over_a_broken_line_and_a_killed_daemon() {
    let mut daemon = with_converter().await;
    let file = daemon.file("disk.raw", &disk());
    let content = Arc::new(packed(&daemon, &file));
    let fifth = content.len() / 5;
    let cut = || part(&content, "debian", fifth);
    let (fourth, go) = held(cut());
    let server = Server::start(vec![
        cut(),
        cut(),
        cut(),
        fourth,
        part(&content, "debian", usize::MAX),
    ]);
    let url = format!("{}/debian.qcow2.xz", server.address);
    let request = v1::ImportImageRequest {
        image: Some(with_checksum(image("debian", Some(Source::Url(url))), &content)),
        request_id: "import-1".into(),
        ..Default::default()
    };
    let (mut client, first) = (daemon.images().await, request.clone());
    let waiting = tokio::spawn(async move { client.import_image(first).await });
    asked(&server, 4).await;
    // Something of the fourth connection is on the disk too.
    daemon.downloaded(3 * fifth as u64 + 1).await;
    daemon.kill_and_restart().await;
    waiting.await.unwrap().unwrap_err();
    go.send(()).unwrap();
    let response = daemon.images().await.import_image(request).await.unwrap();
    let status = response.into_inner().image.unwrap().status.unwrap();
    assert_eq!(
        (status.phase(), status.source_bytes),
        (ImagePhase::Ready, content.len() as u64)
    );
    let starts: Vec<_> = server
        .requests
        .lock()
        .unwrap()
        .iter()
        .map(|head| start(head))
        .collect();
    assert_eq!(starts[..4], [None, Some(fifth), Some(2 * fifth), Some(3 * fifth)]);
    assert!(starts.len() == 5 && starts[4] > starts[3], "{starts:?}");
    let same = daemon.import(of_path("same", &file)).await.unwrap();
    assert_eq!(same.status.unwrap().digest, status.digest);
    assert_eq!(daemon.image_files().len(), 1, "nothing is left of the download");
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_images_are_refused_while_the_daemon_answers() {
    let daemon = with_converter().await;
    let mut make = Command::new("sh");
    let script = "qemu-img create -q -u -f qcow2 -F raw -b /etc/shadow backing 1M && \
         qemu-img create -q -f qcow2 -o data_file=outside.raw,data_file_raw=on data 1M && \
         qemu-img create -q -f qcow2 large 2T && \
         head -c 8M /dev/urandom >raw && qemu-img convert -f raw -O qcow2 raw whole && head -c 3M whole >cut && \
         head -c 256M /dev/zero | gzip -1 >bomb.gz";
    make.args(["-ec", script]).current_dir(daemon.folder.path());
    assert!(make.status().unwrap().success(), "install qemu-utils");
    let mut imports = Vec::new();
    for (file, words) in [
        ("backing", "backing file"),
        ("data", "external file"),
        ("large", "more than the"),
        ("cut", "damaged"),
        ("bomb.gz", "longer than the 67108864 bytes"),
    ] {
        let mut wanted = of_path(file.trim_end_matches(".gz"), &daemon.path(file));
        wanted.spec.as_mut().unwrap().max_size_bytes = 64 << 20;
        let mut client = daemon.images().await;
        let request = v1::ImportImageRequest {
            image: Some(wanted),
            ..Default::default()
        };
        imports.push((
            words,
            tokio::spawn(async move { client.import_image(request).await }),
        ));
    }
    let mut answers = 0;
    while !imports.iter().all(|(_, import)| import.is_finished()) {
        timeout(PATIENCE, daemon.list()).await.unwrap();
        answers += 1;
    }
    assert!(answers > 0);
    for (words, import) in imports {
        let status = import.await.unwrap().unwrap_err();
        assert_eq!(reason(&status), "IMAGE_UNUSABLE", "{status}");
        assert!(status.message().contains(words), "{words}: {status}");
    }
    assert_eq!(daemon.image_files(), Vec::<String>::new());
    let listed = daemon
        .images()
        .await
        .list_images(v1::ListImagesRequest::default())
        .await;
    assert_eq!(listed.unwrap().into_inner().images, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_vms_of_an_image_take_its_space_once() {
    const DATA: u64 = 64 << 20;
    /// Most that one VM may take: the tables of its disk, and its records.
    const EACH: u64 = 512 << 10;
    let daemon = with_converter().await;
    let file = daemon.file("disk.raw", &disk());
    fs::File::options()
        .write(true)
        .open(&file)
        .and_then(|file| file.set_len(2 << 30))
        .unwrap();
    daemon.import(of_path("debian", &file)).await.unwrap();
    let state = daemon.path("state");
    let of_image = room(&state.join("images"));
    assert!(
        (DATA / 2..=DATA).contains(&of_image),
        "the image takes {of_image}"
    );
    let before = room(&state);
    for number in 0..50 {
        let name = format!("web-{number}");
        let mut wanted = raw(&name, 8 << 30);
        wanted.spec.as_mut().unwrap().format = v1::DiskFormat::Unspecified.into();
        let overlay = DiskSource::Image(v1::ImageClone {
            name: "debian".into(),
            clone: v1::DiskClone::Overlay.into(),
        });
        daemon.make(wanted, Some(overlay)).await.unwrap();
        let vm = daemon.manifest_with(&name, "", |spec| spec.disks = vec![named(&name)]);
        daemon.create(vm).await.unwrap();
    }
    assert_eq!(daemon.list().await.len(), 50);
    assert_eq!(room(&state.join("images")), of_image);
    let more = room(&state) - before;
    assert!(more < 50 * EACH, "50 VMs take {more} bytes more");
}

#[tokio::test(flavor = "multi_thread")]
async fn import_from_a_closed_port_shows_each_try() {
    let daemon = Daemon::start().await;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/disk.raw", listener.local_addr().unwrap());
    drop(listener);
    let begun = daemon
        .begin_import(image("web", Some(Source::Url(url))))
        .await
        .unwrap();
    let id = begun.id;
    within(async || {
        let message = daemon.operation(&id).await.message;
        let shown = message.contains("Connection refused") && message.contains("of 8 follows");
        shown.then_some(())
    })
    .await;
    daemon.remove_image("web").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn deleting_an_image_that_is_being_imported_cancels_the_import() {
    let daemon = Daemon::start().await;
    let (turn, _go) = held(part(&Arc::new(content()), "one", 1000));
    let server = Server::start(vec![turn]);
    let wanted = image("web", Some(Source::Url(server.address.clone())));
    let begun = daemon.begin_import(wanted).await.unwrap();
    asked(&server, 1).await;
    daemon.remove_image("web").await.unwrap();
    let operation = daemon.operation(&begun.id).await;
    assert_eq!(operation.phase(), OperationPhase::Cancelled);
    assert_eq!(daemon.image_files(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn disk_of_an_image_for_long_blocks_has_them_in_a_vm() {
    let mut daemon = Daemon::start().await;
    // The mock looks for the header of a GPT where one for such blocks is.
    let mut bytes = content();
    bytes[4096..4104].copy_from_slice(b"EFI PART");
    let file = daemon.file("disk.raw", &bytes);
    let made = daemon.import(of_path("long", &file)).await.unwrap();
    assert_eq!(made.status.unwrap().logical_block_bytes, 4096);
    let mut vm = daemon.manifest("web", "");
    for clone in [v1::DiskClone::Copy, v1::DiskClone::Overlay] {
        let name = format!("{clone:?}").to_lowercase();
        let mut wanted = raw(&name, 0);
        wanted.spec.as_mut().unwrap().format = v1::DiskFormat::Unspecified.into();
        let source = DiskSource::Image(v1::ImageClone {
            name: "long".into(),
            clone: clone.into(),
        });
        let made = daemon.make(wanted, Some(source)).await.unwrap();
        assert_eq!(made.status.unwrap().logical_block_bytes, 4096, "{name}");
        let spec = v1::DiskSpec {
            name: name.clone(),
            ..named(&name)
        };
        vm.spec.as_mut().unwrap().disks.push(spec);
    }
    // A length in the manifest is kept.
    vm.spec.as_mut().unwrap().disks[1].logical_block_bytes = 512;
    daemon.create(vm).await.unwrap();
    daemon.kill_and_restart().await;
    let disks = daemon.get("web").await.unwrap().spec.unwrap().disks;
    let blocks: Vec<_> = disks.iter().map(|disk| disk.logical_block_bytes).collect();
    assert_eq!(blocks, [4096, 512]);
}

#[tokio::test(flavor = "multi_thread")]
async fn image_stays_while_an_overlay_needs_it_not_for_copies() {
    let mut daemon = Daemon::start().await;
    let file = daemon.file("disk.raw", &content());
    daemon.import(of_path("base", &file)).await.unwrap();
    let of_image = |clone: v1::DiskClone| {
        Some(DiskSource::Image(v1::ImageClone {
            name: "base".into(),
            clone: clone.into(),
        }))
    };
    let copy = daemon
        .make(raw("copy", 4 << 20), of_image(v1::DiskClone::Copy))
        .await
        .unwrap();
    let copied = fs::read(copy.status.unwrap().path).unwrap();
    assert_eq!(copied.len(), 4 << 20);
    assert!(copied[..800_256] == content() && copied[800_256..].iter().all(|byte| *byte == 0));
    let small = daemon
        .make(raw("small", 512), of_image(v1::DiskClone::Copy))
        .await
        .unwrap_err();
    assert_eq!(small.code(), Code::InvalidArgument);
    let mut wanted = raw("over", 0);
    wanted.spec.as_mut().unwrap().format = v1::DiskFormat::Unspecified.into();
    let over = daemon
        .make(wanted, of_image(v1::DiskClone::Overlay))
        .await
        .unwrap();
    let spec = over.spec.unwrap();
    assert_eq!((spec.format(), spec.size_bytes), (v1::DiskFormat::Qcow2, 800_256));
    let status = over.status.unwrap();
    assert_eq!(status.backing_image, "base");
    // The mock says how many images it was given below it.
    assert!(String::from_utf8_lossy(&fs::read(status.path).unwrap()).contains("below=1"));
    daemon.kill_and_restart().await;
    let refused = daemon.remove_image("base").await.unwrap_err();
    assert_eq!(reason(&refused), "IMAGE_IN_USE");
    assert!(refused.message().contains("\"over\"") && !refused.message().contains("\"copy\""));
    assert_eq!(
        daemon.image("base").await.unwrap().status.unwrap().used_by_disks,
        ["over"]
    );
    daemon.remove("over").await.unwrap();
    daemon.remove_image("base").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prune_takes_what_nothing_uses() {
    let daemon = Daemon::start().await;
    for name in ["one", "two", "used"] {
        let file = daemon.file(name, format!("{name} and more").as_bytes());
        daemon.import(of_path(name, &file)).await.unwrap();
    }
    let overlay = DiskSource::Image(v1::ImageClone {
        name: "used".into(),
        clone: v1::DiskClone::Overlay.into(),
    });
    let mut wanted = raw("over", 0);
    wanted.spec.as_mut().unwrap().format = v1::DiskFormat::Unspecified.into();
    daemon.make(wanted, Some(overlay)).await.unwrap();
    let prune = async |request: v1::PruneImagesRequest| {
        let mut client = daemon.images().await;
        client.prune_images(request).await.unwrap().into_inner().deleted
    };
    let old = v1::PruneImagesRequest {
        older_than: Some(vmmd_api::well_known::Duration {
            seconds: 3600,
            nanos: 0,
        }),
        ..Default::default()
    };
    assert_eq!(prune(old).await, Vec::<String>::new());
    let dry = v1::PruneImagesRequest {
        dry_run: true,
        ..Default::default()
    };
    assert_eq!(prune(dry).await, ["one", "two"]);
    assert_eq!(prune(v1::PruneImagesRequest::default()).await, ["one", "two"]);
    assert_eq!(
        prune(v1::PruneImagesRequest::default()).await,
        Vec::<String>::new()
    );
    assert_eq!(daemon.image_files().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn images_are_listed_and_watched_over_a_restart_of_the_daemon() {
    let mut daemon = Daemon::start().await;
    let file = daemon.file("disk.raw", &content());
    daemon.import(of_path("a", &file)).await.unwrap();
    let page = v1::ListImagesRequest {
        page_size: 1,
        ..Default::default()
    };
    let answer = daemon.images().await.list_images(page).await.unwrap();
    let listed = answer.into_inner();
    assert_eq!((listed.images.len(), listed.next_page_token.as_str()), (1, ""));
    daemon.import(of_path("b", &file)).await.unwrap();
    daemon.remove_image("a").await.unwrap();
    daemon.kill_and_restart().await;
    let request = v1::WatchImagesRequest {
        cursor: listed.cursor,
        ..Default::default()
    };
    let answer = daemon.images().await.watch_images(request).await.unwrap();
    let mut stream = answer.into_inner();
    let mut seen = Vec::new();
    loop {
        let event = timeout(PATIENCE, stream.next()).await.unwrap().unwrap().unwrap();
        if event.r#type() == WatchEventType::Synced {
            break;
        }
        let name = event
            .image
            .clone()
            .unwrap_or_default()
            .metadata
            .unwrap_or_default()
            .name;
        seen.push((event.r#type(), name));
    }
    seen.sort_by(|a, b| a.1.cmp(&b.1));
    assert_eq!(
        seen,
        [
            (WatchEventType::Deleted, "a".to_owned()),
            (WatchEventType::Added, "b".to_owned())
        ]
    );
}
