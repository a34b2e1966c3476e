//! Directories of the node that guests mount: the shared directories, and the processes that serve
//! them.
//!
//! Each share of a running VM has its own `virtiofsd`. The daemon starts it before the `vmm`, or
//! before it plugs the share into a running machine, and gives the `vmm` a connection to it. The
//! process runs in the VM's cgroup and in its own namespaces (users, processes, network), with its
//! root in the shared directory, as a user that is never the node's root. It ends with its `vmm`,
//! or with the removal of the share from the machine, which closes the connection. [`keeper`]
//! restarts a process that ends earlier.

mod keeper;
mod process;

use std::{path::Path, sync::Arc};

use vmmd_api::v1;
use vmmd_spec::vm::VmSpec;

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
    registry::pods,
};

/// Problems of the existing directories of a spec, except directories that `had` names too. A
/// missing directory may appear before the start. Refused as FILES_DO_NOT_ANSWER when their file
/// systems do not respond.
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
    let of_shares = fresh
        .iter()
        .filter_map(|(_, share)| share.path().map(Path::to_owned));
    let paths: Vec<_> = of_shares.chain(fresh_dir.clone()).collect();
    let of = Arc::clone(host);
    let looking = host.pools.files.run(&paths, move || {
        let allowed = &of.config.roots.shares;
        let shares = fresh.into_iter().filter_map(|(index, share)| {
            let failure = open(&share, &of.sources()).err()?;
            Some((failure, format!("spec.shares[{index}]")))
        });
        let dir = fresh_dir.and_then(|path| StateDir::open(&path, allowed).err());
        let dir = dir.map(|failure| (failure, "spec.stateDir".to_owned()));
        let later = [
            NOT_USABLE,
            state_dir::NOT_USABLE,
            pods::NOT_CONNECTED,
            pods::NO_VOLUME,
        ];
        let there = |(failure, _): &(Failure, String)| !later.contains(&failure.reason);
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
