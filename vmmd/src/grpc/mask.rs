//! The fields of a VM that a client wants to see.
//!
//! A VM is cut down in its encoded form, by the numbers of the fields: this way the mask knows of fields from the
//! descriptors of the API alone, and there is nothing to add here for a new one.

use std::{collections::BTreeMap, sync::LazyLock};

use prost::{
    DecodeError, Message,
    encoding::{DecodeContext, decode_key, decode_varint, encode_key, encode_varint, skip_field},
};
use prost_types::{DescriptorProto, FileDescriptorSet, field_descriptor_proto::Type};
use vmmd_api::v1::Vm;
use vmmd_host::{failure::Failure, text};
use vmmd_spec::Violations;

/// Most paths.
const MAX_PATHS: usize = 256;

/// Which fields.
#[derive(Clone, Debug, Default)]
pub struct Mask(Option<Kept>);

/// By the field's number: all of it, or only these of its fields.
#[derive(Clone, Debug, Default)]
struct Kept(BTreeMap<u32, Option<Kept>>);

/// Messages of the API by their full name, `.vmmd.v1.Vm`.
static MESSAGES: LazyLock<BTreeMap<String, DescriptorProto>> = LazyLock::new(|| {
    let files = FileDescriptorSet::decode(vmmd_api::DESCRIPTORS)
        .unwrap_or_default()
        .file;
    // Those of the well-known types are no messages in JSON.
    let own = files.into_iter().filter(|file| file.package() == "vmmd.v1");
    let messages = own.flat_map(|file| {
        let package = format!(".{}", file.package());
        let named = move |message: DescriptorProto| (format!("{package}.{}", message.name()), message);
        file.message_type.into_iter().map(named)
    });
    messages.collect()
});

impl Mask {
    /// Mask of a request's paths; all fields without paths. The mask always includes the name.
    pub fn new(paths: &[String]) -> Result<Self, Failure> {
        if paths.is_empty() {
            return Ok(Self(None));
        }
        if paths.len() > MAX_PATHS {
            return Err(Failure::field(
                "fields",
                format_args!("has more than {MAX_PATHS} paths"),
            ));
        }
        let mut kept = Kept::default();
        let mut found = Violations::default();
        for (index, path) in paths.iter().enumerate() {
            if !kept.add(".vmmd.v1.Vm", path) {
                let problem = format_args!(
                    "a VM has no field \"{}\": give paths as in its JSON form, such as \"status.phase\"",
                    text::brief(path)
                );
                found.add(format!("fields[{index}]"), problem);
            }
        }
        kept.add(".vmmd.v1.Vm", "metadata.name");
        Ok(Self(Some(found.or(kept)?)))
    }

    /// The VM with these fields only.
    pub fn apply(&self, vm: Vm) -> Vm {
        let Some(kept) = &self.0 else { return vm };
        let mut cut = Vec::new();
        let result = kept.cut(&vm.encode_to_vec(), &mut cut);
        // It was encoded a moment ago.
        result
            .and_then(|()| Vm::decode(cut.as_slice()))
            .unwrap_or_default()
    }
}

