//! The error type of the daemon's crates: a refusal with a kind, a stable reason and a message.
//! With the feature `grpc` it converts into a `tonic::Status`.

#[cfg(feature = "grpc")]
mod status;

use std::fmt;

use crate::violation::Violations;

/// Domain of all errors of the API (`google.rpc.ErrorInfo`).
pub const DOMAIN: &str = "vmmd";

/// Kind of a refusal; each maps to one gRPC code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The request is wrong in itself.
    Invalid,
    /// There is no such VM.
    NotFound,
    /// There is one already.
    Exists,
    /// Not in this state, or the node lacks something that an operator can provide.
    Precondition,
    /// Memory, disk space or user ids have run out.
    Exhausted,
    /// Another request came in between.
    Aborted,
    /// The requested position is not stored.
    OutOfRange,
    /// The guest did not do its part in time.
    Deadline,
    /// The daemon is about to end.
    Unavailable,
    /// Not built yet.
    Unimplemented,
    /// A fault of ours.
    Internal,
}

/// A refusal: its kind, a reason for programs (`UPPER_SNAKE_CASE`, stable) and a message for people, which says what
/// to do. The message never has a host path that the caller didn't give, nor an errno alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// See [`Kind`].
    pub kind: Kind,
    /// For programs.
    pub reason: &'static str,
    /// For people.
    pub message: String,
    /// Fields of the request that are wrong.
    pub violations: Violations,
}

impl Failure {
    /// A failure without field violations.
    pub fn new(kind: Kind, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            kind,
            reason,
            message: message.into(),
            violations: Violations::default(),
        }
    }

    /// [`Kind::Precondition`].
    pub fn precondition(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new(Kind::Precondition, reason, message)
    }

    /// [`Kind::Internal`].
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Kind::Internal, "INTERNAL", message)
    }

    /// Not built yet.
    pub fn unimplemented(what: &str) -> Self {
        Self::new(
            Kind::Unimplemented,
            "UNIMPLEMENTED",
            format!("this vmmd can't {what} yet"),
        )
    }

    /// There is no VM of this name.
    pub fn no_vm(name: &str) -> Self {
        let message = format!("there is no VM \"{}\" on this node", brief(name));
        Self::new(Kind::NotFound, "VM_NOT_FOUND", message)
    }

    /// The VM's actor failed and the daemon is recreating it. Not NOT_FOUND: the VM exists, and may
    /// run.
    pub fn unavailable(name: &str) -> Self {
        let message = format!(
            "the task of VM \"{}\" is being restarted; try again in a moment",
            brief(name)
        );
        Self::new(Kind::Unavailable, "VM_UNAVAILABLE", message)
    }

    /// The daemon is about to end.
    pub fn stopping() -> Self {
        Self::new(
            Kind::Unavailable,
            "DAEMON_STOPPING",
            "vmmd is stopping; try again in a moment",
        )
    }

    /// One field is wrong.
    pub fn field(field: &str, description: impl fmt::Display) -> Self {
        let mut violations = Violations::default();
        violations.add(field, description);
        violations.into()
    }
}

impl From<Violations> for Failure {
    fn from(violations: Violations) -> Self {
        let message = violations.to_string();
        Self {
            violations,
            ..Self::new(Kind::Invalid, "INVALID_FIELDS", message)
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// The beginning of a client's text, for use in a message.
pub fn brief(text: &str) -> &str {
    let end = (0..=text.len().min(100))
        .rev()
        .find(|end| text.is_char_boundary(*end));
    text.get(..end.unwrap_or(0)).unwrap_or_default()
}
