//! Parts of a VM from the cluster, and objects created for it: Secrets, ConfigMaps, claims, images
//! and disks.

use serde_json::{Value, json};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};
use vmmd_api::v1::{self, disk_spec::Source};

use crate::mock::{Cluster, api, vmmd::lock, wait};

const HASH: &str = "$6$salt$aVerySecretHash";
/// The same in base64, as Secrets have it.
const HASH_CODED: &str = "JDYkc2FsdCRhVmVyeVNlY3JldEhhc2g=";

/// Waits for the pod and binds it.
fn bind(cluster: &Cluster, pod: &str) {
    wait("a pod", || cluster.pod(pod).is_object());
    assert!(cluster.bind(pod, "n0"));
}

/// The condition `Ready` of a VirtualMachine: its reason and message.
fn ready(cluster: &Cluster, name: &str) -> (String, String) {
    let machine = cluster.machine(name);
    let conditions = machine["status"]["conditions"].as_array().cloned();
    let ready = conditions
        .into_iter()
        .flatten()
        .find(|one| one["type"] == "Ready")
        .unwrap_or_default();
    let text = |name: &str| ready[name].as_str().unwrap_or_default().to_owned();
    (text("reason"), text("message"))
}

/// Waits until the VM is said to wait for that.
fn lacks(cluster: &Cluster, name: &str, reason: &str, message: &str) {
    wait(&format!("{reason} {message}"), || {
        let (found, text) = ready(cluster, name);
        found == reason && text.contains(message)
    });
}

fn runs(cluster: &Cluster, name: &str) -> v1::VmSpec {
    wait(&format!("{name} runs"), || {
        cluster.machine(name)["status"]["phase"] == "Running"
    });
    cluster.vmmds[0].state.vms()[0].spec.clone().unwrap()
}

fn put(cluster: &Cluster, resource: &str, name: &str, mut object: Value) {
    object["metadata"]["name"] = name.into();
    let namespace = if resource == "persistentvolumes" {
        ""
    } else {
        "shop"
    };
    let key = api::core(resource, namespace, "");
    cluster.api.store(|store| store.create(key, object)).unwrap();
}

fn change(cluster: &Cluster, resource: &str, name: &str, change: &Value) {
    let key = api::core(resource, "shop", name);
    cluster.api.store(|store| store.patch(&key, "", change)).unwrap();
}

/// Reasons of the events in the namespace.
fn events(cluster: &Cluster) -> Vec<Value> {
    cluster.api.store(|store| store.list(&api::events("shop")))
}

fn with_secret(spec: &mut Value) {
    spec["cloudInitFrom"] = json!({
        "passwordHash": {"secretKeyRef": {"name": "login", "key": "hash"}},
        "userData": {"configMapKeyRef": {"name": "setup", "key": "user-data"}},
    });
}

#[test]
fn a_vm_waits_for_its_secret_which_only_vmmd_is_told() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let _agent = cluster.agent(0);
    cluster.create_with("web", "always_on", with_secret);
    bind(&cluster, "web-1");
    lacks(
        &cluster,
        "web",
        "ConfigMapNotFound",
        "there is no ConfigMap setup; there is no Secret login",
    );
    let pod = cluster.pod("web-1");
    assert_eq!(pod["status"]["phase"], "Pending");
    assert_eq!(
        pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"],
        "ConfigMapNotFound"
    );
    let told = || {
        events(&cluster)
            .iter()
            .any(|event| event["reason"] == "ConfigMapNotFound")
    };
    wait("an event", told);
    assert!(cluster.vmmds[0].state.calls().is_empty());
    put(
        &cluster,
        "configmaps",
        "setup",
        json!({"data": {"user-data": "#cloud-config\n"}}),
    );
    put(&cluster, "secrets", "login", json!({"data": {"other": ""}}));
    lacks(&cluster, "web", "KeyNotFound", "Secret login has no key hash");
    change(
        &cluster,
        "secrets",
        "login",
        &json!({"data": {"hash": HASH_CODED}}),
    );
    let seed = runs(&cluster, "web").cloud_init.unwrap();
    assert_eq!(
        (&*seed.password_hash, &*seed.user_data),
        (HASH, "#cloud-config\n")
    );
    assert_eq!(seed.hostname, "web");
    // Only the Secret contains it.
    let all = cluster.api.store(|store| store.log.clone());
    for (_, _, key, object) in all.iter().filter(|(_, _, key, _)| key.resource != "secrets") {
        let text = object.to_string();
        let secret = text.contains("aVerySecretHash") || text.contains(HASH_CODED);
        assert!(!secret, "{key:?}: {text}");
    }
    // A change of the Secret is for the next run.
    change(
        &cluster,
        "secrets",
        "login",
        &json!({"data": {"hash": "JDYkbmV4dA=="}}),
    );
    cluster.delete_pod("web-1", None);
    bind(&cluster, "web-2");
    wait("the next run has the new value", || {
        let vms = cluster.vmmds[0].state.vms();
        let seed = vms.first().and_then(|vm| vm.spec.clone()?.cloud_init);
        seed.is_some_and(|seed| seed.password_hash == "$6$next")
    });
}

