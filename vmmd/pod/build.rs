//! Compiles the protocol file with protox (no protoc needed) into prost messages.

use std::{env, path::PathBuf};

const FILE: &str = "vmmd/pod/v1/launcher.proto";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../../proto");
    println!("cargo:rerun-if-changed={}", root.join(FILE).display());
    println!("cargo:rerun-if-changed=build.rs");
    let mut compiler = protox::Compiler::new([&root])?;
    compiler.open_file(FILE)?;
    prost_build::Config::new().compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}
