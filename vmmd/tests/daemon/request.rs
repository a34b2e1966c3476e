//! Request ids and generations: a request is carried out once, regardless of kills of the daemon.

use std::future::Future;

use tokio_stream::StreamExt;
use tonic::{Code, Request, Response, Status};
use vmmd_api::v1::{self, VmPhase, WatchEventType, WatchVmsResponse};

use crate::{
    attach::{disk, names},
    harness::{Daemon, assert_refused, assert_says, generation, refusal, status, uid, vm_pid},
    verbs::fields,
};

fn create(daemon: &Daemon, id: &str, name: &str, start: bool) -> v1::CreateVmRequest {
    v1::CreateVmRequest {
        vm: Some(daemon.manifest(name, "")),
        start,
        request_id: id.into(),
        ..Default::default()
    }
}

fn start(id: &str, name: &str) -> v1::StartVmRequest {
    v1::StartVmRequest {
        name: name.into(),
        request_id: id.into(),
        ..Default::default()
    }
}

fn restart(id: &str, name: &str) -> v1::RestartVmRequest {
    v1::RestartVmRequest {
        name: name.into(),
        request_id: id.into(),
        ..Default::default()
    }
}

fn delete(id: &str, name: &str) -> v1::DeleteVmRequest {
    v1::DeleteVmRequest {
        name: name.into(),
        request_id: id.into(),
        force: true,
        ..Default::default()
    }
}

fn vm(response: Result<Response<v1::CreateVmResponse>, Status>) -> v1::Vm {
    response.unwrap().into_inner().vm.unwrap()
}

/// How a request is refused that has made something which was deleted since.
pub fn gone() -> (Code, String) {
    (Code::NotFound, "OBJECT_GONE".into())
}

#[tokio::test]
async fn retry_gets_the_first_answer_also_from_the_next_daemon() {
    let mut daemon = Daemon::start().await;
    let request = create(&daemon, "1", "a", false);
    let first = vm(daemon.client().create_vm(request.clone()).await);
    daemon.start_vm("a").await.unwrap();
    // The VM is shown as it is now.
    let again = vm(daemon.client().create_vm(request.clone()).await);
    assert_eq!(again, daemon.get("a").await.unwrap());
    assert_eq!(uid(&again), uid(&first));
    daemon.client().delete_vm(delete("3", "a")).await.unwrap();
    for restart in [false, true] {
        if restart {
            daemon.kill_and_restart().await;
        }
        // The created VM is gone.
        let failure = daemon.client().create_vm(request.clone()).await.unwrap_err();
        assert_eq!(refusal(&failure), gone());
        assert_says(&failure, &uid(&first));
        daemon.client().delete_vm(delete("3", "a")).await.unwrap();
        let failure = daemon.client().delete_vm(delete("", "a")).await.unwrap_err();
        assert_eq!(failure.code(), Code::NotFound);
        // Other content, and another method.
        for failure in [
            daemon.client().delete_vm(delete("3", "b")).await.unwrap_err(),
            daemon.client().start_vm(start("3", "a")).await.unwrap_err(),
            daemon
                .client()
                .create_vm(create(&daemon, "1", "a", true))
                .await
                .unwrap_err(),
        ] {
            assert_refused(&failure, Code::AlreadyExists, "REQUEST_ID_REUSED");
        }
    }
    assert!(daemon.list().await.is_empty());
    // Another VM of that name is not the one that it has made.
    daemon.create(daemon.manifest("a", "")).await.unwrap();
    let failure = daemon.client().create_vm(request).await.unwrap_err();
    assert_eq!(refusal(&failure), gone());
}

#[tokio::test]
async fn request_that_only_checks_leaves_its_id_free() {
    let daemon = Daemon::start().await;
    let request = v1::CreateVmRequest {
        dry_run: true,
        ..create(&daemon, "1", "a", false)
    };
    for _ in 0..2 {
        vm(daemon.client().create_vm(request.clone()).await);
        assert!(daemon.list().await.is_empty());
    }
    vm(daemon.client().create_vm(create(&daemon, "1", "a", false)).await);
}

