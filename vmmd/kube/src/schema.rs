//! The OpenAPI schema of vmmd's VM, from the descriptors of its API. With it, the API server
//! refuses invalid fields with their path.

use schemars::{Schema, SchemaGenerator};
use serde_json::{Map, Value, json};
use vmmd_spec::manifest::schema::{self, Field, Kind};

/// The message of a VM's spec.
const VM_SPEC: &str = ".vmmd.v1.VmSpec";

/// Of `spec.vm`.
pub fn vm_spec(_: &mut SchemaGenerator) -> Schema {
    let mut schema = message(VM_SPEC);
    schema["description"] = "The virtual machine as in the spec of vmmd's manifests.".into();
    schema["required"] = json!(["cpu", "memory"]);
    into_schema(schema)
}

/// Schema of a part of a pod, which the API server checks when the pod is created.
pub fn any_object(_: &mut SchemaGenerator) -> Schema {
    into_schema(open())
}

/// Schema of a list of such parts.
pub fn any_objects(_: &mut SchemaGenerator) -> Schema {
    into_schema(json!({"type": "array", "items": open()}))
}

/// Schema of a number of bytes, with a unit or without.
pub fn quantity(_: &mut SchemaGenerator) -> Schema {
    into_schema(json!({"x-kubernetes-int-or-string": true}))
}

/// Takes defaults away that are empty texts: a field that is left out reads as one anyway, and API servers of Kubernetes 1.20 that Debian's Go builds
/// refuse them.
pub fn without_empty_defaults(definition: &mut Value) {
    match definition {
        Value::Object(map) => {
            map.retain(|name, value| name != "default" || *value != "");
            map.values_mut().for_each(without_empty_defaults);
        }
        Value::Array(items) => items.iter_mut().for_each(without_empty_defaults),
        _ => {}
    }
}

fn open() -> Value {
    json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true})
}

fn into_schema(value: Value) -> Schema {
    match value {
        Value::Object(map) => map.into(),
        _ => Schema::default(),
    }
}

/// The API has no message that contains itself.
fn message(name: &str) -> Value {
    let fields = schema::message(name).map(|message| message.fields);
    let fields = fields.unwrap_or_default().into_iter();
    let properties: Map<_, _> = fields
        .map(|item| (item.json_name.to_owned(), field(&item)))
        .collect();
    json!({"type": "object", "properties": properties})
}

fn field(field: &Field) -> Value {
    let one = match &field.kind {
        Kind::Text => json!({"type": "string"}),
        Kind::Bool => json!({"type": "boolean"}),
        Kind::Integer { .. } if field.is_bytes() => json!({"x-kubernetes-int-or-string": true}),
        Kind::Integer { min, max } => integer(*min, *max),
        Kind::Float => json!({"type": "number"}),
        Kind::Enum { names, prefix } => {
            let known = names.iter().filter(|name| !name.ends_with("_UNSPECIFIED"));
            let short = known
                .clone()
                .map(|name| name.strip_prefix(prefix).unwrap_or(name).to_lowercase());
            let all: Vec<_> = short.chain(known.map(|name| (*name).to_owned())).collect();
            json!({"type": "string", "enum": all})
        }
        Kind::Labels => json!({"type": "object", "additionalProperties": {"type": "string"}}),
        Kind::Json => json!({"x-kubernetes-preserve-unknown-fields": true}),
        Kind::Message(name) => message(name),
    };
    if field.repeated {
        json!({"type": "array", "items": one})
    } else {
        one
    }
}

/// Bounds beyond 32 bits are left out: numbers of a schema are floating-point ones.
fn integer(min: i128, max: i128) -> Value {
    let mut schema = json!({"type": "integer", "format": "int64"});
    for (word, bound) in [("minimum", min), ("maximum", max)] {
        if let Ok(bound) = i64::try_from(bound)
            && bound.unsigned_abs() <= u64::from(u32::MAX)
        {
            schema[word] = bound.into();
        }
    }
    schema
}
