//! The daemon's log: to the journal when systemd has connected stderr to it, otherwise to stderr.
//!
//! A thread of its own writes the lines: a journal or a terminal that takes none delays no request and no VM. Lines that find no room
//! are lost, and the next line that is written is followed by their number.

use std::{
    env,
    fmt::{self, Write as _},
    io::{self, IsTerminal, Write},
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::Duration,
};

use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id},
};
use tracing_subscriber::{
    EnvFilter, Layer,
    fmt::MakeWriter,
    layer::{Context, SubscriberExt},
    registry::LookupSpan,
    util::SubscriberInitExt,
};
use vmmd_host::finish::finish;

/// Lines that wait to be written at most.
const WAITING: usize = 2048;
/// Longest line for the journal in bytes, with all of its fields: it fits a datagram.
const LONGEST: usize = 8 << 10;
/// How long the last lines of a daemon that ends may take.
const LAST: Duration = Duration::from_secs(1);
/// Where journald listens (systemd's "Native Journal Protocol").
const JOURNAL: &str = "/run/systemd/journal/socket";
/// Fields of an event's line, whose text names the object: they are not repeated in the text.
const STRUCTURED: [&str; 6] = ["kind", "name", "reason", "request", "operation", "count"];

/// Where lines go. Clones are the same.
#[derive(Clone, Debug)]
pub struct Log {
    jobs: SyncSender<Job>,
    /// Lines that found no room since that was last said.
    lost: Arc<AtomicU64>,
}

/// Work of the thread.
enum Job {
    Write(Vec<u8>),
    /// Say when all before is written.
    Flush(SyncSender<()>),
}

/// The destination of the lines.
enum Sink {
    Journal(UnixDatagram, PathBuf),
    Text(Box<dyn Write + Send>),
}

/// Starts the log of this process. `RUST_LOG` selects the messages, by default `info`.
pub fn init() -> io::Result<Log> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let registry = tracing_subscriber::registry().with(filter);
    if env::var_os("JOURNAL_STREAM").is_some() && Path::new(JOURNAL).exists() {
        let log = Log::start(Sink::Journal(UnixDatagram::unbound()?, JOURNAL.into()))?;
        registry.with(Journal(log.clone())).init();
        return Ok(log);
    }
    let log = Log::start(Sink::Text(Box::new(io::stderr())))?;
    let text = tracing_subscriber::fmt::layer()
        .with_writer(log.clone())
        .with_ansi(io::stderr().is_terminal())
        .with_target(false);
    registry.with(text).init();
    Ok(log)
}

impl Log {
    fn start(sink: Sink) -> io::Result<Self> {
        let (jobs, receiver) = sync_channel(WAITING);
        let lost = Arc::<AtomicU64>::default();
        let counter = Arc::clone(&lost);
        thread::Builder::new()
            .name("log".into())
            .spawn(move || serve(sink, &receiver, &counter))?;
        Ok(Self { jobs, lost })
    }

    fn write(&self, line: Vec<u8>) {
        if self.jobs.try_send(Job::Write(line)).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until all lines are written, for a moment: the last act of a daemon that ends.
    pub fn flush(&self) {
        self.flush_within(LAST);
    }

    fn flush_within(&self, limit: Duration) -> bool {
        finish(self.jobs.clone(), Job::Flush, limit)
    }
}

fn serve(mut sink: Sink, jobs: &Receiver<Job>, lost: &AtomicU64) {
    while let Ok(job) = jobs.recv() {
        match job {
            Job::Write(line) => {
                sink.write(&line);
                sink.tell_lost(lost);
            }
            Job::Flush(reply) => {
                sink.tell_lost(lost);
                let _ = reply.send(());
            }
        }
    }
}

impl Sink {
    /// A line that is not taken has no other place to go to.
    fn write(&mut self, line: &[u8]) {
        let _ = match self {
            Self::Journal(socket, path) => socket.send_to(line, path).map(drop),
            Self::Text(text) => text.write_all(line),
        };
    }

