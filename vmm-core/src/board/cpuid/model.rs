//! Processor models: features, signature and address bits of a guest that are the same on all hosts.

use kvm_bindings::kvm_cpuid_entry2;
use vmm_protocol::machine::Processor;
use vmmd_spec::cpu::{
    Model,
    features::{self, AMD_COPIES, KVM_FEATURES, PLATFORM, Place, Register},
};

use super::{Vendor, find, mappable_bits, rules, set_xsave_size, value, value_mut, vendor};

/// Physical address bits of a guest with a model, where the host has no fewer: those of Intel's servers before Ice Lake.
const ADDRESS_BITS: u32 = 46;
/// Linear address bits without la57.
const LINEAR_BITS: u32 = 48;

/// State components of XCR0 by feature (Intel SDM vol. 1, 13.1).
const COMPONENTS: [(&str, u32); 4] = [
    ("avx", 1 << 2),
    ("mpx", 1 << 3 | 1 << 4),
    ("avx512f", 1 << 5 | 1 << 6 | 1 << 7),
    ("pku", 1 << 9),
];
/// x87 and SSE.
const BASE_COMPONENTS: u32 = 0b11;
/// CET's components of IA32_XSS.
const CET: u32 = 1 << 11 | 1 << 12;

/// Gives the guest of a host with `entries` this processor. The error has the features that the host lacks.
pub(super) fn apply(entries: &mut Vec<kvm_cpuid_entry2>, processor: &Processor) -> Result<(), Vec<String>> {
    let lacks = |name: &&&str| !has(entries, name);
    let missing: Vec<_> = processor
        .features
        .iter()
        .filter(lacks)
        .map(|name| (*name).to_owned())
        .collect();
    if !missing.is_empty() {
        return Err(missing);
    }
    let is_host = processor.model == Model::Host;
    if is_host && processor.without.is_empty() {
        return Ok(());
    }
    let removed: Vec<_> = features::all()
        .map(|feature| feature.name)
        .filter(|name| features::needs_any(name, &processor.without))
        .collect();
    let is_amd = vendor(entries) == Vendor::Amd;
    for entry in entries.iter_mut() {
        for register in Register::ALL {
            let place = (entry.function, entry.index, register);
            let kept = match is_host {
                true => !features::mask(place, &removed),
                false => {
                    kept(place, &processor.features, is_amd)
                        | !rules::rule(place.0, place.1, place.2).features
                }
            };
            *value_mut(entry, register) &= kept;
        }
    }
    set_components(entries, is_host);
    if let Some(signature) = signature(processor.model, is_amd) {
        set_identity(entries, signature, is_amd);
    }
    Ok(())
}

fn has(entries: &[kvm_cpuid_entry2], name: &str) -> bool {
    features::find(name).is_some_and(|feature| {
        let (leaf, subleaf, register) = feature.place;
        find(entries, leaf, subleaf).is_some_and(|entry| value(&entry, register) & feature.mask != 0)
    })
}

/// Feature bits of a register that a guest with a model keeps.
fn kept(place: Place, of_model: &[&str], is_amd: bool) -> u32 {
    let named = features::mask(place, of_model) | features::mask(place, &PLATFORM);
    match place {
        // Guests of all models profit from KVM's interfaces; each named one is in all kernels since 5.8.
        (KVM_FEATURES, _, Register::Eax) => features::all()
            .filter(|feature| feature.place == place)
            .fold(named, |mask, feature| mask | feature.mask),
        (0x8000_0001, _, Register::Edx) if is_amd => named | AMD_COPIES,
        // Components follow from the features.
        (0xd, 0, Register::Eax) | (0xd, 1, Register::Ecx) => u32::MAX,
        _ => named,
    }
}

/// Leaf 0xd: removes the state components of features that the guest does not have.
fn set_components(entries: &mut Vec<kvm_cpuid_entry2>, is_host: bool) {
    let of = |there: bool| {
        let components = COMPONENTS.iter().filter(|(name, _)| has(entries, name) == there);
        components.fold(0, |mask, (_, bits)| mask | bits)
    };
    let user = if is_host {
        !of(false)
    } else {
        BASE_COMPONENTS | of(true)
    };
    let supervisor = match (has(entries, "shstk") || has(entries, "ibt"), is_host) {
        (true, true) => u32::MAX,
        (true, false) => CET,
        (false, true) => !CET,
        (false, false) => 0,
    };
    if !has(entries, "xsave") {
        entries.retain(|entry| entry.function != 0xd);
    }
    let mut components = 0;
    for entry in entries.iter_mut().filter(|entry| entry.function == 0xd) {
        match entry.index {
            0 => {
                entry.eax &= user;
                components |= entry.eax;
            }
            1 => {
                entry.ecx &= supervisor;
                components |= entry.ecx;
            }
            _ => {}
        }
    }
    entries.retain(|entry| {
        entry.function != 0xd || entry.index < 2 || components.checked_shr(entry.index).unwrap_or(0) & 1 != 0
    });
    set_xsave_size(entries);
}

/// Family, model and stepping (leaf 1, EAX) of a processor of this level, as QEMU's models of these generations have them.
fn signature(model: Model, is_amd: bool) -> Option<u32> {
    Some(match (model, is_amd) {
        (Model::Host, _) => return None,
        // Nehalem, and Piledriver.
        (Model::V2, false) => 0x0001_06a3,
        (Model::V2, true) => 0x0060_0f20,
        // Haswell, and Zen.
        (Model::V3, false) => 0x0003_06c4,
        (Model::V3, true) => 0x0080_0f12,
        // Skylake-SP, and Zen 4.
        (Model::V4, false) => 0x0005_0654,
        (Model::V4, true) => 0x00a1_0f11,
    })
}

/// Sets what describes the processor itself.
fn set_identity(entries: &mut Vec<kvm_cpuid_entry2>, signature: u32, is_amd: bool) {
    let physical = mappable_bits(entries).min(ADDRESS_BITS);
    let has_la57 = has(entries, "la57");
    if !has(entries, "avx10") {
        entries.retain(|entry| entry.function != 0x24);
    }
    for entry in entries {
        match entry.function {
            1 => entry.eax = signature,
            0x8000_0001 => entry.eax = if is_amd { signature } else { 0 },
            0x8000_0008 => {
                let linear = if has_la57 {
                    entry.eax >> 8 & 0xff
                } else {
                    LINEAR_BITS
                };
                entry.eax = linear << 8 | physical;
            }
            _ => {}
        }
    }
}
