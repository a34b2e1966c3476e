//! Who asked for something, and with which request.

use std::fmt;

use proto::v1::Preconditions;
use tracing::Span;
use vmmd_store::{RequestKey, RequestMark};

/// What goes along with a request from where it came in to what it leads to: operations, events, logs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// The client's id of the request; empty when it gave none.
    pub request_id: String,
    /// Who asked.
    pub initiator: Initiator,
    /// What must be true of the object that is to be changed.
    pub preconditions: Preconditions,
    /// Ties log messages together, those of the `vmm` included: the request's id, or one made up for a request without.
    /// Empty for what the daemon does by itself.
    pub trace: String,
}

/// Who asked for something.
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
    /// Whose request ids these are: different for each, which what is shown to people need not be.
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

/// The span of what a request leads to.
pub fn span(trace: &str) -> Span {
    if trace.is_empty() {
        Span::none()
    } else {
        tracing::info_span!("request", id = trace)
    }
}

impl Context {
    /// What tells the request from those of others.
    pub fn key(&self) -> RequestKey {
        RequestKey::new(&self.initiator.scope(), &self.request_id)
    }

    /// Whether the request was admitted before: its mark is among those of an object.
    pub fn has_begun(&self, marks: &[RequestMark]) -> bool {
        let key = self.key();
        !self.request_id.is_empty() && marks.iter().any(|mark| mark.key() == key)
    }

    /// Of what the daemon does by itself.
    pub fn daemon() -> Self {
        Self::default()
    }
}
