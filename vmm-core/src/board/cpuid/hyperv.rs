//! Hyper-V's leaves of CPUID, for guests that expect that hypervisor: Windows (Hypervisor Top-Level Functional Specification,
//! "TLFS", 6.0b, 2.4).
//!
//! A guest gets those features of [`BASIC`] and [`FURTHER`] that KVM has. KVM's own leaves move behind Hyper-V's, to 0x4000_0100, where Linux
//! finds them, too.

use kvm_bindings::kvm_cpuid_entry2;
use vmmd_spec::cpu::features::Register::{self, Eax, Ecx, Edx};

use super::{find, value};

/// First leaf of a hypervisor.
const BASE: u32 = 0x4000_0000;
/// First leaf of KVM, behind those of Hyper-V.
const KVM_BASE: u32 = 0x4000_0100;
/// Distance of KVM's leaves to their usual place.
const SHIFT: u32 = KVM_BASE - BASE;
/// Leaf of the features.
const PRIVILEGES: u32 = BASE + 3;
/// Leaf of the interfaces that the guest should use.
const RECOMMENDATIONS: u32 = BASE + 4;
/// Leaf of the largest numbers, the last one.
const LIMITS: u32 = BASE + 5;

/// How often a guest tries to take a spinlock before it gives its processor away (leaf 0x4000_0004, EBX): libvirt's usual value.
const SPINLOCK_RETRIES: u32 = 0x1fff;

