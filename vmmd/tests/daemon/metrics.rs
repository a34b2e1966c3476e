//! What Prometheus reads.

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

use crate::harness::Daemon;

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
    let folder = tempfile::Builder::new()
        .prefix("vmmd")
        .tempdir_in("/tmp")
        .unwrap();
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
    // The mock counts a NIC that the VM does not have: what a vmm says makes no series of its own.
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
