//! `label`, `annotate`: set and take away labels and annotations of VMs.

use clap::Args;
use proto::v1;

use super::{
    act, parallel,
    update::{self, Change, How},
};
use crate::{
    args::{Selector, Targets, Timeout, node::LabelChange, vm_name},
    client::Client,
    complete,
    failure::{Code, Failure, Result},
    output,
};

/// `label`, `annotate`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmmctl label web db tier=front old-
  vmmctl label -l tier=front zone=a
  vmmctl annotate web contact=ops@example.com")]
pub struct Label {
    /// Names of VMs, then what to set (KEY=VALUE) and to take away (KEY-).
    #[arg(required = true, value_name = "NAME|KEY=VALUE|KEY-", add = complete::vms())]
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

/// What is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Labels.
    Labels,
    /// Annotations.
    Annotations,
}

impl What {
    fn done(self) -> &'static str {
        match self {
            Self::Labels => "labelled",
            Self::Annotations => "annotated",
        }
    }
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
            "say what to change: KEY=VALUE, or KEY- to take it away".into(),
        )),
        (true, false) => Err(usage("say of which VMs: by name, -l SELECTOR, or --all".into())),
        (false, true) => Err(usage(
            "name VMs, or choose them with -l or --all: not both".into(),
        )),
        _ => Ok((targets, changes)),
    }
}

/// Changes them.
pub async fn label(
    client: &Client,
    what: What,
    targets: &Targets,
    changes: &[LabelChange],
) -> Result<(), Vec<Failure>> {
    let names = act::names(client, targets, |_| true).await.map_err(super::one)?;
    if names.is_empty() {
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
    let mut failures = Vec::new();
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
    let metadata = vm.metadata.get_or_insert_default();
    let (field, pairs) = match what {
        What::Labels => ("labels", &mut metadata.labels),
        What::Annotations => ("annotations", &mut metadata.annotations),
    };
    let mut paths = Vec::new();
    for change in changes {
        let key = match change {
            LabelChange::Set(key, value) => {
                pairs.insert(key.clone(), value.clone());
                key
            }
            LabelChange::Remove(key) => {
                pairs.remove(key);
                key
            }
        };
        paths.push(format!("metadata.{field}[{key}]"));
    }
    Change { vm, paths }
}
