//! Initiator and id of a request.

use std::fmt;

use tracing::Span;
use vmmd_api::v1::Preconditions;
use vmmd_store::{RequestKey, RequestMark};

/// Context that accompanies a request to its results: operations, events, logs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// The client's id of the request; empty when it gave none.
    pub request_id: String,
    /// Who asked.
    pub initiator: Initiator,
    /// Required state of the object that the request changes.
    pub preconditions: Preconditions,
    /// Id that links log messages, including those of the `vmm`: the request's id, or a generated
    /// id for a request without one. Empty for the daemon's own actions.
    pub trace: String,
}

/// Initiator of an action.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Initiator {
    /// The daemon itself: a repair.
    #[default]
    Daemon,
    /// The daemon, because the VM's run policy says so.
    RunPolicy,
    /// A process of the node with this user id, over the UNIX socket.
    User(u32),
    /// Somebody with a certificate of this name, over TCP.
    Certificate(String),
}

impl Initiator {
    /// Scope of this initiator's request ids, unique per client. The display form need not be
    /// unique.
    pub fn scope(&self) -> String {
        match self {
            Self::Daemon | Self::RunPolicy => "vmmd:".to_owned(),
            Self::User(uid) => format!("uid:{uid}"),
            // NUL separates it from the id.
            Self::Certificate(name) => format!("cert:{}", name.replace('\0', "")),
        }
    }
}

impl fmt::Display for Initiator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Daemon => f.write_str("vmmd"),
            Self::RunPolicy => f.write_str("run policy"),
            Self::User(uid) => write!(f, "uid {uid}"),
            Self::Certificate(name) => f.write_str(name),
        }
    }
}

/// Returns the tracing span for the effects of a request.
pub fn span(trace: &str) -> Span {
    if trace.is_empty() {
        Span::none()
    } else {
        tracing::info_span!("request", id = trace)
    }
}

impl Context {
    /// Returns the key that distinguishes the request from those of other clients.
    pub fn key(&self) -> RequestKey {
        RequestKey::new(&self.initiator.scope(), &self.request_id)
    }

    /// Whether the request was admitted before: its mark is among those of an object.
    pub fn has_begun(&self, marks: &[RequestMark]) -> bool {
        let key = self.key();
        !self.request_id.is_empty() && marks.iter().any(|mark| mark.key() == key)
    }

    /// Context of the daemon's own actions.
    pub fn daemon() -> Self {
        Self::default()
    }
}
