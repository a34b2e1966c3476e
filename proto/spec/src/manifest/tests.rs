use super::*;

const VM_OF_ONE: &str = "\
apiVersion: vmmd/v1
kind: Vm
metadata: {name: web, uid: u, generation: 7}
spec:
  cpu: {cores: 2}
  memory: {sizeBytes: 1Gi, backing: private}
  boot: {linux: {kernel: /boot/vmlinuz}}
  disks: [{name: root, path: /srv/root.raw, format: RAW}]
status: {phase: RUNNING}
";

#[test]
fn a_manifest_is_a_vm_without_what_only_the_daemon_sets() {
    let roots = yaml::documents(VM_OF_ONE).unwrap();
    assert_eq!(kind(&roots[0], &["Disk", VM]), Ok(VM));
    let (vm, manifest) = vm(&roots[0]).unwrap();
    assert_eq!(manifest.spec.memory_bytes, 1 << 30);
    assert_eq!(vm.status, None);
    let metadata = vm.metadata.unwrap();
    assert_eq!((metadata.uid.as_str(), metadata.generation), ("", 0));
}

#[test]
fn a_message_and_its_manifest_differ_by_the_head() {
    let message = serde_json::json!({"metadata": {"name": "web"}});
    let manifest = with_head(VM, message.clone());
    assert_eq!(manifest["apiVersion"], API_VERSION);
    assert_eq!(manifest["kind"], VM);
    assert_eq!(without_head(manifest), message);
}

#[test]
fn each_problem_has_its_line_and_its_field() {
    for (text, expected) in [
        (
            VM_OF_ONE.replace("cores", "coars"),
            "line 5: spec.cpu.coars: unknown field; did you mean `cores`?",
        ),
        (
            VM_OF_ONE.replace("RAW", "vmdk").replace("1Gi", "1x"),
            "line 6: spec.memory.sizeBytes: must be a number of bytes such as 268435456, 256Mi, 5Gi or 1G, is \"1x\"; \
             line 8: spec.disks[0].format: must be raw, qcow2 or iso, is \"vmdk\"",
        ),
        (
            VM_OF_ONE.replace("2}", "0}"),
            "line 5: spec.cpu.cores: must be 1 to 254, is 0",
        ),
        (
            VM_OF_ONE.replace("kind: Vm", "kind: Node"),
            "line 2: kind: must be Vm, is \"Node\"",
        ),
        (
            VM_OF_ONE.replace("apiVersion: vmmd/v1\n", ""),
            "line 1: apiVersion: missing: a manifest begins with `apiVersion: vmmd/v1` and `kind: Vm`",
        ),
        // Problems that follow from another problem are left out; independent problems are reported.
        (
            VM_OF_ONE
                .replace("RAW", "vmdk")
                .replace("{kernel: /boot/vmlinuz}", "{kernell: /boot/vmlinuz}")
                .replace("cores: 2", "cores: 0"),
            "line 5: spec.cpu.cores: must be 1 to 254, is 0; \
             line 7: spec.boot.linux.kernell: unknown field; did you mean `kernel`?; \
             line 8: spec.disks[0].format: must be raw, qcow2 or iso, is \"vmdk\"",
        ),
        (String::new(), "must hold one VM, holds 0 documents"),
    ] {
        let problems = single_vm(&text).unwrap_err();
        assert_eq!(problems.to_string(), expected);
    }
}
