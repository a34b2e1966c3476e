//! From a YAML tree to the canonical JSON of a message, collecting every problem on the way.

use std::borrow::Borrow;

use serde_json::{Map, Value as Json};

use super::{
    quantity,
    schema::{self, Field, Kind, Message},
    yaml::{Key, Mark, Node, Value},
};

/// A problem in a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Position, if known.
    pub mark: Option<Mark>,
    /// Path of the field: `spec.disks[1].path`; empty for the document itself.
    pub path: String,
    /// Problem and a valid replacement.
    pub text: String,
}

/// Turns the document `node` into the JSON form of the message called `message`, as far as it can be understood; and all that can't.
pub fn partial(node: &Node, message: &str) -> (Json, Vec<Problem>) {
    let mut decoder = Decoder { problems: Vec::new() };
    let json = decoder.message(node, message, "");
    (json, decoder.problems)
}

struct Decoder {
    problems: Vec<Problem>,
}

impl Decoder {
    fn add(&mut self, mark: Mark, path: &str, text: impl Into<String>) {
        self.problems.push(Problem {
            mark: Some(mark),
            path: path.to_owned(),
            text: text.into(),
        });
    }

    fn message(&mut self, node: &Node, name: &str, path: &str) -> Json {
        let Some(message) = schema::message(name) else {
            self.add(node.mark, path, format!("{name} has no known fields"));
            return Json::Null;
        };
        let Value::Mapping(entries) = &node.value else {
            self.add(
                node.mark,
                path,
                format!("must be a mapping (`field: value`), is {}", node.kind()),
            );
            return Json::Null;
        };
        let mut given: Vec<(&Field, &Key)> = Vec::new();
        let mut json = Map::new();
        for (key, value) in entries {
            let path = join(path, &key.name);
            let Some(field) = message.field(&key.name) else {
                self.add(key.mark, &path, unknown(&key.name, &message));
                continue;
            };
            if let Some((_, first)) = given.iter().find(|(other, _)| std::ptr::eq(*other, field)) {
                self.add(
                    key.mark,
                    &path,
                    format!("given twice, first in line {}", first.mark.line),
                );
                continue;
            }
            if value.is_null() {
                continue;
            }
            let rival = given
                .iter()
                .find(|(other, _)| field.oneof.is_some() && other.oneof == field.oneof);
            if let Some((other, _)) = rival {
                let text = format!("can't be together with `{}`: give one of them", other.json_name);
                self.add(key.mark, &path, text);
            }
            given.push((field, key));
            match self.field(value, field, &path) {
                Json::Null => {}
                value => drop(json.insert(field.json_name.to_owned(), value)),
            }
        }
        Json::Object(json)
    }

    fn field(&mut self, node: &Node, field: &Field, path: &str) -> Json {
        if let Kind::Labels = field.kind {
            return self.labels(node, path);
        }
        if !field.repeated {
            return self.single(node, field, path);
        }
        let Value::Sequence(items) = &node.value else {
            self.add(
                node.mark,
                path,
                format!("must be a list (lines that begin with `- `), is {}", node.kind()),
            );
            return Json::Null;
        };
        let items = items.iter().enumerate();
        let decoded = items.map(|(index, item)| self.single(item, field, &format!("{path}[{index}]")));
        // An item that makes no sense keeps its place: paths of the others go by it.
        let whole = |item: Json| match (item, &field.kind) {
            (Json::Null, Kind::Message(_)) => Json::Object(Map::new()),
            (Json::Null, _) => Json::String(String::new()),
            (item, _) => item,
        };
        decoded.map(whole).collect()
    }

    fn single(&mut self, node: &Node, field: &Field, path: &str) -> Json {
        match &field.kind {
            Kind::Message(name) => return self.message(node, name, path),
            // Only fields set by the daemon have this type, and their values in a manifest are
            // dropped.
            Kind::Json => return Json::Null,
            _ => {}
        }
        let Value::Scalar { text, plain } = &node.value else {
            self.add(
                node.mark,
                path,
                format!("must be a single value, is {}", node.kind()),
            );
            return Json::Null;
        };
        match scalar(text, *plain, field) {
            Ok(json) => json,
            Err(problem) => {
                self.add(node.mark, path, problem);
                Json::Null
            }
        }
    }

