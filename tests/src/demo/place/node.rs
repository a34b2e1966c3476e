//! Both daemons in a test node: the installed one, and one in a network namespace.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::{FAR, NEAR, logs, tcp_config};
use crate::demo::image;
use crate::node::{GUESTS_DIR, Node, NodeImage, PACKAGE, Size};
use crate::{debian, node};

/// The far daemon's folder in the node.
pub const FAR_FOLDER: &str = "/var/lib/vmmd-far";

const SIZE: Size = Size {
    cpus: 2,
    memory_mib: 4096,
};
/// Size of the file system with the image and the package. It is sparse.
const DISK_MIB: u64 = 512;

/// A node that was booted for the demonstration.
pub struct InNode {
    pub node: Node,
    /// The disk with the image and the package, which the node reads as long as it runs.
    _disk: TempDir,
}

impl InNode {
    /// Boots it, installs the package, and starts both daemons.
    pub fn start(package: &Path) -> Result<Self> {
        fs::create_dir_all(logs())?;
        let disk = tempfile::tempdir_in(logs()).context("make a folder for the node's disk")?;
        let node = Node::boot_with("demo", SIZE, true, || {
            let (image, guest) = images()?;
            let tree = disk.path().join("tree");
            fs::create_dir(&tree)?;
            for file in image::FILES {
                fs::copy(guest.join(file), tree.join(file))?;
            }
            fs::copy(package, tree.join("vmmd.deb"))
                .with_context(|| format!("copy {}", package.display()))?;
            let file = disk.path().join("disk.raw");
            debian::ext4_image(&tree, &file, "vmmd-guests", DISK_MIB)?;
            Ok((image, file))
        })?;
        let place = Self { node, _disk: disk };
        place
            .node
            .try_sh(&format!("cp {GUESTS_DIR}/vmmd.deb {PACKAGE}"))?;
        place.node.install(package)?;
        place.node.try_sh(&far()).context("start the far daemon")?;
        Ok(place)
    }
}

/// The images of the node and of the guest, built beside each other as far as they are not there yet.
pub fn images() -> Result<(NodeImage, PathBuf)> {
    node::image_and(image::get)
}

/// The script that joins the two daemons.
fn far() -> String {
    let tls = "/etc/vmmd/peers";
    let (near, far) = (
        tcp_config(tls, &format!("{NEAR}:7443")),
        tcp_config(tls, super::FAR_ADDRESS),
    );
    format!(
        "set -e; folder={FAR_FOLDER}; mkdir -p $folder/state $folder/run $folder/log
         ip netns add far
         ip link add far0 type veth peer name near0 netns far
         ip addr add {NEAR}/30 dev far0; ip link set far0 up
         ip -n far addr add {FAR}/30 dev near0; ip -n far link set near0 up; ip -n far link set lo up
         /usr/lib/vmmd/vmmd init-certs --dir {tls} --server-name {NEAR} --server-name {FAR} --client node=peer >/dev/null
         cat >>/etc/vmmd/config.toml <<'CONFIG'\n{near}CONFIG
         cat >$folder/vmmd.toml <<CONFIG
state_dir = '$folder/state'
run_dir = '$folder/run'
log_dir = '$folder/log'
[overcommit]
cpu = 100.0
[vm_uids]
first = 1800000000
count = 100
{far}CONFIG
         systemctl restart vmmd.service &
         systemd-run -q --collect --unit=vmmd-far -p Type=notify -p Delegate=yes -p KillMode=process \
             -p NetworkNamespacePath=/run/netns/far /usr/lib/vmmd/vmmd --config $folder/vmmd.toml
         wait $!"
    )
}
