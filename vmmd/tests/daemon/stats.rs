//! Resource usage, counters and logs of a VM.

use tokio_stream::StreamExt;
use tonic::{Code, Status};
use vmmd_api::v1::{self, nic_spec::Attachment};

use crate::{
    harness::{Daemon, PATIENCE, assert_refused},
    namespace::Namespace,
    network::nic,
};

async fn stats(daemon: &Daemon, name: &str) -> Result<v1::VmStats, Status> {
    let request = v1::GetVmStatsRequest { name: name.into() };
    let answer = daemon.client().get_vm_stats(request).await?;
    Ok(answer.into_inner().stats.unwrap())
}

#[tokio::test]
async fn a_running_vm_is_counted_by_its_vmm_and_by_the_kernel() {
    let network = Namespace::new();
    network.ip("tuntap add tap9 mode tap");
    let mut daemon = Daemon::in_network(&network.0).await;
    daemon
        .run_with("web", "", |spec| {
            spec.nics = vec![nic("eth0", Attachment::Tap("tap9".into()))];
        })
        .await;
    for _ in 0..2 {
        let stats = stats(&daemon, "web").await.unwrap();
        let cpu = stats.cpu.unwrap();
        let vcpu = &cpu.vcpus[0];
        assert_eq!(vcpu.time.unwrap().seconds, 2);
        assert_eq!(vcpu.steal_time.unwrap().nanos, 250_000_000);
        assert_eq!(cpu.exits["io_exits"], 400);
        let memory = stats.memory.unwrap();
        assert_eq!(memory.size_bytes, 128 << 20);
        assert!(memory.used_bytes > 0, "{memory:?}");
        assert_eq!(stats.nics[0].sent_dropped, 6);
        assert!(stats.time.is_some());
        // The same of a daemon that found the VM running.
        daemon.kill_and_restart().await;
    }
}

#[tokio::test]
async fn what_cannot_be_counted_says_why() {
    let daemon = Daemon::start().await;
    daemon.define("web", "mock.stats=hang").await;
    let refused = stats(&daemon, "web").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NOT_RUNNING");
    let refused = stats(&daemon, "none").await.unwrap_err();
    assert_refused(&refused, Code::NotFound, "VM_NOT_FOUND");
    daemon.start_vm("web").await.unwrap();
    let refused = stats(&daemon, "web").await.unwrap_err();
    assert_refused(&refused, Code::Unavailable, "VMM_UNRESPONSIVE");
}

async fn logs(daemon: &Daemon, request: v1::GetVmLogsRequest) -> Result<String, Status> {
    let mut stream = daemon.client().get_vm_logs(request).await?.into_inner();
    let mut bytes = Vec::new();
    while let Some(message) = stream.next().await {
        bytes.extend(message?.data);
    }
    Ok(String::from_utf8(bytes).unwrap())
}

fn request(log: v1::VmLog) -> v1::GetVmLogsRequest {
    v1::GetVmLogsRequest {
        name: "web".into(),
        log: log.into(),
        ..Default::default()
    }
}

#[tokio::test]
async fn logs_are_read_whole_or_by_their_end_for_two_runs() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let serial = request(v1::VmLog::Serial);
    assert_eq!(logs(&daemon, serial.clone()).await.unwrap(), "booted web\r\n");
    let tail = v1::GetVmLogsRequest {
        tail_bytes: Some(5),
        ..serial.clone()
    };
    assert_eq!(logs(&daemon, tail).await.unwrap(), "web\r\n");
    let previous = v1::GetVmLogsRequest {
        previous: true,
        ..serial.clone()
    };
    assert_eq!(logs(&daemon, previous.clone()).await.unwrap(), "");
    daemon.kill_vm("web").await.unwrap();
    daemon.start_vm("web").await.unwrap();
    assert_eq!(logs(&daemon, previous).await.unwrap(), "booted web\r\n");
    let follow = v1::GetVmLogsRequest {
        follow: true,
        ..serial
    };
    let refused = logs(&daemon, follow).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_vmms_log_is_followed_as_it_grows() {
    let daemon = Daemon::start().await;
    let vm = daemon.run("web", "").await;
    let path = daemon.path(&format!("log/vms/{}/vmm.log", crate::harness::uid(&vm)));
    let follow = v1::GetVmLogsRequest {
        follow: true,
        ..request(v1::VmLog::Vmm)
    };
    let mut stream = daemon.client().get_vm_logs(follow).await.unwrap().into_inner();
    let mut seen = String::new();
    for line in ["first line\n", "second line\n"] {
        let mut file = std::fs::File::options().append(true).open(&path).unwrap();
        std::io::Write::write_all(&mut file, line.as_bytes()).unwrap();
        // The vmm may write something behind it.
        while !seen.contains(line) {
            let message = tokio::time::timeout(PATIENCE, stream.next()).await.unwrap();
            seen += std::str::from_utf8(&message.unwrap().unwrap().data).unwrap();
        }
    }
    assert_eq!(seen.matches("first").count(), 1);
}
