use serde_json::{Value, json};
use vmmd_api::v1::{ExitReason, RunPolicy};

use super::*;
use crate::{
    placeholder,
    run::tests::{machine, settings},
};

const NOW: &str = "2026-01-02T03:04:05Z";
const PLACE: Place<'_> = Place {
    node: "n1",
    host: "192.0.2.1",
};

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn look(pod: &Pod, vm: Option<&v1::Vm>) -> Step {
    for_pod(pod, vm, PLACE, None, at(NOW))
}

/// The setting without --no-node-files.
fn all() -> Allowed {
    Allowed {
        everything: true,
        ports: None,
    }
}

/// The pod of run 3.
fn pod(change: impl FnOnce(&mut Value)) -> Pod {
    let machine = machine(|_| {});
    let plan = placeholder::plan(&machine).unwrap();
    let mut value = serde_json::to_value(placeholder::pod(&machine, &plan, 3, &settings()).unwrap()).unwrap();
    value["metadata"]["uid"] = "p-3".into();
    value["status"] = json!({"phase": "Pending"});
    change(&mut value);
    serde_json::from_value(value).unwrap()
}

/// The VirtualMachine when run 3 has that pod.
fn noted(change: impl FnOnce(&mut Value)) -> VirtualMachine {
    let digest = placeholder::plan(&machine(|_| {})).unwrap().digest();
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
    assert_eq!(look(&pod(|_| {}), None), Step::Create);
    // The API server has a report about a VM.
    let told = pod(|pod| {
        pod["status"]["containerStatuses"] = json!([{
            "name": "vm", "image": "", "imageID": "", "ready": true, "restartCount": 0, "containerID": "vmmd://v",
        }]);
    });
    // It was moved, or removed.
    assert_eq!(look(&told, None), Step::Missing);
    let over = pod(|pod| pod["status"]["phase"] = "Failed".into());
    assert_eq!(look(&over, None), Step::Idle);
}

#[test]
fn vm_that_was_never_started_is_started_others_are_reported() {
    let mut fresh = vm(VmPhase::Stopped, None);
    fresh.status.as_mut().unwrap().counts = None;
    assert_eq!(look(&pod(|_| {}), Some(&fresh)), Step::Start);
    let ran = vm(VmPhase::Stopped, Some(ExitReason::GuestShutdown));
    let Step::Report(status) = look(&pod(|_| {}), Some(&ran)) else {
        panic!("nothing is reported");
    };
    assert_eq!(status.phase.as_deref(), Some("Succeeded"));
    let reported = pod(|pod| pod["status"] = serde_json::to_value(&*status).unwrap());
    assert_eq!(look(&reported, Some(&ran)), Step::Idle);
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
        let pod = pod(deleted(deadline));
        let step = for_pod(&pod, vm.as_ref(), PLACE, Some(at(deadline)), at(NOW));
        assert_eq!(step, wanted, "{phase:?} {deadline}");
    }
}

#[test]
fn guest_of_a_deleted_pod_is_stopped_only_if_it_stays() {
    let ahead = deleted("2026-01-02T03:04:35Z");
    let evicted = pod(ahead);
    for (phase, wanted) in [
        (VmPhase::Running, Step::Leave),
        (VmPhase::Stopping, Step::Leave),
        (VmPhase::Stopped, Step::Remove),
    ] {
        assert_eq!(look(&evicted, Some(&vm(phase, None))), wanted, "{phase:?}");
    }
    let forced = pod(|pod| {
        deleted(NOW)(pod);
        pod["metadata"]["deletionGracePeriodSeconds"] = 0.into();
    });
    let running = vm(VmPhase::Running, None);
    assert_eq!(look(&forced, Some(&running)), Step::Remove);
    let later = Some(at("2026-01-02T03:05:05Z"));
    assert_eq!(
        for_pod(&forced, Some(&running), PLACE, later, at(NOW)),
        Step::Remove
    );
    // A pod whose VM is to leave by request, until the result is reported.
    let leaves = |said: &'static str| {
        pod(move |pod| {
            pod["metadata"]["annotations"][names::LEAVES] = "4".into();
            pod["status"]["conditions"] = json!([{"type": said, "status": "False"}]);
        })
    };
    let leaving = leaves("vmmd.dev/migration-3");
    assert_eq!(look(&leaving, Some(&running)), Step::Leave);
    assert_eq!(look(&leaving, None), Step::Missing);
    let mut over = leaving;
    over.status.as_mut().unwrap().phase = Some("Failed".to_owned());
    let failed = vm(VmPhase::Failed, Some(ExitReason::VmmError));
    assert_eq!(look(&over, Some(&failed)), Step::Leave);
    assert_eq!(look(&over, None), Step::Missing);
    over.metadata.deletion_timestamp = evicted.metadata.deletion_timestamp;
    assert_eq!(look(&over, Some(&failed)), Step::Leave);
    let step = look(&leaves("vmmd.dev/migration-4"), Some(&running));
    assert!(matches!(step, Step::Report(_)), "{step:?}");
}

