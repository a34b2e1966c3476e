//! Changes of a VM by a mask: the fields that a request changes, the role that may change them, and
//! the resulting VM.
//!
//! Paths are followed, and fields set, by the descriptors of the API: a new field of the spec
//! requires no change here.

use std::sync::LazyLock;

use prost_reflect::{
    DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MapKey, MessageDescriptor, ReflectMessage, Value,
};
use vmmd_api::{DESCRIPTORS, rule::Role, v1};

use super::Violations;

/// Most paths of a mask.
const MAX_PATHS: usize = 256;
/// Most letters of a wrong path that are repeated.
const MAX_SHOWN: usize = 100;
/// Fields of a VM's metadata that clients may change.
const METADATA: [&str; 3] = ["labels", "annotations", "owner"];

/// The fields of a VM that a request changes. At least one.
#[derive(Clone, Debug)]
pub struct UpdateMask(Vec<Path>);

/// Reason why a mask cannot be applied.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A path leads through an item that the VM does not have.
    #[error("the VM has no {} \"{item}\": {}", what(list), listed(there))]
    NotThere {
        /// Name of the list, as in the protocol files.
        list: String,
        /// Name of the item.
        item: String,
        /// Names of the existing items.
        there: Vec<String>,
    },
    /// A path leads through an item that the request does not have.
    #[error("has no item \"{item}\", which the mask names in \"{path}\"")]
    NotGiven {
        /// Name of the list, as in JSON.
        list: String,
        /// Name of the item.
        item: String,
        /// The path.
        path: String,
    },
    /// The descriptors and the messages are not of one make.
    #[error("the VM's message can't be read by its descriptors: {0}")]
    Descriptors(String),
}

fn what(list: &str) -> &str {
    match list {
        "disks" => "disk",
        "rate_groups" => "rate group",
        "nics" => "NIC",
        other => other,
    }
}

fn listed(names: &[String]) -> String {
    match names {
        [] => "it has none".to_owned(),
        names => format!("it has {}", names.join(", ")),
    }
}

/// The way from the VM to a field. At least one step.
#[derive(Clone, Debug)]
struct Path {
    text: String,
    steps: Vec<Step>,
}

#[derive(Clone, Debug)]
enum Step {
    /// Into a field of a message.
    Field(FieldDescriptor),
    /// Into the item of a list that has this name, or of a map that has this key.
    Item(String),
}

static POOL: LazyLock<DescriptorPool> =
    LazyLock::new(|| DescriptorPool::decode(DESCRIPTORS).unwrap_or_default());

/// The descriptor of a VM; there always is one.
fn of_vm() -> Option<MessageDescriptor> {
    POOL.get_message_by_name("vmmd.v1.Vm")
}

impl UpdateMask {
    /// Creates a mask from the paths of a request. `field` is the name of the mask in violations.
    ///
    /// # Errors
    ///
    /// All paths that do not exist, or that clients may not change.
    pub fn new(field: &str, paths: &[String]) -> Result<Self, Violations> {
        let mut found = Violations::default();
        if paths.is_empty() {
            found.add(
                field,
                "names no field: leave out the mask to give the whole VM, or name the fields to change",
            );
        }
        if paths.len() > MAX_PATHS {
            found.add(field, format_args!("has more than {MAX_PATHS} paths"));
        }
        let mut parsed = Vec::new();
        for (index, path) in paths.iter().take(MAX_PATHS).enumerate() {
            match of_vm().ok_or_else(String::new).and_then(|vm| steps(&vm, path)) {
                Ok(steps) => parsed.push(Path {
                    text: path.clone(),
                    steps,
                }),
                Err(problem) => found.add(format_args!("{field}.paths[{index}]"), problem),
            }
        }
        found.or(Self(parsed))
    }

    /// The least role that may change all of these fields (`update_role`).
    pub fn role(&self) -> Role {
        let roles = self.0.iter().map(Path::role);
        roles.max_by_key(|role| *role as i32).unwrap_or(Role::Admin)
    }

