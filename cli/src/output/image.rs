//! Images for people.

use vmmd_api::v1::{self, image_spec::Source};

use super::{
    Show, age,
    describe::{Lines, bytes, when},
    disk::pairs,
    vm::camel,
};
use crate::manifest::{quantity, schema};

impl Show for v1::Image {
    const SCHEMA: &'static str = schema::IMAGE;

    fn columns(wide: bool) -> Vec<&'static str> {
        let mut headers = vec!["NAME", "PHASE", "SIZE", "ALLOCATED", "USED BY", "AGE"];
        if wide {
            headers.extend(["LABELS", "SOURCE", "DIGEST"]);
        }
        headers
    }

    fn row(&self, wide: bool, now: jiff::Timestamp) -> Vec<String> {
        let metadata = self.metadata.clone().unwrap_or_default();
        let status = self.status.clone().unwrap_or_default();
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
            row.extend([pairs(&metadata.labels, ","), source(self), status.digest]);
        }
        row
    }

    fn describe(&self, now: jiff::Timestamp) -> String {
        let status = self.status.clone().unwrap_or_default();
        let mut text = Lines::default();
        text.metadata(self.metadata.as_ref(), false, now);
        text.put("Phase", &camel(status.phase().as_str_name(), "IMAGE_PHASE_"));
        text.put("Operation", &status.operation);
        text.messages(&status.conditions);
        text.put("Source", &source(self));
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
