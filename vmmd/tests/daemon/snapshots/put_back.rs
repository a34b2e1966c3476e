//! Images of a restored VM when the daemon ends in between.

use std::fs;

use vmmd_api::v1;

use super::{content, stopped_behind_its_snapshot, with_id};

#[tokio::test]
async fn a_restored_vm_whose_vmm_answers_late_keeps_its_disks() {
    let (mut daemon, image) = stopped_behind_its_snapshot().await;
    let waiting = daemon.restore_until("put-back", with_id()).await;
    daemon.kill();
    assert!(waiting.await.unwrap().is_err());
    fs::remove_file(daemon.path("run/fault/put-back")).unwrap();
    let vmm = daemon.vmm_processes()[0];
    rustix::process::kill_process(vmm, rustix::process::Signal::STOP).unwrap();
    daemon.relaunch().await;
    rustix::process::kill_process(vmm, rustix::process::Signal::CONT).unwrap();
    let ready = |status: &v1::VmStatus| status.conditions[0].status() == v1::ConditionStatus::True;
    daemon.wait("web", ready).await;
    assert!(daemon.copies().is_empty(), "{:?}", daemon.copies());
    daemon.kill_vm("web").await.unwrap();
    daemon.start_vm("web").await.unwrap();
    assert_eq!(content(&image), "until the snapshot");
}
