//! Compiles the protocol files with protox (no protoc needed) into prost messages.

use std::{env, fs, path::PathBuf};

const FILES: &[&str] = &[
    "vmm/v1/control.proto",
    "vmm/state/v1/devices.proto",
    "vmm/state/v1/machine.proto",
    "vmm/state/v1/snapshot.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("..");
    for file in FILES {
        println!("cargo:rerun-if-changed={}", root.join(file).display());
    }
    println!("cargo:rerun-if-changed=build.rs");
    let mut compiler = protox::Compiler::new([&root])?;
    compiler.include_imports(true).include_source_info(true);
    compiler.open_files(FILES)?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), compiler.encode_file_descriptor_set())?;
    prost_build::Config::new()
        .btree_map(["."])
        .compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}
