//! `vmmd.v1.OperationService`.

use std::sync::Arc;

use prost::Message as _;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use uuid::Uuid;
use vmmd_api::v1::{self, WatchEventType, operation_service_server::OperationService};
use vmmd_host::{failure::Failure, fault};
use vmmd_objects::operation::{Change, Position, has_ended};

use crate::host::Host;

/// Most operations in an answer.
const MAX_PAGE: u32 = 1000;
/// An answer ends before it is longer, in bytes; gRPC clients take 4 MiB by default.
const MAX_BYTES: usize = 1 << 20;
/// Messages ready for a watcher that reads slowly.
const READY: usize = 16;

/// The service.
#[derive(Debug)]
pub struct Operations {
    host: Arc<Host>,
}

impl Operations {
    /// Over the operations of `host`.
    pub fn new(host: Arc<Host>) -> Self {
        Self { host }
    }

    fn list(&self, request: v1::ListOperationsRequest) -> Result<v1::ListOperationsResponse, Failure> {
        let filter = request.filter.unwrap_or_default();
        let limit = match request.page_size {
            0 => MAX_PAGE,
            size if size <= MAX_PAGE => size,
            size => {
                let problem = format_args!("must be at most {MAX_PAGE}, is {size}");
                return Err(Failure::field("pageSize", problem));
            }
        };
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let after = match request.page_token.as_str() {
            "" => None,
            token => Some(read_token(token)?),
        };
        let (mut operations, mut bytes, mut more) = (Vec::new(), 0, false);
        let position = self.host.operations.each(after.map(|(_, id)| id), |operation| {
            if !matches(&filter, operation) {
                return true;
            }
            bytes += operation.encoded_len();
            more = operations.len() == limit || (bytes > MAX_BYTES && !operations.is_empty());
            if !more {
                operations.push(v1::Operation::clone(operation));
            }
            !more
        });
        let cursor = write_cursor(after.map_or(position, |(first, _)| first));
        let last = operations.last().filter(|_| more);
        Ok(v1::ListOperationsResponse {
            next_page_token: last.map_or_else(String::new, |last| format!("{cursor}.{}", last.id)),
            operations,
            cursor,
        })
    }
}

/// Whether a filter says nothing against an operation.
fn matches(filter: &v1::OperationFilter, operation: &v1::Operation) -> bool {
    is_about(filter, operation) && !(filter.active && has_ended(operation))
}

