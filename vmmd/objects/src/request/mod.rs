//! Requests with an id: each is carried out once, even when the client sends it several times.
//!
//! ```text
//!            begin                          a success
//!   (none) ─────────▶ under way ───────────────────────────────────────▶ answered (in the store)
//!      ▲                │    │ the daemon ends
//!      └────────────────┘    └──▶ left (in the record of its object) ──▶ under way …
//!           a refusal
//! ```
//!
//! Ids belong to their callers: two callers may use the same id. A second request with the id of
//! one in progress waits for the same response. A request that succeeded gets its stored response
//! for a day, or until its caller has had more responses than the store keeps per caller. The
//! response shows the current state of its VM ([`shown`]). The same id with another method or other
//! content is refused, and so is the id of a request whose created object does not exist any more
//! ([`made`]). A refusal is not stored: the retry is carried out. A request that only checks leaves
//! its id free.
//!
//! Before the first durable effect of a request, its mark (id, method, fingerprint of the content)
//! is in the record of the VM or disk. The same transaction writes both, so the mark has no extra
//! cost. The content has secrets, such as a registry's password. The fingerprint is therefore an
//! HMAC, and a reader of the store cannot test guesses. With another `secrets_key` no retry is
//! recognized: it is refused. The daemon stores the response before it sends the response, which is
//! the one commit that an id costs. After a kill of the daemon in between, the retry carries out
//! the rest and finds the mark:
//!
//! | request | a retry after the daemon was killed |
//! |---|---|
//! | CreateVm | a VM with the mark is the response; with `start` it is started if it never was; none is created if it has been deleted since |
//! | UpdateVm | written changes are not written again; failed ones are tried again |
//! | DeleteVm | the response is written together with the removal of the record: answered |
//! | StartVm, RestartVm | a run that the request began, and that continues, is the response; otherwise carried out again |
//! | StopVm, PauseVm, ResumeVm | carried out again; an already reached state is a success |
//! | ResetVm, InjectNmi | carried out again when its response was not written: neither leaves a durable trace |
//! | AttachDisk | carried out again; the same disk again is no error, and `preconditions.generation` is not checked |
//! | DetachDisk | a missing disk is a success |
//! | ResizeVmDisk, UpdateDisk | carried out again; an already reached state is a success, and the generation is not checked |
//! | CreateDisk | a disk with the mark is the response, and none is created if it has been deleted since; an incomplete one was removed, and is created again |
//! | DeleteDisk | the response is written together with the beginning of the deletion: answered |
//! | CreateSnapshot | a snapshot with the mark is the response; an incomplete one was removed, and is taken again |
//! | ImportSnapshot | a snapshot with the mark is the response, for any archive; an incomplete one was removed, and is created again |
//! | DeleteSnapshot | the response is written together with the beginning of the deletion: answered |
//! | RestoreVm | a run that the request began, and that continues, is the response; a VM with the mark is started again; otherwise carried out again |
//! | CreateNetwork | a network with the mark is the response |
//! | UpdateNetwork | carried out again; an already reached state is a success, and the generation is not checked |
//! | DeleteNetwork | the response is written together with the beginning of the deletion: answered |
//! | MigrateVm | carried out again: refused while the migration continues or waits for the other node; a VM that has left is not found |
//! | ResolveMigration | carried out again: refused, since the migration does not wait after the decision |
//! | ImportImage | an image with the mark is the response, also during its import; none is created if it has been deleted since |
//! | DeleteImage | the response is written together with the beginning of the deletion: answered |
//! | PruneImages | carried out again: images deleted before are not named |
//! | UpdateNodeLabels, CordonNode, UncordonNode, DrainNode | carried out again; an already reached state is a success |

mod answer;
pub mod made;
pub mod masked;
pub mod preconditions;
mod shown;

use std::{
    collections::HashMap,
    future::Future,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use prost::Message;
use sha2::{Digest, Sha256};
use tokio::sync::watch;
use tonic::{Response, Status};
use tracing::Instrument;
use uuid::Uuid;
use vmmd_api::{rule::Mutation, v1};

use self::answer::Answer;
pub use self::answer::done;
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};
use vmmd_store::{self, Key, REQUEST_AGE_MS, RequestKey, RequestMark, Store};

use crate::{
    context::{self, Context, Initiator},
    event::Object,
};

/// Longest id in bytes.
const MAX_ID: usize = 128;

/// Requests that have been begun and not been answered.
#[derive(Debug, Default)]
pub struct Requests {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    under_way: HashMap<RequestKey, UnderWay>,
    /// Begun by an earlier daemon. Some of them were answered: the store says so.
    left: HashMap<RequestKey, Left>,
}

#[derive(Debug)]
struct UnderWay {
    mark: RequestMark,
    /// `None` until the request has ended.
    answer: watch::Receiver<Option<Answer>>,
}