    fn tell_lost(&mut self, lost: &AtomicU64) {
        let lost = lost.swap(0, Ordering::Relaxed);
        if lost == 0 {
            return;
        }
        let message = format!("{lost} lines of the log were lost: the log did not take them in time");
        let line = match self {
            Self::Text(_) => format!("{message}\n").into_bytes(),
            Self::Journal(..) => {
                let mut line = Line::default();
                line.field("PRIORITY", "4");
                line.field("SYSLOG_IDENTIFIER", env!("CARGO_PKG_NAME"));
                line.field("MESSAGE", &message);
                line.0
            }
        };
        self.write(&line);
    }
}

impl Write for Log {
    /// A whole line: that is how lines are written.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        Self::write(self, line.to_vec());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// Layer that writes messages in the journal's protocol: the text followed by the fields, and each
/// field separately.
struct Journal(Log);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Journal {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut line = Line::default();
        line.describe(event.metadata());
        for span in context.event_scope(event).into_iter().flatten() {
            if let Some(fields) = span.extensions().get::<Fields>() {
                line.fields(&fields.others);
            }
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        line.field("MESSAGE", &fields.text());
        line.fields(&fields.others);
        self.0.write(line.0);
    }
}

/// Message and fields of an event or a span.
#[derive(Default)]
struct Fields {
    message: String,
    others: Vec<(&'static str, String)>,
}

impl Fields {
    /// For people: the message with the other fields behind it.
    fn text(&self) -> String {
        let mut text = self.message.clone();
        let shown = self.others.iter();
        for (name, value) in shown.filter(|(name, value)| !value.is_empty() && !STRUCTURED.contains(name)) {
            let space = if text.is_empty() { "" } else { " " };
            let _ = write!(text, "{space}{name}={value}");
        }
        text
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => value.clone_into(&mut self.message),
            name => self.others.push((name, value.to_owned())),
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}

/// A line of the journal's protocol.
#[derive(Default)]
struct Line(Vec<u8>);

impl Line {
    fn describe(&mut self, metadata: &Metadata<'_>) {
        // As syslog(3) has them.
        let priority = match *metadata.level() {
            Level::ERROR => "3",
            Level::WARN => "4",
            Level::INFO => "5",
            Level::DEBUG => "6",
            Level::TRACE => "7",
        };
        self.field("PRIORITY", priority);
        self.field("SYSLOG_IDENTIFIER", env!("CARGO_PKG_NAME"));
        self.field("TARGET", metadata.target());
        self.field("CODE_FILE", metadata.file().unwrap_or_default());
        if let Some(line) = metadata.line() {
            self.field("CODE_LINE", &line.to_string());
        }
    }

