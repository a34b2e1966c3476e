//! The error of a request to a machine.

use std::fmt::Display;

use vmm_protocol::vmm::ErrorKind;
use vmmd_spec::Violations;

/// A request that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Which kind.
    pub kind: ErrorKind,
    /// For people, with causes; holds no path.
    pub message: String,
}

impl Failure {
    /// A failure with this message.
    pub fn of(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }

    /// Converts errors of an operation: "operation: error".
    pub fn during<E: Display>(kind: ErrorKind, operation: impl Display) -> impl Fn(E) -> Self {
        move |error| Self::of(kind, format!("{operation}: {error}"))
    }

    /// From an error and its causes.
    pub fn new(kind: ErrorKind, error: &dyn std::error::Error) -> Self {
        Self::of(kind, with_causes(error))
    }
}

impl From<Violations> for Failure {
    fn from(violations: Violations) -> Self {
        Self::of(ErrorKind::Invalid, violations.to_string())
    }
}

/// "message: cause: its cause".
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        message.push_str(": ");
        message.push_str(&error.to_string());
        cause = error.source();
    }
    message
}
