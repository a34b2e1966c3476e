//! Bad input gets a clear error and changes nothing.

use std::fs;

use rstest::rstest;
use tonic::Code;
use vmmd_api::v1::{self, DiskSpec, VmPhase};

use crate::{
    harness::{Daemon, assert_refused, assert_says, refusal, status},
    verbs::{exit_reason, fields, raw_file},
};

fn spec(vm: &mut v1::Vm) -> &mut v1::VmSpec {
    vm.spec.as_mut().unwrap()
}

fn linux(vm: &mut v1::Vm) -> &mut v1::LinuxBoot {
    let v1::boot_spec::Source::Linux(linux) = spec(vm).boot.as_mut().unwrap().source.as_mut().unwrap() else {
        panic!("it boots a kernel of the node");
    };
    linux
}

fn disk(path: &str) -> DiskSpec {
    raw_file("root", path.as_ref())
}

#[rstest]
#[case::no_cpus(|vm: &mut v1::Vm| spec(vm).cpu = Some(v1::CpuSpec { cores: 0, ..Default::default() }), "spec.cpu.cores")]
#[case::ten_thousand_cpus(|vm: &mut v1::Vm| spec(vm).cpu = Some(v1::CpuSpec { cores: 10_000, ..Default::default() }), "spec.cpu.cores")]
#[case::slash_in_name(|vm: &mut v1::Vm| vm.metadata.as_mut().unwrap().name = "a/b".into(), "metadata.name")]
#[case::status(|vm: &mut v1::Vm| vm.status = Some(v1::VmStatus::default()), "status")]
#[case::uid(|vm: &mut v1::Vm| vm.metadata.as_mut().unwrap().uid = "x".into(), "metadata.uid")]
#[case::relative_path(|vm: &mut v1::Vm| linux(vm).kernel = "vmlinuz".into(), "spec.boot.linux.kernel")]
#[case::run_policy(|vm: &mut v1::Vm| spec(vm).run_policy = 77, "spec.runPolicy")]
#[case::crash_policy(|vm: &mut v1::Vm| spec(vm).on_crash = 77, "spec.onCrash")]
#[case::clock(|vm: &mut v1::Vm| spec(vm).clock = Some(v1::ClockSpec { on_resume: 77, ..Default::default() }), "spec.clock.onResume")]
#[case::no_spec(|vm: &mut v1::Vm| vm.spec = None, "spec")]
#[tokio::test]
async fn a_manifest_with_a_wrong_field_is_refused_by_the_fields_path(
    #[case] change: impl FnOnce(&mut v1::Vm),
    #[case] field: &str,
) {
    let daemon = Daemon::start().await;
    let mut vm = daemon.manifest("web", "");
    change(&mut vm);
    let refused = daemon.create(vm).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
    assert_eq!(fields(&refused), [field]);
    assert!(daemon.list().await.is_empty());
}

#[tokio::test]
async fn all_wrong_fields_are_told_at_once() {
    let daemon = Daemon::start().await;
    let mut vm = daemon.manifest("web", "");
    vm.status = Some(v1::VmStatus::default());
    spec(&mut vm).cpu = None;
    linux(&mut vm).kernel = String::new();
    let refused = daemon.create(vm).await.unwrap_err();
    assert_eq!(
        fields(&refused),
        ["status", "spec.cpu.cores", "spec.boot.linux.kernel"]
    );
}

/// Errors in files and the node are reported at the start, and at a create with a start or a dry
/// run.
#[rstest]
#[case::missing_kernel(|vm: &mut v1::Vm, folder: &str| linux(vm).kernel = format!("{folder}/none"), "KERNEL_NOT_FOUND")]
#[case::empty_kernel(|vm: &mut v1::Vm, folder: &str| linux(vm).kernel = format!("{folder}/empty"), "KERNEL_UNUSABLE")]
#[case::kernel_is_a_directory(|vm: &mut v1::Vm, folder: &str| linux(vm).kernel = folder.into(), "KERNEL_UNUSABLE")]
#[case::missing_initrd(|vm: &mut v1::Vm, folder: &str| linux(vm).initrd = format!("{folder}/none"), "INITRD_NOT_FOUND")]
#[case::missing_disk(|vm: &mut v1::Vm, folder: &str| spec(vm).disks = vec![disk(&format!("{folder}/none"))], "DISK_NOT_FOUND")]
#[case::disk_is_a_directory(|vm: &mut v1::Vm, folder: &str| spec(vm).disks = vec![disk(folder)], "DISK_UNUSABLE")]
#[case::odd_disk(|vm: &mut v1::Vm, folder: &str| spec(vm).disks = vec![disk(&format!("{folder}/odd"))], "DISK_SIZE_INVALID")]
#[tokio::test]
async fn a_file_that_cannot_be_used_is_named(
    #[case] change: impl Fn(&mut v1::Vm, &str),
    #[case] reason: &str,
) {
    let daemon = Daemon::start().await;
    fs::write(daemon.path("empty"), []).unwrap();
    fs::write(daemon.path("odd"), [0; 1000]).unwrap();
    let folder = daemon.folder.path().to_str().unwrap().to_owned();
    let mut vm = daemon.manifest("web", "");
    change(&mut vm, &folder);
    for (start, dry_run) in [(true, false), (false, true)] {
        let request = v1::CreateVmRequest {
            vm: Some(vm.clone()),
            start,
            dry_run,
            ..Default::default()
        };
        let refused = daemon.client().create_vm(request).await.unwrap_err();
        assert_refused(&refused, Code::FailedPrecondition, reason);
        assert!(daemon.list().await.is_empty());
    }
    daemon.create(vm).await.unwrap();
    let refused = daemon.start_vm("web").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, reason);
    let failed = daemon.get("web").await.unwrap();
    assert_eq!(
        (status(&failed).phase(), &status(&failed).message[..]),
        (VmPhase::Failed, refused.message())
    );
    daemon
        .delete("web", false)
        .await
        .expect("what could not be started can be deleted");
}

