//! State of a run, from the status of its launcher pod.
//!
//! Only the kubelet knows whether a container runs. Other components write the phase and the
//! conditions of a pod too: the garbage collector of pods sets the phase `Failed` when a node is
//! gone, although the VM may still run there. Therefore the states of the containers decide.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ContainerState, ContainerStateTerminated, Pod, PodStatus};

use crate::names;

/// Time for the kubelet to report the end of a deleted pod, after its grace period.
const OVERDUE: SignedDuration = SignedDuration::from_secs(60);

/// Reason of the end of a launcher whose VM has moved to another node.
const MIGRATED: &str = "Migrated";
/// Reason of the end of a launcher whose VirtualMachine has another spec than the run.
pub const SPEC_CHANGED: &str = "SpecChanged";

/// Reasons of the kubelet for a pod that it does not start. Some are "OutOf" and a resource.
/// Reasons of pods that it ends later, as "Evicted", are not in this list.
const REJECTIONS: [&str; 7] = [
    "UnexpectedAdmissionError",
    "TopologyAffinityError",
    "NodeAffinity",
    "NodeSelectorMismatching",
    "NodePorts",
    "AppArmor",
    "PodOSNotSupported",
];

/// Whether nothing of a pod runs, and never will: it was deleted before it was bound, the kubelet
/// has rejected it, or all its containers have terminated and are not started again.
pub fn is_gone(pod: &Pod) -> bool {
    let spec = pod.spec.as_ref();
    let bound = spec
        .and_then(|spec| spec.node_name.as_deref())
        .unwrap_or_default();
    if bound.is_empty() {
        // The API server binds no pod that is being deleted.
        return pod.metadata.deletion_timestamp.is_some();
    }
    let status = pod.status.as_ref();
    let containers = spec.map_or(0, |spec| spec.containers.len());
    let known = status
        .and_then(|status| status.container_statuses.as_deref())
        .unwrap_or_default();
    if status.is_some_and(is_rejected) && known.iter().all(|one| one.container_id.is_none()) {
        return true;
    }
    let is_terminated =
        |state: Option<&ContainerState>| state.is_some_and(|state| state.terminated.is_some());
    let never = spec.and_then(|spec| spec.restart_policy.as_deref()) == Some("Never");
    never && known.len() >= containers && known.iter().all(|one| is_terminated(one.state.as_ref()))
}

/// Whether the kubelet has refused to start the pod.
fn is_rejected(status: &PodStatus) -> bool {
    let reason = status.reason.as_deref().unwrap_or_default();
    status.phase.as_deref() == Some("Failed") && (reason.starts_with("OutOf") || REJECTIONS.contains(&reason))
}

/// How the run of a pod has ended; `None` when it has not, or ends because of the deletion of the
/// pod. `changed`: the VirtualMachine has another spec than the run.
pub fn end(pod: &Pod, changed: bool) -> Option<String> {
    let deleted = pod.metadata.deletion_timestamp.is_some();
    let end = match terminated(pod) {
        Some(state) => match (state.exit_code, word(state)) {
            (0, Some("Stopped" | "Killed" | names::STOPPED)) if deleted => return None,
            (0, Some("Stopped" | "Killed" | names::STOPPED)) => names::STOPPED,
            // The VM has ended with the pod that it has moved to.
            (0, Some(MIGRATED)) => "Lost",
            (0, _) => "Succeeded",
            _ if deleted => return None,
            (_, Some(SPEC_CHANGED)) if changed => "Replaced",
            _ => "Failed",
        },
        // The kubelet has rejected or evicted the pod.
        None => match pod.status.as_ref()?.phase.as_deref() {
            Some("Failed") if !deleted && is_gone(pod) => "Failed",
            _ => return None,
        },
    };
    Some(end.to_owned())
}

/// Whether the VM of a pod has moved to another pod.
pub fn has_migrated(pod: &Pod) -> bool {
    terminated(pod).is_some_and(|state| state.exit_code == 0 && word(state) == Some(MIGRATED))
}

/// Whether the launcher of a pod runs.
pub fn launcher_runs(pod: &Pod) -> bool {
    launcher(pod).is_some_and(|one| one.state.as_ref().is_some_and(|state| state.running.is_some()))
}

/// The end of the launcher.
fn terminated(pod: &Pod) -> Option<&ContainerStateTerminated> {
    launcher(pod)?.state.as_ref()?.terminated.as_ref()
}

