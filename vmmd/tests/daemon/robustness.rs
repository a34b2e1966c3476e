//! A full file system, garbage on the socket, a second daemon.

use std::{
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tonic::{Code, Status};
use vmmd_api::v1::VmPhase;

use crate::harness::{Daemon, command, refusal, status, temporary_folder, uid};

/// A small tmpfs, unmounted when dropped.
struct SmallFileSystem(PathBuf);

impl SmallFileSystem {
    fn new(path: PathBuf) -> Self {
        fs::create_dir_all(&path).unwrap();
        mount("none", &path, "tmpfs", MountFlags::empty(), Some(c"size=4m")).unwrap();
        Self(path)
    }

    fn fill(&self) -> PathBuf {
        let path = self.0.join("filler");
        let mut file = fs::File::create(&path).unwrap();
        for size in [64 << 10, 4096, 1] {
            while file.write_all(&vec![1; size]).is_ok() {}
        }
        path
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// Creates VMs with large records until the store is full: redb keeps some free pages.
async fn create_until_refused(daemon: &Daemon, made: &mut usize) -> Status {
    loop {
        let mut vm = daemon.manifest(&format!("new{made}"), "");
        let labels = (0..60).map(|index| (format!("key{index}"), "x".repeat(250)));
        vm.metadata.as_mut().unwrap().labels = labels.collect();
        match daemon.create(vm).await {
            Ok(_) => *made += 1,
            Err(status) => return status,
        }
        assert!(*made < 1000, "the store never became full");
    }
}

#[tokio::test]
async fn full_file_system_of_the_store_is_reported_without_change() {
    let folder = temporary_folder();
    let small = SmallFileSystem::new(folder.path().join("state"));
    let mut daemon = Daemon::in_folder(folder, "").await;
    // Unmounted before the daemon's folder is removed.
    let small = small;
    daemon.run("old", "").await;
    let idle = daemon.create(daemon.manifest("idle", "")).await.unwrap();
    let filler = small.fill();
    let full = (Code::ResourceExhausted, "STORE_FULL".to_owned());
    let mut made = 0;
    let refused = create_until_refused(&daemon, &mut made).await;
    assert_eq!(refusal(&refused), full);
    assert!(!refused.message().contains("/tmp"), "{}", refused.message());
    let names = daemon.names().await;
    assert!(!names.contains(&format!("new{made}")), "{names:?}");
    // Actions that need no new record still work, above all the removal of a running VM.
    let stopped = daemon.kill_vm("old").await.unwrap();
    assert_eq!(status(&stopped).phase(), VmPhase::Stopped);
    assert_eq!(daemon.get("idle").await.unwrap(), idle);
    // The next daemon comes up, serves reads and says why it refuses changes.
    daemon.kill_and_restart().await;
    assert_eq!(uid(&daemon.get("idle").await.unwrap()), uid(&idle));
    assert_eq!(daemon.list().await.len(), made + 2);
    let refused = create_until_refused(&daemon, &mut made).await;
    assert_eq!(refusal(&refused), full);
    fs::remove_file(filler).unwrap();
    daemon
        .create(daemon.manifest("after", ""))
        .await
        .expect("there is room again");
    daemon.start_vm("idle").await.unwrap();
    daemon.kill_and_restart().await;
    assert_eq!(daemon.list().await.len(), made + 3);
}

#[tokio::test]
async fn garbage_on_the_socket_disturbs_nobody() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let socket = daemon.path("run/vmmd.sock");
    let mut watch = daemon.watch("").await;
    for garbage in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0xff; 4096],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff",
        b"",
    ] {
        let mut stream = UnixStream::connect(&socket).unwrap();
        let _ = stream.write_all(garbage);
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    }
    // One that connects and says nothing.
    let _silent = UnixStream::connect(&socket).unwrap();
    assert!(watch.message().await.unwrap().is_some());
    assert_eq!(daemon.phase("web").await, VmPhase::Running);
}

#[tokio::test]
async fn an_oversized_request_is_refused_and_the_connection_lives_on() {
    let daemon = Daemon::start().await;
    let refused = daemon.get(&"x".repeat(1 << 20)).await.unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange, "{refused:?}");
    assert!(daemon.list().await.is_empty());
}

#[tokio::test]
async fn second_daemon_on_the_same_folders_is_refused() {
    let daemon = Daemon::start().await;
    let output = command(daemon.folder.path(), None)
        .env_remove("RUST_LOG")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && text.contains("another vmmd uses"),
        "{text}"
    );
    assert!(daemon.list().await.is_empty());
}

#[tokio::test]
async fn a_stale_socket_and_old_locks_do_not_hinder_a_start() {
    let mut daemon = Daemon::start().await;
    daemon.kill();
    assert!(daemon.path("run/vmmd.sock").exists());
    daemon.relaunch().await;
    daemon.terminate();
    assert!(!daemon.path("run/vmmd.sock").exists());
}

#[tokio::test]
async fn a_vmm_that_never_says_hello_can_be_stopped() {
    let folder = temporary_folder();
    let silent = folder.path().join("silent");
    fs::copy(env!("CARGO_BIN_EXE_mock-vmm"), &silent).unwrap();
    let daemon = Daemon::in_folder(folder, &format!("vmm = {silent:?}\n")).await;
    daemon.create(daemon.manifest("web", "")).await.unwrap();
    let start = daemon.begin_start("web");
    daemon.wait_phase("web", VmPhase::Starting).await;
    daemon.delete("web", true).await.unwrap();
    assert!(start.await.unwrap().is_err());
    assert_eq!(daemon.vmm_processes(), []);
}
