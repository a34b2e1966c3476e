//! What fields the API's messages have, read from their compiled descriptors.

use std::{collections::HashMap, sync::LazyLock};

use prost::Message as _;
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet,
    field_descriptor_proto::{Label, Type},
};

/// What a VM's manifest is (see [`with_kind`]).
pub const VM: &str = "VM manifest";
/// What a disk's manifest is.
pub const DISK: &str = "disk manifest";
/// Counters of a VM's disks.
pub const DISK_STATS: &str = ".vmmd.v1.GetVmDiskStatsResponse";
/// All counters of a VM.
pub const VM_STATS: &str = ".vmmd.v1.VmStats";
/// An operation.
pub const OPERATION: &str = ".vmmd.v1.Operation";
/// The node's description.
pub const NODE: &str = ".vmmd.v1.Node";
/// A snapshot.
pub const SNAPSHOT: &str = ".vmmd.v1.Snapshot";

static SCHEMA: LazyLock<Schema> = LazyLock::new(Schema::read);

/// The fields of a message by its full name with a leading dot; none of an unknown one.
pub fn message(name: &str) -> Option<&'static Message> {
    SCHEMA.messages.get(name)
}

/// A message's fields in the order of their declaration.
#[derive(Debug)]
pub struct Message {
    /// Its fields.
    pub fields: Vec<Field>,
}

impl Message {
    /// The field that a manifest calls `name`: its JSON name, or its name in the .proto file.
    pub fn field(&self, name: &str) -> Option<&Field> {
        self.fields
            .iter()
            .find(|field| field.json_name == name || field.proto_name == name)
    }
}

/// A field of a message.
#[derive(Clone, Debug)]
pub struct Field {
    /// `sizeBytes`.
    pub json_name: String,
    /// `size_bytes`.
    pub proto_name: String,
    /// What it holds.
    pub kind: Kind,
    /// It is a list.
    pub repeated: bool,
    /// The oneof it belongs to; of these a message has one.
    pub oneof: Option<String>,
}

impl Field {
    /// A count of bytes, which may have a suffix in a manifest: `size_bytes`, `bytes_per_second`.
    pub fn is_bytes(&self) -> bool {
        self.proto_name.split('_').any(|word| word == "bytes")
    }
}

/// What a field holds.
#[derive(Clone, Debug)]
pub enum Kind {
    /// Text, and what JSON writes as text: timestamps, durations, bytes.
    Text,
    /// `true` or `false`.
    Bool,
    /// A whole number within these bounds.
    Integer {
        /// Least value.
        min: i128,
        /// Greatest value.
        max: i128,
    },
    /// A number.
    Float,
    /// One of these names.
    Enum {
        /// Names as in the .proto file: `DISK_FORMAT_RAW`.
        names: Vec<String>,
        /// What they have in common: `DISK_FORMAT_`.
        prefix: String,
    },
    /// A mapping of text to text.
    Labels,
    /// Any JSON.
    Json,
    /// Another message, by its full name.
    Message(String),
}

#[derive(Default)]
struct Schema {
    messages: HashMap<String, Message>,
}

impl Schema {
    fn read() -> Self {
        // The descriptors are compiled in; if they could not be read every message would be unknown, and each
        // test of this crate would fail.
        let set = FileDescriptorSet::decode(crate::DESCRIPTORS).unwrap_or_default();
        let mut enums = HashMap::new();
        for file in &set.file {
            for item in &file.enum_type {
                enums.insert(format!(".{}.{}", file.package(), item.name()), item);
            }
        }
        let mut schema = Self::default();
        for file in &set.file {
            for item in &file.message_type {
                schema.add(&format!(".{}", file.package()), item, &enums);
            }
        }
        for (name, of) in [(VM, ".vmmd.v1.Vm"), (DISK, ".vmmd.v1.Disk")] {
            let manifest = with_kind(&schema, of);
            schema.messages.insert(name.to_owned(), manifest);
        }
        schema
    }

