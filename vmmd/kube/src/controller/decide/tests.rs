use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::*;
use crate::run::tests::{machine, settings};

const NOW: &str = "2026-01-02T03:04:05Z";

fn now() -> Timestamp {
    NOW.parse().unwrap()
}

fn seen<'a>(machine: &'a VirtualMachine, pod: Option<&'a Pod>, now: Timestamp) -> Seen<'a> {
    Seen {
        machine,
        pod,
        cordoned: false,
        target: None,
        source: None,
        budget: Some(false),
        migration_port: 7443,
        now,
    }
}

fn look(machine: &VirtualMachine, pod: Option<&Pod>) -> Act {
    next(&seen(machine, pod, now()))
}

/// A VirtualMachine with the finalizer and this status.
fn with(policy: &str, status: Value) -> VirtualMachine {
    machine(|value| {
        value["metadata"]["finalizers"] = json!([names::POD_GONE]);
        value["spec"]["vm"]["runPolicy"] = policy.into();
        value["status"] = status;
    })
}

fn run(uid: Option<&str>, end: Option<&str>, of: &VirtualMachine) -> Value {
    let digest = launcher::plan(of).unwrap().digest();
    json!({"epoch": 3, "run": {"pod": "web-3", "podUid": uid, "digest": digest, "end": end}})
}

/// In run 3, which has a pod with this uid, and ended like that.
fn in_run(policy: &str, uid: Option<&str>, end: Option<&str>) -> VirtualMachine {
    let status = run(uid, end, &with(policy, json!({})));
    with(policy, status)
}

fn pod_of(machine: &VirtualMachine, uid: &str, change: impl FnOnce(&mut Value)) -> Pod {
    let plan = launcher::plan(machine).unwrap();
    let pod = launcher::pod(machine, &plan, 3, &settings(), &launcher::Claims::new()).unwrap();
    let mut value = serde_json::to_value(pod).unwrap();
    value["metadata"]["uid"] = uid.into();
    value["status"] = json!({"phase": "Pending"});
    change(&mut value);
    serde_json::from_value(value).unwrap()
}

/// Deletes the pod of run 3 with this uid.
fn deletes(uid: &str) -> Act {
    Act::DeletePod {
        pod: "web-3".into(),
        uid: uid.into(),
    }
}

/// The status of a pod whose launcher has this state.
fn container(state: &Value) -> Value {
    json!({"phase": "Running", "containerStatuses": [
        {"name": "vm", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state},
    ]})
}

/// The status of a pod whose launcher has ended.
fn ended(code: i32, message: &str) -> Value {
    container(&json!({"terminated": {"exitCode": code, "message": message}}))
}

/// Carries out what only changes the VirtualMachine, until something else is to be done.
fn settle(mut machine: VirtualMachine, pod: Option<&Pod>) -> (VirtualMachine, Act) {
    for _ in 0..9 {
        match look(&machine, pod) {
            Act::Write(status) => machine.status = Some(*status),
            act => return (machine, act),
        }
    }
    panic!("it never settles: {:?}", machine.status);
}

#[test]
fn run_number_is_written_before_the_pod_and_the_pod_after() {
    let fresh = machine(|_| {});
    assert_eq!(look(&fresh, None), Act::AddFinalizer);
    let fresh = with("always_on", json!({}));
    let Act::Write(status) = look(&fresh, None) else {
        panic!("no write");
    };
    assert_eq!((status.epoch, &*status.run.as_ref().unwrap().pod), (1, "web-1"));
    assert_eq!(status.run.as_ref().unwrap().pod_uid, None);
    let (machine, act) = settle(fresh, None);
    assert!(matches!(act, Act::CreatePod(_)), "{act:?}");
    let pod = {
        let plan = launcher::plan(&machine).unwrap();
        let mut pod = launcher::pod(&machine, &plan, 1, &settings(), &launcher::Claims::new()).unwrap();
        pod.metadata.uid = Some("p-1".to_owned());
        pod
    };
    let (machine, act) = settle(machine, Some(&pod));
    assert_eq!(act, Act::Idle);
    let status = machine.status.unwrap();
    assert_eq!(status.run.unwrap().pod_uid.as_deref(), Some("p-1"));
    assert_eq!(status.phase, "Scheduling");
}