#[tokio::test]
async fn retry_of_a_refused_request_is_carried_out() {
    let mut daemon = Daemon::start().await;
    let failure = daemon.client().start_vm(start("1", "a")).await.unwrap_err();
    assert_eq!(failure.code(), Code::NotFound);
    daemon.create(daemon.manifest("a", "")).await.unwrap();
    daemon.cordon("").await;
    let failure = daemon.client().start_vm(start("1", "a")).await.unwrap_err();
    assert_refused(&failure, Code::FailedPrecondition, "NODE_CORDONED");
    daemon.kill_and_restart().await;
    daemon.uncordon().await.unwrap();
    let started = daemon.client().start_vm(start("1", "a")).await.unwrap();
    let started = started.into_inner().vm.unwrap();
    assert_eq!(status(&started).phase(), VmPhase::Running);
}

#[tokio::test]
async fn a_request_that_was_wrong_leaves_its_id_free() {
    let daemon = Daemon::start().await;
    let mut wrong = create(&daemon, "1", "a", false);
    wrong.vm.as_mut().unwrap().metadata.as_mut().unwrap().name = "A".into();
    let failure = daemon.client().create_vm(wrong).await.unwrap_err();
    assert_eq!(failure.code(), Code::InvalidArgument);
    vm(daemon.client().create_vm(create(&daemon, "1", "a", false)).await);
    let long = daemon
        .client()
        .start_vm(start(&"x".repeat(129), "a"))
        .await
        .unwrap_err();
    assert_eq!(long.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn the_same_request_at_the_same_time_waits_for_the_same_answer() {
    let daemon = Daemon::start().await;
    daemon.create(daemon.manifest("a", "")).await.unwrap();
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let mut client = daemon.client();
        calls.spawn(async move { client.start_vm(start("1", "a")).await });
    }
    while let Some(answer) = calls.join_next().await {
        // A start that is not the same finds the VM running sooner or later.
        let started = answer.unwrap().unwrap().into_inner().vm.unwrap();
        assert_eq!(status(&started).phase(), VmPhase::Running);
    }
    assert_eq!(daemon.vmm_processes().len(), 1);
}

impl Daemon {
    /// Makes a call, kills the daemon at an event that satisfies `seen`, and starts it again.
    async fn killed_at<T: Send + 'static>(
        &mut self,
        call: impl Future<Output = T> + Send + 'static,
        seen: impl Fn(&WatchVmsResponse) -> bool,
    ) {
        let mut events = self.watch("").await;
        while events.next().await.unwrap().unwrap().r#type() != WatchEventType::Synced {}
        let call = tokio::spawn(call);
        while !seen(&events.next().await.unwrap().unwrap()) {}
        self.kill();
        // It may have been answered or not.
        drop(call.await);
        self.relaunch().await;
    }
}

fn phase(event: &WatchVmsResponse) -> VmPhase {
    let status = event.vm.as_ref().and_then(|vm| vm.status.as_ref());
    status.map_or(VmPhase::Unspecified, v1::VmStatus::phase)
}

/// Kills the daemon in the middle of a create, and starts it again.
async fn killed_create(daemon: &mut Daemon, name: &str, start: bool) -> v1::CreateVmRequest {
    let request = create(daemon, name, name, start);
    let (mut client, first) = (daemon.client(), request.clone());
    let added = |event: &WatchVmsResponse| event.r#type() == WatchEventType::Added;
    daemon
        .killed_at(async move { client.create_vm(first).await }, added)
        .await;
    request
}