impl Kept {
    /// Adds a path; false when there is no such field.
    fn add(&mut self, message: &str, path: &str) -> bool {
        let (first, rest) = match path.split_once('.') {
            Some((first, rest)) => (first, Some(rest)),
            None => (path, None),
        };
        let fields = MESSAGES.get(message).map_or(&[][..], |message| &message.field);
        let Some(field) = fields.iter().find(|field| field.json_name() == first) else {
            return false;
        };
        let Ok(number) = u32::try_from(field.number()) else {
            return false;
        };
        let Some(rest) = rest else {
            self.0.insert(number, None);
            return true;
        };
        // Maps and the well-known types are not among the messages.
        if field.r#type() != Type::Message || !MESSAGES.contains_key(field.type_name()) {
            return false;
        }
        match self.0.entry(number).or_insert_with(|| Some(Self::default())) {
            Some(inner) => inner.add(field.type_name(), rest),
            // All of it already, if there is such a field.
            None => Self::default().add(field.type_name(), rest),
        }
    }

    fn cut(&self, mut bytes: &[u8], out: &mut Vec<u8>) -> Result<(), DecodeError> {
        while !bytes.is_empty() {
            let start = bytes;
            let (number, wire) = decode_key(&mut bytes)?;
            let mut value = bytes;
            skip_field(wire, number, &mut bytes, DecodeContext::default())?;
            match self.0.get(&number) {
                None => {}
                Some(None) => out.extend(start.iter().take(start.len() - bytes.len())),
                Some(Some(inner)) => {
                    decode_varint(&mut value)?;
                    let content = value.get(..value.len() - bytes.len()).unwrap_or_default();
                    let mut cut = Vec::new();
                    inner.cut(content, &mut cut)?;
                    encode_key(number, wire, out);
                    encode_varint(cut.len() as u64, out);
                    out.append(&mut cut);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use vmmd_api::v1::{CpuSpec, DiskSpec, ObjectMetadata, VmPhase, VmSpec, VmStatus};

    use super::*;

    fn vm() -> Vm {
        let disk = |name: &str| DiskSpec {
            name: name.into(),
            source: Some(vmmd_api::v1::disk_spec::Source::Path("/x".into())),
            ..Default::default()
        };
        Vm {
            metadata: Some(ObjectMetadata {
                name: "a".into(),
                uid: "u".into(),
                labels: [("k".into(), "v".into())].into(),
                create_time: vmmd_host::text::timestamp(5),
                ..Default::default()
            }),
            spec: Some(VmSpec {
                cpu: Some(CpuSpec {
                    cores: 2,
                    core_fraction_percent: 50,
                    ..Default::default()
                }),
                disks: vec![disk("root"), disk("data")],
                ..Default::default()
            }),
            status: Some(VmStatus {
                phase: VmPhase::Running.into(),
                reason: "Running".into(),
                ..Default::default()
            }),
        }
    }

    fn cut(paths: &[&str]) -> Vm {
        let paths: Vec<_> = paths.iter().map(|path| (*path).to_owned()).collect();
        Mask::new(&paths).unwrap().apply(vm())
    }

    #[test]
    fn only_what_is_asked_for_is_left_and_the_name() {
        assert_eq!(cut(&[]), vm());
        let masked = cut(&["status.phase", "spec.disks.name", "spec.cpu.coreFractionPercent"]);
        let full = vm();
        let spec = masked.spec.unwrap();
        let names: Vec<_> = spec
            .disks
            .iter()
            .map(|disk| (disk.name.as_str(), disk.path()))
            .collect();
        assert_eq!(names, [("root", ""), ("data", "")]);
        let cpu = spec.cpu.unwrap();
        assert_eq!((cpu.cores, cpu.core_fraction_percent), (0, 50));
        let status = masked.status.unwrap();
        assert_eq!((status.phase(), status.reason.as_str()), (VmPhase::Running, ""));
        let metadata = masked.metadata.unwrap();
        assert_eq!(
            (
                metadata.name.as_str(),
                metadata.uid.as_str(),
                metadata.labels.len()
            ),
            ("a", "", 0)
        );
        let masked = cut(&["metadata", "metadata.labels", "spec.cpu.cores", "spec"]);
        assert_eq!((masked.metadata, masked.spec), (full.metadata, full.spec));
        assert_eq!(masked.status, None);
    }

    #[test]
    fn a_path_that_leads_nowhere_is_named() {
        for path in [
            "",
            ".",
            "phase",
            "status.",
            "status.phases",
            "status.phase.x",
            "status.last_exit",
            "metadata.labels.k",
            "metadata.createTime.seconds",
            "Status",
        ] {
            let failure = Mask::new(&["status".to_owned(), path.to_owned()]).unwrap_err();
            assert_eq!(failure.violations.0[0].field, "fields[1]", "{path}");
            assert!(
                failure.message.contains(&format!("\"{path}\"")),
                "{}",
                failure.message
            );
        }
    }
}
