//! VMs, for lists and watches.

use vmmd_api::v1::{ObjectMetadata, Vm, WatchEventType, WatchVmsResponse};
use vmmd_objects::registry::{Registry, Seen};

use crate::{
    grpc::{
        filter::Filter,
        mask::Mask,
        objects::{Served, Watched},
    },
    host::Host,
    registry::vms::VmKind,
};

impl Served for VmKind {
    type Object = Vm;
    const MAX_BYTES: usize = 3 << 20;

    fn registry(host: &Host) -> &Registry<Self> {
        &host.vms.registry
    }

    fn known(_: &Host, seen: &Seen<Self>) -> Vm {
        seen.record.vm.as_ref().clone()
    }

    fn matches(filter: &Filter, seen: &Seen<Self>) -> bool {
        filter.matches(&seen.record.vm)
    }

    fn masked(vm: Vm, mask: &Mask) -> Vm {
        mask.apply(vm)
    }
}

impl Watched for VmKind {
    type Event = WatchVmsResponse;

    fn gone(metadata: ObjectMetadata) -> Vm {
        Vm {
            metadata: Some(metadata),
            ..Vm::default()
        }
    }

    fn event(kind: WatchEventType, vm: Option<Vm>, cursor: String) -> WatchVmsResponse {
        WatchVmsResponse {
            r#type: kind.into(),
            vm,
            cursor,
        }
    }
}
