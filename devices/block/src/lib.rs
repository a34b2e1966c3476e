//! Disk images: raw files, block devices and qcow2, and the execution of requests on them.
//!
//! This crate owns the interface of images ([`image`]) and of their queues ([`engine`]), the two formats ([`raw`],
//! [`qcow2`]) with creation and check of qcow2, and the engines: an io_uring, and a pool of threads for operations
//! outside the ring. Data goes straight between the file and guest memory. It also has the way to an image's content beside its
//! queues ([`content`], [`changes`]), for a migration.
//!
//! An image is untrusted: no content may cause a panic, a hang, or an access outside of the file. The crate must never
//! know virtio, a bus or a hypervisor, never open a file by name, and never complete a FLUSH before the data is durable.
//!
//! A reader starts with [`Image`] and [`Engine`], then `uring` for a raw image and [`qcow2`] for the other format.

pub mod changes;
pub mod content;
mod direct;
pub mod engine;
mod geometry;
pub mod image;
mod pool;
pub mod qcow2;
pub mod raw;
mod target;
mod uring;

pub use changes::Changes;
pub use content::{Access, Content, Extent};
pub use engine::{Completion, Engine, Operation, Request};
pub use image::{Geometry, Image, OpenError};
pub use qcow2::{Backing, Qcow2Image};
pub use raw::RawImage;

/// Bytes in a sector, the unit of disk sizes and of virtio-blk's addresses (virtio 1.3, 5.2.4).
pub const SECTOR: u64 = 512;

#[cfg(test)]
mod tests;
