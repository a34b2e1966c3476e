//! Failures as the user sees them: one line with the next step, and an exit code.

use std::{error::Error as _, fmt};

use tonic_types::StatusExt as _;
use vmmd_spec::Violations;

/// Exit codes of vmmctl. They are part of its interface (docs: vmmctl, exit codes).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// Anything without a code of its own.
    Other = 1,
    /// The command line is wrong.
    Usage = 2,
    /// There is no such VM, disk, operation, or file of the node.
    NotFound = 3,
    /// It exists already, or differs from the request.
    Conflict = 4,
    /// Not possible in the present state.
    Precondition = 5,
    /// A manifest, a value or a file is not valid.
    Invalid = 6,
    /// The daemon is not reachable, or closed the connection.
    Unavailable = 7,
    /// Not allowed to.
    Permission = 8,
    /// The node has not enough of something.
    Exhausted = 9,
    /// No answer in time.
    Timeout = 10,
    /// It was cancelled.
    Cancelled = 11,
    /// The certificate of the daemon is not trusted, or the connection does not use TLS.
    Untrusted = 12,
    /// It was done, but a guest that was to power off had to be killed.
    Killed = 13,
}

impl Code {
    /// Word that precedes the failure's message for users.
    pub fn severity(self) -> &'static str {
        match self {
            Self::Killed => "warning",
            _ => "error",
        }
    }
}

/// Why a command failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Exit code.
    pub code: Code,
    /// Description of the failure, one line.
    pub message: String,
    /// The daemon's word for it (`google.rpc.ErrorInfo`), `STILL_RUNNING`; empty for failures of this side.
    pub reason: Box<str>,
    /// Next step for the user; joined to the message's line.
    pub hint: Option<Box<str>>,
    /// Further lines.
    pub details: Vec<String>,
    /// Fields that the daemon refused, each with the reason.
    pub violations: Vec<(String, String)>,
}

/// What commands return.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    /// One without further details.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            reason: Box::default(),
            hint: None,
            details: Vec::new(),
            violations: Vec::new(),
        }
    }

    /// Violations that were found on this side.
    pub fn invalid(message: &str, found: Violations) -> Self {
        let found = found.0.into_iter();
        Self {
            violations: found
                .map(|violation| (violation.field, violation.description))
                .collect(),
            ..Self::new(Code::Invalid, message)
        }
    }

    /// Adds the next step, unless there is one.
    pub fn hint(mut self, hint: impl Into<Box<str>>) -> Self {
        self.hint.get_or_insert_with(|| hint.into());
        self
    }

    /// Prefixes the message with its subject (`vm` or `disk`, and its name) when the message does
    /// not contain the name.
    pub fn about(mut self, kind: &str, name: &str) -> Self {
        if !self.message.contains(&format!("\"{name}\"")) && self.violations.is_empty() {
            self.message = format!("{kind}/{name}: {}", self.message);
        }
        self
    }
}

impl From<Failure> for Vec<Failure> {
    fn from(failure: Failure) -> Self {
        vec![failure]
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.violations.as_slice() {
            [] => f.write_str(&printable(&self.message))?,
            [(field, text)] => write!(f, "{}: {}", printable(field), printable(text))?,
            violations => {
                write!(f, "{} ({} problems)", printable(&self.message), violations.len())?;
                for (field, text) in violations {
                    write!(f, "\n  {}: {}", printable(field), printable(text))?;
                }
            }
        }
        if let Some(hint) = &self.hint {
            write!(f, "; {}", printable(hint))?;
        }
        for line in &self.details {
            write!(f, "\n  {}", printable(line))?;
        }
        Ok(())
    }
}

impl From<tonic::Status> for Failure {
    fn from(status: tonic::Status) -> Self {
        use tonic::Code as Grpc;
        if let Some(lost) = transport(&status) {
            return lost;
        }
        let details = status.get_error_details();
        let reason = details
            .error_info()
            .map(|info| info.reason.as_str())
            .unwrap_or_default();
        let code = match status.code() {
            // The missing object is named by the request, or by a name or path in a spec.
            Grpc::NotFound => Code::NotFound,
            Grpc::FailedPrecondition if reason.ends_with("_NOT_FOUND") => Code::NotFound,
            // The node is smaller than the VM.
            Grpc::FailedPrecondition if reason.starts_with("INSUFFICIENT_") => Code::Exhausted,
            Grpc::AlreadyExists | Grpc::Aborted => Code::Conflict,
            Grpc::FailedPrecondition => Code::Precondition,
            Grpc::InvalidArgument | Grpc::OutOfRange => Code::Invalid,
            Grpc::Unavailable => Code::Unavailable,
            Grpc::PermissionDenied | Grpc::Unauthenticated => Code::Permission,
            Grpc::ResourceExhausted => Code::Exhausted,
            Grpc::DeadlineExceeded => Code::Timeout,
            Grpc::Cancelled => Code::Cancelled,
            _ => Code::Other,
        };
        let message = match status.message() {
            "" => format!("vmmd answered: {}", status.code().description()),
            message => message.to_owned(),
        };
        let violations = details
            .bad_request()
            .map(|bad| bad.field_violations.as_slice())
            .unwrap_or_default();
        let violations = violations
            .iter()
            .map(|item| (item.field.clone(), item.description.clone()));
        let failure = Self {
            reason: reason.into(),
            violations: violations.collect(),
            ..Self::new(code, message)
        };
        match status.code() {
            Grpc::Unimplemented => {
                failure.hint("this vmmd may be older than this vmmctl: compare with `vmmctl version`")
            }
            Grpc::Internal | Grpc::Unknown | Grpc::DataLoss => {
                failure.hint("see `journalctl -u vmmd` on the node")
            }
            _ => failure,
        }
    }
}

/// A connection that broke or never spoke gRPC comes as a status made on this side, which unlike those of the daemon
/// has a source.
fn transport(status: &tonic::Status) -> Option<Failure> {
    status.source()?;
    let failure = Failure::new(Code::Unavailable, "lost the connection to vmmd");
    Some(failure.hint(
        "it may be restarting (VMs continue to run): try again, or see `systemctl status vmmd` on the node",
    ))
}

/// Replaces control characters, so that text from a daemon or a file cannot act on the terminal.
pub fn printable(text: &str) -> String {
    text.chars()
        .map(|letter| if letter.is_control() { '\u{fffd}' } else { letter })
        .collect()
}

#[cfg(test)]
mod tests {
    use tonic::{Code as Grpc, Status};
    use tonic_types::ErrorDetails;

    use super::*;

    #[test]
    fn exit_code_follows_the_reason_of_a_precondition() {
        let code = |grpc, reason: &str| {
            let details = ErrorDetails::with_error_info(reason, "vmmd", []);
            Failure::from(Status::with_error_details(grpc, "refused", details)).code
        };
        for (grpc, reason, expected) in [
            (Grpc::FailedPrecondition, "INSUFFICIENT_MEMORY", Code::Exhausted),
            (Grpc::FailedPrecondition, "INSUFFICIENT_CPU", Code::Exhausted),
            (Grpc::FailedPrecondition, "DISK_NOT_FOUND", Code::NotFound),
            (Grpc::FailedPrecondition, "NOT_RUNNING", Code::Precondition),
            (Grpc::ResourceExhausted, "NODE_DISK_FULL", Code::Exhausted),
            (Grpc::Aborted, "GENERATION_MISMATCH", Code::Conflict),
        ] {
            assert_eq!(code(grpc, reason), expected, "{reason}");
        }
    }
}
