//! Manifests: VMs and disks as YAML files.
//!
//! A VM's manifest is decoded as `vmm run` does it ([`vmmd_spec::manifest`]); a disk's has the same shape ([`disk`]). All problems of a
//! file are reported at once, each with its line.

pub mod disk;
pub mod emit;

#[cfg(test)]
mod tests;

use std::{
    fs,
    io::{self, Read as _},
    path::Path,
};

use vmmd_api::v1;
use vmmd_spec::manifest::{
    self, MAX_LENGTH, Problem, VM, decode, find,
    yaml::{self, Node},
};
pub use vmmd_spec::manifest::{quantity, schema, strip};

use crate::failure::{Code, Failure};

/// A VM or a disk from a file, with all that is needed to point at its fields.
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
}

impl Document {
    /// The name of the VM or disk.
    pub fn name(&self) -> &str {
        match &self.object {
            Object::Vm(vm) => vm.metadata.as_ref().map_or("", |metadata| &metadata.name),
            Object::Disk(request) => request.disk.as_ref().map_or("", disk::name),
        }
    }

    /// `vm/web`, `disk/data`.
    pub fn title(&self) -> String {
        match self.object {
            Object::Vm(_) => format!("vm/{}", self.name()),
            Object::Disk(_) => format!("disk/{}", self.name()),
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
                Object::Disk(_) => disk::field(field),
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
            format!("{source} holds no VM and no disk: it is empty"),
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
    let kind = manifest::kind(&root, &[VM, disk::KIND]).map_err(|problem| vec![problem])?;
    let object = if kind == disk::KIND {
        Object::Disk(Box::new(of_disk(&root)?))
    } else {
        Object::Vm(Box::new(manifest::vm(&root)?.0))
    };
    Ok(Document {
        object,
        source: source.to_owned(),
        root,
    })
}

fn of_disk(root: &Node) -> Result<v1::CreateDiskRequest, Vec<Problem>> {
    let (json, problems) = decode::partial(root, schema::DISK);
    let request = match disk::request(json) {
        Ok(request) => request,
        Err(_) if !problems.is_empty() => return Err(problems),
        Err(error) => {
            return Err(vec![Problem {
                mark: Some(root.mark),
                path: String::new(),
                text: error.to_string(),
            }]);
        }
    };
    let problems = manifest::together(root, problems, disk::check(&request));
    match problems.is_empty() {
        true => Ok(request),
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
