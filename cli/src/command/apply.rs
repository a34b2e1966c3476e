//! `apply` and `diff`: make the objects of manifests match, or print the differences.

use std::path::PathBuf;

use vmmd_api::v1;

use super::{
    act,
    difference::{self, disk_differences, network_differences},
    disk, network,
    update::{self, Done, How},
    work::{AT_ONCE, guarded, side_by_side},
};
use crate::{
    client::{Client, Kind as _, QUICK, WORK, about_vm, call, empty_answer, send},
    failure::{Code, Failure, Result},
    manifest::{self, Document, Object, quantity, schema},
    output,
};

/// Reads all files; disks and networks come first in the result, so that VMs find them. A name of a kind may occur only once.
pub fn read(files: &[PathBuf]) -> Result<Vec<Document>, Vec<Failure>> {
    let mut documents: Vec<Document> = Vec::new();
    let mut failures = Vec::new();
    for file in files {
        match manifest::read(file) {
            Ok(more) => documents.extend(more),
            Err(failure) => failures.push(failure),
        }
    }
    documents.sort_by_key(|document| matches!(document.object, Object::Vm(_)));
    let mut names: Vec<_> = documents.iter().map(Document::title).collect();
    names.sort_unstable();
    let twice = names.windows(2).find_map(|pair| match pair {
        [a, b] if a == b => Some(a),
        _ => None,
    });
    if let Some(name) = twice {
        failures.push(Failure::new(
            Code::Invalid,
            format!("{name} is in the manifests twice"),
        ));
    }
    super::all(failures)?;
    Ok(documents)
}

/// Applies each document: disks and networks one after another, as disks may be overlays of each other, then VMs side by side.
/// All others are tried after a failure.
pub async fn apply(
    client: &Client,
    documents: &[Document],
    start: bool,
    how: How,
) -> Result<(), Vec<Failure>> {
    let mut failures = Vec::new();
    let mut tell = |document: &Document, done: Result<Done>| {
        match done {
            Ok(done) => report(document, &done, how)?,
            Err(failure) => failures.push(document.locate(failure)),
        }
        Ok(())
    };
    let (vms, first): (Vec<_>, Vec<_>) = documents
        .iter()
        .partition(|document| matches!(document.object, Object::Vm(_)));
    for document in first {
        tell(document, one(client, &document.object, start, how).await)?;
    }
    let work = |index: usize| {
        let (client, object) = (
            client.clone(),
            vms.get(index).map(|document| document.object.clone()),
        );
        async move {
            let done = match &object {
                Some(object) => one(&client, object, start, how).await,
                None => Ok(Done::default()),
            };
            (index, done)
        }
    };
    let all = (0..vms.len()).collect();
    let applied = side_by_side(all, AT_ONCE, work, |(index, done)| {
        vms.get(index).map_or(Ok(()), |document| tell(document, done))
    });
    guarded(client, applied).await?;
    super::all(failures)
}

fn report(document: &Document, done: &Done, how: How) -> Result<()> {
    let suffix = if how.dry_run { " (dry run)" } else { "" };
    output::line(format!("{} {}{suffix}", document.title(), done.text))?;
    output::indented(&done.lines)
}

/// Prints the changes that [`apply`] would make; fails with [`Code::Conflict`] if there are any.
pub async fn diff(client: &Client, documents: &[Document]) -> Result<(), Vec<Failure>> {
    let how = How {
        dry_run: true,
        ..How::default()
    };
    let (mut differs, mut failures) = (0, Vec::new());
    for document in documents {
        match one(client, &document.object, false, how).await {
            Ok(Done { text, .. }) if text == update::UNCHANGED => {}
            Ok(done) => {
                differs += 1;
                let title = format!("{}: to be {}", document.title(), done.text);
                output::line(title)?;
                output::indented(&done.lines)?;
            }
            Err(failure) => failures.push(document.locate(failure)),
        }
    }
    if differs > 0 && failures.is_empty() {
        let message = format!("{differs} of {} differ from the manifest", documents.len());
        failures.push(Failure::new(Code::Conflict, message));
    }
    super::all(failures)
}

/// Applies one document; with `dry_run` only returns the changes.
pub async fn one(client: &Client, object: &Object, start: bool, how: How) -> Result<Done> {
    match object {
        Object::Vm(vm) => one_vm(client, vm, start, how).await,
        Object::Disk(request) => one_disk(client, request, how.dry_run, None).await,
        Object::Network(network) => one_network(client, (**network).clone(), how.dry_run, None).await,
    }
}

