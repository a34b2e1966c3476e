use serde_json::{Value, json};

use super::*;
use crate::{
    launcher::{self, Claimed, Claims},
    run::tests::{machine, settings},
};

const NOW: &str = "2026-01-02T03:04:05Z";

fn at(seconds: i64) -> Timestamp {
    let now: Timestamp = NOW.parse().unwrap();
    now + SignedDuration::from_secs(seconds)
}

/// In run 3 on node n1, with a change of the object.
fn running(change: impl FnOnce(&mut Value)) -> VirtualMachine {
    let mut running = machine(|value| {
        value["metadata"]["finalizers"] = json!([names::POD_GONE]);
        change(value);
    });
    let digest = launcher::plan(&running).unwrap().digest();
    running.status = Some(VirtualMachineStatus {
        epoch: 3,
        run: Some(Run {
            pod: "web-3".to_owned(),
            pod_uid: Some("p-3".to_owned()),
            digest,
            ..Run::default()
        }),
        ..VirtualMachineStatus::default()
    });
    running
}

fn wished(value: &mut Value) {
    value["metadata"]["annotations"] = json!({names::MIGRATE: "1"});
}

fn with(machine: &VirtualMachine, status: VirtualMachineStatus) -> VirtualMachine {
    VirtualMachine {
        status: Some(status),
        ..machine.clone()
    }
}

/// A pod of a VirtualMachine whose claim several nodes can write to.
fn pod(machine: &VirtualMachine, epoch: i64, change: impl FnOnce(&mut Value)) -> Pod {
    let shared = Claimed {
        write_many: true,
        read_many: true,
        ..Claimed::default()
    };
    let claims = Claims::from([("web".to_owned(), shared)]);
    let plan = launcher::plan(machine).unwrap();
    let pod = launcher::pod(machine, &plan, epoch, &settings(), &claims).unwrap();
    let mut value = serde_json::to_value(pod).unwrap();
    value["metadata"]["uid"] = format!("p-{epoch}").into();
    value["status"] = json!({"phase": "Pending"});
    change(&mut value);
    serde_json::from_value(value).unwrap()
}

fn container(state: &Value, started: bool) -> Value {
    json!([{
        "name": "vm", "image": "", "imageID": "", "ready": started, "started": started, "restartCount": 0,
        "state": state,
    }])
}

/// The pod of run 3, whose VM runs.
fn source(machine: &VirtualMachine) -> Pod {
    pod(machine, 3, |pod| {
        pod["spec"]["nodeName"] = "n1".into();
        pod["status"] = json!({
            "phase": "Running", "containerStatuses": container(&json!({"running": {}}), true),
        });
    })
}

/// The pod of run 3 after its end.
fn ended(machine: &VirtualMachine, code: i32, message: &str) -> Pod {
    let state = json!({"terminated": {"exitCode": code, "message": message}});
    pod(machine, 3, |pod| {
        pod["spec"]["nodeName"] = "n1".into();
        pod["status"] = json!({"phase": "Succeeded", "containerStatuses": container(&state, false)});
    })
}

/// The pod of run 4 on another node, whose launcher has this state.
fn target(machine: &VirtualMachine, state: &Value, started: bool) -> Pod {
    pod(machine, 4, |pod| {
        pod["spec"]["nodeName"] = "n2".into();
        pod["status"] = json!({
            "phase": "Running", "hostIP": "192.0.2.2", "containerStatuses": container(state, started),
        });
    })
}

fn waiting(machine: &VirtualMachine) -> Pod {
    target(machine, &json!({"running": {}}), false)
}

fn deleted(mut pod: Pod) -> Pod {
    pod.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at(0)));
    pod
}

/// Next action `seconds` later, with the node of run 3 cordoned or not.
fn look(
    machine: &VirtualMachine,
    (run, second): (Option<&Pod>, Option<&Pod>),
    cordoned: bool,
    seconds: i64,
) -> Option<Act> {
    let seen = Seen {
        machine,
        pod: run,
        cordoned,
        target: second,
        source: None,
        budget: None,
        migration_port: 7443,
        now: at(seconds),
    };
    let plan = launcher::plan(machine).ok();
    next(&seen, machine.status.as_ref().unwrap(), run, plan.as_ref())
}

