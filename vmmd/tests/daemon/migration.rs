//! Live migration between two daemons, and what may happen on the way.

use std::{fs, time::Duration};

use rustix::process::{Signal, kill_process};
use tempfile::TempDir;
use tonic::{Code, Status, transport::Channel};
use vmmd_api::v1::{self, OperationPhase, VmPhase, migration_service_client::MigrationServiceClient};

use crate::{
    console::Client,
    disk_boot,
    harness::{Daemon, assert_refused, assert_says, connect, status, temporary_folder, uid, vm_pid},
    pki::{self, Pki},
    verbs::{condition, raw_file, within},
};

/// A daemon that can call others.
pub async fn node(pki: &Pki) -> Daemon {
    node_in(temporary_folder(), pki, "").await
}

/// The same in a folder, with more lines of the configuration.
pub async fn node_in(folder: TempDir, pki: &Pki, extra: &str) -> Daemon {
    let path = |name: &str| folder.path().join("tls").join(name);
    pki.install(&folder.path().join("tls"), &pki.server("node"));
    let peer = pki.role("node", "peer");
    fs::write(path("peer.crt"), peer.certificate_pem()).unwrap();
    fs::write(path("peer.key"), peer.key_pem()).unwrap();
    let config = pki::configuration(folder.path(), extra)
        + &format!(
            "peer_certificate = {:?}\npeer_key = {:?}\n",
            path("peer.crt"),
            path("peer.key")
        );
    Daemon::in_folder(folder, &config).await
}

pub async fn pair() -> (Daemon, Daemon) {
    let pki = Pki::new("ca");
    (node(&pki).await, node(&pki).await)
}

impl Daemon {
    pub async fn migrations(&self) -> MigrationServiceClient<Channel> {
        MigrationServiceClient::new(connect(self.folder.path()).await)
    }

    pub async fn migrate(&self, vm: &str, to: &Daemon) -> Result<v1::Operation, Status> {
        self.migrate_to(vm, &pki::address(to)).await
    }

    pub async fn migrate_to(&self, vm: &str, address: &str) -> Result<v1::Operation, Status> {
        let request = v1::MigrateVmRequest {
            name: vm.into(),
            target: address.into(),
            ..Default::default()
        };
        let answer = self.migrations().await.migrate_vm(request).await?;
        Ok(answer.into_inner().operation.unwrap())
    }

    /// Decides about the migration of a VM that is under way, if one is.
    pub async fn resolve(&self, vm: &str, resolution: v1::MigrationResolution) -> Result<(), Status> {
        let vm = self.get(vm).await?;
        self.resolve_as_seen(&vm, resolution).await
    }

    /// Decides about the migration that was under way when the VM was seen so.
    pub async fn resolve_as_seen(
        &self,
        vm: &v1::Vm,
        resolution: v1::MigrationResolution,
    ) -> Result<(), Status> {
        let request = v1::ResolveMigrationRequest {
            name: vm.metadata.as_ref().unwrap().name.clone(),
            resolution: resolution.into(),
            migration: status(vm)
                .migration
                .as_ref()
                .map_or(1, |migration| migration.number),
            preconditions: Some(v1::Preconditions {
                uid: uid(vm),
                ..Default::default()
            }),
            ..Default::default()
        };
        self.migrations().await.resolve_migration(request).await.map(drop)
    }

    pub async fn forgets(&self, vm: &str) {
        within(async || self.get(vm).await.is_err().then_some(())).await;
    }

    pub async fn waits_for(&self, vm: &str, phase: VmPhase) -> v1::Vm {
        within(async || {
            let vm = self.get(vm).await.ok()?;
            (status(&vm).phase() == phase).then_some(vm)
        })
        .await
    }
}

