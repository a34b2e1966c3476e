//! Where things are on the build host.

use std::path::{Path, PathBuf};

/// The folder of this crate in the checkout: overlays, hook scripts and package lists are read from here.
pub fn crate_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The top of the checkout.
pub fn workspace_dir() -> &'static Path {
    crate_dir().parent().unwrap_or(crate_dir())
}

/// Cargo's target folder: `CARGO_TARGET_DIR`, or `target` at the top of the checkout.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => workspace_dir().join(dir),
        None => workspace_dir().join("target"),
    }
}

/// Everything that the test node keeps on the build host: images, keys, and a folder for each running node.
pub fn test_node_dir() -> PathBuf {
    target_dir().join("test-node")
}

/// The folder of the node called `name`: its console log, pid, and how to reach it.
pub fn run_dir(name: &str) -> PathBuf {
    test_node_dir().join("run").join(name)
}

/// Debian's package novnc: tests/setup-host.sh fetches it.
pub fn novnc() -> PathBuf {
    test_node_dir().join("novnc.deb")
}

/// vncdotool's command, a VNC client without a window: .ci/setup installs it.
pub fn vncdo() -> PathBuf {
    workspace_dir().join("target/tools/vncdotool/bin/vncdo")
}
