//! `update vm`: changes fields of a VM.

mod paths;

use std::{fs, io, path::Path};

use serde_json::{Map, Value as Json};
use vmmd_api::v1;

use super::update::{self, Change, How};
use crate::{
    args::patch::{Set, Step, UpdateVm},
    client::Client,
    failure::{Code, Failure, Result},
    manifest::{self, Object, emit},
    output,
};

/// The name of the patched manifest in messages.
const PATCHED: &str = "the patched VM";

/// Longest patch that is read, in bytes.
const MAX_FILE: u64 = 4 << 20;

/// The merge patch of the command line, if there is one. Needs no daemon.
pub fn read(args: &UpdateVm) -> Result<Option<Json>> {
    let text = match (&args.patch, &args.patch_file) {
        (Some(text), _) => text.clone(),
        (None, Some(path)) => read_file(path).map_err(|error| {
            Failure::new(Code::Invalid, format!("cannot read {}: {error}", path.display()))
        })?,
        (None, None) => return Ok(None),
    };
    let patch: Json = serde_saphyr::from_str(&text).map_err(|error| {
        Failure::new(
            Code::Invalid,
            format!("the patch is not valid JSON or YAML: {error}"),
        )
    })?;
    if patch.is_object() {
        Ok(Some(patch))
    } else {
        Err(Failure::new(
            Code::Invalid,
            "the patch must be an object, as in {spec: {cpu: {cores: 4}}}",
        ))
    }
}

fn read_file(path: &Path) -> io::Result<String> {
    use io::Read as _;
    let mut text = String::new();
    if path == Path::new("-") {
        io::stdin().lock().take(MAX_FILE).read_to_string(&mut text)?;
    } else {
        fs::File::open(path)?.take(MAX_FILE).read_to_string(&mut text)?;
    }
    Ok(text)
}

/// Changes the VM.
pub async fn patch(client: &Client, args: &UpdateVm, merge: Option<&Json>) -> Result<()> {
    let how = How {
        dry_run: args.dry_run,
        restart: args.restart.restart,
        grace: args.restart.grace,
        force_media: false,
    };
    let done = update::rewrite(client, &args.name, how, |there| patched(there, merge, &args.set)).await?;
    let suffix = if args.dry_run { " (dry run)" } else { "" };
    output::line(format!("vm/{} {}{suffix}", args.name, done.text))?;
    output::indented(&done.lines)
}

/// The changed VM, and the changed fields.
fn patched(there: &v1::Vm, merge: Option<&Json>, sets: &[Set]) -> Result<Change> {
    let mut vm = there.clone();
    manifest::strip(&mut vm);
    let mut json = emit::manifest(&vm)?;
    let mut paths = Vec::new();
    if let Some(merge) = merge {
        paths = paths::of_merge(merge);
        merge_into(&mut json, merge);
    }
    for set in sets {
        paths.extend(paths::of_steps(&json, &set.path, &set.value));
        put(&mut json, &set.path, &set.value)?;
    }
    let name = there.metadata.as_ref().map_or("", |metadata| &metadata.name);
    if json.pointer("/metadata/name").and_then(Json::as_str) != Some(name) {
        return Err(Failure::new(
            Code::Invalid,
            format!("the name of vm/{name} cannot be changed"),
        ));
    }
    paths.retain(|path| path != "metadata.name");
    // Values have the forms of a manifest.
    let documents = manifest::parse(&json.to_string(), PATCHED).map_err(without_lines)?;
    match documents.into_iter().next().map(|document| document.object) {
        Some(Object::Vm(vm)) => Ok(Change { vm: *vm, paths }),
        _ => Err(Failure::new(
            Code::Invalid,
            "a patch cannot change the kind of the object",
        )),
    }
}

/// Removes line numbers: the patched manifest is one line of JSON.
fn without_lines(mut failure: Failure) -> Failure {
    let place = format!("{PATCHED}:1: ");
    for text in std::iter::once(&mut failure.message).chain(&mut failure.details) {
        *text = text.replace(&place, "");
    }
    failure
}

/// A merge patch (RFC 7396, section 2).
fn merge_into(target: &mut Json, patch: &Json) {
    let Json::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Json::Object(Map::new());
    }
    if let Json::Object(target) = target {
        for (key, value) in patch {
            if value.is_null() {
                target.remove(key);
            } else {
                merge_into(target.entry(key).or_insert(Json::Null), value);
            }
        }
    }
}

/// Sets one field.
fn put(target: &mut Json, path: &[Step], value: &Json) -> Result<()> {
    let (mut at, mut seen) = (target, String::new());
    let Some((last, before)) = path.split_last() else {
        return Ok(());
    };
    for step in before {
        at = enter(at, step, &mut seen)?;
    }
    match (last, value) {
        (Step::Field(key), Json::Null) => {
            at.as_object_mut().map(|fields| fields.remove(key));
            Ok(())
        }
        (Step::Item(_), Json::Null) => {
            let position = position(at, last, &seen)?;
            at.as_array_mut().map(|items| items.remove(position));
            Ok(())
        }
        _ => {
            *enter(at, last, &mut seen)? = value.clone();
            Ok(())
        }
    }
}