#[tokio::test]
async fn a_running_vm_moves_to_another_node_and_back() {
    let (first, second) = pair().await;
    let before = first.run("web", "").await;
    let mut runs_on = (&first, &second);
    for _ in 0..3 {
        let (from, to) = runs_on;
        let operation = from.migrate("web", to).await.unwrap();
        assert_eq!(operation.r#type, "vm.migrate");
        from.completes(&operation).await;
        assert!(
            from.get("web").await.is_err(),
            "nothing is left when it has ended"
        );
        let moved = from.events("Moved").await;
        assert!(
            moved.last().unwrap().message.contains(&pki::address(to)),
            "{moved:?}"
        );
        let vm = to.waits_for("web", VmPhase::Running).await;
        assert_eq!(uid(&vm), uid(&before));
        assert_eq!(vm.spec, before.spec);
        let mut console = Client::open(to, "web").await;
        console.expect("received machine of web\r\n").await;
        assert_eq!(from.vmm_processes().len(), 0);
        runs_on = (to, from);
    }
    let (on, _) = runs_on;
    assert_eq!(on.vmm_processes().len(), 1);
    // It is a VM like any other there.
    on.kill_vm("web").await.unwrap();
    on.start_vm("web").await.unwrap();
    on.delete("web", true).await.unwrap();
}

#[tokio::test]
async fn vm_with_a_processor_model_moves_and_returns() {
    let (first, second) = pair().await;
    let mut vm = first.manifest("web", "");
    let cpu = vm.spec.as_mut().unwrap().cpu.as_mut().unwrap();
    cpu.model = "x86-64-v3".to_owned();
    cpu.features = Some(v1::CpuFeatures {
        add: vec!["aes".to_owned()],
        remove: vec!["fma".to_owned()],
    });
    let before = first.create(vm).await.unwrap();
    first.start_vm("web").await.unwrap();
    for (from, to) in [(&first, &second), (&second, &first)] {
        let operation = from.migrate("web", to).await.unwrap();
        from.completes(&operation).await;
        let vm = to.waits_for("web", VmPhase::Running).await;
        assert_eq!(vm.spec, before.spec);
    }
}

#[tokio::test]
async fn a_migration_that_is_refused_leaves_the_vm_running() {
    let (first, second) = pair().await;
    first.run("web", "").await;
    second.create(second.manifest("web", "")).await.unwrap();
    let operation = first.migrate("web", &second).await.unwrap();
    let ended = first.fails(&operation).await;
    assert!(ended.message.contains("already"), "{ended:?}");
    assert_eq!(first.phase("web").await, VmPhase::Running);
    assert_eq!(second.list().await.len(), 1);

    let lonely = Daemon::start().await;
    lonely.run("web", "").await;
    let refused = lonely.migrate("web", &second).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "PEERS_NOT_CONFIGURED");
    let down = second.migrate("web", &first).await.unwrap_err();
    assert_refused(&down, Code::FailedPrecondition, "VM_NOT_RUNNING");
    for (daemon, wanted, reason) in [
        (&first, v1::ConditionStatus::True, "Migratable"),
        (&lonely, v1::ConditionStatus::False, "PeersNotConfigured"),
        (&second, v1::ConditionStatus::False, "VmNotRunning"),
    ] {
        let vm = daemon.get("web").await.unwrap();
        let shown = condition(status(&vm), "Migratable");
        assert_eq!(
            (shown.status(), shown.reason.as_str()),
            (wanted, reason),
            "{shown:?}"
        );
    }
    let nothing = first
        .resolve("web", v1::MigrationResolution::Drop)
        .await
        .unwrap_err();
    assert_refused(&nothing, Code::FailedPrecondition, "NOTHING_TO_RESOLVE");
}

/// Makes a disk by path at this daemon, and adds it to the VM.
fn with_disk(daemon: &Daemon, vm: &mut v1::Vm, format: v1::DiskFormat) {
    let image = daemon.path("disk.raw");
    fs::write(&image, [0; 4096]).unwrap();
    vm.spec.as_mut().unwrap().disks.push(v1::DiskSpec {
        format: format.into(),
        cache: v1::DiskCache::Writeback.into(),
        ..raw_file("root", &image)
    });
}

