//! Later versions of the node's package, which are made from it in the node.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use super::{Node, PACKAGE, newest_package};

/// A command in the node: it installs the package that is named behind it, and keeps the node's configuration.
pub const INSTALL: &str = "DEBIAN_FRONTEND=noninteractive dpkg --force-confold --force-unsafe-io -i";

/// [`PACKAGE`] with the version `$VERSION`, below which the versions before are older ones.
const REPACK: &str = "cd /var/tmp && rm -rf repack && dpkg-deb -R $PACKAGE repack && \
    sed -i \"s/$(dpkg-deb -f $PACKAGE Version)/$VERSION/\" repack/DEBIAN/control repack/DEBIAN/preinst && \
    dpkg-deb -Znone -b repack /var/tmp/vmmd-$VERSION.deb >/dev/null && rm -rf repack";

/// A test's changes to the installed package. The drop installs the newest built package again,
/// independent of the test's result.
pub struct Packages<'node>(&'node Node, PathBuf);

impl<'node> Packages<'node> {
    /// Fails when no package was built.
    pub fn new(node: &'node Node) -> Result<Self> {
        let package = newest_package()?.context("no package was built")?;
        Ok(Self(node, package))
    }

    /// The installed version.
    pub fn version(&self) -> Result<String> {
        let version = self.0.try_sh("dpkg-query -W -f '${Version}' vmmd")?;
        Ok(version.trim().to_owned())
    }

    /// Upgrades to the same package with a higher version, as that of a later commit has: it differs behind the `+` only. Returns that version.
    pub fn upgrade(&self) -> Result<String> {
        let newer = format!("{}.later", self.version()?);
        self.0.try_sh(&format!(
            "PACKAGE={PACKAGE} VERSION={newer}; {{ {REPACK}; }} && {INSTALL} /var/tmp/vmmd-$VERSION.deb"
        ))?;
        let installed = self.version()?;
        ensure!(installed == newer, "{installed} is installed, not {newer}");
        Ok(newer)
    }
}

impl Drop for Packages<'_> {
    fn drop(&mut self) {
        let back = self.0.install(&self.1);
        let _ = self.0.ssh("rm -f /var/tmp/vmmd-*.deb");
        if let Err(error) = back
            && !std::thread::panicking()
        {
            panic!("the package is not back: {error:#}");
        }
    }
}
