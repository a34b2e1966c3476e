//! Compiles the protocol files with protox (no protoc needed) into prost messages, their canonical JSON form, the rules of
//! the public methods, the fields that manifests have and, with the feature `grpc`, tonic clients and servers.

mod comments;
mod rules;
mod schema;

use std::{env, fs, path::PathBuf};

const FILES: &[&str] = &[
    "google/rpc/status.proto",
    "vmmd/v1/rule.proto",
    "vmmd/v1/meta.proto",
    "vmmd/v1/exit.proto",
    "vmmd/v1/guest.proto",
    "vmmd/v1/probe.proto",
    "vmmd/v1/vm.proto",
    "vmmd/v1/disk.proto",
    "vmmd/v1/snapshot.proto",
    "vmmd/v1/network.proto",
    "vmmd/v1/migration.proto",
    "vmmd/v1/image.proto",
    "vmmd/v1/node.proto",
    "vmmd/v1/operation.proto",
    "vmmd/v1/event.proto",
    "vmmd/v1/pod.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let crate_folder = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let root = crate_folder.join("..");
    for file in FILES {
        println!("cargo:rerun-if-changed={}", root.join(file).display());
    }
    println!("cargo:rerun-if-changed={}", crate_folder.join("build").display());
    let mut compiler = protox::Compiler::new([&root])?;
    compiler.include_imports(true).include_source_info(true);
    compiler.open_files(FILES)?;
    comments::check(&compiler.descriptor_pool())?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    // As the compiler encodes them: a set of prost's types has lost the rules, which are extensions.
    let encoded = compiler.encode_file_descriptor_set();
    fs::write(out.join("descriptors.bin"), &encoded)?;
    fs::write(
        out.join("rules.rs"),
        rules::generate(&compiler.descriptor_pool())?,
    )?;

    fs::write(
        out.join("schema.rs"),
        schema::generate(&compiler.file_descriptor_set()),
    )?;

    let grpc = env::var_os("CARGO_FEATURE_GRPC").is_some();
    let mut config = prost_build::Config::new();
    config.extern_path(".google.protobuf", "::pbjson_types");
    config.extern_path(".google.rpc", "crate::rpc");
    config.btree_map(["."]);
    tonic_prost_build::configure()
        .build_client(grpc)
        .build_server(grpc)
        .compile_well_known_types(true)
        .compile_fds_with_config(compiler.file_descriptor_set(), config)?;
    pbjson_build::Builder::new()
        .register_descriptors(&encoded)?
        .btree_map(["."])
        .build(&[".vmmd.v1"])?;
    Ok(())
}
