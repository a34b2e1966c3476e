//! Images for people.

use proto::v1::{self, image_spec::Source};

use super::{
    age,
    describe::{Lines, when},
    disk::pairs,
    table::Table,
    vm::camel,
};
use crate::manifest::quantity;

/// The table of the node's images; `wide` has more columns.
pub fn table(wide: bool) -> Table {
    let mut headers = vec!["NAME", "PHASE", "SIZE", "ALLOCATED", "USED BY", "AGE"];
    if wide {
        headers.extend(["LABELS", "SOURCE", "DIGEST"]);
    }
    Table::new(headers)
}

/// A row of [`table`].
pub fn row(image: &v1::Image, wide: bool, now: jiff::Timestamp) -> Vec<String> {
    let metadata = image.metadata.clone().unwrap_or_default();
    let status = image.status.clone().unwrap_or_default();
    let users = status.used_by_disks.len() + status.used_by_vms.len();
    let mut row = vec![
        metadata.name,
        camel(status.phase().as_str_name(), "IMAGE_PHASE_"),
        match status.virtual_size_bytes {
            0 => "-".to_owned(),
            bytes => quantity::show(bytes),
        },
        quantity::show(status.allocated_bytes),
        users.to_string(),
        age::since(metadata.create_time.as_ref(), now),
    ];
    if wide {
        row.extend([pairs(&metadata.labels, ","), source(image), status.digest]);
    }
    row
}

fn source(image: &v1::Image) -> String {
    match image.spec.as_ref().and_then(|spec| spec.source.clone()) {
        Some(Source::Url(url)) => url,
        Some(Source::Path(path)) => path,
        Some(Source::Oci(oci)) => format!("oci://{}", oci.reference),
        Some(Source::OciLayout(layout)) => match layout.reference.as_str() {
            "" => format!("oci-layout:{}", layout.path),
            digest if digest.starts_with("sha256:") => format!("oci-layout:{}@{digest}", layout.path),
            tag => format!("oci-layout:{}:{tag}", layout.path),
        },
        None => "upload".to_owned(),
    }
}

/// Everything about an image.
pub fn describe(image: &v1::Image, now: jiff::Timestamp) -> String {
    let metadata = image.metadata.clone().unwrap_or_default();
    let status = image.status.clone().unwrap_or_default();
    let bytes = |bytes: u64| format!("{} ({bytes} bytes)", quantity::show(bytes));
    let mut text = Lines::default();
    text.put("Name", &metadata.name);
    text.put("UID", &metadata.uid);
    text.put("Labels", &pairs(&metadata.labels, ", "));
    text.put("Annotations", &pairs(&metadata.annotations, ", "));
    text.put("Owner", &metadata.owner);
    text.put("Created", &when(metadata.create_time.as_ref(), now));
    text.put("Phase", &camel(status.phase().as_str_name(), "IMAGE_PHASE_"));
    text.put("Operation", &status.operation);
    for condition in status
        .conditions
        .iter()
        .filter(|condition| !condition.message.is_empty())
    {
        text.put(&condition.r#type, &condition.message);
    }
    text.put("Source", &source(image));
    text.put("Manifest", &status.source_manifest);
    let format = [status.source_format.as_str(), status.source_compression.as_str()];
    let format: Vec<_> = format.into_iter().filter(|word| !word.is_empty()).collect();
    text.put("Source format", &format.join(", "));
    if status.source_bytes > 0 {
        text.put("Source size", &bytes(status.source_bytes));
    }
    text.put("Source checksum", &status.source_checksum);
    // Not known before the import has ended.
    if status.virtual_size_bytes > 0 {
        text.put("Size", &bytes(status.virtual_size_bytes));
    }
    if status.logical_block_bytes > 512 {
        text.put("Logical block", &bytes(status.logical_block_bytes.into()));
    }
    text.put("Allocated", &bytes(status.allocated_bytes));
    text.put("Digest", &status.digest);
    text.put("Last used", &when(status.last_used_time.as_ref(), now));
    text.put("Disks", &status.used_by_disks.join(", "));
    text.put("VMs", &status.used_by_vms.join(", "));
    text.0
}
