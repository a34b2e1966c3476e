//! Fields of the API's messages: lines that the build generated from the descriptors, read message
//! by message.

/// A VM's manifest: the message with `apiVersion` and `kind` in front.
pub const VM: &str = "VM manifest";
/// A disk's manifest.
pub const DISK: &str = "disk manifest";
/// An image.
pub const IMAGE: &str = ".vmmd.v1.Image";
/// A network's manifest.
pub const NETWORK: &str = "network manifest";
/// The spec of a network.
pub const NETWORK_SPEC: &str = ".vmmd.v1.NetworkSpec";
/// Counters of a VM's disks.
pub const DISK_STATS: &str = ".vmmd.v1.GetVmDiskStatsResponse";
/// All counters of a VM.
pub const VM_STATS: &str = ".vmmd.v1.VmStats";
/// An operation.
pub const OPERATION: &str = ".vmmd.v1.Operation";
/// The node's description.
pub const NODE: &str = ".vmmd.v1.Node";
/// A guest.
pub const GUEST: &str = ".vmmd.v1.GuestInfo";
/// A snapshot.
pub const SNAPSHOT: &str = ".vmmd.v1.Snapshot";

/// The fields of a manifest that are before its message's: in the form that `fields_of` has.
const HEAD: &str = "apiVersion\tapiVersion\t\t\ttext\nkind\tkind\t\t\ttext\n";

/// The fields of a message by its full name with a leading dot, or of a manifest; none of an unknown one.
pub fn message(name: &str) -> Option<Message> {
    let (head, name) = match name {
        VM => (HEAD, ".vmmd.v1.Vm"),
        DISK => (HEAD, ".vmmd.v1.Disk"),
        NETWORK => (HEAD, ".vmmd.v1.Network"),
        name => ("", name),
    };
    let lines = head.lines().chain(vmmd_api::schema::fields_of(name)?.lines());
    Some(Message {
        fields: lines.filter_map(Field::read).collect(),
    })
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
    pub json_name: &'static str,
    /// `size_bytes`.
    pub proto_name: &'static str,
    /// What it holds.
    pub kind: Kind,
    /// It is a list.
    pub repeated: bool,
    /// The oneof it belongs to; of these a message has one.
    pub oneof: Option<&'static str>,
}

impl Field {
    /// Of a line: JSON name, name, oneof or nothing, "list" or nothing, kind and what there is to say of it, a tab between each.
    fn read(line: &'static str) -> Option<Self> {
        let mut words = line.split('\t');
        let (json_name, proto_name) = (words.next()?, words.next()?);
        let oneof = Some(words.next()?).filter(|oneof| !oneof.is_empty());
        let repeated = words.next()? == "list";
        Some(Self {
            json_name,
            proto_name,
            kind: Kind::read(words.next()?, words)?,
            repeated,
            oneof,
        })
    }

    /// A count of bytes, which may have a suffix in a manifest: `size_bytes`, `bytes_per_second`.
    pub fn is_bytes(&self) -> bool {
        self.proto_name.split('_').any(|word| word == "bytes")
    }
}

/// Type of a field's value.
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
        names: Vec<&'static str>,
        /// Common prefix of the names: `DISK_FORMAT_`.
        prefix: &'static str,
    },
    /// A mapping of text to text.
    Labels,
    /// Any JSON.
    Json,
    /// Another message, by its full name.
    Message(&'static str),
}

impl Kind {
    fn read(kind: &str, mut more: std::str::Split<'static, char>) -> Option<Self> {
        Some(match kind {
            "text" => Self::Text,
            "bool" => Self::Bool,
            "integer" => Self::Integer {
                min: more.next()?.parse().ok()?,
                max: more.next()?.parse().ok()?,
            },
            "float" => Self::Float,
            "enum" => {
                let names: Vec<_> = more.collect();
                let zero = names.first().and_then(|name| name.strip_suffix("UNSPECIFIED"));
                let prefix = zero.unwrap_or_default();
                Self::Enum { names, prefix }
            }
            "labels" => Self::Labels,
            "json" => Self::Json,
            "message" => Self::Message(more.next()?),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use prost_types::{DescriptorProto, FileDescriptorSet};

    use super::*;

    fn check(scope: &str, item: &DescriptorProto) {
        let name = format!("{scope}.{}", item.name());
        let known = message(&name).unwrap_or_else(|| panic!("{name} is unknown"));
        let known: Vec<_> = known.fields.iter().map(|field| field.proto_name).collect();
        let declared: Vec<_> = item.field.iter().map(|field| field.name()).collect();
        assert_eq!(known, declared, "{name}");
        for nested in &item.nested_type {
            check(&name, nested);
        }
    }

    #[test]
    fn every_field_of_every_public_message_can_be_read() {
        let set = FileDescriptorSet::decode(vmmd_api::DESCRIPTORS).expect("descriptors");
        for file in &set.file {
            for item in file.message_type.iter().filter(|_| file.package() == "vmmd.v1") {
                check(".vmmd.v1", item);
            }
        }
    }

    #[test]
    fn a_manifest_begins_with_what_it_is() {
        for (manifest, of) in [
            (VM, ".vmmd.v1.Vm"),
            (DISK, ".vmmd.v1.Disk"),
            (NETWORK, ".vmmd.v1.Network"),
        ] {
            let fields = message(manifest).expect("a manifest").fields;
            let names: Vec<_> = fields.iter().map(|field| field.json_name).collect();
            let own: Vec<_> = message(of).expect("a message").fields;
            let own: Vec<_> = own.iter().map(|field| field.json_name).collect();
            assert_eq!(names[..2], ["apiVersion", "kind"]);
            assert_eq!(names[2..], own[..]);
        }
    }
}
