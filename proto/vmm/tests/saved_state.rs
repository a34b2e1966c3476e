//! The format of saved states, as it is written down in `golden/state.txt`: each kind with its version, and each field with its
//! number and type. A state that was saved by a released program has to be read by all later ones, so no change of the
//! format goes unnoticed.

use std::fmt::Write as _;

use prost::Message;
use prost_types::{
    DescriptorProto, FieldDescriptorProto, FileDescriptorSet,
    field_descriptor_proto::{Label, Type},
};

const PACKAGE: &str = "vmm.state.v1";

fn field(field: &FieldDescriptorProto) -> String {
    let label = match field.label() {
        Label::Repeated => "repeated ",
        _ if field.proto3_optional() => "optional ",
        _ => "",
    };
    let kind = match field.r#type() {
        Type::Message | Type::Enum => field
            .type_name()
            .rsplit('.')
            .next()
            .unwrap_or_default()
            .to_owned(),
        plain => format!("{plain:?}").to_lowercase(),
    };
    format!("  {} = {label}{kind} {}", field.number(), field.name())
}

fn message(text: &mut String, message: &DescriptorProto) {
    writeln!(text, "{}", message.name()).unwrap();
    for one in &message.field {
        writeln!(text, "{}", field(one)).unwrap();
    }
    assert!(message.nested_type.is_empty(), "{}", message.name());
}

fn format() -> String {
    let mut text = String::new();
    for (kind, version) in vmm_protocol::state::KINDS {
        writeln!(text, "kind {kind}, version {version}").unwrap();
    }
    let set = FileDescriptorSet::decode(vmm_protocol::DESCRIPTORS).unwrap();
    for file in set.file.iter().filter(|file| file.package() == PACKAGE) {
        for one in &file.message_type {
            text.push('\n');
            message(&mut text, one);
        }
    }
    text
}

#[test]
fn the_format_is_the_one_that_is_written_down() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/state.txt");
    if std::env::var_os("VMMD_WRITE_GOLDEN").is_some() {
        std::fs::write(path, format()).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap();
    assert!(
        format() == written,
        "the format of saved states changed. A new field whose zero means \"as before\" may join a version; every other change is a \
         new version in proto/vmm/src/state.rs, whose readers still take the older one. Then write golden/state.txt anew \
         with VMMD_WRITE_GOLDEN=1. The format is now:\n{}",
        format()
    );
}

#[test]
fn each_kind_is_there_once() {
    let mut kinds: Vec<&str> = vmm_protocol::state::KINDS.iter().map(|(kind, _)| *kind).collect();
    kinds.sort_unstable();
    let all = kinds.len();
    kinds.dedup();
    assert_eq!(kinds.len(), all);
}
