//! Snapshots that are deleted when a later one of their VM is complete.

use std::{
    io::Write as _,
    time::{Duration, Instant},
};

use tonic::{Code, Status};
use vmmd_api::{v1, well_known};

use super::{create_request, stopped_behind_its_snapshot, with_id, with_image};
use crate::harness::{Daemon, PATIENCE, assert_refused, assert_says};

fn keep(keep_last: u32) -> v1::SnapshotRetention {
    v1::SnapshotRetention {
        keep_last,
        ..Default::default()
    }
}

fn request(name: &str, retention: v1::SnapshotRetention) -> v1::CreateSnapshotRequest {
    v1::CreateSnapshotRequest {
        retention: Some(retention),
        request_id: name.into(),
        ..create_request(name, "web", true)
    }
}

impl Daemon {
    /// Takes a snapshot of the VM "web".
    async fn retained(&self, name: &str, retention: v1::SnapshotRetention) -> Result<v1::Snapshot, Status> {
        let request = request(name, retention);
        let answer = self.snapshots().await.create_snapshot(request).await?;
        Ok(answer.into_inner().snapshot.unwrap())
    }

    /// Names of the snapshots that were deleted by a retention, the first one first.
    async fn expired(&self, count: usize) -> Vec<String> {
        let told = self.told_exactly("SnapshotExpired", count).await;
        told.into_iter().map(|event| event.object.unwrap().name).collect()
    }
}

#[tokio::test]
async fn retention_keeps_the_last_and_all_of_other_groups() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    daemon.run("other", "").await;
    daemon.snapshot("by-hand", "web", false).await.unwrap();
    let others = v1::CreateSnapshotRequest {
        retention: Some(keep(1)),
        ..create_request("others", "other", false)
    };
    daemon.snapshots().await.create_snapshot(others).await.unwrap();
    let monthly = v1::SnapshotRetention {
        group: "monthly".into(),
        ..keep(1)
    };
    let taken = daemon.retained("monthly", monthly.clone()).await.unwrap();
    assert_eq!(taken.status.unwrap().retention, Some(monthly));
    for name in ["day-1", "day-2", "day-3", "day-4"] {
        daemon.retained(name, keep(2)).await.unwrap();
    }
    // One without a retention deletes nothing.
    daemon.snapshot("by-hand-2", "web", false).await.unwrap();
    assert_eq!(
        daemon.snapshot_names().await,
        ["by-hand", "by-hand-2", "day-3", "day-4", "monthly", "others"]
    );
    assert_eq!(daemon.snapshot_files().len(), 6);
    assert_eq!(daemon.expired(2).await, ["day-1", "day-2"]);
    daemon.retained("day-5", keep(1)).await.unwrap();
    assert_eq!(
        daemon.snapshot_names().await,
        ["by-hand", "by-hand-2", "day-5", "monthly", "others"]
    );
    assert_eq!(daemon.expired(4).await[2..], ["day-3", "day-4"]);
}

#[tokio::test]
async fn what_is_older_than_it_may_be_goes() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let young = || v1::SnapshotRetention {
        max_age: Some(well_known::Duration { seconds: 3, nanos: 0 }),
        ..Default::default()
    };
    daemon.snapshot("by-hand", "web", false).await.unwrap();
    daemon.retained("one", young()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(3_500)).await;
    daemon.retained("two", keep(9)).await.unwrap();
    assert_eq!(daemon.snapshot_names().await, ["by-hand", "one", "two"]);
    daemon.retained("three", young()).await.unwrap();
    assert_eq!(daemon.snapshot_names().await, ["by-hand", "three", "two"]);
    assert_eq!(daemon.expired(1).await, ["one"]);
}

#[tokio::test]
async fn a_retention_that_says_nothing_is_refused_and_nothing_is_made() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let refused = daemon.retained("one", keep(0)).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert_says(&refused, "keep_last");
    assert!(daemon.snapshot_names().await.is_empty() && daemon.snapshot_files().is_empty());
}

#[tokio::test]
async fn a_snapshot_that_is_exported_stays_until_the_next_time() {
    let daemon = Daemon::start().await;
    with_image(&daemon, "", |image| image.write_all(&vec![7; 16 << 20]).unwrap()).await;
    daemon.retained("one", keep(1)).await.unwrap();
    let export = v1::ExportSnapshotRequest { name: "one".into() };
    let stream = daemon.snapshots().await.export_snapshot(export).await.unwrap();
    daemon.retained("two", keep(1)).await.unwrap();
    assert_eq!(daemon.snapshot_names().await, ["one", "two"]);
    drop(stream);
    let began = Instant::now();
    for number in 3.. {
        let name = format!("next-{number}");
        daemon.retained(&name, keep(1)).await.unwrap();
        if daemon.snapshot_names().await == [name] {
            break;
        }
        assert!(began.elapsed() < PATIENCE, "{:?}", daemon.snapshot_names().await);
    }
}

#[tokio::test]
async fn snapshot_cannot_be_deleted_during_its_restore() {
    let (daemon, _) = stopped_behind_its_snapshot().await;
    let waiting = daemon.restore_until("put-back", with_id()).await;

    let refused = daemon.delete_snapshot("one").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "SNAPSHOT_IN_USE");
    daemon.release("put-back");
    waiting.await.unwrap().unwrap();
    daemon.delete_snapshot("one").await.unwrap();
}

#[tokio::test]
async fn expired_snapshot_is_deleted_by_the_next_daemon() {
    let mut daemon = Daemon::configured("[snapshots]\nmax_count_per_vm = 3\n").await;
    daemon.run("web", "").await;
    daemon.snapshot("by-hand", "web", false).await.unwrap();
    daemon.retained("one", keep(1)).await.unwrap();
    daemon.fault("snapshot-complete");
    let mut client = daemon.snapshots().await;
    let taking = tokio::spawn(async move { client.create_snapshot(request("two", keep(1))).await });
    daemon.reached("snapshot-complete").await;
    assert_eq!(daemon.snapshot_names().await, ["by-hand", "one", "two"]);
    daemon.kill();
    assert!(taking.await.unwrap().is_err());
    daemon.release("snapshot-complete");
    daemon.relaunch().await;
    assert_eq!(daemon.snapshot_names().await, ["by-hand", "two"]);
    assert_eq!(daemon.snapshot_files().len(), 2);
    assert_eq!(daemon.expired(1).await, ["one"]);
    // The retry returns the snapshot that was taken.
    let again = daemon.retained("two", keep(1)).await.unwrap();
    assert_eq!(again.metadata.unwrap().name, "two");
    daemon.retained("three", keep(1)).await.unwrap();
    assert_eq!(daemon.snapshot_names().await, ["by-hand", "three"]);
}
