//! `apply`: makes sure that the VMs of a manifest exist as it says.

use std::path::PathBuf;

use proto::v1::{self, VmPhase};
use serde_json::Value as Json;

use crate::{
    client::{Client, WORK, about_vm, call, empty_answer},
    failure::{Code, Failure, Result},
    manifest::{self, Document, emit},
    output,
};

/// Most differences that are spelled out.
const MAX_DIFFERENCES: usize = 5;

/// Reads all files; a name may be in them only once.
pub fn read(files: &[PathBuf]) -> Result<Vec<Document>, Vec<Failure>> {
    let mut documents: Vec<Document> = Vec::new();
    let mut failures = Vec::new();
    for file in files {
        match manifest::read(file) {
            Ok(more) => documents.extend(more),
            Err(failure) => failures.push(failure),
        }
    }
    let mut names: Vec<_> = documents.iter().map(Document::name).collect();
    names.sort_unstable();
    let twice = names.windows(2).find_map(|pair| match pair {
        [a, b] if a == b => Some(*a),
        _ => None,
    });
    if let Some(name) = twice {
        failures.push(Failure::new(
            Code::Invalid,
            format!("vm/{name} is in the manifests twice"),
        ));
    }
    if failures.is_empty() {
        Ok(documents)
    } else {
        Err(failures)
    }
}

/// Applies each document; one that fails does not keep the others from being tried.
pub async fn apply(
    client: &Client,
    documents: &[Document],
    start: bool,
    dry_run: bool,
) -> Result<(), Vec<Failure>> {
    let mut failures = Vec::new();
    for document in documents {
        let done = one(client, document, start, dry_run).await;
        let suffix = if dry_run { " (dry run)" } else { "" };
        match done {
            Ok(done) => {
                let text = format!("vm/{} {done}{suffix}", document.name());
                output::line(text).map_err(|failure| vec![failure])?;
            }
            Err(failure) => failures.push(document.locate(failure)),
        }
    }
    super::all(failures)
}

async fn one(client: &Client, document: &Document, start: bool, dry_run: bool) -> Result<&'static str> {
    let name = document.name();
    let there = match client.get(name).await {
        Err(failure) if failure.code == Code::NotFound => {
            create(client, document.vm.clone(), start, dry_run).await?;
            return Ok(if start { "created and started" } else { "created" });
        }
        result => result?,
    };
    let differences = differences(&document.vm, &there)?;
    if !differences.is_empty() {
        return Err(different(name, &differences));
    }
    let phase = there
        .status
        .as_ref()
        .map_or(VmPhase::Unspecified, v1::VmStatus::phase);
    if start && !dry_run && matches!(phase, VmPhase::Pending | VmPhase::Stopped | VmPhase::Failed) {
        let request = v1::StartVmRequest {
            name: name.to_owned(),
        };
        call(WORK, client.vms.clone().start_vm(request))
            .await
            .map_err(|failure| about_vm(failure, name))?;
        return Ok("unchanged, started");
    }
    Ok("unchanged")
}

/// Asks the daemon to make a VM.
pub async fn create(client: &Client, vm: v1::Vm, start: bool, dry_run: bool) -> Result<v1::Vm> {
    let name = vm
        .metadata
        .as_ref()
        .map(|metadata| metadata.name.clone())
        .unwrap_or_default();
    let request = v1::CreateVmRequest {
        vm: Some(vm),
        start,
        dry_run,
    };
    let response = call(WORK, client.vms.clone().create_vm(request)).await;
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
    };
    match call(WORK, client.vms.clone().start_vm(request)).await {
        Ok(response) => response.vm.ok_or_else(empty_answer),
        Err(failure) if &*failure.reason == "ALREADY_RUNNING" => Ok(vm),
        Err(mut failure) => {
            failure.message = format!("vm/{name} was created, but did not start: {}", failure.message);
            Err(failure)
        }
    }
}

fn different(name: &str, differences: &[String]) -> Failure {
    let more = differences.len().saturating_sub(MAX_DIFFERENCES);
    let mut details: Vec<_> = differences.iter().take(MAX_DIFFERENCES).cloned().collect();
    if more > 0 {
        details.push(format!("and {more} more"));
    }
    let message =
        format!("vm/{name} exists and differs from the manifest; changing a VM is not supported yet");
    let hint = format!("delete it (`vmmctl delete {name}`; its disks stay) and apply again");
    Failure {
        details,
        ..Failure::new(Code::Conflict, message).hint(hint)
    }
}

