//! The audit log: one line for each call that changes something, and for each that was refused for want of a right.
//! It goes to the tracing target `audit` and, when configured, to a file as JSON. It has names, never contents.

use std::{
    fs::File,
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use serde::Serialize;
use tonic::Code;

use super::{
    Caller,
    object::{Object, request_id},
    rule::Rule,
};

/// Where lines go.
#[derive(Debug, Default)]
pub struct Audit {
    path: Option<PathBuf>,
    file: Mutex<Option<File>>,
}

/// What a line is about.
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
struct Line<'a> {
    time: String,
    event: Kind,
    who: &'a str,
    role: &'a str,
    peer: &'a str,
    method: &'a str,
    object: &'a str,
    request_id: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    code: &'a str,
    milliseconds: u64,
}

impl Audit {
    /// Opens the file, if there is to be one. It is appended to and, when it is made, readable to its owner and group.
    pub fn open(path: Option<&Path>) -> io::Result<Self> {
        Ok(Self {
            path: path.map(Path::to_owned),
            file: Mutex::new(path.map(append).transpose()?),
        })
    }

    /// Opens the file anew, after it was renamed by whoever rotates logs. When that fails the old one stays.
    pub fn reopen(&self) -> io::Result<()> {
        if let Some(path) = &self.path {
            let file = append(path)?;
            *lock(&self.file) = Some(file);
        }
        Ok(())
    }

    fn write(&self, line: &Line<'_>) {
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
        );
        let mut file = lock(&self.file);
        let Some(file) = file.as_mut() else { return };
        // One write(2), so that lines of a daemon that ends are whole.
        let written = serde_json::to_string(line).map_err(io::Error::from);
        if let Err(error) = written.and_then(|text| file.write_all(format!("{text}\n").as_bytes())) {
            tracing::error!(%error, "write the audit log");
        }
    }
}

fn append(path: &Path) -> io::Result<File> {
    File::options().append(true).create(true).mode(0o640).open(path)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A call under way that is to be told. It is told once: by [`Record::end`], or as cancelled when the last who could do that
/// is dropped.
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
    /// Of a call that changes `object`.
    pub fn new(audit: &Arc<Audit>, caller: &Arc<Caller>, rule: &'static Rule, object: Object) -> Self {
        Self {
            audit: Arc::clone(audit),
            caller: Arc::clone(caller),
            method: rule.method,
            object,
            stream: rule.stream,
            began: Instant::now(),
            subject: Mutex::new((object.kind.to_owned(), String::new())),
            ended: AtomicBool::new(false),
        }
    }

    /// The request's message, or the first one of a stream, is there.
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

/// Tells of a call that was not let through.
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
    audit.write(&Line {
        time: jiff::Timestamp::now().to_string(),
        event,
        who: &caller.initiator.to_string(),
        role: caller.role.map_or("none", super::Role::name),
        peer: &caller.address,
        method,
        object,
        request_id,
        code,
        milliseconds: u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
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

    use super::*;
    use crate::{
        auth::{Bucket, Role, rule},
        context::Initiator,
    };

    fn caller() -> Arc<Caller> {
        Arc::new(Caller {
            initiator: Initiator::Certificate("al\"ice\n".into()),
            role: Some(Role::Operator),
            address: "192.0.2.1:5".into(),
            bucket: Bucket::new(1),
        })
    }

    #[test]
    fn a_call_is_one_line_of_json_however_it_ends_and_a_file_that_moved_is_made_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let audit = Arc::new(Audit::open(Some(&path)).unwrap());
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777 & !0o640,
            0
        );
        let rule = rule::find("/vmmd.v1.VmService/StartVm").unwrap();
        let object = rule.changes.unwrap();
        let record = Record::new(&audit, &caller(), rule, object);
        record.arrived(b"\x0a\x03web\x7a\x02r1");
        record.end(Code::NotFound);
        drop(record);
        drop(Record::new(&audit, &caller(), rule, object));
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
        audit.reopen().unwrap();
        denied(&audit, &caller(), "x/Y", Code::PermissionDenied);
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), 1);
        assert!(
            text.contains("\"denied\"") && text.contains("PERMISSION_DENIED"),
            "{text}"
        );
    }
}
