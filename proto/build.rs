//! Compiles the protocol files with protox (no protoc needed) into prost messages, their canonical JSON form
//! and, with the feature `grpc`, tonic clients and servers.

use std::{env, fs, path::PathBuf};

use prost::Message;

const FILES: &[&str] = &[
    "vmmd/v1/vm.proto",
    "vmmd/v1/disk.proto",
    "vmmd/v1/node.proto",
    "vmmd/v1/operation.proto",
    "vmmd/v1/event.proto",
    "vmm/v1/control.proto",
    "vmm/state/v1/devices.proto",
    "vmm/state/v1/machine.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    for file in FILES {
        println!("cargo:rerun-if-changed={}", root.join(file).display());
    }
    let descriptors = protox::compile(FILES, [&root])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;

    let grpc = env::var_os("CARGO_FEATURE_GRPC").is_some();
    let mut config = prost_build::Config::new();
    config.extern_path(".google.protobuf", "::pbjson_types");
    config.btree_map(["."]);
    tonic_prost_build::configure()
        .build_client(grpc)
        .build_server(grpc)
        .compile_well_known_types(true)
        .compile_fds_with_config(descriptors.clone(), config)?;
    pbjson_build::Builder::new()
        .register_descriptors(&descriptors.encode_to_vec())?
        .btree_map(["."])
        .build(&[".vmmd.v1"])?;
    Ok(())
}
