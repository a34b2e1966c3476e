//! Invalid fields of a message.

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