fn written(act: Option<Act>) -> VirtualMachineStatus {
    match act {
        Some(Act::Write(status)) => *status,
        other => panic!("{other:?}"),
    }
}

fn placed() -> VirtualMachine {
    let machine = running(wished);
    let status = written(look(&machine, (Some(&source(&machine)), None), false, 0));
    with(&machine, status)
}

/// The migration to the pod of run 4 is in the phase Moving.
fn moves() -> VirtualMachine {
    let mut machine = placed();
    let (run, second) = (source(&machine), waiting(&machine));
    for _ in 0..2 {
        let status = written(look(&machine, (Some(&run), Some(&second)), false, 1));
        machine = with(&machine, status);
    }
    assert_eq!(
        machine.status.as_ref().unwrap().migration.as_ref().unwrap().phase,
        MigrationPhase::Moving
    );
    // The status of the pod is written once more.
    while let Some(Act::Write(status)) = look(&machine, (Some(&run), Some(&second)), false, 1) {
        machine = with(&machine, *status);
    }
    machine
}

/// Phase and reason of the migration, and the pod of the run.
fn result(status: &VirtualMachineStatus) -> (MigrationPhase, &str, &str) {
    let migration = status.migration.as_ref().unwrap();
    (
        migration.phase,
        &migration.reason,
        &status.run.as_ref().unwrap().pod,
    )
}

#[test]
fn number_is_spent_before_the_second_pod_and_the_run_keeps_its() {
    let machine = placed();
    let status = machine.status.clone().unwrap();
    assert_eq!((status.epoch, status.run_epoch()), (4, 3));
    assert_eq!(status.migrate.as_deref(), Some("1"));
    let migration = status.migration.as_ref().unwrap();
    assert_eq!(
        (
            &*migration.pod,
            &*migration.source_uid,
            &*migration.from,
            migration.evicted
        ),
        ("web-4", "p-3", "n1", false)
    );
    let run = source(&machine);
    let Some(Act::CreateTarget { epoch, from, plan }) = look(&machine, (Some(&run), None), false, 1) else {
        panic!("no second pod");
    };
    assert_eq!((epoch, &*from), (4, "n1"));
    let made = launcher::pod(&machine, &plan, epoch, &settings(), &Claims::new()).unwrap();
    let made = serde_json::to_value(launcher::away_from(made, &from)).unwrap();
    let terms = &made["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    assert_eq!(
        terms["nodeSelectorTerms"],
        json!([{"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n1"]}]}])
    );
    // Its uid is noted before its launcher counts.
    let second = waiting(&machine);
    let status = written(look(&machine, (Some(&run), Some(&second)), false, 1));
    let migration = status.migration.as_ref().unwrap();
    assert_eq!(
        (migration.phase, migration.pod_uid.as_deref()),
        (MigrationPhase::Placing, Some("p-4"))
    );
    let migration = moves().status.unwrap().migration.unwrap();
    assert_eq!(migration.to.as_deref(), Some("n2"));
    assert_eq!(migration.address.as_deref(), Some("192.0.2.2:7443"));
}

#[test]
fn vm_that_cannot_be_moved_is_not_tried_and_may_be_evicted() {
    type Change = fn(&mut Value);
    let disk: Change = |it| it["spec"]["volumes"] = json!([{"name": "root", "emptyDisk": {"size": "1Gi"}}]);
    let single: Change = |it| it["metadata"]["annotations"] = json!({names::SINGLE_NODE: ""});
    let starts: Change = |it| it["status"]["containerStatuses"][0]["started"] = false.into();
    let image: Change = |it| it["spec"]["vm"]["disks"][0]["format"] = "qcow2".into();
    let share: Change = |it| {
        it["spec"]["vm"]["shares"] = json!([{"name": "site"}]);
        let site = json!({"name": "site", "persistentVolumeClaim": {"claimName": "web"}});
        it["spec"]["volumes"].as_array_mut().unwrap().push(site);
    };
    let table: [(Change, Change, &str, bool); 6] = [
        (disk, |_| {}, "DisksStay", false),
        (image, |_| {}, "MigrationDisks", false),
        (share, |_| {}, "MigrationShares", false),
        (|_| {}, single, "VolumeNotShared", false),
        (|_| {}, starts, "NotRunning", true),
        (|_| {}, |_| {}, "", true),
    ];
    for (of_machine, of_pod, reason, budget) in table {
        let machine = running(|value| {
            of_machine(value);
            wished(value);
        });
        let mut run = serde_json::to_value(source(&machine)).unwrap();
        of_pod(&mut run);
        let run: Pod = serde_json::from_value(run).unwrap();
        let status = written(look(&machine, (Some(&run), None), false, 0));
        assert_eq!(status.migration.unwrap().reason, reason);
        let plan = launcher::plan(&machine).unwrap();
        assert_eq!(wants_budget(&machine, &run, &plan), budget, "{reason}");
        // A cordoned node has no effect on it.
        let calm = running(of_machine);
        let act = look(&calm, (Some(&run), None), true, 0);
        assert_eq!(act.is_some(), reason.is_empty(), "{reason}");
    }
    let stop = running(|it| it["spec"]["migration"] = json!({"eviction": "Stop"}));
    let plan = launcher::plan(&stop).unwrap();
    assert!(!wants_budget(&stop, &source(&stop), &plan));
    assert_eq!(look(&stop, (Some(&source(&stop)), None), true, 0), None);
}

