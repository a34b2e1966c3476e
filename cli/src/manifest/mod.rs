//! Manifests: VMs as YAML files.
//!
//! A manifest is the canonical JSON form of `vmmd.v1.Vm`, as YAML. Two things are easier than in canonical JSON:
//! fields in bytes take suffixes (`256Mi`), and enums take the short form of their names (`raw` for
//! `DISK_FORMAT_RAW`). All problems of a file are reported at once, each with its line.

pub mod decode;
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

/// A VM from a file, with all that is needed to point at its fields.
#[derive(Debug)]
pub struct Document {
    /// The VM, without what only the daemon sets.
    pub vm: v1::Vm,
    source: String,
    root: Node,
}

impl Document {
    /// The VM's name.
    pub fn name(&self) -> &str {
        self.vm.metadata.as_ref().map_or("", |metadata| &metadata.name)
    }

    /// Says of a failure which lines it is about.
    pub fn locate(&self, failure: Failure) -> Failure {
        let Failure { violations, .. } = &failure;
        if violations.is_empty() {
            return failure;
        }
        let problems = violations.iter().map(|(field, text)| Problem {
            mark: find(&self.root, field),
            path: field.clone(),
            text: text.clone(),
        });
        invalid(&self.source, &problems.collect::<Vec<_>>())
    }
}

/// Reads and checks the VMs in a file, or on standard input when it is `-`.
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

/// Reads and checks the VMs in a text; `source` is what messages call it.
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
            format!("{source} holds no VM: it is empty"),
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
    let json = match kind_problem(&root) {
        Some(problem) => return Err(vec![problem]),
        None => decode::decode(&root, schema::VM)?,
    };
    let problem = |text: String| {
        vec![Problem {
            mark: Some(root.mark),
            path: String::new(),
            text,
        }]
    };
    let mut vm: v1::Vm = serde_json::from_value(json).map_err(|error| problem(error.to_string()))?;
    strip(&mut vm);
    if let Err(violations) = Manifest::try_from(&vm) {
        let problems = violations.0.into_iter().map(|violation| Problem {
            mark: find(&root, &violation.field),
            path: violation.field,
            text: violation.description,
        });
        return Err(problems.collect());
    }
    Ok(Document {
        vm,
        source: source.to_owned(),
        root,
    })
}

/// A document that is no VM gets one message about that, not one for each of its fields.
fn kind_problem(root: &Node) -> Option<Problem> {
    let yaml::Value::Mapping(entries) = &root.value else {
        return None;
    };
    [("apiVersion", API_VERSION), ("kind", KIND)]
        .into_iter()
        .find_map(|(name, wanted)| {
            let entry = entries.iter().find(|(key, _)| key.name == name);
            let text = match entry {
                Some((_, node)) => match &node.value {
                    yaml::Value::Scalar { text, .. } if text == wanted => return None,
                    yaml::Value::Scalar { text, .. } => format!("must be {wanted}, is \"{text}\""),
                    _ => format!("must be {wanted}, is {}", node.kind()),
                },
                None => {
                    format!("missing: a manifest begins with `apiVersion: {API_VERSION}` and `kind: {KIND}`")
                }
            };
            let mark = entry.map_or(root.mark, |(_, node)| node.mark);
            Some(Problem {
                mark: Some(mark),
                path: name.to_owned(),
                text,
            })
        })
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