/// The same whether it has ended or not.
fn is_about(filter: &v1::OperationFilter, operation: &v1::Operation) -> bool {
    let is = |wanted: &String, value: &String| wanted.is_empty() || wanted == value;
    let of = operation.target.clone().unwrap_or_default();
    let target = filter.target.as_ref();
    target.is_none_or(|wanted| {
        is(&wanted.kind, &of.kind) && is(&wanted.name, &of.name) && is(&wanted.uid, &of.uid)
    }) && (filter.types.is_empty() || filter.types.contains(&operation.r#type))
        && is(&filter.request_id, &operation.request_id)
}

fn write_cursor(position: Position) -> String {
    format!("{:016x}.{:x}", position.nonce, position.revision)
}

fn read_cursor(field: &str, text: &str) -> Result<Position, Failure> {
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = |text| u64::from_str_radix(text, 16).ok().filter(|_| digits(text));
    let parts = text.split_once('.');
    let position = parts.and_then(|(nonce, revision)| {
        Some(Position {
            nonce: number(nonce)?,
            revision: number(revision)?,
        })
    });
    position.ok_or_else(|| Failure::field(field, "is none: give one exactly as it came"))
}

/// A token is the first page's cursor and the last id.
fn read_token(token: &str) -> Result<(Position, Uuid), Failure> {
    let (cursor, id) = token.rsplit_once('.').unwrap_or_default();
    let position = read_cursor("pageToken", cursor)?;
    let id = id.parse();
    let id = id.map_err(|_| Failure::field("pageToken", "is none: give one exactly as it came"))?;
    Ok((position, id))
}

#[tonic::async_trait]
impl OperationService for Operations {
    async fn get_operation(
        &self,
        request: Request<v1::GetOperationRequest>,
    ) -> Result<Response<v1::GetOperationResponse>, Status> {
        let operation = self.host.operations.get(&request.get_ref().id)?;
        Ok(Response::new(v1::GetOperationResponse {
            operation: Some(v1::Operation::clone(&operation)),
        }))
    }

    async fn list_operations(
        &self,
        request: Request<v1::ListOperationsRequest>,
    ) -> Result<Response<v1::ListOperationsResponse>, Status> {
        Ok(Response::new(self.list(request.into_inner())?))
    }

    async fn cancel_operation(
        &self,
        request: Request<v1::CancelOperationRequest>,
    ) -> Result<Response<v1::CancelOperationResponse>, Status> {
        let mut state = self.host.operations.cancel(&request.get_ref().id)?;
        fault::hold(&self.host.config.run_dir, "received-CancelOperation").await;
        let operation = tokio::select! {
            ended = state.wait_for(|operation| has_ended(operation)) => {
                v1::Operation::clone(&*ended.map_err(|error| Failure::internal(error.to_string()))?)
            }
            () = self.host.stopping.cancelled() => return Err(Failure::stopping().into()),
        };
        Ok(Response::new(v1::CancelOperationResponse {
            operation: Some(operation),
        }))
    }

    type WatchOperationStream = ReceiverStream<Result<v1::WatchOperationResponse, Status>>;

    async fn watch_operation(
        &self,
        request: Request<v1::WatchOperationRequest>,
    ) -> Result<Response<Self::WatchOperationStream>, Status> {
        let mut state = self.host.operations.watch(&request.get_ref().id)?;
        let stopping = self.host.stopping.clone();
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move {
            loop {
                let operation = v1::Operation::clone(&state.borrow_and_update());
                let ended = has_ended(&operation);
                let response = v1::WatchOperationResponse {
                    operation: Some(operation),
                };
                if sender.send(Ok(response)).await.is_err() || ended {
                    return;
                }
                tokio::select! {
                    changed = state.changed() => if changed.is_err() { return },
                    () = sender.closed() => return,
                    () = stopping.cancelled() => {
                        let _ = sender.send(Err(Failure::stopping().into())).await;
                        return;
                    }
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    type WatchOperationsStream = ReceiverStream<Result<v1::WatchOperationsResponse, Status>>;

    async fn watch_operations(
        &self,
        request: Request<v1::WatchOperationsRequest>,
    ) -> Result<Response<Self::WatchOperationsStream>, Status> {
        let v1::WatchOperationsRequest { filter, cursor } = request.into_inner();
        let filter = filter.unwrap_or_default();
        let from = match cursor.as_str() {
            "" => None,
            cursor => Some(read_cursor("cursor", cursor)?),
        };
        let (sender, receiver) = mpsc::channel(READY);
        let host = Arc::clone(&self.host);
        tokio::spawn(async move {
            tokio::select! {
                _ = follow(&host, &filter, from, &sender) => {}
                () = sender.closed() => {}
                () = host.stopping.cancelled() => {
                    let _ = sender.send(Err(Failure::stopping().into())).await;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

type Sender = mpsc::Sender<Result<v1::WatchOperationsResponse, Status>>;

/// Sends what changes for as long as somebody listens: each time all that has changed since the last time, so that a slow reader
/// gets less and never falls behind.
async fn follow(
    host: &Host,
    filter: &v1::OperationFilter,
    from: Option<Position>,
    sender: &Sender,
) -> Result<(), mpsc::error::SendError<Result<v1::WatchOperationsResponse, Status>>> {
    let mut news = host.operations.news();
    let mut position = from;
    let mut synced = false;
    loop {
        news.mark_unchanged();
        let (changed, end) = host.operations.since(position);
        // Another daemon's cursor says nothing of what its client knows.
        let first = !synced && position.is_none_or(|position| position.nonce != end.nonce);
        for Change { at, new, operation } in changed {
            // The end of an operation that was active before must be reported.
            let wanted = if first {
                matches(filter, &operation)
            } else {
                is_about(filter, &operation)
            };
            if wanted {
                let kind = if new {
                    WatchEventType::Added
                } else {
                    WatchEventType::Modified
                };
                let response = v1::WatchOperationsResponse {
                    r#type: kind.into(),
                    operation: Some(v1::Operation::clone(&operation)),
                    cursor: write_cursor(at),
                };
                sender.send(Ok(response)).await?;
            }
        }
        if !std::mem::replace(&mut synced, true) {
            let response = v1::WatchOperationsResponse {
                r#type: WatchEventType::Synced.into(),
                operation: None,
                cursor: write_cursor(end),
            };
            sender.send(Ok(response)).await?;
        }
        position = Some(end);
        if news.changed().await.is_err() {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use vmmd_api::v1::OperationPhase;

    use super::*;

    #[rstest]
    #[case::everything("", "", "", &[], "", false, true)]
    #[case::all_hold("Vm", "web", "u", &["vm.stop", "vm.start"], "r", true, true)]
    #[case::kind("Disk", "web", "", &[], "", false, false)]
    #[case::name("Vm", "we", "", &[], "", false, false)]
    #[case::uid("Vm", "web", "v", &[], "", false, false)]
    #[case::type_of_it("", "", "", &["vm.stop"], "", false, false)]
    #[case::request("", "", "", &[], "s", false, false)]
    fn a_filter_takes_what_fits_all_of_it(
        #[case] kind: &str,
        #[case] name: &str,
        #[case] uid: &str,
        #[case] types: &[&str],
        #[case] request_id: &str,
        #[case] active: bool,
        #[case] wanted: bool,
    ) {
        let reference = |kind: &str, name: &str, uid: &str| v1::ObjectReference {
            kind: kind.into(),
            name: name.into(),
            uid: uid.into(),
        };
        let filter = v1::OperationFilter {
            target: Some(reference(kind, name, uid)),
            types: types.iter().map(|kind| (*kind).to_owned()).collect(),
            active,
            request_id: request_id.into(),
        };
        let mut operation = v1::Operation {
            r#type: "vm.start".into(),
            target: Some(reference("Vm", "web", "u")),
            request_id: "r".into(),
            ..Default::default()
        };
        assert_eq!(matches(&filter, &operation), wanted);
        operation.set_phase(OperationPhase::Completed);
        assert_eq!(matches(&filter, &operation), wanted && !active);
        assert_eq!(is_about(&filter, &operation), wanted);
    }

    #[test]
    fn a_cursor_is_read_as_it_was_written_and_other_text_is_refused() {
        let position = Position {
            nonce: 7,
            revision: 255,
        };
        assert_eq!(read_cursor("cursor", &write_cursor(position)), Ok(position));
        for wrong in ["", "7", "7.", ".7", "x.7", "7.+7", "7.7.7"] {
            assert!(read_cursor("cursor", wrong).is_err(), "{wrong}");
            assert!(read_token(wrong).is_err(), "{wrong}");
        }
    }
}