/// Creates a missing disk, or changes the mutable fields of an existing one.
///
/// With `seen`, only a disk in that state is changed.
pub async fn one_disk(
    client: &Client,
    request: &v1::CreateDiskRequest,
    dry_run: bool,
    seen: Option<v1::Preconditions>,
) -> Result<Done> {
    let done = |text: String, lines| Ok(Done { text, lines });
    let wanted = request.disk.clone().unwrap_or_default();
    let name = manifest::disk::name(&wanted);
    let there = match client.object::<v1::Disk>(name).await {
        Err(failure) if failure.code == Code::NotFound => {
            if !dry_run {
                disk::create(client, request.clone()).await?;
            }
            return done("created".into(), Vec::new());
        }
        result => result?,
    };
    let differences = disk_differences(&wanted, &there)?.of("disk", name)?;
    let size = manifest::disk::size(&wanted);
    let grows = size > manifest::disk::size(&there);
    if !grows && differences.is_empty() {
        return done(update::UNCHANGED.into(), Vec::new());
    }
    if !dry_run {
        disk::change(client, &wanted, grows, seen).await?;
    }
    let mut texts = Vec::new();
    if !differences.is_empty() {
        texts.push("changed".to_owned());
    }
    if grows {
        texts.push(format!("resized to {}", quantity::show(size)));
    }
    done(texts.join(", "), differences)
}

/// Creates a missing network, or changes the fields of an existing one that differ.
///
/// With `seen`, only a network in that state is changed.
pub async fn one_network(
    client: &Client,
    wanted: v1::Network,
    dry_run: bool,
    seen: Option<v1::Preconditions>,
) -> Result<Done> {
    let done = |text: &str, lines| {
        let text = text.to_owned();
        Ok(Done { text, lines })
    };
    let there = match client.object::<v1::Network>(wanted.name()).await {
        Err(failure) if failure.code == Code::NotFound => {
            if !dry_run {
                network::make(client, wanted).await?;
            }
            return done("created", Vec::new());
        }
        result => result?,
    };
    let differences = network_differences(&wanted, &there)?.of("network", wanted.name())?;
    if differences.is_empty() {
        return done(update::UNCHANGED, differences);
    }
    if !dry_run {
        let paths = difference::mask(&differences, schema::NETWORK_SPEC);
        network::change(client, wanted, paths, seen).await?;
    }
    done("changed", differences)
}

async fn one_vm(client: &Client, vm: &v1::Vm, start: bool, how: How) -> Result<Done> {
    let name = vm.name();
    let there = match client.get(name).await {
        Err(failure) if failure.code == Code::NotFound => {
            create(client, vm.clone(), start, how.dry_run).await?;
            let lines = if start || how.dry_run {
                Vec::new()
            } else {
                obstacles(client, vm).await
            };
            return Ok(Done {
                text: if start { "created and started" } else { "created" }.into(),
                lines,
            });
        }
        result => result?,
    };
    let mut done = update::update(client, vm.clone(), &there, how).await?;
    if start && !how.dry_run && act::is_down(act::phase(&there)) {
        let request = v1::StartVmRequest {
            name: name.to_owned(),
            ..Default::default()
        };
        send!(client.limit(WORK), client.vms, start_vm, request)
            .await
            .map_err(|failure| about_vm(failure, name))?;
        done.text += ", started";
    }
    Ok(done)
}

/// Obstacles to a start of a new VM, one per line. The manifest is valid: files, disks, bridges or room may come later.
pub async fn obstacles(client: &Client, vm: &v1::Vm) -> Vec<String> {
    let request = v1::CheckPlacementRequest { vm: Some(vm.clone()) };
    // Only for information: the VM is created in any case.
    let Ok(answer) = call(QUICK, client.nodes.clone().check_placement(request)).await else {
        return Vec::new();
    };
    let line =
        |problem: v1::PlacementProblem| format!("cannot start yet: {} ({})", problem.message, problem.reason);
    answer.problems.into_iter().map(line).collect()
}

/// Asks the daemon to create a VM.
pub async fn create(client: &Client, vm: v1::Vm, start: bool, dry_run: bool) -> Result<v1::Vm> {
    let name = vm.name().to_owned();
    let request = v1::CreateVmRequest {
        vm: Some(vm),
        start,
        dry_run,
        ..Default::default()
    };
    let response = send!(client.limit(WORK), client.vms, create_vm, request).await;
    let response = response.map_err(|failure| about_vm(failure, &name))?;
    let vm = response.vm.ok_or_else(empty_answer)?;
    if start && !dry_run {
        started(client, &name, vm).await
    } else {
        Ok(vm)
    }
}

/// Waits for the end of the start that a creation began: a second request joins it, and is refused when the VM runs.
async fn started(client: &Client, name: &str, vm: v1::Vm) -> Result<v1::Vm> {
    let request = v1::StartVmRequest {
        name: name.to_owned(),
        ..Default::default()
    };
    match send!(client.limit(WORK), client.vms, start_vm, request).await {
        Ok(response) => response.vm.ok_or_else(empty_answer),
        Err(failure) if &*failure.reason == "ALREADY_RUNNING" => Ok(vm),
        Err(mut failure) => {
            failure.message = format!("vm/{name} was created, but did not start: {}", failure.message);
            Err(failure)
        }
    }
}