#[test]
fn wish_is_tried_once_and_a_cordoned_node_is_left_again() {
    let machine = running(|_| {});
    let run = source(&machine);
    let status = written(look(&machine, (Some(&run), None), true, 0));
    assert!(status.migration.as_ref().unwrap().evicted);
    let machine = with(&machine, failed(&status, "NotPlaced", "", at(120)));
    let second = deleted(waiting(&machine));
    // The pod that is left over goes first.
    assert_eq!(look(&machine, (Some(&run), Some(&second)), true, 999), None);
    assert_eq!(look(&machine, (Some(&run), None), true, 239), None);
    assert!(look(&machine, (Some(&run), None), true, 240).is_some());
    assert_eq!(look(&machine, (Some(&run), None), false, 240), None);
    let wish = placed();
    let status = failed(wish.status.as_ref().unwrap(), "NotPlaced", "", at(120));
    let wish = with(&wish, status);
    assert_eq!(look(&wish, (Some(&run), None), false, 999), None);
    assert_eq!(
        look(&running(wished), (Some(&deleted(run)), None), true, 0),
        None,
        "a deleted pod ends its run"
    );
}

#[test]
fn placing_is_given_up_when_a_pod_ends_or_none_is_placed() {
    let machine = placed();
    let run = source(&machine);
    let noted = {
        let status = written(look(&machine, (Some(&run), Some(&waiting(&machine))), false, 1));
        with(&machine, status)
    };
    let unschedulable = pod(&machine, 4, |pod| {
        pod["status"]["conditions"] = json!([{
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes",
        }]);
    });
    let refused = target(
        &machine,
        &json!({"terminated": {"exitCode": 1, "message": "OldEpoch: it is over"}}),
        false,
    );
    let gone = ended(&machine, 0, "GuestShutdown: off");
    let table = [
        ((Some(&run), Some(&unschedulable)), 20, "NoNodeFits"),
        ((Some(&run), Some(&unschedulable)), 120, "NotPlaced"),
        ((Some(&run), Some(&refused)), 2, "TargetRefused"),
        ((Some(&run), None), 2, "TargetGone"),
        ((Some(&gone), Some(&unschedulable)), 2, "SourceGone"),
        ((None, Some(&unschedulable)), 2, "SourceGone"),
    ];
    for (pods, seconds, reason) in table {
        let mut machine = noted.clone();
        let status = loop {
            let status = written(look(&machine, pods, false, seconds));
            if status.under_way().is_none() {
                break status;
            }
            machine = with(&machine, status);
        };
        assert_eq!(result(&status), (MigrationPhase::Failed, reason, "web-3"));
    }
    let mut going = noted.clone();
    going.metadata.deletion_timestamp = deleted(run.clone()).metadata.deletion_timestamp;
    let status = written(look(&going, (Some(&run), None), false, 2));
    assert_eq!(status.migration.unwrap().reason, "Deleted");
    let changed = {
        let mut changed = noted;
        changed.spec.vm.insert("cpu".to_owned(), json!({"cores": 4}));
        changed
    };
    let status = written(look(&changed, (Some(&run), None), false, 2));
    assert_eq!(status.migration.unwrap().reason, "SpecChanged");
}

