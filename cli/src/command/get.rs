//! `get` and `describe`: what there is.

use std::collections::BTreeMap;

use proto::v1::{self, WatchEventType};

use crate::{
    args::{GetVm, Output, Selector},
    client::{Client, RESTART, went_away},
    failure::{Code, Failure, Result},
    manifest::{emit, schema},
    output::{
        self,
        format::{self, Document, Layout},
        table::Table,
        vm,
    },
};

/// How often a watch is taken up again without an event in between.
const TRIES: u32 = 5;

/// As many events are in the description of a VM.
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
            && let Err(failure) = client.get(wanted).await
        {
            failures.push(failure);
        }
    }
    print(&listed, args).map_err(|failure| vec![failure])?;
    super::all(failures)
}

/// What the command line asks for, as the daemon takes it.
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
        let mut text = output::describe::Lines(output::describe::vm(vm, now));
        // A daemon of before them says what it does without.
        if let Ok(events) = client.events_of(name(vm), LAST_EVENTS).await {
            let rows: Vec<_> = events.iter().map(output::event::row).collect();
            let columns = vec!["TIME", "SEVERITY", "OBJECT", "REASON", "MESSAGE"];
            text.list("Last events", columns, &rows);
        }
        texts.push(text.0);
    }
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

/// Prints VMs as documents one after another.
pub fn print_documents(vms: &[&v1::Vm], output: &Output, layout: Layout) -> Result<()> {
    let document = |vm: &&v1::Vm| {
        Ok(Document {
            title: format!("vm/{}", name(vm)),
            json: emit::vm(vm)?,
            schema: schema::VM,
        })
    };
    let documents: Vec<_> = vms.iter().map(document).collect::<Result<_>>()?;
    format::documents(&documents, output, layout)
}

/// Prints what there is, then each change, until the daemon or the user ends it.
async fn watch(client: &Client, args: &GetVm) -> Result<()> {
    let mut watcher = Watcher {
        args,
        before: Some(Vec::new()),
        table: match &args.output {
            Some(Output::Columns(columns)) => format::table(columns),
            output => vm::table(output.is_some()),
        },
    };
    if let [only] = args.names.as_slice() {
        // A watch of a VM that is not there would wait for it without a word.
        client.get(only).await?;
    }
    let mut request = v1::WatchVmsRequest {
        filter: Some(filter(args)),
        ..Default::default()
    };
    let mut tries = 0;
    loop {
        let ended = match follow(client, &mut request, &mut watcher, &mut tries).await {
            Ok(()) => Failure::new(Code::Unavailable, "vmmd ended the watch")
                .hint("it may be restarting: try again"),
            Err(failure) => failure,
        };
        if &*ended.reason == "CURSOR_EXPIRED" {
            eprintln!(
                "vmmd does not know any more what has changed meanwhile: what there is is printed anew"
            );
            request.cursor.clear();
            watcher.before = Some(Vec::new());
            continue;
        }
        if !went_away(&ended) || tries == TRIES {
            return Err(ended);
        }
        tries += 1;
        eprintln!("vmmd went away; going on with the watch when it is back (try {tries} of {TRIES})");
        tokio::time::sleep(RESTART).await;
    }
}

/// Watches from the request's cursor until the stream ends, and notes there how far it came.
async fn follow(
    client: &Client,
    request: &mut v1::WatchVmsRequest,
    watcher: &mut Watcher<'_>,
    tries: &mut u32,
) -> Result<()> {
    let stream = client.vms.clone().watch_vms(request.clone()).await;
    let mut stream = stream?.into_inner();
    while let Some(event) = stream.message().await? {
        *tries = 0;
        request.cursor.clone_from(&event.cursor);
        watcher.event(event)?;
    }
    Ok(())
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
            // Not when it goes on after a pause.
            let Some(mut vms) = self.before.take() else {
                return Ok(());
            };
            vms.sort_by(|a, b| name(a).cmp(name(b)));
            return self.begin(&vms);
        }
        let Some(vm) = event.vm else {
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

    fn begin(&mut self, vms: &[v1::Vm]) -> Result<()> {
        if let Some(output) = self.documents() {
            return print_documents(&vms.iter().collect::<Vec<_>>(), output, STREAM);
        }
        let rows = vms.iter().map(|vm| self.row(vm)).collect::<Result<Vec<_>>>()?;
        output::print(&self.table.whole(&rows, !self.args.no_headers))
    }

    fn change(&mut self, vm: &v1::Vm, deleted: bool) -> Result<()> {
        if let Some(output) = self.documents() {
            return print_documents(&[vm], output, STREAM);
        }
        let mut row = self.row(vm)?;
        let own = matches!(self.args.output, Some(Output::Columns(_)));
        if let Some(phase) = row.get_mut(1).filter(|_| deleted && !own) {
            "Deleted".clone_into(phase);
        }
        self.table.fit(&row);
        output::line(self.table.row(&row))
    }

    fn row(&self, vm: &v1::Vm) -> Result<Vec<String>> {
        match &self.args.output {
            Some(Output::Columns(columns)) => Ok(format::row(columns, &emit::vm(vm)?)),
            output => Ok(vm::row(vm, output.is_some(), jiff::Timestamp::now())),
        }
    }

    /// The output that is no table.
    fn documents(&self) -> Option<&Output> {
        let output = self.args.output.as_ref();
        output.filter(|output| !matches!(output, Output::Wide | Output::Columns(_)))
    }
}

/// As a watch prints documents.
const STREAM: Layout = Layout {
    list: false,
    stream: true,
    no_headers: true,
};

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