#[tokio::test]
async fn a_create_that_the_daemon_did_not_survive_makes_one_vm() {
    let mut daemon = Daemon::start().await;
    for (name, start) in [("a", false), ("b", true)] {
        let request = killed_create(&mut daemon, name, start).await;
        let made = vm(daemon.client().create_vm(request.clone()).await);
        assert_eq!(uid(&made), uid(&daemon.get(name).await.unwrap()));
        assert_eq!(uid(&vm(daemon.client().create_vm(request).await)), uid(&made));
    }
    assert_eq!(daemon.list().await.len(), 2);
}

#[tokio::test]
async fn retry_of_an_interrupted_create_recreates_no_deleted_vm() {
    let mut daemon = Daemon::start().await;
    for (name, start) in [("a", false), ("b", true)] {
        let request = killed_create(&mut daemon, name, start).await;
        let made = uid(&daemon.get(name).await.unwrap());
        daemon.delete(name, true).await.unwrap();
        for restart in [false, true] {
            if restart {
                daemon.kill_and_restart().await;
            }
            let refused = daemon.client().create_vm(request.clone()).await.unwrap_err();
            assert_eq!(refusal(&refused), gone());
            assert_says(&refused, &made);
            assert!(daemon.get(name).await.is_err(), "{name} was made again");
        }
    }
}

#[tokio::test]
async fn a_start_that_the_daemon_did_not_survive_leads_to_one_run() {
    for at in [VmPhase::Starting, VmPhase::Running] {
        let mut daemon = Daemon::start().await;
        daemon.create(daemon.manifest("a", "")).await.unwrap();
        let mut client = daemon.client();
        let call = async move { client.start_vm(start("1", "a")).await };
        daemon.killed_at(call, |event| phase(event) == at).await;
        let answer = daemon.client().start_vm(start("1", "a")).await.unwrap();
        let started = answer.into_inner();
        assert_eq!(status(&started.vm.unwrap()).phase(), VmPhase::Running, "{at:?}");
        assert_eq!(daemon.vmm_processes().len(), 1);
        // Another start changes nothing.
        daemon.client().start_vm(start("2", "a")).await.unwrap();
        assert_eq!(daemon.vmm_processes().len(), 1);
    }
}

#[tokio::test]
async fn a_restart_that_the_daemon_did_not_survive_is_made_once() {
    for at in [VmPhase::Stopping, VmPhase::Starting, VmPhase::Running] {
        let mut daemon = Daemon::start().await;
        let before = vm_pid(&daemon.run("a", "").await);
        let mut client = daemon.client();
        let call = async move { client.restart_vm(restart("1", "a")).await };
        daemon.killed_at(call, |event| phase(event) == at).await;
        let answer = daemon.client().restart_vm(restart("1", "a")).await.unwrap();
        let restarted = answer.into_inner();
        let after = vm_pid(&restarted.vm.unwrap());
        assert_ne!(after, before, "{at:?}");
        let answer = daemon.client().restart_vm(restart("1", "a")).await.unwrap();
        let again = answer.into_inner();
        assert_eq!(vm_pid(&again.vm.unwrap()), after, "{at:?}");
        assert_eq!(vm_pid(&daemon.get("a").await.unwrap()), after, "{at:?}");
    }
}

#[tokio::test]
async fn retry_of_an_interrupted_delete_deletes_no_other_vm() {
    let mut daemon = Daemon::start().await;
    daemon.run("a", "").await;
    let mut client = daemon.client();
    let call = async move { client.delete_vm(delete("1", "a")).await };
    let gone = |event: &WatchVmsResponse| event.r#type() == WatchEventType::Deleted;
    daemon.killed_at(call, gone).await;
    let new = daemon.create(daemon.manifest("a", "")).await.unwrap();
    daemon.client().delete_vm(delete("1", "a")).await.unwrap();
    assert_eq!(uid(&daemon.get("a").await.unwrap()), uid(&new));
}

