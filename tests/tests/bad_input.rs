//! Bad input gets one clear error that says what to do, and changes nothing.

use serde_json::{Value, json};
use vmmd_tests::node::Kernel;
use vmmd_tests::run::Output;
use vmmd_tests::vm::{Vm, VmSpec};
use vmmd_tests::{Case, Node};

fn create(node: &Node, manifest: &Value) -> Output {
    node.ssh(&format!(
        "vmmctl create -f - <<'MANIFEST'\n{manifest}\nMANIFEST\n"
    ))
    .expect("ssh")
}

/// One line (or one a field) that begins with `error:`, says each of `says`, and no exit code of success.
fn refused(output: &Output, code: i32, says: &[&str]) {
    assert_eq!(
        output.status.code(),
        Some(code),
        "{}{}",
        output.stdout,
        output.stderr
    );
    assert!(output.stderr.starts_with("error: "), "{}", output.stderr);
    assert!(output.stderr.lines().count() <= 4, "{}", output.stderr);
    for part in says {
        assert!(output.stderr.contains(part), "no {part:?} in {}", output.stderr);
    }
    for never in ["os error", "panicked", "Status {"] {
        assert!(!output.stderr.contains(never), "{}", output.stderr);
    }
}

/// All that the daemon keeps: its VMs, and the files of its folders.
fn state(node: &Node) -> String {
    node.sh("vmmctl get vm -o json; find /run/vmmd /var/lib/vmmd /var/log/vmmd -not -name '*.redb' | sort")
        .expect("state")
}

#[test]
fn a_manifest_that_makes_no_sense_is_refused_whole() {
    let case = Case::new("bad-manifest").expect("node");
    let node = case.node();
    let before = state(node);
    let name = case.name();
    let good = VmSpec::busybox(Kernel::Cloud612).manifest(name);
    let with = |pointer: &str, value: Value| {
        let mut manifest = good.clone();
        *manifest.pointer_mut(pointer).expect("a field") = value;
        manifest
    };
    let mut unknown = good.clone();
    unknown["spec"]["cpus"] = json!(2);
    let table: &[(Value, &[&str])] = &[
        (unknown, &["cpus"]),
        (
            with("/spec/cpu/cores", json!(0)),
            &["spec.cpu.cores", "1 to 254", "is 0"],
        ),
        (
            with("/spec/cpu/cores", json!(10_000)),
            &["spec.cpu.cores", "1 to 254", "10000"],
        ),
        (
            with("/spec/memory/sizeBytes", json!(64 << 20)),
            &["spec.memory.sizeBytes", "128 MiB"],
        ),
        (with("/metadata/name", json!("a/b")), &["metadata.name", "a/b"]),
        (with("/kind", json!("Pod")), &["kind", "Vm"]),
        (
            with("/spec/boot/linux/kernel", json!("vmlinuz")),
            &["spec.boot.linux.kernel", "absolute"],
        ),
    ];
    for (manifest, says) in table {
        refused(&create(node, manifest), 6, says);
    }
    // All problems at once.
    let mut several = with("/spec/cpu/cores", json!(0));
    several["metadata"]["name"] = json!("A");
    refused(&create(node, &several), 6, &["spec.cpu.cores", "metadata.name"]);
    assert_eq!(state(node), before);
}

#[test]
fn what_the_node_does_not_have_is_refused_at_start_and_nothing_is_left_running() {
    let case = Case::new("bad-node").expect("node");
    let node = case.node();
    let folder = case.folder().expect("folder");
    node.sh(&format!(
        "cd {folder}; mkdir dir; truncate -s 1000 odd.raw; truncate -s 1M good.raw; \
         head -c 100000 /var/lib/guests/linux-6.12-cloud/vmlinuz >short; echo text >text; : >empty"
    ))
    .expect("files");
    let busybox = || VmSpec::busybox(Kernel::Cloud612);
    let disk = |file: &str| busybox().disk("data", &format!("{folder}/{file}"), false);
    let kernel = |file: &str| VmSpec::new(format!("{folder}/{file}"), None);
    let table: &[(&str, VmSpec, &[&str])] = &[
        ("memory", busybox().memory_mib(16_384), &["memory"]),
        ("no-kernel", kernel("missing"), &["kernel", "missing"]),
        ("short", kernel("short"), &["kernel"]),
        ("text", kernel("text"), &["kernel"]),
        ("empty", kernel("empty"), &["kernel"]),
        ("kernel-dir", kernel("dir"), &["kernel", "director"]),
        ("no-disk", disk("missing.raw"), &["data", "missing.raw"]),
        ("dir", disk("dir"), &["data", "director"]),
        ("odd", disk("odd.raw"), &["data", "512", "1000"]),
        ("bridge", busybox().nic("eth0", "nobridge"), &["nobridge"]),
    ];
    for (suffix, spec, says) in table {
        let manifest = spec.manifest(&format!("{}-{suffix}", case.name()));
        let created = create(node, &manifest);
        // Errors that are detectable at creation are refused there, other errors at the start.
        let output = if created.success() {
            let started = node
                .ssh(&format!("vmmctl start {}-{suffix}", case.name()))
                .expect("ssh");
            let deleted = node
                .ssh(&format!("vmmctl delete {}-{suffix}", case.name()))
                .expect("ssh");
            assert!(
                deleted.success(),
                "{suffix} can be deleted without force: {}",
                deleted.stderr
            );
            started
        } else {
            created
        };
        assert!(!output.success(), "{suffix} is accepted");
        let code = output.status.code().expect("a code");
        assert!([3, 5, 6, 9].contains(&code), "{suffix}: {code} {}", output.stderr);
        refused(&output, code, says);
    }
    assert_eq!(node.sh("pgrep -x vmm | wc -l").expect("processes").trim(), "0");
}

