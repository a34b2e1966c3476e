//! Messages as YAML and JSON for people: fields in the order of their declaration, whole numbers as numbers.

use serde::{
    Serialize, Serializer,
    ser::{SerializeMap as _, SerializeSeq as _},
};
use serde_json::Value as Json;
use vmmd_spec::manifest;

use super::schema::{self, Field, Kind as Type};
use crate::{
    client::Kind,
    failure::{Code, Failure},
};

/// A message as YAML; `name` is its full name as in [`schema`].
pub fn yaml<T: Serialize>(message: &T, name: &str) -> Result<String, Failure> {
    let json = json(message)?;
    let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
    serde_saphyr::to_string_with_options(
        &Ordered {
            json: &json,
            kind: Form::Message(name),
        },
        options,
    )
    .map_err(|error| Failure::new(Code::Other, format!("cannot write the answer as YAML: {error}")))
}

/// A message as canonical JSON.
pub fn json<T: Serialize>(message: &T) -> Result<Json, Failure> {
    serde_json::to_value(message)
        .map_err(|error| Failure::new(Code::Other, format!("cannot write the answer as JSON: {error}")))
}

/// An object as the JSON of its manifest.
pub fn manifest<K: Kind>(object: &K) -> Result<Json, Failure> {
    Ok(manifest::with_head(K::KIND, json(object)?))
}

/// Schema element of a piece of JSON.
#[derive(Clone, Copy)]
enum Form<'a> {
    Message(&'a str),
    Field(&'a Field),
    Item(&'a Field),
}

struct Ordered<'a> {
    json: &'a Json,
    kind: Form<'a>,
}

impl Serialize for Ordered<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match (self.kind, self.json) {
            (Form::Message(name), Json::Object(entries)) => {
                let fields = schema::message(name)
                    .map(|message| message.fields)
                    .unwrap_or_default();
                let mut map = serializer.serialize_map(Some(entries.len()))?;
                for field in &fields {
                    if let Some(json) = entries.get(field.json_name) {
                        map.serialize_entry(
                            field.json_name,
                            &Ordered {
                                json,
                                kind: Form::Field(field),
                            },
                        )?;
                    }
                }
                map.end()
            }
            (Form::Field(field), Json::Array(items)) => {
                let mut list = serializer.serialize_seq(Some(items.len()))?;
                for json in items {
                    list.serialize_element(&Ordered {
                        json,
                        kind: Form::Item(field),
                    })?;
                }
                list.end()
            }
            (Form::Field(field) | Form::Item(field), json) => match (&field.kind, json) {
                (Type::Message(name), json) => Ordered {
                    json,
                    kind: Form::Message(name),
                }
                .serialize(serializer),
                (Type::Integer { .. }, Json::String(text)) => match text.parse::<u64>() {
                    Ok(number) => serializer.serialize_u64(number),
                    Err(_) => text.serialize(serializer),
                },
                (_, json) => json.serialize(serializer),
            },
            (Form::Message(_), json) => json.serialize(serializer),
        }
    }
}
