//! The answer of a request, as it is kept.

use prost::Message;
use tonic::Status;
use vmmd_host::text;
use vmmd_store::{RequestMark, RequestRecord};

use super::{Ports, shown};

/// An answer: a response in its encoded form, or a failure.
#[derive(Clone, Debug)]
pub struct Answer(Result<Vec<u8>, Status>);

/// The record of a request that is answered so.
pub fn done(mark: RequestMark, response: &impl Message) -> RequestRecord {
    kept(mark, response.encode_to_vec())
}

fn kept(mark: RequestMark, response: Vec<u8>) -> RequestRecord {
    RequestRecord {
        response: shown::brief(&mark.method, response),
        ended_ms: text::now_ms(),
        mark: Some(mark),
    }
}

impl Answer {
    pub fn of(response: &impl Message) -> Self {
        Self(Ok(response.encode_to_vec()))
    }

    /// The answer of a retry.
    pub fn again(host: &impl Ports, method: &str, record: RequestRecord) -> Self {
        Self(Ok(shown::filled(host, method, record.response)))
    }

    pub fn decode<A: Message + Default>(self) -> Result<A, Status> {
        A::decode(self.0?.as_slice()).map_err(|_| Status::internal("undecodable answer of a request"))
    }

    /// Returns the record that the store keeps for a retry; `None` for a refusal. A refused request
    /// changed nothing that a retry does not complete, and most reasons are temporary. The retry is
    /// therefore carried out, and an invalid request leaves its id free.
    pub fn record(&self, mark: RequestMark) -> Option<RequestRecord> {
        let response = self.0.as_ref().ok()?;
        Some(kept(mark, response.clone()))
    }
}

impl From<Status> for Answer {
    fn from(status: Status) -> Self {
        Self(Err(status))
    }
}