    /// Returns `present` with the fields of `wanted` that the mask names.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn apply(&self, present: &v1::Vm, wanted: &v1::Vm) -> Result<v1::Vm, Error> {
        let (mut target, wanted) = (dynamic(present)?, dynamic(wanted)?);
        for path in &self.0 {
            put(&mut target, Some(&wanted), &path.steps, &path.text)?;
        }
        target
            .transcode_to()
            .map_err(|error| Error::Descriptors(error.to_string()))
    }
}

impl Path {
    fn role(&self) -> Role {
        let Some(option) = POOL.get_extension_by_name("vmmd.v1.update_role") else {
            return Role::Admin;
        };
        let fields = self.steps.iter().filter_map(|step| match step {
            Step::Field(field) => Some(field),
            Step::Item(_) => None,
        });
        let mut roles = fields.filter_map(|field| {
            let options = field.options();
            let number = options.get_extension(&option).as_enum_number()?;
            Role::try_from(number)
                .ok()
                .filter(|role| *role != Role::Unspecified)
        });
        roles.next().unwrap_or(Role::Admin)
    }
}

fn dynamic(vm: &v1::Vm) -> Result<DynamicMessage, Error> {
    let descriptor = of_vm().ok_or_else(|| Error::Descriptors("there is none of it".to_owned()))?;
    let mut message = DynamicMessage::new(descriptor);
    let read = message.transcode_from(vm);
    read.map_err(|error| Error::Descriptors(error.to_string()))?;
    Ok(message)
}

/// Returns the steps of a path, or the reason why the path is invalid.
fn steps(vm: &MessageDescriptor, path: &str) -> Result<Vec<Step>, String> {
    let nowhere = || {
        format!(
            "a VM has no field {:?}: give paths such as \"spec.cpu.cores\" and \"spec.disks[data].rate_limit\"",
            path.chars().take(MAX_SHOWN).collect::<String>()
        )
    };
    let (mut steps, mut message, mut rest) = (Vec::new(), Some(vm.clone()), path);
    while let Some(of) = message.take() {
        let end = rest.find(['.', '[']).unwrap_or(rest.len());
        let (name, behind) = rest.split_at(end);
        let field = of
            .fields()
            .find(|field| field.name() == name || field.json_name() == name);
        let field = field.ok_or_else(nowhere)?;
        steps.push(Step::Field(field.clone()));
        rest = behind;
        let inner = match field.kind() {
            // The well-known types are values.
            Kind::Message(inner) if inner.package_name() == of.package_name() => Some(inner),
            _ => None,
        };
        if let Some(item) = rest.strip_prefix('[') {
            // The key of a map may have any letter.
            let end = match field.is_map() {
                true => item.strip_suffix(']').map(str::len),
                false => item.find(']'),
            };
            let named = field.is_map() || is_named(&field);
            let end = end.filter(|end| *end > 0 && named).ok_or_else(nowhere)?;
            let (name, behind) = item.split_at(end);
            steps.push(Step::Item(name.to_owned()));
            rest = behind.get(1..).unwrap_or_default();
        } else if field.is_list() && !rest.is_empty() {
            return Err(nowhere());
        }
        match rest.strip_prefix('.') {
            Some(behind) if !field.is_map() => (message, rest) = (inner, behind),
            None if rest.is_empty() => {
                check_changeable(&steps)?;
                return Ok(steps);
            }
            _ => return Err(nowhere()),
        }
    }
    Err(nowhere())
}

/// Whether the items of a list have names.
fn is_named(field: &FieldDescriptor) -> bool {
    let Kind::Message(item) = field.kind() else {
        return false;
    };
    let name = item.get_field_by_name("name");
    field.is_list() && name.is_some_and(|name| name.kind() == Kind::String)
}