#[tokio::test]
async fn retry_of_an_interrupted_change_skips_its_generation() {
    let mut daemon = Daemon::start().await;
    daemon.create(daemon.manifest("a", "")).await.unwrap();
    let data = disk(&daemon, "data");
    let attach = v1::AttachDiskRequest {
        vm: "a".into(),
        disk: Some(data),
        preconditions: generation(1),
        request_id: "1".into(),
    };
    let detach = v1::DetachDiskRequest {
        vm: "a".into(),
        disk: "data".into(),
        preconditions: generation(2),
        request_id: "2".into(),
        ..Default::default()
    };
    let changed = |generation: u64| {
        move |event: &WatchVmsResponse| {
            let metadata = event.vm.as_ref().and_then(|vm| vm.metadata.as_ref());
            metadata.is_some_and(|metadata| metadata.generation == generation)
        }
    };
    let (mut client, request) = (daemon.client(), attach.clone());
    daemon
        .killed_at(async move { client.attach_disk(request).await }, changed(2))
        .await;
    let attached = daemon.client().attach_disk(attach).await.unwrap().into_inner();
    assert_eq!(names(&attached.vm.unwrap()), ["data"]);
    let (mut client, request) = (daemon.client(), detach.clone());
    daemon
        .killed_at(async move { client.detach_disk(request).await }, changed(3))
        .await;
    let answer = daemon.client().detach_disk(detach.clone()).await.unwrap();
    let detached = answer.into_inner();
    assert!(names(&detached.vm.unwrap()).is_empty());
    let other = v1::DetachDiskRequest {
        request_id: "3".into(),
        preconditions: generation(3),
        ..detach
    };
    let failure = daemon.client().detach_disk(other).await.unwrap_err();
    assert_eq!(failure.code(), Code::NotFound);
}

#[tokio::test]
async fn the_id_of_a_request_is_in_the_vmms_log() {
    let daemon = Daemon::start().await;
    let vm = daemon.create(daemon.manifest("a", "")).await.unwrap();
    daemon
        .client()
        .start_vm(start("of the start", "a"))
        .await
        .unwrap();
    daemon.pause("a").await.unwrap();
    let log = daemon.path(&format!("log/vms/{}/vmm.log", uid(&vm)));
    let asked = || {
        let log = std::fs::read_to_string(&log).unwrap();
        let asked = log
            .lines()
            .filter_map(|line| line.strip_prefix("asked as part of "));
        let mut asked: Vec<_> = asked.map(|id| id.trim_matches('"').to_owned()).collect();
        asked.dedup();
        asked
    };
    let [first, pause] = asked().try_into().unwrap();
    assert_eq!(first, "of the start");
    assert_eq!(pause.len(), 32, "one was made up: {pause}");
    let request = restart("of the restart", "a");
    daemon.client().restart_vm(request).await.unwrap();
    // The new process has a new log.
    assert_eq!(asked(), ["of the restart"]);
}

#[tokio::test]
async fn a_disk_is_made_and_deleted_once() {
    let mut daemon = Daemon::start().await;
    let request = v1::CreateDiskRequest {
        disk: Some(crate::disks::raw("d", 1 << 20)),
        request_id: "1".into(),
        ..Default::default()
    };
    let delete = v1::DeleteDiskRequest {
        name: "d".into(),
        request_id: "2".into(),
        ..Default::default()
    };
    let answer = daemon.disks().await.create_disk(request.clone()).await.unwrap();
    let made = answer.into_inner();
    assert_eq!(
        daemon
            .disks()
            .await
            .create_disk(request.clone())
            .await
            .unwrap()
            .into_inner(),
        made
    );
    daemon.disks().await.delete_disk(delete.clone()).await.unwrap();
    daemon.kill_and_restart().await;
    daemon.disks().await.delete_disk(delete).await.unwrap();
    let refused = daemon.disks().await.create_disk(request).await.unwrap_err();
    assert_eq!(refusal(&refused), gone());
    let left = daemon
        .disks()
        .await
        .list_disks(v1::ListDisksRequest::default())
        .await
        .unwrap();
    assert!(left.into_inner().disks.is_empty());
}

