//! The private protocol between vmmd and a `vmm` process: messages ([`vmm`]), framing ([`wire`]), the description of a
//! machine in its validated form ([`machine`]), and the saved state of machines ([`state`]).
//!
//! This crate never opens a file or a socket of its own, and knows nothing of the public API. A reader starts at
//! `proto/vmm/v1/control.proto`.

pub mod convert;
pub mod machine;
pub mod state;
pub mod wire;

/// `vmm.v1`: the messages.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod vmm {
    include!(concat!(env!("OUT_DIR"), "/vmm.v1.rs"));
}

/// The compiled descriptors of the protocol's files (an encoded `FileDescriptorSet`).
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