fn launcher(pod: &Pod) -> Option<&k8s_openapi::api::core::v1::ContainerStatus> {
    let containers = pod.status.as_ref()?.container_statuses.as_ref()?;
    containers.iter().find(|one| one.name == names::CONTAINER)
}

/// The reason in a termination message: `Reason: message`, or the reason alone.
fn word(state: &ContainerStateTerminated) -> Option<&str> {
    let text = state.message.as_deref()?.trim_end();
    let word = text.split_once(": ").map_or(text, |(word, _)| word);
    let camel = word.starts_with(|first: char| first.is_ascii_uppercase())
        && word.bytes().all(|byte| byte.is_ascii_alphanumeric());
    camel.then_some(word)
}

/// Phase of a VirtualMachine by its pod.
pub fn phase(pod: &Pod) -> &'static str {
    let bound = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    let ended = terminated(pod).map(|state| state.exit_code);
    match ended {
        Some(0) => return "Stopped",
        Some(_) => return "Failed",
        None => {}
    }
    if pod.metadata.deletion_timestamp.is_some() {
        return "Stopping";
    }
    if bound.unwrap_or_default().is_empty() {
        return "Scheduling";
    }
    if is_gone(pod) {
        // The kubelet has rejected it.
        return "Failed";
    }
    // The startup probe succeeds when the VM runs.
    let started = launcher(pod).is_some_and(|one| one.started == Some(true));
    if started && launcher_runs(pod) {
        "Running"
    } else {
        "Starting"
    }
}

/// Reason and message of a pod that is not ready, from the launcher's container.
pub fn why(pod: &Pod) -> (String, String) {
    let status = pod.status.clone().unwrap_or_default();
    let of_pod = (
        status.reason.unwrap_or_default(),
        status.message.unwrap_or_default(),
    );
    let state = launcher(pod)
        .and_then(|one| one.state.clone())
        .unwrap_or_default();
    let (reason, message) = if let Some(ended) = &state.terminated {
        let message = ended.message.clone().unwrap_or_default();
        match word(ended) {
            Some(word) => (
                word.to_owned(),
                message[word.len()..]
                    .trim_start_matches(": ")
                    .trim_end()
                    .to_owned(),
            ),
            None => (ended.reason.clone().unwrap_or_default(), message),
        }
    } else if let Some(waits) = state.waiting {
        (
            waits.reason.unwrap_or_default(),
            waits.message.unwrap_or_default(),
        )
    } else {
        of_pod.clone()
    };
    match (reason.is_empty(), of_pod.0.is_empty()) {
        (false, _) => (reason, message),
        (true, false) => of_pod,
        (true, true) => ("NotReady".to_owned(), message),
    }
}

