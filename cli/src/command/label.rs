//! `label`, `annotate`: set and take away labels and annotations of VMs and of disks.

use vmmd_api::v1;

use super::{
    act, disk, parallel,
    update::{self, Change, How},
};
use crate::{
    args::{Targets, disk_name, label::Label, node::LabelChange, vm_name},
    client::Client,
    failure::{Code, Failure, Result},
    output,
};

/// What is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Labels.
    Labels,
    /// Annotations.
    Annotations,
}

impl What {
    /// Of the metadata.
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
pub struct Labelling {
    vms: Targets,
    disks: Vec<String>,
    changes: Vec<LabelChange>,
}

/// Reads the words of the command line. Needs no daemon.
pub fn read(args: &Label) -> Result<Labelling> {
    let usage = |message: String| Failure::new(Code::Usage, message);
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
        selectors: args.selectors.clone(),
        all: args.all,
    };
    let changes: Vec<_> = changes.collect::<Result<_>>()?;
    let by_filter = args.all || !args.selectors.is_empty();
    match (vms.names.is_empty() && disks.is_empty(), by_filter) {
        _ if changes.is_empty() => Err(usage(
            "say what to change: KEY=VALUE, or KEY- to take it away".into(),
        )),
        (true, false) => Err(usage(
            "say of which VMs or disks: by name (disk/NAME), or VMs with -l SELECTOR or --all".into(),
        )),
        (false, true) => Err(usage(
            "name VMs and disks, or choose VMs with -l or --all: not both".into(),
        )),
        _ => Ok(Labelling { vms, disks, changes }),
    }
}

/// Changes them.
pub async fn label(
    client: &Client,
    what: What,
    Labelling { vms, disks, changes }: &Labelling,
) -> Result<(), Vec<Failure>> {
    let mut failures = label_disks(client, what, disks, changes).await?;
    let only_disks = vms.names.is_empty() && !disks.is_empty();
    let names = match only_disks {
        true => Vec::new(),
        false => act::names(client, vms, |_| true).await.map_err(super::one)?,
    };
    if names.is_empty() && !only_disks {
        eprintln!("There are no such VMs.");
    }
    let work = |name: String| {
        let (client, changes) = (client.clone(), changes.to_vec());
        async move {
            let wanted = |there: &v1::Vm| Ok(changed(there, what, &changes));
            let done = update::rewrite(&client, &name, How::default(), wanted).await;
            (name, done)
        }
    };
    let printed = parallel::side_by_side(names, parallel::AT_ONCE, work, |(name, done)| {
        match done {
            Ok(done) if done.text == update::UNCHANGED => output::line(format!("vm/{name} unchanged"))?,
            Ok(_) => output::line(format!("vm/{name} {}", what.done()))?,
            Err(failure) => failures.push(failure),
        }
        Ok(())
    });
    printed.await.map_err(super::one)?;
    super::all(failures)
}

/// Only the keys that are named: what others set meanwhile stays.
fn changed(there: &v1::Vm, what: What, changes: &[LabelChange]) -> Change {
    let mut vm = there.clone();
    change(vm.metadata.get_or_insert_default(), what, changes);
    let key = |change: &LabelChange| match change {
        LabelChange::Set(key, _) | LabelChange::Remove(key) => key.clone(),
    };
    let paths = changes
        .iter()
        .map(|change| format!("metadata.{}[{}]", what.field(), key(change)));
    Change {
        vm,
        paths: paths.collect(),
    }
}

/// Changes the labels of disks one after another; returns the failures.
async fn label_disks(
    client: &Client,
    what: What,
    names: &[String],
    changes: &[LabelChange],
) -> Result<Vec<Failure>, Vec<Failure>> {
    let mut failures = Vec::new();
    for name in names {
        let wanted = |metadata: &mut v1::ObjectMetadata| change(metadata, what, changes);
        match disk::rewrite(client, name, wanted).await {
            Ok(true) => output::line(format!("disk/{name} {}", what.done())).map_err(super::one)?,
            Ok(false) => output::line(format!("disk/{name} unchanged")).map_err(super::one)?,
            Err(failure) => failures.push(failure),
        }
    }
    Ok(failures)
}

fn change(metadata: &mut v1::ObjectMetadata, what: What, changes: &[LabelChange]) {
    let pairs = match what {
        What::Labels => &mut metadata.labels,
        What::Annotations => &mut metadata.annotations,
    };
    for change in changes {
        match change {
            LabelChange::Set(key, value) => drop(pairs.insert(key.clone(), value.clone())),
            LabelChange::Remove(key) => drop(pairs.remove(key)),
        }
    }
}
