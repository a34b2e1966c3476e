//! The address at which the node reaches a guest.

use std::net::IpAddr;

use vmmd_api::v1::Vm;
use vmmd_host::{failure::Failure, text};

/// The address that the node has assigned to the NIC `nic` of a running VM, or to its first NIC with
/// an address when `nic` is empty.
///
/// # Errors
///
/// `NOT_RUNNING`, or `NO_ADDRESS` when no network of the node has an address for the NIC.
pub fn address(vm: &Vm, nic: &str) -> Result<IpAddr, Failure> {
    let status = vm.status.as_ref();
    if status.is_none_or(|status| status.instance.is_none()) {
        let message = "the VM is not running: start it first";
        return Err(Failure::precondition("NOT_RUNNING", message));
    }
    let nics = status.into_iter().flat_map(|status| &status.nics);
    let meant = nics.filter(|of_vm| nic.is_empty() || of_vm.name == nic);
    let mut addresses = meant.flat_map(|nic| &nic.addresses);
    addresses.find_map(|address| address.parse().ok()).ok_or_else(|| {
        let which = match nic {
            "" => "the VM has no NIC".to_owned(),
            nic => format!("the VM has no NIC \"{}\"", text::brief(nic)),
        };
        let message = format!("{which} with an address of the node: give it one in a network of the node");
        Failure::precondition("NO_ADDRESS", message)
    })
}
