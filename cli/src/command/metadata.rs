//! Metadata of objects that a command creates or changes.

use vmmd_api::v1;

use crate::args::Label;

/// Metadata with a name alone.
pub fn named(name: &str) -> Option<v1::ObjectMetadata> {
    labelled(name, &[])
}

/// Metadata with a name and labels.
pub fn labelled(name: &str, labels: &[Label]) -> Option<v1::ObjectMetadata> {
    let labels = labels
        .iter()
        .map(|label| (label.key.clone(), label.value.clone()));
    Some(v1::ObjectMetadata {
        name: name.to_owned(),
        labels: labels.collect(),
        ..Default::default()
    })
}
