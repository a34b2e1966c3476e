//! The unpacked packages of the guest kernels, and busybox.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::Kernel;

use crate::cache::{self, Inputs};
use crate::debian::{self, Release, Root};
use crate::paths;

/// Raise it to fetch newer versions of the packages.
const BUILDER_VERSION: u32 = 2;

/// A folder into which the packages of all guest kernels and of a static busybox are unpacked, not installed.
pub fn packages() -> Result<PathBuf> {
    let packages = [
        "linux-image-6.12-cloud-amd64",
        "linux-image-6.12-amd64",
        "linux-image-cloud-amd64",
        "linux-image-amd64",
        // Debian 11 has had its last update, so this name stays as it is.
        "linux-image-5.10.0-46-cloud-amd64",
        "busybox-static",
    ]
    .map(str::to_owned);
    let bullseye = paths::crate_dir().join("guest/bullseye.sources");
    let mut inputs = Inputs::new(BUILDER_VERSION);
    inputs
        .add("packages", packages.join(" ").as_bytes())
        .add_file(&debian::sources())?
        .add_file(&bullseye)?;
    let dir = cache::get_or_build("guest-packages", &inputs, |out| {
        let root = out.join("root");
        Root {
            release: Release::Bookworm,
            variant: "extract",
            packages: &packages,
            more_sources: Some(bullseye),
            overlay: None,
            customize: None,
        }
        .make(&root)?;
        // Packages come without the list of their modules' dependencies: it is made when they are configured.
        for kernel in Kernel::ALL {
            debian::depmod(&root, &version(&root, kernel)?)?;
        }
        Ok(())
    })?;
    Ok(dir.join("root"))
}

/// The release of a kernel in the folder of [`packages`], as in the name of its modules' folder.
pub fn version(packages: &Path, kernel: Kernel) -> Result<String> {
    let (series, cloud) = match kernel {
        Kernel::Cloud612 => ("6.12.", true),
        Kernel::Cloud61 => ("6.1.", true),
        Kernel::Generic61 => ("6.1.", false),
        Kernel::Generic612 => ("6.12.", false),
        Kernel::Cloud510 => ("5.10.", true),
    };
    fs::read_dir(packages.join("lib/modules"))
        .context("read the modules of the guest kernels")?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .find(|release| release.starts_with(series) && release.ends_with("-cloud-amd64") == cloud)
        .with_context(|| format!("no kernel for {} among the unpacked packages", kernel.name()))
}
