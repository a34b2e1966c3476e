//! A kubelet and the launchers of its pods, as far as the API server and vmmd see them.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use k8s_openapi::ByteString;
use serde_json::{Value, json};
use vmmd_api::v1::{self, ExitReason, PodReport, PodVolumeKind, VmPhase};

use super::{
    api::{self, Inner},
    store::Deletion,
    vmmd::{State, lock},
};

/// How often it looks at its pods.
const PERIOD: Duration = Duration::from_millis(20);
/// Address of all pods.
pub const ADDRESS: &str = "10.244.0.7";

pub struct Kubelet {
    over: Arc<AtomicBool>,
    /// The node is not reachable: the kubelet reads and writes nothing, and its launchers stay.
    pub away: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Kubelet {
    pub fn start(api: &Inner, state: &State) -> Self {
        let (over, away) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let node = Node {
            api: api.clone(),
            state: state.clone(),
            started: Mutex::default(),
        };
        let (ends, lost) = (over.clone(), away.clone());
        let thread = std::thread::spawn(move || {
            while !ends.load(Ordering::SeqCst) {
                if !lost.load(Ordering::SeqCst) {
                    node.look();
                }
                std::thread::sleep(PERIOD);
            }
        });
        Self {
            over,
            away,
            thread: Some(thread),
        }
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Node {
    api: Inner,
    state: State,
    /// Uids of pods whose container was started.
    started: Mutex<BTreeSet<String>>,
}

impl Node {
    fn look(&self) {
        let pods = self.api.with(|store| store.list(&api::pod("", "")));
        let mine = pods
            .into_iter()
            .filter(|pod| pod["spec"]["nodeName"] == *self.state.node);
        let mut known = BTreeSet::new();
        for pod in mine {
            known.insert(text(&pod["metadata"]["uid"]));
            self.pod(&pod);
        }
        // Pods that are gone from the API server are ended.
        let started = lock(&self.started).clone();
        for uid in started.difference(&known) {
            self.kill(uid);
            lock(&self.started).remove(uid);
        }
    }

    fn pod(&self, pod: &Value) {
        let uid = text(&pod["metadata"]["uid"]);
        let state = &pod["status"]["containerStatuses"][0]["state"];
        let deleted = !pod["metadata"]["deletionTimestamp"].is_null();
        if !state["terminated"].is_null() {
            // The API server writes nothing for a second deletion without a grace period.
            if deleted && pod["metadata"]["deletionGracePeriodSeconds"] != 0 {
                let deletion = Deletion {
                    grace: Some(0),
                    uid: Some(uid),
                };
                let _ = self.api.with(|store| store.delete(&key(pod), &deletion));
            }
            return;
        }
        if !lock(&self.started).contains(&uid) {
            return match (deleted, self.files(pod)) {
                (true, _) => self.terminated(pod, 137, ""),
                (false, Some(files)) => self.launch(pod, files),
                (false, None) => {}
            };
        }
        if self.state.moves.has_left(&uid) {
            self.state.pods.disconnect(&uid);
            return self.terminated(pod, 0, "Migrated");
        }
        if deleted {
            self.kill(&uid);
            return self.terminated(pod, 0, "Stopped: it was stopped");
        }
        if let Some((PodReport::Refused, reason, message)) = self.state.pods.report(&uid) {
            self.state.pods.disconnect(&uid);
            return self.terminated(pod, 1, &format!("{reason}: {message}"));
        }
        let Some(vm) = self.vm(&uid) else { return };
        let status = vm.status.clone().unwrap_or_default();
        match status.phase() {
            VmPhase::Running => self.ready(pod),
            VmPhase::Stopped | VmPhase::Failed => {
                let Some(exit) = status.last_exit else { return };
                self.state.pods.disconnect(&uid);
                let (code, reason) = match exit.reason() {
                    ExitReason::GuestShutdown => (0, "GuestShutdown"),
                    ExitReason::Stopped => (0, "Stopped"),
                    _ => (1, "Failed"),
                };
                self.terminated(pod, code, &format!("{reason}: {}", exit.message));
            }
            _ => {}
        }
    }

    fn vm(&self, uid: &str) -> Option<v1::Vm> {
        let mut vms = self.state.vms().into_iter();
        vms.find(|vm| {
            vm.spec
                .as_ref()
                .and_then(|spec| spec.pod.as_ref())
                .is_some_and(|pod| pod.uid == uid)
        })
    }

    /// The launcher dies, and its VM with it.
    fn kill(&self, uid: &str) {
        self.state.pods.disconnect(uid);
        if let Some(vm) = self.vm(uid)
            && vm.status.as_ref().is_some_and(|status| status.instance.is_some())
        {
            self.state.end(&vm.metadata.unwrap().name, ExitReason::Stopped);
        }
    }

    fn launch(&self, pod: &Value, files: Vec<v1::PodFile>) {
        let metadata = &pod["metadata"];
        let container = &pod["spec"]["containers"][0];
        let variable = |name: &str| {
            let all = container["env"].as_array().unwrap();
            let found = all.iter().find(|one| one["name"] == name).unwrap();
            text(&found["value"])
        };
        let mounts = |list: &str, path: &str, kind: PodVolumeKind| {
            let all = container[list].as_array().cloned().unwrap_or_default();
            let path = path.to_owned();
            all.into_iter().filter_map(move |one| {
                let place = text(&one["mountPath"]) + &text(&one["devicePath"]);
                let name = place.strip_prefix(&path)?;
                let mut volume = v1::PodVolume {
                    name: name.to_owned(),
                    read_only: one["readOnly"] == true,
                    ..v1::PodVolume::default()
                };
                volume.set_kind(kind);
                Some(volume)
            })
        };
        let volumes = mounts("volumeMounts", "/vmmd/volumes/", PodVolumeKind::Directory);
        let devices = mounts("volumeDevices", "/vmmd/devices/", PodVolumeKind::BlockDevice);
        let uid = text(&metadata["uid"]);
        lock(&self.started).insert(uid.clone());
        self.state.pods.connect(v1::Pod {
            uid,
            namespace: text(&metadata["namespace"]),
            name: text(&metadata["name"]),
            vm: variable("VMMD_POD_VM"),
            run: variable("VMMD_POD_RUN").parse().unwrap(),
            volumes: volumes.chain(devices).collect(),
            files,
            connect_time: None,
        });
        self.container(pod, "Running", &json!({"running": {}}), false);
    }

    fn ready(&self, pod: &Value) {
        if pod["status"]["containerStatuses"][0]["ready"] != true {
            self.container(pod, "Running", &json!({"running": {}}), true);
        }
    }

    fn terminated(&self, pod: &Value, code: i32, message: &str) {
        let state = json!({"terminated": {"exitCode": code, "message": message}});
        let phase = if code == 0 { "Succeeded" } else { "Failed" };
        self.container(pod, phase, &state, false);
    }

    fn container(&self, pod: &Value, phase: &str, state: &Value, ready: bool) {
        let condition = |kind: &str| json!({"type": kind, "status": if ready { "True" } else { "False" }});
        let status = json!({
            "phase": phase,
            // Its vmmd is reached by this name.
            "hostIP": *self.state.node,
            "podIP": ADDRESS,
            "podIPs": [{"ip": ADDRESS}],
            "conditions": [condition("Ready"), condition("ContainersReady")],
            "containerStatuses": [{
                "name": "vm", "image": "", "imageID": "", "containerID": "mock://1", "restartCount": 0,
                "ready": ready, "started": ready, "state": state,
            }],
        });
        let patch = json!({"metadata": {"uid": pod["metadata"]["uid"]}, "status": status});
        // It may have been removed in this moment.
        let _ = self.api.with(|store| store.patch(&key(pod), "status", &patch));
    }

    /// The files of the pod's Secrets and ConfigMaps; `None` while one does not exist.
    fn files(&self, pod: &Value) -> Option<Vec<v1::PodFile>> {
        let namespace = text(&pod["metadata"]["namespace"]);
        let mut files = Vec::new();
        for volume in pod["spec"]["volumes"].as_array().into_iter().flatten() {
            let (resource, object, items) = if volume["secret"].is_object() {
                (
                    "secrets",
                    &volume["secret"]["secretName"],
                    &volume["secret"]["items"],
                )
            } else if volume["configMap"].is_object() {
                (
                    "configmaps",
                    &volume["configMap"]["name"],
                    &volume["configMap"]["items"],
                )
            } else {
                continue;
            };
            let key = api::core(resource, &namespace, &text(object));
            let object = self.api.with(|store| store.get(&key)).ok()?;
            for item in items.as_array().unwrap() {
                let value = object["data"].get(text(&item["key"]))?;
                let content = match resource {
                    "secrets" => serde_json::from_value::<ByteString>(value.clone()).unwrap().0,
                    _ => text(value).into_bytes(),
                };
                let path = format!("{}/{}", text(&volume["name"]), text(&item["path"]));
                files.push(v1::PodFile { path, content });
            }
        }
        Some(files)
    }
}

fn key(pod: &Value) -> super::store::Key {
    let metadata = &pod["metadata"];
    api::pod(&text(&metadata["namespace"]), &text(&metadata["name"]))
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
