//! Events of the node, for the log and for clients of the EventService.
//!
//! ```text
//! emit ──▶ flood ──▶ queue ──▶ journal (page cache) ──▶ history (the newest 10,000) ──▶ watchers
//!            │ too many alike    └── a thread of its own ──┘                             each at its own pace
//!            └──▶ one event when the minute is over
//! ```
//!
//! [`Events::emit`] waits for no file: a stalled file system blocks only the thread. An event is in
//! its file, in the kernel's page cache, before a client can see the event, and before the response
//! to a request that caused the event ([`Events::told`]). A crash of the daemon therefore loses no
//! event that a client has seen, and no event of an answered request. Events that find no room in
//! the queue are lost and counted: the event `EventsLost` reports their number.

mod flood;
mod history;
mod journal;

use std::{
    collections::BTreeMap,
    fmt, io,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::Duration,
};

use tokio::{sync::watch, time::timeout};
use uuid::Uuid;
use vmmd_api::v1::{self, EventSeverity};
use vmmd_host::{fault, finish::finish, text};

use self::{flood::Flood, history::History, journal::Journal};
use crate::context::Context;

pub use self::history::{Bounds, Cursor, Expired};

/// Longest message of an event in bytes: a sentence. So an event always fits a frame of the journal, and the history in memory
/// is bounded.
const LONGEST_MESSAGE: usize = 1024;

/// Events that wait for their file at most: a few MiB.
const WAITING: usize = 4096;
/// How long an answer waits for the events that its request has led to. A file system that takes longer stalls the store too.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long the last events of a daemon that ends may take: systemd kills a daemon that does not end.
const LAST: Duration = Duration::from_secs(10);

/// Object of an event.
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
    /// Object of the event.
    pub object: Object,
    /// How bad it is.
    pub severity: EventSeverity,
    /// One CamelCase word.
    pub reason: String,
    /// One sentence, without paths of the host.
    pub message: String,
    /// Request or action that caused the event.
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
    /// Counts the events of the thread that clients can see.
    news: watch::Sender<u64>,
}

#[derive(Debug)]
struct Inner {
    /// Events that clients can see.
    history: History,
    flood: Flood,
    /// By reason, since the daemon's start.
    counts: BTreeMap<String, u64>,
    /// To the thread that writes.
    jobs: SyncSender<Job>,
    /// Events that were given to the thread.
    given: u64,
    /// Events that found no room since that was last told.
    lost: u64,
}

/// A job of the thread.
#[derive(Debug)]
enum Job {
    Write(Box<v1::Event>),
    /// Force all to the disk and note an orderly end.
    Close(SyncSender<()>),
}

impl Object {
    /// All values of [`Self::kind`].
    pub const KINDS: [&str; 6] = ["Vm", "Disk", "Snapshot", "Network", "Image", "Node"];

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
    /// Opens the event files in `dir` and loads the events of earlier daemons. Blocking. When the
    /// files are unusable, the function logs the error, and events stay in memory only.
    ///
    /// # Errors
    ///
    /// The system cannot start a thread.
    pub fn open(dir: &Path, boot_id: &str) -> io::Result<Self> {
        let (history, journal) = match Journal::open(dir, boot_id) {
            Ok((journal, loaded)) => (History::new(journal.epoch(), loaded), Some(journal)),
            Err(error) => {
                let error = text::words(&error);
                tracing::error!(
                    error,
                    "the files of events can't be used: events are lost with the daemon"
                );
                (History::new(journal::new_epoch(), Vec::new()), None)
            }
        };
        let (jobs, receiver) = sync_channel(WAITING);
        let inner = Inner {
            history,
            flood: Flood::default(),
            counts: BTreeMap::new(),
            jobs,
            given: 0,
            lost: 0,
        };
        let shared = Arc::new(Shared {
            inner: Mutex::new(inner),
            news: watch::Sender::new(0),
        });
        let (of, dir) = (Arc::downgrade(&shared), dir.to_owned());
        thread::Builder::new()
            .name("events".into())
            .spawn(move || serve(&dir, &of, journal, &receiver))?;
        Ok(Self { shared })
    }

    /// Tells an event. Waits for nobody.
    pub fn emit(&self, draft: Draft) {
        self.shared.emit(draft);
    }

