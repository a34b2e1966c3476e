use serde_json::{Value, json};

use super::*;
use crate::{
    placeholder,
    run::tests::{machine, settings},
};

const NOW: &str = "2026-01-02T03:04:05Z";

fn at(seconds: i64) -> Timestamp {
    let now: Timestamp = NOW.parse().unwrap();
    now + SignedDuration::from_secs(seconds)
}

/// In run 3 on node n1, when the spec has this and the annotation that.
fn running(change: impl FnOnce(&mut Value)) -> VirtualMachine {
    let mut running = machine(|value| {
        value["metadata"]["finalizers"] = json!([names::POD_GONE]);
        change(value);
    });
    let digest = placeholder::plan(&running).unwrap().digest();
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

fn with(machine: &VirtualMachine, status: VirtualMachineStatus) -> VirtualMachine {
    VirtualMachine {
        status: Some(status),
        ..machine.clone()
    }
}

fn change(pod: Pod, change: impl FnOnce(&mut Value)) -> Pod {
    let mut value = serde_json::to_value(pod).unwrap();
    change(&mut value);
    serde_json::from_value(value).unwrap()
}

/// The pod of run 3, whose VM runs.
fn source(machine: &VirtualMachine, more: impl FnOnce(&mut Value)) -> Pod {
    let plan = placeholder::plan(machine).unwrap();
    change(placeholder::pod(machine, &plan, 3, &settings()).unwrap(), |pod| {
        pod["metadata"]["uid"] = "p-3".into();
        pod["spec"]["nodeName"] = "n1".into();
        pod["status"] = json!({"phase": "Running", "containerStatuses": [{
            "name": "vm", "image": "", "imageID": "", "ready": true, "restartCount": 0, "state": {"running": {}},
        }]});
        more(pod);
    })
}

fn evicted(pod: &mut Value) {
    pod["metadata"]["deletionTimestamp"] = "2026-01-02T03:05:05Z".into();
    pod["metadata"]["deletionGracePeriodSeconds"] = 60.into();
}

/// The pod of run 4, which the VM is to be moved to.
fn target(machine: &VirtualMachine, more: impl FnOnce(&mut Value)) -> Pod {
    let plan = placeholder::plan(machine).unwrap();
    let pod = placeholder::target(machine, &plan, 4, &settings(), ("n1", None)).unwrap();
    change(pod, |pod| {
        pod["metadata"]["uid"] = "p-4".into();
        pod["status"] = json!({"phase": "Pending"});
        more(pod);
    })
}

fn awaiting(pod: &mut Value) {
    pod["spec"]["nodeName"] = "n2".into();
    pod["status"]["containerStatuses"] = json!([{
        "name": "vm", "image": "", "imageID": "", "ready": false, "restartCount": 0,
        "state": {"waiting": {"reason": names::AWAITS}},
    }]);
}

fn node(name: &str, cordoned: bool) -> Node {
    let value = json!({
        "metadata": {"name": name, "annotations": {names::MIGRATION_ADDRESS: format!("{name}:7443")}},
        "spec": {"unschedulable": cordoned},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    });
    serde_json::from_value(value).unwrap()
}

/// Next action `seconds` later.
fn look(machine: &VirtualMachine, source: Option<&Pod>, target: Option<&Pod>, seconds: i64) -> Option<Act> {
    let (from, to) = (node("n1", true), node("n2", false));
    let seen = Seen {
        machine,
        pod: source,
        node: Some(&from),
        target,
        target_node: Some(&to),
        source: None,
        launcher: false,
        now: at(seconds),
    };
    let plan = placeholder::plan(machine).ok();
    next(&seen, machine.status.as_ref().unwrap(), source, plan.as_ref())
}

/// Carries out what only changes the VirtualMachine, until something else is to be done.
fn settle(
    mut machine: VirtualMachine,
    source: Option<&Pod>,
    target: Option<&Pod>,
    seconds: i64,
) -> (VirtualMachine, Option<Act>) {
    for _ in 0..9 {
        match look(&machine, source, target, seconds) {
            Some(Act::Write(status)) => machine = with(&machine, *status),
            act => return (machine, act),
        }
    }
    panic!("it never settles: {:?}", machine.status);
}

fn migration(machine: &VirtualMachine) -> &Migration {
    machine.status.as_ref().unwrap().migration.as_ref().unwrap()
}

fn reason(machine: &VirtualMachine) -> (MigrationPhase, &str) {
    (migration(machine).phase, &migration(machine).reason)
}

/// Evicted, and the second pod made and noted.
fn placed() -> (VirtualMachine, Pod) {
    let machine = running(|_| {});
    let going = source(&machine, evicted);
    let (machine, _) = settle(machine, Some(&going), None, 0);
    let made = target(&machine, |_| {});
    let (machine, _) = settle(machine, Some(&going), Some(&made), 1);
    assert_eq!(migration(&machine).pod_uid.as_deref(), Some("p-4"));
    (machine, going)
}

/// The agent has been told to move the VM.
fn under_way() -> (VirtualMachine, Pod) {
    let (machine, going) = placed();
    let waits = target(&machine, awaiting);
    let (machine, _) = settle(machine, Some(&going), Some(&waits), 2);
    assert_eq!(migration(&machine).phase, MigrationPhase::Moving);
    (machine, going)
}

#[test]
fn eviction_is_a_deletion_on_a_cordoned_node_or_by_condition() {
    let machine = running(|_| {});
    let live = source(&machine, |_| {});
    let going = source(&machine, evicted);
    let forced = source(&machine, |pod| {
        evicted(pod);
        pod["metadata"]["deletionGracePeriodSeconds"] = 0.into();
    });
    let said = |reason: &'static str| {
        source(&machine, move |pod| {
            evicted(pod);
            pod["status"]["conditions"] =
                json!([{"type": "DisruptionTarget", "status": "True", "reason": reason}]);
        })
    };
    let api = said("EvictionByEvictionAPI");
    let preempted = said("PreemptionByKubeScheduler");
    for (pod, cordoned, wanted) in [
        (&live, true, false),
        (&going, true, true),
        (&going, false, false),
        (&forced, true, false),
        (&api, false, true),
        (&preempted, false, false),
    ] {
        assert_eq!(
            is_evicted(pod, Some(&node("n1", cordoned))),
            wanted,
            "{:?}",
            pod.status
        );
    }
}

