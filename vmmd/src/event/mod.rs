//! What happens on the node, for those who want to know: the log, and clients of the EventService.
//!
//! ```text
//! emit ──▶ flood ──▶ journal (page cache) ──▶ history (the newest 10,000) ──▶ watchers
//!            │ too many alike                                                   each at its own pace
//!            └──▶ told as one when the minute is over
//! ```
//!
//! An event is in its file, as far as the kernel is concerned, before [`Events::emit`] returns: what follows it, as the
//! publication of a VM's state, is never seen by somebody who can't see the event after a crash of the daemon.

mod flood;
mod history;
mod journal;

use std::{
    collections::BTreeMap,
    fmt,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use proto::v1::{self, EventSeverity};
use tokio::sync::watch;
use uuid::Uuid;

use self::{flood::Flood, history::History, journal::Journal};
use crate::{context::Context, fault, text};

pub use self::history::{Bounds, Cursor, Expired};

/// Longest message of an event in bytes: a sentence. So an event always fits a frame of the journal, and the history in memory
/// is bounded.
const LONGEST_MESSAGE: usize = 1024;

/// What an event is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Object {
    /// A VM, by name and uid.
    Vm(String, Uuid),
    /// A disk of the DiskService.
    Disk(String, Uuid),
    /// A snapshot.
    Snapshot(String, Uuid),
    /// A network of the NetworkService.
    Network(String, Uuid),
    /// An image of the ImageService.
    Image(String, Uuid),
    /// The node.
    Node,
}

/// An event that is to be told.
#[derive(Clone, Debug)]
pub struct Draft {
    /// What it is about.
    pub object: Object,
    /// How bad it is.
    pub severity: EventSeverity,
    /// One CamelCase word.
    pub reason: String,
    /// One sentence, without paths of the host.
    pub message: String,
    /// What led to it.
    pub context: Context,
    /// Id of the operation that it belongs to; empty when to none.
    pub operation: String,
}

/// All events of the node. Clones are the same.
#[derive(Clone, Debug)]
pub struct Events {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    inner: Mutex<Inner>,
    /// Changes with each event.
    news: watch::Sender<u64>,
}

#[derive(Debug)]
struct Inner {
    history: History,
    /// `None` when it can't be written: then events live as long as the daemon.
    journal: Option<Journal>,
    flood: Flood,
    /// By reason, since the daemon's start.
    counts: BTreeMap<String, u64>,
}

impl Object {
    /// "Vm", "Disk", "Network", "Snapshot", "Image" or "Node".
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Vm(..) => "Vm",
            Self::Disk(..) => "Disk",
            Self::Snapshot(..) => "Snapshot",
            Self::Network(..) => "Network",
            Self::Image(..) => "Image",
            Self::Node => "Node",
        }
    }

    /// As clients see it.
    pub fn reference(&self) -> v1::ObjectReference {
        v1::ObjectReference {
            kind: self.kind().to_owned(),
            name: self.name().to_owned(),
            uid: self.uid(),
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Vm(name, _)
            | Self::Disk(name, _)
            | Self::Network(name, _)
            | Self::Snapshot(name, _)
            | Self::Image(name, _) => name,
            Self::Node => "",
        }
    }

    fn uid(&self) -> String {
        match self {
            Self::Vm(_, uid)
            | Self::Disk(_, uid)
            | Self::Network(_, uid)
            | Self::Snapshot(_, uid)
            | Self::Image(_, uid) => uid.to_string(),
            Self::Node => String::new(),
        }
    }
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Self::Vm(..) => "VM".to_owned(),
            Self::Node => return f.write_str("node"),
            other => other.kind().to_ascii_lowercase(),
        };
        write!(f, "{kind} \"{}\" with the uid {}", self.name(), self.uid())
    }
}

impl Draft {
    /// Something that is to be expected.
    pub fn normal(object: Object, reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            object,
            severity: EventSeverity::Normal,
            reason: reason.into(),
            message: message.into(),
            context: Context::daemon(),
            operation: String::new(),
        }
    }

    /// Something that somebody should look at.
    pub fn warning(object: Object, reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            severity: EventSeverity::Warning,
            ..Self::normal(object, reason, message)
        }
    }

    /// The same, led to by a request.
    pub fn of(self, context: Context) -> Self {
        Self { context, ..self }
    }

    fn into_event(self, count: u64) -> v1::Event {
        v1::Event {
            cursor: String::new(),
            time: text::timestamp(text::now_ms()),
            severity: self.severity.into(),
            object: Some(self.object.reference()),
            reason: self.reason,
            message: text::one_line(&self.message, LONGEST_MESSAGE),
            request_id: self.context.request_id,
            operation: self.operation,
            count,
        }
    }
}

impl Events {
    /// With those of earlier daemons, from `dir`. Blocking. Never fails: where the files can't be used, that is said, and
    /// events are kept in memory alone.
    pub fn open(dir: &Path, boot_id: &str) -> Self {
        match Journal::open(dir, boot_id) {
            Ok((journal, loaded)) => Self::with(History::new(journal.epoch(), loaded), Some(journal)),
            Err(error) => {
                let error = text::words(&error);
                tracing::error!(
                    error,
                    "the files of events can't be used: events are lost with the daemon"
                );
                Self::with(History::new(journal::new_epoch(), Vec::new()), None)
            }
        }
    }

