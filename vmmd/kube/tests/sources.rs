//! Objects that the agent makes for a run, and refusals of vmmd: images, disks, and the VM.

use serde_json::{Value, json};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::mock::{Cluster, Program, api, kubelet::Kubelet, vmmd::lock, wait};

/// A cluster of one node, with its programs.
struct Scene {
    cluster: Cluster,
    controller: Option<Program>,
    agent: Option<Program>,
    kubelet: Option<Kubelet>,
}

impl Scene {
    fn new() -> Self {
        let cluster = Cluster::start(1);
        Self {
            controller: Some(cluster.controller()),
            agent: Some(cluster.agent(0)),
            kubelet: Some(cluster.kubelet(0)),
            cluster,
        }
    }

    /// Waits for the pod and binds it.
    fn bind(&self, pod: &str) {
        wait("a pod", || self.cluster.pod(pod).is_object());
        assert!(self.cluster.bind(pod, "n0"));
    }

    /// Waits until the launcher of the pod has this report.
    fn waits(&self, pod: &str, reason: &str, message: &str) {
        let uid = self.cluster.pod(pod)["metadata"]["uid"]
            .as_str()
            .unwrap()
            .to_owned();
        wait(&format!("{reason} {message}"), || {
            let report = self.cluster.vmmds[0].state.pods.report(&uid);
            report.is_some_and(|(_, found, text)| found == reason && text.contains(message))
        });
    }

    /// Waits until the run has failed, and returns the message of the condition `Ready`.
    fn fails(&self, reason: &str) -> String {
        self.fails_of("web", reason)
    }

    fn fails_of(&self, machine: &str, reason: &str) -> String {
        let mut message = String::new();
        wait(reason, || {
            let status = self.cluster.machine(machine)["status"].clone();
            let mut all = status["conditions"].as_array().cloned().into_iter().flatten();
            let ready = all.find(|one| one["type"] == "Ready").unwrap_or_default();
            message = ready["message"].as_str().unwrap_or_default().to_owned();
            status["phase"] == "Failed" && ready["reason"] == reason
        });
        message
    }
}

fn refusal(code: Code, reason: &str, message: &str) -> Status {
    let details = ErrorDetails::with_error_info(reason, "vmmd", std::collections::HashMap::new());
    Status::with_error_details(code, message, details)
}

#[test]
fn refused_secret_is_reported_by_field_without_its_value() {
    let scene = Scene::new();
    let cluster = &scene.cluster;
    let mut details =
        ErrorDetails::with_bad_request_violation("spec.cloudInit.passwordHash", "must be a hash");
    details.add_bad_request_violation("spec.cpu.cores", "must be 1 to 64");
    details.set_error_info("INVALID_FIELDS", "vmmd", std::collections::HashMap::new());
    let refusal = Status::with_error_details(Code::InvalidArgument, "the VM is not valid", details);
    *lock(&cluster.vmmds[0].state.refusal) = Some(refusal);
    let secret = json!({"metadata": {"name": "login"}, "data": {"hash": "c2VjcmV0"}});
    let key = api::core("secrets", "shop", "");
    cluster.api.store(|store| store.create(key, secret)).unwrap();
    cluster.create_with("web", "manual", |spec| {
        spec["cloudInitFrom"] = json!({"passwordHash": {"secretKeyRef": {"name": "login", "key": "hash"}}});
    });
    cluster.annotate("web", "vmmd.dev/start", "1");
    scene.bind("web-1");
    let wanted = "spec.cloudInitFrom.passwordHash: must be a hash; spec.vm.cpu.cores: must be 1 to 64";
    assert_eq!(scene.fails("InvalidFields"), wanted);
}

#[test]
fn request_of_an_earlier_agent_with_another_secret_ends_the_run() {
    let scene = Scene::new();
    let refusal = refusal(
        Code::AlreadyExists,
        "REQUEST_ID_REUSED",
        "there was another request",
    );
    *lock(&scene.cluster.vmmds[0].state.refusal) = Some(refusal);
    scene.cluster.create("web", "always_on");
    scene.bind("web-1");
    scene.fails("RequestIdReused");
    assert_eq!(scene.cluster.machine("web")["status"]["failures"], 1);
    // The next run's pod has another uid, and so another request.
    *lock(&scene.cluster.vmmds[0].state.refusal) = None;
    scene.cluster.run("web", 2, "n0");
}

fn with_image(spec: &mut Value) {
    spec["volumes"] = json!([{"name": "root", "containerDisk": {"image": "registry.example/debian:13"}}]);
}

