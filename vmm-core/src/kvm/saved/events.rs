//! Pending and injected exceptions, interrupts, NMIs and SMIs of a vCPU.
//!
//! Pending exceptions are distinguished from injected ones, and a pending triple fault is reported,
//! because [`enable`] asks KVM for both. A kernel without one of these capabilities never has the
//! corresponding state.

use kvm_bindings::{
    KVM_CAP_EXCEPTION_PAYLOAD, KVM_CAP_X86_TRIPLE_FAULT_EVENT, KVM_VCPUEVENT_VALID_NMI_PENDING,
    KVM_VCPUEVENT_VALID_PAYLOAD, KVM_VCPUEVENT_VALID_SHADOW, KVM_VCPUEVENT_VALID_SMM,
    KVM_VCPUEVENT_VALID_TRIPLE_FAULT, kvm_enable_cap, kvm_vcpu_events,
};
use kvm_ioctls::VmFd;
use vmm_protocol::state::{Events, StateError};

use super::{super::host::KvmError, narrow};

/// Makes KVM report all kinds of events; called before vCPUs run.
pub(in crate::kvm) fn enable(fd: &VmFd) -> Result<(), KvmError> {
    for cap in [KVM_CAP_EXCEPTION_PAYLOAD, KVM_CAP_X86_TRIPLE_FAULT_EVENT] {
        if fd.check_extension_raw(cap.into()) <= 0 {
            continue;
        }
        fd.enable_cap(&kvm_enable_cap {
            cap,
            args: [1, 0, 0, 0],
            ..Default::default()
        })
        .map_err(KvmError::ioctl("KVM_ENABLE_CAP of what vCPU events tell"))?;
    }
    Ok(())
}

pub(super) fn save(events: &kvm_vcpu_events) -> Events {
    let has = |flag| events.flags & flag != 0;
    let exception = &events.exception;
    Events {
        exception_pending: exception.pending != 0,
        exception_injected: exception.injected != 0,
        exception_vector: exception.nr.into(),
        exception_error_code: (exception.has_error_code != 0).then_some(exception.error_code),
        exception_payload: (has(KVM_VCPUEVENT_VALID_PAYLOAD) && events.exception_has_payload != 0)
            .then_some(events.exception_payload),
        interrupt_injected: events.interrupt.injected != 0,
        interrupt_vector: events.interrupt.nr.into(),
        interrupt_soft: events.interrupt.soft != 0,
        interrupt_shadow: events.interrupt.shadow.into(),
        nmi_injected: events.nmi.injected != 0,
        nmi_pending: events.nmi.pending != 0,
        nmi_masked: events.nmi.masked != 0,
        smm: events.smi.smm != 0,
        smi_pending: events.smi.pending != 0,
        smm_inside_nmi: events.smi.smm_inside_nmi != 0,
        latched_init: events.smi.latched_init != 0,
        triple_fault_pending: has(KVM_VCPUEVENT_VALID_TRIPLE_FAULT) && events.triple_fault.pending != 0,
    }
}

/// The events of `saved` for a vCPU on which KVM reports the events in `here`.
pub(super) fn events(saved: &Events, here: &kvm_vcpu_events) -> Result<kvm_vcpu_events, StateError> {
    let lacks = |flag, field| {
        Err(StateError::invalid(
            field,
            format!("is set, and this host's KVM lacks it (flag {flag:#x} of KVM_SET_VCPU_EVENTS)"),
        ))
    };
    let can = |flag| here.flags & flag != 0;
    if (saved.exception_pending || saved.exception_payload.is_some()) && !can(KVM_VCPUEVENT_VALID_PAYLOAD) {
        return lacks(KVM_VCPUEVENT_VALID_PAYLOAD, "events.exception_pending");
    }
    if saved.triple_fault_pending && !can(KVM_VCPUEVENT_VALID_TRIPLE_FAULT) {
        return lacks(KVM_VCPUEVENT_VALID_TRIPLE_FAULT, "events.triple_fault_pending");
    }
    let mut events = kvm_vcpu_events {
        flags: KVM_VCPUEVENT_VALID_NMI_PENDING
            | KVM_VCPUEVENT_VALID_SHADOW
            | here.flags
                & (KVM_VCPUEVENT_VALID_SMM | KVM_VCPUEVENT_VALID_PAYLOAD | KVM_VCPUEVENT_VALID_TRIPLE_FAULT),
        ..Default::default()
    };
    events.exception.pending = saved.exception_pending.into();
    events.exception.injected = saved.exception_injected.into();
    events.exception.nr = narrow("events.exception_vector", saved.exception_vector)?;
    if let Some(code) = saved.exception_error_code {
        events.exception.has_error_code = 1;
        events.exception.error_code = code;
    }
    if let Some(payload) = saved.exception_payload {
        events.exception_has_payload = 1;
        events.exception_payload = payload;
    }
    events.interrupt.injected = saved.interrupt_injected.into();
    events.interrupt.nr = narrow("events.interrupt_vector", saved.interrupt_vector)?;
    events.interrupt.soft = saved.interrupt_soft.into();
    events.interrupt.shadow = narrow("events.interrupt_shadow", saved.interrupt_shadow)?;
    events.nmi.injected = saved.nmi_injected.into();
    events.nmi.pending = saved.nmi_pending.into();
    events.nmi.masked = saved.nmi_masked.into();
    events.smi.smm = saved.smm.into();
    events.smi.pending = saved.smi_pending.into();
    events.smi.smm_inside_nmi = saved.smm_inside_nmi.into();
    events.smi.latched_init = saved.latched_init.into();
    events.triple_fault.pending = saved.triple_fault_pending.into();
    Ok(events)
}
