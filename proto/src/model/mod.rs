//! Validated forms of the wire types: code can act on such a value without further checks of its
//! shape. Each is created with `TryFrom` from its wire type, which reports *all* problems at once,
//! each with the path of the field in a manifest (`spec.disks[1].path`).
//!
//! Conditions that depend on the node (existence of a file, free memory) are checked at the place
//! of use.

pub mod balloon;
pub mod cloud_init;
pub mod cpu;
pub mod disk;
pub mod display;
pub mod firewall;
pub mod image;
pub mod keyboard;
pub mod machine;
#[cfg(feature = "reflect")]
pub mod mask;
pub mod metadata;
pub mod name;
pub mod network;
pub mod nic;
pub mod oci;
pub mod overhead;
pub mod pci;
pub mod policy;
pub mod resources;
pub mod share;
pub mod topology;
pub mod vm;

use std::fmt;

/// An invalid field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Path as a manifest has it: `spec.disks[1].path`.
    pub field: String,
    /// Problem and valid values: "must be 1 to 254, is 0".
    pub description: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.description)
    }
}

/// All that is wrong with a message; never empty when it is an error.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Violations(pub Vec<Violation>);

impl Violations {
    /// Notes a problem of `field`.
    pub fn add(&mut self, field: impl fmt::Display, description: impl fmt::Display) {
        self.0.push(Violation {
            field: field.to_string(),
            description: description.to_string(),
        });
    }

    /// `value` when nothing was noted.
    pub fn or<T>(self, value: T) -> Result<T, Self> {
        if self.0.is_empty() { Ok(value) } else { Err(self) }
    }
}

impl fmt::Display for Violations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, violation) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{violation}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Violations {}

#[cfg(test)]
mod tests;
