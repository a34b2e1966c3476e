use serde_json::json;

use super::*;

fn pod() -> Pod {
    let value = json!({
        "metadata": {"name": "web-3", "namespace": "shop", "uid": "p-3"},
        "status": {
            "phase": "Pending",
            "qosClass": "Burstable",
            "conditions": [{"type": "PodScheduled", "status": "True"}],
        },
    });
    serde_json::from_value(value).unwrap()
}

fn vm(policy: RunPolicy, phase: VmPhase, exit: Option<ExitReason>, next_start: bool) -> v1::Vm {
    let spec = v1::VmSpec {
        run_policy: policy.into(),
        ..v1::VmSpec::default()
    };
    let ready = v1::Condition {
        r#type: "Ready".to_owned(),
        status: if phase == VmPhase::Running {
            ConditionStatus::True
        } else {
            ConditionStatus::False
        }
        .into(),
        reason: format!("{phase:?}"),
        ..v1::Condition::default()
    };
    let nic = v1::NicStatus {
        addresses: vec!["10.0.0.5/24".to_owned()],
        routed: true,
        ..v1::NicStatus::default()
    };
    let status = v1::VmStatus {
        phase: phase.into(),
        reason: format!("{phase:?}"),
        conditions: vec![ready],
        nics: vec![nic],
        last_exit: exit.map(|reason| v1::ExitStatus {
            reason: reason.into(),
            message: "it ended".to_owned(),
            time: None,
        }),
        restart: next_start.then(|| v1::RestartStatus {
            next_start_time: Some(well_known::Timestamp::default()),
            ..v1::RestartStatus::default()
        }),
        counts: Some(v1::RunCounts {
            starts: 3,
            automatic_starts: 2,
            ..v1::RunCounts::default()
        }),
        ..v1::VmStatus::default()
    };
    v1::Vm {
        spec: Some(spec),
        status: Some(status),
        ..v1::Vm::default()
    }
}

#[test]
fn the_stage_follows_from_phase_end_and_policy() {
    use End::{Failed, Stopped, Succeeded};
    use ExitReason::{GuestPanic, GuestShutdown, Killed, NodeRestart, StartFailed};
    use RunPolicy::{AlwaysOn, AlwaysOnUnlessStopped, Manual, RerunOnFailure};
    use Stage::{Ended, Running, Waiting};
    let table = [
        (Manual, VmPhase::Pending, None, false, Waiting),
        (Manual, VmPhase::Starting, None, false, Waiting),
        (Manual, VmPhase::Running, Some(GuestPanic), false, Running),
        (Manual, VmPhase::Paused, None, false, Running),
        (Manual, VmPhase::Stopping, None, false, Running),
        (Manual, VmPhase::Stopped, None, false, Waiting),
        (
            Manual,
            VmPhase::Stopped,
            Some(GuestShutdown),
            false,
            Ended(Succeeded),
        ),
        (Manual, VmPhase::Failed, Some(GuestPanic), false, Ended(Failed)),
        (Manual, VmPhase::Failed, Some(StartFailed), false, Ended(Failed)),
        (AlwaysOn, VmPhase::Stopped, Some(GuestShutdown), false, Waiting),
        (
            AlwaysOnUnlessStopped,
            VmPhase::Stopped,
            Some(Killed),
            false,
            Ended(Stopped),
        ),
        (
            AlwaysOnUnlessStopped,
            VmPhase::Stopped,
            Some(NodeRestart),
            true,
            Waiting,
        ),
        (
            AlwaysOnUnlessStopped,
            VmPhase::Stopped,
            Some(Killed),
            true,
            Waiting,
        ),
        (RerunOnFailure, VmPhase::Failed, Some(GuestPanic), false, Waiting),
        (
            RerunOnFailure,
            VmPhase::Stopped,
            Some(GuestShutdown),
            false,
            Ended(Succeeded),
        ),
    ];
    for (policy, phase, exit, next, wanted) in table {
        let vm = vm(policy, phase, exit, next);
        assert_eq!(stage(&vm), wanted, "{policy:?} {phase:?} {exit:?} {next}");
    }
}

#[test]
fn a_pod_says_how_its_vm_is() {
    use ExitReason::{GuestPanic, GuestShutdown, OutOfMemory, Stopped};
    let table = [
        (VmPhase::Starting, None, ("Pending", None, false, "waiting")),
        (VmPhase::Running, None, ("Running", None, true, "running")),
        (VmPhase::Paused, None, ("Running", None, false, "running")),
        (
            VmPhase::Stopped,
            Some(GuestShutdown),
            ("Succeeded", None, false, "terminated"),
        ),
        (
            VmPhase::Stopped,
            Some(Stopped),
            ("Succeeded", Some("StoppedByRequest"), false, "terminated"),
        ),
        (
            VmPhase::Failed,
            Some(GuestPanic),
            ("Failed", Some("Failed"), false, "terminated"),
        ),
        (
            VmPhase::Failed,
            Some(OutOfMemory),
            ("Failed", Some("Failed"), false, "terminated"),
        ),
    ];
    for (phase, exit, (pod_phase, reason, ready, state)) in table {
        let vm = vm(RunPolicy::Manual, phase, exit, false);
        let status = serde_json::to_value(of(&pod(), &vm, "192.0.2.1", Timestamp::now())).unwrap();
        let container = &status["containerStatuses"][0];
        assert_eq!(status["phase"], pod_phase, "{phase:?}");
        assert_eq!(status["reason"].as_str(), reason, "{phase:?}");
        assert_eq!(container["ready"], ready, "{phase:?}");
        assert!(container["state"][state].is_object(), "{phase:?} {container}");
        assert_eq!(container["restartCount"], 2);
        assert_eq!(
            (&status["podIP"], &status["hostIP"]),
            (&json!("10.0.0.5"), &json!("192.0.2.1"))
        );
        assert!(!status.to_string().contains(names::NODE_LOCAL));
        let conditions = status["conditions"].as_array().unwrap();
        let named = |kind: &str| conditions.iter().find(|one| one["type"] == kind).unwrap();
        assert_eq!(named("PodScheduled")["status"], "True");
        assert_eq!(named("Ready")["status"], if ready { "True" } else { "False" });
    }
}

