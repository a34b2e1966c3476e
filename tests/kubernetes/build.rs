//! Cargo names programs to the tests of their own package alone: `vmmd`, its mock `vmm` and its mock `vmm-image`, which the harness of the daemon's tests starts,
//! are named here. They are where this package is built to; `--workspace` builds them.

use std::{env, path::Path};

fn main() {
    let out = env::var("OUT_DIR").unwrap_or_default();
    // <target>/<profile>/build/<package>/out
    let programs = Path::new(&out).ancestors().nth(3).unwrap_or(Path::new(""));
    for program in ["vmmd", "mock-vmm", "mock-vmm-image", "vmmd-kube"] {
        let path = programs.join(program);
        println!("cargo::rustc-env=CARGO_BIN_EXE_{program}={}", path.display());
    }
    println!("cargo::rerun-if-changed=build.rs");
}
