//! Whether this host can have the CPUID of a saved machine.
//!
//! A guest keeps its CPUID while it moves, so each of its features must exist here: the saved features have to be a
//! subset of the offered ones. These parts are numbers or layouts, and have rules of their own:
//!
//! - equal: the vendor (leaf 0). The guest chose instructions and MSRs by vendor.
//! - equal: the line size of CLFLUSH (leaf 1, EBX 15:8). The guest flushes memory in steps of this size.
//! - equal: offset, size and flags of each XSAVE component of the guest (leaf 0xd; Intel SDM vol. 1, 13.5). The guest's areas
//!   in memory have this layout, and the processor executes XSAVE without an exit.
//! - equal: the hypervisor's name (leaf 0x4000_0000). Another name is another interface.
//! - equal: leaves that this program does not know.
//! - at most the host's: physical and linear address bits (leaf 0x8000_0008, EAX). Page tables and BARs use them.
//! - at most the host's: the version of AVX10 (leaf 0x24, EBX 7:0). A version includes the earlier ones.
//! - any: largest leaves, signature, brand, caches, TLBs and topology. These are descriptions. KVM answers with the values
//!   that it was given, and no instruction depends on them.

use kvm_bindings::kvm_cpuid_entry2;
use vmmd_spec::cpu::features::{
    self, KVM_FEATURES,
    Register::{self, Eax, Ebx, Ecx, Edx},
};

use super::{find, list, mappable_bits, value};
use crate::kvm::address_bits;

/// Rule for the bits of a register. Bits of no field may differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    /// Each set bit has to be set here, too.
    pub features: u32,
    /// The same here.
    equal: u32,
    /// A number that has to be at least as large here.
    at_most: u32,
}

const ANY: Rule = Rule {
    features: 0,
    equal: 0,
    at_most: 0,
};
const FEATURES: Rule = Rule {
    features: u32::MAX,
    ..ANY
};
const EQUAL: Rule = Rule {
    equal: u32::MAX,
    ..ANY
};

/// The rule for a register. Address bits and XSAVE components are checked apart.
pub(super) fn rule(leaf: u32, subleaf: u32, register: Register) -> Rule {
    match (leaf, subleaf, register) {
        (0 | 0x4000_0000, _, Eax)
        | (1 | 0x8000_0001, _, Eax)
        | (7, 0, Eax)
        | (2..=5 | 0xb | 0x8000_0000 | 0x8000_0002..=0x8000_0006 | 0x8000_0019..=0x8000_001e, ..)
        | (0xd, 0, Ebx | Ecx)
        | (0xd, 1, Ebx)
        | (0xd, 2.., _)
        | (0x24, _, Eax)
        | (0x8000_0001, _, Ebx)
        | (0x8000_0008, _, Eax | Ecx | Edx)
        | (0x8000_0021, _, Ebx) => ANY,
        (1, _, Ebx) => Rule { equal: 0xff00, ..ANY },
        (0x24, _, Ebx) => Rule {
            at_most: 0xff,
            features: 0x7_0000,
            ..ANY
        },
        (1 | 0x8000_0001, _, Ecx | Edx)
        | (6, _, Eax)
        | (7, ..)
        | (0xd, ..)
        | (KVM_FEATURES, _, Eax | Edx)
        | (0x8000_0008, _, Ebx)
        | (0x8000_0021, _, Eax | Ecx) => FEATURES,
        _ => EQUAL,
    }
}

/// Refuses the CPUID of a saved machine that this host, which offers `own`, can't have. The text completes a sentence.
pub(super) fn check(own: &[kvm_cpuid_entry2], saved: &[kvm_cpuid_entry2]) -> Result<(), String> {
    let mut missing = Vec::new();
    for entry in saved {
        let here = find(own, entry.function, entry.index).unwrap_or_default();
        for register in Register::ALL {
            let (wanted, there) = (value(entry, register), value(&here, register));
            let rule = rule(entry.function, entry.index, register);
            let place = (entry.function, entry.index, register);
            missing.extend(features::names(place, wanted & !there & rule.features));
            let differs = (wanted ^ there) & rule.equal != 0;
            if differs || wanted & rule.at_most > there & rule.at_most {
                return Err(format!(
                    "the machine has CPUID {:#x}.{:#x} {} = {wanted:#x}, and this host {there:#x}",
                    entry.function,
                    entry.index,
                    register.name()
                ));
            }
        }
    }
    if !missing.is_empty() {
        return Err(format!("this host's processors and KVM lack {}", list(&missing)));
    }
    check_address_bits(own, saved)?;
    check_components(own, saved)
}