#[tokio::test]
async fn writable_disk_that_both_nodes_share_allows_a_migration() {
    let (first, second) = pair().await;
    let mut vm = first.manifest("web", "");
    with_disk(&first, &mut vm, v1::DiskFormat::Raw);
    first.run_vm(vm).await;
    // The mock locks nothing, so it would not be let back: the real vmm's locks have tests of their own.
    let operation = first.migrate("web", &second).await.unwrap();
    first.completes(&operation).await;
    first.forgets("web").await;
    second.waits_for("web", VmPhase::Running).await;
    assert!(first.path("disk.raw").exists());
}

#[tokio::test]
async fn a_disk_that_can_not_go_along_is_named_and_the_vm_stays() {
    let (first, second) = pair().await;
    let mut vm = first.manifest("web", "");
    with_disk(&first, &mut vm, v1::DiskFormat::Qcow2);
    first.run_vm(vm).await;
    let refused = first.migrate("web", &second).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "MIGRATION_DISKS");
    assert_says(&refused, "\"root\"");

    // The same path leads to another file there.
    let mut vm = first.manifest("db", "");
    with_disk(&first, &mut vm, v1::DiskFormat::Raw);
    let image = first.path("disk.raw");
    fs::remove_file(&image).unwrap();
    fs::write(&image, [0; 4096]).unwrap();
    first.run_vm(vm).await;
    fs::rename(&image, first.path("moved.raw")).unwrap();
    fs::write(&image, [0; 4096]).unwrap();
    let operation = first.migrate("db", &second).await.unwrap();
    let ended = first.fails(&operation).await;
    assert!(
        ended.message.contains("disk \"root\"") && ended.message.contains("both nodes share"),
        "{ended:?}"
    );
    first.waits_for("db", VmPhase::Running).await;
    assert_eq!(second.list().await.len(), 0);
}

#[tokio::test]
async fn a_vm_whose_spec_waits_for_a_restart_is_not_moved() {
    let (first, second) = pair().await;
    first.run("web", "").await;
    let more = |spec: &mut v1::VmSpec| spec.cpu.get_or_insert_default().cores = 2;
    first.change("web", more).await.unwrap();
    let refused = first.migrate("web", &second).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "RESTART_REQUIRED");
}

#[tokio::test]
async fn a_policy_says_what_is_done_to_a_guest_that_is_too_fast() {
    use v1::MigrationPolicy::{AlwaysForced, AlwaysSafe, PreferForced, PreferSafe, Unspecified};
    let (first, second) = pair().await;
    first.run("web", "mock.send=hang").await;
    let request = |policy: i32, force| v1::MigrateVmRequest {
        name: "web".into(),
        target: pki::address(&second),
        policy,
        force,
        ..Default::default()
    };
    for (policy, force) in [
        (99, false),
        (AlwaysSafe.into(), true),
        (AlwaysForced.into(), true),
    ] {
        let asked = request(policy, force);
        let refused = first.migrations().await.migrate_vm(asked).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
    }
    for (policy, force, slowed) in [
        (Unspecified, false, ""),
        (AlwaysSafe, false, ""),
        (Unspecified, true, ", the guest is slowed by 20 %"),
        (PreferSafe, false, ", the guest is slowed by 1 %"),
        (PreferForced, false, ", the guest is slowed by 20 %"),
        (PreferForced, true, ", the guest is slowed by 20 %"),
        (AlwaysForced, false, ", the guest is slowed by 99 %"),
    ] {
        let asked = request(policy.into(), force);
        let answer = first.migrations().await.migrate_vm(asked).await.unwrap();
        let operation = answer.into_inner().operation.unwrap();
        let told = format!("round 0: 5 MiB sent, 1 MiB changed meanwhile, 9 MiB/s{slowed}");
        within(async || {
            let now = first.operation(&operation.id).await;
            (now.message == told).then_some(())
        })
        .await;
        first.cancel(&operation.id).await.unwrap();
        first.ended(&operation).await;
        second.forgets("web").await;
    }
}

