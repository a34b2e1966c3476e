//! Limits of imports: how many at once, and how long.

use super::*;

/// A daemon whose conversions never end, and a file to import.
async fn with_hanging_converter() -> (Daemon, PathBuf) {
    let folder = temporary_folder();
    let program = folder.path().join("image-hangs");
    fs::copy(env!("CARGO_BIN_EXE_mock-vmm-image"), &program).unwrap();
    let daemon = Daemon::in_folder(folder, &format!("vmm_image = {program:?}\n")).await;
    fs::create_dir(daemon.path("run/fault")).unwrap();
    let file = daemon.file("disk.raw", &content());
    (daemon, file)
}

#[tokio::test(flavor = "multi_thread")]
async fn imports_and_conversions_at_once_are_limited() {
    let (daemon, file) = with_hanging_converter().await;
    for number in 0..64 {
        daemon
            .begin_import(of_path(&format!("i{number}"), &file))
            .await
            .unwrap();
    }
    let refused = daemon.begin_import(of_path("more", &file)).await.unwrap_err();
    assert_refused(&refused, Code::ResourceExhausted, "TOO_MANY_IMPORTS");
    // Four images are made at a time, in a cgroup with limits.
    within(async || (daemon.vmm_processes().len() >= 4).then_some(())).await;
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
    daemon.begin_import(of_path("more", &file)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn conversion_that_takes_too_long_is_ended() {
    let (daemon, file) = with_hanging_converter().await;
    daemon.fault("conversion-patience");
    let failed = daemon.import(of_path("slow", &file)).await.unwrap_err();
    assert_says(&failed, "did not end within");
    assert_eq!(daemon.image("slow").await.unwrap_err().code(), Code::NotFound);
    assert_eq!(daemon.image_files(), Vec::<String>::new());
    let ended = async {
        daemon.wait_no_processes().await;
    };
    timeout(PATIENCE, ended).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn import_that_takes_too_long_is_cancelled() {
    let (daemon, _file) = with_hanging_converter().await;
    daemon.fault("import-patience");
    let (turn, _go) = held(part(&Arc::new(content()), "one", 1000));
    let server = Server::start(vec![turn]);
    let begun = daemon
        .begin_import(image("slow", Some(Source::Url(server.address.clone()))))
        .await;
    let begun = begun.unwrap();
    let ended = daemon.ended(&begun).await;
    assert_eq!(ended.phase(), OperationPhase::Cancelled);
    assert_eq!(daemon.image("slow").await.unwrap_err().code(), Code::NotFound);
    assert_eq!(daemon.image_files(), Vec::<String>::new());
}
