//! The public API `vmmd.v1`: its messages and services ([`v1`]), the rules of its methods ([`rule`]), its errors
//! ([`failure`], [`rpc`], [`violation`]), its times ([`time`]) and the fields of its messages as text ([`schema`]).
//!
//! This crate never validates a message and knows nothing of the protocol between vmmd and a `vmm`. A reader starts at the
//! files `proto/vmmd/v1/*.proto`, from which the build makes the code.

mod disk;
pub mod failure;
pub mod rpc;
pub mod rule;
pub mod time;
pub mod violation;

/// `vmmd.v1`: the public API.
#[allow(missing_docs, clippy::all, clippy::pedantic, unused_qualifications)]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/vmmd.v1.rs"));
    include!(concat!(env!("OUT_DIR"), "/vmmd.v1.serde.rs"));
}

/// Fields of the public messages as text, for manifests.
pub mod schema {
    include!(concat!(env!("OUT_DIR"), "/schema.rs"));
}

/// The compiled descriptors of the API's files (an encoded `FileDescriptorSet`), for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Well-known types as the generated code has them, with canonical JSON.
pub use pbjson_types as well_known;
