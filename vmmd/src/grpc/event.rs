//! `vmmd.v1.EventService`.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use vmmd_api::v1::{self, EventSeverity, event_service_server::EventService};
use vmmd_host::failure::{Failure, Kind};
use vmmd_objects::event::{Bounds, Expired, Follower, Object};
use vmmd_spec::Violations;

use crate::host::Host;

/// Most events in one answer.
const MAX_PAGE: u32 = 1000;
/// An answer ends before it is longer, in bytes.
const MAX_BYTES: usize = 1 << 20;
/// Messages ready for a watcher that reads slowly; the rest waits in the history.
const READY: usize = 64;
/// A watcher receives a bookmark after this number of events that its filter excludes.
const BOOKMARK: usize = 1000;

/// The service.
#[derive(Debug)]
pub struct EventLog {
    host: Arc<Host>,
}

impl EventLog {
    /// Over the events of `host`.
    pub fn new(host: Arc<Host>) -> Self {
        Self { host }
    }
}

/// A filter that makes sense.
#[derive(Debug, Default)]
struct Filter {
    wire: v1::EventFilter,
}

impl Filter {
    fn new(wire: Option<v1::EventFilter>) -> Result<Self, Failure> {
        let wire = wire.unwrap_or_default();
        let mut found = Violations::default();
        let kind = wire.object.as_ref().map_or("", |object| object.kind.as_str());
        if !kind.is_empty() && !Object::KINDS.contains(&kind) {
            let kinds = Object::KINDS.map(|kind| format!("\"{kind}\"")).join(", ");
            found.add("filter.object.kind", format!("must be one of {kinds}"));
        }
        if EventSeverity::try_from(wire.severity).is_err() {
            found.add("filter.severity", "is none that this vmmd knows");
        }
        found.or(Self { wire }).map_err(Failure::from)
    }

    fn wants(&self, event: &v1::Event) -> bool {
        let v1::EventFilter {
            object,
            severity,
            reasons,
        } = &self.wire;
        let is = |wanted: &String, value: &String| wanted.is_empty() || wanted == value;
        let of = event.object.clone().unwrap_or_default();
        object.as_ref().is_none_or(|wanted| {
            is(&wanted.kind, &of.kind) && is(&wanted.name, &of.name) && is(&wanted.uid, &of.uid)
        }) && event.severity >= *severity
            && (reasons.is_empty() || reasons.contains(&event.reason))
    }
}

fn expired() -> Failure {
    let message =
        "events after this cursor are not kept any more, or it is another node's: list the events again";
    Failure::new(Kind::OutOfRange, "CURSOR_EXPIRED", message)
}

#[tonic::async_trait]
impl EventService for EventLog {
    async fn list_events(
        &self,
        request: Request<v1::ListEventsRequest>,
    ) -> Result<Response<v1::ListEventsResponse>, Status> {
        let v1::ListEventsRequest {
            filter,
            page_size,
            page_token,
        } = request.into_inner();
        let filter = Filter::new(filter)?;
        if page_size > MAX_PAGE {
            return Err(Failure::field("pageSize", format_args!("must be at most {MAX_PAGE}")).into());
        }
        let count = if page_size == 0 { MAX_PAGE } else { page_size };
        let bounds = Bounds {
            count: usize::try_from(count).unwrap_or(usize::MAX),
            bytes: MAX_BYTES,
        };
        let before = Some(page_token.as_str()).filter(|token| !token.is_empty());
        let listed = self.host.events.list(before, bounds, |event| filter.wants(event));
        let (events, cursor, more) = listed.map_err(|Expired| expired())?;
        // The next page has the events before the oldest of this page.
        let oldest = events.first().filter(|_| more);
        Ok(Response::new(v1::ListEventsResponse {
            next_page_token: oldest.map_or_else(String::new, |event| event.cursor.clone()),
            events,
            cursor: cursor.to_string(),
        }))
    }

    type WatchEventsStream = ReceiverStream<Result<v1::WatchEventsResponse, Status>>;

