//! The time stamp counter: its frequency, its value, and the differences between the vCPUs'
//! counters.
//!
//! The guest's counter continues from its value at the pause. Like kvmclock (`time`), it stands
//! while the machine is saved. The first vCPU's counter is set to its value, which gives a shift
//! between the saving host and this host. All other vCPUs get their saved offset plus that shift,
//! so the differences between the counters stay exactly the same.

use kvm_bindings::{KVM_CAP_VCPU_ATTRIBUTES, KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, KVMIO, kvm_device_attr};
use kvm_ioctls::Cap;
use vmm_protocol::state::{StateError, TimeStampCounter};
use vmm_sys_util::{ioctl::ioctl_with_ref, ioctl_iow_nr};

use super::{
    super::{host::KvmError, vcpu::Vcpu},
    msrs,
};

ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, KVMIO, 0xe1, kvm_device_attr);
ioctl_iow_nr!(KVM_GET_DEVICE_ATTR, KVMIO, 0xe2, kvm_device_attr);
ioctl_iow_nr!(KVM_HAS_DEVICE_ATTR, KVMIO, 0xe3, kvm_device_attr);

/// `MSR_IA32_TSC`.
pub(super) const TSC: u32 = 0x10;
/// `MSR_IA32_TSC_DEADLINE`.
pub(super) const TSC_DEADLINE: u32 = 0x6e0;

/// By how much two frequencies may differ and still be the same, in millionths: what two measurements of one clock do (KVM's
/// `tsc_tolerance_ppm`).
const TOLERANCE_PPM: u64 = 250;

/// Difference of the offsets between the saving host and this host; `None` if one of them does not
/// report offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TscShift(Option<u64>);

fn attribute(value: &u64) -> kvm_device_attr {
    kvm_device_attr {
        flags: 0,
        group: KVM_VCPU_TSC_CTRL,
        attr: KVM_VCPU_TSC_OFFSET.into(),
        addr: std::ptr::from_ref(value).addr() as u64,
    }
}

/// The offset, if the kernel reports it (5.16 and later).
pub(super) fn offset(vcpu: &Vcpu) -> Result<Option<u64>, KvmError> {
    if vcpu.vm().fd().check_extension_raw(KVM_CAP_VCPU_ATTRIBUTES.into()) <= 0 {
        return Ok(None);
    }
    let mut value = 0_u64;
    // SAFETY: reads the attribute's numbers only.
    if unsafe { ioctl_with_ref(vcpu.fd(), KVM_HAS_DEVICE_ATTR(), &attribute(&value)) } < 0 {
        return Ok(None);
    }
    let mut attribute = attribute(&value);
    attribute.addr = std::ptr::from_mut(&mut value).addr() as u64;
    // SAFETY: the ioctl writes one u64 to the attribute's address, where `value` lives across the call.
    if unsafe { ioctl_with_ref(vcpu.fd(), KVM_GET_DEVICE_ATTR(), &attribute) } < 0 {
        return Err(KvmError::ioctl("KVM_GET_DEVICE_ATTR of KVM_VCPU_TSC_OFFSET")(
            kvm_ioctls::Error::last(),
        ));
    }
    // SAFETY: `value` is a local; the kernel wrote it behind the compiler's back.
    Ok(Some(unsafe { std::ptr::read_volatile(&raw const value) }))
}

pub(super) fn set_offset(vcpu: &Vcpu, offset: u64) -> Result<(), KvmError> {
    // SAFETY: the ioctl reads one u64 from the attribute's address, where `offset` lives across the call.
    if unsafe { ioctl_with_ref(vcpu.fd(), KVM_SET_DEVICE_ATTR(), &attribute(&offset)) } < 0 {
        return Err(KvmError::ioctl("KVM_SET_DEVICE_ATTR of KVM_VCPU_TSC_OFFSET")(
            kvm_ioctls::Error::last(),
        ));
    }
    Ok(())
}

fn khz(vcpu: &Vcpu) -> Result<u32, KvmError> {
    vcpu.fd()
        .get_tsc_khz()
        .map_err(KvmError::ioctl("KVM_GET_TSC_KHZ"))
}

/// `has_deadline`: IA32_TSC_DEADLINE is state of this vCPU.
pub(super) fn save(vcpu: &Vcpu, has_deadline: bool) -> Result<TimeStampCounter, StateError> {
    Ok(TimeStampCounter {
        khz: khz(vcpu)?,
        offset: offset(vcpu)?,
        value: msrs::read_one(vcpu, TSC)?,
        deadline: if has_deadline {
            msrs::read_one(vcpu, TSC_DEADLINE)?
        } else {
            0
        },
    })
}

pub(super) fn is_same_frequency(one: u32, other: u32) -> bool {
    u64::from(one.abs_diff(other)) * 1_000_000 <= u64::from(one) * TOLERANCE_PPM
}

fn set_frequency(vcpu: &Vcpu, wanted: u32) -> Result<(), StateError> {
    let here = khz(vcpu)?;
    if is_same_frequency(here, wanted) {
        return Ok(());
    }
    if !vcpu.vm().fd().check_extension(Cap::TscControl) {
        let why = format!(
            "the guest's time stamp counter runs at {wanted} kHz, this host's at {here} kHz, and its processor can't scale"
        );
        return Err(StateError::invalid("tsc.khz", why));
    }
    Ok(vcpu
        .fd()
        .set_tsc_khz(wanted)
        .map_err(KvmError::ioctl("KVM_SET_TSC_KHZ"))?)
}

/// Value to add to each saved offset. `then` and `now` are the first vCPU's offsets on the saving
/// host and on this host. `value` is its counter's current value here, and `saved` is the wanted
/// value.
pub(super) fn shift(then: u64, now: u64, value: u64, saved: u64) -> u64 {
    let wanted = now.wrapping_add(saved).wrapping_sub(value);
    wanted.wrapping_sub(then)
}

/// Sets frequency and value. `first` is the shift that the first vCPU's restore gave; `None` for the first itself.
pub(super) fn restore(
    vcpu: &Vcpu,
    saved: &TimeStampCounter,
    first: Option<TscShift>,
) -> Result<TscShift, StateError> {
    set_frequency(vcpu, saved.khz)?;
    let shift = match saved.offset.zip(offset(vcpu)?) {
        Some((then, now)) => {
            let shift = match first {
                Some(TscShift(Some(shift))) => shift,
                Some(TscShift(None)) | None => shift(then, now, msrs::read_one(vcpu, TSC)?, saved.value),
            };
            set_offset(vcpu, then.wrapping_add(shift))?;
            Some(shift)
        }
        None => {
            // KVM takes a counter that is written within a second of another's for one that is to be in step with it.
            msrs::write_one(vcpu, TSC, saved.value)?;
            None
        }
    };
    if shift.is_some() && first.is_some() {
        // The values of several vCPUs are read one after the other, so this one's may show more time than the first one's. The
        // offsets are exact: since all were stopped before, no counter goes back.
        return Ok(TscShift(shift));
    }
    // A paravirtual backend takes any value and keeps the host's. A guest does not survive a counter that goes back.
    let value = msrs::read_one(vcpu, TSC)?;
    if value < saved.value {
        let why = format!(
            "was {:#x}, and this host's KVM leaves it at {value:#x}",
            saved.value
        );
        return Err(StateError::invalid("tsc.value", why));
    }
    Ok(TscShift(shift))
}
