//! Node resources of a share of a running machine: a process serves the share as long as the
//! machine has it.

use std::sync::Arc;

use uuid::Uuid;
use vmm_protocol::vmm::{AttachShare, request::Op};
use vmmd_host::{
    failure::{Failure, Kind},
    process::Process,
};
use vmmd_spec::vm::VmSpec;
use vmmd_store::VmRecord;

use super::{
    Actor,
    plugged::{self, What},
};
use crate::{
    control::Client,
    host::Host,
    paths::RuntimeDir,
    share::{self, Run, Serving, Unkept},
    vm::machine,
};

/// Starts the process of the share `name` of a VM's spec, and plugs the share in. Without a process when the machine had it before: it is the one that
/// was noted.
pub async fn attach(
    host: Arc<Host>,
    client: Client,
    uid: Uuid,
    record: VmRecord,
    name: &str,
) -> Result<Option<Unkept>, Failure> {
    let hardware = record.hardware.clone().unwrap_or_default();
    let spec = VmSpec::try_from(&record.spec.clone().unwrap_or_default())?;
    let Some(share) = spec.shares.iter().find(|share| share.name.as_str() == name) else {
        let message = format!("the VM has no share \"{name}\"");
        return Err(Failure::new(Kind::NotFound, "SHARE_NOT_FOUND", message));
    };
    if !hardware.share_slots.contains_key(name) {
        let message = format!(
            "the VM has no PCI slot free for share \"{name}\": detach a disk, a NIC or a share first"
        );
        return Err(Failure::new(Kind::Exhausted, "NO_FREE_SLOT", message));
    }
    if plugged::has(&client, What::Share, name).await == Some(true) {
        return Ok(None);
    }
    plugged::make_room(&host, uid, &record, &spec).await;
    let mut serving = share::serve(&host, uid, vec![share.clone()], None).await?;
    let Some(Serving { child, socket, .. }) = serving.pop() else {
        return Err(Failure::internal("no process was made"));
    };
    let process = child.watched(Process::new);
    let process =
        process.map_err(|error| Failure::internal(format!("watch the process of a share: {error}")))?;
    let process = Unkept::new(process, RuntimeDir::of(&host.config, uid).share(name));
    let (wire, fds) = machine::plug_share(&hardware, share, socket);
    let op = Op::AttachShare(AttachShare { share: Some(wire) });
    plugged::plug_in(&client, (What::Share, name), op, fds).await?;
    Ok(Some(process))
}

impl Actor {
    /// The machine has the share `name` of the spec, which this process serves, or the one that was noted.
    pub(super) fn keep_share(&mut self, name: &str, process: Option<Unkept>) {
        let share = self.spec.shares.iter().find(|share| share.name.as_str() == name);
        if let (Some(instance), Some(share)) = (&mut self.instance, share) {
            let run = Run {
                uid: self.uid,
                vm: &self.record.name,
                vmm: &instance.process,
            };
            let process = process.and_then(Unkept::keep);
            instance.shares.add(&self.host, &run, share, process);
        }
    }

    /// The machine does not have the share any more.
    pub(super) fn forget_share(&mut self, name: &str) {
        if let Some(instance) = &mut self.instance {
            instance.shares.remove(name);
        }
    }
}
