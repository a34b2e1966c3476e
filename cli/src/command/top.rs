//! `top`: resource usage of running VMs, computed from two samples of their counters.

use std::{collections::BTreeMap, io::IsTerminal as _};

use tokio::task::JoinSet;
use vmmd_api::v1;

use crate::{
    args::observe::Top,
    client::{Client, Query},
    failure::{Code, Failure, Result},
    output::{self, top},
};

/// Clears the screen and goes to its first line (ECMA-48: ED, CUP).
const CLEAR: &str = "\x1b[2J\x1b[H";

/// The counters of VMs by name.
type Samples = BTreeMap<String, v1::VmStats>;

/// Prints the table again and again, or once.
pub async fn top(client: &Client, args: &Top) -> Result<()> {
    let once = args.once || !std::io::stdout().is_terminal();
    let mut before = sample(client, &args.names).await?;
    loop {
        tokio::time::sleep(args.interval).await;
        let now = sample(client, &args.names).await?;
        let table = top::table(&before, &now);
        if once {
            return output::print(&table);
        }
        output::print(&format!("{CLEAR}{table}"))?;
        before = now;
    }
}

/// Asks all at once. One that has ended meanwhile, or does not answer, is left out; one that was named and is not there is a failure.
async fn sample(client: &Client, names: &[String]) -> Result<Samples> {
    let mut wanted = Vec::new();
    for vm in client.objects::<v1::Vm>(&Query::default()).await? {
        let name = vm.metadata.map(|metadata| metadata.name).unwrap_or_default();
        let runs = vm.status.is_some_and(|status| {
            let phases = [v1::VmPhase::Running, v1::VmPhase::Paused, v1::VmPhase::Stopping];
            phases.contains(&status.phase())
        });
        wanted.push((name, runs));
    }
    let there = |name: &String| wanted.iter().any(|(other, _)| other == name);
    if let Some(missing) = names.iter().find(|name| !there(name)) {
        let failure = Failure::new(Code::NotFound, format!("there is no VM \"{missing}\""));
        return Err(failure.hint("`vmmctl get vm` lists the VMs"));
    }
    let mut asked = JoinSet::new();
    for (name, runs) in wanted {
        if runs && (names.is_empty() || names.contains(&name)) {
            let client = client.clone();
            asked.spawn(async move { (client.stats(&name).await, name) });
        }
    }
    let answers = asked.join_all().await.into_iter();
    Ok(answers
        .filter_map(|(stats, name)| Some((name, stats.ok()?)))
        .collect())
}
