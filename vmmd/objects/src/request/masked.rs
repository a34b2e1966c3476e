//! An update of an object by a mask of its fields.

use std::collections::BTreeMap;

use vmmd_api::{v1, well_known::FieldMask};
use vmmd_host::{failure::Failure, text};
use vmmd_spec::{Violations, metadata::Metadata};

const LABELS: &str = "metadata.labels";
const ANNOTATIONS: &str = "metadata.annotations";
/// Field of a mask.
pub const OWNER: &str = "metadata.owner";
/// Metadata fields that are mutable on every object.
const METADATA: [&str; 3] = [LABELS, ANNOTATIONS, OWNER];

/// Requested change of an object.
#[derive(Debug)]
pub struct Masked {
    /// The object's name, and the new values of those fields of its metadata that are in the mask.
    pub metadata: Metadata,
    mask: Vec<&'static str>,
}

impl Masked {
    /// Checks the mask and the metadata of a request about an `object` ("disk"). Besides its
    /// metadata, its fields `specs` ("`spec.size_bytes`") may be changed.
    ///
    /// # Errors
    ///
    /// INVALID_ARGUMENT: the mask is empty or has an immutable field, or the metadata is not valid.
    pub fn new(
        object: &str,
        specs: &[&'static str],
        metadata: Option<v1::ObjectMetadata>,
        mask: Option<&FieldMask>,
    ) -> Result<Self, Failure> {
        let mut found = Violations::default();
        let fields = [&METADATA[..], specs].concat();
        let paths = mask.map_or(&[][..], |mask| &mask.paths);
        let mut known = Vec::new();
        for (index, path) in paths.iter().enumerate() {
            match fields.iter().find(|field| *field == path) {
                Some(field) => known.push(*field),
                None => {
                    let problem = format_args!(
                        "\"{}\" can't be changed: give some of {}",
                        text::brief(path),
                        fields.join(", ")
                    );
                    found.add(format_args!("updateMask.paths[{index}]"), problem);
                }
            }
        }
        if paths.is_empty() {
            let problem = format_args!("must have at least one of {}", fields.join(", "));
            found.add("updateMask", problem);
        }
        // Fields beside the mask mean nothing, and are not looked at.
        let given = metadata.unwrap_or_default();
        let mut wanted = v1::ObjectMetadata {
            name: given.name,
            ..Default::default()
        };
        for field in &known {
            match *field {
                LABELS => wanted.labels.clone_from(&given.labels),
                ANNOTATIONS => wanted.annotations.clone_from(&given.annotations),
                OWNER => wanted.owner.clone_from(&given.owner),
                _ => {}
            }
        }
        match Metadata::new(&mut found, &format!("{object}.metadata"), &wanted) {
            Some(metadata) => Ok(found.or(Self {
                metadata,
                mask: known,
            })?),
            None => Err(found.into()),
        }
    }

    /// Whether a field is in the mask.
    pub fn has(&self, field: &str) -> bool {
        self.mask.contains(&field)
    }

    /// Applies the change to the metadata of a record.
    pub fn change(
        &self,
        labels: &mut BTreeMap<String, String>,
        annotations: &mut BTreeMap<String, String>,
        owner: &mut String,
    ) {
        if self.has(LABELS) {
            labels.clone_from(&self.metadata.labels);
        }
        if self.has(ANNOTATIONS) {
            annotations.clone_from(&self.metadata.annotations);
        }
        if self.has(OWNER) {
            owner.clone_from(&self.metadata.owner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: &str = "spec.size_bytes";

    fn parsed(paths: &[&str]) -> Result<Masked, Failure> {
        let metadata = v1::ObjectMetadata {
            name: "data".into(),
            labels: [("=".to_owned(), String::new())].into(),
            owner: "me".into(),
            ..Default::default()
        };
        let mask = FieldMask {
            paths: paths.iter().map(|path| (*path).to_owned()).collect(),
        };
        Masked::new("disk", &[SIZE], Some(metadata), Some(&mask))
    }

    #[test]
    fn what_is_not_in_the_mask_means_nothing() {
        let masked = parsed(&[SIZE]).unwrap();
        assert_eq!((masked.metadata.owner.as_str(), masked.has(SIZE)), ("", true));
        let masked = parsed(&[OWNER]).unwrap();
        assert_eq!((masked.metadata.owner.as_str(), masked.has(SIZE)), ("me", false));
        let mut owner = "you".to_owned();
        let mut labels = BTreeMap::from([("a".to_owned(), "b".to_owned())]);
        masked.change(&mut labels, &mut BTreeMap::new(), &mut owner);
        assert_eq!((owner.as_str(), labels.len()), ("me", 1));
    }

    #[test]
    fn what_cannot_be_changed_is_refused_by_field() {
        for (paths, field) in [
            (&[][..], "updateMask"),
            (&[OWNER, "spec.format"], "updateMask.paths[1]"),
            (&["spec"], "updateMask.paths[0]"),
            (&[LABELS], "disk.metadata.labels[\"=\"]"),
        ] {
            let failure = parsed(paths).unwrap_err();
            let fields: Vec<_> = failure.violations.0.iter().map(|wrong| &wrong.field).collect();
            assert_eq!(fields, [field]);
        }
    }
}
