//! PCI: configuration space, functions, MSI-X, and the root bus.

pub mod msix;
