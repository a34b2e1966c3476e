use proto::v1::{ExitReason, RunPolicy};
use serde_json::{Value, json};

use super::*;
use crate::placeholder::{
    self, Plan,
    tests::{machine, settings},
};

const NOW: &str = "2026-01-02T03:04:05Z";
const HOST: &str = "192.0.2.1";

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

/// The pod of run 3.
fn pod(change: impl FnOnce(&mut Value)) -> Pod {
    let machine = machine(|_| {});
    let plan = Plan::of(&machine).unwrap();
    let mut value = serde_json::to_value(placeholder::pod(&machine, &plan, 3, &settings()).unwrap()).unwrap();
    value["metadata"]["uid"] = "p-3".into();
    value["status"] = json!({"phase": "Pending"});
    change(&mut value);
    serde_json::from_value(value).unwrap()
}

/// The VirtualMachine when run 3 has that pod.
fn noted(change: impl FnOnce(&mut Value)) -> VirtualMachine {
    let digest = Plan::of(&machine(|_| {})).unwrap().digest();
    machine(|value| {
        value["status"] = json!({"epoch": 3, "run": {"pod": "web-3", "podUid": "p-3", "digest": digest}});
        change(value);
    })
}

fn vm(phase: VmPhase, exit: Option<ExitReason>) -> v1::Vm {
    let status = v1::VmStatus {
        phase: phase.into(),
        last_exit: exit.map(|reason| v1::ExitStatus {
            reason: reason.into(),
            ..v1::ExitStatus::default()
        }),
        counts: Some(v1::RunCounts {
            starts: 1,
            ..v1::RunCounts::default()
        }),
        ..v1::VmStatus::default()
    };
    let spec = v1::VmSpec {
        run_policy: RunPolicy::Manual.into(),
        ..v1::VmSpec::default()
    };
    v1::Vm {
        spec: Some(spec),
        status: Some(status),
        ..v1::Vm::default()
    }
}

fn deleted(at: &str) -> impl FnOnce(&mut Value) {
    move |pod| pod["metadata"]["deletionTimestamp"] = at.into()
}

#[test]
fn a_vm_is_made_once() {
    assert_eq!(for_pod(&pod(|_| {}), None, HOST, at(NOW)), Step::Create);
    // The API server was told that there is one.
    let told = pod(|pod| {
        pod["status"]["containerStatuses"] = json!([{
            "name": "vm", "image": "", "imageID": "", "ready": true, "restartCount": 0, "containerID": "vmmd://v",
        }]);
    });
    let Step::Report(status) = for_pod(&told, None, HOST, at(NOW)) else {
        panic!("it is made again");
    };
    assert_eq!(status.reason.as_deref(), Some("VmRemoved"));
    let over = pod(|pod| pod["status"]["phase"] = "Failed".into());
    assert_eq!(for_pod(&over, None, HOST, at(NOW)), Step::Idle);
}

#[test]
fn a_vm_that_was_never_started_is_started_and_others_are_reported() {
    let mut fresh = vm(VmPhase::Stopped, None);
    fresh.status.as_mut().unwrap().counts = None;
    assert_eq!(for_pod(&pod(|_| {}), Some(&fresh), HOST, at(NOW)), Step::Start);
    let ran = vm(VmPhase::Stopped, Some(ExitReason::GuestShutdown));
    let Step::Report(status) = for_pod(&pod(|_| {}), Some(&ran), HOST, at(NOW)) else {
        panic!("nothing is reported");
    };
    assert_eq!(status.phase.as_deref(), Some("Succeeded"));
    let reported = pod(|pod| pod["status"] = serde_json::to_value(&*status).unwrap());
    assert_eq!(for_pod(&reported, Some(&ran), HOST, at(NOW)), Step::Idle);
}

#[test]
fn a_deleted_pod_goes_after_its_vm() {
    let ahead = "2026-01-02T03:04:35Z";
    let past = "2026-01-02T03:03:00Z";
    let just = "2026-01-02T03:04:03Z";
    let seconds = |seconds| Duration::from_secs(seconds);
    let table = [
        (None, ahead, Step::Release),
        (Some(VmPhase::Running), ahead, Step::Stop(seconds(30))),
        (Some(VmPhase::Paused), ahead, Step::Stop(seconds(30))),
        (Some(VmPhase::Starting), ahead, Step::Stop(seconds(30))),
        (Some(VmPhase::Running), past, Step::Remove),
        (Some(VmPhase::Stopping), ahead, Step::Wait(seconds(35))),
        (Some(VmPhase::Stopping), just, Step::Wait(seconds(3))),
        (Some(VmPhase::Stopping), past, Step::Remove),
        (Some(VmPhase::Stopped), ahead, Step::Remove),
        (Some(VmPhase::Failed), ahead, Step::Remove),
        (Some(VmPhase::Terminating), past, Step::Idle),
    ];
    for (phase, deadline, wanted) in table {
        let vm = phase.map(|phase| vm(phase, None));
        let step = for_pod(&pod(deleted(deadline)), vm.as_ref(), HOST, at(NOW));
        assert_eq!(step, wanted, "{phase:?} {deadline}");
    }
}