#[test]
fn number_is_spent_before_the_second_pod_and_the_run_keeps_its() {
    let machine = running(|_| {});
    let going = source(&machine, evicted);
    let (machine, act) = settle(machine, Some(&going), None, 0);
    let Some(Act::CreateTarget { epoch: 4, from, .. }) = act else {
        panic!("{act:?}");
    };
    assert_eq!(from, "n1");
    let status = machine.status.as_ref().unwrap();
    assert_eq!((status.epoch, status.run_epoch()), (4, 3));
    assert_eq!(migration(&machine).pod, "web-4");
    let made = target(&machine, |_| {});
    let (machine, act) = settle(machine, Some(&going), Some(&made), 1);
    assert!(matches!(act, Some(Act::Wait(_))), "{act:?}");
    assert_eq!(machine.status.as_ref().unwrap().phase, "Migrating");
    // The node of the second pod waits for the VM, and the agent of the first pod is notified.
    let waits = target(&machine, awaiting);
    let (machine, act) = settle(machine, Some(&going), Some(&waits), 2);
    let wake = Act::Wake {
        pod: "web-3".to_owned(),
        uid: "p-3".to_owned(),
        epoch: 4,
    };
    assert_eq!(act, Some(wake));
    let found = migration(&machine);
    assert_eq!(
        (found.to.as_deref(), found.address.as_deref()),
        (Some("n2"), Some("n2:7443"))
    );
    let woken = change(going, |pod| {
        pod["metadata"]["annotations"][names::LEAVES] = "4".into();
    });
    assert_eq!(settle(machine, Some(&woken), Some(&waits), 3).1, Some(Act::Idle));
}

#[test]
fn what_can_not_be_moved_is_not_tried() {
    type Change = fn(&mut Value);
    let disks: Change = |value| {
        value["spec"]["vm"]["disks"] = json!([{"name": "tmp"}]);
        value["spec"]["volumes"] = json!([{"name": "tmp", "emptyDisk": {"size": "1Gi"}}]);
    };
    let stop: Change = |value| value["spec"]["migration"] = json!({"eviction": "Stop"});
    for (of_machine, of_pod, wanted) in [
        (disks, evicted as Change, "DisksStay"),
        (stop, evicted, "StoppedByPolicy"),
        (
            |_| {},
            |pod| {
                evicted(pod);
                pod["status"]["containerStatuses"][0]["state"] =
                    json!({"waiting": {"reason": "CrashLoopBackOff"}});
            },
            "NotRunning",
        ),
    ] {
        let machine = running(of_machine);
        let going = source(&machine, of_pod);
        let (machine, act) = settle(machine, Some(&going), None, 0);
        assert_eq!((reason(&machine), act), ((MigrationPhase::Failed, wanted), None));
        assert_eq!(machine.status.unwrap().epoch, 3, "no number is spent");
    }
    let mut machine = running(|_| {});
    let going = source(&machine, evicted);
    machine.spec.vm.insert("cpu".to_owned(), json!({"cores": 4}));
    let (machine, _) = settle(machine, Some(&going), None, 0);
    assert_eq!(reason(&machine), (MigrationPhase::Failed, "SpecChanged"));
}

