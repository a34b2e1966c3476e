//! PCI: configuration space, functions, MSI and MSI-X, the root buses, and hot-plug.

pub mod config;
pub mod function;
pub mod hotplug;
pub mod msi;
pub mod msix;
pub mod root;

pub use config::{BarKind, ConfigSpace, Header, Window};
pub use function::{BarMemory, PciFunction, SharedFunction};
pub use hotplug::HotPlug;
pub use root::{Chipset, PciError, PciRoot, PciWindows};

#[cfg(test)]
mod tests;