#[test]
fn verbs_on_the_wrong_vm_or_in_the_wrong_state_say_so() {
    let case = Case::new("bad-state").expect("node");
    let node = case.node();
    for verb in [
        "start",
        "stop",
        "restart",
        "pause",
        "resume",
        "delete",
        "console",
        "get vm",
        "describe vm",
    ] {
        let output = node
            .ssh(&format!("vmmctl {verb} nobody </dev/null"))
            .expect("ssh");
        refused(&output, 3, &["nobody"]);
    }
    let vm = Vm::start(&case, "", &VmSpec::busybox(Kernel::Cloud612)).expect("start");
    refused(&vm.try_ctl("delete").expect("ssh"), 5, &["--force"]);
    let again = create(node, &VmSpec::busybox(Kernel::Cloud612).manifest(vm.name()));
    refused(&again, 4, &["already"]);
    assert_eq!(vm.phase().expect("phase"), "RUNNING");
}

#[test]
fn garbage_on_the_socket_disturbs_nobody() {
    let case = Case::new("bad-socket").expect("node");
    let node = case.node();
    let pid = node.sh("systemctl show -P MainPID vmmd").expect("pid");
    node.sh(
        "for i in 1 2 3 4 5; do head -c 200000 /dev/urandom | timeout 5 socat -u - UNIX-CONNECT:/run/vmmd/vmmd.sock || true; done; \
         printf 'GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n' | timeout 5 socat - UNIX-CONNECT:/run/vmmd/vmmd.sock >/dev/null || true; \
         printf 'PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n' | timeout 5 socat - UNIX-CONNECT:/run/vmmd/vmmd.sock >/dev/null || true",
    )
    .expect("garbage");
    node.sh("vmmctl get vm").expect("others are served");
    assert_eq!(node.sh("systemctl show -P MainPID vmmd").expect("pid"), pid);
    let no_socket = node.ssh("vmmctl --socket /run/nowhere.sock get vm").expect("ssh");
    refused(&no_socket, 7, &["/run/nowhere.sock", "vmmd"]);
}

#[test]
fn a_full_file_system_under_the_store_refuses_new_vms_and_keeps_the_old() {
    let case = Case::new("bad-full").expect("node");
    let (node, name) = (case.node(), case.name());
    // A daemon of its own on a small file system; the node's own store is not to be filled.
    let folder = case.folder().expect("folder");
    node.sh(&format!(
        "cd {folder} && mkdir state run log && mount -t tmpfs -o size=8M full state && \
         printf '%s\\n' 'state_dir = \"{folder}/state\"' 'run_dir = \"{folder}/run\"' 'log_dir = \"{folder}/log\"' >vmmd.toml && \
         systemd-run -q --collect --unit={name} -p Type=notify -p Delegate=yes -p KillMode=process \
             /usr/lib/vmmd/vmmd --config {folder}/vmmd.toml"
    ))
    .expect("a second daemon");
    let ctl = format!("vmmctl --socket {folder}/run/vmmd.sock");
    let manifest = |name: &str| VmSpec::busybox(Kernel::Cloud612).manifest(name);
    let create = |name: &str| {
        node.ssh(&format!(
            "{ctl} create -f - <<'MANIFEST'\n{}\nMANIFEST\n",
            manifest(name)
        ))
        .expect("ssh")
    };
    assert!(create("kept").success());
    node.sh(&format!(
        "dd if=/dev/zero of={folder}/state/filler bs=4k 2>/dev/null; true"
    ))
    .expect("fill it");
    let mut made = Vec::new();
    let output = loop {
        let name = format!("vm-{}", made.len());
        let output = create(&name);
        if !output.success() {
            break output;
        }
        made.push(name);
        assert!(made.len() < 2000, "the store never fills");
    };
    refused(&output, 9, &["full", "make room"]);
    let listed = node
        .sh(&format!("{ctl} get vm -o name"))
        .expect("it still answers");
    assert_eq!(listed.lines().count(), made.len() + 1, "{listed}");
    node.sh(&format!("rm {folder}/state/filler"))
        .expect("space again");
    assert!(create("later").success(), "it goes on when there is space");
    node.sh(&format!("systemctl stop {name}; umount {folder}/state"))
        .expect("clean up");
}
