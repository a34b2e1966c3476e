//! `get` and `describe`: what there is.

use std::collections::BTreeMap;

use proto::v1;

use super::{
    habits,
    watch::{self, print_documents},
};
use crate::{
    args::{GetVm, Output, Selector},
    client::Client,
    failure::{Failure, Result},
    output::{self, describe::Lines, format::Layout, vm},
};

/// As many events are in a description.
const LAST_EVENTS: u32 = 10;

/// Lists VMs once, or watches them.
pub async fn get(client: &Client, args: &GetVm) -> Result<(), Vec<Failure>> {
    if args.watch {
        return watch(client, args).await.map_err(|failure| vec![failure]);
    }
    let mut failures = Vec::new();
    let vms = client.list(filter(args)).await.map_err(|failure| vec![failure])?;
    let listed: Vec<_> = if args.names.is_empty() {
        vms.iter().collect()
    } else {
        args.names
            .iter()
            .filter_map(|wanted| vms.iter().find(|vm| name(vm) == wanted))
            .collect()
    };
    for wanted in &args.names {
        // It may be there and not be one of the others that are asked for.
        if !listed.iter().any(|vm| name(vm) == wanted)
            && let Err(mut failure) = client.get(wanted).await
        {
            if let Some(hint) = habits::kind(wanted) {
                failure = Failure {
                    hint: Some(hint.into()),
                    ..failure
                };
            }
            failures.push(failure);
        }
    }
    print(&listed, args).map_err(|failure| vec![failure])?;
    super::all(failures)
}

/// Builds the daemon's filter from the command line.
fn filter(args: &GetVm) -> v1::VmFilter {
    v1::VmFilter {
        labels: args.selectors.iter().map(ToString::to_string).collect(),
        phases: args.phases.iter().map(|phase| phase.wire().into()).collect(),
        names: args.names.clone(),
    }
}

/// Shows everything about VMs.
pub async fn describe(client: &Client, names: &[String]) -> Result<(), Vec<Failure>> {
    let mut failures = Vec::new();
    let vms = named(client, names, &mut failures).await;
    let now = jiff::Timestamp::now();
    let mut texts = Vec::new();
    for vm in &vms {
        let mut text = Lines(output::describe::vm(vm, now));
        last_events(client, "Vm", name(vm), &mut text).await;
        texts.push(text.0);
    }
    output::print(&texts.join("\n")).map_err(|failure| vec![failure])?;
    super::all(failures)
}

/// Adds the last events of an object to its description. Omits them for an older daemon without
/// events.
pub async fn last_events(client: &Client, kind: &str, name: &str, text: &mut Lines) {
    if let Ok(events) = client.events_of(kind, name, LAST_EVENTS).await {
        let rows: Vec<_> = events.iter().map(output::event::row).collect();
        let columns = vec!["TIME", "SEVERITY", "OBJECT", "REASON", "MESSAGE"];
        text.list("Last events", columns, &rows);
    }
}

async fn named(client: &Client, names: &[String], failures: &mut Vec<Failure>) -> Vec<v1::Vm> {
    let mut vms = Vec::new();
    for name in names {
        match client.get(name).await {
            Ok(vm) => vms.push(vm),
            Err(failure) => failures.push(failure),
        }
    }
    vms
}

fn print(vms: &[&v1::Vm], args: &GetVm) -> Result<()> {
    if let Some(output) = args.output.as_ref().filter(|output| **output != Output::Wide) {
        let layout = Layout {
            list: args.names.len() != 1,
            no_headers: args.no_headers,
            ..Layout::default()
        };
        return print_documents(vms, output, layout);
    }
    let wide = args.output.is_some();
    if vms.is_empty() {
        if args.names.is_empty() {
            eprintln!(
                "There are no VMs{}.",
                match (args.selectors.is_empty(), args.phases.is_empty()) {
                    (true, true) => "",
                    (false, true) => " with these labels",
                    (true, false) => " in these phases",
                    (false, false) => " with these labels in these phases",
                }
            );
        }
        return Ok(());
    }
    let now = jiff::Timestamp::now();
    let rows: Vec<_> = vms.iter().map(|vm| vm::row(vm, wide, now)).collect();
    output::print(&vm::table(wide).whole(&rows, !args.no_headers))
}

/// Prints what there is, then each change, until the daemon or the user ends it.
async fn watch(client: &Client, args: &GetVm) -> Result<()> {
    if let [only] = args.names.as_slice() {
        // A watch of a VM that is not there would wait for it without a word.
        client.get(only).await?;
    }
    watch::watch(args.output.as_ref(), args.no_headers, async |cursor| {
        let request = v1::WatchVmsRequest {
            filter: Some(filter(args)),
            cursor,
            ..Default::default()
        };
        client.vms.clone().watch_vms(request).await
    })
    .await
}

fn name(vm: &v1::Vm) -> &str {
    vm.metadata.as_ref().map_or("", |metadata| &metadata.name)
}

/// Whether all selectors hold for these labels.
pub fn all_hold(selectors: &[Selector], labels: &BTreeMap<String, String>) -> bool {
    let label = |key: &str| labels.get(key);
    selectors.iter().all(|selector| match selector {
        Selector::Is(wanted) => label(&wanted.key) == Some(&wanted.value),
        Selector::IsNot(wanted) => label(&wanted.key) != Some(&wanted.value),
        Selector::Has(key) => label(key).is_some(),
    })
}
