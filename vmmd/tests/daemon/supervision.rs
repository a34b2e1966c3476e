//! Panicking parts of the daemon, and VMs that it cannot take over as usual: existing VMs stay
//! visible and under one supervisor.

use std::{
    fs::{self, File},
    time::Duration,
};

use prost::Message as _;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use rustix::fs::{FlockOperation, flock};
use tokio::time::timeout;
use tonic::{Code, Status};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use vmmd_api::v1::{self, VmPhase};

use crate::{
    console::Client,
    harness::{self, Daemon, PATIENCE, assert_refused, assert_says, connect, refusal, status, uid, vm_pid},
    migration::pair,
    verbs::within,
};

impl Daemon {
    /// The actor of a VM panics when it is used next.
    fn arm(&self, name: &str) {
        self.arm_in("run", name);
    }

    /// The part of the daemon with this name panics when it is used next.
    pub fn arm_in(&self, folder: &str, name: &str) {
        let folder = self.path(folder).join("fault");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(name), "").unwrap();
    }

    /// Changes a VM's record in the store, while no daemon runs.
    fn change_record(&self, uid: &str, change: impl FnOnce(&mut Vec<u8>)) {
        const VMS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("vms");
        let key = uuid::Uuid::parse_str(uid).unwrap();
        let database = Database::open(self.path("state/vmmd.redb")).unwrap();
        let read = database.begin_read().unwrap();
        let mut value = {
            let table = read.open_table(VMS).unwrap();
            assert!(table.iter().unwrap().count() > 0);
            table
                .get(key.as_bytes().as_slice())
                .unwrap()
                .unwrap()
                .value()
                .to_vec()
        };
        change(&mut value);
        let write = database.begin_write().unwrap();
        {
            let mut table = write.open_table(VMS).unwrap();
            table.insert(key.as_bytes().as_slice(), value.as_slice()).unwrap();
        }
        write.commit().unwrap();
    }
}