/// Makes each of these calls for VM `a` with preconditions and an id; names them with their answers.
macro_rules! with_preconditions {
    ($daemon:expr, $preconditions:expr, $id:expr; $($call:ident($request:ident { $field:ident $(, $more:ident: $value:expr)* })),* $(,)?) => {{
        let mut answers: Vec<(&str, Result<(), Status>)> = Vec::new();
        $(
            #[allow(clippy::needless_update, reason = "some requests have nothing else")]
            let request = Request::new(v1::$request {
                $field: "a".into(),
                preconditions: $preconditions,
                request_id: format!("{} {}", $id, stringify!($call)),
                $($more: $value,)*
                ..Default::default()
            });
            answers.push((stringify!($call), $daemon.client().$call(request).await.map(drop)));
        )*
        answers
    }};
}

#[tokio::test]
async fn each_mutation_is_refused_when_the_generation_is_another() {
    let daemon = Daemon::start().await;
    daemon.run("a", "").await;
    let data = disk(&daemon, "data");
    let before = daemon.get("a").await.unwrap();
    let answers = with_preconditions!(daemon, generation(7), "x";
        start_vm(StartVmRequest { name }),
        stop_vm(StopVmRequest { name }),
        restart_vm(RestartVmRequest { name }),
        pause_vm(PauseVmRequest { name }),
        resume_vm(ResumeVmRequest { name }),
        attach_disk(AttachDiskRequest { vm, disk: Some(data) }),
        detach_disk(DetachDiskRequest { vm, disk: "data".into() }),
        resize_vm_disk(ResizeVmDiskRequest { vm, disk: "data".into(), size_bytes: Some(512) }),
        delete_vm(DeleteVmRequest { name, force: true }),
    );
    for (call, answer) in answers {
        let failure = answer.unwrap_err();
        let expected = (Code::Aborted, "GENERATION_MISMATCH".to_owned());
        assert_eq!(refusal(&failure), expected, "{call}: {failure:?}");
        assert_says(&failure, "generation 1, not 7");
    }
    assert_eq!(daemon.get("a").await.unwrap(), before);
    for (call, answer) in with_preconditions!(daemon, generation(1), "y";
        pause_vm(PauseVmRequest { name }),
        resume_vm(ResumeVmRequest { name }),
        restart_vm(RestartVmRequest { name }),
        stop_vm(StopVmRequest { name }),
        start_vm(StartVmRequest { name }),
        delete_vm(DeleteVmRequest { name, force: true }),
    ) {
        answer.unwrap_or_else(|failure| panic!("{call}: {failure:?}"));
    }
}

#[tokio::test]
async fn a_delayed_delete_does_not_hit_a_successor_of_the_same_name() {
    let daemon = Daemon::start().await;
    let first = daemon.create(daemon.manifest("a", "")).await.unwrap();
    let delayed = v1::DeleteVmRequest {
        name: "a".into(),
        force: true,
        preconditions: Some(v1::Preconditions {
            uid: uid(&first),
            ..Default::default()
        }),
        ..Default::default()
    };
    daemon.client().delete_vm(delayed.clone()).await.unwrap();
    let second = daemon.create(daemon.manifest("a", "")).await.unwrap();
    let failure = daemon.client().delete_vm(delayed.clone()).await.unwrap_err();
    assert_refused(&failure, Code::Aborted, "UID_MISMATCH");
    assert_says(&failure, &uid(&second));
    assert_eq!(daemon.get("a").await.unwrap(), second);
    let of_second = v1::DeleteVmRequest {
        preconditions: Some(v1::Preconditions {
            uid: uid(&second),
            ..Default::default()
        }),
        ..delayed
    };
    daemon.client().delete_vm(of_second).await.unwrap();
}

