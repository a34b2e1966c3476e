//! Roles on the UNIX socket, by group.

use std::{os::unix::process::CommandExt, process::Command};

use proto::v1::{self, vm_service_client::VmServiceClient};
use tonic::Code;

use crate::harness::{Daemon, connect, refusal};

const VIEWERS: u32 = 990_017;

/// Set for the child that asks as somebody else: the folder of the daemon.
const FOLDER: &str = "VMMD_TEST_ROLES";

/// The test program itself, as a user in the group, asks what the test below wants to know.
#[tokio::test]
async fn a_viewer_reads_and_changes_nothing() {
    if let Ok(folder) = std::env::var(FOLDER) {
        let channel = connect(folder.as_ref()).await;
        let mut client = VmServiceClient::new(channel);
        client.list_vms(v1::ListVmsRequest::default()).await.unwrap();
        let request = v1::PauseVmRequest {
            name: "web".into(),
            ..Default::default()
        };
        let refused = client.pause_vm(request).await.unwrap_err();
        assert_eq!(
            refusal(&refused),
            (Code::PermissionDenied, "ROLE_REQUIRED".into())
        );
        return;
    }
    let daemon = Daemon::configured(&format!("viewer_group = '{VIEWERS}'\n")).await;
    daemon.run("web", "").await;
    std::fs::set_permissions(
        daemon.folder.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    let ask = |group: u32| {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child
            .args(["--exact", "roles::a_viewer_reads_and_changes_nothing"])
            .env(FOLDER, daemon.folder.path())
            .uid(990_001)
            .gid(group);
        child.output().unwrap()
    };
    let output = ask(VIEWERS);
    assert!(output.status.success(), "{output:?}");
    // Who is in no group is let in to nothing.
    assert!(!ask(990_018).status.success());
    daemon.pause("web").await.unwrap();
}
