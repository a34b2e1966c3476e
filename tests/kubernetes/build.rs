//! Cargo names programs to the tests of their own package alone: `vmmd`, its mock `vmm` and its mock `vmm-image`, which the harness of the daemon's tests starts,
//! are named here. They are where this package is built to; `--workspace` builds them.
//!
//! `cfg(control_plane)` says that `build.sh` has made the control plane. Tests that need it are ignored without it, so that a run counts them as
//! skipped.

use std::{env, fs, path::Path, process::Command};

fn main() {
    let out = env::var("OUT_DIR").unwrap_or_default();
    // <target>/<profile>/build/<package>/out
    let programs = Path::new(&out).ancestors().nth(3).unwrap_or(Path::new(""));
    for program in ["vmmd", "mock-vmm", "mock-vmm-image", "vmmd-kube"] {
        let path = programs.join(program);
        println!("cargo::rustc-env=CARGO_BIN_EXE_{program}={}", path.display());
    }
    println!("cargo::rustc-check-cfg=cfg(control_plane)");
    let target = programs.parent().unwrap_or(Path::new(""));
    let planes = target.join("kubernetes");
    // Cargo can watch a folder only if it exists.
    let _ = fs::create_dir_all(&planes);
    let mut find = Command::new("./build.sh");
    let found = find.arg("--find").env("CARGO_TARGET_DIR", target).output();
    if found.is_ok_and(|output| output.status.success()) {
        println!("cargo::rustc-cfg=control_plane");
    }
    for path in ["build.rs".into(), "build.sh".into(), planes.display().to_string()] {
        println!("cargo::rerun-if-changed={path}");
    }
}
