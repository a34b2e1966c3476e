//! Resources of the node for VMs, and CheckPlacement for one more VM.

use std::{fs, os::fd::AsFd, path::Path};

use proptest::{prelude::*, strategy::ValueTree, test_runner::TestRunner};
use tonic::{Code, Status};
use tonic_types::StatusExt;
use vmmd_api::v1::{self, ConditionStatus, VmPhase};

use crate::{
    harness::{Daemon, assert_refused, assert_says, refusal, status},
    verbs::raw_file,
};

const MIB: u64 = 1 << 20;
/// Overhead of a VM of 128 MiB with one core, besides its guest's RAM.
const OVERHEAD: u64 = (64 + 128 / 64 + 2) * MIB;

pub async fn node(daemon: &Daemon) -> v1::NodeStatus {
    daemon.node().await.status.unwrap()
}

async fn check(daemon: &Daemon, vm: v1::Vm) -> Result<Vec<v1::PlacementProblem>, Status> {
    let request = v1::CheckPlacementRequest { vm: Some(vm) };
    let answer = daemon.nodes().await.check_placement(request).await?.into_inner();
    assert_eq!(answer.fits, answer.problems.is_empty());
    Ok(answer.problems)
}

async fn reasons(daemon: &Daemon, vm: v1::Vm) -> Vec<String> {
    let problems = check(daemon, vm).await.unwrap();
    problems.into_iter().map(|problem| problem.reason).collect()
}

/// Configuration with which VMs may have this much.
pub fn room(memory: u64, cpu_millis: u64) -> String {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let field = |name: &str| {
        let line = meminfo
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap_or("0 kB");
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    };
    let all = field("MemTotal:") - field("Hugetlb:");
    format!(
        "[overcommit]\ncpu = {}\nvcpu = 1000\n[reserved]\nmemory_mib = {}\n",
        cpu_millis as f64 / (cpus() as f64 * 1000.0),
        (all - memory) / MIB,
    )
}

fn cpus() -> u64 {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap();
    cpuinfo
        .lines()
        .filter(|line| line.starts_with("processor"))
        .count() as u64
}

/// A manifest of this size.
pub fn sized(daemon: &Daemon, name: &str, cores: u32, memory_mib: u64, fraction: u32) -> v1::Vm {
    let mut vm = daemon.manifest(name, "");
    let spec = vm.spec.as_mut().unwrap();
    let cpu = spec.cpu.as_mut().unwrap();
    (cpu.cores, cpu.core_fraction_percent) = (cores, fraction);
    spec.memory.as_mut().unwrap().size_bytes = memory_mib * MIB;
    vm
}

#[tokio::test]
async fn node_reports_its_capacity_and_use_also_after_a_restart() {
    let mut daemon =
        Daemon::configured("[overcommit]\ncpu = 2.0\nmemory = 0.5\n[reserved]\ncpu_millis = 100\n").await;
    let before = node(&daemon).await;
    let (capacity, allocatable) = (before.capacity.unwrap(), before.allocatable.unwrap());
    assert_eq!(capacity.cpu_millis, cpus() * 1000);
    assert_eq!(allocatable.cpu_millis, (cpus() * 1000 - 100) * 2);
    assert_eq!(capacity.memory_bytes, before.memory_bytes);
    let reserved = 128 * MIB + before.memory_bytes / 2;
    assert!(allocatable.memory_bytes <= before.memory_bytes - reserved);
    assert!(capacity.disk_bytes > 0 && allocatable.disk_bytes == capacity.disk_bytes);
    assert!(before.cpu_features.is_sorted() && before.cpu_features.contains(&"fpu".to_owned()));
    assert!(before.numa_nodes.iter().all(|numa| numa.memory_bytes > 0));
    assert_eq!(before.committed.unwrap(), v1::Resources::default());

    daemon.create(sized(&daemon, "web", 2, 128, 25)).await.unwrap();
    daemon.start_vm("web").await.unwrap();
    let expected = v1::Resources {
        vcpu_millis: 2000,
        cpu_millis: 500,
        // A core more.
        memory_bytes: 128 * MIB + OVERHEAD + 2 * MIB,
        ..Default::default()
    };
    assert_eq!(node(&daemon).await.committed.unwrap(), expected);
    daemon.kill_and_restart().await;
    assert_eq!(node(&daemon).await.committed.unwrap(), expected);
    daemon.kill_vm("web").await.unwrap();
    assert_eq!(node(&daemon).await.committed.unwrap(), v1::Resources::default());
}