#[test]
fn the_run_policy_says_what_follows_an_end() {
    // Policy, end of the launcher, and whether the pod makes room for another run.
    let (off, stopped) = ("GuestShutdown: off", "Stopped: by a client");
    let table = [
        ("always_on", off, true),
        ("always_on", stopped, true),
        ("always_on_unless_stopped", off, true),
        ("always_on_unless_stopped", stopped, false),
        ("rerun_on_failure", off, false),
        ("manual", off, false),
    ];
    for (policy, message, again) in table {
        let machine = in_run(policy, Some("p-3"), None);
        let pod = pod_of(&machine, "p-3", |pod| {
            pod["spec"]["nodeName"] = "n1".into();
            pod["status"] = ended(0, message);
        });
        let (machine, act) = settle(machine, Some(&pod));
        assert_eq!(
            act,
            if again { deletes("p-3") } else { Act::Idle },
            "{policy} {message}"
        );
        // No run begins as long as the pod exists.
        assert_eq!(machine.status.as_ref().unwrap().epoch, 3);
        let (machine, _) = settle(machine, None);
        assert_eq!(
            machine.status.unwrap().epoch,
            if again { 4 } else { 3 },
            "{policy}"
        );
    }
}

#[test]
fn a_pod_that_was_deleted_is_a_run_that_was_lost() {
    for (policy, again) in [
        ("always_on", true),
        ("always_on_unless_stopped", true),
        ("rerun_on_failure", true),
        ("manual", false),
        ("always_off", false),
    ] {
        let (machine, _) = settle(in_run(policy, Some("p-3"), None), None);
        assert_eq!(
            machine.status.unwrap().epoch,
            if again { 4 } else { 3 },
            "{policy}"
        );
    }
}

#[test]
fn runs_that_fail_wait_longer_each_time() {
    let machine = in_run("always_on", Some("p-3"), None);
    let pod = pod_of(&machine, "p-3", |pod| {
        pod["spec"]["nodeName"] = "n1".into();
        pod["status"] = ended(1, "GuestPanic: it panicked");
    });
    let (mut machine, act) = settle(machine, Some(&pod));
    assert_eq!(act, Act::Wait(SignedDuration::from_secs(10)));
    let status = machine.status.as_mut().unwrap();
    assert_eq!(status.failures, 1);
    status.next_run_time = Some(NOW.to_owned());
    let (machine, act) = settle(machine, Some(&pod));
    assert_eq!(act, deletes("p-3"));
    let mut status = machine.status.unwrap();
    for (failures, wait) in [
        (1, "2026-01-02T03:04:25Z"),
        (5, "2026-01-02T03:09:05Z"),
        (99, "2026-01-02T03:09:05Z"),
    ] {
        status.failures = failures;
        note_end(&mut status, now());
        assert_eq!(status.next_run_time.as_deref(), Some(wait));
    }
}

#[test]
fn a_pod_on_a_node_that_does_not_report_is_not_replaced() {
    let machine = in_run("always_on", Some("p-3"), None);
    let pod = pod_of(&machine, "p-3", |pod| {
        pod["spec"]["nodeName"] = "n1".into();
        // The kubelet has written the second condition, and the control plane the first one.
        pod["status"] = json!({"phase": "Running", "conditions": [
            {"type": "Ready", "status": "False"},
            {"type": "ContainersReady", "status": "True"},
        ]});
    });
    let (machine, act) = settle(machine, Some(&pod));
    assert_eq!(act, Act::Idle);
    let status = machine.status.unwrap();
    assert_eq!((&*status.phase, status.epoch), ("Unknown", 3));
    let ready = status.conditions.iter().find(|one| one.kind == "Ready").unwrap();
    assert_eq!((&*ready.status, &*ready.reason), ("Unknown", "NodeUnreachable"));
    assert!(
        ready.message.contains("not started elsewhere"),
        "{}",
        ready.message
    );
}

