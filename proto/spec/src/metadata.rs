//! The validated metadata of an object: its name and the data kept beside its spec.

use std::collections::BTreeMap;

use vmmd_api::v1;

use super::{Violations, name::Name};

/// Most labels of an object, and most annotations.
pub const MAX_PAIRS: usize = 64;
/// Longest key, label value and owner, in bytes.
pub const MAX_TEXT: usize = 253;
/// Most bytes of all annotations together.
pub const MAX_ANNOTATIONS: usize = 64 << 10;

/// Client-defined metadata of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// Unique on the node among the objects of its kind.
    pub name: Name,
    /// To select objects by.
    pub labels: BTreeMap<String, String>,
    /// For clients to keep.
    pub annotations: BTreeMap<String, String>,
    /// Owner of the object; empty if not set.
    pub owner: String,
}

impl Metadata {
    /// Checks `metadata` and records violations; `field` is its path. Ignores fields set by the
    /// daemon. `None` for an invalid name.
    pub fn new(found: &mut Violations, field: &str, metadata: &v1::ObjectMetadata) -> Option<Self> {
        labels(found, &format!("{field}.labels"), &metadata.labels);
        annotations(found, &format!("{field}.annotations"), &metadata.annotations);
        if !fits(&metadata.owner) {
            found.add(
                format_args!("{field}.owner"),
                format_args!("must be at most {MAX_TEXT} bytes without control characters"),
            );
        }
        let name = super::vm::name(found, &format!("{field}.name"), &metadata.name)?;
        Some(Self {
            name,
            labels: metadata.labels.clone(),
            annotations: metadata.annotations.clone(),
            owner: metadata.owner.clone(),
        })
    }
}

/// Notes which fields of `metadata` are set that only the daemon sets; `field` is its path.
pub fn refuse_given(found: &mut Violations, field: &str, metadata: &v1::ObjectMetadata) {
    for (name, set) in [
        ("uid", !metadata.uid.is_empty()),
        ("generation", metadata.generation != 0),
        ("createTime", metadata.create_time.is_some()),
    ] {
        if set {
            found.add(
                format_args!("{field}.{name}"),
                "is set by the daemon: leave it out",
            );
        }
    }
}

/// Records violations in labels; `field` is their path.
pub fn labels(found: &mut Violations, field: &str, labels: &BTreeMap<String, String>) {
    count(found, field, labels);
    for (key, value) in labels {
        if !is_key(key) || !fits(value) {
            found.add(
                format_args!("{field}[{key:?}]"),
                "key and value must be at most 253 bytes without control characters, the key not empty and without '='",
            );
        }
    }
}

fn annotations(found: &mut Violations, field: &str, annotations: &BTreeMap<String, String>) {
    count(found, field, annotations);
    for key in annotations.keys().filter(|key| !is_key(key)) {
        found.add(
            format_args!("{field}[{key:?}]"),
            "the key must be 1 to 253 bytes without control characters and '='",
        );
    }
    let bytes: usize = annotations
        .iter()
        .map(|(key, value)| key.len() + value.len())
        .sum();
    if bytes > MAX_ANNOTATIONS {
        let problem = format_args!("must be at most {MAX_ANNOTATIONS} bytes together, are {bytes}");
        found.add(field, problem);
    }
}

fn count(found: &mut Violations, field: &str, pairs: &BTreeMap<String, String>) {
    if pairs.len() > MAX_PAIRS {
        found.add(field, format_args!("at most {MAX_PAIRS}, are {}", pairs.len()));
    }
}

fn is_key(key: &str) -> bool {
    !key.is_empty() && !key.contains('=') && fits(key)
}

fn fits(text: &str) -> bool {
    text.len() <= MAX_TEXT && !text.chars().any(char::is_control)
}