fn check_address_bits(own: &[kvm_cpuid_entry2], saved: &[kvm_cpuid_entry2]) -> Result<(), String> {
    let linear = |entries: &[_]| find(entries, 0x8000_0008, 0).map_or(48, |leaf| leaf.eax >> 8 & 0xff);
    for (kind, wanted, here) in [
        ("physical", address_bits(saved), address_bits(own)),
        ("mappable physical", mappable_bits(saved), mappable_bits(own)),
        ("linear", linear(saved), linear(own)),
    ] {
        if wanted > here {
            return Err(format!(
                "the machine has {kind} addresses of {wanted} bits, and this host of {here}"
            ));
        }
    }
    Ok(())
}

/// Subleaves of leaf 0xd: for the components of XCR0 and IA32_XSS.
fn check_components(own: &[kvm_cpuid_entry2], saved: &[kvm_cpuid_entry2]) -> Result<(), String> {
    let of_user = find(saved, 0xd, 0).map_or(0, |leaf| leaf.eax);
    let of_supervisor = find(saved, 0xd, 1).map_or(0, |leaf| leaf.ecx);
    for component in (2..u32::BITS).filter(|bit| (of_user | of_supervisor) & 1 << bit != 0) {
        let layout = |entries| find(entries, 0xd, component).map(|leaf| (leaf.eax, leaf.ebx, leaf.ecx));
        let (wanted, here) = (layout(saved), layout(own));
        if wanted != here {
            let text = |layout: Option<(u32, u32, u32)>| match layout {
                Some((size, offset, flags)) => format!("{size} bytes at {offset} (flags {flags:#x})"),
                None => "none".to_owned(),
            };
            return Err(format!(
                "the machine has XSAVE component {component} of {}, and this host of {}",
                text(wanted),
                text(here)
            ));
        }
    }
    Ok(())
}

/// Bits of IA32_ARCH_CAPABILITIES (Intel SDM vol. 4, table 2-2) with names for messages.
const CAPABILITIES: [(u32, &str); 26] = [
    (0, "rdcl_no"),
    (1, "ibrs_all"),
    (2, "rsba"),
    (3, "skip_l1dfl_vmentry"),
    (4, "ssb_no"),
    (5, "mds_no"),
    (6, "pschange_mc_no"),
    (7, "tsx_ctrl"),
    (8, "taa_no"),
    (9, "mcu_control"),
    (10, "misc_package_ctrls"),
    (11, "energy_filtering_ctl"),
    (12, "doitm"),
    (13, "sbdr_ssdp_no"),
    (14, "fbsdp_no"),
    (15, "psdp_no"),
    (17, "fb_clear"),
    (18, "fb_clear_ctrl"),
    (19, "rrsba"),
    (20, "bhi_no"),
    (21, "xapic_disable_status"),
    (24, "pbrsb_no"),
    (25, "gds_ctrl"),
    (26, "gds_no"),
    (27, "rfds_no"),
    (28, "rfds_clear"),
];
/// RSBA and RRSBA, which report a weakness: the guest has to know of it.
const WEAKNESSES: u64 = 1 << 2 | 1 << 19;

/// Refuses a guest whose register reports an immunity or a remedy that this host lacks, or does not report a weakness of this
/// host. `saved` is 0 in states of older programs.
pub(super) fn check_arch_capabilities(own: u64, saved: u64) -> Result<(), String> {
    if saved == 0 {
        return Ok(());
    }
    let lacking = saved & !own & !WEAKNESSES;
    let weak = own & !saved & WEAKNESSES;
    let names = |bits: u64| {
        let set = (0..u64::BITS).filter(|bit| bits & 1 << bit != 0);
        let name = |bit| match CAPABILITIES.iter().find(|(other, _)| *other == bit) {
            Some((_, name)) => (*name).to_owned(),
            None => format!("bit {bit} of IA32_ARCH_CAPABILITIES"),
        };
        set.map(name).collect::<Vec<_>>()
    };
    match (lacking, weak) {
        (0, 0) => Ok(()),
        (0, weak) => Err(format!(
            "this host's processors have the weakness {}, which the guest does not know of",
            list(&names(weak))
        )),
        (lacking, _) => Err(format!("this host's processors lack {}", list(&names(lacking)))),
    }
}