    fn with(history: History, journal: Option<Journal>) -> Self {
        let news = watch::Sender::new(history.last());
        let inner = Inner {
            history,
            journal,
            flood: Flood::default(),
            counts: BTreeMap::new(),
        };
        Self {
            shared: Arc::new(Shared {
                inner: Mutex::new(inner),
                news,
            }),
        }
    }

    /// Tells an event. Waits for nobody; it is in the page cache when this returns.
    pub fn emit(&self, draft: Draft) {
        self.shared.emit(draft);
    }

    /// The newest events that are wanted, older than the one with the cursor `before` if there is one, within `bounds`; the
    /// oldest first. The place after all events, and whether there are older ones.
    pub fn list(
        &self,
        before: Option<&str>,
        bounds: Bounds,
        wanted: impl Fn(&v1::Event) -> bool,
    ) -> Result<(Vec<v1::Event>, Cursor, bool), Expired> {
        let inner = self.shared.lock();
        let (events, more) = inner.history.newest(before, bounds, wanted)?;
        Ok((events, inner.history.end(), more))
    }

    /// For a watch from a cursor on, or from now.
    pub fn follow(&self, cursor: Option<&str>) -> Result<Follower, Expired> {
        let news = self.shared.news.subscribe();
        let inner = self.shared.lock();
        let position = match cursor {
            Some(cursor) => inner.history.position(cursor)?,
            None => inner.history.end(),
        };
        Ok(Follower {
            shared: Arc::clone(&self.shared),
            news,
            position,
        })
    }

    /// How many there were since the daemon's start, by reason.
    pub fn counts(&self) -> BTreeMap<String, u64> {
        self.shared.lock().counts.clone()
    }

    /// Writes what the kernel still has in memory to the disk: the last act of a daemon that ends as it should. Blocking.
    pub fn close(&self) {
        let mut inner = self.shared.lock();
        for (draft, count) in inner.flood.drain() {
            inner.add(draft.into_event(count));
        }
        if let Some(journal) = &mut inner.journal
            && let Err(error) = journal.close()
        {
            tracing::warn!(error = text::words(&error), "write the last events to the disk");
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn emit(self: &Arc<Self>, draft: Draft) {
        let mut inner = self.lock();
        *inner.counts.entry(draft.reason.clone()).or_default() += 1;
        match inner.flood.take(draft) {
            flood::Verdict::Tell(draft) => {
                log(&draft, 1);
                inner.add(draft.into_event(1));
            }
            flood::Verdict::Hold { first: false } => return,
            flood::Verdict::Hold { first: true } => {
                drop(inner);
                return self.sweep_later();
            }
        }
        self.news.send_replace(inner.history.last());
    }

    /// Tells what was held back when its minute is over.
    fn sweep_later(self: &Arc<Self>) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        let shared: Weak<Self> = Arc::downgrade(self);
        runtime.spawn(async move {
            tokio::time::sleep(flood::PERIOD).await;
            if let Some(shared) = shared.upgrade() {
                shared.sweep();
            }
        });
    }

    fn sweep(&self) {
        let mut inner = self.lock();
        for (draft, count) in inner.flood.sweep() {
            log(&draft, count);
            inner.add(draft.into_event(count));
        }
        self.news.send_replace(inner.history.last());
    }
}

impl Inner {
    fn add(&mut self, event: v1::Event) {
        let (sequence, event) = self.history.add(event);
        if fault::deliberate("event-lost") && sequence.is_multiple_of(3) {
            return;
        }
        let Some(journal) = &mut self.journal else { return };
        if let Err(error) = journal.append(sequence, &event) {
            // An event that is no frame costs itself alone.
            let broken = error.kind() != std::io::ErrorKind::InvalidInput;
            let error = text::words(&error);
            if broken {
                tracing::error!(
                    error,
                    "an event could not be written: events are lost with the daemon from now on"
                );
                self.journal = None;
            } else {
                tracing::error!(
                    error,
                    "an event is too long for the journal and is lost with the daemon"
                );
            }
        }
    }
}

/// Somebody who reads the events one after the other, at his own pace.
#[derive(Debug)]
pub struct Follower {
    shared: Arc<Shared>,
    news: watch::Receiver<u64>,
    position: Cursor,
}

impl Follower {
    /// Where it is: after what was read last.
    pub fn position(&self) -> &Cursor {
        &self.position
    }

    /// The next events, at least one; waits for it. [`Expired`] when those that come next are not kept any more.
    pub async fn next(&mut self) -> Result<Vec<v1::Event>, Expired> {
        loop {
            self.news.mark_unchanged();
            let (events, position) = self.shared.lock().history.after(&self.position)?;
            if !events.is_empty() {
                self.position = position;
                return Ok(events);
            }
            // The sender lives as long as `shared`.
            let _ = self.news.changed().await;
        }
    }
}

/// To the daemon's log, after the flood control: what is told as one event is one line.
fn log(draft: &Draft, count: u64) {
    let Draft {
        object,
        severity,
        reason,
        message,
        context,
        operation,
    } = draft;
    let (kind, name, request) = (object.kind(), object.name(), &context.request_id);
    if *severity == EventSeverity::Warning {
        tracing::warn!(kind, name, reason, request, operation, count, "{message}");
    } else {
        tracing::info!(kind, name, reason, request, operation, count, "{message}");
    }
}

#[cfg(test)]
mod tests;
