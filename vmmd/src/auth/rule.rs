//! Authorization rules: the rules from the protocol files for the methods of the API
//! (`vmmd/v1/rule.proto`), and the rules of the other services.
//!
//! A *viewer* reads. An *operator* operates existing objects. A method that can name a file or an
//! interface of the node, or that creates or deletes objects, requires an *admin*. A *peer* may
//! query the identity and the free capacity of this node. An *agent* may call exactly the methods
//! that `vmmd-kube agent` calls; a test there compares the two lists.

use std::sync::LazyLock;

use vmmd_api::rule::{METHOD_RULES, MethodEffect, MethodRule};

use super::{Rank, Role, object::Object};

/// Largest message of a call in bytes, unless it carries a VM's manifest.
const MAX_MESSAGE: usize = 256 << 10;
/// The same with a manifest. The API allows user data, network configuration and vendor data of 128 KiB each, 64 keys of 8 KiB,
/// annotations of 64 KiB, and the paths and rules of its devices. It is also what gRPC clients take as an answer by default.
const MAX_MANIFEST: usize = 4 << 20;
/// The same with a manifest and the labels and annotations of its disks: 64 times 96 KiB.
pub const MAX_OFFER: usize = 10 << 20;
/// The methods whose request carries a manifest.
const MANIFESTS: [&str; 3] = [
    "vmmd.v1.VmService/CreateVm",
    "vmmd.v1.VmService/UpdateVm",
    "vmmd.v1.NodeService/CheckPlacement",
];
/// The methods that read and wait for files or for the process of a VM.
const LOOKS: [&str; 7] = [
    "vmmd.v1.DiskService/GetDisk",
    "vmmd.v1.DiskService/ListDisks",
    "vmmd.v1.ImageService/GetImage",
    "vmmd.v1.ImageService/ListImages",
    "vmmd.v1.NodeService/CheckPlacement",
    "vmmd.v1.VmService/GetVmDiskStats",
    "vmmd.v1.VmService/GetVmStats",
];
/// The method whose request carries a manifest and its disks.
const OFFER: &str = "vmmd.v1.PeerService/OfferVm";

/// How long a method that reads may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// It answers at once, from memory or from the store.
    Known,
    /// It waits for files or for the process of a VM.
    Look,
}

/// Rule of one method.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// `vmmd.v1.VmService/GetVm`: the path of the call without the first slash.
    pub method: &'static str,
    /// The least rank that may call it, if only with an update mask that names what this rank may change.
    pub least: Rank,
    /// Least rank that may call the method with any request.
    pub whole: Rank,
    /// Whether a peer may.
    pub peer: bool,
    /// Whether an agent may call the method, with any request.
    pub agent: bool,
    /// Object for the audit log. `None` for methods that neither change anything nor read guest
    /// data: these are not logged.
    pub audited: Option<Object>,
    /// Whether the method is a stream in one or both directions. The audit log then also records
    /// the begin of the call.
    pub long: bool,
    /// For a method that only reads and is no stream.
    pub read: Option<Read>,
    /// Whether the client sends a stream of messages.
    pub stream: bool,
    /// Largest message that the client may send, in bytes.
    pub largest: usize,
}

fn largest(method: &str) -> usize {
    match method {
        OFFER => MAX_OFFER,
        method if MANIFESTS.contains(&method) => MAX_MANIFEST,
        _ => MAX_MESSAGE,
    }
}

impl Rule {
    /// Whether `role` may call it.
    pub fn admits(&self, role: Role) -> bool {
        match role {
            Role::Peer => self.peer,
            Role::Agent => self.agent,
            Role::Viewer | Role::Operator | Role::Admin => role.contains(self.least),
        }
    }

    fn of(rule: &MethodRule) -> Self {
        let long = rule.client_streams || rule.server_streams;
        let read = match LOOKS.contains(&rule.method) {
            true => Read::Look,
            false => Read::Known,
        };
        Self {
            method: rule.method,
            least: rule.masked_role.into(),
            whole: rule.role.into(),
            peer: rule.peers,
            agent: rule.agents,
            audited: (rule.effect != MethodEffect::Read).then_some(Object {
                kind: rule.kind,
                path: rule.name,
            }),
            long,
            read: (rule.effect != MethodEffect::Change && !long).then_some(read),
            stream: rule.client_streams,
            largest: largest(rule.method),
        }
    }

    const fn beside(method: &'static str, stream: bool, long: bool) -> Self {
        Self {
            method,
            least: Rank::Viewer,
            whole: Rank::Viewer,
            peer: true,
            agent: true,
            audited: None,
            long,
            // The answer of a health check has some bytes, and a probe must not wait for other calls of its client.
            read: None,
            stream,
            largest: MAX_MESSAGE,
        }
    }
}

/// Health and reflection.
const BESIDE: [Rule; 4] = [
    Rule::beside("grpc.health.v1.Health/Check", false, false),
    Rule::beside("grpc.health.v1.Health/Watch", false, true),
    Rule::beside(
        "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        true,
        true,
    ),
    Rule::beside(
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        true,
        true,
    ),
];

/// The rule of every method that is served, health and reflection included.
pub static RULES: LazyLock<Vec<Rule>> =
    LazyLock::new(|| METHOD_RULES.iter().map(Rule::of).chain(BESIDE).collect());

/// The rule of the method that is called by `path` (`/vmmd.v1.VmService/GetVm`).
pub fn find(path: &str) -> Option<&'static Rule> {
    let method = path.strip_prefix('/')?;
    RULES.iter().find(|rule| rule.method == method)
}

#[cfg(test)]
mod tests;
