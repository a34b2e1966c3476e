//! Bad input gets one clear error that says what to do, and changes nothing.

use serde_json::Value;
use vmmd_tests::node::Kernel;
use vmmd_tests::run::Output;
use vmmd_tests::storage::refused;
use vmmd_tests::vm::VmSpec;
use vmmd_tests::{Case, Node};

fn create(node: &Node, manifest: &Value) -> Output {
    node.ssh(&format!(
        "vmmctl create -f - <<'MANIFEST'\n{manifest}\nMANIFEST\n"
    ))
    .expect("ssh")
}

/// Tests that need the node to themselves.
mod exclusive {
    use super::*;

    #[test]
    fn missing_host_resource_is_refused_at_start() {
        let case = Case::new("bad-node");
        let node = case.node();
        let folder = case.folder();
        node.sh(&format!(
            "cd {folder}; mkdir dir; truncate -s 1000 odd.raw; truncate -s 1M good.raw; \
             head -c 100000 /var/lib/guests/linux-6.12-cloud/vmlinuz >short; echo text >text; : >empty"
        ));
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
            let code = output.status.code().expect("a code");
            assert!([3, 5, 6, 9].contains(&code), "{suffix}: {code} {}", output.stderr);
            refused(&output, code, says);
        }
        assert_eq!(node.sh("pgrep -x vmm | wc -l").trim(), "0");
    }
}