#[test]
fn late_pod_of_the_same_number_is_deleted_and_a_run_begins() {
    let machine = in_run("always_on", Some("p-3"), None);
    let late = pod_of(&machine, "p-late", |_| {});
    assert_eq!(look(&machine, Some(&late)), deletes("p-late"));
    let going = pod_of(&machine, "p-late", |pod| {
        pod["metadata"]["deletionTimestamp"] = NOW.into();
    });
    let (machine, _) = settle(machine, Some(&going));
    assert_eq!(machine.status.unwrap().epoch, 4);
}

#[test]
fn a_deleted_machine_waits_for_its_pod() {
    let mut machine = in_run("always_on", Some("p-3"), None);
    machine.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now()));
    let pod = pod_of(&machine, "p-3", |_| {});
    let (_, act) = settle(machine.clone(), Some(&pod));
    assert_eq!(act, deletes("p-3"));
    let going = pod_of(&machine, "p-3", |pod| {
        pod["metadata"]["deletionTimestamp"] = NOW.into();
    });
    let (machine, act) = settle(machine, Some(&going));
    assert_eq!(act, Act::Idle);
    assert_eq!(machine.status.as_ref().unwrap().phase, "Stopping");
    assert_eq!(look(&machine, None), Act::RemoveFinalizer);
}

#[test]
fn a_start_by_annotation_begins_one_run() {
    let mut machine = with("manual", json!({}));
    let (same, act) = settle(machine.clone(), None);
    assert_eq!((same.status.unwrap().epoch, act), (0, Act::Idle));
    machine
        .annotations_mut()
        .insert(names::START.to_owned(), "monday".to_owned());
    let (machine, act) = settle(machine, None);
    assert!(matches!(act, Act::CreatePod(_)));
    assert_eq!(machine.status.as_ref().unwrap().start.as_deref(), Some("monday"));
    let mut ended = machine;
    let status = ended.status.as_mut().unwrap();
    status.run.as_mut().unwrap().pod_uid = Some("p-1".to_owned());
    let (ended, act) = settle(ended, None);
    assert_eq!((ended.status.unwrap().epoch, act), (1, Act::Idle));
}

#[test]
fn a_policy_of_off_ends_the_run() {
    let machine = in_run("always_off", Some("p-3"), None);
    let pod = pod_of(&machine, "p-3", |pod| pod["status"] = json!({"phase": "Running"}));
    let (_, act) = settle(machine, Some(&pod));
    assert_eq!(act, deletes("p-3"));
}

#[test]
fn a_spec_that_vmmd_refuses_is_shown_and_makes_no_pod() {
    let mut bad = with("manual", json!({}));
    bad.spec.vm.insert("memory".to_owned(), json!({"sizeBytes": 1}));
    let (bad, act) = settle(bad, None);
    assert_eq!(act, Act::Idle);
    let status = bad.status.unwrap();
    assert_eq!((&*status.phase, status.epoch), ("Invalid", 0));
    let valid = status.conditions.iter().find(|one| one.kind == "Valid").unwrap();
    assert!(
        valid.message.contains("spec.vm.memory.sizeBytes"),
        "{}",
        valid.message
    );
}

#[test]
fn spec_change_before_the_pod_takes_another_number() {
    let mut machine = in_run("always_on", None, None);
    assert!(matches!(settle(machine.clone(), None).1, Act::CreatePod(_)));
    machine.spec.vm.insert("cpu".to_owned(), json!({"cores": 4}));
    let (machine, act) = settle(machine, None);
    assert!(matches!(act, Act::CreatePod(_)));
    assert_eq!(machine.status.unwrap().epoch, 4);
}

