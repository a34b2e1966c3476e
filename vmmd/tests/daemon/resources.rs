//! What a VM may have of its node.

use std::fs;

use proto::v1::{self, HugePages, VmPhase};
use rstest::rstest;
use tonic::Code;

use crate::harness::{Daemon, refusal};

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
async fn what_the_node_does_not_have_is_refused_before_anything_is_made(
    #[case] change: fn(&mut v1::Vm),
    #[case] code: Code,
    #[case] reason: &str,
) {
    let daemon = Daemon::start().await;
    let mut vm = daemon.manifest("web", "");
    change(&mut vm);
    daemon.create(vm).await.unwrap();
    let refused = daemon.start_vm("web").await.unwrap_err();
    assert_eq!(refusal(&refused), (code, reason.to_owned()));
    assert!(daemon.vmm_processes().is_empty() && daemon.cgroups().is_empty());
    daemon.run("other", "").await;
    daemon.wait_phase("other", VmPhase::Running).await;
}

#[tokio::test]
async fn options_that_exclude_each_other_are_refused_with_all_their_fields() {
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
        assert!(refused.message().contains(field), "{refused:?}");
    }
}

/// Of each controller that this machine hands down; on one without cgroup v2 there is nothing to be seen.
#[tokio::test]
async fn a_vm_has_the_limits_of_its_spec_and_keeps_them_over_a_restart_of_the_daemon() {
    let mut daemon = Daemon::start().await;
    let mut vm = daemon.manifest("web", "");
    cpu(&mut vm).core_fraction_percent = 20;
    daemon.create(vm).await.unwrap();
    daemon.start_vm("web").await.unwrap();
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