/// Asks again while the daemon says that it will be there in a moment; nothing else may be said.
async fn until_available<T, F: Future<Output = Result<T, Status>>>(mut ask: impl FnMut() -> F) -> T {
    let began = std::time::Instant::now();
    loop {
        match ask().await {
            Ok(answer) => return answer,
            Err(refused) => assert_eq!(refused.code(), Code::Unavailable, "{refused:?}"),
        }
        assert!(began.elapsed() < PATIENCE);
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn panicked_actor_is_replaced_and_its_vm_is_never_missing() {
    let daemon = Daemon::start().await;
    let before = daemon.run("web", "").await;
    let other = daemon.run("other", "").await;
    for _ in 0..3 {
        daemon.arm("web");
        let refused = daemon.pause("web").await.unwrap_err();
        assert_refused(&refused, Code::Unavailable, "VM_UNAVAILABLE");
        let paused = until_available(|| daemon.pause("web")).await;
        assert_eq!(
            (vm_pid(&paused), status(&paused).phase()),
            (vm_pid(&before), VmPhase::Paused)
        );
        // No other VM gets its user id.
        let user = |vm: &v1::Vm| status(vm).instance.as_ref().unwrap().uid;
        assert_eq!(user(&paused), user(&before));
        assert_ne!(user(&daemon.run("next", "").await), user(&before));
        daemon.delete("next", true).await.unwrap();
        daemon.resume("web").await.unwrap();
    }
    daemon.told_exactly("SupervisorFailed", 3).await;
    assert_eq!(vm_pid(&daemon.get("other").await.unwrap()), vm_pid(&other));
    // It is looked after as before.
    let mut console = Client::open(&daemon, "web").await;
    console.type_in("poweroff\n").await;
    daemon.wait_phase("web", VmPhase::Stopped).await;
    assert_eq!(daemon.vmm_processes(), [vm_pid(&other)]);
}

#[tokio::test]
async fn an_actor_that_panics_in_a_start_leaves_no_second_process() {
    let daemon = Daemon::start().await;
    daemon.define("web", "mock.boot=hang").await;
    let start = daemon.begin_start("web");
    daemon.wait_phase("web", VmPhase::Starting).await;
    daemon.wait_process().await;
    daemon.arm("web");
    let refused = daemon.pause("web").await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    assert_eq!(start.await.unwrap().unwrap_err().code(), Code::Unavailable);
    daemon
        .wait("web", |status| {
            status.instance.is_none() && status.phase() != VmPhase::Starting
        })
        .await;
    daemon.wait_no_processes().await;
    until_available(|| daemon.delete("web", true)).await;
}

#[tokio::test]
async fn a_store_that_panics_costs_one_answer() {
    let daemon = Daemon::start().await;
    daemon.arm_in("state", "store");
    let refused = daemon.create(daemon.manifest("web", "")).await.unwrap_err();
    assert_refused(&refused, Code::Unavailable, "STORE_UNAVAILABLE");
    daemon.run("web", "").await;
    daemon.told_exactly("StoreFailed", 1).await;
}

#[tokio::test]
async fn a_record_that_cannot_be_read_costs_its_own_vm() {
    let mut daemon = Daemon::start().await;
    let fine = daemon.run("fine", "").await;
    let broken = daemon.create(daemon.manifest("broken", "")).await.unwrap();
    daemon.kill();
    daemon.change_record(&uid(&broken), garble);
    daemon.relaunch().await;
    assert_eq!(vm_pid(&daemon.get("fine").await.unwrap()), vm_pid(&fine));
    let found = daemon.get("broken").await.unwrap();
    assert_eq!(
        (uid(&found), status(&found).phase()),
        (uid(&broken), VmPhase::Failed)
    );
    assert_eq!(status(&found).reason, "RecordUnreadable");
    let refused = daemon.start_vm("broken").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "RECORD_UNREADABLE");
    let refused = daemon.create(daemon.manifest("broken", "")).await.unwrap_err();
    assert_eq!(refused.code(), Code::AlreadyExists, "its name is taken");
    // It is unchanged after another restart, and can be deleted.
    daemon.kill_and_restart().await;
    daemon.delete("broken", false).await.unwrap();
    daemon.kill_and_restart().await;
    assert_eq!(daemon.get("broken").await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn process_of_an_unreadable_vm_can_be_ended() {
    let mut daemon = Daemon::start().await;
    let before = daemon.run("broken", "").await;
    daemon.kill();
    daemon.change_record(&uid(&before), garble);
    daemon.relaunch().await;
    let found = daemon.get("broken").await.unwrap();
    assert_eq!(
        (status(&found).reason.as_str(), vm_pid(&found)),
        ("RecordUnreadable", vm_pid(&before))
    );
    let refused = daemon.delete("broken", false).await.unwrap_err();
    assert_eq!(refusal(&refused).1, "STILL_RUNNING");
    daemon.kill_vm("broken").await.unwrap();
    daemon.wait_no_processes().await;
    // The next daemon does not take a process of another VM with that user id for this VM's.
    let other = daemon.run("other", "").await;
    daemon.kill_and_restart().await;
    let found = daemon.get("broken").await.unwrap();
    assert!(status(&found).instance.is_none(), "{found:?}");
    assert_eq!(vm_pid(&daemon.get("other").await.unwrap()), vm_pid(&other));
    daemon.delete("broken", false).await.unwrap();
    assert_eq!(daemon.vmm_processes(), [vm_pid(&other)]);
}

#[tokio::test]
async fn migration_of_an_unreadable_vm_ends_on_the_other_node() {
    for at_source in [true, false] {
        let (mut first, mut second) = pair().await;
        let before = first.run("web", "").await;
        first.fault("given");
        let operation = first.migrate("web", &second).await.unwrap();
        first.ended(&operation).await;
        first.kill();
        second.kill();
        let broken = if at_source { &first } else { &second };
        broken.change_record(&uid(&before), garble);
        first.relaunch().await;
        second.relaunch().await;
        let (broken, other) = if at_source {
            (&first, &second)
        } else {
            (&second, &first)
        };
        let refused = broken
            .resolve("web", v1::MigrationResolution::Run)
            .await
            .unwrap_err();
        assert_refused(&refused, Code::FailedPrecondition, "RECORD_UNREADABLE");
        assert_says(&refused, "delete it here with `vmmctl delete vm NAME --force`");
        let waiting = async || {
            within(async || {
                let vm = other.get("web").await.unwrap();
                let migration = status(&vm).migration.clone();
                migration.is_some_and(|it| it.waits_for_decision).then_some(())
            })
            .await;
        };
        waiting().await;
        broken.delete("web", true).await.unwrap();
        broken.wait_no_processes().await;
        // The other node does not take the deletion for a decision, and its guest is still there.
        waiting().await;
        other.resolve("web", v1::MigrationResolution::Run).await.unwrap();
        let vm = other.waits_for("web", VmPhase::Running).await;
        assert_eq!(other.vmm_processes(), [vm_pid(&vm)]);
    }
}

/// Makes a record undecodable behind its fields.
fn garble(value: &mut Vec<u8>) {
    value.extend([0x32, 0xff, 0xff]);
}

/// Makes the spec of a record one that is not valid.
fn spoil(value: &mut Vec<u8>) {
    let cpu = v1::CpuSpec {
        cores: 100_000,
        ..Default::default()
    };
    let spec = v1::VmSpec {
        cpu: Some(cpu),
        ..Default::default()
    };
    // Field 6 is the spec; later bytes of the field are merged into it.
    value.push(6 << 3 | 2);
    spec.encode_length_delimited(value).unwrap();
}

#[tokio::test]
async fn migration_of_an_unusable_vm_is_decided_by_an_operator() {
    use v1::MigrationResolution::{Drop, Run};
    for (at_source, resolution) in [(true, Run), (true, Drop), (false, Run), (false, Drop)] {
        let (mut first, mut second) = pair().await;
        let before = first.run("web", "").await;
        first.fault("given");
        let operation = first.migrate("web", &second).await.unwrap();
        first.ended(&operation).await;
        let (left, gone) = if at_source {
            (&mut first, &mut second)
        } else {
            (&mut second, &mut first)
        };
        gone.kill();
        left.kill();
        left.change_record(&uid(&before), spoil);
        left.relaunch().await;
        let vm = left.get("web").await.unwrap();
        assert_eq!(status(&vm).reason, "SpecInvalid");
        let migration = status(&vm).migration.clone().unwrap();
        assert!(migration.waits_for_decision, "{migration:?}");
        let pid = vm_pid(&vm);
        left.resolve("web", resolution).await.unwrap();
        match resolution {
            Run => {
                let vm = left.get("web").await.unwrap();
                let migration = &status(&vm).migration;
                assert!(
                    migration.as_ref().is_none_or(|it| !it.waits_for_decision),
                    "{vm:?}"
                );
                assert_eq!(vm_pid(&vm), pid);
                left.delete("web", true).await.unwrap();
            }
            _ => left.forgets("web").await,
        }
    }
}

#[tokio::test]
async fn source_with_an_unusable_vm_repeats_its_commit() {
    let (mut first, second) = pair().await;
    let before = first.run("web", "").await;
    first.fault("given");
    let operation = first.migrate("web", &second).await.unwrap();
    first.ended(&operation).await;
    first.kill();
    first.change_record(&uid(&before), spoil);
    first.relaunch().await;
    second.waits_for("web", VmPhase::Running).await;
    first.forgets("web").await;
}

#[tokio::test]
async fn a_vm_whose_spec_is_not_valid_any_more_keeps_what_it_holds() {
    let mut daemon = Daemon::start().await;
    let before = daemon.run("old", "").await;
    daemon.kill();
    daemon.change_record(&uid(&before), spoil);
    daemon.relaunch().await;
    let found = daemon.get("old").await.unwrap();
    assert_eq!(
        (status(&found).phase(), status(&found).reason.as_str()),
        (VmPhase::Failed, "SpecInvalid")
    );
    assert_eq!(vm_pid(&found), vm_pid(&before));
    let user = |vm: &v1::Vm| status(vm).instance.as_ref().unwrap().uid;
    assert_eq!(user(&found), user(&before));
    assert_ne!(user(&daemon.run("new", "").await), user(&before));
    let refused = daemon.delete("old", false).await.unwrap_err();
    assert_eq!(refusal(&refused).1, "STILL_RUNNING");
    let stopped = daemon.kill_vm("old").await.unwrap();
    assert!(status(&stopped).instance.is_none());
    daemon.delete("old", false).await.unwrap();
    assert_eq!(daemon.vmm_processes().len(), 1);
}

#[tokio::test]
async fn vm_without_a_known_process_is_shown_and_adopted_later() {
    let mut daemon = Daemon::start().await;
    let before = daemon.run("lost", "").await;
    daemon.kill();
    let pid = vm_pid(&before);
    harness::end(pid);
    // An unknown process holds its lock.
    let lock = File::open(daemon.path(&format!("run/vms/{}/lock", uid(&before)))).unwrap();
    flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
    daemon.relaunch().await;
    let found = daemon.get("lost").await.unwrap();
    assert_eq!(
        (status(&found).phase(), status(&found).reason.as_str()),
        (VmPhase::Failed, "Unreachable")
    );
    for refused in [
        daemon.start_vm("lost").await.err(),
        daemon.delete("lost", true).await.err(),
    ] {
        assert_refused(&refused.unwrap(), Code::FailedPrecondition, "UNREACHABLE");
    }
    let user = status(&before).instance.as_ref().unwrap().uid;
    let other = daemon.run("other", "").await;
    assert_ne!(status(&other).instance.as_ref().unwrap().uid, user);
    drop(lock);
    daemon.wait("lost", |status| status.reason == "Lost").await;
    daemon.start_vm("lost").await.unwrap();
}

#[tokio::test]
async fn health_and_the_watchdog_follow_the_store() {
    let mut daemon = Daemon::start().await;
    daemon.kill();
    daemon.relaunch_with(&[("WATCHDOG_USEC", "400000")]).await;
    let channel = connect(daemon.folder.path()).await;
    let mut health = HealthClient::new(channel)
        .watch(HealthCheckRequest::default())
        .await
        .unwrap()
        .into_inner();
    let mut next = async || {
        let told = timeout(PATIENCE, health.message()).await;
        told.expect("health does not follow").unwrap().unwrap().status()
    };
    let alive = |patience| {
        let mut buffer = [0; 64];
        daemon.notify.set_read_timeout(Some(patience)).unwrap();
        let length = daemon.notify.recv(&mut buffer).ok()?;
        assert!(buffer[..length].starts_with(b"WATCHDOG=1"));
        Some(())
    };
    assert_eq!(next().await, ServingStatus::Serving);
    alive(PATIENCE).expect("it tells that it works");
    daemon.arm_in("state", "store-hangs");
    assert_eq!(next().await, ServingStatus::NotServing);
    // Drains earlier notifications.
    while alive(Duration::from_millis(1)).is_some() {}
    assert_eq!(alive(Duration::from_secs(1)), None, "it tells that it works");
    fs::remove_file(daemon.path("state/fault/store-hangs")).unwrap();
    assert_eq!(next().await, ServingStatus::Serving);
    alive(PATIENCE).expect("it works again");
    daemon.run("web", "").await;
}

#[tokio::test]
async fn a_start_that_a_creation_was_refused_is_told() {
    let daemon = Daemon::start().await;
    // The task that starts it panics first.
    daemon.arm("web");
    let created = daemon
        .create_as(daemon.manifest("web", ""), true, false)
        .await
        .unwrap();
    let operation = created.operation.unwrap();
    assert_eq!(operation.phase(), v1::OperationPhase::Failed);
    assert_eq!(operation.error.unwrap().reason(), "VM_UNAVAILABLE");
    daemon.told_exactly("StartRefused", 1).await;
    until_available(|| daemon.start_vm("web")).await;
}
