//! vmmd in the node: its Debian package, and newer binaries on top of it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use sha2::{Digest as _, Sha256};

use super::Node;
use crate::paths;

/// The programs of the package that a developer rebuilds, and where the package puts them.
const PROGRAMS: [&str; 3] = ["vmmd", "vmm", "vmmctl"];

/// The newest package that was built, if any: `vmmd_<version>_amd64.deb` in `target/deb`, or a development build's in `target/deb/dev`.
pub fn newest_package() -> Result<Option<PathBuf>> {
    let optimized = paths::target_dir().join("deb");
    let folders = [optimized.join("dev"), optimized];
    let entries = folders.into_iter().filter_map(|folder| fs::read_dir(folder).ok());
    let mut newest = None;
    for entry in entries.flatten() {
        let path = entry?.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if name.starts_with("vmmd_") && name.ends_with("_amd64.deb") {
            newest = newest.max(Some((fs::metadata(&path)?.modified()?, path)));
        }
    }
    Ok(newest.map(|(_, path)| path))
}

/// In the node: the package that was installed last.
pub const PACKAGE: &str = "/var/tmp/vmmd.deb";

/// In the node: the certificate with which screens are served, and its CA, as files.
pub const SCREENS: &str = "/etc/ssl/vmmd-screens";

impl Node {
    /// Installs a package and starts its service, or restarts the running service. The
    /// configuration is the package's, with additions for VMs with far more processors than the
    /// node has, and for screens. dpkg keeps the additions when it installs the same configuration
    /// again.
    pub fn install(&self, package: &Path) -> Result<()> {
        self.bring(package)?;
        self.try_sh(&format!(
            "SCREENS={SCREENS}
             VMMD_DOWNGRADE=yes dpkg --force-confnew --force-unsafe-io -i {PACKAGE} >/run/vmmd-install.log 2>&1 \
                 || {{ cat /run/vmmd-install.log >&2; exit 1; }}
             [ -e $SCREENS ] || /usr/lib/vmmd/vmmd init-certs --dir $SCREENS --server-name 127.0.0.1 >/dev/null || exit
             grep -q '^\\[overcommit\\]' /etc/vmmd/config.toml || cat >>/etc/vmmd/config.toml <<CONFIG

[overcommit]
cpu = 100.0

[screen]
vnc = '127.0.0.1:5900'
web = '127.0.0.1:6080'
certificate = '$SCREENS/server.crt'
key = '$SCREENS/server.key'
CONFIG
"
        ))
        .context("install vmmd's package in the node")?;
        self.restart_daemon()
    }

    /// Copies a package to [`PACKAGE`], unless it exists there. The copy takes ten seconds in an
    /// emulated node.
    fn bring(&self, package: &Path) -> Result<()> {
        let content = fs::read(package).with_context(|| format!("read {}", package.display()))?;
        let sum: String = Sha256::digest(content)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let there = format!("echo '{sum} {PACKAGE}' | sha256sum -c --status 2>/dev/null");
        if self.ssh(&there)?.success() {
            return Ok(());
        }
        self.copy_in(package, PACKAGE)
    }

    /// Copies the programs that exist in `dir` over the installed ones and restarts the service. Returns their names.
    pub fn install_programs(&self, dir: &Path) -> Result<Vec<&'static str>> {
        let mut copied = Vec::new();
        for program in PROGRAMS {
            let file = dir.join(program);
            if !file.is_file() {
                continue;
            }
            let installed = self
                .try_sh(&format!("dpkg -L vmmd | grep '/bin/{program}$\\|/libexec/.*/{program}$\\|/lib/.*/{program}$' | head -n 1"))
                .with_context(|| format!("find where vmmd's package has {program}"))?;
            ensure!(
                !installed.trim().is_empty(),
                "vmmd's package in the node has no {program}"
            );
            self.copy_in(&file, installed.trim())?;
            copied.push(program);
        }
        ensure!(
            !copied.is_empty(),
            "{} has none of vmmd, vmm, vmmctl",
            dir.display()
        );
        self.restart_daemon()?;
        Ok(copied)
    }

    /// Restarts the service and waits until systemd calls it started: with `Type=notify` it serves requests then.
    pub fn restart_daemon(&self) -> Result<()> {
        self.try_sh("systemctl daemon-reload && systemctl restart vmmd.service \
                 || { systemctl status --no-pager vmmd.service >&2; journalctl --no-pager -n 40 -u vmmd.service >&2; exit 1; }")
            .map(drop)
    }
}