#[test]
fn a_vm_of_another_node_is_that_of_the_pod_that_it_is_moved_to() {
    let with = |agent: &str, mark: Option<&str>| {
        let mut vm = vm(VmPhase::Paused, None);
        let metadata = vm.metadata.get_or_insert_default();
        metadata.labels.insert(names::AGENT.to_owned(), agent.to_owned());
        metadata
            .labels
            .insert(names::POD_UID.to_owned(), "p-3".to_owned());
        let mark = mark.map(|mark| (names::MOVING.to_owned(), mark.to_owned()));
        metadata.annotations.extend(mark);
        vm
    };
    let mark = Some("shop/web-4/p-4");
    for (vm, key, incoming) in [
        (with("n1", None), Some("p-3"), false),
        (with("n1", mark), Some("p-3"), false),
        (with("n2", mark), Some("p-4"), true),
        (with("n2", None), None, false),
    ] {
        assert_eq!(super::key(&vm, "n1").as_deref(), key, "{vm:?}");
        assert_eq!(is_incoming(&vm, "n1"), incoming, "{vm:?}");
    }
    let incoming = with("n2", mark);
    assert_eq!(look(&pod(|_| {}), Some(&incoming)), Step::TakeOver);
    assert_eq!(look(&pod(deleted(NOW)), Some(&incoming)), Step::TakeOver);
}

fn under_way(phase: &str) -> Value {
    json!({"phase": phase, "epoch": 4, "pod": "web-4", "podUid": "p-4", "sourcePod": "web-3", "sourceUid": "p-3",
        "evicted": true, "from": "n1", "endTime": "2026-01-02T03:04:00Z"})
}

/// Run 3 has the pod, and its VM is to be moved to another one.
fn migrates(phase: &str) -> VirtualMachine {
    noted(|value| {
        value["status"]["epoch"] = 4.into();
        value["status"]["run"]["epoch"] = 3.into();
        value["status"]["migration"] = under_way(phase);
    })
}

#[test]
fn what_the_controller_decides_becomes_of_an_evicted_vm() {
    let grace = |pod: &mut Value| pod["metadata"]["deletionGracePeriodSeconds"] = 30.into();
    let going = |at: &'static str| {
        pod(move |pod| {
            deleted(at)(pod);
            grace(pod);
        })
    };
    // It was deleted five seconds, and half a minute ago. The guest has all of its time from now on.
    let (just, long) = ("2026-01-02T03:04:30Z", "2026-01-02T03:04:05Z");
    let stop = || Departure::Stop(at("2026-01-02T03:04:35Z"));
    let status = |machine: VirtualMachine| machine.status.unwrap();
    let later = noted(|value| value["status"]["epoch"] = 4.into());
    let table = [
        (just, false, status(noted(|_| {})), stop()),
        (long, false, status(noted(|_| {})), stop()),
        (just, true, status(noted(|_| {})), Departure::Wait),
        // No controller works.
        (long, true, status(noted(|_| {})), stop()),
        (just, true, status(migrates("Placing")), Departure::Wait),
        (just, true, status(migrates("Moving")), Departure::Move),
        (long, false, status(migrates("Moving")), Departure::Move),
        (just, true, status(migrates("Failed")), stop()),
        (long, true, status(migrates("Failed")), stop()),
        // There is another run.
        (just, true, status(later), stop()),
    ];
    for (index, (time, evicted, status, wanted)) in table.into_iter().enumerate() {
        assert_eq!(
            departure(&going(time), &status, evicted, at(NOW)),
            wanted,
            "{index}"
        );
    }
    // The clock of this node is behind that of the API server.
    let ahead = "2026-01-02T03:05:05Z";
    assert_eq!(stop_deadline(&going(ahead), at(ahead), at(NOW)), at(ahead));
    let live = pod(|_| {});
    for (phase, wanted) in [("Moving", Departure::Move), ("Failed", Departure::Stay)] {
        assert_eq!(departure(&live, &status(migrates(phase)), false, at(NOW)), wanted);
    }
}

