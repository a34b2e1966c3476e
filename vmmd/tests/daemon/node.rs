//! `GetNode`, reflection and health.

use proto::v1::{ConditionStatus, GetNodeRequest, Node};
use tokio_stream::StreamExt;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
};

use crate::harness::{Daemon, connect};

async fn node(daemon: &Daemon) -> Node {
    daemon
        .nodes()
        .await
        .get_node(GetNodeRequest {})
        .await
        .unwrap()
        .into_inner()
        .node
        .unwrap()
}

#[tokio::test]
async fn the_node_says_what_it_has_and_what_its_vms_take() {
    let daemon = Daemon::start().await;
    daemon.create(daemon.manifest("idle", "")).await.unwrap();
    daemon.run("web", "").await;
    let node = node(&daemon).await;
    assert_eq!(
        (node.vms, node.vms_running, node.memory_committed_bytes),
        (2, 1, 128 << 20)
    );
    assert!(node.cpus > 0 && node.memory_bytes > node.memory_available_bytes);
    assert!(!node.name.is_empty() && !node.kernel_version.is_empty());
    assert_eq!(node.conditions[0].status(), ConditionStatus::True);
}

#[tokio::test]
async fn a_node_without_kvm_says_what_to_do_and_starts_nothing() {
    let daemon = Daemon::configured("kvm_device = '/nonexistent/kvm'\n").await;
    let condition = node(&daemon).await.conditions[0].clone();
    assert_eq!(
        (condition.r#type.as_str(), condition.status()),
        ("KvmAvailable", ConditionStatus::False)
    );
    assert!(condition.message.contains("no /dev/kvm"), "{}", condition.message);
    daemon.create(daemon.manifest("web", "")).await.unwrap();
    let refused = daemon.start_vm("web").await.unwrap_err();
    assert_eq!(refused.message(), condition.message);
}

#[tokio::test]
async fn kvm_is_there_since_it_was_first_seen() {
    let folder = tempfile::Builder::new()
        .prefix("vmmd")
        .tempdir_in("/tmp")
        .unwrap();
    let device = folder.path().join("kvm");
    let daemon = Daemon::in_folder(folder, &format!("kvm_device = {device:?}\n")).await;
    let seen = async || {
        let condition = node(&daemon).await.conditions[0].clone();
        let time = condition.transition_time.unwrap();
        (condition.status(), (time.seconds, time.nanos))
    };
    let (missing, first) = seen().await;
    assert_eq!(
        (missing, seen().await),
        (ConditionStatus::False, (missing, first))
    );
    std::os::unix::fs::symlink("/dev/null", &device).unwrap();
    let (there, second) = seen().await;
    assert!(there == ConditionStatus::True && second > first, "{second:?}");
    assert_eq!(seen().await, (there, second));
}

#[tokio::test]
async fn health_and_reflection_are_served() {
    let daemon = Daemon::start().await;
    let channel = connect(daemon.folder.path()).await;
    let request = HealthCheckRequest {
        service: "vmmd.v1.VmService".into(),
    };
    let health = HealthClient::new(channel.clone())
        .check(request)
        .await
        .unwrap()
        .into_inner();
    assert_eq!(health.status, 1);
    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let requests = tokio_stream::iter([request]);
    let mut answers = ServerReflectionClient::new(channel)
        .server_reflection_info(requests)
        .await
        .unwrap()
        .into_inner();
    let answer = answers.next().await.unwrap().unwrap().message_response.unwrap();
    let MessageResponse::ListServicesResponse(services) = answer else {
        panic!("{answer:?}")
    };
    let names: Vec<_> = services
        .service
        .iter()
        .map(|service| service.name.as_str())
        .collect();
    assert!(
        names.contains(&"vmmd.v1.VmService") && names.contains(&"vmmd.v1.NodeService"),
        "{names:?}"
    );
}
