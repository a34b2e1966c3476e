//! `get` and `describe`: what there is.

use std::collections::BTreeMap;

use proto::v1::{self, WatchEventType};

use crate::{
    args::{GetVm, Output, Selector},
    client::{Client, about_vm},
    failure::{Code, Failure, Result},
    manifest::{emit, schema},
    output::{self, table::Table, vm},
};

/// Lists VMs once, or watches them.
pub async fn get(client: &Client, args: &GetVm) -> Result<(), Vec<Failure>> {
    if args.watch {
        return watch(client, args).await.map_err(|failure| vec![failure]);
    }
    let mut failures = Vec::new();
    let vms = if args.names.is_empty() {
        client.list().await.map_err(|failure| vec![failure])?
    } else {
        named(client, &args.names, &mut failures).await
    };
    let vms: Vec<_> = vms.iter().filter(|vm| selected(vm, &args.selectors)).collect();
    print(&vms, args).map_err(|failure| vec![failure])?;
    super::all(failures)
}

/// Shows everything about VMs.
pub async fn describe(client: &Client, names: &[String]) -> Result<(), Vec<Failure>> {
    let mut failures = Vec::new();
    let vms = named(client, names, &mut failures).await;
    let now = jiff::Timestamp::now();
    let texts: Vec<_> = vms.iter().map(|vm| output::describe::vm(vm, now)).collect();
    output::print(&texts.join("\n")).map_err(|failure| vec![failure])?;
    super::all(failures)
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
    let wide = match args.output {
        None => false,
        Some(Output::Wide) => true,
        Some(Output::Json) if args.names.len() != 1 => {
            let list = vms.iter().map(emit::json).collect::<Result<Vec<_>>>()?;
            return output::line(format!("{:#}", serde_json::Value::Array(list)));
        }
        output => return print_documents(vms, output, false),
    };
    if vms.is_empty() {
        if args.names.is_empty() {
            eprintln!(
                "There are no VMs{}.",
                if args.selectors.is_empty() {
                    ""
                } else {
                    " with these labels"
                }
            );
        }
        return Ok(());
    }
    let now = jiff::Timestamp::now();
    let rows: Vec<_> = vms.iter().map(|vm| vm::row(vm, wide, now)).collect();
    output::print(&vm::table(wide).whole(&rows, !args.no_headers))
}

/// Prints VMs as documents one after another; `compact` puts a JSON document on one line.
pub fn print_documents(vms: &[&v1::Vm], format: Option<Output>, compact: bool) -> Result<()> {
    let separate = vms.len() > 1 || compact;
    for vm in vms {
        match format {
            Some(Output::Yaml) => {
                let separator = if separate { "---\n" } else { "" };
                output::print(&format!("{separator}{}", emit::yaml(vm, schema::VM)?))?;
            }
            Some(Output::Json) if compact => output::line(emit::json(vm)?.to_string())?,
            Some(Output::Json) => output::line(format!("{:#}", emit::json(vm)?))?,
            Some(Output::Name | Output::Wide) | None => output::line(name(vm))?,
        }
    }
    Ok(())
}

/// Prints what there is, then each change, until the daemon or the user ends it.
async fn watch(client: &Client, args: &GetVm) -> Result<()> {
    let only = match args.names.as_slice() {
        [name] => name.clone(),
        _ => String::new(),
    };
    if !only.is_empty() {
        // A watch of a VM that is not there would wait for it without a word.
        client.get(&only).await?;
    }
    let request = v1::WatchVmsRequest {
        name: only.clone(),
        ..Default::default()
    };
    let stream = client.vms.clone().watch_vms(request).await;
    let mut stream = stream
        .map_err(|status| about_vm(status.into(), &only))?
        .into_inner();
    let mut watcher = Watcher {
        args,
        before: Some(Vec::new()),
        table: vm::table(args.output == Some(Output::Wide)),
    };
    while let Some(event) = stream.message().await? {
        watcher.event(event)?;
    }
    Err(Failure::new(Code::Unavailable, "vmmd ended the watch").hint("it may be restarting: try again"))
}

struct Watcher<'a> {
    args: &'a GetVm,
    /// What was there at the beginning, until all of it has come.
    before: Option<Vec<v1::Vm>>,
    table: Table,
}

impl Watcher<'_> {
    fn event(&mut self, event: v1::WatchVmsResponse) -> Result<()> {
        let kind = event.r#type();
        if kind == WatchEventType::Synced {
            let vms = self.before.take().unwrap_or_default();
            return self.begin(&vms);
        }
        let Some(vm) = event.vm.filter(|vm| self.wanted(vm)) else {
            return Ok(());
        };
        match &mut self.before {
            Some(before) if kind == WatchEventType::Added => before.push(vm),
            // A change before all has been sent: print it after.
            Some(before) => {
                before.retain(|other| name(other) != name(&vm));
                if kind != WatchEventType::Deleted {
                    before.push(vm);
                }
            }
            None => self.change(&vm, kind == WatchEventType::Deleted)?,
        }
        Ok(())
    }

    fn wanted(&self, vm: &v1::Vm) -> bool {
        let names = &self.args.names;
        (names.is_empty() || names.iter().any(|wanted| wanted == name(vm)))
            && selected(vm, &self.args.selectors)
    }

    fn begin(&mut self, vms: &[v1::Vm]) -> Result<()> {
        let rows = vms.iter().map(|vm| self.row(vm)).collect::<Vec<_>>();
        if self.documents() {
            return print_documents(&vms.iter().collect::<Vec<_>>(), self.args.output, true);
        }
        output::print(&self.table.whole(&rows, !self.args.no_headers))
    }

    fn change(&mut self, vm: &v1::Vm, deleted: bool) -> Result<()> {
        if self.documents() {
            return print_documents(&[vm], self.args.output, true);
        }
        let mut row = self.row(vm);
        if let Some(phase) = row.get_mut(1).filter(|_| deleted) {
            "Deleted".clone_into(phase);
        }
        self.table.fit(&row);
        output::line(self.table.row(&row))
    }

    fn row(&self, vm: &v1::Vm) -> Vec<String> {
        vm::row(vm, self.args.output == Some(Output::Wide), jiff::Timestamp::now())
    }

    fn documents(&self) -> bool {
        matches!(self.args.output, Some(Output::Yaml | Output::Json | Output::Name))
    }
}

fn name(vm: &v1::Vm) -> &str {
    vm.metadata.as_ref().map_or("", |metadata| &metadata.name)
}

/// Whether all selectors hold.
fn selected(vm: &v1::Vm, selectors: &[Selector]) -> bool {
    match &vm.metadata {
        Some(metadata) => all_hold(selectors, &metadata.labels),
        None => all_hold(selectors, &BTreeMap::new()),
    }
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