#[test]
fn the_vm_of_a_pod_that_others_have_ended_is_stopped() {
    let over = pod(|pod| pod["status"]["phase"] = "Failed".into());
    let running = vm(VmPhase::Running, None);
    assert_eq!(
        for_pod(&over, Some(&running), HOST, at(NOW)),
        Step::Stop(Duration::from_secs(60))
    );
    let stopped = vm(VmPhase::Stopped, Some(ExitReason::Stopped));
    assert_eq!(for_pod(&over, Some(&stopped), HOST, at(NOW)), Step::Idle);
}

#[test]
fn pods_that_are_no_placeholders_run_nothing_and_can_be_deleted() {
    let strip = |pod: &mut Value| pod["metadata"]["labels"] = json!({});
    let Step::Report(status) = for_pod(&pod(strip), None, HOST, at(NOW)) else {
        panic!("nothing is reported");
    };
    assert_eq!(status.phase.as_deref(), Some("Pending"));
    let step = for_pod(
        &pod(|pod| {
            strip(pod);
            deleted(NOW)(pod);
        }),
        None,
        HOST,
        at(NOW),
    );
    assert_eq!(step, Step::Release);
}

#[test]
fn without_a_pod_the_api_server_is_asked_first() {
    assert_eq!(without_pod(&vm(VmPhase::Running, None)), Step::CheckPod);
    assert_eq!(without_pod(&vm(VmPhase::Terminating, None)), Step::Idle);
}

#[test]
fn the_pod_that_is_noted_gets_the_vm() {
    let Admission::Admit(vm, _) = admit(&pod(|_| {}), Some(&noted(|_| {})), "n1") else {
        panic!("it is not admitted");
    };
    let metadata = vm.metadata.unwrap();
    let labels: Vec<_> = metadata
        .labels
        .iter()
        .map(|(key, value)| (&**key, &**value))
        .collect();
    let wanted = [
        ("vmmd.dev/epoch", "3"),
        ("vmmd.dev/machine-uid", "u-1"),
        ("vmmd.dev/node", "n1"),
        ("vmmd.dev/pod-uid", "p-3"),
    ];
    assert_eq!(labels, wanted);
    assert_eq!(metadata.annotations["vmmd.dev/pod"], "shop/web-3");
}

#[test]
fn no_other_pod_gets_it() {
    type Change = Box<dyn FnOnce(&mut Value)>;
    let table: [(Change, Change, Option<&str>); 8] = [
        (Box::new(|_| {}), Box::new(|vm| vm["status"] = json!({})), None),
        (
            Box::new(|_| {}),
            Box::new(|vm| vm["status"]["run"]["podUid"] = Value::Null),
            None,
        ),
        (
            Box::new(|_| {}),
            Box::new(|vm| vm["status"]["epoch"] = 4.into()),
            Some("OldEpoch"),
        ),
        (
            Box::new(|pod| pod["metadata"]["uid"] = "p-late".into()),
            Box::new(|_| {}),
            Some("OtherPod"),
        ),
        (
            Box::new(|pod| pod["metadata"]["annotations"][names::MANIFEST] = "{}".into()),
            Box::new(|_| {}),
            Some("ManifestChanged"),
        ),
        // Whoever may change pods reads no Secrets by that.
        (
            Box::new(|pod| pod["metadata"]["annotations"][names::SOURCES] = "{}".into()),
            Box::new(|_| {}),
            Some("ManifestChanged"),
        ),
        (
            Box::new(|pod| pod["metadata"]["labels"][names::EPOCH] = "x".into()),
            Box::new(|_| {}),
            Some("NoEpoch"),
        ),
        // The watch of the pod is ahead of what the API server said of the VirtualMachine.
        (
            Box::new(|pod| pod["metadata"]["labels"][names::EPOCH] = "5".into()),
            Box::new(|_| {}),
            None,
        ),
    ];
    for (index, (change_pod, change_machine, wanted)) in table.into_iter().enumerate() {
        let admission = admit(&pod(change_pod), Some(&noted(change_machine)), "n1");
        match (admission, wanted) {
            (Admission::NotYet, None) => {}
            (Admission::Refuse { reason, .. }, Some(wanted)) => assert_eq!(reason, wanted, "{index}"),
            (other, _) => panic!("{index}: {other:?}"),
        }
    }
    let Admission::Refuse { reason, .. } = admit(&pod(|_| {}), None, "n1") else {
        panic!("it is admitted");
    };
    assert_eq!(reason, "NoVirtualMachine");
}

#[test]
fn a_vm_that_always_runs_can_be_stopped_by_the_agent() {
    let change = |value: &mut Value| value["spec"]["vm"]["runPolicy"] = "always_on".into();
    let always = machine(change);
    let plan = Plan::of(&always).unwrap();
    let machine = noted(|value| {
        change(value);
        value["status"]["run"]["digest"] = plan.digest().into();
    });
    let pod = pod(|pod| pod["metadata"]["annotations"][names::MANIFEST] = plan.manifest.clone().into());
    let Admission::Admit(vm, _) = admit(&pod, Some(&machine), "n1") else {
        panic!("it is not admitted");
    };
    assert_eq!(vm.spec.unwrap().run_policy(), RunPolicy::AlwaysOnUnlessStopped);
}
