//! Roles on the UNIX socket, by group.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::{Command, Output},
};

use prost::Message as _;
use tonic::Code;
use vmmd_api::v1::{
    self, image_service_client::ImageServiceClient, image_spec::Source,
    network_service_client::NetworkServiceClient, node_service_client::NodeServiceClient,
    snapshot_service_client::SnapshotServiceClient, vm_service_client::VmServiceClient,
};

use crate::harness::{Daemon, assert_refused, assert_says, connect, metadata_of, refusal};

const VIEWERS: u32 = 990_017;
const AGENTS: u32 = 990_019;
const OPERATORS: u32 = 990_021;

/// Set for the child that asks as somebody else: the folder of the daemon.
const FOLDER: &str = "VMMD_TEST_ROLES";

/// Runs `test` of this program as a user in this group alone. The program is a copy in the daemon's folder: other users may be unable to reach
/// the folder where it was built, such as one in the home of root.
fn ask(daemon: &Daemon, test: &str, group: u32) -> Output {
    let folder = daemon.folder.path();
    let everybody = fs::Permissions::from_mode(0o755);
    fs::set_permissions(folder, everybody.clone()).unwrap();
    let program = daemon.path("client");
    if !program.exists() {
        fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
        fs::set_permissions(&program, everybody).unwrap();
    }
    let mut child = Command::new(program);
    child
        .args(["--exact", test])
        .env(FOLDER, folder)
        .uid(990_001)
        .gid(group);
    child.output().unwrap()
}

/// The test program itself, as a user in the group, makes the requests of the test below.
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
        assert_refused(&refused, Code::PermissionDenied, "ROLE_REQUIRED");
        return;
    }
    let daemon = Daemon::configured(&format!("viewer_group = '{VIEWERS}'\n")).await;
    daemon.run("web", "").await;
    let test = "roles::a_viewer_reads_and_changes_nothing";
    let output = ask(&daemon, test, VIEWERS);
    assert!(output.status.success(), "{output:?}");
    // A user in no group has no access.
    assert!(!ask(&daemon, test, 990_018).status.success());
    daemon.pause("web").await.unwrap();
}

#[tokio::test]
async fn operator_takes_snapshots_without_export_or_import() {
    if let Ok(folder) = std::env::var(FOLDER) {
        let mut client = SnapshotServiceClient::new(connect(folder.as_ref()).await);
        client
            .list_snapshots(v1::ListSnapshotsRequest::default())
            .await
            .unwrap();
        let export = v1::ExportSnapshotRequest { name: "one".into() };
        let exported = client.export_snapshot(export).await.map(drop);
        let import = tokio_stream::iter([v1::ImportSnapshotRequest::default()]);
        let imported = client.import_snapshot(import).await.map(drop);
        // It would delete others.
        let retained = v1::CreateSnapshotRequest {
            retention: Some(v1::SnapshotRetention::default()),
            ..Default::default()
        };
        let retained = client.create_snapshot(retained).await.map(drop);
        for refused in [exported, imported, retained] {
            let refused = refusal(&refused.unwrap_err());
            assert_eq!(refused, (Code::PermissionDenied, "ROLE_REQUIRED".into()));
        }
        return;
    }
    let daemon = Daemon::configured(&format!("operator_group = '{OPERATORS}'\n")).await;
    let test = "roles::operator_takes_snapshots_without_export_or_import";
    let output = ask(&daemon, test, OPERATORS);
    assert!(output.status.success(), "{output:?}");
}

/// Requests of an agent, as the child of the test below.
async fn as_an_agent(folder: &Path) {
    let channel = connect(folder).await;
    let mut vms = VmServiceClient::new(channel.clone());
    let vm = v1::Vm::decode(&*fs::read(folder.join("manifest")).unwrap()).unwrap();
    let request = v1::CreateVmRequest {
        vm: Some(vm),
        ..Default::default()
    };
    vms.create_vm(request).await.unwrap();
    let request = v1::DeleteVmRequest {
        name: "made".into(),
        ..Default::default()
    };
    vms.delete_vm(request).await.unwrap();
    let cordon = NodeServiceClient::new(channel.clone())
        .cordon_node(v1::CordonNodeRequest::default())
        .await
        .map(drop);
    let request = v1::DeleteNetworkRequest {
        name: "default".into(),
        ..Default::default()
    };
    let delete = NetworkServiceClient::new(channel)
        .delete_network(request)
        .await
        .map(drop);
    for refused in [cordon, delete] {
        let refused = refused.unwrap_err();
        assert_refused(&refused, Code::PermissionDenied, "ROLE_REQUIRED");
        assert_says(&refused, "has the role agent");
    }
}