/// The value that a step leads to; missing fields are created.
fn enter<'a>(at: &'a mut Json, step: &Step, seen: &mut String) -> Result<&'a mut Json> {
    match step {
        Step::Field(key) => {
            if at.is_null() {
                *at = Json::Object(Map::new());
            }
            let Json::Object(fields) = at else {
                return Err(Failure::new(Code::Invalid, format!("{seen} has no fields")));
            };
            if !seen.is_empty() {
                seen.push('.');
            }
            seen.push_str(key);
            Ok(fields.entry(key.clone()).or_insert(Json::Null))
        }
        Step::Item(item) => {
            let position = position(at, step, seen)?;
            seen.push_str(&format!("[{item}]"));
            let items = at.as_array_mut().and_then(|items| items.get_mut(position));
            items.ok_or_else(|| Failure::new(Code::Invalid, format!("{seen} does not exist")))
        }
    }
}

/// The position of the list item that a step names.
fn position(at: &Json, step: &Step, seen: &str) -> Result<usize> {
    let Step::Item(item) = step else {
        return Err(Failure::new(Code::Invalid, format!("{seen} is a list")));
    };
    let Json::Array(items) = at else {
        return Err(Failure::new(
            Code::Invalid,
            format!("{seen} is not a list with an item \"{item}\""),
        ));
    };
    let named = items
        .iter()
        .position(|other| other.get("name").and_then(Json::as_str) == Some(item));
    let numbered = || item.parse().ok().filter(|number| *number < items.len());
    named.or_else(numbered).ok_or_else(|| {
        let names: Vec<_> = items
            .iter()
            .filter_map(|item| item.get("name")?.as_str())
            .collect();
        let failure = Failure::new(Code::Invalid, format!("{seen} has no item \"{item}\""));
        failure.hint(format!(
            "its items are {}",
            if names.is_empty() {
                "none".into()
            } else {
                names.join(", ")
            }
        ))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn merge_patch_follows_the_examples_of_rfc_7396() {
        for (target, patch, expected) in [
            (json!({"a": "b"}), json!({"a": "c"}), json!({"a": "c"})),
            (json!({"a": "b"}), json!({"b": "c"}), json!({"a": "b", "b": "c"})),
            (json!({"a": "b", "b": "c"}), json!({"a": null}), json!({"b": "c"})),
            (json!({"a": ["b"]}), json!({"a": "c"}), json!({"a": "c"})),
            (
                json!({"a": {"b": "c"}}),
                json!({"a": {"b": "d", "c": null}}),
                json!({"a": {"b": "d"}}),
            ),
            (json!({"a": [{"b": "c"}]}), json!({"a": [1]}), json!({"a": [1]})),
            (json!({"e": null}), json!({"a": 1}), json!({"e": null, "a": 1})),
            (
                json!({}),
                json!({"a": {"bb": {"ccc": null}}}),
                json!({"a": {"bb": {}}}),
            ),
        ] {
            let mut merged = target;
            merge_into(&mut merged, &patch);
            assert_eq!(merged, expected, "{patch}");
        }
    }

    #[test]
    fn problem_of_a_patch_has_no_line_number() {
        let failure = Failure {
            details: vec![format!("{PATCHED}:1: spec.memory: is required")],
            ..Failure::new(
                Code::Invalid,
                format!("{PATCHED}:1: spec.cpu.cores: must be 1 to 254, is 0"),
            )
        };
        let shown = without_lines(failure).to_string();
        assert_eq!(
            shown,
            "spec.cpu.cores: must be 1 to 254, is 0\n  spec.memory: is required"
        );
    }

    #[test]
    fn field_is_set_by_its_path() {
        let there = json!({"spec": {"cpu": {"cores": 2}, "disks": [{"name": "root"}, {"name": "data", "readOnly": true}]}});
        for (set, expected) in [
            (
                "spec.cpu.cores=4",
                json!({"spec": {"cpu": {"cores": 4}, "disks": there["spec"]["disks"]}}),
            ),
            (
                "spec.cpu=null",
                json!({"spec": {"disks": there["spec"]["disks"]}}),
            ),
            (
                "spec.disks[data].readOnly=false",
                json!({"spec": {"cpu": {"cores": 2}, "disks": [{"name": "root"}, {"name": "data", "readOnly": false}]}}),
            ),
            (
                "spec.disks[0]=null",
                json!({"spec": {"cpu": {"cores": 2}, "disks": [there["spec"]["disks"][1]]}}),
            ),
            (
                r"metadata.labels.example\.com/tier=front=1",
                json!({"metadata": {"labels": {"example.com/tier": "front=1"}}, "spec": there["spec"]}),
            ),
        ] {
            let parsed: Set = set.parse().unwrap();
            let mut json = there.clone();
            put(&mut json, &parsed.path, &parsed.value).unwrap();
            assert_eq!(json, expected, "{set}");
        }
        for (set, words) in [
            ("spec.disks[other].readOnly=true", "its items are root, data"),
            ("spec.disks[7]=null", "has no item \"7\""),
            ("spec.cpu.cores.more=1", "spec.cpu.cores has no fields"),
            ("spec.cpu[a]=1", "is not a list"),
        ] {
            let parsed: Set = set.parse().unwrap();
            let failure = put(&mut there.clone(), &parsed.path, &parsed.value).unwrap_err();
            assert!(failure.to_string().contains(words), "{set}: {failure}");
        }
    }
}