#[test]
fn unreadable_secret_is_reported_with_the_missing_permission() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let _agent = cluster.agent(0);
    *lock(&cluster.api.inner.forbidden) = "secrets".to_owned();
    cluster.create_with("web", "always_on", |spec| {
        with_secret(spec);
        spec["cloudInitFrom"]["userData"] = Value::Null;
    });
    bind(&cluster, "web-1");
    lacks(
        &cluster,
        "web",
        "MayNotRead",
        "vmmd-kube-agent-reads in namespace shop",
    );
    // A VM that waits can be deleted.
    cluster.delete_machine("web");
    wait("it is gone", || cluster.machine("web").is_null());
    assert!(cluster.pods().is_empty());
}

#[test]
fn refused_secret_is_reported_by_field_without_its_value() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let _agent = cluster.agent(0);
    let mut details =
        ErrorDetails::with_bad_request_violation("spec.cloudInit.passwordHash", "must be a hash");
    details.add_bad_request_violation("spec.boot.linux.kernel", "there is no such file");
    details.set_error_info("INVALID_FIELDS", "vmmd", std::collections::HashMap::new());
    let refusal = Status::with_error_details(Code::InvalidArgument, "the VM is not valid", details);
    *lock(&cluster.vmmds[0].state.refusal) = Some(refusal);
    put(
        &cluster,
        "secrets",
        "login",
        json!({"data": {"hash": HASH_CODED}}),
    );
    cluster.create_with("web", "always_on", |spec| {
        with_secret(spec);
        spec["cloudInitFrom"]["userData"] = Value::Null;
    });
    bind(&cluster, "web-1");
    let wanted =
        "spec.cloudInitFrom.passwordHash: must be a hash; spec.vm.boot.linux.kernel: there is no such file";
    wait("it fails", || {
        cluster.machine("web")["status"]["phase"] == "Failed"
    });
    assert_eq!(
        ready(&cluster, "web"),
        ("InvalidFields".to_owned(), wanted.to_owned())
    );
}

#[test]
fn request_of_an_earlier_agent_with_another_secret_ends_the_run() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let _agent = cluster.agent(0);
    let mut details = ErrorDetails::new();
    details.set_error_info("REQUEST_ID_REUSED", "vmmd", std::collections::HashMap::new());
    let refusal = Status::with_error_details(Code::AlreadyExists, "there was another request", details);
    *lock(&cluster.vmmds[0].state.refusal) = Some(refusal);
    cluster.create("web", "always_on");
    bind(&cluster, "web-1");
    wait("it fails", || {
        cluster.machine("web")["status"]["phase"] == "Failed"
    });
    assert_eq!(ready(&cluster, "web").0, "RequestIdReused");
    // The next run's pod has another uid, and so another request.
    *lock(&cluster.vmmds[0].state.refusal) = None;
    bind(&cluster, "web-2");
    runs(&cluster, "web");
}

fn with_image(spec: &mut Value) {
    spec["vm"]["disks"] = json!([{"name": "root"}, {"name": "scratch"}]);
    spec["volumes"] = json!([
        {"name": "root", "containerDisk": {"image": "registry.example/debian:13", "size": "20Gi"}},
        {"name": "scratch", "emptyDisk": {"size": "1Gi"}},
    ]);
    spec["imagePullSecrets"] = json!([{"name": "registry"}]);
}

