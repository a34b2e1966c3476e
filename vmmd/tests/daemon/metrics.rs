//! What Prometheus reads.

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};
use tokio_stream::StreamExt;
use vmmd_api::v1;

use crate::{
    console::Client,
    harness::{Daemon, PATIENCE, temporary_folder},
};

/// One request, as it is on the wire; its answer.
async fn ask(daemon: &Daemon, request: &str) -> String {
    let mut stream = UnixStream::connect(daemon.path("metrics.sock")).await.unwrap();
    let request = format!("{request} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

async fn daemon() -> Daemon {
    let folder = temporary_folder();
    let listen = format!("[metrics]\nlisten = {:?}\n", folder.path().join("metrics.sock"));
    Daemon::in_folder(folder, &listen).await
}

#[tokio::test]
async fn a_scrape_tells_of_every_vm_and_the_series_of_a_vm_go_with_it() {
    let daemon = daemon().await;
    daemon.run("web", "").await;
    daemon.create(daemon.manifest("idle", "")).await.unwrap();
    let text = ask(&daemon, "GET /metrics").await;
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    for line in [
        "vmmd_vm_phase{vm=\"web\",phase=\"running\"} 1.0",
        "vmmd_vm_phase{vm=\"idle\",phase=\"stopped\"} 1.0",
        "vmmd_vm_vcpu_seconds_total{vm=\"web\",vcpu=\"0\"} 2.5",
        "vmmd_vm_exits_total{vm=\"web\",reason=\"io\"} 400",
        "vmmd_rpcs_total{method=\"VmService/StartVm\",code=\"OK\"} 1",
        "vmmd_events_total{reason=\"DaemonStarted\"} 1",
        "vmmd_node_vcpus{of=\"committed\"} 1.0",
        "vmmd_node_condition{condition=\"Schedulable\"} 1.0",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    assert!(!text.contains("vmmd_vm_vcpu_seconds_total{vm=\"idle\""));
    // The mock counts a NIC that the VM does not have: a vmm's report does not create a series of
    // its own.
    assert!(!text.contains("nic=\"eth0\""), "{text}");
    daemon.delete("web", true).await.unwrap();
    let text = ask(&daemon, "GET /metrics").await;
    assert!(!text.contains("\"web\"") && text.contains("\"idle\""), "{text}");
}

#[tokio::test]
async fn a_vmm_that_does_not_answer_costs_its_own_series_alone() {
    let daemon = daemon().await;
    daemon.run("stuck", "mock.stats=hang").await;
    daemon.run("web", "").await;
    let text = ask(&daemon, "GET /metrics").await;
    for line in [
        "vmmd_vm_stats_up{vm=\"stuck\"} 0.0",
        "vmmd_vm_stats_up{vm=\"web\"} 1.0",
        "vmmd_vm_vcpu_seconds_total{vm=\"web\",vcpu=\"0\"} 2.5",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
}

#[tokio::test]
async fn nothing_else_is_served() {
    let daemon = daemon().await;
    assert!(ask(&daemon, "GET /").await.starts_with("HTTP/1.1 404"));
    assert!(ask(&daemon, "POST /metrics").await.starts_with("HTTP/1.1 405"));
}

/// Transactions that the store has made durable.
async fn commits(daemon: &Daemon) -> u64 {
    let text = ask(daemon, "GET /metrics").await;
    let count = text
        .lines()
        .find_map(|line| line.strip_prefix("vmmd_store_commits_total "));
    count.unwrap().trim_end_matches(".0").parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn create_that_starts_is_answered_after_two_commits() {
    let daemon = daemon().await;
    let fault = daemon.path("run/fault");
    std::fs::create_dir_all(&fault).unwrap();
    // The start writes the VM's record after the answer.
    std::fs::write(fault.join("slow-files"), "3000").unwrap();
    let before = commits(&daemon).await;
    let request = v1::CreateVmRequest {
        vm: Some(daemon.manifest("web", "")),
        start: true,
        request_id: "r1".into(),
        ..Default::default()
    };
    let created = daemon.client().create_vm(request).await.unwrap().into_inner();
    // The record, and the answer with the operation.
    assert_eq!(commits(&daemon).await - before, 2);
    let mut daemon = daemon;
    daemon.kill_and_restart().await;
    let kept = daemon.operation(&created.operation.unwrap().id).await;
    assert_eq!(kept.r#type, "vm.start");
}

#[tokio::test(flavor = "multi_thread")]
async fn start_with_an_id_is_answered_after_two_commits() {
    let daemon = daemon().await;
    daemon.create(daemon.manifest("web", "")).await.unwrap();
    let before = commits(&daemon).await;
    let request = v1::StartVmRequest {
        name: "web".into(),
        request_id: "r1".into(),
        ..Default::default()
    };
    daemon.client().start_vm(request).await.unwrap();
    let commits = commits(&daemon).await - before;
    // The run before its fork, and the answer with the operation; one more when the start took long enough for a note of it.
    assert!((2..=3).contains(&commits), "{commits}");
}

#[tokio::test(flavor = "multi_thread")]
async fn guest_that_resets_in_a_loop_does_not_flood_watchers() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let mut watch = daemon.watch("web").await;
    let mut console = Client::open(&daemon, "web").await;
    let began = std::time::Instant::now();
    console.type_in(&"reset\n".repeat(300)).await;
    let mut told = 0;
    loop {
        let event = watch.next().await.unwrap().unwrap();
        told += 1;
        let counts = event.vm.and_then(|vm| vm.status).and_then(|status| status.counts);
        if counts.is_some_and(|counts| counts.guest_resets == 300) {
            break;
        }
    }
    let most = 5 + began.elapsed().as_millis() / 100;
    assert!(told <= most, "{told} of {most}");
}

#[tokio::test(flavor = "multi_thread")]
async fn events_file_that_stalls_holds_up_no_vm() {
    let daemon = Daemon::start().await;
    let fault = daemon.path("state/fault");
    std::fs::create_dir_all(&fault).unwrap();
    std::fs::write(fault.join("events"), "").unwrap();
    let calls = async {
        daemon.run("web", "").await;
        daemon.kill_vm("web").await.unwrap();
    };
    tokio::time::timeout(PATIENCE, calls)
        .await
        .expect("calls wait for the file of events");
    assert!(
        daemon.events("Started").await.is_empty(),
        "what is not in the file is not seen"
    );
    std::fs::remove_dir_all(&fault).unwrap();
    daemon.told("Created", 1).await;
    daemon.told("Started", 1).await;
}
