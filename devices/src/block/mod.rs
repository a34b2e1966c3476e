//! Disk images: their interface ([`image`]), and the execution of requests on them ([`engine`]).

mod cached;
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