    async fn watch_events(
        &self,
        request: Request<v1::WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        let v1::WatchEventsRequest { filter, cursor } = request.into_inner();
        let filter = Filter::new(filter)?;
        let cursor = Some(cursor.as_str()).filter(|cursor| !cursor.is_empty());
        let follower = self.host.events.follow(cursor).map_err(|Expired| expired())?;
        let (sender, receiver) = mpsc::channel(READY);
        let stopping = self.host.stopping.clone();
        tokio::spawn(async move {
            tokio::select! {
                end = follow(follower, &filter, &sender) => {
                    if let Err(failure) = end {
                        let _ = sender.send(Err(failure.into())).await;
                    }
                }
                () = sender.closed() => {}
                () = stopping.cancelled() => {
                    let _ = sender.send(Err(Failure::stopping().into())).await;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

/// Sends the matching events until the watcher leaves.
async fn follow(
    mut follower: Follower,
    filter: &Filter,
    sender: &mpsc::Sender<Result<v1::WatchEventsResponse, Status>>,
) -> Result<(), Failure> {
    let bookmark = |follower: &Follower| v1::WatchEventsResponse {
        event: None,
        cursor: follower.position().to_string(),
    };
    if sender.send(Ok(bookmark(&follower))).await.is_err() {
        return Ok(());
    }
    let mut left_out = 0;
    loop {
        let events = follower.next().await.map_err(|Expired| expired())?;
        for event in events {
            if !filter.wants(&event) {
                left_out += 1;
                continue;
            }
            left_out = 0;
            let cursor = event.cursor.clone();
            let event = Some(event);
            if sender
                .send(Ok(v1::WatchEventsResponse { event, cursor }))
                .await
                .is_err()
            {
                return Ok(());
            }
        }
        if left_out >= BOOKMARK {
            left_out = 0;
            if sender.send(Ok(bookmark(&follower))).await.is_err() {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn object(kind: &str, name: &str) -> v1::ObjectReference {
        v1::ObjectReference {
            kind: kind.into(),
            name: name.into(),
            uid: String::new(),
        }
    }

    fn event() -> v1::Event {
        v1::Event {
            object: Some(object("Vm", "web")),
            severity: EventSeverity::Normal.into(),
            reason: "Started".into(),
            ..Default::default()
        }
    }

    #[rstest]
    #[case::everything("", "", 0, &[], true)]
    #[case::all_hold("Vm", "web", 1, &["Started", "Stopped"], true)]
    #[case::kind("Disk", "web", 0, &[], false)]
    #[case::name("Vm", "we", 0, &[], false)]
    #[case::severity("", "", 2, &[], false)]
    #[case::reason("", "", 0, &["Stopped"], false)]
    fn a_filter_takes_what_fits_all_of_it(
        #[case] kind: &str,
        #[case] name: &str,
        #[case] severity: i32,
        #[case] reasons: &[&str],
        #[case] wanted: bool,
    ) {
        let wire = v1::EventFilter {
            object: Some(object(kind, name)),
            severity,
            reasons: reasons.iter().map(|reason| (*reason).into()).collect(),
        };
        assert_eq!(Filter::new(Some(wire)).unwrap().wants(&event()), wanted);
    }

    #[test]
    fn filter_accepts_the_kinds_of_all_objects() {
        let named = [
            Object::Vm,
            Object::Disk,
            Object::Snapshot,
            Object::Network,
            Object::Image,
        ];
        let named = named.map(|object| object("a".into(), uuid::Uuid::nil()).kind());
        for kind in named.into_iter().chain([Object::Node.kind()]) {
            let wire = v1::EventFilter {
                object: Some(object(kind, "")),
                ..Default::default()
            };
            assert!(Filter::new(Some(wire)).is_ok(), "{kind}");
        }
    }

    #[test]
    fn a_filter_that_makes_no_sense_is_refused() {
        for (kind, severity) in [("vm", 0), ("", 9), ("", -1)] {
            let wire = v1::EventFilter {
                object: Some(object(kind, "")),
                severity,
                ..Default::default()
            };
            assert!(Filter::new(Some(wire)).is_err());
        }
    }
}