    fn add(&mut self, scope: &str, item: &DescriptorProto, enums: &HashMap<String, &EnumDescriptorProto>) {
        let name = format!("{scope}.{}", item.name());
        let is_map = |field: &FieldDescriptorProto| {
            item.nested_type.iter().any(|nested| {
                let entry = nested.options.as_ref().is_some_and(|options| options.map_entry());
                entry && field.type_name() == format!("{name}.{}", nested.name())
            })
        };
        let fields = item.field.iter().map(|field| {
            let map = is_map(field);
            let oneof = field
                .oneof_index
                .and_then(|index| item.oneof_decl.get(usize::try_from(index).ok()?));
            Field {
                json_name: json_name(field),
                proto_name: field.name().to_owned(),
                kind: if map { Kind::Labels } else { kind(field, enums) },
                repeated: field.label() == Label::Repeated && !map,
                oneof: oneof
                    .filter(|_| !field.proto3_optional())
                    .map(|oneof| oneof.name().to_owned()),
            }
        });
        let fields = fields.collect();
        for nested in &item.nested_type {
            self.add(&name, nested, enums);
        }
        self.messages.insert(name, Message { fields });
    }
}

/// A manifest is a message of the API with `apiVersion` and `kind` in front.
fn with_kind(schema: &Schema, message: &str) -> Message {
    let own = |name: &str| Field {
        json_name: name.to_owned(),
        proto_name: name.to_owned(),
        kind: Kind::Text,
        repeated: false,
        oneof: None,
    };
    let mut fields = vec![own("apiVersion"), own("kind")];
    let message = schema.messages.get(message);
    fields.extend(message.map(|message| message.fields.clone()).unwrap_or_default());
    Message { fields }
}

fn kind(field: &FieldDescriptorProto, enums: &HashMap<String, &EnumDescriptorProto>) -> Kind {
    match field.r#type() {
        Type::Bool => Kind::Bool,
        Type::Double | Type::Float => Kind::Float,
        Type::Int32 | Type::Sint32 | Type::Sfixed32 => integer(i32::MIN, i32::MAX),
        Type::Uint32 | Type::Fixed32 => integer(u32::MIN, u32::MAX),
        Type::Int64 | Type::Sint64 | Type::Sfixed64 => integer(i64::MIN, i64::MAX),
        Type::Uint64 | Type::Fixed64 => integer(u64::MIN, u64::MAX),
        Type::String | Type::Bytes => Kind::Text,
        Type::Enum => {
            let values = enums
                .get(field.type_name())
                .map(|item| item.value.as_slice())
                .unwrap_or_default();
            let names: Vec<_> = values.iter().map(|value| value.name().to_owned()).collect();
            let zero = names.first().and_then(|name| name.strip_suffix("UNSPECIFIED"));
            let prefix = zero.unwrap_or_default().to_owned();
            Kind::Enum { names, prefix }
        }
        Type::Message | Type::Group => match field.type_name() {
            ".google.protobuf.Timestamp" | ".google.protobuf.Duration" => Kind::Text,
            ".google.protobuf.Value" => Kind::Json,
            name => Kind::Message(name.to_owned()),
        },
    }
}

fn integer<T: Into<i128>>(min: T, max: T) -> Kind {
    Kind::Integer {
        min: min.into(),
        max: max.into(),
    }
}

/// The JSON name of a field: as the compiler wrote it, else lowerCamelCase of its name.
fn json_name(field: &FieldDescriptorProto) -> String {
    if let Some(name) = field.json_name.as_ref().filter(|name| !name.is_empty()) {
        return name.clone();
    }
    let mut upper = false;
    let mut name = String::new();
    for letter in field.name().chars() {
        match letter {
            '_' => upper = true,
            letter if upper => {
                name.extend(letter.to_uppercase());
                upper = false;
            }
            letter => name.push(letter),
        }
    }
    name
}
