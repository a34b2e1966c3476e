//! Verbs that change the state of VMs: on several VMs at once, each with its own result.

mod verb;

use vmmd_api::v1::{self, VmPhase};

pub use self::verb::{Verb, is_down};
use super::{interrupt, parallel};
use crate::{
    args::{Command, Targets, Timeout},
    client::{Client, Query, about_vm},
    failure::{Failure, Result},
    output,
};

/// How many guests are waited for at a time when they are asked to power off.
const GUESTS_AT_ONCE: usize = 64;

/// Result of a verb.
#[derive(Debug, Default)]
pub struct Done {
    /// Text to print after the VM's name; `None` prints nothing.
    pub text: Option<String>,
    /// Warning about a verb that succeeded.
    pub warning: Option<Failure>,
}

/// The verb that a command line asks for, the VMs, and how long it may take; nothing when it asks for something else.
pub fn verb_of(command: &Command) -> Option<(&Targets, Timeout, Verb)> {
    match command {
        Command::Start(args) => {
            let no_wait = args.no_wait;
            Some((&args.targets, args.timeout, Verb::Start { no_wait }))
        }
        Command::Stop(args) => {
            let verb = Verb::Stop(args.ending, args.evacuate);
            Some((&args.targets, args.timeout, verb))
        }
        Command::Restart(args) => Some((&args.targets, args.timeout, Verb::Restart(args.ending))),
        Command::Reset(args) => Some((&args.targets, args.timeout, Verb::Reset)),
        Command::Pause(args) => Some((&args.targets, args.timeout, Verb::Pause)),
        Command::Resume(args) => Some((&args.targets, args.timeout, Verb::Resume)),
        _ => None,
    }
}

/// Does `verb` to the VMs that the command line means.
pub async fn targets(client: &Client, targets: &Targets, verb: &Verb) -> Result<(), Vec<Failure>> {
    let names = names(client, targets, |phase| verb.is_for(phase)).await;
    let names = names.map_err(super::one)?;
    if names.is_empty() {
        eprintln!("There are no VMs to {}.", verb.word());
    }
    each(client, names, verb).await
}

/// Returns the names of the VMs that the command line selects. VMs without an explicit name count
/// only in a phase that the verb applies to.
pub async fn names(
    client: &Client,
    targets: &Targets,
    is_for: impl Fn(VmPhase) -> bool,
) -> Result<Vec<String>> {
    if !targets.names.is_empty() {
        return Ok(targets.names.clone());
    }
    let query = Query {
        labels: targets.selectors.iter().map(ToString::to_string).collect(),
        ..Default::default()
    };
    let vms = client.objects::<v1::Vm>(&query).await?.into_iter();
    let meant = vms.filter(|vm| is_for(phase(vm)));
    Ok(meant.filter_map(|vm| Some(vm.metadata?.name)).collect())
}

/// The phase of a VM.
pub fn phase(vm: &v1::Vm) -> VmPhase {
    vm.status
        .as_ref()
        .map_or(VmPhase::Unspecified, v1::VmStatus::phase)
}

/// Does `verb` to all named VMs side by side; prints each success when the ones before it are done.
pub async fn each(client: &Client, names: Vec<String>, verb: &Verb) -> Result<(), Vec<Failure>> {
    let at_once = if verb.waits_for_guests() {
        GUESTS_AT_ONCE
    } else {
        parallel::AT_ONCE
    };
    let work = |name: String| {
        let (client, verb) = (client.clone(), verb.clone());
        async move {
            let result = one(&client, &name, &verb).await;
            (name, result)
        }
    };
    let mut failures = Vec::new();
    let printed = parallel::side_by_side(names, at_once, work, |(name, result)| {
        match result {
            Ok(Done { text, warning }) => {
                failures.extend(warning);
                text.map_or(Ok(()), |text| output::line(format!("vm/{name} {text}")))?;
            }
            Err(failure) => failures.push(failure),
        }
        Ok(())
    });
    interrupt::guarded(client, printed).await.map_err(super::one)?;
    super::all(failures)
}

async fn one(client: &Client, name: &str, verb: &Verb) -> Result<Done> {
    match verb.carry_out(client, name).await {
        Ok(done) => Ok(done),
        Err(failure) => {
            let failure = client.name_the_silent(failure, name).await;
            Err(about_vm(failure, name))
        }
    }
}
