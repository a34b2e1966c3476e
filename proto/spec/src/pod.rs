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
