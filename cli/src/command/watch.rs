//! `get --watch`: what there is, then each change, over restarts of the daemon.

use proto::v1::{self, WatchEventType};
use tonic::{Response, Status, Streaming};

use crate::{
    args::Output,
    client::{RESTART, TRIES_TO_GO_ON, went_away},
    failure::{Code, Failure, Result},
    manifest::{disk, emit, schema},
    output::{
        self,
        format::{self, Document, Layout},
        table::Table,
        vm,
    },
};

/// As a watch prints documents.
const STREAM: Layout = Layout {
    list: false,
    stream: true,
    no_headers: true,
};

/// An event of a watch.
pub trait Event {
    /// What is watched.
    type Object: Object;

    /// Its type, its object and its cursor.
    fn parts(self) -> (WatchEventType, Option<Self::Object>, String);
}

/// An object that can be watched. The second column of its table is the phase or the readiness.
pub trait Object {
    /// Unique among its kind.
    fn name(&self) -> &str;
    /// For programs.
    fn document(&self) -> Result<Document>;
    /// For people; `wide` has more columns.
    fn table(wide: bool) -> Table;
    /// A row of the table.
    fn row(&self, wide: bool, now: jiff::Timestamp) -> Vec<String>;
}

impl Event for v1::WatchVmsResponse {
    type Object = v1::Vm;

    fn parts(self) -> (WatchEventType, Option<v1::Vm>, String) {
        (self.r#type(), self.vm, self.cursor)
    }
}

impl Event for v1::WatchDisksResponse {
    type Object = v1::Disk;

    fn parts(self) -> (WatchEventType, Option<v1::Disk>, String) {
        (self.r#type(), self.disk, self.cursor)
    }
}

impl Object for v1::Vm {
    fn name(&self) -> &str {
        self.metadata.as_ref().map_or("", |metadata| &metadata.name)
    }

    fn document(&self) -> Result<Document> {
        Ok(Document {
            title: format!("vm/{}", self.name()),
            json: emit::vm(self)?,
            schema: schema::VM,
        })
    }

    fn table(wide: bool) -> Table {
        vm::table(wide)
    }

    fn row(&self, wide: bool, now: jiff::Timestamp) -> Vec<String> {
        vm::row(self, wide, now)
    }
}

impl Event for v1::WatchImagesResponse {
    type Object = v1::Image;

    fn parts(self) -> (WatchEventType, Option<v1::Image>, String) {
        (self.r#type(), self.image, self.cursor)
    }
}

impl Object for v1::Image {
    fn name(&self) -> &str {
        super::image::name(self)
    }

    fn document(&self) -> Result<Document> {
        Ok(Document {
            title: format!("image/{}", self.name()),
            json: emit::json(self)?,
            schema: schema::IMAGE,
        })
    }

    fn table(wide: bool) -> Table {
        output::image::table(wide)
    }

    fn row(&self, wide: bool, now: jiff::Timestamp) -> Vec<String> {
        output::image::row(self, wide, now)
    }
}

impl Event for v1::WatchNetworksResponse {
    type Object = v1::Network;

    fn parts(self) -> (WatchEventType, Option<v1::Network>, String) {
        (self.r#type(), self.network, self.cursor)
    }
}

impl Object for v1::Network {
    fn name(&self) -> &str {
        output::network::name(self)
    }

    fn document(&self) -> Result<Document> {
        Ok(Document {
            title: format!("network/{}", self.name()),
            json: emit::json(self)?,
            schema: schema::NETWORK,
        })
    }

    fn table(_: bool) -> Table {
        output::network::table()
    }

    fn row(&self, _: bool, _: jiff::Timestamp) -> Vec<String> {
        output::network::row(self)
    }
}

impl Object for v1::Disk {
    fn name(&self) -> &str {
        disk::name(self)
    }

    fn document(&self) -> Result<Document> {
        Ok(Document {
            title: format!("disk/{}", self.name()),
            json: disk::manifest(self)?,
            schema: schema::DISK,
        })
    }

    fn table(wide: bool) -> Table {
        output::disk::table(wide)
    }

