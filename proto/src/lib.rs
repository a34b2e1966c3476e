//! The public API of vmmd ([`v1`]), the private protocol between vmmd and a `vmm` process ([`vmm`]) with its
//! framing ([`wire`]), manifests (`manifest`), the validated forms of both ([`model`]), the rules of the API's methods ([`rule`]), the form of errors
//! ([`rpc`]), what RFB servers have in common ([`rfb`]), the saved state of machines ([`state`]), and which of two daemons may run a VM that is migrated ([`handover`]).

pub mod failure;
pub mod handover;
#[cfg(feature = "manifest")]
pub mod manifest;
pub mod model;
pub mod rfb;
pub mod rpc;
pub mod rule;
pub mod state;
pub mod wire;

/// `vmmd.v1`: the public API.
#[allow(missing_docs, clippy::all, clippy::pedantic, unused_qualifications)]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/vmmd.v1.rs"));
    include!(concat!(env!("OUT_DIR"), "/vmmd.v1.serde.rs"));
}

/// `vmm.v1`: the private protocol between vmmd and a `vmm` process.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod vmm {
    include!(concat!(env!("OUT_DIR"), "/vmm.v1.rs"));
}

/// The compiled descriptors of all protocol files (an encoded `FileDescriptorSet`), for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Well-known types as the generated code has them, with canonical JSON.
pub use pbjson_types as well_known;