#[test]
fn a_migration_whose_second_pod_finds_no_place_is_given_up() {
    let unschedulable = |pod: &mut Value| {
        pod["status"]["conditions"] = json!([
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes are available"},
        ]);
    };
    let (machine, going) = placed();
    let waits = target(&machine, unschedulable);
    let (machine, act) = settle(machine, Some(&going), Some(&waits), 5);
    assert_eq!(act, Some(Act::Wait(SignedDuration::from_secs(15))));
    let (machine, act) = settle(machine, Some(&going), Some(&waits), 20);
    assert_eq!(
        (reason(&machine), act),
        ((MigrationPhase::Failed, "NoNodeFits"), None)
    );
    assert_eq!(migration(&machine).message, "0/2 nodes are available");
    // One that is placed, and of whose node nothing is heard.
    let (machine, going) = placed();
    let silent = target(&machine, |pod| pod["spec"]["nodeName"] = "n2".into());
    let (machine, _) = settle(machine, Some(&going), Some(&silent), 119);
    let (machine, _) = settle(machine, Some(&going), Some(&silent), 120);
    assert_eq!(reason(&machine), (MigrationPhase::Failed, "NotPlaced"));
}

#[test]
fn until_the_agent_is_told_whatever_goes_ends_the_migration() {
    type Change = fn(&mut Value);
    let nothing: Change = |_| {};
    let table: [(Option<Change>, Option<Change>, &str); 6] = [
        (None, Some(awaiting), "SourceGone"),
        (
            Some(|pod| pod["status"]["phase"] = "Failed".into()),
            Some(awaiting),
            "NotRunning",
        ),
        (
            Some(|pod| pod["metadata"]["deletionGracePeriodSeconds"] = 0.into()),
            Some(awaiting),
            "Forced",
        ),
        (Some(nothing), None, "TargetGone"),
        (Some(nothing), Some(evicted), "TargetGone"),
        (
            Some(nothing),
            Some(|pod| pod["metadata"]["uid"] = "p-other".into()),
            "PodNameTaken",
        ),
    ];
    for (of_source, of_target, wanted) in table {
        let (machine, going) = placed();
        let going = of_source.map(|of_source| change(going, of_source));
        let second = of_target.map(|of_target| target(&machine, of_target));
        let (machine, _) = settle(machine, going.as_ref(), second.as_ref(), 2);
        assert_eq!(reason(&machine), (MigrationPhase::Failed, wanted));
    }
}

#[test]
fn once_it_is_told_only_an_agent_says_what_has_become_of_the_vm() {
    let said = |pod: Pod, status: &'static str| {
        change(pod, move |pod| {
            pod["status"]["conditions"] = json!([
                {"type": "vmmd.dev/migration-3", "status": "True"},
                {"type": "vmmd.dev/migration-4", "status": status, "reason": "Why", "message": "because"},
            ]);
        })
    };
    let (machine, going) = under_way();
    // Neither time nor what becomes of the second pod.
    for second in [
        None,
        Some(target(&machine, evicted)),
        Some(target(&machine, awaiting)),
    ] {
        for over in ["Running", "Failed"] {
            let going = change(going.clone(), |pod| pod["status"]["phase"] = over.into());
            let (machine, _) = settle(machine.clone(), Some(&going), second.as_ref(), 100_000);
            assert_eq!(migration(&machine).phase, MigrationPhase::Moving);
        }
    }
    let stays = said(going.clone(), "False");
    let (failed, _) = settle(machine.clone(), Some(&stays), None, 9);
    assert_eq!(reason(&failed), (MigrationPhase::Failed, "Why"));
    assert_eq!(failed.status.as_ref().unwrap().run_epoch(), 3);
    let waits = target(&machine, awaiting);
    let arrived = said(waits.clone(), "True");
    let left = said(going.clone(), "True");
    for (first, second) in [
        (Some(&left), Some(&waits)),
        (Some(&going), Some(&arrived)),
        (None, Some(&waits)),
    ] {
        let Some(Act::Write(status)) = look(&machine, first, second, 9) else {
            panic!("nothing is written");
        };
        let run = status.run.as_ref().unwrap();
        assert_eq!((&*run.pod, run.pod_uid.as_deref()), ("web-4", Some("p-4")));
        assert_eq!((run.from.as_deref(), status.run_epoch()), (Some("n1"), 4));
        assert_eq!(
            status.migration.as_ref().unwrap().phase,
            MigrationPhase::Succeeded
        );
        assert_eq!(status.node.as_deref(), Some("n2"));
    }
    // Another pod of that name says nothing.
    let other = change(arrived, |pod| pod["metadata"]["uid"] = "p-other".into());
    let (machine, _) = settle(machine, Some(&going), Some(&other), 9);
    assert_eq!(migration(&machine).phase, MigrationPhase::Moving);
}

