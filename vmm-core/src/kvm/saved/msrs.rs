//! Model specific registers.
//!
//! Which MSRs are state is found once for each vCPU, after its CPUID was set: what `KVM_GET_MSR_INDEX_LIST` names (less what
//! `is_never_offered` in `vcpu_state` explains; with the MTRRs and machine-check banks, which the list leaves out) and the
//! vCPU can read. From then on nothing is skipped: each of these is read, and each that was saved is written or found to hold
//! the value already.

use std::collections::BTreeSet;

use kvm_bindings::{Msrs, kvm_msr_entry};
use vmm_protocol::state::{Msr, StateError};

use super::super::{host::KvmError, vcpu::Vcpu};

fn list(entries: &[kvm_msr_entry]) -> Result<Msrs, StateError> {
    Msrs::from_entries(entries)
        .map_err(|_| StateError::Host("building a list of MSRs", std::io::ErrorKind::OutOfMemory.into()))
}

fn entry(index: u32, data: u64) -> kvm_msr_entry {
    kvm_msr_entry {
        index,
        data,
        ..Default::default()
    }
}

/// Reads all of `indices`.
pub(super) fn read(vcpu: &Vcpu, indices: &[u32]) -> Result<Vec<Msr>, StateError> {
    let wanted: Vec<_> = indices.iter().map(|index| entry(*index, 0)).collect();
    let mut msrs = list(&wanted)?;
    let count = vcpu
        .fd()
        .get_msrs(&mut msrs)
        .map_err(KvmError::ioctl("KVM_GET_MSRS"))?;
    if let Some(index) = indices.get(count) {
        let why = format!("MSR {index:#x} is state of this vCPU and can't be read");
        return Err(StateError::invalid("msrs", why));
    }
    let read = msrs.as_slice().iter().map(|msr| Msr {
        index: msr.index,
        value: msr.data,
    });
    Ok(read.collect())
}

pub(super) fn read_one(vcpu: &Vcpu, index: u32) -> Result<u64, StateError> {
    let read = read(vcpu, &[index])?;
    Ok(read.first().map_or(0, |msr| msr.value))
}

/// Writes all of `saved`, in their order. `known` are the MSRs that are state of this vCPU. Known
/// MSRs that are missing in `saved` keep their value after power-on, since the saving host did not
/// know them.
pub(super) fn write(vcpu: &Vcpu, saved: &[Msr], known: &BTreeSet<u32>) -> Result<(), StateError> {
    let mut seen = BTreeSet::new();
    for msr in saved {
        if !known.contains(&msr.index) {
            let why = format!("MSR {:#x} is not known here", msr.index);
            return Err(StateError::invalid("msrs", why));
        }
        if !seen.insert(msr.index) {
            let why = format!("MSR {:#x} is there twice", msr.index);
            return Err(StateError::invalid("msrs", why));
        }
    }
    let entries: Vec<_> = saved.iter().map(|msr| entry(msr.index, msr.value)).collect();
    let mut rest = entries.as_slice();
    while !rest.is_empty() {
        let count = vcpu
            .fd()
            .set_msrs(&list(rest)?)
            .map_err(KvmError::ioctl("KVM_SET_MSRS"))?;
        let Some(refused) = rest.get(count) else {
            return Ok(());
        };
        // The list includes MSRs that only KVM can set. A refusal does no harm if the values are
        // equal.
        let here = read_one(vcpu, refused.index)?;
        if here != refused.data {
            let why = format!(
                "MSR {:#x} can't be set to {:#x}; here it is {here:#x}",
                refused.index, refused.data
            );
            return Err(StateError::invalid("msrs", why));
        }
        rest = rest.get(count.saturating_add(1)..).unwrap_or_default();
    }
    Ok(())
}

pub(super) fn write_one(vcpu: &Vcpu, index: u32, value: u64) -> Result<(), StateError> {
    write(vcpu, &[Msr { index, value }], &BTreeSet::from([index]))
}
