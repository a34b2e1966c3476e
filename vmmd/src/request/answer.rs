//! The answer of a request, as it is kept.

use prost::Message;
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::{
    store::{RequestMark, RequestRecord},
    text,
};

/// An answer: a response in its encoded form, or a failure.
#[derive(Clone, Debug)]
pub struct Answer(Result<Vec<u8>, Status>);

/// The record of a request that is answered so.
pub fn done(mark: RequestMark, response: &impl Message) -> RequestRecord {
    Answer::of(response).record(mark)
}

impl Answer {
    pub fn of(response: &impl Message) -> Self {
        Self(Ok(response.encode_to_vec()))
    }

    pub fn decode<A: Message + Default>(self) -> Result<A, Status> {
        A::decode(self.0?.as_slice()).map_err(|_| Status::internal("undecodable answer of a request"))
    }

    /// Whether the same is said to each retry. A failure that may pass is not: a retry is carried out again. Nor is it of
    /// a request that is wrong in itself: nothing was begun, and its id is free for the right one.
    pub fn is_final(&self) -> bool {
        let Err(status) = &self.0 else { return true };
        let details = status.get_error_details();
        let reason = details.error_info().map_or("", |info| info.reason.as_str());
        match status.code() {
            Code::NotFound | Code::AlreadyExists => true,
            Code::FailedPrecondition => reason != "BUSY",
            Code::Aborted => matches!(reason, "GENERATION_MISMATCH" | "UID_MISMATCH"),
            _ => false,
        }
    }

    pub fn record(&self, mark: RequestMark) -> RequestRecord {
        let record = RequestRecord {
            mark: Some(mark),
            ended_ms: text::now_ms(),
            ..RequestRecord::default()
        };
        match &self.0 {
            Ok(response) => RequestRecord {
                response: response.clone(),
                ..record
            },
            Err(status) => RequestRecord {
                code: status.code().into(),
                message: status.message().to_owned(),
                details: status.details().to_vec(),
                ..record
            },
        }
    }
}

impl From<Status> for Answer {
    fn from(status: Status) -> Self {
        Self(Err(status))
    }
}

impl From<RequestRecord> for Answer {
    fn from(record: RequestRecord) -> Self {
        match Code::from(record.code) {
            Code::Ok => Self(Ok(record.response)),
            code => Self(Err(Status::with_details(
                code,
                record.message,
                record.details.into(),
            ))),
        }
    }
}
