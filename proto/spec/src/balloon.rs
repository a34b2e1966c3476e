//! The balloon of a VM: how much of its memory the guest keeps.

use vmmd_api::v1;

use super::{
    Violations,
    vm::{MEMORY_STEP, MIN_TARGET},
};

/// A balloon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Balloon {
    /// The guest reports pages that it has freed, and the node takes them back.
    pub free_page_reporting: bool,
    /// Memory left to the guest, in bytes; all of its memory when `None`.
    pub target_bytes: Option<u64>,
}

impl Balloon {
    /// Validates the balloon of a VM with that memory. A VM has a balloon by default, except with
    /// huge pages: they cannot be given back in part.
    pub(super) fn new(found: &mut Violations, spec: &v1::VmSpec) -> Option<Self> {
        let memory = spec.memory.unwrap_or_default();
        let huge = memory.huge_pages() != v1::HugePages::Unspecified;
        let Some(wire) = &spec.balloon else {
            return (!huge).then(Self::default);
        };
        if wire.disabled {
            if wire.free_page_reporting || wire.target_bytes != 0 {
                found.add(
                    "spec.balloon.disabled",
                    "leaves nothing else to be said of the balloon",
                );
            }
            return None;
        }
        if huge {
            found.add(
                "spec.balloon",
                "must be left out or `disabled` with spec.memory.hugePages: huge pages can't be given back in part",
            );
        }
        target(
            found,
            "spec.balloon.targetBytes",
            wire.target_bytes,
            memory.size_bytes,
        );
        Some(Self {
            free_page_reporting: wire.free_page_reporting,
            target_bytes: (wire.target_bytes != 0).then_some(wire.target_bytes),
        })
    }

    /// Returns the size of the balloon of a VM with that memory, in bytes.
    pub fn held_bytes(&self, memory_bytes: u64) -> u64 {
        self.target_bytes
            .map_or(0, |target| memory_bytes.saturating_sub(target))
    }
}

/// Records a violation for an invalid memory target of a VM with that memory; 0 stands for all of
/// it.
pub fn target(found: &mut Violations, field: &str, bytes: u64, memory_bytes: u64) {
    if bytes == 0 {
        return;
    }
    if !bytes.is_multiple_of(MEMORY_STEP) {
        found.add(
            field,
            format_args!("must be a multiple of 2 MiB ({MEMORY_STEP}), is {bytes}"),
        );
    } else if bytes < MIN_TARGET || bytes > memory_bytes {
        found.add(
            field,
            format_args!(
                "must be 0 for all of the guest's memory, or 64 MiB ({MIN_TARGET}) to its size of {memory_bytes}, is {bytes}"
            ),
        );
    }
}
