//! Directories of the node that guests mount: what is shared, and the processes that serve it.
//!
//! Each share of a running VM is served by a `virtiofsd` of its own, which the daemon starts before the `vmm`, or before it plugs the share
//! into a running machine, and to which it hands the `vmm` a connection. It runs in the VM's cgroup and in namespaces of its own (users,
//! processes, network), with its root in the shared directory, as a user that is never the node's root. It ends when its `vmm` does, or when the
//! share is gone from the machine: that closes the connection. [`keeper`] makes it anew when it ends before.

mod keeper;
mod process;

use std::{path::Path, sync::Arc};

use proto::{model::vm::VmSpec, v1};

pub use self::{
    keeper::{Keepers, Run},
    process::{Serving, Unkept, serve},
};
use vmmd_host::{capacity::placement::Problem, failure::Failure};

use crate::{
    files::{
        share::{NOT_USABLE, open},
        state_dir::{self, StateDir},
    },
    host::Host,
};

/// What is wrong with the directories of a spec that are there, but for those that `had` names too. One that is not there yet may come until the
/// start. Refused as FILES_DO_NOT_ANSWER when their file systems don't.
pub async fn check(host: &Arc<Host>, spec: &VmSpec, had: Option<&VmSpec>) -> Result<Vec<Problem>, Failure> {
    let known: Vec<_> = had.iter().flat_map(|had| &had.shares).cloned().collect();
    let numbered = spec.shares.iter().cloned().enumerate();
    let fresh: Vec<_> = numbered.filter(|(_, share)| !known.contains(share)).collect();
    let had_dir = had.and_then(|had| had.state_dir.as_ref());
    let fresh_dir = spec.state_dir.clone().filter(|path| Some(path) != had_dir);
    if fresh.is_empty() && fresh_dir.is_none() {
        return Ok(Vec::new());
    }
    let taken = fresh_dir.as_ref().and_then(|path| taken(host, path));
    let of_shares = fresh.iter().map(|(_, share)| share.path.clone());
    let paths: Vec<_> = of_shares.chain(fresh_dir.clone()).collect();
    let of = Arc::clone(host);
    let looking = host.pools.files.run(&paths, move || {
        let allowed = &of.config.roots.shares;
        let shares = fresh.into_iter().filter_map(|(index, share)| {
            let failure = open(&share, allowed).err()?;
            Some((failure, format!("spec.shares[{index}]")))
        });
        let dir = fresh_dir.and_then(|path| StateDir::open(&path, allowed).err());
        let dir = dir.map(|failure| (failure, "spec.stateDir".to_owned()));
        let there =
            |(failure, _): &(Failure, String)| ![NOT_USABLE, state_dir::NOT_USABLE].contains(&failure.reason);
        let wrong = shares.chain(dir).filter(there);
        wrong
            .map(|(failure, field)| Problem::of(failure, field))
            .collect::<Vec<_>>()
    });
    let mut looked = looking.await?;
    looked.extend(taken);
    Ok(looked)
}

/// Two VMs can't have their files in one directory.
fn taken(host: &Host, path: &Path) -> Option<Problem> {
    let of = |vm: &v1::Vm| {
        vm.spec
            .as_ref()
            .is_some_and(|spec| Path::new(&spec.state_dir) == path)
    };
    let vm = host.vms.list().into_iter().find(|vm| of(vm))?;
    let name = vm.metadata.as_ref().map_or("", |metadata| &metadata.name);
    let message = format!("spec.stateDir: VM \"{name}\" has its files there already: name another directory");
    let failure = Failure::precondition("STATE_DIR_IN_USE", message);
    Some(Problem::of(failure, "spec.stateDir"))
}
