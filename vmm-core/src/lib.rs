//! The virtual machine monitor of vmmd.
