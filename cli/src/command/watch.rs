//! `get --watch`: the present objects, then each change, across restarts of the daemon.

use vmmd_api::v1::WatchEventType;

use crate::{
    args::{Output, kind::List},
    client::{Client, Query, Watched, over_restarts, watch_ended},
    failure::Result,
    output::{
        self, Show,
        format::{self, Layout},
        print_documents, table,
        table::Table,
    },
};

/// Layout of the documents of a watch.
const STREAM: Layout = Layout {
    list: false,
    stream: true,
    no_headers: true,
};

/// Prints the present objects, then each change, until the daemon or the user ends the watch.
pub async fn watch<K: Watched + Show>(client: &Client, args: &List<K>, query: &Query) -> Result<()> {
    if let [only] = args.names.as_slice() {
        // A watch of an object that does not exist would wait for it without a message.
        client.object::<K>(only).await?;
    }
    let output = args.output.as_ref();
    let mut watcher: Watcher<'_, K> = Watcher {
        output,
        no_headers: args.no_headers,
        before: Some(Vec::new()),
        table: match output {
            Some(Output::Columns(columns)) => format::table(columns),
            output => table::<K>(output.is_some()),
        },
    };
    let mut cursor = String::new();
    over_restarts(true, async |tries: &mut u32| {
        let followed = follow(client, query, &mut cursor, &mut watcher, tries).await;
        match followed {
            Err(ended) if &*ended.reason == "CURSOR_EXPIRED" => {
                eprintln!("vmmd does not know all changes since the last one: the present state follows");
                cursor.clear();
                watcher.before = Some(Vec::new());
                follow(client, query, &mut cursor, &mut watcher, tries).await
            }
            followed => followed,
        }
    })
    .await
}

/// Watches from the cursor until the stream ends, and moves the cursor.
async fn follow<K: Watched + Show>(
    client: &Client,
    query: &Query,
    cursor: &mut String,
    watcher: &mut Watcher<'_, K>,
    tries: &mut u32,
) -> Result<()> {
    let mut stream = K::watch(client, query, cursor.clone()).await?.into_inner();
    while let Some(event) = stream.message().await? {
        *tries = 0;
        let (kind, object, at) = K::parts(event);
        *cursor = at;
        watcher.event(kind, object)?;
    }
    Err(watch_ended())
}

struct Watcher<'a, T> {
    output: Option<&'a Output>,
    no_headers: bool,
    /// Objects of the initial state, until all of them have arrived.
    before: Option<Vec<T>>,
    table: Table,
}

impl<T: Show> Watcher<'_, T> {
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

    /// The output, unless it is a table.
    fn documents(&self) -> Option<&Output> {
        self.output
            .filter(|output| !matches!(output, Output::Wide | Output::Columns(_)))
    }
}
