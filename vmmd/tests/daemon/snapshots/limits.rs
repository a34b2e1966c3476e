//! How many snapshots there may be, and what room they may take.

use std::{fs, io::Write as _};

use tonic::{Code, Status};
use vmmd_api::v1;

use super::{create_request, with_image};
use crate::{
    harness::{Daemon, assert_says, refusal},
    verbs::within,
};

/// More than the memory of a small VM can take (128 MiB and 4 MiB beside it), and less than two can, or one with a disk of 4 MiB.
const MAX: &str = "[snapshots]\nmax_bytes = 140000000\n";

fn quota() -> (Code, String) {
    (Code::ResourceExhausted, "SNAPSHOT_QUOTA".into())
}

impl Daemon {
    async fn nothing_is_there(&self) {
        assert!(self.snapshot_names().await.is_empty());
        assert!(self.snapshot_files().is_empty(), "{:?}", self.snapshot_files());
        self.told_exactly("SnapshotCreated", 0).await;
    }

    /// The names on a page, and the token of the next one.
    pub async fn snapshot_page(&self, page_size: u32, token: &str) -> (Vec<String>, String) {
        let request = v1::ListSnapshotsRequest {
            page_size,
            page_token: token.into(),
        };
        let answer = self.snapshots().await.list_snapshots(request).await.unwrap();
        let v1::ListSnapshotsResponse {
            snapshots,
            next_page_token,
        } = answer.into_inner();
        let names = snapshots
            .into_iter()
            .map(|snapshot| snapshot.metadata.unwrap().name);
        (names.collect(), next_page_token)
    }

    /// Restarts it with another limit.
    async fn with_limit(&mut self, from: &str, to: &str) {
        let path = self.path("config.toml");
        let config = fs::read_to_string(&path).unwrap();
        assert!(config.contains(from));
        fs::write(&path, config.replace(from, to)).unwrap();
        self.kill_and_restart().await;
    }

    /// Exports a snapshot, and imports it under another name.
    async fn copy_of(&self, name: &str, copy: &str) -> Result<v1::Snapshot, Status> {
        let archive = self.export_snapshot(name).await?;
        self.import_snapshot(copy, &archive).await
    }
}

fn full(image: &mut fs::File) {
    image.write_all(&vec![7; 4 << 20]).unwrap();
}

#[tokio::test]
async fn snapshot_above_the_quota_is_refused_and_leaves_nothing() {
    let mut daemon = Daemon::configured(MAX).await;
    with_image(&daemon, "", full).await;
    daemon.run("small", "").await;
    let refused = daemon.snapshot("one", "web", true).await.unwrap_err();
    assert_eq!(refusal(&refused), quota());
    for said in [
        "take 0 MiB",
        "133 MiB are allowed",
        "may take 137 MiB",
        "vmmctl snapshot rm",
    ] {
        assert_says(&refused, said);
    }
    daemon.nothing_is_there().await;
    // A complete snapshot counts with its allocated size.
    for name in ["one", "two"] {
        let taken = daemon.snapshot(name, "small", false).await.unwrap();
        assert!(taken.status.unwrap().allocated_bytes < 1 << 20);
    }
    daemon
        .with_limit("max_bytes = 140000000", "max_bytes = 1000000000")
        .await;
    let taken = daemon.snapshot("three", "web", true).await.unwrap();
    let room = taken.status.as_ref().unwrap().allocated_bytes;
    assert!((4 << 20..5 << 20).contains(&room), "{room}");
    // As the daemon had noted it.
    daemon.with_limit("max_bytes = 1000000000", "max_bytes = 1").await;
    let request = v1::GetSnapshotRequest { name: "three".into() };
    let got = daemon.snapshots().await.get_snapshot(request).await.unwrap();
    assert_eq!(got.into_inner().snapshot.unwrap(), taken);
    let refused = daemon.snapshot("four", "small", false).await.unwrap_err();
    assert_eq!(refusal(&refused), quota());
    assert_eq!(daemon.snapshot_names().await, ["one", "three", "two"]);
}

#[tokio::test]
async fn import_above_the_quota_is_refused_and_leaves_nothing() {
    let mut daemon = Daemon::configured("[snapshots]\nmax_bytes = 1000000000\n").await;
    with_image(&daemon, "", full).await;
    daemon.snapshot("one", "web", true).await.unwrap();
    daemon
        .with_limit("max_bytes = 1000000000", "max_bytes = 8000000")
        .await;
    let files = daemon.snapshot_files().len();
    let refused = daemon.copy_of("one", "two").await.unwrap_err();
    assert_eq!(refusal(&refused), quota());
    assert_eq!(daemon.snapshot_names().await, ["one"]);
    assert_eq!(daemon.snapshot_files().len(), files);
    daemon
        .with_limit("max_bytes = 8000000", "max_bytes = 9000000")
        .await;
    let copy = daemon.copy_of("one", "two").await.unwrap();
    assert!(copy.status.unwrap().allocated_bytes >= 4 << 20);
}

#[tokio::test]
async fn of_two_snapshots_with_quota_for_one_one_is_taken() {
    let daemon = Daemon::configured(MAX).await;
    let written = daemon.path("written");
    let mut taking = Vec::new();
    for vm in ["first", "second"] {
        daemon.run(vm, &format!("mock.save={}", written.display())).await;
    }
    for vm in ["first", "second"] {
        let (mut client, request) = (daemon.snapshots().await, create_request(vm, vm, false));
        taking.push(tokio::spawn(async move { client.create_snapshot(request).await }));
    }
    // Neither snapshot completes before the file exists.
    let ended = within(async || {
        let ended = taking.iter().position(tokio::task::JoinHandle::is_finished);
        ended.map(|ended| taking.swap_remove(ended))
    })
    .await;
    assert_eq!(refusal(&ended.await.unwrap().unwrap_err()), quota());
    fs::write(&written, "").unwrap();
    taking.remove(0).await.unwrap().unwrap();
    assert_eq!(daemon.snapshot_names().await.len(), 1);
    assert_eq!(daemon.snapshot_files().len(), 1);
}

#[tokio::test]
async fn a_vm_has_no_more_snapshots_than_it_may_have() {
    let daemon = Daemon::configured("[snapshots]\nmax_count_per_vm = 1\n").await;
    daemon.run("web", "").await;
    daemon.run("other", "").await;
    daemon.snapshot("one", "web", false).await.unwrap();
    let refused = daemon.snapshot("two", "web", false).await.unwrap_err();
    assert_eq!(refusal(&refused), quota());
    assert_says(&refused, "max_count_per_vm");
    let refused = daemon.copy_of("one", "two").await.unwrap_err();
    assert_eq!(refusal(&refused), quota());
    daemon.snapshot("two", "other", false).await.unwrap();
    daemon.delete_snapshot("one").await.unwrap();
    daemon.snapshot("one", "web", false).await.unwrap();
}

#[tokio::test]
async fn snapshots_are_listed_a_page_at_a_time() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    for name in ["a", "b", "c"] {
        daemon.snapshot(name, "web", false).await.unwrap();
    }
    let (first, token) = daemon.snapshot_page(2, "").await;
    assert_eq!(first, ["a", "b"]);
    let (second, end) = daemon.snapshot_page(2, &token).await;
    assert_eq!((second, end), (vec!["c".to_owned()], String::new()));
    let request = v1::ListSnapshotsRequest {
        page_size: 1001,
        ..Default::default()
    };
    let refused = daemon
        .snapshots()
        .await
        .list_snapshots(request)
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}