#[tokio::test]
async fn migrating_vm_refuses_changes_and_a_cancel_returns_it() {
    let (first, second) = pair().await;
    first.run("web", "mock.send=hang").await;
    let operation = first.migrate("web", &second).await.unwrap();
    second.waits_for("web", VmPhase::Starting).await;
    within(async || {
        let now = first.operation(&operation.id).await;
        let told = "round 0: 5 MiB sent, 1 MiB changed meanwhile, 9 MiB/s";
        (now.message == told).then_some(())
    })
    .await;
    let again = first.migrate("web", &second).await.unwrap_err();
    assert_refused(&again, Code::FailedPrecondition, "MIGRATING");
    for daemon in [&first, &second] {
        let busy = daemon.delete("web", true).await.unwrap_err();
        assert_refused(&busy, Code::FailedPrecondition, "MIGRATING");
        let busy = daemon.kill_vm("web").await.unwrap_err();
        assert_refused(&busy, Code::FailedPrecondition, "MIGRATING");
    }
    first.cancel(&operation.id).await.unwrap();
    let ended = first.ended(&operation).await;
    assert_eq!(ended.phase(), OperationPhase::Cancelled, "{ended:?}");
    second.forgets("web").await;
    assert_eq!(second.vmm_processes().len(), 0);
    let vm = first.waits_for("web", VmPhase::Running).await;
    assert_eq!(status(&vm).reason, "Running");
    first.delete("web", true).await.unwrap();
}

#[tokio::test]
async fn cancel_is_effective_while_the_target_prepares() {
    let (first, second) = pair().await;
    second.fault("received-Prepare");
    first.run("web", "").await;
    let operation = first.migrate("web", &second).await.unwrap();
    second.reached("received-Prepare").await;
    first.waits_for("web", VmPhase::Paused).await;
    let id = operation.id.clone();
    let mut operations = first.operations().await;
    // Before the call ends on its own.
    let ended = tokio::time::timeout(Duration::from_secs(8), async {
        let cancel = v1::CancelOperationRequest { id };
        operations.cancel_operation(cancel).await.unwrap();
        first.waits_for("web", VmPhase::Running).await;
        first.ended(&operation).await
    })
    .await
    .expect("a cancel waits for the other node");
    assert_eq!(ended.phase(), OperationPhase::Cancelled, "{ended:?}");
    second.forgets("web").await;
    // The held message has no receiver, and comes too late.
    assert!(second.path("run/fault/received-Prepare").exists());
    second.release("received-Prepare");
    second.wait_no_processes().await;
    first.delete("web", true).await.unwrap();
    assert_eq!(second.list().await.len(), 0);
}

#[tokio::test]
async fn guest_reset_ends_the_migration_and_boots_from_disk() {
    for (content, phase) in [
        ("boots:root=/dev/vda1 v=6.2\n", VmPhase::Running),
        ("no kernel any more\n", VmPhase::Failed),
    ] {
        let (first, second) = pair().await;
        second.fault("received-OfferVm");
        let (vm, path) = disk_boot::vm(&first, "web", "boots:root=/dev/vda1 v=6.1\n");
        let before = first.run_vm(vm).await;
        let operation = first.migrate("web", &second).await.unwrap();
        second.reached("received-OfferVm").await;
        let mut bytes = content.as_bytes().to_vec();
        bytes.resize(1 << 20, 0);
        fs::write(&path, bytes).unwrap();
        let mut console = Client::open(&first, "web").await;
        console.type_in("reset\n").await;
        let ended = first.fails(&operation).await;
        assert!(ended.message.contains("has reset its machine"), "{ended:?}");
        let vm = within(async || {
            let vm = first.get("web").await.ok()?;
            let same = status(&vm).instance.as_ref().map(|run| run.pid)
                == status(&before).instance.as_ref().map(|run| run.pid);
            (!same && status(&vm).phase() == phase).then_some(vm)
        })
        .await;
        let reason = match phase {
            VmPhase::Running => "Running",
            _ => "KernelNotFound",
        };
        assert_eq!(status(&vm).reason, reason, "{vm:?}");
        second.release("received-OfferVm");
        assert_eq!(uid(&vm), uid(&before));
        within(async || first.delete("web", true).await.ok()).await;
    }
}

