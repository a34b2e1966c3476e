//! Launcher pods: an ordinary pod for each run of a VirtualMachine. Its one container is the
//! launcher `vmmd-pod`, which passes the pod's network namespace and volumes to the node's vmmd.
//!
//! The controller makes the pod ([`pod()`]) and reads the end of the run from its container
//! ([`state`]). The agent of the node reads the VirtualMachine, and both compute the VM from its
//! spec ([`plan`]): the pod has no copy of the VM.

mod pod;
mod spec;
pub mod state;

pub use self::{
    pod::{Claimed, Claims, away_from, claims, pod},
    spec::{plan, with_pod},
};

/// Resource of a node: places for VMs.
pub const VM_RESOURCE: &str = "vmmd.dev/vm";
/// Prefix of the resources of nodes that support a processor model; the model follows.
pub const CPU_RESOURCE: &str = "vmmd.dev/cpu-";
/// Directory of vmmd's socket for launchers, in launcher pods.
pub const SOCKET_DIRECTORY: &str = "/run/vmmd-pod";
