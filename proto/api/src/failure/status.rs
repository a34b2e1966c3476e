//! A [`Failure`] as gRPC says it: a code, `google.rpc.ErrorInfo` with the reason, and `BadRequest` with the fields.

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use super::{DOMAIN, Failure, Kind};

impl From<Failure> for Status {
    fn from(failure: Failure) -> Self {
        let code = match failure.kind {
            Kind::Invalid => Code::InvalidArgument,
            Kind::NotFound => Code::NotFound,
            Kind::Exists => Code::AlreadyExists,
            Kind::Precondition => Code::FailedPrecondition,
            Kind::Exhausted => Code::ResourceExhausted,
            Kind::Aborted => Code::Aborted,
            Kind::OutOfRange => Code::OutOfRange,
            Kind::Deadline => Code::DeadlineExceeded,
            Kind::Unavailable => Code::Unavailable,
            Kind::Unimplemented => Code::Unimplemented,
            Kind::Internal => Code::Internal,
        };
        let mut details = ErrorDetails::new();
        details.set_error_info(failure.reason, DOMAIN, std::collections::HashMap::new());
        for violation in failure.violations.0 {
            details.add_bad_request_violation(violation.field, violation.description);
        }
        Self::with_error_details(code, failure.message, details)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_keeps_its_reason_and_fields() {
        let status = Status::from(Failure::field("spec.cpu.cores", "must be 1 to 32, is 0"));
        assert_eq!(status.code(), Code::InvalidArgument);
        assert_eq!(status.message(), "spec.cpu.cores: must be 1 to 32, is 0");
        let details = status.get_error_details();
        let info = details.error_info().unwrap();
        assert_eq!(
            (info.reason.as_str(), info.domain.as_str()),
            ("INVALID_FIELDS", "vmmd")
        );
        let violations = &details.bad_request().unwrap().field_violations;
        assert_eq!(violations[0].field, "spec.cpu.cores");
    }
}
