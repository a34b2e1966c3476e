//! `get`, `describe` and `delete` of objects of every kind.

use std::collections::BTreeMap;

use super::{habits, watch};
use crate::{
    args::{
        Output, Selector,
        kind::{DeleteNamed, List, Names, WatchedList},
    },
    client::{Client, Kind, Query, Watched},
    failure::{Code, Failure, Result},
    output::{self, Show, describe::Lines, format::Layout, print_documents, table},
};

/// Number of events in a description.
const LAST_EVENTS: u32 = 10;

/// Query for the options of a list.
pub fn query<K: Kind>(args: &List<K>) -> Query {
    Query {
        names: args.names.clone(),
        labels: args.selector.iter().map(ToString::to_string).collect(),
        ..Query::default()
    }
}

/// Lists objects of a kind once, or watches them.
pub async fn list<K: Watched + Show>(client: &Client, args: &WatchedList<K>) -> Result<(), Vec<Failure>> {
    get_or_watch(client, args, &query(&args.list)).await
}

/// Lists the objects of a query once, or watches them.
pub async fn get_or_watch<K: Watched + Show>(
    client: &Client,
    args: &WatchedList<K>,
    query: &Query,
) -> Result<(), Vec<Failure>> {
    match args.watch {
        true => Ok(watch::watch(client, &args.list, query).await?),
        false => get(client, &args.list, query).await,
    }
}

/// Lists objects once.
pub async fn get<K: Show>(client: &Client, args: &List<K>, query: &Query) -> Result<(), Vec<Failure>> {
    let all: Vec<K> = client.objects(query).await?;
    // Lists of snapshots, and of older daemons, have no filters.
    let is_selected = |object: &&K| {
        let labels = object.metadata().map(|metadata| &metadata.labels);
        labels.is_none_or(|labels| all_hold(&args.selector, labels))
    };
    let selected: Vec<&K> = all.iter().filter(is_selected).collect();
    let named = |name: &String| selected.iter().find(|object| object.name() == name).copied();
    let (mut listed, mut failures) = (Vec::new(), Vec::new());
    for name in &args.names {
        match named(name) {
            Some(object) => listed.push(object),
            // The object may exist and not meet the other conditions.
            None => failures.extend(
                client
                    .object::<K>(name)
                    .await
                    .err()
                    .map(|failure| with_kinds(failure, name)),
            ),
        }
    }
    if args.names.is_empty() {
        listed = selected;
    }
    print(&listed, args, query)?;
    super::all(failures)
}

/// Replaces the hint of a failure when the name is a kind of objects of another tool.
fn with_kinds(mut failure: Failure, name: &str) -> Failure {
    if let Some(hint) = habits::kind(name) {
        failure.hint = Some(hint.into());
    }
    failure
}

fn print<K: Show>(objects: &[&K], args: &List<K>, query: &Query) -> Result<()> {
    if let Some(output) = args.output.as_ref().filter(|output| **output != Output::Wide) {
        let layout = Layout {
            list: args.names.len() != 1,
            no_headers: args.no_headers,
            ..Layout::default()
        };
        return print_documents(objects, output, layout);
    }
    if objects.is_empty() {
        if args.names.is_empty() {
            let when = |given: bool, text: &'static str| if given { text } else { "" };
            let labels = when(!args.selector.is_empty(), " with these labels");
            let phases = when(!query.phases.is_empty(), " in these phases");
            eprintln!("There are no {}{labels}{phases}.", K::MANY);
        }
        return Ok(());
    }
    let (wide, now) = (args.output.is_some(), jiff::Timestamp::now());
    let rows: Vec<_> = objects.iter().map(|object| object.row(wide, now)).collect();
    output::print(&table::<K>(wide).whole(&rows, !args.no_headers))
}

/// Shows everything about objects, with their last events.
pub async fn describe<K: Show>(client: &Client, args: &Names<K>) -> Result<(), Vec<Failure>> {
    let (mut texts, mut failures) = (Vec::new(), Vec::new());
    let now = jiff::Timestamp::now();
    for name in &args.names {
        match client.object::<K>(name).await {
            Ok(object) => {
                let mut text = Lines(object.describe(now));
                if K::HAS_EVENTS {
                    last_events(client, K::KIND, name, &mut text).await;
                }
                texts.push(text.0);
            }
            Err(failure) => failures.push(failure),
        }
    }
    output::print(&texts.join("\n"))?;
    super::all(failures)
}

/// Adds the last events of an object to its description. Omits them for an older daemon without
/// events.
async fn last_events(client: &Client, kind: &str, name: &str, text: &mut Lines) {
    if let Ok(events) = client.events_of(kind, name, LAST_EVENTS).await {
        let rows: Vec<_> = events.iter().map(output::event::row).collect();
        text.list("Last events", output::event::COLUMNS.to_vec(), &rows);
    }
}

/// Deletes the objects that the command line names.
pub async fn delete<K: Kind>(client: &Client, args: &DeleteNamed<K>) -> Result<(), Vec<Failure>> {
    delete_all::<K>(client, &args.names.names, args.ignore_not_found).await
}

/// Deletes objects one after another: an overlay may come before the disk below it.
pub async fn delete_all<K: Kind>(
    client: &Client,
    names: &[String],
    ignore_not_found: bool,
) -> Result<(), Vec<Failure>> {
    let mut failures = Vec::new();
    for name in names {
        match K::delete(client, name).await {
            Ok(()) => output::line(format!("{}/{name} deleted", K::WORD))?,
            Err(failure) if ignore_not_found && failure.code == Code::NotFound => {}
            Err(failure) => failures.push(K::about(failure, name)),
        }
    }
    super::all(failures)
}

/// Whether all selectors hold for these labels.
fn all_hold(selectors: &[Selector], labels: &BTreeMap<String, String>) -> bool {
    let label = |key: &str| labels.get(key);
    selectors.iter().all(|selector| match selector {
        Selector::Is(wanted) => label(&wanted.key) == Some(&wanted.value),
        Selector::IsNot(wanted) => label(&wanted.key) != Some(&wanted.value),
        Selector::Has(key) => label(key).is_some(),
    })
}
