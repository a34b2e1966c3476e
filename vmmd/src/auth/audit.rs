//! The audit log: one line for each call that changes something, and for each that was refused for want of a right.
//! It goes to the tracing target `audit` and, when configured, to a file as JSON. It has names, never contents.
//!
//! Lines are written by a thread of their own: neither a slow disk nor a slow journal delays a call.

use std::{
    fs::File,
    io::{self, Write},
    num::NonZeroU64,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::Instant,
};

use serde::Serialize;
use tokio::sync::oneshot;
use tonic::Code;

use super::{
    Caller,
    object::{Object, request_id},
    rule::Rule,
};

/// Lines that wait to be written at most.
const WAITING: usize = 16 << 10;

/// Where lines go.
#[derive(Debug)]
pub struct Audit {
    jobs: SyncSender<Job>,
    /// Lines that found no room since the last one that did.
    lost: AtomicU64,
}

/// Job of the writer thread.
enum Job {
    Write(Box<Line>),
    /// Reopen the file.
    Reopen(oneshot::Sender<io::Result<()>>),
    /// Say when all before is written.
    Flush(oneshot::Sender<()>),
}

/// Kind of event that a line reports.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    /// A call that has ended.
    Call,
    /// A stream that has been opened.
    Begin,
    /// One that has ended.
    End,
    /// A call that was not let through.
    Denied,
}

/// One line.
#[derive(Debug, Serialize)]
struct Line {
    time: String,
    event: Kind,
    who: String,
    role: &'static str,
    peer: String,
    method: String,
    object: String,
    request_id: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    code: String,
    milliseconds: u64,
    /// Lines before this one that were lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    lost: Option<NonZeroU64>,
}

impl Audit {
    /// Opens the file, if there is to be one, and starts the thread. The file is appended to and, when it is made, readable to
    /// its owner and group.
    pub fn open(path: Option<&Path>) -> io::Result<Self> {
        let file = path.map(append).transpose()?;
        let path = path.map(Path::to_owned);
        let (jobs, receiver) = sync_channel(WAITING);
        thread::Builder::new()
            .name("audit".into())
            .spawn(move || serve(path.as_ref(), file, &receiver))?;
        Ok(Self {
            jobs,
            lost: AtomicU64::new(0),
        })
    }

