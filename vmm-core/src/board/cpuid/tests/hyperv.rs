//! Hyper-V's leaves.

use super::*;
use crate::board::cpuid::hyperv;

/// A KVM that offers each feature, or all but those in these bits of leaf 3, EAX.
fn offered(without: u32) -> Vec<kvm_cpuid_entry2> {
    let mut leaves: Vec<_> = (0x4000_0000..=0x4000_000a)
        .map(|leaf| entry(leaf, 0, [u32::MAX; 4]))
        .collect();
    leaves[3].eax &= !without;
    leaves
}

fn registers(entry: kvm_cpuid_entry2) -> [u32; 4] {
    [entry.eax, entry.ebx, entry.ecx, entry.edx]
}

#[test]
fn leaves_have_the_known_features_of_kvm_alone() {
    let leaves = hyperv::leaves(&offered(0), 4).unwrap();
    let functions: Vec<_> = leaves.iter().map(|leaf| leaf.function).collect();
    assert_eq!(functions, (0x4000_0000..=0x4000_0005).collect::<Vec<_>>());
    assert!(hyperv::is_in(&leaves));
    assert_eq!(registers(leaves[3]), [0xa7f, 0, 0, 0x8_0510]);
    assert_eq!(registers(leaves[4]), [0xe2c, 0x1fff, 0, 0]);
    assert_eq!(registers(leaves[5]), [64, 0, 0, 0]);
    assert_eq!(hyperv::leaves(&offered(0), 254).unwrap()[5].eax, 254);
}

#[test]
fn timers_need_the_interrupt_controller() {
    // Without SynIC.
    let leaves = hyperv::leaves(&offered(1 << 2), 1).unwrap();
    assert_eq!(registers(leaves[3]), [0xa73, 0, 0, 0x510]);
    // Without the MSRs for the local APIC.
    let leaves = hyperv::leaves(&offered(1 << 4), 1).unwrap();
    assert_eq!((leaves[3].eax, leaves[4].eax), (0xa6f, 0xe24));
}

#[test]
fn host_without_a_basic_feature_is_refused_by_name() {
    let missing = hyperv::leaves(&offered(1 << 6 | 1 << 9), 1).unwrap_err();
    assert_eq!(missing, ["hv-vpindex", "hv-reference-tsc"]);
    assert_eq!(hyperv::leaves(&[], 1).unwrap_err().len(), 4);
}

#[test]
fn leaves_of_kvm_move_behind_and_back() {
    let plain = common(&greedy(b"GenuineIntel"), topology(2), true);
    let mut entries = plain.clone();
    let leaves = hyperv::leaves(&offered(0), 2).unwrap();
    hyperv::insert(&mut entries, leaves.clone());
    let kvm = only(&entries, 0x4000_0100, 0);
    assert_eq!((kvm.eax, kvm.ebx.to_le_bytes()), (0x4000_0101, *b"KVMK"));
    assert_eq!(
        only(&entries, 0x4000_0101, 0).eax,
        only(&plain, 0x4000_0001, 0).eax
    );
    assert_eq!(only(&entries, 0x4000_0000, 0).ebx.to_le_bytes(), *b"Micr");
    let taken = hyperv::remove(&mut entries);
    assert_eq!((taken, entries), (leaves, plain.clone()));
    let mut entries = plain.clone();
    assert_eq!(hyperv::remove(&mut entries), []);
    assert_eq!(entries, plain);
}

#[test]
fn saved_leaves_have_to_be_those_of_this_host_or_fewer() {
    let own = hyperv::leaves(&offered(0), 2).unwrap();
    let fewer = hyperv::leaves(&offered(1 << 2 | 1 << 11), 100).unwrap();
    assert_eq!(hyperv::check(&own, &fewer), Ok(()));
    let refused = hyperv::check(&fewer, &own).unwrap_err();
    assert_eq!(
        refused,
        "this host's KVM lacks hv-synic, hv-stimer, hv-frequencies, hv-stimer-direct"
    );
    let changed = |change: fn(&mut Vec<kvm_cpuid_entry2>)| {
        let mut saved = own.clone();
        change(&mut saved);
        hyperv::check(&own, &saved)
    };
    assert_eq!(changed(|saved| saved[2].eax = 20348), Ok(()), "another version");
    for (change, says) in [
        (
            (|saved| saved[0].ebx = 0) as fn(&mut Vec<kvm_cpuid_entry2>),
            "another interface",
        ),
        (|saved| saved[3].ebx = 1 << 4, "bit 4 of EBX in CPUID 0x40000003"),
        (|saved| saved.push(entry(0x4000_000a, 0, [1; 4])), "does not know"),
        (|saved| saved[1].index = 1, "does not know"),
    ] {
        let refused = changed(change).unwrap_err();
        assert!(refused.contains(says), "{refused}");
    }
}
