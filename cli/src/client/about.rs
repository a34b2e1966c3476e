//! Names the subject of a failure, and adds a command that helps.

use std::time::Duration;

use vmmd_api::v1;

use super::{Client, call, call::NO_ANSWER};
use crate::failure::{Code, Failure};

/// Hint for an unknown disk.
pub const DISKS: &str = "`vmmctl get disk` lists the disks";

/// Hint for an unknown image.
const IMAGES: &str = "`vmmctl get image` lists the images";

/// Time limit for the search for the reason of a missing answer.
const PROBE: Duration = Duration::from_secs(5);

impl Client {
    /// Names the process that did not answer in time: vmmd, or the vmm process of the VM in the
    /// call.
    pub async fn name_the_silent(&self, failure: Failure, vm: &str) -> Failure {
        if &*failure.reason != NO_ANSWER {
            return failure;
        }
        let request = v1::GetVmRequest { name: vm.to_owned() };
        let Ok(answer) = call(PROBE, self.vms.clone().get_vm(request)).await else {
            return failure;
        };
        let status = answer.vm.and_then(|vm| vm.status).unwrap_or_default();
        let ready = status
            .conditions
            .into_iter()
            .find(|condition| condition.r#type == "Ready");
        let silent = ready.is_some_and(|ready| ready.status() == v1::ConditionStatus::Unknown);
        let message = if silent {
            format!("the vmm process of VM \"{vm}\" does not answer, but vmmd does")
        } else {
            format!(
                "{}, but vmmd answers: the vmm process of VM \"{vm}\" hangs or is busy",
                failure.message
            )
        };
        let hint =
            format!("`vmmctl logs --vmm {vm}` may show the reason; `vmmctl stop --force {vm}` kills the VM");
        Failure {
            hint: Some(hint.into()),
            message,
            ..failure
        }
    }
}

/// Adds to a failure about a VM its name, and the command that helps.
pub fn about_vm(failure: Failure, name: &str) -> Failure {
    let hint = match &*failure.reason {
        "STILL_RUNNING" => format!("use `vmmctl stop {name}`, or `vmmctl delete vm --force {name}`"),
        "NOT_RUNNING" => format!("`vmmctl start {name}` starts it"),
        "RUN_POLICY" => format!("`vmmctl describe vm {name}` shows the run policy"),
        "VM_PAUSED" => format!("`vmmctl resume {name}` resumes it"),
        "VM_EXISTS" => format!("`vmmctl describe vm {name}` shows it"),
        "KVM_UNAVAILABLE" | "KVM_UNUSABLE" | "INSUFFICIENT_MEMORY" => {
            "`vmmctl describe node` shows the resources of the node".into()
        }
        "" | "VM_NOT_FOUND" if failure.code == Code::NotFound => "`vmmctl get vm` lists the VMs".into(),
        _ => return failure.about("vm", name),
    };
    failure.about("vm", name).hint(hint)
}

/// Adds to a failure about a disk of the node its name, and the command that helps.
pub fn about_disk(failure: Failure, name: &str) -> Failure {
    let hint = match failure.code {
        _ if &*failure.reason == "IMAGE_NOT_FOUND" => IMAGES.into(),
        Code::NotFound => DISKS.into(),
        Code::Conflict => format!("`vmmctl describe disk {name}` shows it"),
        _ => return failure.about("disk", name),
    };
    failure.about("disk", name).hint(hint)
}

/// Adds to a failure about a snapshot its name, and the command that helps.
pub fn about_snapshot(failure: Failure, name: &str) -> Failure {
    let hint = match &*failure.reason {
        "SNAPSHOT_NOT_FOUND" => "`vmmctl get snapshot` lists the snapshots".to_owned(),
        "SNAPSHOT_EXISTS" => format!("`vmmctl describe snapshot {name}` shows it"),
        "SNAPSHOT_DISKS" => "`--paused` copies the disks while the VM is paused".to_owned(),
        "VM_NOT_STOPPED" => "`vmmctl stop` stops the VM; `vmmctl clone` creates other VMs".to_owned(),
        _ => return failure.about("snapshot", name),
    };
    failure.about("snapshot", name).hint(hint)
}

/// Adds to a failure about a network its name, and the command that helps.
pub fn about_network(failure: Failure, name: &str) -> Failure {
    match &*failure.reason {
        "NETWORK_NOT_FOUND" => failure
            .about("network", name)
            .hint("`vmmctl get network` lists the networks"),
        _ => failure.about("network", name),
    }
}

/// Adds to a failure about an image its name, and the command that helps.
pub fn about_image(failure: Failure, name: &str) -> Failure {
    let hint = match &*failure.reason {
        // The missing object may also be a file or an image of a registry.
        "IMAGE_NOT_FOUND" => IMAGES.to_owned(),
        "IMAGE_EXISTS" => format!("`vmmctl describe image {name}` shows it"),
        _ => return failure.about("image", name),
    };
    failure.about("image", name).hint(hint)
}

/// An answer without its content, which a daemon never sends.
pub fn empty_answer() -> Failure {
    Failure::new(Code::Other, "vmmd sent an empty answer").hint("compare the versions with `vmmctl version`")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(reason: &str) -> Failure {
        Failure {
            reason: reason.into(),
            ..Failure::new(Code::NotFound, "missing")
        }
    }

    #[test]
    fn missing_object_has_a_hint_to_the_list() {
        let hint = |failure: Failure| failure.hint.unwrap_or_default();
        assert_eq!(&*hint(about_image(failed("IMAGE_NOT_FOUND"), "a")), IMAGES);
        assert_eq!(&*hint(about_disk(failed("IMAGE_NOT_FOUND"), "a")), IMAGES);
        assert_eq!(&*hint(about_disk(failed("DISK_NOT_FOUND"), "a")), DISKS);
        // An image of a registry, and a file of the node.
        for reason in ["OCI_IMAGE_NOT_FOUND", "PLATFORM_NOT_FOUND", "DISK_NOT_FOUND"] {
            assert_eq!(about_image(failed(reason), "a").hint, None, "{reason}");
        }
    }
}