#[test]
fn times_of_conditions_stay_as_long_as_their_status_does() {
    let (machine, _) = settle(with("manual", json!({})), None);
    let before = machine.status.clone().unwrap();
    let later = now() + SignedDuration::from_secs(5);
    let seen = seen(&machine, None, later);
    assert_eq!(next(&seen), Act::Idle);
    assert_eq!(status::of(&seen, &before, None, None), before);
}

#[test]
fn foreign_pod_with_the_name_of_the_run_is_reported() {
    let machine = in_run("always_on", None, None);
    let other: Pod = serde_json::from_value(json!({
        "metadata": {"name": "web-3", "uid": "p-9", "labels": {"app": "web"}},
        "status": {"phase": "Running"},
    }))
    .unwrap();
    let Act::Write(status) = look(&machine, Some(&other)) else {
        panic!("nothing is told");
    };
    let before = machine.status.clone().unwrap();
    let said = status::news(&before, &status);
    let [(_, reason, message)] = said.as_slice() else {
        panic!("{said:?}");
    };
    assert_eq!(reason, "PodNameTaken");
    assert!(message.contains("web-3"), "{message}");
    let (machine, act) = settle(machine, Some(&other));
    assert!(matches!(act, Act::Wait(_)), "{act:?}");
    // It is reported once.
    let now = machine.status.clone().unwrap();
    assert_eq!(status::news(&status, &now), []);
    // When it is gone, the run begins, under the same number.
    let (machine, act) = settle(machine, None);
    assert!(matches!(act, Act::CreatePod(_)), "{act:?}");
    let status = machine.status.unwrap();
    assert_eq!(status.epoch, 3);
    assert!(status.conditions.iter().all(|one| one.reason != "PodNameTaken"));
}

#[test]
fn no_run_begins_while_a_launcher_pod_exists() {
    type Change = Box<dyn Fn(&mut Value)>;
    let states = |value: Value| -> Change { Box::new(move |pod| pod["status"] = container(&value)) };
    let unbound: Change = Box::new(|pod| pod["spec"]["nodeName"] = Value::Null);
    let lost: Change = Box::new(|pod| pod["status"]["phase"] = "Failed".into());
    let table = [
        ("unbound", unbound),
        ("bound", Box::new(|_| {})),
        (
            "created",
            states(json!({"waiting": {"reason": "ContainerCreating"}})),
        ),
        ("running", states(json!({"running": {}}))),
        (
            "ended",
            states(json!({"terminated": {"exitCode": 0, "message": "GuestShutdown: off"}})),
        ),
        (
            "failed",
            states(json!({"terminated": {"exitCode": 1, "message": "GuestPanic: it panicked"}})),
        ),
        ("lost", lost),
    ];
    for (what, change) in &table {
        for deletion in [None, Some(30), Some(0)] {
            let mut machine = in_run("always_on", Some("p-3"), None);
            let pod = pod_of(&machine, "p-3", |pod| {
                pod["spec"]["nodeName"] = "n1".into();
                pod["status"] = json!({"phase": "Running"});
                change(pod);
                if let Some(grace) = deletion {
                    pod["metadata"]["deletionTimestamp"] = NOW.into();
                    pod["metadata"]["deletionGracePeriodSeconds"] = grace.into();
                }
            });
            let act = loop {
                match look(&machine, Some(&pod)) {
                    Act::Write(status) => machine.status = Some(*status),
                    act => break act,
                }
            };
            let status = machine.status.as_ref().unwrap();
            assert_eq!(status.epoch, 3, "{what} {deletion:?}");
            // A pod whose guest has powered off makes room for the next run.
            let wanted = match (*what, deletion) {
                ("ended", None) => deletes("p-3"),
                ("failed", None) => Act::Wait(SignedDuration::from_secs(10)),
                _ => Act::Idle,
            };
            assert_eq!(act, wanted, "{what} {deletion:?}");
        }
    }
    // When the API server has no pod any more, the next run begins.
    let Act::Write(status) = look(&in_run("always_on", Some("p-3"), None), None) else {
        panic!("no run");
    };
    assert_eq!(status.epoch, 4);
}
