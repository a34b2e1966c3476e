//! VM inputs from the cluster: Secrets, ConfigMaps, images of a registry, claims.

use std::{fs, time::Duration};

use serde_json::{Value, json};
use vmmd_api::v1;
use vmmd_kubernetes_tests::{eventually, fleet::Fleet};
use vmmd_testing::registry::{Image, PASSWORD, Registry, USER, layer};

const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until a condition of the VirtualMachine says that.
async fn said(fleet: &Fleet, name: &str, condition: &str, text: &str) {
    let path = format!("-o=jsonpath={{.status.conditions[?(@.type=='{condition}')]}}");
    eventually(&format!("{condition} says {text:?}"), PATIENCE, async || {
        let found = fleet.cluster.kubectl(&["get", "vmmvm", name, &path]);
        if found.contains(text) { Ok(()) } else { Err(found) }
    })
    .await;
}

fn secret(name: &str, kind: &str, data: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Secret", "type": kind, "stringData": data,
        "metadata": {"name": name, "namespace": "default"},
    })
}

/// Lets the agents read Secrets and ConfigMaps, as the documentation says.
fn let_agents_read(fleet: &Fleet) {
    fleet.cluster.kubectl(&[
        "create",
        "rolebinding",
        "vmmd-kube-agent-reads",
        "--clusterrole=vmmd-kube-agent-reads",
        "--serviceaccount=vmmd-system:vmmd-kube-agent",
    ]);
}

#[tokio::test]
async fn a_guest_is_told_a_secret_that_nothing_else_shows() {
    let hash = "$6$salt$aVerySecretHash";
    let fleet = Fleet::start(1, 1).await;
    let cluster = &fleet.cluster;
    let mut vm = fleet.vm("web");
    vm["spec"]["cloudInitFrom"] = json!({
        "passwordHash": {"secretKeyRef": {"name": "login", "key": "hash"}},
        "userData": {"configMapKeyRef": {"name": "setup", "key": "user-data"}},
    });
    cluster.apply(&vm);
    said(&fleet, "web", "Ready", "MayNotRead").await;
    let_agents_read(&fleet);
    said(
        &fleet,
        "web",
        "Ready",
        "there is no ConfigMap setup; there is no Secret login",
    )
    .await;
    let pods = cluster.kubectl(&["get", "pods"]);
    assert!(pods.contains("ConfigMapNotFound"), "{pods}");
    cluster.apply(&secret("login", "Opaque", &json!({"hash": hash})));
    said(&fleet, "web", "Ready", "ConfigMapNotFound").await;
    cluster.kubectl(&[
        "create",
        "configmap",
        "setup",
        "--from-literal=user-data=#!/bin/sh",
    ]);
    fleet.all_run(&["web".into()], PATIENCE).await;
    let seed = fleet.nodes[0].daemon.list().await[0]
        .spec
        .clone()
        .unwrap()
        .cloud_init
        .unwrap();
    assert!(seed.password_hash_digest.starts_with("hmac-sha256:"), "{seed:?}");
    assert!(seed.user_data_digest.starts_with("hmac-sha256:"), "{seed:?}");
    let shown = [
        cluster.kubectl(&["get", "vmmvm,pods,events", "-A", "-o=yaml"]),
        cluster.kubectl(&["describe", "vmmvm,pods"]),
        fleet.nodes[0].agent.printed(),
        fleet.controllers[0].printed(),
        fs::read_to_string(fleet.nodes[0].daemon.path("log.txt")).unwrap(),
    ];
    for shown in shown {
        assert!(!shown.contains("aVerySecretHash"), "{shown}");
    }
    // The agent reads nothing in other namespaces, and lists nothing anywhere.
    for (verb, namespace, may) in [
        ("get", "default", "yes"),
        ("list", "default", "no"),
        ("watch", "default", "no"),
        ("get", "kube-system", "no"),
    ] {
        let output = cluster.run(&[
            "auth",
            "can-i",
            verb,
            "secrets",
            "-n",
            namespace,
            "--as=system:serviceaccount:vmmd-system:vmmd-kube-agent",
        ]);
        assert_eq!(
            String::from_utf8_lossy(&output.stdout).trim(),
            may,
            "{verb} in {namespace}"
        );
    }
    fleet.end(PATIENCE).await;
}

