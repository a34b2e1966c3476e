//! The one table of who may call what.
//!
//! Its principle: a *viewer* reads; an *operator* runs what is there; whatever can name a file or an interface of the node, or
//! makes and destroys, is for an *admin*. A *peer* may ask what this node is and could take.

use super::{Role, object::Object};

/// What holds for one method.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// `vmmd.v1.VmService/GetVm`: the path of the call without the first slash.
    pub method: &'static str,
    /// The least role that may call it.
    pub least: Role,
    /// Whether a peer may.
    pub peer: bool,
    /// What it changes; `None` when it only reads. Changes are in the audit log.
    pub changes: Option<Object>,
    /// What it reads that is worth a line in the audit log: what a guest printed, or whether a file of the node is there.
    pub reads: Option<Object>,
    /// Whether its answer may go on for long: then its beginning is told too.
    pub long: bool,
    /// Whether the client sends a stream of messages.
    pub stream: bool,
}

impl Rule {
    /// Whether `role` may call it.
    pub fn admits(&self, role: Role) -> bool {
        match role {
            Role::Peer => self.peer,
            role => role >= self.least,
        }
    }

    const fn new(method: &'static str, least: Role) -> Self {
        Self {
            method,
            least,
            peer: false,
            changes: None,
            reads: None,
            long: false,
            stream: false,
        }
    }

    const fn and_peers(self) -> Self {
        Self { peer: true, ..self }
    }

    const fn changes(self, object: Object) -> Self {
        Self {
            changes: Some(object),
            ..self
        }
    }

    const fn reads(self, object: Object) -> Self {
        Self {
            reads: Some(object),
            ..self
        }
    }

    /// What a line of the audit log is about; `None` when there is none.
    pub fn audited(&self) -> Option<Object> {
        self.changes.or(self.reads)
    }

    const fn stream(self) -> Self {
        Self {
            stream: true,
            ..self.long()
        }
    }

    const fn long(self) -> Self {
        Self { long: true, ..self }
    }
}

const VM: Object = Object {
    kind: "vm",
    path: &[1],
};
/// `vm.metadata.name`.
const WHOLE_VM: Object = Object {
    kind: "vm",
    path: &[1, 3, 1],
};
/// `open.name`.
const OPENED_VM: Object = Object {
    kind: "vm",
    path: &[1, 1],
};
const DISK: Object = Object {
    kind: "disk",
    path: &[1],
};
/// `disk.name`.
const WHOLE_DISK: Object = Object {
    kind: "disk",
    path: &[1, 1],
};
const OPERATION: Object = Object {
    kind: "operation",
    path: &[1],
};
const NODE: Object = Object {
    kind: "node",
    path: &[],
};

/// The rule of every method that is served, health and reflection included.
pub const RULES: &[Rule] = {
    use Role::{Admin, Operator, Viewer};
    &[
        Rule::new("vmmd.v1.VmService/GetVm", Viewer),
        Rule::new("vmmd.v1.VmService/ListVms", Viewer),
        Rule::new("vmmd.v1.VmService/WatchVms", Viewer),
        Rule::new("vmmd.v1.VmService/GetVmStats", Viewer),
        Rule::new("vmmd.v1.VmService/GetVmDiskStats", Viewer),
        Rule::new("vmmd.v1.VmService/StartVm", Operator).changes(VM),
        Rule::new("vmmd.v1.VmService/StopVm", Operator).changes(VM),
        Rule::new("vmmd.v1.VmService/RestartVm", Operator).changes(VM),
        Rule::new("vmmd.v1.VmService/ResetVm", Operator).changes(VM),
        Rule::new("vmmd.v1.VmService/PauseVm", Operator).changes(VM),
        Rule::new("vmmd.v1.VmService/ResumeVm", Operator).changes(VM),
        Rule::new("vmmd.v1.VmService/ResizeVmDisk", Operator).changes(VM),
        Rule::new("vmmd.v1.VmService/SetRateLimit", Operator).changes(VM),
        Rule::new("vmmd.v1.VmService/SetMemoryTarget", Operator).changes(VM),
        // What the guest prints, and its keyboard.
        Rule::new("vmmd.v1.VmService/GetVmLogs", Operator)
            .reads(VM)
            .long(),
        Rule::new("vmmd.v1.VmService/Console", Operator)
            .changes(OPENED_VM)
            .stream(),
        Rule::new("vmmd.v1.VmService/CreateVm", Admin).changes(WHOLE_VM),
        Rule::new("vmmd.v1.VmService/UpdateVm", Admin).changes(WHOLE_VM),
        Rule::new("vmmd.v1.VmService/DeleteVm", Admin).changes(VM),
        Rule::new("vmmd.v1.VmService/AttachDisk", Admin).changes(VM),
        Rule::new("vmmd.v1.VmService/DetachDisk", Admin).changes(VM),
        Rule::new("vmmd.v1.DiskService/GetDisk", Viewer),
        Rule::new("vmmd.v1.DiskService/ListDisks", Viewer),
        Rule::new("vmmd.v1.DiskService/ResizeDisk", Operator).changes(DISK),
        Rule::new("vmmd.v1.DiskService/CreateDisk", Admin).changes(WHOLE_DISK),
        Rule::new("vmmd.v1.DiskService/DeleteDisk", Admin).changes(DISK),
        Rule::new("vmmd.v1.NodeService/GetNode", Viewer).and_peers(),
        // Looks at the files that the manifest names.
        Rule::new("vmmd.v1.NodeService/CheckPlacement", Admin)
            .and_peers()
            .reads(WHOLE_VM),
        Rule::new("vmmd.v1.NodeService/CordonNode", Operator).changes(NODE),
        Rule::new("vmmd.v1.NodeService/UncordonNode", Operator).changes(NODE),
        Rule::new("vmmd.v1.NodeService/DrainNode", Operator).changes(NODE),
        Rule::new("vmmd.v1.NodeService/UpdateNodeLabels", Admin).changes(NODE),
        Rule::new("vmmd.v1.OperationService/GetOperation", Viewer),
        Rule::new("vmmd.v1.OperationService/ListOperations", Viewer),
        Rule::new("vmmd.v1.OperationService/WatchOperation", Viewer),
        Rule::new("vmmd.v1.OperationService/CancelOperation", Operator).changes(OPERATION),
        Rule::new("vmmd.v1.EventService/ListEvents", Viewer),
        Rule::new("vmmd.v1.EventService/WatchEvents", Viewer),
        Rule::new("grpc.health.v1.Health/Check", Viewer).and_peers(),
        Rule::new("grpc.health.v1.Health/Watch", Viewer).and_peers(),
        Rule::new("grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Viewer)
            .and_peers()
            .stream(),
        Rule::new(
            "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            Viewer,
        )
        .and_peers()
        .stream(),
    ]
};

/// The rule of the method that is called by `path` (`/vmmd.v1.VmService/GetVm`).
pub fn find(path: &str) -> Option<&'static Rule> {
    let method = path.strip_prefix('/')?;
    RULES.iter().find(|rule| rule.method == method)
}

#[cfg(test)]
mod tests;