/// A feature: leaf, register, bit, and its name in messages, which is QEMU's.
type Feature = (u32, Register, u32, &'static str);

/// Features that a host must have for a guest of this kind. Windows needs each of them.
const BASIC: &[Feature] = &[
    (PRIVILEGES, Eax, 1, "hv-time"),
    (PRIVILEGES, Eax, 5, "hv-hypercall"),
    (PRIVILEGES, Eax, 6, "hv-vpindex"),
    (PRIVILEGES, Eax, 9, "hv-reference-tsc"),
];

/// Further features. The features that one needs precede it.
const FURTHER: &[Feature] = &[
    (PRIVILEGES, Eax, 0, "hv-runtime"),
    (PRIVILEGES, Eax, 2, "hv-synic"),
    (PRIVILEGES, Eax, 3, "hv-stimer"),
    (PRIVILEGES, Eax, 4, "hv-vapic"),
    (PRIVILEGES, Eax, 11, "hv-frequencies"),
    (PRIVILEGES, Edx, 4, "hv-xmm-input"),
    (PRIVILEGES, Edx, 8, "hv-frequency-msrs"),
    (PRIVILEGES, Edx, 10, "hv-crash"),
    (PRIVILEGES, Edx, 19, "hv-stimer-direct"),
    (RECOMMENDATIONS, Eax, 2, "hv-tlbflush"),
    (RECOMMENDATIONS, Eax, 3, "hv-vapic-recommended"),
    (RECOMMENDATIONS, Eax, 5, "hv-relaxed"),
    (RECOMMENDATIONS, Eax, 9, "hv-no-auto-eoi"),
    (RECOMMENDATIONS, Eax, 10, "hv-ipi"),
    (RECOMMENDATIONS, Eax, 11, "hv-sparse-processors"),
];

/// Features that need another one.
const NEEDS: &[(&str, &str)] = &[
    ("hv-stimer", "hv-synic"),
    ("hv-stimer-direct", "hv-stimer"),
    ("hv-vapic-recommended", "hv-vapic"),
];

fn has(entries: &[kvm_cpuid_entry2], (leaf, register, bit, _): Feature) -> bool {
    find(entries, leaf, 0).is_some_and(|entry| value(&entry, register) & 1 << bit != 0)
}

/// Whether the CPUID of a machine has Hyper-V's leaves (TLFS 2.4.2, "Hv#1").
pub(super) fn is_in(entries: &[kvm_cpuid_entry2]) -> bool {
    find(entries, BASE + 1, 0).is_some_and(|entry| entry.eax.to_le_bytes() == *b"Hv#1")
}

/// The leaves of a guest with this many vCPUs, by what KVM offers (`KVM_GET_SUPPORTED_HV_CPUID`). The error has the features
/// that KVM lacks.
pub(super) fn leaves(offered: &[kvm_cpuid_entry2], vcpus: u32) -> Result<Vec<kvm_cpuid_entry2>, Vec<String>> {
    let lacks = |feature: &&Feature| !has(offered, **feature);
    let missing: Vec<_> = BASIC.iter().filter(lacks).map(|it| it.3.to_owned()).collect();
    if !missing.is_empty() {
        return Err(missing);
    }
    let mut given: Vec<Feature> = Vec::new();
    for feature in BASIC.iter().chain(FURTHER).filter(|it| has(offered, **it)) {
        let mut needed = NEEDS.iter().filter(|(name, _)| *name == feature.3);
        if needed.all(|(_, needs)| given.iter().any(|it| it.3 == *needs)) {
            given.push(*feature);
        }
    }
    let register = |leaf, register| {
        let bits = given.iter().filter(|it| (it.0, it.1) == (leaf, register));
        bits.fold(0, |mask, it| mask | 1 << it.2)
    };
    let leaf = |function, eax, ebx, ecx, edx| kvm_cpuid_entry2 {
        function,
        eax,
        ebx,
        ecx,
        edx,
        ..Default::default()
    };
    let word = |text: &[u8; 4]| u32::from_le_bytes(*text);
    Ok(vec![
        leaf(BASE, LIMITS, word(b"Micr"), word(b"osof"), word(b"t Hv")),
        leaf(BASE + 1, word(b"Hv#1"), 0, 0, 0),
        // The version of Windows Server 2016: build 14393 of 10.0.
        leaf(BASE + 2, 14393, 10 << 16, 0, 0),
        leaf(
            PRIVILEGES,
            register(PRIVILEGES, Eax),
            0,
            0,
            register(PRIVILEGES, Edx),
        ),
        leaf(
            RECOMMENDATIONS,
            register(RECOMMENDATIONS, Eax),
            SPINLOCK_RETRIES,
            0,
            0,
        ),
        // Most virtual processors.
        leaf(LIMITS, vcpus.max(64), 0, 0, 0),
    ])
}

/// Gives a machine these leaves.
pub(super) fn insert(entries: &mut Vec<kvm_cpuid_entry2>, leaves: Vec<kvm_cpuid_entry2>) {
    for entry in entries
        .iter_mut()
        .filter(|it| (BASE..KVM_BASE).contains(&it.function))
    {
        if entry.function == BASE {
            entry.eax += SHIFT;
        }
        entry.function += SHIFT;
    }
    entries.extend(leaves);
}

/// The reverse: takes the leaves out of an untrusted CPUID; none of a machine without them.
pub(super) fn remove(entries: &mut Vec<kvm_cpuid_entry2>) -> Vec<kvm_cpuid_entry2> {
    if !is_in(entries) {
        return Vec::new();
    }
    let leaves = entries
        .extract_if(.., |it| (BASE..KVM_BASE).contains(&it.function))
        .collect();
    let of_kvm = KVM_BASE..KVM_BASE + SHIFT;
    for entry in entries.iter_mut().filter(|it| of_kvm.contains(&it.function)) {
        if entry.function == KVM_BASE {
            entry.eax = entry.eax.wrapping_sub(SHIFT);
        }
        entry.function -= SHIFT;
    }
    leaves
}

/// Refuses the leaves of a saved machine that this host, which offers `own`, can't have. The version, the number of retries and
/// the limits are descriptions. The text completes a sentence.
pub(super) fn check(own: &[kvm_cpuid_entry2], saved: &[kvm_cpuid_entry2]) -> Result<(), String> {
    let mut missing = Vec::new();
    for entry in saved {
        let here = find(own, entry.function, 0).filter(|_| entry.index == 0);
        let Some(here) = here else {
            return Err(format!(
                "the machine has CPUID {:#x}, which this program does not know",
                entry.function
            ));
        };
        for register in Register::ALL {
            let place = (entry.function, register);
            let (wanted, there) = (value(entry, register), value(&here, register));
            match place {
                (PRIVILEGES, _) | (RECOMMENDATIONS, Eax | Ecx | Edx) => {
                    missing.extend(names(place, wanted & !there));
                }
                (BASE, Eax) | (0x4000_0002 | RECOMMENDATIONS | LIMITS, _) => {}
                _ if wanted == there => {}
                _ => return Err("the machine has another interface of Hyper-V than this host".to_owned()),
            }
        }
    }
    match missing.is_empty() {
        true => Ok(()),
        false => Err(format!("this host's KVM lacks {}", super::list(&missing))),
    }
}

fn names((leaf, register): (u32, Register), bits: u32) -> impl Iterator<Item = String> {
    let set = (0..u32::BITS).filter(move |bit| bits & 1 << bit != 0);
    set.map(move |bit| {
        let mut all = BASIC.iter().chain(FURTHER);
        match all.find(|it| (it.0, it.1, it.2) == (leaf, register, bit)) {
            Some(feature) => feature.3.to_owned(),
            None => format!("bit {bit} of {} in CPUID {leaf:#x}", register.name()),
        }
    })
}
