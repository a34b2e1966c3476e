//! Manifests: objects of the API as YAML files, for vmmctl and for `vmm run`.
//!
//! A manifest is the canonical JSON form of an object's message, as YAML, with `apiVersion` and `kind` in front. Two things are easier
//! than in canonical JSON: fields in bytes take suffixes (`256Mi`), and enums take the short form of their names (`raw` for
//! `DISK_FORMAT_RAW`). All problems are reported at once, each with its line and the path of the field.

pub mod decode;
pub mod quantity;
pub mod schema;
pub mod yaml;

use std::fmt;

use serde_json::Value as Json;

pub use self::decode::Problem;
use vmmd_api::v1;

use self::yaml::Node;
use crate::{Violations, vm::Manifest};

/// The manifests' `apiVersion`.
pub const API_VERSION: &str = "vmmd/v1";
/// The `kind` of a VM's manifest.
pub const VM: &str = "Vm";

/// Longest text that is read as manifests, in bytes.
pub const MAX_LENGTH: u64 = 4 << 20;

/// All that is wrong with a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problems {
    /// In one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Problem { mark, path, text }) in self.0.iter().enumerate() {
            f.write_str(if index == 0 { "" } else { "; " })?;
            if let Some(mark) = mark {
                write!(f, "line {}: ", mark.line)?;
            }
            if !path.is_empty() {
                write!(f, "{path}: ")?;
            }
            f.write_str(text)?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// The one VM that a text is a manifest of.
///
/// # Errors
///
/// All that is wrong with it; also when it holds none, or more than one.
pub fn single_vm(text: &str) -> Result<Manifest, Problems> {
    let alone = |text: String| {
        Problems(vec![Problem {
            mark: None,
            path: String::new(),
            text,
        }])
    };
    let roots = yaml::documents(text).map_err(|error| Problems(vec![error.into()]))?;
    let [root] = roots.as_slice() else {
        return Err(alone(format!(
            "must hold one VM, holds {} documents",
            roots.len()
        )));
    };
    kind(root, &[VM]).map_err(|problem| Problems(vec![problem]))?;
    let (_, manifest) = vm(root).map_err(Problems)?;
    Ok(manifest)
}

/// The VM that a document describes, without what only the daemon sets, and its validated form.
///
/// # Errors
///
/// All that is wrong with it.
pub fn vm(root: &Node) -> Result<(v1::Vm, Manifest), Vec<Problem>> {
    let (json, problems) = decode::partial(root, schema::VM);
    let read = serde_json::from_value::<v1::Vm>(without_head(json));
    let mut vm = match read {
        Ok(vm) => vm,
        Err(_) if !problems.is_empty() => return Err(problems),
        Err(error) => {
            return Err(vec![Problem {
                mark: Some(root.mark),
                path: String::new(),
                text: error.to_string(),
            }]);
        }
    };
    strip(&mut vm);
    let found = match Manifest::try_from(&vm) {
        Ok(manifest) if problems.is_empty() => return Ok((vm, manifest)),
        Ok(_) => Violations::default(),
        Err(violations) => violations,
    };
    Err(together(root, problems, found))
}

/// The problems of a document and the violations of what could be read of it, by line. Violations that follow from a problem are left out.
pub fn together(root: &Node, mut problems: Vec<Problem>, violations: Violations) -> Vec<Problem> {
    let more = violations
        .0
        .into_iter()
        .filter(|violation| {
            let (field, given) = (&violation.field, is_given(root, &violation.field));
            !problems.iter().any(|problem| problem.explains(field, given))
        })
        .map(|violation| Problem {
            mark: find(root, &violation.field),
            path: violation.field,
            text: violation.description,
        });
    let more: Vec<_> = more.collect();
    problems.extend(more);
    problems.sort_by_key(|problem| problem.mark.map(|mark| mark.line));
    problems
}

