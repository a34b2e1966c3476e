//! `GetNode`, reflection and health.

use rstest::rstest;
use tokio_stream::StreamExt;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
};
use vmmd_api::v1::{ConditionStatus, Node, NodeStatus, WatchNodeRequest};

use crate::harness::{Daemon, connect, temporary_folder};

async fn node(daemon: &Daemon) -> NodeStatus {
    whole(daemon).await.status.unwrap()
}

async fn whole(daemon: &Daemon) -> Node {
    daemon.node().await
}

#[tokio::test]
async fn the_node_says_what_it_has_and_what_its_vms_take() {
    let daemon = Daemon::start().await;
    daemon.create(daemon.manifest("idle", "")).await.unwrap();
    daemon.run("web", "").await;
    let whole = whole(&daemon).await;
    let metadata = whole.metadata.unwrap();
    let node = whole.status.unwrap();
    assert_eq!(
        (node.vms, node.vms_running, node.memory_committed_bytes),
        (2, 1, 128 << 20)
    );
    assert!(node.cpus > 0 && node.memory_bytes > node.memory_available_bytes);
    assert!(!metadata.name.is_empty() && !node.kernel_version.is_empty());
    assert_eq!(node.conditions[0].status(), ConditionStatus::True);
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    assert_eq!(node.boot_id, boot_id.trim());
    assert!(node.api_minor_version >= 1 && node.daemon_start_time.is_some());
    for feature in ["balloon", "disk-hotplug", "kvm"] {
        assert!(node.features.iter().any(|known| known == feature), "{feature}");
    }
}

#[tokio::test]
async fn the_node_keeps_its_uid_and_counts_its_changes() {
    let mut daemon = Daemon::start().await;
    let before = whole(&daemon).await.metadata.unwrap();
    assert!(before.uid.parse::<uuid::Uuid>().is_ok(), "{before:?}");
    daemon.cordon("").await;
    daemon.kill_and_restart().await;
    let after = whole(&daemon).await.metadata.unwrap();
    assert_eq!((after.uid, after.generation), (before.uid, before.generation + 1));
}

#[tokio::test]
async fn a_watch_of_the_node_sends_what_it_is_and_each_change() {
    let daemon = Daemon::start().await;
    let watch = daemon.nodes().await.watch_node(WatchNodeRequest {}).await;
    let mut watch = watch.unwrap().into_inner();
    let first = watch.next().await.unwrap().unwrap().node.unwrap();
    assert_eq!(first.status.unwrap().vms, 0);
    daemon.run("web", "").await;
    let running = loop {
        let node = watch.next().await.unwrap().unwrap().node.unwrap();
        let status = node.status.unwrap();
        if status.vms_running == 1 {
            break status;
        }
    };
    assert_eq!(running.committed.unwrap().memory_bytes >> 20, 128 + 68);
    daemon.cordon("").await;
    loop {
        let node = watch.next().await.unwrap().unwrap().node.unwrap();
        if node.spec.unwrap().cordoned {
            break;
        }
    }
}

/// The last is a sysfs file without write permission, even for root.
#[rstest]
#[case("/nonexistent/kvm", "no /dev/kvm")]
#[case(
    "/sys/devices/system/cpu/online",
    "no permission to open /dev/kvm: run vmmd as root"
)]
#[tokio::test]
async fn a_node_without_kvm_says_what_to_do_and_starts_nothing(#[case] device: &str, #[case] says: &str) {
    let daemon = Daemon::configured(&format!("kvm_device = '{device}'\n")).await;
    let condition = node(&daemon).await.conditions[0].clone();
    assert_eq!(
        (condition.r#type.as_str(), condition.status()),
        ("KvmAvailable", ConditionStatus::False)
    );
    assert!(condition.message.contains(says), "{}", condition.message);
    daemon.create(daemon.manifest("web", "")).await.unwrap();
    let refused = daemon.start_vm("web").await.unwrap_err();
    assert_eq!(refused.message(), condition.message);
}

#[tokio::test]
async fn kvm_is_there_since_it_was_first_seen() {
    let folder = temporary_folder();
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
    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let requests = tokio_stream::iter([request]);
    let mut answers = ServerReflectionClient::new(channel.clone())
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
    let ask = |service: &str| HealthCheckRequest {
        service: service.into(),
    };
    let mut health = HealthClient::new(channel);
    let ours = names.into_iter().filter(|name| name.starts_with("vmmd."));
    for service in ours.chain([""]) {
        let answer = health.check(ask(service)).await.unwrap().into_inner();
        assert_eq!(answer.status(), ServingStatus::Serving, "{service}");
    }
    let refused = health.check(ask("vmmd.v1.NoService")).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::NotFound);
    let mut watched = health.watch(ask("vmmd.v1.NoService")).await.unwrap().into_inner();
    let told = watched.message().await.unwrap().unwrap();
    assert_eq!(told.status(), ServingStatus::ServiceUnknown);
}