#[test]
fn image_is_imported_once_for_all_vms_and_again_after_a_failure() {
    let scene = Scene::new();
    let cluster = &scene.cluster;
    let storage = &cluster.vmmds[0].state.storage;
    for name in ["web", "db"] {
        cluster.create_with(name, "always_on", with_image);
        scene.bind(&format!("{name}-1"));
        scene.waits(
            &format!("{name}-1"),
            "ImportingImage",
            "registry.example/debian:13",
        );
    }
    assert_eq!(storage.images().len(), 1);
    storage.end_imports(Some("the registry has no such image"));
    scene.waits(
        "web-1",
        "ImportFailed",
        "debian:13: the registry has no such image",
    );
    assert_eq!(cluster.machine("web")["status"]["phase"], "Starting");
    // Ten seconds later.
    scene.waits("web-1", "ImportingImage", "debian:13");
    // The daemon was restarted, and knows neither.
    storage.end_imports(Some("stopped"));
    storage.forget_operations();
    wait("it is imported again", || storage.images().len() == 1);
    storage.end_imports(None);
    for name in ["web", "db"] {
        wait("it runs", || {
            cluster.machine(name)["status"]["phase"] == "Running"
        });
    }
}

#[test]
fn a_disk_that_vmmd_refuses_fails_the_run_with_its_volume() {
    let scene = Scene::new();
    let storage = &scene.cluster.vmmds[0].state.storage;
    storage.refuse(Status::resource_exhausted("the disk is full"));
    scene.cluster.create("web", "always_on");
    scene.bind("web-1");
    assert_eq!(scene.fails("Refused"), "volume root: the disk is full");
}

#[test]
fn disks_of_a_pod_that_was_torn_out_are_deleted_later() {
    let mut scene = Scene::new();
    let cluster = &scene.cluster;
    let state = cluster.vmmds[0].state.clone();
    cluster.create("web", "manual");
    cluster.annotate("web", "vmmd.dev/start", "1");
    cluster.run("web", 1, "n0");
    assert_eq!(state.storage.disks().len(), 1);
    (scene.agent, scene.controller) = (None, None);
    let pod = api::pod("shop", "web-1");
    scene.cluster.api.store(|store| store.tear_out(&pod));
    wait("the launcher is ended", || {
        state.vms()[0].status.as_ref().unwrap().instance.is_none()
    });
    scene.agent = Some(scene.cluster.agent(0));
    wait("the VM and its disks are gone", || {
        state.vms().is_empty() && state.storage.disks().is_empty()
    });
    assert!(scene.kubelet.is_some());
}

#[test]
fn vm_is_created_after_its_namesake_is_gone_and_only_once() {
    let mut scene = Scene::new();
    let state = scene.cluster.vmmds[0].state.clone();
    scene.cluster.create("db", "manual");
    scene.cluster.annotate("db", "vmmd.dev/start", "1");
    scene.cluster.run("db", 1, "n0");
    let name = state.vms()[0].metadata.clone().unwrap().name;
    // Another client recreates it.
    state.end(&name, vmmd_api::v1::ExitReason::GuestShutdown);
    wait("it is removed", || state.vms().is_empty());
    state.put(&name);
    scene.cluster.annotate("db", "vmmd.dev/start", "2");
    scene.bind("db-2");
    scene.waits("db-2", "VmExists", &name);
    // Another agent gets the same answer to the same request.
    scene.agent = None;
    state.remove(&name);
    scene.agent = Some(scene.cluster.agent(0));
    wait("the VM runs", || {
        scene.cluster.machine("db")["status"]["phase"] == "Running"
    });
    state.remove(&name);
    assert_eq!(scene.fails_of("db", "VmRemoved"), "the VM was removed from vmmd");
    assert_eq!(scene.cluster.ledger.epochs(), [1, 2]);
}

#[test]
fn unanswered_creation_is_not_repeated_for_a_deleted_vm() {
    let scene = Scene::new();
    let state = &scene.cluster.vmmds[0].state;
    *lock(&state.cut) = true;
    scene.cluster.create("web", "always_on");
    scene.cluster.run("web", 1, "n0");
    scene.cluster.delete_machine("web");
    wait("all is gone", || {
        scene.cluster.pods().is_empty() && scene.cluster.machine("web").is_null()
    });
    let calls = state.calls();
    let creations = calls.iter().filter(|call| call.starts_with("create shop-"));
    assert_eq!(creations.count(), 1, "{calls:?}");
    assert!(state.vms().is_empty());
}