/// Returns the document's `kind`, which must be one of `kinds`. A document of another kind gets one
/// problem about the kind instead of one for each field.
///
/// # Errors
///
/// The problem with the document's head.
pub fn kind<'a>(root: &'a Node, kinds: &[&'a str]) -> Result<&'a str, Problem> {
    let yaml::Value::Mapping(entries) = &root.value else {
        return Ok(kinds.first().copied().unwrap_or_default());
    };
    let head = |name: &str, wanted: &[&str]| {
        let entry = entries.iter().find(|(key, _)| key.name == name);
        let expected = decode::alternatives(wanted);
        let text = match entry {
            Some((_, node)) => match &node.value {
                yaml::Value::Scalar { text, .. } if wanted.contains(&text.as_str()) => {
                    return Ok(text.as_str());
                }
                yaml::Value::Scalar { text, .. } => format!("must be {expected}, is \"{text}\""),
                _ => format!("must be {expected}, is {}", node.kind()),
            },
            None => {
                let kinds: Vec<_> = kinds.iter().map(|kind| format!("`kind: {kind}`")).collect();
                let kinds = decode::alternatives(&kinds);
                format!("missing: a manifest begins with `apiVersion: {API_VERSION}` and {kinds}")
            }
        };
        Err(Problem {
            mark: Some(entry.map_or(root.mark, |(_, node)| node.mark)),
            path: name.to_owned(),
            text,
        })
    };
    head("apiVersion", &[API_VERSION])?;
    head("kind", kinds)
}

/// The JSON of a message as that of a manifest.
pub fn with_head(kind: &str, message: Json) -> Json {
    let mut manifest = serde_json::Map::new();
    manifest.insert("apiVersion".to_owned(), API_VERSION.into());
    manifest.insert("kind".to_owned(), kind.into());
    if let Json::Object(fields) = message {
        manifest.extend(fields);
    }
    Json::Object(manifest)
}

/// The JSON of a manifest as that of its message.
pub fn without_head(mut manifest: Json) -> Json {
    if let Json::Object(fields) = &mut manifest {
        fields.remove("apiVersion");
        fields.remove("kind");
    }
    manifest
}

/// Takes away what only the daemon sets, so that what `vmmctl get -o yaml` printed is a manifest too.
pub fn strip(vm: &mut v1::Vm) {
    vm.status = None;
    strip_metadata(&mut vm.metadata);
}

/// Removes the parts of the metadata that only the daemon sets.
pub fn strip_metadata(metadata: &mut Option<v1::ObjectMetadata>) {
    if let Some(metadata) = metadata {
        metadata.uid.clear();
        metadata.generation = 0;
        metadata.create_time = None;
    }
}

/// Where the field at `path` stands; when it is absent, the nearest thing around it.
pub fn find(root: &Node, path: &str) -> Option<yaml::Mark> {
    look(root, path).0
}

/// Whether a document has the field at `path`.
fn is_given(root: &Node, path: &str) -> bool {
    look(root, path).1
}

/// The place of the field at `path`, or of the nearest thing around it, and whether it is the field itself.
fn look(root: &Node, path: &str) -> (Option<yaml::Mark>, bool) {
    let mut node = root;
    let mut mark = None;
    for step in path.split('.') {
        let (name, indices) = step
            .split_once('[')
            .map_or((step, None), |(name, rest)| (name, Some(rest)));
        let yaml::Value::Mapping(entries) = &node.value else {
            return (mark, false);
        };
        let Some((key, value)) = entries.iter().find(|(key, _)| key.name == name) else {
            return (mark, false);
        };
        mark = Some(key.mark);
        node = value;
        let index = indices.and_then(|rest| rest.trim_end_matches(']').parse::<usize>().ok());
        if let (Some(index), yaml::Value::Sequence(items)) = (index, &node.value) {
            let Some(item) = items.get(index) else {
                return (mark, false);
            };
            mark = Some(item.mark);
            node = item;
        }
    }
    (mark, true)
}

#[cfg(test)]
mod tests;
