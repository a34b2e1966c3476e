//! Fields of the public messages, as text that a program can read message by message. Decoding all
//! descriptors for one manifest took a `vmm run` eight times as many instructions as the rest of
//! its start, and 1.2 MiB of memory.

use std::{collections::HashMap, fmt::Write as _};

use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet,
    field_descriptor_proto::{Label, Type},
};

type Enums<'a> = HashMap<String, &'a EnumDescriptorProto>;

/// Source of the function `fields_of`: a message's full name with a leading dot to the lines of its fields, whose form is in
/// `proto/spec/src/manifest/schema.rs`.
pub fn generate(set: &FileDescriptorSet) -> String {
    let files = set.file.iter().filter(|file| !file.package().starts_with("vmm."));
    let mut enums = Enums::new();
    for file in files.clone() {
        for item in &file.enum_type {
            enums.insert(format!(".{}.{}", file.package(), item.name()), item);
        }
    }
    let mut arms = String::new();
    for file in files {
        for item in &file.message_type {
            add(&mut arms, &format!(".{}", file.package()), item, &enums);
        }
    }
    format!(
        "/// The lines of a message's fields.\npub fn fields_of(message: &str) -> Option<&'static str> {{\n    Some(match message {{\n{arms}        _ => return None,\n    }})\n}}\n"
    )
}

fn add(arms: &mut String, scope: &str, item: &DescriptorProto, enums: &Enums<'_>) {
    let name = format!("{scope}.{}", item.name());
    let lines: String = item
        .field
        .iter()
        .map(|field| line(&name, item, field, enums))
        .collect();
    let _ = writeln!(arms, "        {name:?} => {lines:?},");
    for nested in &item.nested_type {
        add(arms, &name, nested, enums);
    }
}

/// JSON name, name, oneof or nothing, "list" or nothing, kind and what there is to say of it; a tab between each.
fn line(name: &str, item: &DescriptorProto, field: &FieldDescriptorProto, enums: &Enums<'_>) -> String {
    let map = item.nested_type.iter().any(|nested| {
        let entry = nested.options.as_ref().is_some_and(|options| options.map_entry());
        entry && field.type_name() == format!("{name}.{}", nested.name())
    });
    let oneof = field.oneof_index.filter(|_| !field.proto3_optional());
    let oneof = oneof.and_then(|index| item.oneof_decl.get(usize::try_from(index).ok()?));
    let oneof = oneof.map(|oneof| oneof.name()).unwrap_or_default();
    let list = if field.label() == Label::Repeated && !map {
        "list"
    } else {
        ""
    };
    let kind = if map {
        "labels".to_owned()
    } else {
        kind(field, enums)
    };
    format!(
        "{}\t{}\t{oneof}\t{list}\t{kind}\n",
        json_name(field),
        field.name()
    )
}

fn kind(field: &FieldDescriptorProto, enums: &Enums<'_>) -> String {
    let integer = |min: i128, max: i128| format!("integer\t{min}\t{max}");
    match field.r#type() {
        Type::Bool => "bool".to_owned(),
        Type::Double | Type::Float => "float".to_owned(),
        Type::Int32 | Type::Sint32 | Type::Sfixed32 => integer(i32::MIN.into(), i32::MAX.into()),
        Type::Uint32 | Type::Fixed32 => integer(0, u32::MAX.into()),
        Type::Int64 | Type::Sint64 | Type::Sfixed64 => integer(i64::MIN.into(), i64::MAX.into()),
        Type::Uint64 | Type::Fixed64 => integer(0, u64::MAX.into()),
        Type::String | Type::Bytes => "text".to_owned(),
        Type::Enum => {
            let values = enums
                .get(field.type_name())
                .map(|item| item.value.as_slice())
                .unwrap_or_default();
            let names: Vec<_> = values.iter().map(|value| value.name()).collect();
            format!("enum\t{}", names.join("\t"))
        }
        Type::Message | Type::Group => match field.type_name() {
            ".google.protobuf.Timestamp" | ".google.protobuf.Duration" => "text".to_owned(),
            ".google.protobuf.Value" => "json".to_owned(),
            name => format!("message\t{name}"),
        },
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
