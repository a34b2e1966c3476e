//! Manifests: VMs and disks as YAML files.
//!
//! A VM's manifest is the canonical JSON form of `vmmd.v1.Vm`, as YAML; a disk's that of `vmmd.v1.Disk` ([`disk`]). Two things are easier than in canonical JSON:
//! fields in bytes take suffixes (`256Mi`), and enums take the short form of their names (`raw` for
//! `DISK_FORMAT_RAW`). All problems of a file are reported at once, each with its line.

pub mod decode;
pub mod disk;
pub mod emit;
pub mod quantity;
pub mod schema;
pub mod yaml;

#[cfg(test)]
mod tests;

use std::{
    fs,
    io::{self, Read as _},
    path::Path,
};

use proto::{
    model::vm::{API_VERSION, KIND, Manifest},
    v1,
};

use self::{decode::Problem, yaml::Node};
use crate::failure::{Code, Failure};

/// Longest file that is read, in bytes.
const MAX_FILE: u64 = 4 << 20;

/// A VM or a disk from a file, with all that is needed to point at its fields.
#[derive(Debug)]
pub struct Document {
    /// What it describes.
    pub object: Object,
    source: String,
    root: Node,
}

/// What a document describes, without what only the daemon sets.
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

/// Reads and checks what is in a file, or on standard input when it is `-`.
pub fn read(path: &Path) -> Result<Vec<Document>, Failure> {
    let source = if path == Path::new("-") {
        "stdin".to_owned()
    } else {
        path.display().to_string()
    };
    let text = read_text(path)
        .map_err(|error| Failure::new(Code::Invalid, format!("can't read {source}: {error}")))?;
    parse(&text, &source)
}

fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    if path == Path::new("-") {
        io::stdin().lock().take(MAX_FILE + 1).read_to_string(&mut text)?;
    } else {
        fs::File::open(path)?
            .take(MAX_FILE + 1)
            .read_to_string(&mut text)?;
    }
    if u64::try_from(text.len()).is_ok_and(|length| length <= MAX_FILE) {
        Ok(text)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidData, "longer than 4 MiB"))
    }
}

/// Reads and checks what is in a text; `source` is what messages call it.
pub fn parse(text: &str, source: &str) -> Result<Vec<Document>, Failure> {
    let roots = yaml::documents(text).map_err(|error| {
        invalid(
            source,
            &[Problem {
                mark: Some(error.mark),
                path: String::new(),
                text: error.message,
            }],
        )
    })?;
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
    let of_disk = kind(&root).map_err(|problem| vec![problem])? == disk::KIND;
    let json = decode::decode(&root, if of_disk { schema::DISK } else { schema::VM })?;
    let problem = |error: serde_json::Error| {
        vec![Problem {
            mark: Some(root.mark),
            path: String::new(),
            text: error.to_string(),
        }]
    };
    let (object, violations) = if of_disk {
        let request = disk::request(json).map_err(problem)?;
        let violations = disk::check(&request);
        (Object::Disk(Box::new(request)), violations)
    } else {
        let mut vm: Box<v1::Vm> = serde_json::from_value(json).map_err(problem)?;
        strip(&mut vm);
        let violations = Manifest::try_from(&*vm).err().unwrap_or_default();
        (Object::Vm(vm), violations)
    };
    if !violations.0.is_empty() {
        let problems = violations.0.into_iter().map(|violation| Problem {
            mark: find(&root, &violation.field),
            path: violation.field,
            text: violation.description,
        });
        return Err(problems.collect());
    }
    Ok(Document {
        object,
        source: source.to_owned(),
        root,
    })
}

/// What a document describes by its `kind`. One that is neither VM nor disk gets one message about that, not one for
/// each of its fields.
fn kind(root: &Node) -> Result<&str, Problem> {
    let yaml::Value::Mapping(entries) = &root.value else {
        return Ok(KIND);
    };
    let head = |name: &str, wanted: &[&str]| {
        let entry = entries.iter().find(|(key, _)| key.name == name);
        let expected = wanted.join(" or ");
        let text = match entry {
            Some((_, node)) => match &node.value {
                yaml::Value::Scalar { text, .. } if wanted.contains(&text.as_str()) => {
                    return Ok(text.as_str());
                }
                yaml::Value::Scalar { text, .. } => format!("must be {expected}, is \"{text}\""),
                _ => format!("must be {expected}, is {}", node.kind()),
            },
            None => format!(
                "missing: a manifest begins with `apiVersion: {API_VERSION}` and `kind: {KIND}` or `kind: {}`",
                disk::KIND
            ),
        };
        Err(Problem {
            mark: Some(entry.map_or(root.mark, |(_, node)| node.mark)),
            path: name.to_owned(),
            text,
        })
    };
    head("apiVersion", &[API_VERSION])?;
    head("kind", &[KIND, disk::KIND])
}

/// Takes away what only the daemon sets, so that what `get -o yaml` printed can be applied again.
pub fn strip(vm: &mut v1::Vm) {
    vm.status = None;
    if let Some(metadata) = &mut vm.metadata {
        metadata.uid.clear();
        metadata.generation = 0;
        metadata.create_time = None;
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

/// Where the field at `path` stands; when it is absent, the nearest thing around it.
fn find(root: &Node, path: &str) -> Option<yaml::Mark> {
    let mut node = root;
    let mut mark = None;
    for step in path.split('.') {
        let (name, indices) = step
            .split_once('[')
            .map_or((step, None), |(name, rest)| (name, Some(rest)));
        let yaml::Value::Mapping(entries) = &node.value else {
            break;
        };
        let Some((key, value)) = entries.iter().find(|(key, _)| key.name == name) else {
            break;
        };
        mark = Some(key.mark);
        node = value;
        let index = indices.and_then(|rest| rest.trim_end_matches(']').parse::<usize>().ok());
        if let (Some(index), yaml::Value::Sequence(items)) = (index, &node.value) {
            let Some(item) = items.get(index) else { break };
            mark = Some(item.mark);
            node = item;
        }
    }
    mark
}
