//! `label`, `annotate`: set and remove labels and annotations of VMs and disks.

use vmmd_api::v1;

use super::{
    act, disk,
    keys::usage,
    limited,
    update::{self, Change, How},
    work::{AT_ONCE, side_by_side},
};
use crate::{
    args::{LabelChange, Targets, disk_name, verbs::Labels, vm_name},
    client::Client,
    contexts::Connection,
    failure::{Failure, Result},
    output,
};

/// The map that is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Map {
    /// Labels.
    Labels,
    /// Annotations.
    Annotations,
}

impl Map {
    /// Name of the field in the metadata.
    fn field(self) -> &'static str {
        match self {
            Self::Labels => "labels",
            Self::Annotations => "annotations",
        }
    }

    fn done(self) -> &'static str {
        match self {
            Self::Labels => "labelled",
            Self::Annotations => "annotated",
        }
    }
}

/// Parsed words of the command line.
#[derive(Debug)]
struct Labelling {
    vms: Targets,
    disks: Vec<String>,
    changes: Vec<LabelChange>,
}

/// Reads the words of the command line. Needs no daemon.
fn read(args: &Labels) -> Result<Labelling> {
    // A name of a VM has no `=` and does not end with `-`.
    let (changes, names): (Vec<_>, Vec<_>) = args
        .words
        .iter()
        .partition(|word| word.contains('=') || word.ends_with('-'));
    let changes = changes
        .into_iter()
        .map(|word| word.parse().map_err(|error| usage(format!("{word}: {error}"))));
    let (disks, names): (Vec<_>, Vec<_>) = names.into_iter().partition(|word| word.starts_with("disk/"));
    let named = |words: Vec<&String>, read: fn(&str) -> Result<String, String>| {
        let names = words
            .into_iter()
            .map(|word| read(word).map_err(|error| usage(format!("{word} {error}"))));
        names.collect::<Result<Vec<_>>>()
    };
    let disks = named(disks, disk_name)?;
    let vms = Targets {
        names: named(names, vm_name)?,
        selector: args.selector.clone(),
        all: args.all,
    };
    let changes: Vec<_> = changes.collect::<Result<_>>()?;
    let by_filter = args.all || !args.selector.is_empty();
    match (vms.names.is_empty() && disks.is_empty(), by_filter) {
        _ if changes.is_empty() => Err(usage(
            "no change is given: KEY=VALUE sets a pair, KEY- removes it",
        )),
        (true, false) => Err(usage(
            "no VM or disk is given: name VMs and disks (disk/NAME), or select VMs with -l SELECTOR or --all",
        )),
        (false, true) => Err(usage("give either names, or -l or --all")),
        _ => Ok(Labelling { vms, disks, changes }),
    }
}

/// Changes them.
pub async fn label(given: &Connection, map: Map, args: &Labels) -> Result<(), Vec<Failure>> {
    let Labelling { vms, disks, changes } = read(args)?;
    let client = &limited(given, args.timeout).await?;
    let mut failures = label_disks(client, map, &disks, &changes).await?;
    let only_disks = vms.names.is_empty() && !disks.is_empty();
    let names = match only_disks {
        true => Vec::new(),
        false => act::names(client, &vms, |_| true).await?,
    };
    if names.is_empty() && !only_disks {
        eprintln!("There are no such VMs.");
    }
    let work = |name: String| {
        let (client, changes) = (client.clone(), changes.to_vec());
        async move {
            let wanted = |there: &v1::Vm| Ok(changed(there, map, &changes));
            let done = update::rewrite(&client, &name, How::default(), wanted).await;
            (name, done)
        }
    };
    let printed = side_by_side(names, AT_ONCE, work, |(name, done)| {
        match done {
            Ok(done) if done.text == update::UNCHANGED => output::line(format!("vm/{name} unchanged"))?,
            Ok(_) => output::line(format!("vm/{name} {}", map.done()))?,
            Err(failure) => failures.push(failure),
        }
        Ok(())
    });
    printed.await?;
    super::all(failures)
}

/// Changes only the named keys: concurrent changes of other keys stay.
fn changed(there: &v1::Vm, map: Map, changes: &[LabelChange]) -> Change {
    let mut vm = there.clone();
    change(vm.metadata.get_or_insert_default(), map, changes);
    let key = |change: &LabelChange| match change {
        LabelChange::Set(key, _) | LabelChange::Remove(key) => key.clone(),
    };
    let paths = changes
        .iter()
        .map(|change| format!("metadata.{}[{}]", map.field(), key(change)));
    Change {
        vm,
        paths: paths.collect(),
    }
}

/// Changes the labels of disks one after another; returns the failures.
async fn label_disks(
    client: &Client,
    map: Map,
    names: &[String],
    changes: &[LabelChange],
) -> Result<Vec<Failure>, Vec<Failure>> {
    let mut failures = Vec::new();
    for name in names {
        let wanted = |metadata: &mut v1::ObjectMetadata| change(metadata, map, changes);
        match disk::rewrite(client, name, wanted).await {
            Ok(true) => output::line(format!("disk/{name} {}", map.done()))?,
            Ok(false) => output::line(format!("disk/{name} unchanged"))?,
            Err(failure) => failures.push(failure),
        }
    }
    Ok(failures)
}

fn change(metadata: &mut v1::ObjectMetadata, map: Map, changes: &[LabelChange]) {
    let pairs = match map {
        Map::Labels => &mut metadata.labels,
        Map::Annotations => &mut metadata.annotations,
    };
    changes.iter().for_each(|change| change.apply(pairs));
}