    /// Waits until clients can see all events so far, for a second at most.
    pub async fn told(&self) {
        let given = self.shared.lock().given;
        let mut news = self.shared.news.subscribe();
        let told = news.wait_for(|seen| *seen >= given);
        if timeout(PATIENCE, told).await.is_err() {
            tracing::debug!("events wait for their file");
        }
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

    /// Writes the events in the queue and in the kernel's memory to the disk, for some seconds. No event follows. Blocking.
    pub fn close(&self) {
        let jobs = {
            let mut inner = self.shared.lock();
            for (draft, count) in inner.flood.drain() {
                inner.give(draft.into_event(count));
            }
            inner.jobs.clone()
        };
        finish(jobs, Job::Close, LAST);
    }
}

/// Closes the file of events when it is dropped: at the end of the daemon, with or without an error.
#[derive(Debug)]
pub struct Closing(pub Events);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.close();
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
                inner.give(draft.into_event(1));
            }
            flood::Verdict::Hold { first: false } => {}
            flood::Verdict::Hold { first: true } => {
                drop(inner);
                self.sweep_later();
            }
        }
    }

    /// Emits the held events when their minute is over.
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
            inner.give(draft.into_event(count));
        }
    }

    /// Lets an event be seen that is in its file.
    fn show(&self, sequence: u64, event: v1::Event) {
        self.lock().history.push(sequence, event);
        self.news.send_modify(|seen| *seen += 1);
    }
}

impl Inner {
    /// Gives an event to the thread, if it has room.
    fn give(&mut self, event: v1::Event) {
        if self.lost > 0 {
            let lost = format!(
                "{} events were lost: their file did not take them in time",
                self.lost
            );
            let draft = Draft::warning(Object::Node, "EventsLost", lost);
            let Ok(()) = self
                .jobs
                .try_send(Job::Write(Box::new(draft.into_event(self.lost))))
            else {
                self.lost += 1;
                return;
            };
            (self.given, self.lost) = (self.given + 1, 0);
        }
        match self.jobs.try_send(Job::Write(Box::new(event))) {
            Ok(()) => self.given += 1,
            Err(_) => self.lost += 1,
        }
    }
}

/// Writes events as long as there are [`Events`]. Without a `journal` events live as long as the daemon.
fn serve(dir: &Path, shared: &Weak<Shared>, mut journal: Option<Journal>, jobs: &Receiver<Job>) {
    while let Ok(job) = jobs.recv() {
        let Some(shared) = shared.upgrade() else { return };
        fault::stall(dir, "events");
        match job {
            Job::Write(event) => {
                // No other thread adds one.
                let (sequence, event) = shared.lock().history.stamp(*event);
                write(&mut journal, sequence, &event);
                shared.show(sequence, event);
            }
            Job::Close(reply) => {
                if let Some(journal) = &mut journal
                    && let Err(error) = journal.close()
                {
                    tracing::warn!(error = text::words(&error), "write the last events to the disk");
                }
                let _ = reply.send(());
            }
        }
    }
}

fn write(journal: &mut Option<Journal>, sequence: u64, event: &v1::Event) {
    if fault::deliberate("event-lost") && sequence.is_multiple_of(3) {
        return;
    }
    let Some(Err(error)) = journal.as_mut().map(|journal| journal.append(sequence, event)) else {
        return;
    };
    // An event that is no frame costs itself alone.
    let broken = error.kind() != io::ErrorKind::InvalidInput;
    let error = text::words(&error);
    if broken {
        tracing::error!(
            error,
            "an event could not be written: events are lost with the daemon from now on"
        );
        *journal = None;
    } else {
        tracing::error!(
            error,
            "an event is too long for the journal and is lost with the daemon"
        );
    }
}

/// Reader of the events in order, at its own pace.
#[derive(Debug)]
pub struct Follower {
    shared: Arc<Shared>,
    news: watch::Receiver<u64>,
    position: Cursor,
}

impl Follower {
    /// Cursor after the last event read.
    pub fn position(&self) -> &Cursor {
        &self.position
    }

    /// Waits for the next events and returns at least one. [`Expired`] when the history has
    /// discarded them.
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

/// Writes an event to the daemon's log, after the flood control: one event is one line.
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
    let text = line(object, message);
    if *severity == EventSeverity::Warning {
        tracing::warn!(kind, name, reason, request, operation, count, "{text}");
    } else {
        tracing::info!(kind, name, reason, request, operation, count, "{text}");
    }
}

/// The text of a line of the log. It names the object: a reader of the journal sees the text alone.
fn line(object: &Object, message: &str) -> String {
    let (kind, name) = (object.kind(), object.name());
    match object {
        Object::Node => message.to_owned(),
        Object::Vm(..) => format!("VM \"{name}\": {message}"),
        _ => format!("{} \"{name}\": {message}", kind.to_ascii_lowercase()),
    }
}

#[cfg(test)]
mod tests;