#[derive(Debug)]
struct Left {
    mark: RequestMark,
    /// UUID of the VM, disk, snapshot or image that has the mark.
    on: Vec<u8>,
}

/// Interface to the daemon for carrying out a request once.
pub trait Ports: Send + Sync + 'static {
    /// Those under way.
    fn requests(&self) -> &Requests;

    /// Where answers are kept.
    fn store(&self) -> &Store;

    /// Whether this very object is on the node. One whose deletion can't fail any more is not.
    fn has(&self, object: &Object) -> bool;

    /// The VM with this UUID as clients see it, if it is on the node.
    fn vm(&self, uid: Uuid) -> Option<Arc<v1::Vm>>;
}

impl<P: Ports> Ports for Arc<P> {
    fn requests(&self) -> &Requests {
        self.as_ref().requests()
    }

    fn store(&self) -> &Store {
        self.as_ref().store()
    }

    fn has(&self, object: &Object) -> bool {
        self.as_ref().has(object)
    }

    fn vm(&self, uid: Uuid) -> Option<Arc<v1::Vm>> {
        self.as_ref().vm(uid)
    }
}

/// Result of the registration of a request.
enum Entered {
    Begun(watch::Sender<Option<Answer>>),
    Waiting(watch::Receiver<Option<Answer>>),
}

/// Carries a request out, or returns its stored response. With a request id, `work` continues when
/// the caller drops the future.
pub async fn once<H, Q, A, F>(
    host: &Arc<H>,
    request: tonic::Request<Q>,
    work: impl FnOnce(Arc<H>, Q, Context) -> F + Send + 'static,
) -> Result<Response<A>, Status>
where
    H: Ports,
    Q: Mutation,
    A: Message + Default + 'static,
    F: Future<Output = Result<A, Status>> + Send + 'static,
{
    let context = context(&request)?;
    let request = request.into_inner();
    let host = Arc::clone(host);
    let span = context::span(&context.trace);
    if context.request_id.is_empty() {
        let answer = work(host, request, context).instrument(span);
        return answer.await.map(Response::new);
    }
    let mark = mark(&request, &context.initiator, host.store().key());
    let changes = !request.dry_run();
    let mut answer = match host.requests().enter(&mark)? {
        Entered::Waiting(answer) => answer,
        Entered::Begun(sender) => {
            let answer = sender.subscribe();
            let whole = async move {
                let under_way = Guard(Arc::clone(&host), mark.key());
                let answer = carry_out(&*host, mark, changes, || {
                    work(Arc::clone(&host), request, context)
                })
                .await;
                // The id is free before the caller receives the response, so that the caller may
                // use a free id at once.
                drop(under_way);
                sender.send_replace(Some(answer));
            };
            tokio::spawn(whole.instrument(span));
            answer
        }
    };
    let ended = answer.wait_for(Option::is_some).await;
    let ended = ended.ok().and_then(|answer| answer.clone());
    let ended = ended.ok_or_else(|| Failure::internal("the request ended without an answer"))?;
    ended.decode().map(Response::new)
}

/// Carries out a request, unless the store has its answer. `changes` is false for a request that only checks.
async fn carry_out<A, F>(
    host: &impl Ports,
    mark: RequestMark,
    changes: bool,
    work: impl FnOnce() -> F,
) -> Answer
where
    A: Message,
    F: Future<Output = Result<A, Status>>,
{
    match host.store().request(mark.key()).await {
        Ok(Some(record)) if same(record.mark.as_ref(), &mark) => {
            let made = made::object(&mark.method, &record.response);
            return match made.filter(|made| !host.has(made)) {
                Some(gone) => Answer::from(Status::from(made::gone(&gone))),
                None => Answer::again(host, &mark.method, record),
            };
        }
        Ok(Some(_)) => return Answer::from(Status::from(reused(&mark.id))),
        Ok(None) => {}
        Err(error) => return Answer::from(Status::from(vmmd_store::store_failure(error))),
    }
    let answer = match work().await {
        Ok(response) => Answer::of(&response),
        Err(status) => Answer::from(status),
    };
    let (id, key) = (mark.id.clone(), mark.key());
    if changes && let Some(record) = answer.record(mark) {
        // The effects stay; without a stored response a retry is carried out again.
        if let Err(error) = host.store().complete(record).await {
            tracing::error!(request = id, %error, "the answer of a request could not be written");
        }
        host.requests().inner().left.remove(&key);
    }
    answer
}

/// Caller, request id and preconditions of a request. An invalid id is refused.
pub fn context<Q: Mutation>(request: &tonic::Request<Q>) -> Result<Context, Failure> {
    let id = request.get_ref().request_id();
    if id.len() > MAX_ID || !id.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ') {
        let problem = format_args!("must be at most {MAX_ID} printable ASCII characters");
        return Err(Failure::field("requestId", problem));
    }
    let trace = match id {
        "" => Uuid::new_v4().simple().to_string(),
        id => id.to_owned(),
    };
    Ok(Context {
        request_id: id.to_owned(),
        trace,
        initiator: request
            .extensions()
            .get::<Initiator>()
            .cloned()
            .unwrap_or_default(),
        preconditions: request.get_ref().preconditions().cloned().unwrap_or_default(),
    })
}