#[tokio::test]
async fn labels_annotations_and_owner_follow_the_manifest() {
    let mut daemon = Daemon::start().await;
    let mut vm = daemon.manifest("a", "");
    let metadata = vm.metadata.as_mut().unwrap();
    metadata.owner = "controller/7".into();
    metadata.annotations = [("note".to_owned(), "first\nline".to_owned())].into();
    daemon.create(vm.clone()).await.unwrap();
    daemon.kill_and_restart().await;
    let kept = daemon.get("a").await.unwrap().metadata.unwrap();
    let wanted = vm.metadata.as_mut().unwrap();
    assert_eq!(
        (&kept.owner, &kept.annotations),
        (&wanted.owner, &wanted.annotations)
    );
    wanted.owner.clear();
    wanted.annotations.insert("more".into(), String::new());
    let asked = v1::UpdateVmRequest {
        vm: Some(vm.clone()),
        ..Default::default()
    };
    let changed = daemon.client().update_vm(asked).await.unwrap().into_inner();
    let changed = changed.vm.unwrap().metadata.unwrap();
    assert_eq!((changed.owner.as_str(), changed.annotations.len()), ("", 2));
    assert_eq!(changed.generation, kept.generation + 1);
    let wanted = vm.metadata.as_mut().unwrap();
    wanted.owner = "x".repeat(254);
    wanted.annotations = [("=".into(), String::new()), ("k".into(), "x".repeat(64 << 10))].into();
    let refused = daemon.replace(vm).await.unwrap_err();
    assert_eq!(
        fields(&refused),
        [
            "metadata.annotations[\"=\"]",
            "metadata.annotations",
            "metadata.owner"
        ]
    );
}

#[tokio::test]
async fn retry_of_an_interrupted_update_reverts_no_later_change() {
    let mut daemon = Daemon::start().await;
    daemon.create(daemon.manifest("a", "")).await.unwrap();
    let update = |id: &str, label: &str| {
        let mut vm = daemon.manifest("a", "");
        let labels = &mut vm.metadata.as_mut().unwrap().labels;
        labels.insert("by".into(), label.into());
        v1::UpdateVmRequest {
            vm: Some(vm),
            request_id: id.into(),
            ..Default::default()
        }
    };
    let (first, second) = (update("1", "first"), update("2", "second"));
    let (mut client, request) = (daemon.client(), first.clone());
    let written = |event: &WatchVmsResponse| {
        let metadata = event.vm.as_ref().and_then(|vm| vm.metadata.as_ref());
        metadata.is_some_and(|metadata| metadata.generation == 2)
    };
    daemon
        .killed_at(async move { client.update_vm(request).await }, written)
        .await;
    daemon.client().update_vm(second).await.unwrap();
    daemon.client().update_vm(first).await.unwrap();
    let metadata = daemon.get("a").await.unwrap().metadata.unwrap();
    assert_eq!(
        (metadata.labels["by"].as_str(), metadata.generation),
        ("second", 3)
    );
}

#[tokio::test]
async fn generation_continues_for_a_new_vm_of_the_same_name() {
    let mut daemon = Daemon::start().await;
    let generation_of = |vm: &v1::Vm| vm.metadata.as_ref().unwrap().generation;
    daemon.create(daemon.manifest("a", "")).await.unwrap();
    let mut vm = daemon.manifest("a", "");
    vm.metadata.as_mut().unwrap().owner = "me".into();
    daemon.replace(vm).await.unwrap();
    daemon.delete("a", false).await.unwrap();
    let second = daemon.create(daemon.manifest("a", "")).await.unwrap();
    assert_eq!(generation_of(&second), 3);
    daemon.delete("a", false).await.unwrap();
    daemon.kill_and_restart().await;
    let third = daemon.create(daemon.manifest("a", "")).await.unwrap();
    assert_eq!(generation_of(&third), 4);
}