#[test]
fn a_pod_is_evicted_once_and_a_wish_is_tried_once() {
    let machine = running(|value| value["metadata"]["annotations"] = json!({names::MIGRATE: "monday"}));
    let live = source(&machine, |_| {});
    let (machine, act) = settle(machine, Some(&live), None, 0);
    assert!(matches!(act, Some(Act::CreateTarget { .. })), "{act:?}");
    assert!(!migration(&machine).evicted);
    let refused = target(&machine, |pod| {
        pod["status"] = json!({"phase": "Failed", "message": "no such network"});
    });
    let (machine, _) = settle(machine, Some(&live), Some(&refused), 1);
    let (machine, _) = settle(machine, Some(&live), Some(&refused), 1);
    assert_eq!(migration(&machine).message, "no such network");
    assert_eq!(settle(machine.clone(), Some(&live), None, 2).1, None);
    // Its eviction is another matter.
    let going = source(&machine, evicted);
    let (machine, act) = settle(machine, Some(&going), None, 3);
    assert!(matches!(act, Some(Act::CreateTarget { epoch: 5, .. })), "{act:?}");
    let (machine, act) = settle(machine, Some(&going), None, 200);
    assert_eq!(
        (reason(&machine), act),
        ((MigrationPhase::Failed, "NotPlaced"), None)
    );
}

#[test]
fn the_pods_of_a_migration_that_is_over_are_known() {
    let (machine, going) = under_way();
    let waits = target(&machine, awaiting);
    let (failed, _) = settle(
        machine.clone(),
        Some(&change(going.clone(), |pod| {
            pod["status"]["conditions"] = json!([{"type": "vmmd.dev/migration-4", "status": "False"}]);
        })),
        Some(&waits),
        9,
    );
    let (succeeded, _) = settle(machine.clone(), None, Some(&waits), 9);
    let of = |machine: &VirtualMachine, source: Option<&Pod>, target: Option<&Pod>| {
        let seen = Seen {
            machine,
            pod: None,
            node: None,
            target,
            target_node: None,
            source,
            launcher: false,
            now: at(10),
        };
        left_over(&seen, machine.status.as_ref().unwrap()).and_then(Pod::uid)
    };
    assert_eq!(of(&machine, Some(&going), Some(&waits)), None);
    assert_eq!(of(&failed, None, Some(&waits)).as_deref(), Some("p-4"));
    assert_eq!(of(&succeeded, Some(&going), None).as_deref(), Some("p-3"));
    // Until it is gone there is no other migration.
    let gone_to = change(waits, |pod| {
        pod["status"] = serde_json::to_value(source(&machine, evicted).status).unwrap();
        evicted(pod);
    });
    let act = |left: Option<&Pod>| {
        let cordoned = node("n2", true);
        let seen = Seen {
            machine: &succeeded,
            pod: Some(&gone_to),
            node: Some(&cordoned),
            target: None,
            target_node: None,
            source: left,
            launcher: false,
            now: at(10),
        };
        let plan = placeholder::plan(&succeeded).ok();
        next(
            &seen,
            succeeded.status.as_ref().unwrap(),
            Some(&gone_to),
            plan.as_ref(),
        )
    };
    assert_eq!(act(Some(&going)), None);
    assert!(matches!(act(None), Some(Act::Write(_))));
    let foreign = change(going, |pod| pod["metadata"]["ownerReferences"] = json!([]));
    assert_eq!(of(&succeeded, Some(&foreign), None), None);
}
