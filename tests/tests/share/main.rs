//! Directories of the node that guests mount.

mod debian;
mod ends;
mod files;
mod outside;
mod saved;

use serde_json::{Value, json};
use vmmd_tests::node::Kernel;
use vmmd_tests::vm::{Vm, VmSpec};
use vmmd_tests::{Case, Node};

/// Owner of the shared directories.
const OWNER: &str = "1234:1235";

/// Folders of a test below /srv; removed with it.
struct Srv<'case> {
    node: &'case Node,
    path: String,
}

impl<'case> Srv<'case> {
    fn new(case: &'case Case, folders: &[&str]) -> Self {
        let srv = Srv {
            node: case.node(),
            path: format!("/srv/{}", case.name()),
        };
        // Mounts of a test are removed first.
        case.at_end(format!(
            "for at in $(grep -o ' {0}/[^ ]*' /proc/mounts | tac); do umount $at; done; rm -rf {0}",
            srv.path
        ));
        for folder in folders {
            srv.sh(&format!("mkdir -p {folder} && chown {OWNER} {folder}"));
        }
        srv
    }

    /// In the node, with the folder as the working directory.
    fn sh(&self, script: &str) -> String {
        let script = format!("mkdir -p {0} && cd {0} && {script}", self.path);
        self.node.sh(&script)
    }

    fn share(&self, folder: &str) -> Value {
        json!({"name": folder, "path": format!("{}/{folder}", self.path)})
    }
}

/// A share whose users of the guest, up to 65,535, are users of the node from 100,000 on.
fn mapped(srv: &Srv<'_>, folder: &str) -> Value {
    let mut share = srv.share(folder);
    for map in ["uidMap", "gidMap"] {
        share[map] = json!([{"guest": 0, "node": 100_000, "count": 65_536}]);
    }
    share
}

fn with_shares(case: &Case, shares: &[Value]) -> VmSpec {
    let spec = case.share_guest(Kernel::Cloud612);
    spec.cores(2).set("/shares", json!(shares))
}

/// The process that serves the VM's first share.
fn server(vm: &Vm<'_>) -> String {
    vm.field("/status/shares/0/pid")
}

/// Waits in the node until a shell's condition holds.
fn until(node: &Node, condition: &str) {
    node.sh(&format!(
        "for i in $(seq 300); do if {condition}; then exit 0; fi; sleep 0.1; done; echo 'not so after 30 s' >&2; exit 1"
    ));
}
