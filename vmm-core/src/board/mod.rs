//! Platform v1: what the guest sees.

pub mod acpi;
