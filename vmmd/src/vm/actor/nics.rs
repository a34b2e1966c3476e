//! Node resources of a NIC of a running machine.

use std::sync::Arc;

use uuid::Uuid;
use vmm_protocol::vmm::{AttachNic, request::Op};
use vmmd_host::failure::{Failure, Kind};
use vmmd_network::NicEnd;
use vmmd_spec::vm::{Attachment, VmSpec};
use vmmd_store::VmRecord;

use super::plugged::{self, What};
use crate::{control::Client, host::Host, vm::machine};

/// Makes the tap of the NIC `name` of a VM's spec, and plugs it in.
pub async fn attach(
    host: Arc<Host>,
    client: Client,
    uid: Uuid,
    record: VmRecord,
    name: &str,
) -> Result<(), Failure> {
    let hardware = record.hardware.clone().unwrap_or_default();
    let spec = VmSpec::try_from(&record.spec.clone().unwrap_or_default())?;
    let mut nics = spec.nics.iter().enumerate();
    let Some((index, nic)) = nics.find(|(_, nic)| nic.name.as_str() == name) else {
        return Err(not_found(name));
    };
    let Some(end) = machine::nic_end(uid, &hardware, name) else {
        let message = format!("the VM has no PCI slot free for NIC \"{name}\": detach a disk or a NIC first");
        return Err(Failure::new(Kind::Exhausted, "NO_FREE_SLOT", message));
    };
    plugged::make_room(&host, uid, &record, &spec).await;
    let end = NicEnd { plugged: true, ..end };
    let tap = vmmd_network::open_tap(host.for_networks(), uid, &record.name, index, nic, end).await?;
    let (wire, fds) = machine::plug_nic(&hardware, nic, tap);
    let op = Op::AttachNic(AttachNic { nic: Some(wire) });
    plugged::plug_in(&client, (What::Nic, name), op, fds).await
}

/// Lets a NIC in a network of the node have the connections of its spec, and the ports that it publishes.
pub async fn admit(host: &Arc<Host>, uid: Uuid, record: &VmRecord, name: &str) -> Result<(), Failure> {
    let spec = VmSpec::try_from(&record.spec.clone().unwrap_or_default())?;
    let nic = spec.nics.iter().find(|nic| nic.name.as_str() == name);
    match nic.map(|nic| &nic.attachment) {
        Some(Attachment::Network {
            name: network,
            access,
            ..
        }) => {
            let nic = ((uid, record.name.as_str()), name);
            let networks = &host.networks;
            networks
                .admit(host.for_networks(), network.as_str(), nic, access)
                .await
        }
        _ => Err(not_found(name)),
    }
}

fn not_found(name: &str) -> Failure {
    Failure::new(
        Kind::NotFound,
        "NIC_NOT_FOUND",
        format!("the VM has no NIC \"{name}\""),
    )
}
