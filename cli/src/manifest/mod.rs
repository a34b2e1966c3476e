//! Manifests: VMs, disks and networks as YAML files.
//!
//! A VM's manifest is decoded as `vmm run` does it ([`vmmd_spec::manifest`]); those of a disk ([`disk`]) and of a network
//! ([`network`]) have the same shape. All problems of a file are reported at once, each with its line.

pub mod disk;
pub mod emit;
pub mod network;

#[cfg(test)]
mod tests;

use std::{
    fs,
    io::{self, Read as _},
    path::Path,
};

use serde_json::Value as Json;
use vmmd_api::v1;
pub use vmmd_spec::manifest::{quantity, schema, strip};
use vmmd_spec::{
    Violations,
    manifest::{
        self, MAX_LENGTH, Problem, VM, decode, find,
        yaml::{self, Node},
    },
};

use crate::failure::{Code, Failure};

/// An object from a file, with all that is needed to point at its fields.
#[derive(Debug)]
pub struct Document {
    /// What it describes.
    pub object: Object,
    source: String,
    root: Node,
}

/// Object that a document describes, without fields that only the daemon sets.
#[derive(Clone, Debug, PartialEq)]
pub enum Object {
    /// A VM.
    Vm(Box<v1::Vm>),
    /// A disk.
    Disk(Box<v1::CreateDiskRequest>),
    /// A network.
    Network(Box<v1::Network>),
}

/// The field that holds a disk in its request.
const OF_DISK: &str = "disk";
/// The field that holds a network in its request.
const OF_NETWORK: &str = "network";

impl Document {
    /// The name of the object.
    pub fn name(&self) -> &str {
        match &self.object {
            Object::Vm(vm) => vm.metadata.as_ref().map_or("", |metadata| &metadata.name),
            Object::Disk(request) => request.disk.as_ref().map_or("", disk::name),
            Object::Network(network) => network.metadata.as_ref().map_or("", |metadata| &metadata.name),
        }
    }

    /// `vm/web`, `disk/data`, `network/lan`.
    pub fn title(&self) -> String {
        match self.object {
            Object::Vm(_) => format!("vm/{}", self.name()),
            Object::Disk(_) => format!("disk/{}", self.name()),
            Object::Network(_) => format!("network/{}", self.name()),
        }
    }

    /// Says of a failure which lines it is about.
    pub fn locate(&self, failure: Failure) -> Failure {
        let Failure { violations, .. } = &failure;
        if violations.is_empty() {
            return failure;
        }
        let problems = violations.iter().map(|(field, text)| {
            let path = match self.object {
                Object::Vm(_) => field.clone(),
                Object::Disk(_) => below(field, OF_DISK),
                Object::Network(_) => below(field, OF_NETWORK),
            };
            Problem {
                mark: find(&self.root, &path),
                path,
                text: text.clone(),
            }
        });
        invalid(&self.source, &problems.collect::<Vec<_>>())
    }
}

/// Reads and checks the documents in a file, or on standard input when the path is `-`.
pub fn read(path: &Path) -> Result<Vec<Document>, Failure> {
    let source = if path == Path::new("-") {
        "stdin".to_owned()
    } else {
        path.display().to_string()
    };
    let text = read_text(path)
        .map_err(|error| Failure::new(Code::Invalid, format!("cannot read {source}: {error}")))?;
    parse(&text, &source)
}

fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    if path == Path::new("-") {
        io::stdin()
            .lock()
            .take(MAX_LENGTH + 1)
            .read_to_string(&mut text)?;
    } else {
        fs::File::open(path)?
            .take(MAX_LENGTH + 1)
            .read_to_string(&mut text)?;
    }
    if u64::try_from(text.len()).is_ok_and(|length| length <= MAX_LENGTH) {
        Ok(text)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidData, "longer than 4 MiB"))
    }
}

/// Reads and checks the documents in a text; `source` is its name in messages.
pub fn parse(text: &str, source: &str) -> Result<Vec<Document>, Failure> {
    let roots = yaml::documents(text).map_err(|error| invalid(source, &[error.into()]))?;
    if roots.is_empty() {
        return Err(Failure::new(
            Code::Invalid,
            format!("{source} has no VM, disk or network: it is empty"),
        ));
    }
    let mut documents = Vec::new();
    let mut problems = Vec::new();
    for root in roots {
        match document(root, source) {
            Ok(document) => documents.push(document),
            Err(more) => problems.extend(more),
        }
    }
    if problems.is_empty() {
        Ok(documents)
    } else {
        Err(invalid(source, &problems))
    }
}

fn document(root: Node, source: &str) -> Result<Document, Vec<Problem>> {
    let kinds = [VM, disk::KIND, network::KIND];
    let object = match manifest::kind(&root, &kinds).map_err(|problem| vec![problem])? {
        disk::KIND => {
            let form = (disk::request as fn(_) -> _, disk::check as fn(&_) -> _);
            Object::Disk(Box::new(message(&root, schema::DISK, form, OF_DISK)?))
        }
        network::KIND => {
            let form = (network::network as fn(_) -> _, network::check as fn(&_) -> _);
            Object::Network(Box::new(message(&root, schema::NETWORK, form, OF_NETWORK)?))
        }
        _ => Object::Vm(Box::new(manifest::vm(&root)?.0)),
    };
    Ok(Document {
        object,
        source: source.to_owned(),
        root,
    })
}

/// A field of a request (`disk.spec.sizeBytes`) as a manifest has it (`spec.sizeBytes`).
fn below(path: &str, object: &str) -> String {
    let below = path.strip_prefix(object).and_then(|rest| rest.strip_prefix('.'));
    below.unwrap_or(path).to_owned()
}

/// Reads a JSON value as a message, and returns the violations in a message.
type Form<T> = (fn(Json) -> serde_json::Result<T>, fn(&T) -> Violations);

/// The message of a document; `object` is the field that holds it in its request.
fn message<T>(root: &Node, schema: &str, (read, check): Form<T>, object: &str) -> Result<T, Vec<Problem>> {
    let (json, problems) = decode::partial(root, schema);
    let message = match read(json) {
        Ok(message) => message,
        Err(_) if !problems.is_empty() => return Err(problems),
        Err(error) => {
            return Err(vec![Problem {
                mark: Some(root.mark),
                path: String::new(),
                text: error.to_string(),
            }]);
        }
    };
    let mut found = check(&message);
    for violation in &mut found.0 {
        violation.field = below(&violation.field, object);
    }
    let problems = manifest::together(root, problems, found);
    match problems.is_empty() {
        true => Ok(message),
        false => Err(problems),
    }
}

fn invalid(source: &str, problems: &[Problem]) -> Failure {
    let lines: Vec<_> = problems
        .iter()
        .map(|Problem { mark, path, text }| {
            let place = mark.map_or_else(|| source.to_owned(), |mark| format!("{source}:{}", mark.line));
            if path.is_empty() {
                format!("{place}: {text}")
            } else {
                format!("{place}: {path}: {text}")
            }
        })
        .collect();
    match lines.as_slice() {
        [line] => Failure::new(Code::Invalid, line.clone()),
        lines => {
            let message = format!("{source} has {} problems", lines.len());
            Failure {
                details: lines.to_vec(),
                ..Failure::new(Code::Invalid, message)
            }
        }
    }
}
