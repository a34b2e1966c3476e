//! The program `vmmd-netd` from outside.

use std::process::Command;

#[test]
fn netd_without_descriptors_fails_with_a_reason() {
    let netd = || Command::new(env!("CARGO_BIN_EXE_vmmd-netd"));
    let output = netd().arg("/nonexistent").output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{text}");
    assert!(text.contains("take the network's folder"), "{text}");
    let version = netd().arg("--version").output().unwrap();
    assert!(version.stdout.starts_with(b"vmmd-netd "), "{version:?}");
}
