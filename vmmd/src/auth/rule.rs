//! Who may call what: the rules that the protocol files give the methods of the API (`vmmd/v1/rule.proto`), and those of the
//! services beside it.
//!
//! Their principle: a *viewer* reads; an *operator* runs what is there; whatever can name a file or an interface of the
//! node, or makes and destroys, is for an *admin*. A *peer* may ask what this node is and could take. An *agent* may call what
//! `vmmd-kube agent` calls and nothing else; a test there compares the two.

use std::sync::LazyLock;

use proto::rule::{METHOD_RULES, MethodEffect, MethodRule};

use super::{Rank, Role, object::Object};

/// What holds for one method.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// `vmmd.v1.VmService/GetVm`: the path of the call without the first slash.
    pub method: &'static str,
    /// The least rank that may call it, if only with an update mask that names what this rank may change.
    pub least: Rank,
    /// The least rank that may call it whatever the request says.
    pub whole: Rank,
    /// Whether a peer may.
    pub peer: bool,
    /// Whether an agent may, whatever the request says.
    pub agent: bool,
    /// What it is about, when it is in the audit log: it changes something, or reads what belongs to a guest.
    pub audited: Option<Object>,
    /// Whether it may go on for long, as one side or both send a stream of messages: then its beginning is told too.
    pub long: bool,
    /// Whether the client sends a stream of messages.
    pub stream: bool,
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
            long: rule.client_streams || rule.server_streams,
            stream: rule.client_streams,
        }
    }

    const fn beside(method: &'static str, stream: bool) -> Self {
        Self {
            method,
            least: Rank::Viewer,
            whole: Rank::Viewer,
            peer: true,
            agent: true,
            audited: None,
            long: stream,
            stream,
        }
    }
}

/// Health and reflection.
const BESIDE: [Rule; 4] = [
    Rule::beside("grpc.health.v1.Health/Check", false),
    Rule::beside("grpc.health.v1.Health/Watch", false),
    Rule::beside("grpc.reflection.v1.ServerReflection/ServerReflectionInfo", true),
    Rule::beside(
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
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
