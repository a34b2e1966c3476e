//! Helpers of the tests and benchmarks that run the daemon, in this package and in others: a daemon in folders of its own, network
//! namespaces, a web server that fails as a test needs it, and a registry of OCI images.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::missing_errors_doc,
    clippy::missing_panics_doc,
    clippy::must_use_candidate,
    clippy::new_without_default,
    reason = "helpers of tests fail loudly, and are read beside the tests"
)]

// The daemon's tests include the harness as a file of their own.
extern crate self as vmmd_testing;

pub mod harness;
pub mod http;
pub mod namespace;
pub mod registry;

use std::path::PathBuf;

/// A program of the workspace. Cargo builds it beside this one: `<target>/<profile>/deps` has the running test, and the folder above it the programs.
pub fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folder = test.ancestors().nth(2).unwrap();
    let program = folder.join(name);
    assert!(
        program.exists(),
        "{} is missing: build the workspace",
        program.display()
    );
    program
}