#[tokio::test]
async fn all_that_stands_against_a_vm_is_said_at_once() {
    let extra = format!("kvm_device = '/nonexistent/kvm'\n{}", room(512 * MIB, 1000));
    let daemon = Daemon::configured(&extra).await;
    let mut vm = sized(&daemon, "web", 2, 1024, 100);
    let spec = vm.spec.as_mut().unwrap();
    let linux = v1::LinuxBoot {
        kernel: "/nonexistent/kernel".into(),
        initrd: "/nonexistent/initrd".into(),
        ..Default::default()
    };
    spec.boot = Some(v1::BootSpec {
        source: Some(v1::boot_spec::Source::Linux(linux)),
    });
    spec.disks = vec![
        raw_file("a", Path::new("/nonexistent/disk")),
        v1::DiskSpec {
            name: "b".into(),
            source: Some(v1::disk_spec::Source::Disk("none".into())),
            ..Default::default()
        },
    ];
    spec.nics = vec![v1::NicSpec {
        name: "eth0".into(),
        attachment: Some(v1::nic_spec::Attachment::Bridge("no-such-br".into())),
        ..Default::default()
    }];
    let problems = check(&daemon, vm).await.unwrap();
    let told: Vec<_> = problems
        .iter()
        .map(|problem| (problem.reason.as_str(), problem.field.as_str()))
        .collect();
    let expected = [
        ("KVM_UNAVAILABLE", ""),
        ("INSUFFICIENT_CPU", "spec.cpu"),
        ("INSUFFICIENT_MEMORY", "spec.memory.sizeBytes"),
        ("BRIDGE_NOT_FOUND", "spec.nics[0].bridge"),
        ("DISK_NOT_FOUND", "spec.disks[1].disk"),
        ("KERNEL_NOT_FOUND", "spec.boot.linux.kernel"),
        ("INITRD_NOT_FOUND", "spec.boot.linux.initrd"),
        ("DISK_NOT_FOUND", "spec.disks[0]"),
    ];
    assert_eq!(told, expected);
    assert!(problems.iter().all(|problem| !problem.message.is_empty()));
    assert!(daemon.list().await.is_empty());
}

#[tokio::test]
async fn wrong_manifest_is_refused_with_its_fields() {
    let daemon = Daemon::start().await;
    let refused = check(&daemon, sized(&daemon, "web", 255, 128, 0))
        .await
        .unwrap_err();
    assert_refused(&refused, Code::InvalidArgument, "INVALID_FIELDS");
}

#[tokio::test]
async fn what_a_vm_has_itself_is_no_hindrance_and_what_another_has_is() {
    let daemon = Daemon::configured(&room(300 * MIB, 1_000_000)).await;
    fs::write(daemon.path("disk"), [0; 4096]).unwrap();
    let disk = raw_file("root", &daemon.path("disk"));
    let with_disk = |name: &str| {
        let mut vm = sized(&daemon, name, 1, 200, 0);
        vm.spec.as_mut().unwrap().disks.push(disk.clone());
        vm
    };
    daemon.create(with_disk("web")).await.unwrap();
    let vm = daemon.start_vm("web").await.unwrap();
    assert_eq!(reasons(&daemon, with_disk("web")).await, Vec::<String>::new());
    assert_eq!(
        reasons(&daemon, vm).await,
        Vec::<String>::new(),
        "also as GetVm shows it"
    );
    let problems = check(&daemon, with_disk("other")).await.unwrap();
    let told: Vec<_> = problems.iter().map(|problem| problem.reason.as_str()).collect();
    assert_eq!(told, ["INSUFFICIENT_MEMORY", "DISK_IN_USE"]);
    assert!(problems[1].message.contains("\"web\""), "{}", problems[1].message);
    daemon.kill_vm("web").await.unwrap();
    assert_eq!(reasons(&daemon, with_disk("other")).await, Vec::<String>::new());
}