/// Imports of an agent that lead to services of the node.
async fn imports_of_an_agent(folder: &Path) {
    let mut images = ImageServiceClient::new(connect(folder).await);
    let registry = v1::OciSource {
        reference: "127.0.0.1:9/other/secret:1".into(),
        plain_http: true,
        ..Default::default()
    };
    for source in [
        Source::Url("http://127.0.0.1:9/disk.raw".into()),
        Source::Url("http://169.254.169.254/latest/meta-data".into()),
        Source::Oci(registry),
    ] {
        let image = v1::Image {
            metadata: metadata_of("taken"),
            spec: Some(v1::ImageSpec {
                source: Some(source),
                ..Default::default()
            }),
            status: None,
        };
        let request = v1::ImportImageRequest {
            image: Some(image),
            ..Default::default()
        };
        let refused = images.import_image(request).await.unwrap_err();
        assert_refused(&refused, Code::FailedPrecondition, "DOWNLOAD_REFUSED");
        assert_says(&refused, "address of the node itself");
    }
}

#[tokio::test]
async fn agent_imports_nothing_from_the_node_itself() {
    if let Ok(folder) = std::env::var(FOLDER) {
        return imports_of_an_agent(folder.as_ref()).await;
    }
    let daemon = Daemon::configured(&format!("agent_group = '{AGENTS}'\n")).await;
    let test = "roles::agent_imports_nothing_from_the_node_itself";
    let output = ask(&daemon, test, AGENTS);
    assert!(output.status.success(), "{output:?}");
}

fn of_path(name: &str, path: &Path) -> v1::ImportImageRequest {
    let image = v1::Image {
        metadata: metadata_of(name),
        spec: Some(v1::ImageSpec {
            source: Some(Source::Path(path.display().to_string())),
            ..Default::default()
        }),
        status: None,
    };
    v1::ImportImageRequest {
        image: Some(image),
        ..Default::default()
    }
}

#[tokio::test]
async fn import_of_an_agent_has_a_limit_of_bytes() {
    let import = async |folder: &Path, name: &str| {
        let mut images = ImageServiceClient::new(connect(folder).await);
        images.import_image(of_path(name, &folder.join(name))).await
    };
    if let Ok(folder) = std::env::var(FOLDER) {
        import(folder.as_ref(), "small").await.unwrap();
        import(folder.as_ref(), "large").await.unwrap_err();
        return;
    }
    let limit = format!("agent_group = '{AGENTS}'\n[images]\nagent_max_bytes = 512\n");
    let daemon = Daemon::configured(&limit).await;
    fs::write(daemon.path("small"), [1; 512]).unwrap();
    fs::write(daemon.path("large"), [2; 513]).unwrap();
    let test = "roles::import_of_an_agent_has_a_limit_of_bytes";
    let output = ask(&daemon, test, AGENTS);
    assert!(output.status.success(), "{output:?}");
    // An administrator imports the same file.
    import(daemon.folder.path(), "large").await.unwrap();
}

#[tokio::test]
async fn agent_creates_and_deletes_vms_but_changes_no_node() {
    if let Ok(folder) = std::env::var(FOLDER) {
        return as_an_agent(folder.as_ref()).await;
    }
    let daemon = Daemon::configured(&format!("agent_group = '{AGENTS}'\n")).await;
    let manifest = daemon.manifest("made", "").encode_to_vec();
    fs::write(daemon.path("manifest"), manifest).unwrap();
    let test = "roles::agent_creates_and_deletes_vms_but_changes_no_node";
    let output = ask(&daemon, test, AGENTS);
    assert!(output.status.success(), "{output:?}");
    assert!(!ask(&daemon, test, VIEWERS).status.success());
    assert!(daemon.list().await.is_empty());
}