#[tokio::test]
async fn more_memory_than_the_node_has_is_refused() {
    let daemon = Daemon::start().await;
    let node = daemon.node().await.status.unwrap();
    // As many of the largest VMs as are too much together.
    let size = (node.memory_bytes / 2 + (2 << 20)).min(16 << 30) & !((2 << 20) - 1);
    let count = node.memory_bytes / size + 1;
    for index in 0..count {
        let mut vm = daemon.manifest(&format!("vm{index}"), "");
        spec(&mut vm).memory.as_mut().unwrap().size_bytes = size;
        daemon.create(vm).await.unwrap();
    }
    for index in 0..count - 1 {
        daemon.start_vm(&format!("vm{index}")).await.unwrap();
    }
    let refused = daemon.start_vm(&format!("vm{}", count - 1)).await.unwrap_err();
    assert_refused(&refused, Code::ResourceExhausted, "INSUFFICIENT_MEMORY");
    let message = refused.message();
    // Not now: others have it.
    assert!(
        message.contains("stop another VM") && !message.contains("others have 0"),
        "{message}"
    );
    daemon.kill_vm("vm0").await.unwrap();
    daemon
        .start_vm(&format!("vm{}", count - 1))
        .await
        .expect("the memory is free again");
    if node.memory_bytes < 16 << 30 {
        let mut vm = daemon.manifest("huge", "");
        spec(&mut vm).memory.as_mut().unwrap().size_bytes = 16 << 30;
        let refused = daemon.create(vm).await.unwrap_err();
        assert_refused(&refused, Code::FailedPrecondition, "INSUFFICIENT_MEMORY");
        let message = refused.message();
        assert!(
            message.contains("never fits") && !message.contains("others"),
            "{message}"
        );
    }
}

#[tokio::test]
async fn disk_in_use_by_another_vm_is_refused_with_its_name() {
    let mut daemon = Daemon::start().await;
    fs::write(daemon.path("disk"), [0; 1024]).unwrap();
    let path = daemon.path("disk").to_str().unwrap().to_owned();
    for name in ["first", "second"] {
        let mut vm = daemon.manifest(name, "");
        spec(&mut vm).disks = vec![disk(&path)];
        daemon.create(vm).await.unwrap();
    }
    daemon.start_vm("first").await.unwrap();
    for _ in 0..2 {
        let refused = daemon.start_vm("second").await.unwrap_err();
        assert_refused(&refused, Code::FailedPrecondition, "DISK_IN_USE");
        assert_says(&refused, "in use by VM \"first\"");
        daemon.kill_and_restart().await;
    }
    daemon.kill_vm("first").await.unwrap();
    daemon.start_vm("second").await.expect("the disk is free again");
}

#[rstest]
#[case("image", Code::FailedPrecondition, "IMAGE_UNUSABLE", "no bzImage")]
#[case("kvm", Code::FailedPrecondition, "KVM_UNUSABLE", "can't run guests")]
#[case("exit", Code::Internal, "VMM_FAILED", "no luck at all")]
#[tokio::test]
async fn what_the_vmm_refuses_is_passed_on_and_nothing_is_left(
    #[case] how: &str,
    #[case] code: Code,
    #[case] reason: &str,
    #[case] words: &str,
) {
    let daemon = Daemon::start().await;
    daemon.define("web", &format!("mock.boot={how}")).await;
    let refused = daemon.start_vm("web").await.unwrap_err();
    assert_eq!(refusal(&refused), (code, reason.into()));
    assert_says(&refused, words);
    let failed = daemon.get("web").await.unwrap();
    assert_eq!(exit_reason(&failed), v1::ExitReason::StartFailed);
    assert!(daemon.vmm_processes().is_empty() && daemon.cgroups().is_empty());
    assert_eq!(fs::read_dir(daemon.path("run/vms")).unwrap().count(), 0);
}

#[tokio::test]
async fn an_unknown_vm_is_not_found_whatever_is_asked() {
    let daemon = Daemon::start().await;
    let not_found = (Code::NotFound, "VM_NOT_FOUND".to_owned());
    assert_eq!(refusal(&daemon.get("x").await.unwrap_err()), not_found);
    assert_eq!(refusal(&daemon.start_vm("x").await.unwrap_err()), not_found);
    assert_eq!(refusal(&daemon.stop("x", None).await.unwrap_err()), not_found);
    assert_eq!(
        refusal(&daemon.delete("a/../b", true).await.unwrap_err()),
        not_found
    );
}

#[tokio::test]
async fn a_missing_vmm_program_is_said() {
    let daemon = Daemon::configured("vmm = '/nonexistent/vmm'\n").await;
    daemon.create(daemon.manifest("web", "")).await.unwrap();
    let refused = daemon.start_vm("web").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "VMM_NOT_FOUND");
    assert!(
        !refused.message().contains("/nonexistent"),
        "a host path: {}",
        refused.message()
    );
}

#[tokio::test]
async fn a_grace_period_out_of_range_is_refused() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let refused = daemon
        .stop("web", Some(std::time::Duration::from_secs(3601)))
        .await
        .unwrap_err();
    assert_eq!(fields(&refused), ["gracePeriod"]);
    assert_eq!(daemon.phase("web").await, VmPhase::Running);
}