/// What differs between what is wanted and what is there, as `path: there -> wanted`.
fn differences(wanted: &v1::Vm, there: &v1::Vm) -> Result<Vec<String>> {
    let mut wanted = wanted.clone();
    let mut there = there.clone();
    manifest::strip(&mut there);
    // What the daemon fills in when the manifest leaves it open.
    if let (Some(wanted), Some(there)) = (&mut wanted.spec, &there.spec) {
        adopt(wanted, there);
    }
    for vm in [&mut wanted, &mut there] {
        for nic in vm.spec.iter_mut().flat_map(|spec| &mut spec.nics) {
            nic.mac.make_ascii_lowercase();
        }
    }
    let mut found = Vec::new();
    compare("", &emit::json(&there)?, &emit::json(&wanted)?, &mut found);
    Ok(found)
}

fn adopt(wanted: &mut v1::VmSpec, there: &v1::VmSpec) {
    for nic in wanted.nics.iter_mut().filter(|nic| nic.mac.is_empty()) {
        if let Some(same) = there.nics.iter().find(|other| other.name == nic.name) {
            nic.mac.clone_from(&same.mac);
        }
    }
    for disk in wanted.disks.iter_mut().filter(|disk| disk.serial.is_empty()) {
        if let Some(same) = there.disks.iter().find(|other| other.name == disk.name) {
            disk.serial.clone_from(&same.serial);
        }
    }
    if let (Some(wanted), Some(there)) = (&mut wanted.memory, &there.memory)
        && wanted.backing() == v1::MemoryBacking::Unspecified
    {
        wanted.backing = there.backing;
    }
}

fn compare(path: &str, there: &Json, wanted: &Json, found: &mut Vec<String>) {
    match (there, wanted) {
        (Json::Object(a), Json::Object(b)) => {
            let mut keys: Vec<_> = a
                .keys()
                .chain(b.keys().filter(|key| !a.contains_key(*key)))
                .collect();
            keys.sort_unstable();
            for key in keys {
                let path = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path}.{key}")
                };
                let none = &Json::Null;
                compare(
                    &path,
                    a.get(key).unwrap_or(none),
                    b.get(key).unwrap_or(none),
                    found,
                );
            }
        }
        (Json::Array(a), Json::Array(b)) if a.len() == b.len() => {
            for (index, (a, b)) in a.iter().zip(b).enumerate() {
                compare(&format!("{path}[{index}]"), a, b, found);
            }
        }
        (a, b) if a == b => {}
        (a, b) => found.push(format!("{path}: {} -> {}", shown(a), shown(b))),
    }
}

fn shown(json: &Json) -> String {
    match json {
        Json::Null => "not set".into(),
        Json::String(text) => text.clone(),
        Json::Array(items) => format!("{} items", items.len()),
        json => json.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(spec: &str) -> v1::Vm {
        let text = format!(
            "apiVersion: vmmd/v1\nkind: Vm\nmetadata: {{name: a}}\nspec: {{cpu: {{cores: 1}}, \
             memory: {{sizeBytes: 256Mi}}, boot: {{linux: {{kernel: /k}}}}{spec}}}"
        );
        manifest::parse(&text, "test").unwrap().remove(0).vm
    }

    #[test]
    fn what_the_daemon_filled_in_is_no_difference() {
        let wanted = vm(", nics: [{name: eth0, bridge: br0}]");
        let mut there = wanted.clone();
        there.metadata.as_mut().unwrap().uid = "u".into();
        there.metadata.as_mut().unwrap().generation = 3;
        there.status = Some(v1::VmStatus::default());
        there.spec.as_mut().unwrap().nics[0].mac = "52:54:00:00:00:01".into();
        there.spec.as_mut().unwrap().memory.as_mut().unwrap().backing = 1;
        assert_eq!(differences(&wanted, &there), Ok(vec![]));
    }

    #[test]
    fn every_difference_is_named_with_both_values() {
        let there = vm(", nics: [{name: eth0, bridge: br0, mac: '52:54:00:00:00:01'}]");
        let wanted = vm(", nics: [{name: eth0, bridge: br1, mac: '52:54:00:00:00:0a'}], \
                         disks: [{name: d, path: /d, format: raw}]");
        let expected = [
            "spec.disks: not set -> 1 items",
            "spec.nics[0].bridge: br0 -> br1",
            "spec.nics[0].mac: 52:54:00:00:00:01 -> 52:54:00:00:00:0a",
        ];
        assert_eq!(differences(&wanted, &there).unwrap(), expected);
    }
}
