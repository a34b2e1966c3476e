//! General, special, extended control and debug registers.

use kvm_bindings::{
    KVM_CAP_SREGS2, KVM_SREGS2_FLAGS_PDPTRS_VALID, KVMIO, kvm_debugregs, kvm_dtable, kvm_regs, kvm_segment,
    kvm_sregs, kvm_sregs2, kvm_xcr, kvm_xcrs,
};
use vmm_protocol::state::{
    DebugRegisters, DescriptorTable, ExtendedControlRegister, GeneralRegisters, Segment, SpecialRegisters,
    StateError,
};
use vmm_sys_util::{
    ioctl::{ioctl_with_mut_ref, ioctl_with_ref},
    ioctl_ior_nr, ioctl_iow_nr,
};

use super::{
    super::{host::KvmError, vcpu::Vcpu},
    exactly, narrow, present,
};

ioctl_ior_nr!(KVM_GET_SREGS2, KVMIO, 0xcc, kvm_sregs2);
ioctl_iow_nr!(KVM_SET_SREGS2, KVMIO, 0xcd, kvm_sregs2);

macro_rules! general {
    ($($register:ident),*) => {
        pub(super) fn save_general(registers: &kvm_regs) -> GeneralRegisters {
            GeneralRegisters { $($register: registers.$register),* }
        }

        pub(super) fn general(saved: &GeneralRegisters) -> kvm_regs {
            kvm_regs { $($register: saved.$register),* }
        }
    };
}

general!(
    rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8, r9, r10, r11, r12, r13, r14, r15, rip, rflags
);

/// Where each part of a segment's access rights is (Intel SDM vol. 3, 25.4.1), and how many bits it has.
const TYPE: (u32, u32) = (0, 4);
const S: (u32, u32) = (4, 1);
const DPL: (u32, u32) = (5, 2);
const PRESENT: (u32, u32) = (7, 1);
const AVL: (u32, u32) = (12, 1);
const L: (u32, u32) = (13, 1);
const DB: (u32, u32) = (14, 1);
const G: (u32, u32) = (15, 1);
const UNUSABLE: (u32, u32) = (16, 1);
const ACCESS_BITS: u32 = 0x1_f0ff;

pub(super) fn save_segment(segment: &kvm_segment) -> Segment {
    let parts = [
        (TYPE, segment.type_),
        (S, segment.s),
        (DPL, segment.dpl),
        (PRESENT, segment.present),
        (AVL, segment.avl),
        (L, segment.l),
        (DB, segment.db),
        (G, segment.g),
        (UNUSABLE, segment.unusable),
    ];
    let bits = parts.iter().map(|((shift, width), value)| {
        let mask = (1_u32 << width) - 1;
        (u32::from(*value) & mask) << shift
    });
    Segment {
        base: segment.base,
        limit: segment.limit,
        selector: segment.selector.into(),
        access: bits.fold(0, |access, bits| access | bits),
    }
}

pub(super) fn segment(field: &'static str, saved: Option<Segment>) -> Result<kvm_segment, StateError> {
    let saved = present(field, saved)?;
    if saved.access & !ACCESS_BITS != 0 {
        let why = format!("{:#x} are no access rights", saved.access);
        return Err(StateError::invalid(field, why));
    }
    let part = |(shift, width): (u32, u32)| {
        let bits = saved.access >> shift & ((1 << width) - 1);
        u8::try_from(bits).unwrap_or(0)
    };
    Ok(kvm_segment {
        base: saved.base,
        limit: saved.limit,
        selector: narrow(field, saved.selector)?,
        type_: part(TYPE),
        s: part(S),
        dpl: part(DPL),
        present: part(PRESENT),
        avl: part(AVL),
        l: part(L),
        db: part(DB),
        g: part(G),
        unusable: part(UNUSABLE),
        padding: 0,
    })
}

fn save_table(table: &kvm_dtable) -> DescriptorTable {
    DescriptorTable {
        base: table.base,
        limit: table.limit.into(),
    }
}

fn table(field: &'static str, saved: Option<DescriptorTable>) -> Result<kvm_dtable, StateError> {
    let saved = present(field, saved)?;
    Ok(kvm_dtable {
        base: saved.base,
        limit: narrow(field, saved.limit)?,
        ..Default::default()
    })
}

/// Copies what `kvm_sregs` and `kvm_sregs2` have in common.
macro_rules! common {
    ($from:expr, $into:ident) => {{
        let from = $from;
        $into {
            cs: from.cs,
            ds: from.ds,
            es: from.es,
            fs: from.fs,
            gs: from.gs,
            ss: from.ss,
            tr: from.tr,
            ldt: from.ldt,
            gdt: from.gdt,
            idt: from.idt,
            cr0: from.cr0,
            cr2: from.cr2,
            cr3: from.cr3,
            cr4: from.cr4,
            cr8: from.cr8,
            efer: from.efer,
            apic_base: from.apic_base,
            ..Default::default()
        }
    }};
}

fn has_sregs2(vcpu: &Vcpu) -> bool {
    vcpu.vm().fd().check_extension_raw(KVM_CAP_SREGS2.into()) > 0
}