#[tokio::test]
async fn a_disk_that_another_program_has_locked_is_said_to_be_in_use() {
    let daemon = Daemon::start().await;
    fs::write(daemon.path("disk"), [0; 4096]).unwrap();
    let vm = daemon.manifest_with("web", "", |spec| {
        spec.disks.push(raw_file("root", &daemon.path("disk")));
    });
    let file = fs::File::options()
        .read(true)
        .write(true)
        .open(daemon.path("disk"))
        .unwrap();
    rustix::fs::fcntl_lock(file.as_fd(), rustix::fs::FlockOperation::LockExclusive).unwrap();
    assert_eq!(reasons(&daemon, vm.clone()).await, ["DISK_IN_USE"]);
    drop(file);
    assert_eq!(reasons(&daemon, vm).await, Vec::<String>::new());
}

#[tokio::test]
async fn nothing_is_given_twice_when_many_start_at_once() {
    let daemon = Daemon::configured(&room(4 * (128 * MIB + OVERHEAD) + MIB, 1_000_000)).await;
    for number in 0..12 {
        daemon.define(&format!("vm{number}"), "").await;
    }
    let start = |number| daemon.begin_start(&format!("vm{number}"));
    let starts: Vec<_> = (0..12).map(start).collect();
    let mut refused = Vec::new();
    for start in starts {
        refused.extend(start.await.unwrap().err().as_ref().map(refusal));
    }
    let full = (Code::ResourceExhausted, "INSUFFICIENT_MEMORY".to_owned());
    assert_eq!(refused, vec![full; 8]);
    let committed = node(&daemon).await.committed.unwrap();
    assert_eq!(committed.memory_bytes, 4 * (128 * MIB + OVERHEAD));
    assert_eq!(daemon.vmm_processes().len(), 4);
}

#[tokio::test]
async fn start_that_does_not_fit_names_the_lack_and_works_later() {
    let daemon = Daemon::configured(&room(300 * MIB, 1_000_000)).await;
    daemon.create(sized(&daemon, "a", 1, 200, 0)).await.unwrap();
    daemon.create(sized(&daemon, "b", 1, 200, 0)).await.unwrap();
    daemon.start_vm("a").await.unwrap();
    let refused = daemon.start_vm("b").await.unwrap_err();
    assert_refused(&refused, Code::ResourceExhausted, "INSUFFICIENT_MEMORY");
    assert_says(&refused, "needs 270 MiB");
    let failed = daemon.get("b").await.unwrap();
    assert_eq!(
        (status(&failed).phase(), status(&failed).reason.as_str()),
        (VmPhase::Failed, "InsufficientMemory")
    );
    daemon.kill_vm("a").await.unwrap();
    daemon.start_vm("b").await.unwrap();
}

#[tokio::test]
async fn sizes_that_no_policy_allows_are_refused_with_what_is() {
    let sizing = "[[sizing]]\nmin_cores = 1\nmax_cores = 2\nmax_memory_mib = 1024\nmemory_step_mib = 256\n\
                  core_fractions_percent = [20, 100]\n";
    let daemon = Daemon::configured(sizing).await;
    let spec = daemon.node().await.spec.unwrap();
    let policies = spec.sizing_policies;
    let expected = v1::SizingPolicy {
        min_cores: 1,
        max_cores: 2,
        min_memory_bytes: 64 * MIB,
        max_memory_bytes: 1024 * MIB,
        memory_step_bytes: 256 * MIB,
        core_fractions_percent: vec![20, 100],
    };
    assert_eq!(policies, [expected]);
    for (vm, field, allowed) in [
        (sized(&daemon, "web", 4, 256, 0), "spec.cpu.cores", "1 to 2"),
        (
            sized(&daemon, "web", 1, 384, 0),
            "spec.memory.sizeBytes",
            "steps of 256 MiB",
        ),
        (
            sized(&daemon, "web", 1, 256, 50),
            "spec.cpu.coreFractionPercent",
            "20 or 100",
        ),
    ] {
        assert_eq!(reasons(&daemon, vm.clone()).await, ["SIZE_NOT_ALLOWED"]);
        let refused = daemon.create(vm).await.unwrap_err();
        assert_refused(&refused, Code::InvalidArgument, "SIZE_NOT_ALLOWED");
        let details = refused.get_error_details();
        let violation = &details.bad_request().unwrap().field_violations[0];
        assert_eq!(violation.field, field);
        assert!(violation.description.contains(allowed), "{violation:?}");
    }
    daemon.create(sized(&daemon, "web", 2, 512, 20)).await.unwrap();
}

