//! Limits of imports: how many at once, and how long.

use super::*;

/// A daemon whose conversions never end, and a file to import.
async fn with_hanging_converter() -> (Daemon, PathBuf) {
    let folder = tempfile::Builder::new()
        .prefix("vmmd")
        .tempdir_in("/tmp")
        .unwrap();
    let program = folder.path().join("image-hangs");
    fs::copy(env!("CARGO_BIN_EXE_mock-vmm-image"), &program).unwrap();
    let daemon = Daemon::in_folder(folder, &format!("vmm_image = {program:?}\n")).await;
    fs::create_dir(daemon.path("run/fault")).unwrap();
    let file = daemon.file("disk.raw", &content());
    (daemon, file)
}

/// Begins an import; its operation.
async fn begin(daemon: &Daemon, image: v1::Image) -> Result<v1::Operation, Status> {
    let request = v1::ImportImageRequest {
        image: Some(image),
        no_wait: true,
        ..Default::default()
    };
    let answer = daemon.images().await.import_image(request).await?;
    Ok(answer.into_inner().operation.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn imports_and_conversions_at_once_are_limited() {
    let (daemon, file) = with_hanging_converter().await;
    for number in 0..64 {
        begin(&daemon, of_path(&format!("i{number}"), &file))
            .await
            .unwrap();
    }
    let refused = begin(&daemon, of_path("more", &file)).await.unwrap_err();
    assert_eq!(
        refusal(&refused),
        (Code::ResourceExhausted, "TOO_MANY_IMPORTS".into())
    );
    // Four images are made at a time, in a cgroup with limits.
    let converted = async {
        while daemon.vmm_processes().len() < 4 {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, converted).await.unwrap();
    let processes = daemon.vmm_processes();
    assert_eq!(processes.len(), 4);
    if let Some(group) = daemon
        .all_cgroups()
        .iter()
        .find(|group| group.ends_with("images"))
    {
        let inside = fs::read_to_string(group.join("cgroup.procs")).unwrap();
        let inside: Vec<i32> = inside.lines().map(|pid| pid.parse().unwrap()).collect();
        assert!(
            processes
                .iter()
                .all(|pid| inside.contains(&pid.as_raw_nonzero().get())),
            "{inside:?}"
        );
    }
    daemon.remove_image("i63").await.unwrap();
    begin(&daemon, of_path("more", &file)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn conversion_that_takes_too_long_is_ended() {
    let (daemon, file) = with_hanging_converter().await;
    fs::write(daemon.path("run/fault/conversion-patience"), "").unwrap();
    let failed = daemon.import(of_path("slow", &file)).await.unwrap_err();
    assert!(failed.message().contains("did not end within"), "{failed}");
    assert_eq!(daemon.image("slow").await.unwrap_err().code(), Code::NotFound);
    assert_eq!(daemon.image_files(), Vec::<String>::new());
    let ended = async {
        while !daemon.vmm_processes().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, ended).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn import_that_takes_too_long_is_cancelled() {
    let (daemon, _file) = with_hanging_converter().await;
    fs::write(daemon.path("run/fault/import-patience"), "").unwrap();
    let (turn, _go) = held(part(&Arc::new(content()), "one", 1000));
    let server = Server::start(vec![turn]);
    let begun = begin(&daemon, image("slow", Some(Source::Url(server.address.clone())))).await;
    let id = begun.unwrap().id;
    let ended = async {
        loop {
            let operation = daemon.operation(&id).await;
            if operation.phase() == OperationPhase::Cancelled {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, ended).await.unwrap();
    assert_eq!(daemon.image("slow").await.unwrap_err().code(), Code::NotFound);
    assert_eq!(daemon.image_files(), Vec::<String>::new());
}
