//! Resources of the node that a VM may use.

use std::fs;

use rstest::rstest;
use tonic::Code;
use vmmd_api::v1::{self, HugePages, VmPhase};

use crate::{
    harness::{Daemon, assert_says, refusal, status, vm_pid},
    placement::{node, room},
};

fn cpu(vm: &mut v1::Vm) -> &mut v1::CpuSpec {
    vm.spec.as_mut().unwrap().cpu.as_mut().unwrap()
}

fn memory(vm: &mut v1::Vm) -> &mut v1::MemorySpec {
    vm.spec.as_mut().unwrap().memory.as_mut().unwrap()
}

#[rstest]
#[case::processors(|vm: &mut v1::Vm| cpu(vm).host_cpus = "8191".into(), Code::FailedPrecondition, "HOST_CPUS_UNAVAILABLE")]
#[case::numa(|vm: &mut v1::Vm| memory(vm).numa_node = Some(1023), Code::FailedPrecondition, "NUMA_NODE_NOT_FOUND")]
// More than the machines that run tests set aside.
#[case::huge_pages(
    |vm: &mut v1::Vm| {
        memory(vm).size_bytes = 1 << 30;
        memory(vm).huge_pages = HugePages::HugePages1g.into();
    },
    Code::ResourceExhausted,
    "INSUFFICIENT_HUGE_PAGES"
)]
#[tokio::test]
async fn missing_node_resources_are_refused_before_any_change(
    #[case] change: fn(&mut v1::Vm),
    #[case] code: Code,
    #[case] reason: &str,
) {
    let daemon = Daemon::start().await;
    let mut vm = daemon.manifest("web", "");
    change(&mut vm);
    // Pages may become free before the start.
    let created = daemon.create(vm).await;
    assert_eq!(created.is_ok(), code == Code::ResourceExhausted);
    let refused = match created {
        Err(refused) => refused,
        Ok(_) => daemon.start_vm("web").await.unwrap_err(),
    };
    assert_eq!(refusal(&refused), (code, reason.to_owned()));
    assert!(daemon.vmm_processes().is_empty() && daemon.cgroups().is_empty());
    daemon.run("other", "").await;
    daemon.wait_phase("other", VmPhase::Running).await;
}

#[tokio::test]
async fn exclusive_options_are_refused_with_all_their_fields() {
    let daemon = Daemon::start().await;
    let mut vm = daemon.manifest("web", "");
    cpu(&mut vm).host_cpus = "3-1".into();
    memory(&mut vm).huge_pages = HugePages::HugePages1g.into();
    memory(&mut vm).mergeable = true;
    let refused = daemon.create(vm).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    for field in [
        "spec.cpu.hostCpus",
        "spec.memory.hugePages",
        "spec.memory.mergeable",
    ] {
        assert_says(&refused, field);
    }
}

/// Checks each controller that this machine delegates; without cgroup v2 none can be checked.
#[tokio::test]
async fn vm_has_the_limits_of_its_spec_also_after_a_daemon_restart() {
    let mut daemon = Daemon::start().await;
    let mut vm = daemon.manifest("web", "");
    cpu(&mut vm).core_fraction_percent = 20;
    daemon.run_vm(vm).await;
    // 128 MiB of RAM, 1/64 of that, 64 MiB for the process, 2 MiB for the vCPU.
    let expected = [
        ("cpu.weight", "20".to_owned()),
        ("memory.max", ((128 + 2 + 64 + 2) << 20).to_string()),
        ("memory.oom.group", "1".to_owned()),
        ("pids.max", "65".to_owned()),
    ];
    let check = |daemon: &Daemon| {
        for group in daemon.cgroups() {
            for (file, value) in &expected {
                if let Ok(found) = fs::read_to_string(group.join(file)) {
                    assert_eq!(found.trim(), value, "{file}");
                }
            }
        }
    };
    check(&daemon);
    for group in daemon.cgroups() {
        // Another one's doing, which a daemon's start takes back.
        let _ = fs::write(group.join("cpu.weight"), "77");
        let _ = fs::write(group.join("pids.max"), "max");
    }
    daemon.kill_and_restart().await;
    daemon.wait_phase("web", VmPhase::Running).await;
    check(&daemon);
}