#[tokio::test]
async fn of_two_migrations_at_once_one_is_refused() {
    let (first, second) = pair().await;
    first.run("web", "").await;
    let held = |daemon: &Daemon, name: &str| {
        daemon.fault(name);
        daemon.path("run/fault").join(name)
    };
    let (begin, offer) = (held(&first, "begin"), held(&second, "received-OfferVm"));
    let both = [
        first.migrate("web", &second).await.unwrap(),
        first.migrate("web", &second).await.unwrap(),
    ];
    fs::remove_file(begin).unwrap();
    let [one, other] = &both;
    let (refused, accepted) = within(async || {
        for (ends, goes_on) in [(one, other), (other, one)] {
            let now = first.operation(&ends.id).await;
            if now.phase() == OperationPhase::Failed {
                return Some((now, goes_on));
            }
        }
        None
    })
    .await;
    assert!(refused.message.contains("being migrated already"), "{refused:?}");
    fs::remove_file(offer).unwrap();
    first.completes(accepted).await;
    second.waits_for("web", VmPhase::Running).await;
}

#[tokio::test]
async fn a_vmm_that_answers_late_is_told_then_that_its_guest_runs_on() {
    let (mut first, second) = pair().await;
    first.fault("says-Prepare");
    let vm = first.run("web", "").await;
    first.migrate("web", &second).await.unwrap();
    first.reached("says-Prepare").await;
    first.kill();
    crate::harness::stop_process(vm_pid(&vm));
    first.release("says-Prepare");
    first.relaunch().await;
    // The migration is over by then.
    second.forgets("web").await;
    kill_process(vm_pid(&vm), Signal::CONT).unwrap();
    let now = first.wait_ready("web").await;
    assert_eq!((now.phase(), now.reason.as_str()), (VmPhase::Running, "Running"));
    first.delete("web", true).await.unwrap();
}

#[tokio::test]
async fn a_commit_or_its_answer_that_is_lost_is_repeated() {
    for lost in ["commit-lost", "answer-lost"] {
        let (first, second) = pair().await;
        first.run("web", "").await;
        second.fault(lost);
        let operation = first.migrate("web", &second).await.unwrap();
        first.completes(&operation).await;
        first.forgets("web").await;
        second.waits_for("web", VmPhase::Running).await;
        assert!(!second.path("run/fault").join(lost).exists());
    }
}

/// Kills the one `vmm` that a daemon has.
pub fn kill_vmm(daemon: &Daemon) {
    let processes = daemon.vmm_processes();
    let [process] = processes.as_slice() else {
        panic!("{processes:?}");
    };
    kill_process(*process, Signal::KILL).unwrap();
}

#[tokio::test]
async fn a_target_whose_vmm_takes_nothing_gives_up() {
    let (first, second) = pair().await;
    first.run("web", "mock.send=much mock.receive=hang").await;
    let operation = first.migrate("web", &second).await.unwrap();
    // An offer is kept for its usual time until its first data arrives.
    second.waits_for("web", VmPhase::Starting).await;
    second.fault("hasty");
    let ended = first.fails(&operation).await;
    assert!(ended.message.contains("has taken nothing"), "{ended:?}");
    second.forgets("web").await;
    second.wait_no_processes().await;
    first.waits_for("web", VmPhase::Running).await;
}

#[tokio::test]
async fn received_vm_without_commit_is_removed_and_source_resumes() {
    let (first, second) = pair().await;
    first.fault("says-Prepare");
    first.run("web", "").await;
    let operation = first.migrate("web", &second).await.unwrap();
    second.waits_for("web", VmPhase::Paused).await;
    second.fault("hasty");
    second.forgets("web").await;
    first.release("says-Prepare");
    first.fails(&operation).await;
    assert!(second.vmm_processes().is_empty());
    first.waits_for("web", VmPhase::Running).await;
}
