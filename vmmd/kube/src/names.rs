//! Names that the agent, the controller and the manifests share.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

/// Label of launcher pods and of VMs in vmmd: uid of the VirtualMachine.
pub const MACHINE_UID: &str = "vmmd.dev/machine-uid";
/// Label of launcher pods and of VMs in vmmd: number of the run. It only ever grows.
pub const EPOCH: &str = "vmmd.dev/epoch";
/// Label of VMs in vmmd: uid of the launcher pod.
pub const POD_UID: &str = "vmmd.dev/pod-uid";
/// Annotation of VMs in vmmd: namespace and name of the launcher pod, with a slash between.
pub const POD: &str = "vmmd.dev/pod";
/// Label of VMs in vmmd: the Kubernetes node whose agent made them.
pub const AGENT: &str = "vmmd.dev/node";
/// Annotation of disks in vmmd that were made for a run: name of the volume.
pub const VOLUME: &str = "vmmd.dev/volume";
/// Annotation of VirtualMachines: another value begins a new run, regardless of the run policy for
/// ended runs.
pub const START: &str = "vmmd.dev/start";
/// Annotation of VirtualMachines: another value moves the VM to another node while it runs.
pub const MIGRATE: &str = "vmmd.dev/migrate";
/// Label of VirtualMachines that are being moved: the node that the VM leaves, as
/// [`label_value`]. The agent of that node watches them.
pub const MIGRATING_FROM: &str = "vmmd.dev/migrating-from";
/// Annotation of launcher pods whose VM uses a volume that only one node has at a time.
pub const SINGLE_NODE: &str = "vmmd.dev/single-node";
/// Finalizer of launcher pods. The controller removes it when nothing of the pod runs, and never
/// will.
pub const VM_GONE: &str = "vmmd.dev/vm-gone";
/// Finalizer of VirtualMachines: the controller removes it when the launcher pod does not exist.
pub const POD_GONE: &str = "vmmd.dev/pod-gone";
/// The container of launcher pods.
pub const CONTAINER: &str = "vm";
/// The field manager, and the source of events.
pub const MANAGER: &str = "vmmd-kube";

/// End of a run whose VM a client of vmmd has stopped.
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

/// Name of a node as the value of a label: a longer name is replaced by its hash.
pub fn label_value(node: &str) -> String {
    match node.len() {
        0..=MAX_LABEL => node.to_owned(),
        _ => digest(node.as_bytes())[..MAX_LABEL].to_owned(),
    }
}

/// Name of the launcher pod of a run.
pub fn pod_name(name: &str, epoch: i64) -> String {
    format!("{name}-{epoch}")
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
