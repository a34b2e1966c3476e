//! `get --watch`: what there is, then each change, over restarts of the daemon.

use tonic::{Response, Status, Streaming};
use vmmd_api::v1::WatchEventType;

use crate::{
    args::{List, Output},
    client::{Client, Query, RESTART, TRIES_TO_GO_ON, Watched, went_away},
    failure::{Code, Failure, Result},
    output::{
        self, Show,
        format::{self, Layout},
        print_documents, table,
        table::Table,
    },
};

/// As a watch prints documents.
const STREAM: Layout = Layout {
    list: false,
    stream: true,
    no_headers: true,
};

/// Prints what there is, then each change, until the daemon or the user ends it.
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
    let open = async |cursor| K::watch(client, query, cursor).await;
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
async fn follow<K: Watched + Show>(
    open: &impl AsyncFn(String) -> Result<Response<Streaming<K::Change>>, Status>,
    cursor: &mut String,
    watcher: &mut Watcher<'_, K>,
    tries: &mut u32,
) -> Result<()> {
    let mut stream = open(cursor.clone()).await?.into_inner();
    while let Some(event) = stream.message().await? {
        *tries = 0;
        let (kind, object, at) = K::parts(event);
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

    /// The output that is no table.
    fn documents(&self) -> Option<&Output> {
        self.output
            .filter(|output| !matches!(output, Output::Wide | Output::Columns(_)))
    }
}