#[test]
fn pods_alone_report_the_result_of_a_migration() {
    let machine = moves();
    let run = source(&machine);
    let (left, died) = (
        ended(&machine, 0, "Migrated"),
        ended(&machine, 137, "the launcher was killed"),
    );
    let second = waiting(&machine);
    let runs = target(&machine, &json!({"running": {}}), true);
    let over = target(
        &machine,
        &json!({"terminated": {"exitCode": 1, "message": "LauncherFailed: x"}}),
        false,
    );
    let mut lost = run.clone();
    lost.status.get_or_insert_default().conditions = serde_json::from_value(
        json!([{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]),
    )
    .unwrap();
    use MigrationPhase::{Failed, Succeeded};
    let table = [
        ((Some(&left), Some(&second)), 2, Succeeded, ""),
        ((Some(&left), Some(&over)), 2, Succeeded, ""),
        ((Some(&died), Some(&runs)), 2, Succeeded, ""),
        ((Some(&lost), Some(&runs)), 2, Succeeded, ""),
        ((Some(&run), Some(&over)), 2, Failed, "TargetGone"),
        ((Some(&run), None), 2, Failed, "TargetGone"),
        ((Some(&died), Some(&over)), 2, Failed, "SourceGone"),
        ((None, Some(&over)), 2, Failed, "SourceGone"),
        ((Some(&run), Some(&over)), 999, Failed, "TimedOut"),
    ];
    for (index, (pods, seconds, phase, reason)) in table.into_iter().enumerate() {
        let status = written(look(&machine, pods, false, seconds));
        let pod = if phase == Succeeded { "web-4" } else { "web-3" };
        assert_eq!(result(&status), (phase, reason, pod), "{index}");
        if phase == Succeeded {
            let run = status.run.as_ref().unwrap();
            assert_eq!((run.pod_uid.as_deref(), run.epoch), (Some("p-4"), Some(4)));
        }
    }
    // The second pod has to end before a migration has failed.
    let deletes = Act::DeletePod {
        pod: "web-4".to_owned(),
        uid: "p-4".to_owned(),
    };
    let mut going = machine.clone();
    going.metadata.deletion_timestamp = deleted(run.clone()).metadata.deletion_timestamp;
    for (machine, pods, seconds) in [
        (&machine, (Some(&run), Some(&second)), 721),
        (&machine, (Some(&run), Some(&runs)), 721),
        (&machine, (Some(&died), Some(&second)), 2),
        (&machine, (None, Some(&second)), 2),
        (&going, (Some(&run), Some(&second)), 2),
    ] {
        assert_eq!(
            look(machine, pods, false, seconds),
            Some(deletes.clone()),
            "{seconds}"
        );
        let waits = deleted(pods.1.unwrap().clone());
        let act = look(machine, (pods.0, Some(&waits)), false, seconds);
        let ended = matches!(&act, Some(Act::Write(status)) if status.under_way().is_none());
        assert!(!ended && act.is_some(), "{act:?}");
    }
    let act = look(&machine, (Some(&run), Some(&second)), false, 719);
    assert_eq!(act, Some(Act::Wait(SignedDuration::from_secs(1))));
}

#[test]
fn pods_that_a_finished_migration_has_left_over_are_known() {
    let machine = moves();
    let seen = |machine: &VirtualMachine, first: &Pod, second: &Pod| {
        let seen = Seen {
            machine,
            pod: None,
            cordoned: false,
            target: Some(second),
            source: Some(first),
            budget: None,
            migration_port: 7443,
            now: at(0),
        };
        left_over(&seen, machine.status.as_ref().unwrap()).map(kube::ResourceExt::name_any)
    };
    let (first, second) = (source(&machine), waiting(&machine));
    assert_eq!(seen(&machine, &first, &second), None);
    let status = machine.status.as_ref().unwrap();
    let migration = status.migration.as_ref().unwrap();
    let done = with(&machine, succeed(status, migration, at(2)));
    assert_eq!(seen(&done, &first, &second).as_deref(), Some("web-3"));
    let over = with(&machine, failed(status, "TimedOut", "", at(2)));
    assert_eq!(seen(&over, &first, &second).as_deref(), Some("web-4"));
    // A later run has the name.
    let mut later = over.clone();
    later.status.as_mut().unwrap().run.as_mut().unwrap().pod_uid = Some("p-4".to_owned());
    assert_eq!(seen(&later, &first, &second), None);
}