#[test]
fn no_vm_is_made_for_a_pod_of_a_migration() {
    let target = || {
        pod(|pod| {
            pod["metadata"]["name"] = "web-4".into();
            pod["metadata"]["uid"] = "p-4".into();
            pod["metadata"]["labels"][names::EPOCH] = "4".into();
        })
    };
    let admit = |pod: &Pod, machine: &VirtualMachine| admit(pod, Some(machine), "n1", &all());
    for phase in ["Placing", "Moving"] {
        let machine = migrates(phase);
        assert_eq!(admit(&target(), &machine), Admission::Await("n1".to_owned()));
    }
    // The VM may have left.
    assert_eq!(admit(&pod(|_| {}), &migrates("Moving")), Admission::Moving);
    let Admission::Refuse { reason, .. } = admit(&target(), &migrates("Failed")) else {
        panic!("it is not refused");
    };
    assert_eq!(reason, "OldEpoch");
    let mut moved = migrates("Succeeded");
    let status = moved.status.as_mut().unwrap();
    let run = status.run.as_mut().unwrap();
    (run.pod, run.pod_uid, run.epoch) = ("web-4".to_owned(), Some("p-4".to_owned()), Some(4));
    run.from = Some("n1".to_owned());
    assert_eq!(admit(&target(), &moved), Admission::TakeOver);
    let Admission::Refuse { reason, .. } = admit(&pod(|_| {}), &moved) else {
        panic!("it is not refused");
    };
    assert_eq!(reason, "OldEpoch");
}

#[test]
fn the_vm_of_a_pod_that_others_have_ended_is_stopped() {
    let over = pod(|pod| pod["status"]["phase"] = "Failed".into());
    let running = vm(VmPhase::Running, None);
    assert_eq!(look(&over, Some(&running)), Step::Stop(Duration::from_secs(60)));
    let stopped = vm(VmPhase::Stopped, Some(ExitReason::Stopped));
    assert_eq!(look(&over, Some(&stopped)), Step::Idle);
}

#[test]
fn pods_that_are_no_placeholders_run_nothing_and_can_be_deleted() {
    let strip = |pod: &mut Value| {
        pod["metadata"]["labels"] = json!({});
        pod["metadata"]["finalizers"] = json!([]);
    };
    let Step::Report(status) = look(&pod(strip), None) else {
        panic!("nothing is reported");
    };
    assert_eq!(status.phase.as_deref(), Some("Pending"));
    let step = look(
        &pod(|pod| {
            strip(pod);
            deleted(NOW)(pod);
        }),
        None,
    );
    assert_eq!(step, Step::Release);
}

#[test]
fn a_pod_stays_as_long_as_its_vm_whatever_becomes_of_its_labels() {
    let running = vm(VmPhase::Running, None);
    for finalizers in [json!([names::VM_GONE]), json!([])] {
        let stripped = |change: fn(&mut Value)| {
            pod(|pod| {
                pod["metadata"]["labels"] = json!({});
                pod["metadata"]["finalizers"] = finalizers.clone();
                change(pod);
            })
        };
        let gone = stripped(|pod| deleted("2026-01-02T03:04:35Z")(pod));
        assert_eq!(look(&gone, Some(&running)), Step::Leave, "{finalizers}");
        let deadline = Some(at("2026-01-02T03:04:35Z"));
        let step = for_pod(&gone, Some(&running), PLACE, deadline, at(NOW));
        assert_eq!(step, Step::Stop(Duration::from_secs(30)), "{finalizers}");
        let step = look(&stripped(|_| {}), Some(&running));
        assert!(matches!(step, Step::Report(_)), "{finalizers}: {step:?}");
    }
}

#[test]
fn without_a_pod_the_api_server_is_asked_first() {
    assert_eq!(without_pod(&vm(VmPhase::Running, None)), Step::CheckPod);
    assert_eq!(without_pod(&vm(VmPhase::Terminating, None)), Step::Idle);
}

#[test]
fn the_pod_that_is_noted_gets_the_vm() {
    let Admission::Admit(vm, _) = admit(&pod(|_| {}), Some(&noted(|_| {})), "n1", &all()) else {
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
        // The permission to change pods gives no access to Secrets.
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
        // The watch of the pod is ahead of the API server's answer about the VirtualMachine.
        (
            Box::new(|pod| pod["metadata"]["labels"][names::EPOCH] = "5".into()),
            Box::new(|_| {}),
            None,
        ),
    ];
    for (index, (change_pod, change_machine, wanted)) in table.into_iter().enumerate() {
        let admission = admit(&pod(change_pod), Some(&noted(change_machine)), "n1", &all());
        match (admission, wanted) {
            (Admission::NotYet, None) => {}
            (Admission::Refuse { reason, .. }, Some(wanted)) => assert_eq!(reason, wanted, "{index}"),
            (other, _) => panic!("{index}: {other:?}"),
        }
    }
    let Admission::Refuse { reason, .. } = admit(&pod(|_| {}), None, "n1", &all()) else {
        panic!("it is admitted");
    };
    assert_eq!(reason, "NoVirtualMachine");
}

