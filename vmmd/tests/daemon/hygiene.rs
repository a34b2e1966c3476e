//! No object is left behind, and a `vmm` has only the resources that it needs.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    time::{Duration, Instant},
};

use tokio::task::JoinSet;
use tonic::transport::Channel;
use vmmd_api::v1::{self, vm_service_client::VmServiceClient};

use crate::harness::{Daemon, PATIENCE, status, uid, vm_pid};

async fn create_and_start(client: &mut VmServiceClient<Channel>, vm: Option<v1::Vm>, name: String) {
    let create = v1::CreateVmRequest {
        vm,
        ..Default::default()
    };
    client.create_vm(create).await.unwrap();
    let start = v1::StartVmRequest {
        name,
        ..Default::default()
    };
    client.start_vm(start).await.unwrap();
}

#[tokio::test]
async fn twenty_vms_in_a_loop_leave_nothing() {
    let daemon = Daemon::start().await;
    let descriptors = || {
        fs::read_dir(format!("/proc/{}/fd", daemon.pid().as_raw_nonzero()))
            .unwrap()
            .count()
    };
    let mut before = 0;
    for round in 0..2 {
        let mut tasks = JoinSet::new();
        for index in 0..20 {
            let vm = Some(daemon.manifest(&format!("vm{index}"), ""));
            let mut client = daemon.client();
            tasks.spawn(async move {
                let name = format!("vm{index}");
                create_and_start(&mut client, vm, name.clone()).await;
                let force = index % 2 == 0;
                if !force {
                    let stop = v1::StopVmRequest {
                        name: name.clone(),
                        grace_period: None,
                        force: false,
                        ..Default::default()
                    };
                    client.stop_vm(stop).await.unwrap();
                }
                client
                    .delete_vm(v1::DeleteVmRequest {
                        name,
                        force,
                        ..Default::default()
                    })
                    .await
                    .unwrap();
            });
        }
        while let Some(result) = tasks.join_next().await {
            result.unwrap();
        }
        assert_eq!(daemon.vmm_processes(), []);
        assert_eq!(daemon.cgroups(), Vec::<std::path::PathBuf>::new());
        for folder in ["run/vms", "log/vms"] {
            assert_eq!(fs::read_dir(daemon.path(folder)).unwrap().count(), 0, "{folder}");
        }
        if round == 0 {
            before = descriptors();
        }
    }
    // Descriptors used for an answer may be closed after the answer.
    let deadline = Instant::now() + PATIENCE;
    while descriptors() > before {
        assert!(
            Instant::now() < deadline,
            "descriptors of the daemon: {before}, then {}",
            descriptors()
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_vmm_has_its_own_user_no_rights_and_no_descriptor_too_many() {
    let daemon = Daemon::start().await;
    let first = daemon.run("first", "").await;
    let second = daemon.run("second", "").await;
    let user = |vm: &v1::Vm| status(vm).instance.as_ref().unwrap().uid;
    assert_ne!(user(&first), user(&second));
    let pid = vm_pid(&second).as_raw_nonzero();
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace()
            .skip(1)
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let own = vec![user(&second).to_string(); 4];
    assert_eq!(
        (field("Uid:"), field("Gid:"), field("Groups:")),
        (own.clone(), own, Vec::new())
    );
    for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
        assert_eq!(field(set), ["0".repeat(16)], "{set}");
    }
    assert_eq!(field("NoNewPrivs:"), ["1"]);
    let network = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).unwrap();
    let other = network(&vm_pid(&first).as_raw_nonzero().to_string());
    let networks = [network(&pid.to_string()), other, network("self")];
    assert!(
        (1..networks.len()).all(|index| !networks[..index].contains(&networks[index])),
        "{networks:?}"
    );
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let locked = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"))
        .and_then(|line| line.split_whitespace().next())
        .unwrap();
    let enough = locked == "unlimited" || locked.parse::<u64>().unwrap() >= 64 << 20;
    assert!(enough || !may_raise_limits(), "for rings of io_uring: {locked}");
    assert_eq!(
        fs::read(format!("/proc/{pid}/environ")).unwrap(),
        Vec::<u8>::new()
    );

    let mut targets: Vec<_> = fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .map(|entry| {
            fs::read_link(entry.unwrap().path())
                .unwrap()
                .to_str()
                .unwrap()
                .to_owned()
        })
        .collect();
    targets.sort();
    let run = daemon.path(&format!("run/vms/{}", uid(&second)));
    let log = daemon.path(&format!("log/vms/{}", uid(&second)));
    let named = |path: std::path::PathBuf| path.to_str().unwrap().to_owned();
    let files: Vec<_> = targets
        .iter()
        .filter(|target| target.starts_with(daemon.folder.path().to_str().unwrap()))
        .collect();
    // The kernel is kept by the mock only.
    let wanted = [
        named(daemon.path("kernel")),
        named(log.join("serial.log")),
        named(log.join("serial.log.1")),
        named(log.join("vmm.log")),
        named(log.join("vmm.log")),
        named(run.join("exit")),
        named(run.join("lock")),
    ];
    assert_eq!(files, wanted.iter().collect::<Vec<_>>());
    let sockets = targets
        .iter()
        .filter(|target| target.starts_with("socket:"))
        .count();
    // Two listening ones and the daemon's connection. Beside them: stdin, what stands for /dev/kvm, /dev/urandom.
    assert_eq!((sockets, targets.len()), (3, 7 + 3 + 3), "{targets:?}");
}

#[tokio::test]
async fn what_the_daemon_keeps_is_closed_to_others() {
    let daemon = Daemon::start().await;
    let vm = daemon.run("web", "").await;
    let mode = |path: &str| fs::metadata(daemon.path(path)).unwrap().mode() & 0o777;
    assert_eq!(
        (mode("run/vmmd.sock"), mode("run"), mode("run/vms")),
        (0o660, 0o755, 0o700)
    );
    assert_eq!((mode("state"), mode("log/vms")), (0o700, 0o700));
    assert_eq!(mode(&format!("log/vms/{}/serial.log", uid(&vm))), 0o600);
}

/// Private memory: 32 MiB of the 50 MiB that the daemon may take with 200 VMs. The rest is for its program, which is three
/// times as long in a build for tests as in a release; the benchmarks publish a release's whole. As many VMs as the
/// node's memory is enough for, at most 200.
#[tokio::test]
async fn the_daemon_stays_small_with_many_running_vms() {
    const STARTS: usize = 8;
    let daemon = Daemon::configured("[overcommit]\ncpu = 1000\nmemory = 10\n").await;
    let node = daemon.node().await.status.unwrap();
    let count = (node.memory_bytes / (128 << 20)).min(200);
    let mut tasks = JoinSet::new();
    for index in 0..count {
        // Few at once: the heap does not shrink after the peak of many starts.
        if tasks.len() == STARTS {
            tasks.join_next().await.unwrap().unwrap();
        }
        let vm = Some(daemon.manifest(&format!("vm{index}"), ""));
        let mut client = daemon.client();
        tasks.spawn(async move {
            create_and_start(&mut client, vm, format!("vm{index}")).await;
        });
    }
    while let Some(result) = tasks.join_next().await {
        result.unwrap();
    }
    let text = fs::read_to_string(format!("/proc/{}/status", daemon.pid().as_raw_nonzero())).unwrap();
    let private = text
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB"))
        .unwrap();
    assert!(
        private.parse::<u64>().unwrap() < 32 << 10,
        "{private} KiB are private with {count} VMs"
    );
}

/// The tests, and so the daemon, have CAP_SYS_RESOURCE (capability 24).
fn may_raise_limits() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .unwrap();
    u64::from_str_radix(effective.trim(), 16).unwrap() >> 24 & 1 == 1
}