    /// Reopens the file after a log rotation has renamed it. On failure the thread continues to
    /// write to the old file.
    pub async fn reopen(&self) -> io::Result<()> {
        let (sender, receiver) = oneshot::channel();
        self.ask(Job::Reopen(sender)).await;
        receiver
            .await
            .unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Waits until the thread has written all earlier lines.
    pub async fn flush(&self) {
        let (sender, receiver) = oneshot::channel();
        self.ask(Job::Flush(sender)).await;
        let _ = receiver.await;
    }

    async fn ask(&self, job: Job) {
        let jobs = self.jobs.clone();
        // There may be no room for it for a while.
        let _ = tokio::task::spawn_blocking(move || jobs.send(job).is_ok()).await;
    }

    fn write(&self, mut line: Line) {
        let lost = self.lost.swap(0, Ordering::Relaxed);
        line.lost = NonZeroU64::new(lost);
        if self.jobs.try_send(Job::Write(Box::new(line))).is_err() {
            self.lost.fetch_add(lost + 1, Ordering::Relaxed);
        }
    }
}

fn serve(path: Option<&PathBuf>, mut file: Option<File>, jobs: &Receiver<Job>) {
    while let Ok(job) = jobs.recv() {
        match job {
            Job::Write(line) => write(file.as_mut(), &line),
            Job::Reopen(reply) => {
                let opened = path.map(|path| append(path)).transpose();
                let _ = reply.send(opened.map(|opened| file = opened));
            }
            Job::Flush(reply) => {
                let _ = reply.send(());
            }
        }
    }
}

fn write(file: Option<&mut File>, line: &Line) {
    tracing::info!(
        target: "audit",
        event = ?line.event,
        who = line.who,
        role = line.role,
        peer = line.peer,
        method = line.method,
        object = line.object,
        request = line.request_id,
        code = line.code,
        milliseconds = line.milliseconds,
        lost = line.lost.map_or(0, NonZeroU64::get),
    );
    let Some(file) = file else { return };
    // One write(2), so that lines of a daemon that ends are whole.
    let written = serde_json::to_string(line).map_err(io::Error::from);
    if let Err(error) = written.and_then(|text| file.write_all(format!("{text}\n").as_bytes())) {
        tracing::error!(%error, "write the audit log");
    }
}

fn append(path: &Path) -> io::Result<File> {
    File::options().append(true).create(true).mode(0o640).open(path)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A call in progress that the audit log records. The log receives one end: from [`Record::end`],
/// or `CANCELLED` when the record is dropped before.
#[derive(Debug)]
pub struct Record {
    audit: Arc<Audit>,
    caller: Arc<Caller>,
    method: &'static str,
    object: Object,
    stream: bool,
    began: Instant,
    /// Object and request id, when the request has come.
    subject: Mutex<(String, String)>,
    ended: AtomicBool,
}

impl Record {
    /// Creates the record of a call on `object`.
    pub fn new(audit: &Arc<Audit>, caller: &Arc<Caller>, rule: &'static Rule, object: Object) -> Self {
        Self {
            audit: Arc::clone(audit),
            caller: Arc::clone(caller),
            method: rule.method,
            object,
            stream: rule.long,
            began: Instant::now(),
            subject: Mutex::new((object.kind.to_owned(), String::new())),
            ended: AtomicBool::new(false),
        }
    }

    /// Reads the object and request id from the request's message, or from the first message of a
    /// stream.
    pub fn arrived(&self, message: &[u8]) {
        *lock(&self.subject) = (self.object.read(message), request_id(message));
        if self.stream {
            self.tell(Kind::Begin, "");
        }
    }

    /// The call has ended.
    pub fn end(&self, code: Code) {
        if !self.ended.swap(true, Ordering::Relaxed) {
            let kind = if self.stream { Kind::End } else { Kind::Call };
            self.tell(kind, &name(code));
        }
    }

    fn tell(&self, event: Kind, code: &str) {
        let (object, request_id) = &*lock(&self.subject);
        let method = self.method;
        tell(
            &self.audit,
            &self.caller,
            event,
            method,
            (object, request_id),
            code,
            self.began,
        );
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.end(Code::Cancelled);
    }
}

/// Logs a call that was not admitted.
pub fn denied(audit: &Audit, caller: &Caller, method: &str, code: Code) {
    tell(
        audit,
        caller,
        Kind::Denied,
        method,
        ("", ""),
        &name(code),
        Instant::now(),
    );
}

fn tell(
    audit: &Audit,
    caller: &Caller,
    event: Kind,
    method: &str,
    (object, request_id): (&str, &str),
    code: &str,
    began: Instant,
) {
    audit.write(Line {
        time: jiff::Timestamp::now().to_string(),
        event,
        who: caller.initiator.to_string(),
        role: caller.role.map_or("none", super::Role::name),
        peer: caller.address.clone(),
        method: method.to_owned(),
        object: object.to_owned(),
        request_id: request_id.to_owned(),
        code: code.to_owned(),
        milliseconds: u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
        lost: None,
    });
}

/// As the gRPC specification writes it: `NOT_FOUND`.
fn name(code: Code) -> String {
    let mut name = String::new();
    for letter in format!("{code:?}").chars() {
        if letter.is_ascii_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(letter.to_ascii_uppercase());
    }
    name
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use vmmd_objects::context::Initiator;

    use super::*;
    use crate::auth::{Bucket, Role, rule};

    fn caller() -> Arc<Caller> {
        Arc::new(Caller {
            initiator: Initiator::Certificate("al\"ice\n".into()),
            role: Some(Role::Operator),
            address: "192.0.2.1:5".into(),
            bucket: Bucket::new(1),
        })
    }

    #[tokio::test]
    async fn call_is_one_line_of_json_and_a_moved_file_is_recreated() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let audit = Arc::new(Audit::open(Some(&path)).unwrap());
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777 & !0o640,
            0
        );
        let rule = rule::find("/vmmd.v1.VmService/StartVm").unwrap();
        let object = rule.audited.unwrap();
        let record = Record::new(&audit, &caller(), rule, object);
        record.arrived(b"\x0a\x03web\x7a\x02r1");
        record.end(Code::NotFound);
        drop(record);
        drop(Record::new(&audit, &caller(), rule, object));
        audit.flush().await;
        let lines: Vec<serde_json::Value> = fs::read_to_string(&path)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let [first, second] = lines.as_slice() else {
            panic!("{lines:?}")
        };
        for (key, value) in [
            ("event", "call"),
            ("who", "al\"ice\n"),
            ("role", "operator"),
            ("peer", "192.0.2.1:5"),
            ("method", "vmmd.v1.VmService/StartVm"),
            ("object", "vm/web"),
            ("request_id", "r1"),
            ("code", "NOT_FOUND"),
        ] {
            assert_eq!(first[key], value, "{key}");
        }
        assert_eq!(
            (&second["object"], &second["code"]),
            (&"vm".into(), &"CANCELLED".into())
        );
        fs::rename(&path, folder.path().join("audit.log.1")).unwrap();
        audit.reopen().await.unwrap();
        denied(&audit, &caller(), "x/Y", Code::PermissionDenied);
        audit.flush().await;
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), 1);
        assert!(
            text.contains("\"denied\"") && text.contains("PERMISSION_DENIED"),
            "{text}"
        );
    }

    #[tokio::test]
    async fn disk_that_stalls_delays_no_caller_and_losses_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RWXU,
            0,
        )
        .unwrap();
        // Without a reader the FIFO holds 64 KiB, then writes block.
        let mut reader = File::options().read(true).write(true).open(&path).unwrap();
        let audit = Audit::open(Some(&path)).unwrap();
        let some = WAITING + 2000;
        for _ in 0..some {
            denied(&audit, &caller(), "x/Y", Code::PermissionDenied);
        }
        assert!(audit.lost.load(Ordering::Relaxed) > 0);
        thread::spawn(move || io::copy(&mut reader, &mut io::sink()));
        audit.flush().await;
        assert_eq!(
            audit
                .jobs
                .try_send(Job::Flush(oneshot::channel().0))
                .err()
                .map(drop),
            None
        );
        denied(&audit, &caller(), "x/Y", Code::PermissionDenied);
        assert_eq!(
            audit.lost.load(Ordering::Relaxed),
            0,
            "it is told with the next line"
        );
    }
}