#[test]
fn vm_that_names_files_of_the_node_is_refused_by_default() {
    let admitted = |change: &dyn Fn(&mut Value), everything: bool| {
        let machine = machine(|value| {
            value["spec"]["vm"]["boot"] = json!({"fromDisk": {}});
            value["spec"]["vm"]["disks"] = json!([{"name": "root"}]);
            value["spec"]["vm"]["nics"] = json!([{"name": "eth0", "network": "vmmd0"}]);
            value["spec"]["volumes"] = json!([{"name": "root", "emptyDisk": {"size": "1Gi"}}]);
            change(&mut value["spec"]["vm"]);
        });
        let plan = placeholder::plan(&machine).unwrap();
        let pod = placeholder::pod(&machine, &plan, 3, &settings()).unwrap();
        let mut pod = serde_json::to_value(pod).unwrap();
        pod["metadata"]["uid"] = "p-3".into();
        let machine = noted(|value| value["status"]["run"]["digest"] = plan.digest().into());
        match admit(
            &serde_json::from_value(pod).unwrap(),
            Some(&machine),
            "n1",
            &Allowed {
                everything,
                ports: Some(20_000..=20_009),
            },
        ) {
            Admission::Admit(..) => None,
            Admission::Refuse { reason, message } => {
                assert_eq!(reason, "NodeFilesNotAllowed");
                Some(message.split(": ").next().unwrap().to_owned())
            }
            other => panic!("{other:?}"),
        }
    };
    let file = json!({"name": "data", "path": "/srv/data.raw", "format": "raw"});
    let disk = json!({"name": "data", "disk": "another"});
    let share = json!({"name": "home", "path": "/home"});
    let push = |list: &mut Value, item: &Value| list.as_array_mut().unwrap().push(item.clone());
    type Change<'a> = &'a dyn Fn(&mut Value);
    let table: [(Change<'_>, Option<&str>); 10] = [
        (&|_| {}, None),
        (
            &|vm| vm["boot"] = json!({"linux": {"kernel": "/srv/vmlinuz"}}),
            Some("spec.vm.boot.linux"),
        ),
        (
            &|vm| vm["stateDir"] = "/srv/state".into(),
            Some("spec.vm.stateDir"),
        ),
        (&|vm| push(&mut vm["disks"], &file), Some("spec.vm.disks[1]")),
        (&|vm| push(&mut vm["disks"], &disk), Some("spec.vm.disks[1]")),
        (&|vm| vm["shares"] = json!([share]), Some("spec.vm.shares[0]")),
        (
            &|vm| vm["nics"][0]["publishedPorts"] = json!([{"nodePort": 20_009}]),
            None,
        ),
        (
            &|vm| vm["nics"][0]["publishedPorts"] = json!([{"nodePort": 20_000}, {"nodePort": 20_010}]),
            Some("spec.vm.nics[0].publishedPorts[1]"),
        ),
        (
            &|vm| vm["nics"] = json!([{"name": "eth0", "bridge": "br0"}]),
            Some("spec.vm.nics[0]"),
        ),
        (
            &|vm| vm["nics"] = json!([{"name": "eth0", "tap": "tap0"}]),
            Some("spec.vm.nics[0]"),
        ),
    ];
    for (change, wanted) in table {
        assert_eq!(admitted(change, false).as_deref(), wanted);
        assert_eq!(admitted(change, true), None);
    }
}

#[test]
fn a_vm_that_always_runs_can_be_stopped_by_the_agent() {
    let change = |value: &mut Value| value["spec"]["vm"]["runPolicy"] = "always_on".into();
    let always = machine(change);
    let plan = placeholder::plan(&always).unwrap();
    let machine = noted(|value| {
        change(value);
        value["status"]["run"]["digest"] = plan.digest().into();
    });
    let pod = pod(|pod| pod["metadata"]["annotations"][names::MANIFEST] = plan.manifest.clone().into());
    let Admission::Admit(vm, _) = admit(&pod, Some(&machine), "n1", &all()) else {
        panic!("it is not admitted");
    };
    assert_eq!(vm.spec.unwrap().run_policy(), RunPolicy::AlwaysOnUnlessStopped);
}
