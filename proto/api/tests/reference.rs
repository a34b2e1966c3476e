//! The reference of the public API in the book, generated from the protocol files and their
//! comments.
//!
//! `UPDATE_REFERENCE=1 cargo nextest run -p vmmd-api reference` regenerates it.

use std::{collections::BTreeMap, fmt::Write as _, fs};

use prost::Message as _;
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet,
    field_descriptor_proto::{Label, Type},
};
use vmmd_api::rule::{METHOD_RULES, MethodEffect, Role};

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/reference.md");
/// Files in which everything has a comment.
const COMMENTED: [&str; 4] = ["operation", "node", "event", "exit"];

const INTRODUCTION: &str = "# API reference

All methods and messages of `vmmd.v1`, made from the protocol files: a test keeps this page as they are.
[The API](api.md) says what they have in common. In JSON, names are in camelCase.
";

fn files() -> Vec<FileDescriptorProto> {
    let set = FileDescriptorSet::decode(vmmd_api::DESCRIPTORS).unwrap();
    let mut files = set.file;
    files.retain(|file| file.package() == "vmmd.v1");
    files.sort_by(|one, other| one.name().cmp(other.name()));
    files
}

/// The comments of a file, by the paths of the commented items.
struct Comments(BTreeMap<Vec<i32>, String>);

impl Comments {
    fn of(file: &FileDescriptorProto) -> Self {
        let places = file.source_code_info.iter().flat_map(|info| &info.location);
        let comments = places.filter_map(|place| {
            let lines = place.leading_comments.as_ref()?.lines();
            let words: Vec<_> = lines.map(str::trim).collect();
            Some((place.path.clone(), words.join("\n")))
        });
        Self(comments.collect())
    }

    /// With paragraphs.
    fn text(&self, path: &[i32]) -> String {
        let text = self.0.get(path).map_or("", String::as_str);
        let paragraphs = text.split("\n\n").map(|paragraph| paragraph.replace('\n', " "));
        escaped(&paragraphs.collect::<Vec<_>>().join("\n\n"))
    }

    /// In one line, for a table.
    fn cell(&self, path: &[i32]) -> String {
        self.text(path).replace("\n\n", " ").replace('|', "\\|")
    }
}

fn escaped(text: &str) -> String {
    text.trim().replace('<', "&lt;").replace('>', "&gt;")
}

/// A type as people write it; those of this API are linked.
fn named(full: &str) -> String {
    match full.strip_prefix(".vmmd.v1.") {
        Some(name) => format!("[{name}](#{})", name.to_lowercase().replace('.', "")),
        None => full.trim_start_matches('.').to_owned(),
    }
}

fn type_of(message: &DescriptorProto, field: &FieldDescriptorProto) -> String {
    let entry = message.nested_type.iter().find(|nested| {
        nested.options.as_ref().is_some_and(|options| options.map_entry())
            && field.type_name().ends_with(&format!(".{}", nested.name()))
    });
    if let Some([key, value]) = entry.map(|entry| entry.field.as_slice()) {
        return format!("map of {} to {}", type_of(message, key), type_of(message, value));
    }
    let one = match field.r#type() {
        Type::Message | Type::Enum => named(field.type_name()),
        scalar => scalar.as_str_name().trim_start_matches("TYPE_").to_lowercase(),
    };
    match (field.label(), field.proto3_optional()) {
        (Label::Repeated, _) => format!("repeated {one}"),
        (_, true) => format!("optional {one}"),
        _ => one,
    }
}

fn services(page: &mut String, file: &FileDescriptorProto, comments: &Comments) {
    for (index, service) in (0..).zip(&file.service) {
        let _ = writeln!(
            page,
            "\n## {}\n\n{}\n",
            service.name(),
            comments.text(&[6, index])
        );
        *page += "| method | request | answer | role | |\n|---|---|---|---|---|\n";
        for (number, method) in (0..).zip(&service.method) {
            let path = format!("vmmd.v1.{}/{}", service.name(), method.name());
            let rule = METHOD_RULES.iter().find(|rule| rule.method == path).unwrap();
            let stream =
                |streams, name: &str| format!("{}{}", if streams { "stream of " } else { "" }, named(name));
            let audited = match rule.effect {
                MethodEffect::Read => "",
                _ => " In the audit log.",
            };
            let role = |role: Role| role.as_str_name().trim_start_matches("ROLE_").to_lowercase();
            let mut roles = role(rule.role);
            if rule.masked_role != rule.role {
                let _ = write!(roles, "; {} by mask", role(rule.masked_role));
            }
            let _ = writeln!(
                page,
                "| `{}` | {} | {} | {roles} | {}{audited} |",
                method.name(),
                stream(method.client_streaming(), method.input_type()),
                stream(method.server_streaming(), method.output_type()),
                comments.cell(&[6, index, 2, number]),
            );
        }
    }
}