#[test]
fn image_is_imported_with_its_password_and_disk_is_of_the_run() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let _agent = cluster.agent(0);
    let storage = &cluster.vmmds[0].state.storage;
    cluster.create_with("web", "always_on", with_image);
    bind(&cluster, "web-1");
    lacks(&cluster, "web", "SecretNotFound", "there is no Secret registry");
    // {"auths": {"registry.example": {"username": "ci", "password": "pw"}}}
    let config =
        "eyJhdXRocyI6IHsicmVnaXN0cnkuZXhhbXBsZSI6IHsidXNlcm5hbWUiOiAiY2kiLCAicGFzc3dvcmQiOiAicHcifX19";
    put(
        &cluster,
        "secrets",
        "registry",
        json!({"data": {".dockerconfigjson": config}}),
    );
    lacks(&cluster, "web", "ImportingImage", "registry.example/debian:13");
    let images = storage.images();
    let source = images[0].spec.as_ref().unwrap().source.clone();
    let Some(v1::image_spec::Source::Oci(oci)) = source else {
        panic!("{source:?}");
    };
    let credentials = oci.credentials.unwrap();
    assert_eq!((&*credentials.username, &*credentials.password), ("ci", "pw"));
    // Another VM that wants it waits for the same import.
    cluster.create_with("db", "always_on", with_image);
    bind(&cluster, "db-1");
    lacks(&cluster, "db", "ImportingImage", "registry.example/debian:13");
    assert_eq!(storage.images().len(), 1);
    cluster.delete_machine("db");
    storage.end_imports(None);
    let spec = runs(&cluster, "web");
    wait("only the disks of web are there", || storage.disks().len() == 2);
    for (place, disk) in spec.disks.iter().zip(storage.disks()) {
        let metadata = disk.metadata.unwrap();
        assert_eq!(place.source, Some(Source::Disk(metadata.name)));
        assert_eq!(metadata.annotations["vmmd.dev/pod"], "shop/web-1");
        assert_eq!(metadata.annotations["vmmd.dev/volume"], place.name);
        let disk = disk.spec.unwrap();
        let image = (&*place.name == "root").then(|| {
            v1::volume_spec::Source::Image(v1::ImageClone {
                name: images[0].metadata.clone().unwrap().name,
                clone: v1::DiskClone::Overlay.into(),
            })
        });
        let size = if image.is_some() { 20 << 30 } else { 1 << 30 };
        assert_eq!((disk.source, disk.size_bytes), (image, size));
    }
    cluster.delete_pod("web-1", None);
    bind(&cluster, "web-2");
    wait("the next run has disks of its own", || {
        let disks = storage.disks();
        disks.len() == 2
            && disks
                .iter()
                .all(|disk| disk.metadata.as_ref().unwrap().labels["vmmd.dev/epoch"] == "2")
    });
    cluster.delete_machine("web");
    wait("it is gone", || cluster.machine("web").is_null());
    assert_eq!(storage.disks(), []);
    assert_eq!(storage.images().len(), 1, "the image stays for other VMs");
}

#[test]
fn an_image_that_can_not_be_imported_is_said_and_tried_again() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let _agent = cluster.agent(0);
    let storage = &cluster.vmmds[0].state.storage;
    cluster.create_with("web", "always_on", |spec| {
        with_image(spec);
        spec["imagePullSecrets"] = json!([]);
    });
    bind(&cluster, "web-1");
    lacks(&cluster, "web", "ImportingImage", "debian:13");
    storage.end_imports(Some("the registry has no such image"));
    lacks(
        &cluster,
        "web",
        "ImportFailed",
        "debian:13: the registry has no such image",
    );
    assert_eq!(cluster.machine("web")["status"]["phase"], "Starting");
    // Ten seconds later.
    lacks(&cluster, "web", "ImportingImage", "debian:13");
    // The daemon was restarted, and knows neither.
    storage.end_imports(Some("stopped"));
    storage.forget_operations();
    wait("it is imported again", || storage.images().len() == 1);
    storage.end_imports(None);
    runs(&cluster, "web");
}

#[test]
fn a_disk_that_vmmd_refuses_fails_the_run_with_its_volume() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let _agent = cluster.agent(0);
    let storage = &cluster.vmmds[0].state.storage;
    storage.refuse(Status::resource_exhausted("the disk is full"));
    cluster.create_with("web", "always_on", |spec| {
        spec["vm"]["disks"] = json!([{"name": "scratch"}]);
        spec["volumes"] = json!([{"name": "scratch", "emptyDisk": {"size": "1Gi"}}]);
    });
    bind(&cluster, "web-1");
    wait("it fails", || {
        cluster.machine("web")["status"]["phase"] == "Failed"
    });
    assert_eq!(ready(&cluster, "web").1, "volume scratch: the disk is full");
}

#[test]
fn disks_of_a_pod_that_was_torn_out_go_later() {
    let cluster = Cluster::start(1);
    let controller = cluster.controller();
    let agent = cluster.agent(0);
    let state = &cluster.vmmds[0].state;
    cluster.create_with("web", "manual", |spec| {
        spec["vm"]["disks"] = json!([{"name": "a"}, {"name": "b"}]);
        spec["volumes"] = json!([
            {"name": "a", "emptyDisk": {"size": "1Gi"}},
            {"name": "b", "emptyDisk": {"size": "1Gi"}},
        ]);
    });
    let start = json!({"metadata": {"annotations": {"vmmd.dev/start": "1"}}});
    cluster
        .api
        .store(|store| store.patch(&api::machine("shop", "web"), "", &start))
        .unwrap();
    cluster.run("web", 1, "n0");
    assert_eq!(state.storage.disks().len(), 2);
    agent.kill();
    controller.kill();
    cluster
        .api
        .store(|store| store.tear_out(&api::pod("shop", "web-1")));
    let agent = cluster.agent(0);
    wait("the VM is gone", || state.vms().is_empty());
    agent.kill();
    // The next look is minutes later, or at the agent's start.
    let _agent = cluster.agent(0);
    wait("the disks are gone", || state.storage.disks().is_empty());
}

