//! PCI: configuration space, functions, MSI-X, and the root bus.

pub mod config;
pub mod function;
pub mod msix;
pub mod root;

pub use config::{BarKind, ConfigSpace, Header, Window};
pub use function::{PciFunction, SharedFunction};
pub use root::{PciError, PciRoot, PciWindows};

#[cfg(test)]
mod tests;
