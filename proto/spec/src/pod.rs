//! The pod of a cluster that has a VM, and its volumes.

use vmmd_api::v1;

use super::{Violations, name::Name};

/// Longest uid of a pod in bytes.
pub const MAX_UID: usize = 63;

/// Uid of a pod: 1 to [`MAX_UID`] letters, digits and dashes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodUid(String);

impl PodUid {
    /// The uid of a text; `None` when it is none.
    pub fn new(text: &str) -> Option<Self> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        let valid = (1..=MAX_UID).contains(&text.len()) && text.bytes().all(allowed);
        valid.then(|| Self(text.to_owned()))
    }

    /// Validates `wire`, which is `spec.pod`.
    pub(super) fn of_spec(found: &mut Violations, wire: &v1::PodSpec) -> Option<Self> {
        let uid = Self::new(&wire.uid);
        if uid.is_none() {
            let wanted = format_args!("must be 1 to {MAX_UID} letters, digits or '-'");
            found.add("spec.pod.uid", wanted);
        }
        uid
    }

    /// The uid itself.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A volume of the VM's pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodVolume {
    /// The pod; `None` in a disk or share that was validated without its VM.
    pub pod: Option<PodUid>,
    /// Name of the volume.
    pub name: Name,
}

impl PodVolume {
    /// Validates the name of a volume; `field` is its path.
    pub(super) fn new(found: &mut Violations, field: &str, name: &str) -> Option<Self> {
        let name = super::vm::name(found, field, name)?;
        Some(Self { pod: None, name })
    }
}

/// Whether a NIC is in the network of the VM's pod.
fn is_in_pod(nic: &v1::NicSpec) -> bool {
    matches!(nic.attachment, Some(v1::nic_spec::Attachment::PodNetwork(_)))
}

/// Checks that only a VM of a pod has volumes and the network of a pod.
pub(super) fn parts(found: &mut Violations, spec: &v1::VmSpec) {
    if spec.pod.is_some() {
        return;
    }
    let disks = spec.disks.iter().enumerate();
    let disks = disks.filter(|(_, disk)| !disk.pod_volume().is_empty());
    let disks = disks.map(|(index, _)| format!("spec.disks[{index}].podVolume"));
    let shares = spec.shares.iter().enumerate();
    let shares = shares.filter(|(_, share)| !share.pod_volume.is_empty());
    let shares = shares.map(|(index, _)| format!("spec.shares[{index}].podVolume"));
    let nics = spec.nics.iter().enumerate().filter(|(_, nic)| is_in_pod(nic));
    let nics = nics.map(|(index, _)| format!("spec.nics[{index}].podNetwork"));
    for field in disks.chain(shares).chain(nics) {
        found.add(field, "needs spec.pod: only the VM of a pod has parts of a pod");
    }
}

/// A pod translates its one address to one guest's.
pub(super) fn one_network(found: &mut Violations, nics: &[v1::NicSpec]) {
    let in_pod = nics.iter().enumerate().filter(|(_, nic)| is_in_pod(nic));
    for (index, _) in in_pod.skip(1) {
        found.add(
            format_args!("spec.nics[{index}].podNetwork"),
            "another NIC of the VM has the pod's network: attach this one elsewhere",
        );
    }
}