fn check_changeable(steps: &[Step]) -> Result<(), String> {
    let names: Vec<_> = steps
        .iter()
        .filter_map(|step| match step {
            Step::Field(field) => Some(field.name()),
            Step::Item(_) => None,
        })
        .collect();
    match names.as_slice() {
        ["spec", ..] => Ok(()),
        ["metadata", name, ..] if METADATA.contains(name) => Ok(()),
        _ => Err("can't be changed: of a VM only metadata.labels, metadata.annotations, metadata.owner and spec can".to_owned()),
    }
}

/// Sets the field at `steps` in `target` to its value in `wanted`; clears the field if `wanted`
/// does not set it.
fn put(
    target: &mut DynamicMessage,
    wanted: Option<&DynamicMessage>,
    steps: &[Step],
    path: &str,
) -> Result<(), Error> {
    let Some((Step::Field(field), rest)) = steps.split_first() else {
        return Ok(());
    };
    let value = wanted
        .filter(|wanted| wanted.has_field(field))
        .map(|wanted| wanted.get_field(field).into_owned());
    match rest {
        [] => {
            match value {
                Some(value) => target.set_field(field, value),
                None => target.clear_field(field),
            }
            Ok(())
        }
        [Step::Item(name), rest @ ..] if field.is_list() => {
            put_item(target, field, name, value.as_ref(), rest, path)
        }
        [Step::Item(key), ..] => {
            let key = MapKey::String(key.clone());
            let value = value.as_ref().and_then(|map| map.as_map()?.get(&key).cloned());
            if let Some(map) = target.get_field_mut(field).as_map_mut() {
                match value {
                    Some(value) => drop(map.insert(key, value)),
                    None => drop(map.remove(&key)),
                }
            }
            Ok(())
        }
        rest => {
            let was_there = target.has_field(field);
            if !was_there && value.is_none() {
                return Ok(());
            }
            let Some(inner) = target.get_field_mut(field).as_message_mut() else {
                return Ok(());
            };
            put(inner, value.as_ref().and_then(Value::as_message), rest, path)?;
            // An absent message that would be set empty stays absent.
            let says_nothing = *inner == DynamicMessage::new(inner.descriptor());
            if !was_there && says_nothing {
                target.clear_field(field);
            }
            Ok(())
        }
    }
}

/// Like `put`, for an item of a list or a field in the item.
fn put_item(
    target: &mut DynamicMessage,
    field: &FieldDescriptor,
    name: &str,
    wanted: Option<&Value>,
    rest: &[Step],
    path: &str,
) -> Result<(), Error> {
    let wanted = wanted.and_then(Value::as_list).unwrap_or_default();
    let new = wanted.iter().find(|item| name_of(item) == name);
    let Some(items) = target.get_field_mut(field).as_list_mut() else {
        return Ok(());
    };
    let position = items.iter().position(|item| name_of(item) == name);
    match (position, new, rest) {
        (Some(position), None, []) => drop(items.remove(position)),
        (None, None, []) => {}
        (Some(position), Some(new), []) => {
            if let Some(item) = items.get_mut(position) {
                item.clone_from(new);
            }
        }
        (None, Some(new), []) => items.push(new.clone()),
        (Some(position), Some(new), rest) => {
            if let Some(item) = items.get_mut(position).and_then(Value::as_message_mut) {
                return put(item, new.as_message(), rest, path);
            }
        }
        (Some(_), None, _) => {
            return Err(Error::NotGiven {
                list: field.json_name().to_owned(),
                item: name.to_owned(),
                path: path.to_owned(),
            });
        }
        (None, _, _) => {
            return Err(Error::NotThere {
                list: field.name().to_owned(),
                item: name.to_owned(),
                there: items.iter().map(name_of).collect(),
            });
        }
    }
    Ok(())
}

fn name_of(item: &Value) -> String {
    let name = item.as_message().and_then(|item| item.get_field_by_name("name"));
    name.and_then(|name| name.as_str().map(str::to_owned))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests;