fn volume(mode: &str, path: &str, claim: &str) -> Value {
    json!({"spec": {"local": {"path": path}, "volumeMode": mode, "claimRef": {"uid": claim}}})
}

#[test]
fn a_claim_is_a_disk_or_a_share_once_it_is_bound() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let _agent = cluster.agent(0);
    cluster.create_with("web", "always_on", |spec| {
        spec["vm"]["disks"] = json!([{"name": "data"}, {"name": "block"}]);
        spec["vm"]["shares"] = json!([{"name": "files"}]);
        spec["volumes"] = json!([
            {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "block", "persistentVolumeClaim": {"claimName": "block"}},
            {"name": "files", "persistentVolumeClaim": {"claimName": "files", "readOnly": true}},
        ]);
    });
    bind(&cluster, "web-1");
    let names: Vec<_> = ["data", "block", "files"].into();
    let pod = cluster.pod("web-1");
    let claims = pod["spec"]["volumes"].as_array().unwrap().iter();
    let claims: Vec<_> = claims
        .map(|volume| volume["persistentVolumeClaim"]["claimName"].as_str().unwrap())
        .collect();
    assert_eq!(claims, names, "the scheduler places the pod by them");
    for name in &names {
        lacks(
            &cluster,
            "web",
            "ClaimNotFound",
            &format!("there is no PersistentVolumeClaim {name}"),
        );
    }
    for name in &names {
        put(
            &cluster,
            "persistentvolumeclaims",
            name,
            json!({"status": {"phase": "Pending"}}),
        );
    }
    lacks(
        &cluster,
        "web",
        "ClaimNotBound",
        "PersistentVolumeClaim files is not bound",
    );
    for (name, mode, path) in [
        ("data", "Filesystem", "/srv/volumes/data"),
        ("block", "Block", "/dev/vg/block"),
        ("files", "Filesystem", "/srv/volumes/files"),
    ] {
        let bound = json!({"spec": {"volumeName": name}, "status": {"phase": "Bound"}});
        change(&cluster, "persistentvolumeclaims", name, &bound);
        let key = api::core("persistentvolumeclaims", "shop", name);
        let claim = cluster.api.store(|store| store.get(&key)).unwrap();
        let uid = claim["metadata"]["uid"].as_str().unwrap();
        put(&cluster, "persistentvolumes", name, volume(mode, path, uid));
    }
    let spec = runs(&cluster, "web");
    let paths: Vec<_> = spec
        .disks
        .iter()
        .map(|disk| disk.source.clone().unwrap())
        .collect();
    let path = |path: &str| Source::Path(path.to_owned());
    assert_eq!(paths, [path("/srv/volumes/data/disk.img"), path("/dev/vg/block")]);
    // Users of the volume can make links in it.
    let beneath: Vec<_> = spec.disks.iter().map(|disk| disk.beneath.as_str()).collect();
    assert_eq!(beneath, ["/srv/volumes/data", ""]);
    assert_eq!(
        (&*spec.shares[0].path, spec.shares[0].read_only),
        ("/srv/volumes/files", true)
    );
}

#[test]
fn a_pod_of_somebody_else_with_the_name_of_a_run_is_told() {
    let cluster = Cluster::start(1);
    let _controller = cluster.controller();
    let _agent = cluster.agent(0);
    let other = json!({"metadata": {"name": "web-1"}, "spec": {"containers": []}});
    cluster
        .api
        .store(|store| store.create(api::pod("shop", ""), other))
        .unwrap();
    cluster.create("web", "always_on");
    lacks(&cluster, "web", "PodNameTaken", "pod web-1");
    wait("an event", || {
        let told = events(&cluster);
        told.iter().any(|event| event["reason"] == "PodNameTaken")
    });
    assert_eq!(cluster.pods().len(), 1);
    cluster
        .api
        .store(|store| store.tear_out(&api::pod("shop", "web-1")));
    cluster.run("web", 1, "n0");
}

#[test]
fn invalid_volume_is_in_the_status_with_its_field() {
    let cluster = Cluster::start(0);
    let _controller = cluster.controller();
    cluster.create_with("web", "always_on", |spec| {
        spec["volumes"] = json!([{"name": "root", "emptyDisk": {"size": "1Gi"}}]);
    });
    wait("invalid", || {
        cluster.machine("web")["status"]["phase"] == "Invalid"
    });
    let text = cluster.machine("web")["status"]["conditions"].to_string();
    assert!(text.contains("spec.volumes[0].name: there is no disk"), "{text}");
    wait("an event", || {
        events(&cluster)
            .iter()
            .any(|event| event["reason"] == "InvalidSpec")
    });
}