#[test]
fn an_address_of_one_node_alone_is_no_pod_ip() {
    let mut vm = vm(RunPolicy::Manual, VmPhase::Running, None, false);
    let nics = &mut vm.status.as_mut().unwrap().nics;
    let local = |addresses: [&str; 2]| v1::NicStatus {
        addresses: addresses.map(str::to_owned).into(),
        ..v1::NicStatus::default()
    };
    nics.extend([local(["10.0.0.7", "fd00::7"]), local(["10.1.0.7", "fd01::7"])]);
    let now = at_some_time();
    let mut pod = pod();
    let mut status = of(&pod, &vm, "192.0.2.1", now);
    let said = |status: &PodStatus| {
        let conditions = status.conditions.clone().unwrap();
        let found = conditions
            .into_iter()
            .filter(|one| one.type_ == names::NODE_LOCAL);
        found.filter_map(|one| one.message).collect::<Vec<_>>()
    };
    let ips = |status: &PodStatus| status.pod_ips.clone().unwrap_or_default().len();
    assert_eq!(
        (ips(&status), said(&status)),
        (1, vec!["10.0.0.7,fd00::7".to_owned()])
    );
    // It stays as it is, and goes with the addresses.
    pod.status = Some(status);
    status = of(&pod, &vm, "192.0.2.1", Timestamp::now());
    assert!(!differs(&pod, &status), "{status:?}");
    vm.status.as_mut().unwrap().nics.truncate(1);
    pod.status = Some(status);
    let status = of(&pod, &vm, "192.0.2.1", now);
    assert_eq!((ips(&status), said(&status)), (1, vec![]));
}

fn at_some_time() -> Timestamp {
    "2026-01-02T03:04:05Z".parse().unwrap()
}

#[test]
fn a_vm_that_waits_for_its_next_start_is_in_a_crash_loop() {
    let vm = vm(
        RunPolicy::AlwaysOn,
        VmPhase::Failed,
        Some(ExitReason::GuestPanic),
        true,
    );
    let status = serde_json::to_value(of(&pod(), &vm, "192.0.2.1", Timestamp::now())).unwrap();
    let container = &status["containerStatuses"][0];
    assert_eq!(status["phase"], "Running");
    assert_eq!(container["state"]["waiting"]["reason"], "CrashLoopBackOff");
    let last = &container["lastState"]["terminated"];
    assert_eq!(
        (&last["reason"], &last["exitCode"]),
        (&json!("GuestPanic"), &json!(1))
    );
}

#[test]
fn a_vm_whose_starts_fail_is_not_said_to_run() {
    let mut vm = vm(
        RunPolicy::AlwaysOn,
        VmPhase::Failed,
        Some(ExitReason::StartFailed),
        true,
    );
    let told = |vm: &v1::Vm| serde_json::to_value(of(&pod(), vm, "192.0.2.1", Timestamp::now())).unwrap();
    let status = vm.status.as_mut().unwrap();
    status.message = "there is no kernel".to_owned();
    let counts = status.counts.as_mut().unwrap();
    counts.failed_starts = counts.starts;
    let said = told(&vm);
    assert_eq!(said["phase"], "Pending");
    let container = &said["containerStatuses"][0];
    assert_eq!(
        container["state"]["waiting"],
        json!({"reason": "StartFailed", "message": "there is no kernel"})
    );
    assert_eq!(container["started"], false);
    // One that has run before is in the phase of pods whose containers are started again, and its container still waits.
    vm.status.as_mut().unwrap().counts.as_mut().unwrap().failed_starts = 1;
    let said = told(&vm);
    assert_eq!(said["phase"], "Running");
    assert_eq!(
        said["containerStatuses"][0]["state"]["waiting"]["reason"],
        "StartFailed"
    );
}

#[test]
fn what_was_reported_is_not_reported_again() {
    let vm = vm(RunPolicy::Manual, VmPhase::Running, None, false);
    let mut pod = pod();
    let first = of(&pod, &vm, "192.0.2.1", "2026-01-02T03:04:05.5Z".parse().unwrap());
    assert!(differs(&pod, &first));
    // As the API server gives it back.
    let mut stored = serde_json::to_value(&first).unwrap();
    stored["containerStatuses"][0]["lastState"] = json!({});
    pod.status = Some(serde_json::from_value(stored).unwrap());
    let again = of(&pod, &vm, "192.0.2.1", "2026-01-02T03:09:05Z".parse().unwrap());
    assert!(!differs(&pod, &again), "{again:?}");
}
