//! A disk in a VM's spec.

use std::fmt;

use serde_json::{Value, json};

/// The formats of images that can be written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Byte for byte.
    Raw,
    /// QEMU's.
    Qcow2,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
        })
    }
}

/// A disk in a VM's spec.
#[derive(Clone, Debug)]
pub struct Disk(Value);

impl Disk {
    /// An image or a block device of the node.
    pub fn new(name: &str, format: Format, path: &str) -> Disk {
        Self::of(name, path, &format.to_string().to_uppercase())
    }

    /// An ISO image.
    pub fn iso(name: &str, path: &str) -> Disk {
        Self::of(name, path, "ISO")
    }

    fn of(name: &str, path: &str, format: &str) -> Disk {
        Disk(json!({"name": name, "path": path, "format": format!("DISK_FORMAT_{format}")}))
    }

    /// A disk of the DiskService.
    pub fn kept(name: &str, disk: &str) -> Disk {
        Disk(json!({"name": name, "disk": disk}))
    }

    /// Sets a field by its JSON name.
    pub fn with(mut self, field: &str, value: impl Into<Value>) -> Disk {
        self.0[field] = value.into();
        self
    }
}

impl From<Disk> for Value {
    fn from(disk: Disk) -> Value {
        disk.0
    }
}
