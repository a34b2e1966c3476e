//! Names that the agent, the controller and the manifests share.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

/// Label of the nodes that run VMs, and key of the taint that keeps other pods away from them.
pub const NODE: &str = "vmmd.dev/vm";
/// Label of placeholder pods and of VMs in vmmd: uid of the VirtualMachine.
pub const MACHINE_UID: &str = "vmmd.dev/machine-uid";
/// Label of placeholder pods and of VMs in vmmd: number of the run. It only ever grows.
pub const EPOCH: &str = "vmmd.dev/epoch";
/// Label of VMs in vmmd: uid of the placeholder pod.
pub const POD_UID: &str = "vmmd.dev/pod-uid";
/// Annotation of VMs in vmmd: namespace and name of the placeholder pod, with a slash between.
pub const POD: &str = "vmmd.dev/pod";
/// Label of VMs in vmmd: the Kubernetes node whose agent made them.
pub const AGENT: &str = "vmmd.dev/node";
/// Annotation of placeholder pods: the VM of vmmd, as its canonical JSON.
pub const MANIFEST: &str = "vmmd.dev/manifest";
/// Annotation of placeholder pods: sources that the agent fills in, as JSON; absent without
/// sources.
pub const SOURCES: &str = "vmmd.dev/sources";
/// Annotation of disks in vmmd that were made for a run: name of the volume.
pub const VOLUME: &str = "vmmd.dev/volume";
/// Annotation of VirtualMachines: another value begins a new run, regardless of the run policy for
/// ended runs.
pub const START: &str = "vmmd.dev/start";
/// Annotation of VirtualMachines: another value moves the VM to another node while it runs.
pub const MIGRATE: &str = "vmmd.dev/migrate";
/// Annotation of the placeholder pod that a VM is to leave: number of the run that it gets. It wakes the node's agent, which asks the
/// VirtualMachine.
pub const LEAVES: &str = "vmmd.dev/leaves-for";
/// Annotation of VMs in vmmd that are being moved: namespace, name and uid of the placeholder pod that they get, with slashes between.
pub const MOVING: &str = "vmmd.dev/moving-to";
/// Label of nodes to which VMs can be moved.
pub const MIGRATION: &str = "vmmd.dev/migration";
/// Annotation of these nodes: where their vmmd is reached by those of other nodes, as HOST:PORT.
pub const MIGRATION_ADDRESS: &str = "vmmd.dev/migration-address";
/// Label of nodes: model of the processor.
pub const CPU_MODEL: &str = "vmmd.dev/cpu-model";
/// Finalizer of placeholder pods. Only the agent of the pod's node takes it away, when the VM is not there any more; from a pod that was
/// never bound to a node, the controller does.
pub const VM_GONE: &str = "vmmd.dev/vm-gone";
/// Finalizer of VirtualMachines: the controller takes it away when the placeholder pod is not there any more.
pub const POD_GONE: &str = "vmmd.dev/pod-gone";
/// Type of the condition of a placeholder pod whose message has the addresses of its VM that have a meaning on the VM's node alone, with commas between.
pub const NODE_LOCAL: &str = "vmmd.dev/node-local-addresses";
/// The container of placeholder pods.
pub const CONTAINER: &str = "vm";
/// The image that placeholder pods name. It is never pulled.
pub const IMAGE: &str = "vmmd.dev/virtual-machine:none";
/// Architecture of all nodes.
pub const ARCHITECTURE: &str = "amd64";
/// The field manager, and the source of events.
pub const MANAGER: &str = "vmmd-kube";

/// Reason of the container of a placeholder pod whose VM is to come from another node.
pub const AWAITS: &str = "AwaitsMigration";
/// Reason of a pod that has ended because somebody stopped the VM in vmmd.
pub const STOPPED: &str = "StoppedByRequest";

/// Longest name of a VM in vmmd.
const MAX_LABEL: usize = 63;

/// Name in vmmd of the VM of a VirtualMachine: readable, and another one for each uid.
pub fn vm_name(namespace: &str, name: &str, uid: &str) -> String {
    let hash = &digest(uid.as_bytes())[..8];
    let mut readable = format!("{namespace}-{name}").replace('.', "-");
    readable.truncate(MAX_LABEL - 1 - hash.len());
    format!("{}-{hash}", readable.trim_end_matches('-'))
}

/// Name of the placeholder pod of a run.
pub fn pod_name(name: &str, epoch: i64) -> String {
    format!("{name}-{epoch}")
}

/// Type of the condition of a placeholder pod that says how the migration to the run with this number has ended.
pub fn migration_condition(epoch: i64) -> String {
    format!("vmmd.dev/migration-{epoch}")
}

/// Name in vmmd of a disk that is made for a volume of a run, whose pod has this uid: the same one each time.
pub fn disk_name(volume: &str, pod_uid: &str) -> String {
    let hash = &digest(format!("{pod_uid}/{volume}").as_bytes())[..16];
    let mut readable = volume.to_owned();
    readable.truncate(MAX_LABEL - 1 - hash.len());
    format!("{}-{hash}", readable.trim_end_matches('-'))
}

/// Name of the volume of a launcher pod that has the values of a Secret or a ConfigMap.
pub fn values_volume(secret: bool, object: &str) -> String {
    let kind = if secret { "secret" } else { "config" };
    format!("{kind}-{}", &digest(object.as_bytes())[..24])
}

/// Name in vmmd of the image of this reference. An image that was imported with passwords of a
/// namespace is not the public image of the same reference: the content is kept once in any case.
pub fn image_name(reference: &str, namespace: Option<&str>) -> String {
    let place = format!("{}/{reference}", namespace.unwrap_or_default());
    format!("kube-{}", &digest(place.as_bytes())[..24])
}

/// SHA-256 in hexadecimal.
pub fn digest(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(64);
    for byte in Sha256::digest(bytes) {
        // Writing to a string can't fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_is_of_one_volume_and_image_of_one_reference() {
        let one = disk_name("root", "p-1");
        assert!(one.starts_with("root-"), "{one}");
        assert_ne!(one, disk_name("root", "p-2"));
        assert_ne!(one, disk_name("data", "p-1"));
        assert!(disk_name(&"x".repeat(63), "p-1").len() <= MAX_LABEL);
        let open = image_name("registry.example/debian:13", None);
        assert_ne!(open, image_name("registry.example/debian:13", Some("shop")));
        assert_ne!(open, image_name("registry.example/debian:12", None));
    }

    #[test]
    fn a_vm_name_is_a_dns_label_and_another_one_for_each_uid() {
        let one = vm_name("default", "web.example.org", "uid-1");
        assert!(one.starts_with("default-web-example-org-"), "{one}");
        assert_ne!(one, vm_name("default", "web.example.org", "uid-2"));
        let long = vm_name(&"n".repeat(52), &"-".repeat(200), "uid-1");
        assert!(long.len() <= MAX_LABEL, "{long}");
        assert!(long.starts_with("nnnn") && !long.contains("---"), "{long}");
    }
}
