//! VirtualMachines, as the API server has them.

use serde_json::Value;

use crate::api::Api;

/// The collection of the VMs in the namespace `default`.
pub const VMS: &str = "/apis/vmmd.dev/v1alpha1/namespaces/default/virtualmachines";

/// A VirtualMachine by the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vm {
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
    /// The phase.
    pub phase: String,
    /// The node that it runs on, or last ran on.
    pub node: String,
    /// Starts on this node after the first.
    pub restarts: i64,
    /// Number of the run.
    pub epoch: i64,
    /// Somebody has asked for it to be moved, and that is not acted upon yet.
    pub to_be_moved: bool,
}

/// All of them.
///
/// # Errors
///
/// That the API server does not answer.
pub async fn list(api: &Api) -> Result<Vec<Vm>, String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let vms = api.list(VMS).await?;
    let vms = vms.iter().map(|vm| Vm {
        name: text(&vm["metadata"]["name"]),
        uid: text(&vm["metadata"]["uid"]),
        phase: text(&vm["status"]["phase"]),
        node: text(&vm["status"]["node"]),
        restarts: vm["status"]["restarts"].as_i64().unwrap_or_default(),
        epoch: vm["status"]["epoch"].as_i64().unwrap_or_default(),
        to_be_moved: vm["metadata"]["annotations"]["vmmd.dev/migrate"] != vm["status"]["migrate"],
    });
    Ok(vms.collect())
}

/// Returns all VMs if exactly these exist and are Running, without a requested or active migration.
///
/// # Errors
///
/// The difference from this state.
pub async fn running(api: &Api, names: &[String]) -> Result<Vec<Vm>, String> {
    let vms = list(api).await?;
    let other: Vec<_> = vms
        .iter()
        .filter(|vm| vm.phase != "Running" || vm.to_be_moved)
        .collect();
    let mut there: Vec<_> = vms.iter().map(|vm| vm.name.as_str()).collect();
    there.sort_unstable();
    let mut wanted: Vec<_> = names.iter().map(String::as_str).collect();
    wanted.sort_unstable();
    if there != wanted || !other.is_empty() {
        return Err(format!("there are {there:?}, of which do not run: {other:?}"));
    }
    Ok(vms)
}

/// A VM that runs on a node, as its daemon has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Of its VirtualMachine.
    pub uid: String,
    /// Starts by its run policy.
    pub starts: i64,
}

/// Checks that each VM runs only on the node that the API server reports, with the reported number
/// of starts, and that no other VM runs. `found` has the runs of each node, by the node's name.
///
/// # Errors
///
/// The difference from this state.
pub fn each_once(vms: &[Vm], found: &[(&str, Vec<Run>)]) -> Result<(), String> {
    for vm in vms {
        let runs = found.iter().flat_map(|(node, runs)| {
            let of_it = runs.iter().filter(|run| run.uid == vm.uid);
            of_it.map(move |run| (*node, run.starts))
        });
        let runs: Vec<_> = runs.collect();
        if runs != [(vm.node.as_str(), vm.restarts)] {
            return Err(format!("{vm:?} runs on {runs:?}"));
        }
    }
    let total: usize = found.iter().map(|(_, runs)| runs.len()).sum();
    if total != vms.len() {
        return Err(format!("more VMs run than there are: {found:?}"));
    }
    Ok(())
}

/// Returns the remaining VMs and pods in their namespace. Empty when all are gone.
///
/// # Errors
///
/// The API server does not answer.
pub async fn left(api: &Api) -> Result<Vec<String>, String> {
    let vms = list(api).await?.into_iter().map(|vm| format!("{vm:?}"));
    let pods = api.list("/api/v1/namespaces/default/pods").await?;
    let pods = pods.iter().map(|pod| format!("pod {}", pod["metadata"]["name"]));
    Ok(vms.chain(pods).collect())
}