fn mark<Q: Mutation>(request: &Q, caller: &Initiator, key: &Key) -> RequestMark {
    // Maps are sorted: the same content has the same bytes.
    let mut content = request.clone();
    content.set_request_id(String::new());
    RequestMark {
        id: request.request_id().to_owned(),
        method: Q::METHOD.to_owned(),
        fingerprint: key.fingerprint(&Sha256::digest(content.encode_to_vec())),
        begun_ms: text::now_ms(),
        caller: caller.scope(),
    }
}

fn same(known: Option<&RequestMark>, mark: &RequestMark) -> bool {
    known.is_some_and(|known| known.method == mark.method && known.fingerprint == mark.fingerprint)
}

fn reused(id: &str) -> Failure {
    let message =
        format!("request id \"{id}\" was used for another request: give each request an id of its own");
    Failure::new(Kind::Exists, "REQUEST_ID_REUSED", message)
}

/// Returns the mark in `begun` of the unanswered request with this method. If its object were
/// deleted, a retry would carry the request out again.
pub async fn unanswered(
    host: &impl Ports,
    begun: &[RequestMark],
    method: &str,
) -> Result<Option<RequestMark>, vmmd_store::Error> {
    let Some(mark) = begun.iter().find(|mark| mark.method == method) else {
        return Ok(None);
    };
    let answered = !host.requests().is_open(&mark.key()) || host.store().request(mark.key()).await?.is_some();
    Ok((!answered).then(|| mark.clone()))
}

/// Runs work that continues if the caller disconnects: a change is not left half done.
///
/// # Errors
///
/// The error of the work, or its panic.
pub async fn to_completion<T: Send + 'static>(
    work: impl Future<Output = Result<T, Failure>> + Send + 'static,
) -> Result<T, Failure> {
    let done = tokio::spawn(work).await;
    done.unwrap_or_else(|error| Err(Failure::internal(error.to_string())))
}

/// Takes a request out of those under way.
struct Guard<H: Ports>(Arc<H>, RequestKey);

impl<H: Ports> Drop for Guard<H> {
    fn drop(&mut self) {
        self.0.requests().inner().under_way.remove(&self.1);
    }
}

impl Requests {
    /// The mark of the request, while it is under way; `None` when it has no id.
    pub fn mark(&self, context: &Context) -> Option<RequestMark> {
        let inner = self.inner();
        inner
            .under_way
            .get(&context.key())
            .map(|under_way| under_way.mark.clone())
    }

    /// Whether this request is under way.
    pub fn is_under_way(&self, key: &RequestKey) -> bool {
        self.inner().under_way.contains_key(key)
    }

    /// Whether this request may have no answer.
    fn is_open(&self, key: &RequestKey) -> bool {
        let inner = self.inner();
        inner.under_way.contains_key(key) || inner.left.contains_key(key)
    }

    /// Adds the mark of the request to the marks of a VM, and removes the marks of answered
    /// requests.
    pub fn note(&self, context: &Context, begun: &mut Vec<RequestMark>) {
        let Some(mark) = self.mark(context) else { return };
        let inner = self.inner();
        let open = |key: &RequestKey| inner.under_way.contains_key(key) || inner.left.contains_key(key);
        begun.retain(|known| known.key() != mark.key() && open(&known.key()));
        begun.push(mark);
    }

    /// Takes over what an earlier daemon has begun on the object with the UUID `on`.
    pub fn adopt(&self, begun: &[RequestMark], on: &[u8]) {
        let now = text::now_ms();
        let mut inner = self.inner();
        let recent = begun
            .iter()
            .filter(|mark| now.saturating_sub(mark.begun_ms) < REQUEST_AGE_MS);
        inner.left.extend(recent.map(|mark| {
            let left = Left {
                mark: mark.clone(),
                on: on.to_vec(),
            };
            (mark.key(), left)
        }));
    }

    fn enter(&self, mark: &RequestMark) -> Result<Entered, Failure> {
        let mut inner = self.inner();
        if let Some(under_way) = inner.under_way.get(&mark.key()) {
            if !same(Some(&under_way.mark), mark) {
                return Err(reused(&mark.id));
            }
            return Ok(Entered::Waiting(under_way.answer.clone()));
        }
        if let Some(left) = inner.left.get(&mark.key())
            && !same(Some(&left.mark), mark)
        {
            return Err(reused(&mark.id));
        }
        let (sender, answer) = watch::channel(None);
        let under_way = UnderWay {
            mark: mark.clone(),
            answer,
        };
        inner.under_way.insert(mark.key(), under_way);
        Ok(Entered::Begun(sender))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