    /// Names of the journal's fields have capitals, digits and underscores.
    fn fields(&mut self, fields: &[(&'static str, String)]) {
        for (name, value) in fields {
            let name: String = name
                .chars()
                .map(|letter| match letter.to_ascii_uppercase() {
                    letter if letter.is_ascii_alphanumeric() => letter,
                    _ => '_',
                })
                .collect();
            self.field(&format!("F_{name}"), value);
        }
    }

    /// A value is cut where the line is full, and may have any bytes: its length is before it.
    fn field(&mut self, name: &str, value: &str) {
        let room = LONGEST.saturating_sub(self.0.len() + name.len() + 10);
        let value = value.as_bytes().get(..room).unwrap_or(value.as_bytes());
        self.0.extend_from_slice(name.as_bytes());
        self.0.push(b'\n');
        self.0
            .extend_from_slice(&u64::try_from(value.len()).unwrap_or_default().to_le_bytes());
        self.0.extend_from_slice(value);
        self.0.push(b'\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fields of a datagram of the journal.
    fn read(socket: &UnixDatagram) -> Vec<(String, String)> {
        let mut buffer = vec![0; 2 * LONGEST];
        let length = socket.recv(&mut buffer).unwrap();
        let (mut rest, mut fields) = (&buffer[..length], Vec::new());
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let name = String::from_utf8(rest[..end].to_vec()).unwrap();
            let (size, after) = rest[end + 1..].split_first_chunk().unwrap();
            let size = usize::try_from(u64::from_le_bytes(*size)).unwrap();
            let value = String::from_utf8(after[..size].to_vec()).unwrap();
            fields.push((name, value));
            rest = &after[size + 1..];
        }
        assert_eq!(rest, b"");
        fields
    }

    fn get<'a>(fields: &'a [(String, String)], name: &str) -> &'a str {
        let found = fields.iter().find(|(field, _)| field == name);
        found.map_or("", |(_, value)| value)
    }

    /// A log to a journal that the test plays.
    fn journal(folder: &Path) -> (UnixDatagram, Log) {
        let path = folder.join("socket");
        let socket = UnixDatagram::bind(&path).unwrap();
        let sink = Sink::Journal(UnixDatagram::unbound().unwrap(), path);
        (socket, Log::start(sink).unwrap())
    }

    #[test]
    fn journal_line_has_the_fields_and_a_text_with_them() {
        let folder = tempfile::tempdir().unwrap();
        let (socket, log) = journal(folder.path());
        let subscriber = tracing_subscriber::registry().with(Journal(log));
        tracing::subscriber::with_default(subscriber, || {
            let span = tracing::info_span!("request", id = "r1");
            span.in_scope(|| tracing::warn!(vm = "web", pid = 7, none = "", "two\nlines"));
            tracing::info!(kind = "Vm", name = "web", "VM \"web\": it runs");
            tracing::info!(long = "x".repeat(2 * LONGEST), "long");
        });
        let line = read(&socket);
        for (name, value) in [
            ("PRIORITY", "4"),
            ("SYSLOG_IDENTIFIER", "vmmd"),
            ("MESSAGE", "two\nlines vm=web pid=7"),
            ("F_VM", "web"),
            ("F_ID", "r1"),
        ] {
            assert_eq!(get(&line, name), value, "{name}");
        }
        assert_eq!(get(&read(&socket), "MESSAGE"), "VM \"web\": it runs");
        assert!(get(&read(&socket), "MESSAGE").starts_with("long long=xxx"));
    }

    #[test]
    fn stalled_journal_delays_no_caller_and_losses_are_told() {
        let folder = tempfile::tempdir().unwrap();
        let (socket, log) = journal(folder.path());
        let subscriber = tracing_subscriber::registry().with(Journal(log.clone()));
        let told = 3 * WAITING;
        // Nobody reads: the kernel takes some lines, and then none.
        tracing::subscriber::with_default(subscriber, || {
            for number in 0..told {
                tracing::info!(number, "a line");
            }
        });
        // The thread may report losses more than once: before and after the last line.
        let (mut lines, mut lost) = (0, 0);
        while lines + lost < told {
            let line = read(&socket);
            match get(&line, "MESSAGE")
                .strip_suffix(" lines of the log were lost: the log did not take them in time")
            {
                Some(count) => lost += count.parse::<usize>().unwrap(),
                None => lines += 1,
            }
        }
        assert_eq!(lines + lost, told);
        assert!(lines > 0 && lost > 0, "{lines} {lost}");
    }

    /// A file that takes nothing before it is opened, and then counts the lines.
    struct Gate {
        open: Receiver<()>,
        lines: Arc<AtomicU64>,
    }

    impl Write for Gate {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            // Opened for all lines when the sender is dropped.
            let _ = self.open.recv();
            let lines = text.iter().filter(|byte| **byte == b'\n').count();
            self.lines.fetch_add(lines.try_into().unwrap(), Ordering::Relaxed);
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn flush_of_a_full_queue_waits_for_its_last_line() {
        let (opener, open) = sync_channel(0);
        let lines = Arc::<AtomicU64>::default();
        let gate = Gate {
            open,
            lines: Arc::clone(&lines),
        };
        let log = Log::start(Sink::Text(Box::new(gate))).unwrap();
        let mut written: u64 = 0;
        while log.lost.load(Ordering::Relaxed) == 0 {
            Log::write(&log, b"a line\n".to_vec());
            written += 1;
        }
        assert!(!log.flush_within(Duration::from_millis(1)), "nothing is written");
        let flushing = {
            let log = log.clone();
            thread::spawn(move || log.flush_within(Duration::from_secs(60)))
        };
        drop(opener);
        assert!(flushing.join().unwrap());
        // One line says instead of the lost one that it is lost.
        assert_eq!(lines.load(Ordering::Relaxed), written);
    }

    #[test]
    fn pipe_that_takes_no_lines_delays_no_caller() {
        let (mut reader, writer) = io::pipe().unwrap();
        let log = Log::start(Sink::Text(Box::new(writer))).unwrap();
        let subscriber =
            tracing_subscriber::registry().with(tracing_subscriber::fmt::layer().with_writer(log.clone()));
        tracing::subscriber::with_default(subscriber, || {
            for _ in 0..WAITING {
                tracing::info!("{}", "x".repeat(200));
            }
        });
        thread::spawn(move || io::copy(&mut reader, &mut io::sink()));
        log.flush();
        assert!(log.jobs.try_send(Job::Flush(sync_channel(1).0)).is_ok());
    }
}