    fn row(&self, wide: bool, now: jiff::Timestamp) -> Vec<String> {
        output::disk::row(self, wide, now)
    }
}

/// Prints objects as documents one after another.
pub fn print_documents<T: Object>(objects: &[&T], output: &Output, layout: Layout) -> Result<()> {
    let documents: Vec<_> = objects
        .iter()
        .map(|object| object.document())
        .collect::<Result<_>>()?;
    format::documents(&documents, output, layout)
}

/// Prints what there is, then each change, until the daemon or the user ends it. `open` opens the watch after a cursor.
pub async fn watch<E: Event>(
    output: Option<&Output>,
    no_headers: bool,
    open: impl AsyncFn(String) -> Result<Response<Streaming<E>>, Status>,
) -> Result<()> {
    let mut watcher = Watcher {
        output,
        no_headers,
        before: Some(Vec::new()),
        table: match output {
            Some(Output::Columns(columns)) => format::table(columns),
            output => E::Object::table(output.is_some()),
        },
    };
    let (mut cursor, mut tries) = (String::new(), 0);
    loop {
        let ended = match follow(&open, &mut cursor, &mut watcher, &mut tries).await {
            Ok(()) => Failure::new(Code::Unavailable, "vmmd ended the watch")
                .hint("it may be restarting: try again"),
            Err(failure) => failure,
        };
        if &*ended.reason == "CURSOR_EXPIRED" {
            eprintln!(
                "vmmd does not know any more what has changed meanwhile: what there is is printed anew"
            );
            cursor.clear();
            watcher.before = Some(Vec::new());
            continue;
        }
        if !went_away(&ended) || tries == TRIES_TO_GO_ON {
            return Err(ended);
        }
        tries += 1;
        if tries == 1 {
            eprintln!("vmmd went away; going on when it is back");
        }
        tokio::time::sleep(RESTART).await;
    }
}

/// Watches from the cursor until the stream ends, and notes there how far it came.
async fn follow<E: Event>(
    open: &impl AsyncFn(String) -> Result<Response<Streaming<E>>, Status>,
    cursor: &mut String,
    watcher: &mut Watcher<'_, E::Object>,
    tries: &mut u32,
) -> Result<()> {
    let mut stream = open(cursor.clone()).await?.into_inner();
    while let Some(event) = stream.message().await? {
        *tries = 0;
        let (kind, object, at) = event.parts();
        *cursor = at;
        watcher.event(kind, object)?;
    }
    Ok(())
}

struct Watcher<'a, T> {
    output: Option<&'a Output>,
    no_headers: bool,
    /// Objects of the initial state, until all of them have arrived.
    before: Option<Vec<T>>,
    table: Table,
}

impl<T: Object> Watcher<'_, T> {
    fn event(&mut self, kind: WatchEventType, object: Option<T>) -> Result<()> {
        if kind == WatchEventType::Synced {
            // `None` when the watch resumes after a pause.
            let Some(mut objects) = self.before.take() else {
                return Ok(());
            };
            objects.sort_by(|a, b| a.name().cmp(b.name()));
            return self.begin(&objects);
        }
        let Some(object) = object else {
            return Ok(());
        };
        match &mut self.before {
            Some(before) if kind == WatchEventType::Added => before.push(object),
            // A change before all has been sent: print it after.
            Some(before) => {
                before.retain(|other| other.name() != object.name());
                if kind != WatchEventType::Deleted {
                    before.push(object);
                }
            }
            None => self.change(&object, kind == WatchEventType::Deleted)?,
        }
        Ok(())
    }

    fn begin(&mut self, objects: &[T]) -> Result<()> {
        if let Some(output) = self.documents() {
            return print_documents(&objects.iter().collect::<Vec<_>>(), output, STREAM);
        }
        let rows = objects
            .iter()
            .map(|object| self.row(object))
            .collect::<Result<Vec<_>>>()?;
        output::print(&self.table.whole(&rows, !self.no_headers))
    }

    fn change(&mut self, object: &T, deleted: bool) -> Result<()> {
        if let Some(output) = self.documents() {
            return print_documents(&[object], output, STREAM);
        }
        let mut row = self.row(object)?;
        let own = matches!(self.output, Some(Output::Columns(_)));
        if let Some(phase) = row.get_mut(1).filter(|_| deleted && !own) {
            "Deleted".clone_into(phase);
        }
        self.table.fit(&row);
        output::line(self.table.row(&row))
    }

    fn row(&self, object: &T) -> Result<Vec<String>> {
        match self.output {
            Some(Output::Columns(columns)) => Ok(format::row(columns, &object.document()?.json)),
            output => Ok(object.row(output.is_some(), jiff::Timestamp::now())),
        }
    }

    /// The output that is no table.
    fn documents(&self) -> Option<&Output> {
        self.output
            .filter(|output| !matches!(output, Output::Wide | Output::Columns(_)))
    }
}