    fn labels(&mut self, node: &Node, path: &str) -> Json {
        let Value::Mapping(entries) = &node.value else {
            self.add(
                node.mark,
                path,
                format!("must be a mapping (`key: value`), is {}", node.kind()),
            );
            return Json::Null;
        };
        let mut json = Map::new();
        for (key, value) in entries {
            let path = format!("{path}[{:?}]", key.name);
            let text = match &value.value {
                Value::Scalar { .. } if value.is_null() => String::new(),
                Value::Scalar { text, .. } => text.clone(),
                _ => {
                    self.add(
                        value.mark,
                        &path,
                        format!("must be a single value, is {}", value.kind()),
                    );
                    continue;
                }
            };
            if json.insert(key.name.clone(), Json::String(text)).is_some() {
                self.add(key.mark, &path, "given twice");
            }
        }
        Json::Object(json)
    }
}

fn scalar(text: &str, plain: bool, field: &Field) -> Result<Json, String> {
    match &field.kind {
        Kind::Text | Kind::Labels | Kind::Json | Kind::Message(_) => Ok(Json::String(text.to_owned())),
        Kind::Bool => match text {
            "true" if plain => Ok(Json::Bool(true)),
            "false" if plain => Ok(Json::Bool(false)),
            _ => Err(format!("must be true or false, is \"{text}\"")),
        },
        Kind::Integer { .. } if field.is_bytes() => {
            let bytes = quantity::bytes(text).map_err(|error| error.to_string())?;
            Ok(Json::String(bytes.to_string()))
        }
        Kind::Integer { min, max } => match text.parse::<i128>() {
            Ok(number) if (min..=max).contains(&&number) => Ok(Json::String(number.to_string())),
            Ok(_) => Err(format!("must be {min} to {max}, is {text}")),
            Err(_) => Err(format!("must be a whole number, is \"{text}\"")),
        },
        Kind::Float => {
            let number = text.parse().ok().and_then(serde_json::Number::from_f64);
            number
                .map(Json::Number)
                .ok_or_else(|| format!("must be a number, is \"{text}\""))
        }
        Kind::Enum { names, prefix } => enumerator(text, names, prefix),
    }
}

/// Takes a name in full (`DISK_FORMAT_RAW`) or without what all have in common (`raw`).
fn enumerator(text: &str, names: &[&str], prefix: &str) -> Result<Json, String> {
    let full = |name: &&&str| **name == text;
    let short = |name: &&&str| {
        name.strip_prefix(prefix)
            .is_some_and(|rest| rest.eq_ignore_ascii_case(text))
    };
    if let Some(name) = names.iter().find(full).or_else(|| names.iter().find(short)) {
        return Ok(Json::String((*name).to_owned()));
    }
    let known: Vec<_> = names
        .iter()
        .filter(|name| !name.ends_with("_UNSPECIFIED"))
        .map(|name| name.strip_prefix(prefix).unwrap_or(name).to_ascii_lowercase())
        .collect();
    Err(format!("must be {}, is \"{text}\"", alternatives(&known)))
}

/// `a`, `a or b`, `a, b or c`.
pub(super) fn alternatives<T: Borrow<str>>(words: &[T]) -> String {
    match words {
        [first @ .., last] if !first.is_empty() => format!("{} or {}", first.join(", "), last.borrow()),
        words => words.concat(),
    }
}

impl Problem {
    /// Whether this problem causes a problem of the field at `path`, which is `given` or not.
    pub(super) fn explains(&self, path: &str, given: bool) -> bool {
        let below = |inner: &str, outer: &str| {
            let rest = inner.strip_prefix(outer);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        let around = self.path.rsplit_once('.').map_or("", |(around, _)| around);
        let inside = around.is_empty() || below(path, around);
        let misspelt = !given && inside && self.text.starts_with(UNKNOWN);
        below(&self.path, path) || below(path, &self.path) || misspelt
    }
}

/// How the problem of a field begins that does not exist.
const UNKNOWN: &str = "unknown field";

fn unknown(name: &str, message: &Message) -> String {
    let known = || message.fields.iter().map(|field| field.json_name);
    let distance = |known: &str| strsim::damerau_levenshtein(&known.to_lowercase(), &name.to_lowercase());
    let near = |known: &&str| {
        let distance = distance(known);
        distance <= 2.max(known.len() / 3) && distance < known.len().max(name.len())
            || (name.len() > 2 && known.to_lowercase().contains(&name.to_lowercase()))
    };
    let mut nearest: Vec<_> = known().filter(near).collect();
    nearest.sort_by_key(|known| distance(known));
    let quoted = |names: &[&str]| {
        names
            .iter()
            .map(|name| format!("`{name}`"))
            .collect::<Vec<_>>()
            .join(", ")
    };
    match nearest.as_slice() {
        [] => format!(
            "unknown field; known here: {}",
            quoted(&known().collect::<Vec<_>>())
        ),
        [one] => format!("unknown field; did you mean `{one}`?"),
        [first, second, ..] => format!("unknown field; did you mean `{first}` or `{second}`?"),
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}