/// Limit in the cgroup of the one VM, where this machine has such a file.
fn limit(daemon: &Daemon, file: &str) -> Option<String> {
    let groups = daemon.cgroups();
    let text = groups
        .iter()
        .find_map(|group| fs::read_to_string(group.join(file)).ok())?;
    Some(text.trim().to_owned())
}

/// Changes that wait for the next start, with the reason for the wait.
fn waiting(vm: &v1::Vm) -> Vec<(String, String)> {
    let changes = status(vm).pending_changes.iter();
    changes
        .map(|change| (change.path.clone(), change.message.clone()))
        .collect()
}

#[tokio::test]
async fn cpu_shares_of_a_running_vm_change_at_once_and_are_kept() {
    let mut daemon = Daemon::start().await;
    let mut vm = daemon.manifest("web", "");
    cpu(&mut vm).core_fraction_percent = 20;
    let started = daemon.run_vm(vm).await;
    let changed = daemon
        .change("web", |spec| {
            spec.cpu.as_mut().unwrap().core_fraction_percent = 50;
        })
        .await
        .unwrap();
    assert_eq!(waiting(&changed), []);
    assert_eq!(status(&changed).observed_generation, 2);
    let has_half = async |daemon: &Daemon| {
        let committed = node(daemon).await.committed.unwrap();
        assert_eq!(committed.cpu_millis, 500);
        assert!(limit(daemon, "cpu.weight").is_none_or(|weight| weight == "50"));
    };
    has_half(&daemon).await;
    daemon.kill_and_restart().await;
    has_half(&daemon).await;
    let found = daemon.get("web").await.unwrap();
    assert_eq!((waiting(&found), vm_pid(&found)), (vec![], vm_pid(&started)));

    // A cap, and which processors, need controllers, which not every machine hands down.
    let capped = daemon
        .change("web", |spec| {
            let cpu = spec.cpu.as_mut().unwrap();
            (cpu.core_fraction_percent, cpu.core_limit_percent) = (30, 80);
            cpu.host_cpus = "0".into();
        })
        .await;
    match (limit(&daemon, "cpu.max"), limit(&daemon, "cpuset.cpus")) {
        (Some(most), Some(cpus)) => {
            assert_eq!(waiting(&capped.unwrap()), []);
            assert_eq!((most.as_str(), cpus.as_str()), ("80000 100000", "0"));
            assert_eq!(limit(&daemon, "cpu.weight").unwrap(), "30");
        }
        // The next start would be refused too.
        _ => {
            let refused = capped.unwrap_err();
            assert_eq!(refusal(&refused).1, "CGROUP_CONTROLLER_MISSING", "{refused}");
            has_half(&daemon).await;
        }
    }
}

#[tokio::test]
async fn more_cpu_time_than_available_waits_completely() {
    let daemon = Daemon::configured(&room(512 << 20, 1000)).await;
    for name in ["web", "other"] {
        let mut vm = daemon.manifest(name, "");
        cpu(&mut vm).core_fraction_percent = 40;
        daemon.run_vm(vm).await;
    }
    let fraction = async |percent| {
        let change = |spec: &mut v1::VmSpec| spec.cpu.as_mut().unwrap().core_fraction_percent = percent;
        daemon.change("web", change).await.unwrap()
    };
    let changed = fraction(70).await;
    let waiting_for = waiting(&changed);
    let [(path, why)] = waiting_for.as_slice() else {
        panic!("{waiting_for:?}")
    };
    assert_eq!(path, "spec.cpu.coreFractionPercent");
    assert!(
        why.starts_with("not enough processor time: the VM needs 0.7 processors"),
        "{why}"
    );
    assert_eq!(node(&daemon).await.committed.unwrap().cpu_millis, 800);
    daemon.stop("other", None).await.unwrap();
    // The same again, now that there is room.
    assert_eq!(waiting(&fraction(70).await), []);
    assert_eq!(node(&daemon).await.committed.unwrap().cpu_millis, 700);
    assert_eq!(waiting(&fraction(10).await), []);
    assert_eq!(node(&daemon).await.committed.unwrap().cpu_millis, 100);
}
