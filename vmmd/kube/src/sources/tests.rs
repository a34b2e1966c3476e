use super::*;

fn manifest(change: impl FnOnce(&mut Value)) -> Map<String, Value> {
    let mut value = json!({
        "cpu": {"cores": 1},
        "memory": {"sizeBytes": "128Mi"},
        "boot": {"fromDisk": {}},
        "disks": [
            {"name": "root"},
            {"name": "scratch"},
            {"name": "data", "queues": 2},
            {"name": "local", "path": "/srv/vm/local.raw", "format": "raw"},
        ],
        "shares": [{"name": "files"}],
    });
    change(&mut value);
    value.as_object().unwrap().clone()
}

fn sources(change: impl FnOnce(&mut Value)) -> Sources {
    let mut value = json!({
        "volumes": [
            {"name": "root", "containerDisk": {"image": "registry.example/debian:13", "size": "20Gi"}},
            {"name": "scratch", "emptyDisk": {"size": 1 << 30}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "web-data"}},
            {"name": "files", "persistentVolumeClaim": {"claimName": "web-files", "readOnly": true}},
        ],
        "cloudInitFrom": {
            "userData": {"secretKeyRef": {"name": "web", "key": "user-data"}},
            "sshAuthorizedKeys": [{"configMapKeyRef": {"name": "team", "key": "keys"}}],
        },
    });
    change(&mut value);
    serde_json::from_value(value).unwrap()
}

#[test]
fn volume_is_the_disk_or_share_of_its_name() {
    let vm = vm("web", &manifest(|_| {}), &sources(|_| {})).unwrap();
    let spec = vm.spec.as_ref().unwrap();
    let paths: Vec<_> = spec
        .disks
        .iter()
        .map(|disk| (&*disk.name, disk.source.clone()))
        .collect();
    let local = disk_spec::Source::Path("/srv/vm/local.raw".to_owned());
    assert_eq!(
        paths,
        [
            ("root", None),
            ("scratch", None),
            ("data", None),
            ("local", Some(local))
        ]
    );
    assert_eq!(spec.disks[2].format(), v1::DiskFormat::Raw);
    assert_eq!(spec.disks[2].queues, 2);
    assert_eq!(spec.shares[0].path, "");
    assert!(spec.cloud_init.is_some(), "there is something to be filled in");
    // As the pod carries it.
    let text = serde_json::to_string(&vm).unwrap();
    assert_eq!(serde_json::from_str::<v1::Vm>(&text).unwrap(), vm);
}

#[test]
fn a_place_is_filled_by_name() {
    let mut vm = vm("web", &manifest(|_| {}), &sources(|_| {})).unwrap();
    let disk = disk_spec::Source::Disk("web-root".to_owned());
    fill(&mut vm, "root", &disk);
    fill(
        &mut vm,
        "files",
        &disk_spec::Source::Path("/mnt/files".to_owned()),
    );
    let spec = vm.spec.unwrap();
    assert_eq!(spec.disks[0].source, Some(disk));
    assert_eq!(spec.shares[0].path, "/mnt/files");
    assert_eq!(spec.disks[1].source, None);
}

#[test]
fn wrong_source_is_refused_with_the_path_of_its_field() {
    type Change = fn(&mut Value);
    let table: [(Change, Change, &str); 14] = [
        (
            |_| {},
            |s| s["volumes"][0]["name"] = "none".into(),
            "spec.volumes[0].name: there is no disk",
        ),
        (
            |_| {},
            |s| s["volumes"][0]["name"] = "No".into(),
            "spec.volumes[0].name: must be 1 to 63",
        ),
        (
            |_| {},
            |s| s["volumes"][1]["name"] = "root".into(),
            "spec.volumes[1].name: two volumes",
        ),
        (
            |_| {},
            |s| s["volumes"][0]["emptyDisk"] = json!({"size": 512}),
            "spec.volumes[0]: must have one of",
        ),
        (
            |_| {},
            |s| s["volumes"][0]["containerDisk"]["image"] = "debian".into(),
            "spec.volumes[0].containerDisk.image: ",
        ),
        (
            |_| {},
            |s| s["volumes"][0]["containerDisk"]["size"] = "x".into(),
            "spec.volumes[0].containerDisk.size: ",
        ),
        (
            |_| {},
            |s| s["volumes"][1]["emptyDisk"]["size"] = 5.into(),
            "spec.volumes[1].emptyDisk.size: ",
        ),
        (
            |_| {},
            |s| s["volumes"][2]["persistentVolumeClaim"]["claimName"] = "".into(),
            "spec.volumes[2].persistentVolumeClaim.claimName: ",
        ),
        (
            |m| m["disks"][0]["path"] = "/a".into(),
            |_| {},
            "spec.vm.disks[0]: has a source",
        ),
        (
            |m| m["disks"][2]["beneath"] = "/a".into(),
            |_| {},
            "spec.vm.disks[2]: has a source",
        ),
        (
            |m| m["shares"][0]["name"] = "scratch".into(),
            |_| {},
            "spec.vm.shares[0]: the volume scratch is a disk",
        ),
        (
            |m| m["cloudInit"] = json!({"userData": "#!/bin/sh"}),
            |_| {},
            "spec.cloudInitFrom.userData: spec.vm.cloudInit has it too",
        ),
        (
            |_| {},
            |s| s["cloudInitFrom"]["userData"] = json!({}),
            "spec.cloudInitFrom.userData: must have one of",
        ),
        (
            |_| {},
            |s| s["cloudInitFrom"]["sshAuthorizedKeys"][0]["configMapKeyRef"]["key"] = "".into(),
            "spec.cloudInitFrom.sshAuthorizedKeys[0].configMapKeyRef: ",
        ),
    ];
    for (index, (change_vm, change_sources, wanted)) in table.into_iter().enumerate() {
        let Invalid(text) = vm("web", &manifest(change_vm), &sources(change_sources)).unwrap_err();
        assert!(text.contains(wanted), "{index}: {text}");
    }
    // Errors found by vmmd's own checks appear beside these.
    let both = vm(
        "web",
        &manifest(|m| m["memory"]["sizeBytes"] = 5.into()),
        &sources(|s| s["volumes"][0]["name"] = "none".into()),
    );
    let Invalid(text) = both.unwrap_err();
    assert!(
        text.contains("spec.volumes[0].name") && text.contains("spec.vm.memory.sizeBytes"),
        "{text}"
    );
}

#[test]
fn a_disk_without_a_source_and_a_volume_is_refused() {
    let Invalid(text) = vm("web", &manifest(|_| {}), &sources(|s| s["volumes"] = json!([]))).unwrap_err();
    assert!(text.contains("spec.vm.disks[0]"), "{text}");
}