#[tokio::test]
async fn a_vm_has_the_disk_of_an_image_in_a_registry_while_it_runs() {
    let fleet = Fleet::start(1, 1).await;
    let cluster = &fleet.cluster;
    let registry = Registry::start(true);
    let content = vec![7; 1 << 20];
    registry
        .push("debian", "13", &Image::new("amd64", vec![layer(&content)]))
        .await;
    let reference = format!("{}/debian:13", registry.address);
    let mut vm = fleet.vm("web");
    vm["spec"]["vm"]["disks"] = json!([{"name": "root"}, {"name": "scratch", "format": "raw"}]);
    vm["spec"]["volumes"] = json!([
        {"name": "root", "containerDisk": {"image": reference, "size": "8Mi"}},
        {"name": "scratch", "emptyDisk": {"size": "4Mi"}},
    ]);
    cluster.apply(&vm);
    said(&fleet, "web", "Ready", "ImportFailed").await;
    // The spec fixes the inputs that a run waits for, so the VM needs another run.
    let_agents_read(&fleet);
    let address = &registry.address;
    let config = json!({"auths": {address: {"username": USER, "password": PASSWORD}}});
    cluster.apply(&secret(
        "registry",
        "kubernetes.io/dockerconfigjson",
        &json!({".dockerconfigjson": config.to_string()}),
    ));
    vm["spec"]["imagePullSecrets"] = json!([{"name": "registry"}]);
    cluster.apply(&vm);
    let pod = cluster.kubectl(&["get", "vmmvm", "web", "-o=jsonpath={.status.run.pod}"]);
    cluster.kubectl(&["delete", "pod", &pod]);
    fleet.all_run(&["web".into()], PATIENCE).await;
    let found = fleet.nodes[0].disks().await;
    let sizes: Vec<_> = found
        .iter()
        .map(|disk| disk.spec.as_ref().unwrap().size_bytes)
        .collect();
    assert_eq!(sizes, [8 << 20, 4 << 20], "{found:?}");
    assert!(!found[0].status.as_ref().unwrap().backing_image.is_empty());
    fleet.end(PATIENCE).await;
}

#[tokio::test]
async fn a_vm_is_placed_where_the_volume_of_its_claim_is() {
    let fleet = Fleet::start(2, 1).await;
    let cluster = &fleet.cluster;
    let mut vm = fleet.vm("web");
    vm["spec"]["vm"]["disks"] = json!([{"name": "data"}]);
    vm["spec"]["volumes"] = json!([{"name": "data", "persistentVolumeClaim": {"claimName": "web-data"}}]);
    cluster.apply(&vm);
    said(
        &fleet,
        "web",
        "Scheduled",
        "persistentvolumeclaim \\\"web-data\\\" not found",
    )
    .await;
    let folder = cluster.path("volume");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("disk.img"), vec![0; 1 << 20]).unwrap();
    let node = json!({"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-1"]});
    let items = json!([
        {
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "local"},
            "provisioner": "kubernetes.io/no-provisioner", "volumeBindingMode": "WaitForFirstConsumer",
        },
        {
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv-1"},
            "spec": {
                "capacity": {"storage": "1Mi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "local",
                "persistentVolumeReclaimPolicy": "Retain", "local": {"path": folder},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [node]}]}},
            },
        },
        {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": "web-data", "namespace": "default"},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": "local",
                "resources": {"requests": {"storage": "1Mi"}},
            },
        },
    ]);
    cluster.apply(&json!({"apiVersion": "v1", "kind": "List", "items": items}));
    fleet.all_run(&["web".into()], PATIENCE).await;
    assert_eq!(fleet.vms().await.unwrap()[0].node, "node-1");
    let disk = fleet.nodes[1].daemon.list().await[0].spec.clone().unwrap().disks[0].clone();
    let path = folder.join("disk.img").display().to_string();
    assert_eq!(disk.source, Some(v1::disk_spec::Source::Path(path)));
    assert_eq!(disk.beneath, folder.display().to_string());
    // The claim of an existing VM stays.
    cluster.kubectl(&["delete", "pvc", "web-data", "--wait=false"]);
    cluster.kubectl(&["get", "pvc", "web-data"]);
    fleet.end(PATIENCE).await;
    assert!(folder.join("disk.img").exists());
}