fn message(page: &mut String, message: &DescriptorProto, path: &[i32], comments: &Comments) {
    let _ = writeln!(page, "\n### {}\n", message.name());
    let text = comments.text(path);
    if !text.is_empty() {
        let _ = writeln!(page, "{text}\n");
    }
    if message.field.is_empty() {
        *page += "No fields.\n";
        return;
    }
    *page += "| field | number | type | |\n|---|---|---|---|\n";
    for (index, field) in (0..).zip(&message.field) {
        let group = field.oneof_index.filter(|_| !field.proto3_optional());
        let group = group.and_then(|index| message.oneof_decl.get(usize::try_from(index).ok()?));
        let group = group.map_or(String::new(), |group| format!("One of `{}`. ", group.name()));
        let _ = writeln!(
            page,
            "| `{}` | {} | {} | {group}{} |",
            field.name(),
            field.number(),
            type_of(message, field),
            comments.cell(&[path, &[2, index]].concat())
        );
    }
}

fn enumeration(page: &mut String, known: &EnumDescriptorProto, path: &[i32], comments: &Comments) {
    let _ = writeln!(page, "\n### {}\n", known.name());
    let text = comments.text(path);
    if !text.is_empty() {
        let _ = writeln!(page, "{text}\n");
    }
    *page += "| value | number | |\n|---|---|---|\n";
    for (index, value) in (0..).zip(&known.value) {
        let comment = comments.cell(&[path, &[2, index]].concat());
        let _ = writeln!(page, "| `{}` | {} | {comment} |", value.name(), value.number());
    }
}

fn reference() -> String {
    let mut page = INTRODUCTION.to_owned();
    let files = files();
    for file in &files {
        services(&mut page, file, &Comments::of(file));
    }
    page += "\n## Messages\n";
    for file in files.iter().filter(|file| !file.name().ends_with("rule.proto")) {
        let comments = Comments::of(file);
        for (index, of) in (0..).zip(&file.message_type) {
            message(&mut page, of, &[4, index], &comments);
        }
        for (index, of) in (0..).zip(&file.enum_type) {
            enumeration(&mut page, of, &[5, index], &comments);
        }
    }
    // No line ends with a space.
    page.lines()
        .map(|line| format!("{}\n", line.trim_end()))
        .collect()
}

#[test]
fn the_reference_in_the_book_is_that_of_the_protocol_files() {
    let page = reference();
    if std::env::var_os("UPDATE_REFERENCE").is_some() {
        fs::write(PAGE, &page).unwrap();
    }
    let there = fs::read_to_string(PAGE).unwrap_or_default();
    let differs = there
        .lines()
        .zip(page.lines())
        .find(|(there, made)| there != made);
    assert!(
        there == page,
        "docs/src/reference.md is of other protocol files; UPDATE_REFERENCE=1 writes it again: {differs:?}"
    );
}

#[test]
fn everything_in_these_files_has_a_comment() {
    for file in files() {
        let stem = file
            .name()
            .trim_start_matches("vmmd/v1/")
            .trim_end_matches(".proto");
        if !COMMENTED.contains(&stem) {
            continue;
        }
        let comments = Comments::of(&file);
        let has = |path: &[i32]| !comments.text(path).is_empty();
        for (index, service) in (0..).zip(&file.service) {
            for (number, method) in (0..).zip(&service.method) {
                assert!(has(&[6, index, 2, number]), "{}", method.name());
            }
        }
        for (index, message) in (0..).zip(&file.message_type) {
            for (number, field) in (0..).zip(&message.field) {
                assert!(has(&[4, index, 2, number]), "{}.{}", message.name(), field.name());
            }
        }
    }
}
