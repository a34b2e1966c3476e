//! The XSAVE area, in the size that the host's KVM reports (`KVM_CAP_XSAVE2`; 4 KiB before kernel
//! 5.17).

use kvm_bindings::{KVM_CAP_XSAVE2, Xsave, kvm_xsave};
use vmm_protocol::state::StateError;

use super::super::{host::KvmError, vcpu::Vcpu};

/// Size of `kvm_xsave` without its flexible part, in bytes.
const FIXED: usize = size_of::<kvm_xsave>();
/// More than any processor's state (AMX makes it 11 KiB), in bytes.
const LENGTH_MAX: usize = 64 << 10;

/// An empty area as large as this host's.
fn area(vcpu: &Vcpu) -> Result<Xsave, KvmError> {
    let told = vcpu.vm().fd().check_extension_raw(KVM_CAP_XSAVE2.into());
    let size = usize::try_from(told).unwrap_or(0).clamp(FIXED, LENGTH_MAX);
    Xsave::new((size - FIXED).div_ceil(size_of::<u32>())).map_err(|_| KvmError::Ioctl {
        operation: "allocating an XSAVE area",
        source: std::io::ErrorKind::OutOfMemory.into(),
    })
}

pub(super) fn save(vcpu: &Vcpu) -> Result<Vec<u8>, KvmError> {
    if vcpu.vm().fd().check_extension_raw(KVM_CAP_XSAVE2.into()) <= 0 {
        let old = vcpu.fd().get_xsave().map_err(KvmError::ioctl("KVM_GET_XSAVE"))?;
        return Ok(old.region.iter().flat_map(|word| word.to_le_bytes()).collect());
    }
    let mut area = area(vcpu)?;
    // SAFETY: the area has the size that KVM says it writes; this process enables no further state for its guests.
    unsafe { vcpu.fd().get_xsave2(&mut area) }.map_err(KvmError::ioctl("KVM_GET_XSAVE2"))?;
    let fixed = area.as_fam_struct_ref().xsave.region;
    let words = fixed.iter().chain(area.as_slice());
    Ok(words.flat_map(|word| word.to_le_bytes()).collect())
}

pub(super) fn restore(vcpu: &Vcpu, saved: &[u8]) -> Result<(), StateError> {
    let mut area = area(vcpu)?;
    let (words, rest) = saved.as_chunks::<4>();
    if saved.len() < FIXED || !rest.is_empty() {
        let why = format!(
            "has {} bytes; it needs at least {FIXED}, in words of 4",
            saved.len()
        );
        return Err(StateError::invalid("xsave", why));
    }
    let mut words = words.iter().map(|word| u32::from_le_bytes(*word));
    // SAFETY: only the words of the area are written, not its length.
    let fixed = unsafe { area.as_mut_fam_struct() };
    for (into, word) in fixed.xsave.region.iter_mut().zip(&mut words) {
        *into = word;
    }
    for into in area.as_mut_slice() {
        // An area that is shorter than this host's lacks the state beyond its end.
        *into = words.next().unwrap_or(0);
    }
    if words.any(|word| word != 0) {
        let why = "holds state of a processor feature that this host lacks";
        return Err(StateError::invalid("xsave", why));
    }
    // SAFETY: the area has the size that KVM says it reads.
    Ok(unsafe { vcpu.fd().set_xsave2(&area) }.map_err(KvmError::ioctl("KVM_SET_XSAVE"))?)
}