/// Random sizes on a small node: what CheckPlacement says of a manifest is what becomes of it.
#[tokio::test]
async fn placement_check_agrees_with_creation_and_start() {
    let sizing = "[[sizing]]\nmin_cores = 1\nmax_cores = 4\nmax_memory_mib = 512\n[[sizing]]\nmin_cores = 2\nmax_cores = 2\n\
                  core_fractions_percent = [5]\n";
    let daemon = Daemon::configured(&format!("{}{sizing}", room(1500 * MIB, 6000))).await;
    let mut runner = TestRunner::default();
    let strategy = (
        1..6_u32,
        64..512_u64,
        prop_oneof![Just(0_u32), Just(5), Just(50)],
        0..10_u8,
    );
    let (mut fitted, mut refused) = (0, 0);
    for round in 0..60 {
        let (cores, double_mib, fraction, drop_one) = strategy.new_tree(&mut runner).unwrap().current();
        let vm = sized(&daemon, &format!("vm{round}"), cores, double_mib * 2, fraction);
        let problems = check(&daemon, vm.clone()).await.unwrap();
        let dry = daemon.create_as(vm.clone(), true, true).await;
        assert_eq!(problems.is_empty(), dry.is_ok(), "{vm:?}: {problems:?}, {dry:?}");
        let name = vm.metadata.as_ref().unwrap().name.clone();
        let started = match daemon.create(vm.clone()).await {
            Ok(_) => daemon.start_vm(&name).await.map(drop),
            Err(error) => Err(error),
        };
        assert_eq!(
            problems.is_empty(),
            started.is_ok(),
            "{vm:?}: {problems:?}, {started:?}"
        );
        if let Err(error) = started {
            assert!(
                problems.iter().any(|problem| problem.reason == refusal(&error).1),
                "{problems:?}: {error}"
            );
            refused += 1;
        } else {
            fitted += 1;
        }
        if drop_one < 3 {
            for vm in daemon.list().await {
                daemon.delete(&vm.metadata.unwrap().name, true).await.unwrap();
            }
        }
    }
    assert!(fitted > 5 && refused > 5, "{fitted} fitted, {refused} did not");
}

#[tokio::test]
async fn node_short_of_disk_space_reports_it_and_starts_nothing() {
    let daemon = Daemon::configured(
        "[reserved]\ndisk_gib = 1000000\n[pressure]\ndisk_percent = 0\nmemory_percent = 0\n",
    )
    .await;
    let conditions = node(&daemon).await.conditions;
    let types: Vec<_> = conditions
        .iter()
        .map(|condition| (condition.r#type.as_str(), condition.status()))
        .collect();
    let expected = [
        ("KvmAvailable", ConditionStatus::True),
        ("DiskPressure", ConditionStatus::False),
        ("MemoryPressure", ConditionStatus::False),
        ("Schedulable", ConditionStatus::True),
    ];
    assert_eq!(types, expected);
    let vm = daemon.manifest("web", "");
    assert_eq!(reasons(&daemon, vm.clone()).await, ["INSUFFICIENT_DISK"]);
    daemon.create(vm).await.unwrap();
    let refused = daemon.start_vm("web").await.unwrap_err();
    assert_refused(&refused, Code::ResourceExhausted, "INSUFFICIENT_DISK");
}
