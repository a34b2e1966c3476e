//! `label`: sets and takes away labels of VMs.

use clap::Args;
use proto::v1;

use super::{
    act, parallel,
    update::{self, How},
};
use crate::{
    args::{Selector, Targets, Timeout, node::LabelChange, vm_name},
    client::Client,
    failure::{Code, Failure, Result},
    output,
};

/// `label`.
#[derive(Debug, Args)]
#[command(
    override_usage = "\
vmmctl label NAME… KEY=VALUE|KEY-… [OPTIONS]
       vmmctl label -l SELECTOR KEY=VALUE|KEY-… [OPTIONS]
       vmmctl label --all KEY=VALUE|KEY-… [OPTIONS]",
    after_help = "\
Examples:
  vmmctl label web db tier=front old-
  vmmctl label -l tier=front zone=a"
)]
pub struct Label {
    /// Names of VMs, then what to set (KEY=VALUE) and to take away (KEY-).
    #[arg(required = true, value_name = "NAME|KEY=VALUE|KEY-")]
    pub words: Vec<String>,
    /// VMs with this label (KEY=VALUE, KEY!=VALUE or KEY); several must all hold.
    #[arg(
        short = 'l',
        long = "selector",
        value_name = "SELECTOR",
        value_delimiter = ','
    )]
    pub selectors: Vec<Selector>,
    /// All VMs.
    #[arg(long, conflicts_with = "selectors")]
    pub all: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub timeout: Timeout,
}

/// What the words of the command line mean. Needs no daemon.
pub fn read(args: &Label) -> Result<(Targets, Vec<LabelChange>)> {
    let usage = |message: String| Failure::new(Code::Usage, message);
    // A name of a VM has no `=` and does not end with `-`.
    let (changes, names): (Vec<_>, Vec<_>) = args
        .words
        .iter()
        .partition(|word| word.contains('=') || word.ends_with('-'));
    let changes = changes
        .into_iter()
        .map(|word| word.parse().map_err(|error| usage(format!("{word}: {error}"))));
    let names = names
        .into_iter()
        .map(|word| vm_name(word).map_err(|error| usage(format!("{word} {error}"))));
    let targets = Targets {
        names: names.collect::<Result<_>>()?,
        selectors: args.selectors.clone(),
        all: args.all,
    };
    let changes: Vec<_> = changes.collect::<Result<_>>()?;
    let by_filter = args.all || !args.selectors.is_empty();
    match (targets.names.is_empty(), by_filter) {
        _ if changes.is_empty() => Err(usage(
            "say what to change: KEY=VALUE, or KEY- to take a label away".into(),
        )),
        (true, false) => Err(usage("say of which VMs: by name, -l SELECTOR, or --all".into())),
        (false, true) => Err(usage(
            "name VMs, or choose them with -l or --all: not both".into(),
        )),
        _ => Ok((targets, changes)),
    }
}

/// Changes the labels.
pub async fn label(client: &Client, targets: &Targets, changes: &[LabelChange]) -> Result<(), Vec<Failure>> {
    let names = act::names(client, targets, |_| true).await.map_err(super::one)?;
    if names.is_empty() {
        eprintln!("There are no VMs to label.");
    }
    let work = |name: String| {
        let (client, changes) = (client.clone(), changes.to_vec());
        async move {
            let changed = |there: &v1::Vm| Ok(labelled(there, &changes));
            let done = update::rewrite(&client, &name, How::default(), changed).await;
            (name, done)
        }
    };
    let mut failures = Vec::new();
    let printed = parallel::side_by_side(names, parallel::AT_ONCE, work, |(name, done)| {
        match done {
            Ok(done) if done.text == update::UNCHANGED => output::line(format!("vm/{name} unchanged"))?,
            Ok(_) => output::line(format!("vm/{name} labelled"))?,
            Err(failure) => failures.push(failure),
        }
        Ok(())
    });
    printed.await.map_err(super::one)?;
    super::all(failures)
}

fn labelled(there: &v1::Vm, changes: &[LabelChange]) -> v1::Vm {
    let mut vm = there.clone();
    let labels = &mut vm.metadata.get_or_insert_default().labels;
    for change in changes {
        match change {
            LabelChange::Set(key, value) => drop(labels.insert(key.clone(), value.clone())),
            LabelChange::Remove(key) => drop(labels.remove(key)),
        }
    }
    vm
}
