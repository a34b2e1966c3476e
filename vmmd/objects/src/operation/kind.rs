//! Types of operations.

/// Type of an operation: its action and its object. A new type needs a line here and a word in the
/// comment of `Operation.type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// A VM is started.
    VmStart,
    /// A VM is stopped.
    VmStop,
    /// A VM is stopped and started.
    VmRestart,
    /// A VM is deleted.
    VmDelete,
    /// A VM is moved to another node.
    VmMigrate,
    /// A disk is made.
    DiskCreate,
    /// A disk is made larger.
    DiskResize,
    /// A snapshot is taken.
    SnapshotCreate,
    /// A snapshot is made of an archive.
    SnapshotImport,
    /// An image is imported.
    ImageImport,
    /// The node is drained.
    NodeDrain,
}

impl Type {
    /// All of them.
    const ALL: [Self; 11] = [
        Self::VmStart,
        Self::VmStop,
        Self::VmRestart,
        Self::VmDelete,
        Self::VmMigrate,
        Self::DiskCreate,
        Self::DiskResize,
        Self::SnapshotCreate,
        Self::SnapshotImport,
        Self::ImageImport,
        Self::NodeDrain,
    ];

    /// As clients see it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::VmStart => "vm.start",
            Self::VmStop => "vm.stop",
            Self::VmRestart => "vm.restart",
            Self::VmDelete => "vm.delete",
            Self::VmMigrate => "vm.migrate",
            Self::DiskCreate => "disk.create",
            Self::DiskResize => "disk.resize",
            Self::SnapshotCreate => "snapshot.create",
            Self::SnapshotImport => "snapshot.import",
            Self::ImageImport => "image.import",
            Self::NodeDrain => "node.drain",
        }
    }

    /// The type with this name; `None` when a newer daemon has given it.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_type_is_named_in_the_protocol_file() {
        let file = include_str!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../proto/vmmd/v1/operation.proto"
        ));
        for known in Type::ALL {
            assert!(file.contains(&format!("\"{}\"", known.name())), "{known:?}");
            assert_eq!(Type::parse(known.name()), Some(known));
        }
        assert_eq!(Type::parse("vm.paint"), None);
    }
}
