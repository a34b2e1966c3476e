//! The layer in front of all services.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tonic::{Code, Status, body::Body};
use tonic_types::{ErrorDetails, StatusExt};
use tower::{Layer, Service};
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};
use vmmd_objects::event::Events;

use super::{
    Audit, Caller, Place, Places, Rank, Role, Turns,
    audit::{self, Record},
    body::{Arrival, code, placed, recorded, turned},
    rule::{self, Read, Rule},
    share::Full,
};

/// Limits of calls.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// How long a request may take to arrive.
    pub request: Duration,
    /// For streams, of all connections.
    pub streams: Arc<Places>,
    /// For calls that read and wait for nothing else, until their answers have been sent.
    pub reads: Arc<Turns>,
    /// The same for calls that wait for files or processes: a file system that answers nothing holds up no other reads.
    pub looks: Arc<Turns>,
}

/// Puts a guard in front of services. Their connections must have a [`Caller`].
#[derive(Clone, Debug)]
pub struct Guard {
    audit: Arc<Audit>,
    events: Events,
    bounds: Bounds,
}

impl Guard {
    /// A guard with this audit log. The answer of a call that changes something follows its `events`.
    pub fn new(audit: Arc<Audit>, events: Events, bounds: Bounds) -> Self {
        Self {
            audit,
            events,
            bounds,
        }
    }

    /// The caller and the rule of a call that may be made.
    fn admit(&self, request: &http::Request<Body>) -> Result<(Arc<Caller>, &'static Rule), Status> {
        let path = request.uri().path();
        let Some(caller) = request.extensions().get::<Arc<Caller>>() else {
            return Err(Status::unauthenticated("the caller is unknown"));
        };
        if !caller.bucket.take() {
            let message = "this connection makes too many calls; make fewer a second";
            return Err(Failure::new(Kind::Exhausted, "TOO_MANY_CALLS", message).into());
        }
        let refused = |status: Status| {
            let method = text::brief(path.trim_start_matches('/'));
            audit::denied(&self.audit, caller, method, status.code());
            status
        };
        let Some(rule) = rule::find(path) else {
            let message = format!("this vmmd has no method {}", text::brief(path));
            return Err(refused(
                Failure::new(Kind::Unimplemented, "METHOD_UNKNOWN", message).into(),
            ));
        };
        if !caller.role.is_some_and(|role| rule.admits(role)) {
            return Err(refused(role_required(caller, rule.method, rule.whole)));
        }
        Ok((Arc::clone(caller), rule))
    }

    /// A place for a call that is a stream.
    fn place(&self, caller: &Caller, rule: &Rule) -> Result<Option<Place>, Status> {
        if !rule.long {
            return Ok(None);
        }
        let streams = &self.bounds.streams;
        let message = match streams.take(&caller.initiator) {
            Ok(place) => return Ok(Some(place)),
            Err(Full::Client) => format!(
                "{} has {} streams open, which is the most that one client may have (limits.streams_per_client): close some, or watch with one \
                 stream what several watch",
                caller.initiator,
                streams.each()
            ),
            Err(Full::All) => {
                "vmmd has as many streams open as it may have (limits.streams): try again later".to_owned()
            }
        };
        Err(Failure::new(Kind::Exhausted, "TOO_MANY_STREAMS", message).into())
    }
}

/// Refuses a request of the method that is called by `path` unless its caller has the rank that changing what its update mask
/// names takes (`masked`), or without a mask the rank of the method. An agent that may call the method may send any mask: it
/// could make another VM just as well.
pub fn require<T>(request: &tonic::Request<T>, path: &str, masked: Option<Rank>) -> Result<(), Status> {
    let (Some(caller), Some(rule)) = (request.extensions().get::<Arc<Caller>>(), rule::find(path)) else {
        return Err(Status::unauthenticated("the caller is unknown"));
    };
    let least = masked.map_or(rule.whole, |masked| masked.max(rule.least));
    // A peer has no rank, and changes nothing by a mask.
    match caller.role {
        Some(Role::Agent) if rule.agent => Ok(()),
        Some(role) if role.contains(least) => Ok(()),
        _ => Err(role_required(caller, rule.method, least)),
    }
}

fn role_required(caller: &Caller, method: &str, least: Rank) -> Status {
    let has = match caller.role {
        Some(role) => format!("has the role {role}"),
        None => format!("gives no role (a URI {}ROLE)", Role::URI),
    };
    let (_, short) = method.split_once('/').unwrap_or_default();
    let message = format!("{short} needs the role {least}; {} {has}", caller.initiator);
    let metadata = [
        ("role".to_owned(), least.to_string()),
        ("method".to_owned(), method.to_owned()),
    ];
    let mut details = ErrorDetails::new();
    details.set_error_info("ROLE_REQUIRED", vmmd_host::failure::DOMAIN, metadata);
    Status::with_error_details(Code::PermissionDenied, message, details)
}

impl<S> Layer<S> for Guard {
    type Service = Guarded<S>;

    fn layer(&self, inner: S) -> Guarded<S> {
        Guarded {
            inner,
            guard: self.clone(),
        }
    }
}

/// Services behind a guard.
#[derive(Clone, Debug)]
pub struct Guarded<S> {
    inner: S,
    guard: Guard,
}

type Answer = Result<http::Response<Body>, Infallible>;

impl<S> Service<http::Request<Body>> for Guarded<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Answer> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        let admitted = self.guard.admit(&request).and_then(|(caller, rule)| {
            let place = self.guard.place(&caller, rule)?;
            Ok((caller, rule, place))
        });
        let (caller, rule, place) = match admitted {
            Ok(admitted) => admitted,
            Err(status) => return Box::pin(async move { Ok(status.into_http()) }),
        };
        request.extensions_mut().insert(caller.initiator.clone());
        let audit = &self.guard.audit;
        let record = rule
            .audited
            .map(|object| Arc::new(Record::new(audit, &caller, rule, object)));
        let (limit, told) = (self.guard.bounds.request, record.clone());
        let request = request.map(|body| Body::new(Arrival::new(body, limit, rule, told)));
        let answer = self.inner.call(request);
        let events = self.guard.events.clone();
        let turns = rule.read.map(|read| match read {
            Read::Known => self.guard.bounds.reads.of(&caller.initiator),
            Read::Look => self.guard.bounds.looks.of(&caller.initiator),
        });
        Box::pin(async move {
            let turn = match turns {
                // Nobody closes it.
                Some(turns) => turns.acquire_owned().await.ok(),
                None => None,
            };
            let answer = answer.await?;
            let answer = match (place, turn) {
                (Some(place), _) => answer.map(|body| placed(body, place)),
                (None, Some(turn)) => answer.map(|body| turned(body, turn)),
                (None, None) => answer,
            };
            let Some(record) = record else { return Ok(answer) };
            events.told().await;
            if let Some(code) = code(answer.headers()) {
                record.end(code);
                return Ok(answer);
            }
            Ok(answer.map(|body| recorded(body, record)))
        })
    }
}