/// Why nothing is known of a pod; `None` while its kubelet reports.
pub fn unreachable(pod: &Pod, now: Timestamp) -> Option<String> {
    let node = pod
        .spec
        .as_ref()?
        .node_name
        .as_deref()
        .filter(|name| !name.is_empty())?;
    if is_gone(pod) {
        return None;
    }
    let conditions = pod.status.as_ref()?.conditions.as_deref().unwrap_or_default();
    let is = |kind: &str, status: &str| {
        conditions
            .iter()
            .any(|one| one.type_ == kind && one.status == status)
    };
    // The kubelet writes both. Kubernetes changes only the first one when a node does not report.
    let lost = is("Ready", "False") && is("ContainersReady", "True");
    let deleted = pod.metadata.deletion_timestamp.as_ref();
    let overdue = deleted.is_some_and(|time| now.duration_since(time.0) > OVERDUE);
    (lost || overdue).then(|| {
        format!(
            "node {node} does not report: the VM may still run there, and is not started elsewhere until the node reports its end"
        )
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const NOW: &str = "2026-01-02T03:04:05Z";

    /// A live pod on a node, with this status of the launcher's container.
    #[allow(clippy::needless_pass_by_value, reason = "tables have values")]
    fn pod(container: Value, change: impl FnOnce(&mut Value)) -> Pod {
        let mut value = json!({
            "metadata": {"name": "web-3"},
            "spec": {
                "nodeName": "n1",
                "restartPolicy": "Never",
                "containers": [{"name": "vm"}],
            },
            "status": {"phase": "Running"},
        });
        if !container.is_null() {
            value["status"]["containerStatuses"] = json!([container]);
        }
        change(&mut value);
        serde_json::from_value(value).unwrap()
    }

    fn state(state: &Value) -> Value {
        json!({"name": "vm", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state})
    }

    fn running() -> Value {
        let mut running = state(&json!({"running": {"startedAt": NOW}}));
        running["containerID"] = "containerd://1".into();
        running
    }

    fn ended(code: i32, message: &str) -> Value {
        state(&json!({"terminated": {"exitCode": code, "message": message}}))
    }

    fn deleted(value: &mut Value) {
        value["metadata"]["deletionTimestamp"] = NOW.into();
        value["metadata"]["deletionGracePeriodSeconds"] = 30.into();
    }

    fn forced(value: &mut Value) {
        deleted(value);
        value["metadata"]["deletionGracePeriodSeconds"] = 0.into();
    }

    fn unbound(value: &mut Value) {
        value["spec"]["nodeName"] = Value::Null;
    }

    /// As the kubelet reports it, and as the garbage collector of pods does.
    fn failed(value: &mut Value, reason: &str) {
        value["status"]["phase"] = "Failed".into();
        value["status"]["reason"] = reason.into();
    }

    #[test]
    fn pod_is_gone_only_when_its_kubelet_says_so() {
        let waiting = || state(&json!({"waiting": {"reason": "ContainerCreating"}}));
        type Change = fn(&mut Value);
        let table: [(&str, Value, Change, bool); 20] = [
            ("unbound", Value::Null, unbound, false),
            (
                "unbound, deleted",
                Value::Null,
                |it| {
                    unbound(it);
                    deleted(it);
                },
                true,
            ),
            ("bound", Value::Null, |_| {}, false),
            (
                "bound, deleted, unseen by the kubelet",
                Value::Null,
                deleted,
                false,
            ),
            ("bound, forced, unseen by the kubelet", Value::Null, forced, false),
            ("being created", waiting(), |_| {}, false),
            ("being created, deleted", waiting(), deleted, false),
            ("being created, forced", waiting(), forced, false),
            ("running", running(), |_| {}, false),
            ("running, deleted", running(), deleted, false),
            ("running, forced", running(), forced, false),
            (
                "node lost, phase of the garbage collector",
                running(),
                |it| {
                    forced(it);
                    failed(it, "");
                },
                false,
            ),
            (
                "node lost before the first report",
                Value::Null,
                |it| {
                    forced(it);
                    failed(it, "");
                },
                false,
            ),
            ("evicted, not ended", running(), |it| failed(it, "Evicted"), false),
            (
                "evicted, statuses lost",
                Value::Null,
                |it| failed(it, "Evicted"),
                false,
            ),
            ("rejected", Value::Null, |it| failed(it, "OutOfvmmd.dev/vm"), true),
            (
                "rejected by the device plugin",
                Value::Null,
                |it| failed(it, "UnexpectedAdmissionError"),
                true,
            ),
            (
                "running, with the reason of a rejection",
                running(),
                |it| failed(it, "NodeAffinity"),
                false,
            ),
            ("terminated", ended(0, ""), |_| {}, true),
            (
                "terminated, restarted by a policy",
                ended(0, ""),
                |it| it["spec"]["restartPolicy"] = "Always".into(),
                false,
            ),
        ];
        for (what, container, change, gone) in table {
            assert_eq!(is_gone(&pod(container, change)), gone, "{what}");
        }
        // A container that another component has added runs still.
        let two = pod(ended(0, ""), |it| {
            it["spec"]["containers"] = json!([{"name": "vm"}, {"name": "proxy"}]);
        });
        assert!(!is_gone(&two));
    }

    #[test]
    fn end_of_a_run_is_that_of_its_launcher() {
        type Change = fn(&mut Value);
        let table: [(&str, Value, Change, Option<&str>); 12] = [
            ("runs", running(), |_| {}, None),
            (
                "powered off",
                ended(0, "GuestShutdown: the guest powered off"),
                |_| {},
                Some("Succeeded"),
            ),
            (
                "stopped in vmmd",
                ended(0, "Stopped: it was stopped"),
                |_| {},
                Some(names::STOPPED),
            ),
            (
                "stopped by a deletion",
                ended(0, "Stopped: it was stopped"),
                deleted,
                None,
            ),
            (
                "powered off before a deletion",
                ended(0, "GuestShutdown: off"),
                deleted,
                Some("Succeeded"),
            ),
            ("killed by a deletion", ended(137, ""), deleted, None),
            (
                "failed",
                ended(1, "GuestPanic: it panicked"),
                |_| {},
                Some("Failed"),
            ),
            (
                "refused",
                ended(1, "OldEpoch: there is a run 4"),
                |_| {},
                Some("Failed"),
            ),
            (
                "changed",
                ended(1, "SpecChanged: another spec"),
                |_| {},
                Some("Replaced"),
            ),
            ("killed", ended(137, ""), |_| {}, Some("Failed")),
            (
                "rejected",
                Value::Null,
                |it| failed(it, "OutOfcpu"),
                Some("Failed"),
            ),
            (
                "phase of the garbage collector",
                running(),
                |it| failed(it, ""),
                None,
            ),
        ];
        for (what, container, change, wanted) in table {
            assert_eq!(end(&pod(container, change), true).as_deref(), wanted, "{what}");
        }
        // Without a change that the controller knows of, another run would have the same end.
        let changed = pod(ended(1, "SpecChanged: another spec"), |_| {});
        assert_eq!(end(&changed, false).as_deref(), Some("Failed"));
    }

    #[test]
    fn phase_follows_the_container() {
        let started = || {
            let mut started = running();
            started["started"] = true.into();
            started
        };
        type Change = fn(&mut Value);
        let table: [(Value, Change, &str); 9] = [
            (Value::Null, unbound, "Scheduling"),
            (Value::Null, |_| {}, "Starting"),
            (running(), |_| {}, "Starting"),
            (started(), |_| {}, "Running"),
            (started(), deleted, "Stopping"),
            (ended(0, ""), |_| {}, "Stopped"),
            (ended(0, ""), deleted, "Stopped"),
            (ended(1, ""), |_| {}, "Failed"),
            (Value::Null, |it| failed(it, "OutOfcpu"), "Failed"),
        ];
        for (index, (container, change, wanted)) in table.into_iter().enumerate() {
            assert_eq!(phase(&pod(container, change)), wanted, "{index}");
        }
    }

    #[test]
    fn reason_is_that_of_the_launcher() {
        let text = "ImageMissing: vmmd: a message\nof lines\n";
        let wanted = ("ImageMissing".to_owned(), "vmmd: a message\nof lines".to_owned());
        assert_eq!(why(&pod(ended(1, text), |_| {})), wanted);
        let mut killed = ended(137, "no reason here");
        killed["state"]["terminated"]["reason"] = "OOMKilled".into();
        assert_eq!(
            why(&pod(killed, |_| {})),
            ("OOMKilled".to_owned(), "no reason here".to_owned())
        );
        let waits = state(&json!({"waiting": {"reason": "ErrImagePull", "message": "no such image"}}));
        assert_eq!(
            why(&pod(waits, |_| {})),
            ("ErrImagePull".to_owned(), "no such image".to_owned())
        );
        let rejected = pod(Value::Null, |it| {
            failed(it, "OutOfcpu");
            it["status"]["message"] = "full".into();
        });
        assert_eq!(why(&rejected), ("OutOfcpu".to_owned(), "full".to_owned()));
        assert_eq!(why(&pod(running(), |_| {})).0, "NotReady");
    }

    #[test]
    fn node_that_does_not_report_is_known_by_its_pod() {
        let now = |text: &str| text.parse::<Timestamp>().unwrap();
        let conditions = |ready: &str| {
            let ready = json!({"type": "Ready", "status": ready});
            json!([ready, {"type": "ContainersReady", "status": "True"}])
        };
        let with = |ready: &str| pod(running(), |it| it["status"]["conditions"] = conditions(ready));
        assert_eq!(unreachable(&with("True"), now(NOW)), None);
        assert!(unreachable(&with("False"), now(NOW)).unwrap().contains("node n1"));
        let deleted = pod(running(), deleted);
        assert_eq!(unreachable(&deleted, now("2026-01-02T03:05:05Z")), None);
        assert!(unreachable(&deleted, now("2026-01-02T03:05:06Z")).is_some());
        let over = pod(ended(0, ""), |it| {
            it["status"]["conditions"] = conditions("False");
        });
        assert_eq!(unreachable(&over, now(NOW)), None);
    }
}