/// Reads the special registers, with the page directory pointers if KVM reports them.
fn read_special(vcpu: &Vcpu) -> Result<kvm_sregs2, KvmError> {
    if !has_sregs2(vcpu) {
        let old = vcpu.fd().get_sregs().map_err(KvmError::ioctl("KVM_GET_SREGS"))?;
        return Ok(common!(old, kvm_sregs2));
    }
    let mut special = kvm_sregs2::default();
    // SAFETY: the ioctl writes one `kvm_sregs2`, which lives across the call.
    let result = unsafe { ioctl_with_mut_ref(vcpu.fd(), KVM_GET_SREGS2(), &mut special) };
    if result < 0 {
        return Err(KvmError::ioctl("KVM_GET_SREGS2")(kvm_ioctls::Error::last()));
    }
    Ok(special)
}

fn write_special(vcpu: &Vcpu, special: &kvm_sregs2) -> Result<(), KvmError> {
    if !has_sregs2(vcpu) {
        // KVM reads the pointers from guest memory then.
        let old = common!(special, kvm_sregs);
        return vcpu
            .fd()
            .set_sregs(&old)
            .map_err(KvmError::ioctl("KVM_SET_SREGS"));
    }
    // SAFETY: the ioctl reads one `kvm_sregs2`, which lives across the call.
    let result = unsafe { ioctl_with_ref(vcpu.fd(), KVM_SET_SREGS2(), special) };
    if result < 0 {
        return Err(KvmError::ioctl("KVM_SET_SREGS2")(kvm_ioctls::Error::last()));
    }
    Ok(())
}

pub(super) fn save_special(vcpu: &Vcpu) -> Result<SpecialRegisters, KvmError> {
    let special = read_special(vcpu)?;
    let pdptrs = if special.flags & u64::from(KVM_SREGS2_FLAGS_PDPTRS_VALID) != 0 {
        special.pdptrs.to_vec()
    } else {
        Vec::new()
    };
    Ok(SpecialRegisters {
        cs: Some(save_segment(&special.cs)),
        ds: Some(save_segment(&special.ds)),
        es: Some(save_segment(&special.es)),
        fs: Some(save_segment(&special.fs)),
        gs: Some(save_segment(&special.gs)),
        ss: Some(save_segment(&special.ss)),
        tr: Some(save_segment(&special.tr)),
        ldt: Some(save_segment(&special.ldt)),
        gdt: Some(save_table(&special.gdt)),
        idt: Some(save_table(&special.idt)),
        cr0: special.cr0,
        cr2: special.cr2,
        cr3: special.cr3,
        cr4: special.cr4,
        cr8: special.cr8,
        efer: special.efer,
        apic_base: special.apic_base,
        pdptrs,
    })
}

pub(super) fn restore_special(vcpu: &Vcpu, saved: &SpecialRegisters) -> Result<(), StateError> {
    let (flags, pdptrs) = if saved.pdptrs.is_empty() {
        (0, [0; 4])
    } else {
        (
            KVM_SREGS2_FLAGS_PDPTRS_VALID,
            exactly("special.pdptrs", &saved.pdptrs)?,
        )
    };
    let special = kvm_sregs2 {
        cs: segment("special.cs", saved.cs)?,
        ds: segment("special.ds", saved.ds)?,
        es: segment("special.es", saved.es)?,
        fs: segment("special.fs", saved.fs)?,
        gs: segment("special.gs", saved.gs)?,
        ss: segment("special.ss", saved.ss)?,
        tr: segment("special.tr", saved.tr)?,
        ldt: segment("special.ldt", saved.ldt)?,
        gdt: table("special.gdt", saved.gdt)?,
        idt: table("special.idt", saved.idt)?,
        cr0: saved.cr0,
        cr2: saved.cr2,
        cr3: saved.cr3,
        cr4: saved.cr4,
        cr8: saved.cr8,
        efer: saved.efer,
        apic_base: saved.apic_base,
        flags: flags.into(),
        pdptrs,
    };
    Ok(write_special(vcpu, &special)?)
}

pub(super) fn save_xcrs(xcrs: &kvm_xcrs) -> Vec<ExtendedControlRegister> {
    let count = usize::try_from(xcrs.nr_xcrs).unwrap_or(usize::MAX);
    let used = xcrs.xcrs.iter().take(count);
    used.map(|xcr| ExtendedControlRegister {
        number: xcr.xcr,
        value: xcr.value,
    })
    .collect()
}

pub(super) fn xcrs(saved: &[ExtendedControlRegister]) -> Result<kvm_xcrs, StateError> {
    let mut xcrs = kvm_xcrs::default();
    if saved.len() > xcrs.xcrs.len() {
        let why = format!(
            "has {} values; there are at most {}",
            saved.len(),
            xcrs.xcrs.len()
        );
        return Err(StateError::invalid("xcrs", why));
    }
    for (xcr, saved) in xcrs.xcrs.iter_mut().zip(saved) {
        *xcr = kvm_xcr {
            xcr: saved.number,
            value: saved.value,
            ..Default::default()
        };
        xcrs.nr_xcrs += 1;
    }
    Ok(xcrs)
}

pub(super) fn save_debug(debug: &kvm_debugregs) -> DebugRegisters {
    DebugRegisters {
        addresses: debug.db.to_vec(),
        dr6: debug.dr6,
        dr7: debug.dr7,
    }
}

pub(super) fn debug(saved: &DebugRegisters) -> Result<kvm_debugregs, StateError> {
    Ok(kvm_debugregs {
        db: exactly("debug.addresses", &saved.addresses)?,
        dr6: saved.dr6,
        dr7: saved.dr7,
        ..Default::default()
    })
}
