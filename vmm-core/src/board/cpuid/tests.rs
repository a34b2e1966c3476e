use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

fn entry(function: u32, index: u32, registers: [u32; 4]) -> kvm_cpuid_entry2 {
    let [eax, ebx, ecx, edx] = registers;
    kvm_cpuid_entry2 {
        function,
        index,
        eax,
        ebx,
        ecx,
        edx,
        ..Default::default()
    }
}

/// A host that offers all it can: every bit of every leaf.
fn greedy(vendor: &[u8; 12]) -> Vec<kvm_cpuid_entry2> {
    let word = |at: usize| u32::from_le_bytes(*vendor[at..].first_chunk().unwrap());
    let mut entries = vec![entry(0, 0, [0x20, word(0), word(8), word(4)])];
    for leaf in (1..=0x20)
        .chain(0x4000_0000..=0x4000_0001)
        .chain(0x8000_0000..=0x8000_0026)
    {
        match leaf {
            4 | 0x8000_001d => {
                for (index, level) in [(0, 1), (1, 1), (2, 2), (3, 3)] {
                    entries.push(entry(leaf, index, [u32::MAX << 14 | level << 5 | 1, 0, 0, 0]));
                }
                entries.push(entry(leaf, 4, [0; 4]));
            }
            0xd => {
                entries.push(entry(leaf, 0, [0x602e7, 11_008, 11_008, 0]));
                for (index, size, offset) in [
                    (2, 256, 576),
                    (5, 64, 1088),
                    (9, 8, 2688),
                    (17, 64, 2752),
                    (18, 8192, 2816),
                ] {
                    entries.push(entry(leaf, index, [size, offset, 0, 0]));
                }
            }
            _ => entries.push(entry(leaf, 0, [u32::MAX; 4])),
        }
    }
    entries
}

fn find(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
    let mut found = entries
        .iter()
        .filter(|entry| (entry.function, entry.index) == (function, index));
    let entry = *found
        .next()
        .unwrap_or_else(|| panic!("leaf {function:#x}.{index}"));
    assert!(found.next().is_none(), "leaf {function:#x}.{index} twice");
    entry
}

fn topology(cores: u32) -> Topology {
    Topology::for_cores(cores).unwrap()
}

#[test]
fn what_a_guest_must_not_see_is_gone() {
    for vendor in [b"GenuineIntel", b"AuthenticAMD"] {
        let entries = common(&greedy(vendor), topology(4), true);
        let one = find(&entries, 1, 0);
        assert_eq!(one.ecx & bit::VMX, 0);
        assert_eq!(one.ecx & bit::HYPERVISOR, bit::HYPERVISOR);
        assert_eq!(find(&entries, 7, 0).edx & bit::AMX_7D, 0);
        assert_eq!(find(&entries, 7, 0).ebx & (1 << 1), 1 << 1, "TSC_ADJUST");
        assert_eq!(find(&entries, 0x8000_0001, 0).ecx & (1 << 2), 0, "SVM");
        assert_eq!(find(&entries, 6, 0).eax, bit::ARAT);
        for leaf in [0xa, 0x14, 0x15, 0x1f, 0x8000_0007, 0x8000_000a, 0x8000_0022] {
            assert!(!entries.iter().any(|entry| entry.function == leaf), "{leaf:#x}");
        }
    }
    let amd = common(&greedy(b"AuthenticAMD"), topology(4), true);
    assert_eq!(find(&amd, 7, 0).edx & bit::ARCH_CAPABILITIES, 0);
}

#[test]
fn the_size_of_the_extended_state_is_without_amx() {
    let entries = common(&greedy(b"GenuineIntel"), topology(1), true);
    let leaf = find(&entries, 0xd, 0);
    assert_eq!(leaf.eax, 0x2e7);
    assert_eq!(leaf.ecx, 2696);
    assert!(
        !entries
            .iter()
            .any(|entry| entry.function == 0xd && entry.index >= 17)
    );
}

#[test]
fn the_brand_is_the_same_whatever_the_host_says() {
    for (vendor, brand) in [
        (b"GenuineIntel", "Intel(R) virtual CPU (vmmd)"),
        (b"AuthenticAMD", "AMD virtual CPU (vmmd)"),
    ] {
        let entries = common(&greedy(vendor), topology(1), true);
        let bytes: Vec<u8> = (0x8000_0002..=0x8000_0004)
            .map(|leaf| find(&entries, leaf, 0))
            .flat_map(|entry| [entry.eax, entry.ebx, entry.ecx, entry.edx])
            .flat_map(u32::to_le_bytes)
            .collect();
        let text = String::from_utf8(bytes).unwrap();
        assert_eq!(text.trim_end_matches('\0'), brand);
    }
}

#[test]
fn the_timer_bits_follow_the_host() {
    let without = common(&greedy(b"GenuineIntel"), topology(1), false);
    assert_eq!(find(&without, 1, 0).ecx & bit::TSC_DEADLINE, 0);
    // KVM's supported CPUID lacks the bit; KVM reports the feature through a capability.
    let mut modest = greedy(b"GenuineIntel");
    modest
        .iter_mut()
        .filter(|entry| entry.function == 1)
        .for_each(|entry| entry.ecx = 0);
    let with = common(&modest, topology(1), true);
    assert_eq!(find(&with, 1, 0).ecx & bit::TSC_DEADLINE, bit::TSC_DEADLINE);
    assert_eq!(find(&with, 1, 0).ecx & bit::X2APIC, bit::X2APIC);
}

#[test]
fn kvm_says_its_name() {
    let entries = common(&greedy(b"GenuineIntel"), topology(1), true);
    let leaf = find(&entries, 0x4000_0000, 0);
    let name: Vec<u8> = [leaf.ebx, leaf.ecx, leaf.edx]
        .into_iter()
        .flat_map(u32::to_le_bytes)
        .collect();
    assert_eq!(name, b"KVMKVMKVM\0\0\0");
}

/// Where a number of sockets begins or ends, and the least and the most.
const SIZES: [u32; 9] = [1, 2, 16, 17, 64, 240, 248, 253, 254];

proptest! {
    /// Reads the topology back as a guest does (Intel SDM vol. 3, 9.9.3).
    #[test]
    fn a_guest_finds_the_topology_that_was_meant(cores in prop_oneof![1_u32..=254, prop::sample::select(SIZES.to_vec())]) {
        let topology = topology(cores);
        for vendor in [b"GenuineIntel", b"AuthenticAMD"] {
            let common = common(&greedy(vendor), topology, true);
            let mut seen = HashSet::new();
            let mut sockets = HashSet::new();
            for index in 0..cores {
                let mut entries = common.clone();
                personalise(&mut entries, topology, index);
                let id = find(&entries, 0xb, 0).edx;
                prop_assert_eq!(id, apic_id(topology, index));
                let one = find(&entries, 1, 0).ebx;
                prop_assert_eq!(one >> 24, id);
                // Rounded up to a power of two it counts the package's ids (Intel SDM vol. 3, 9.9.3).
                prop_assert_eq!((one >> 16 & 0xff).next_power_of_two(), topology.cores_per_socket.next_power_of_two());
                prop_assert!(seen.insert(id));
                prop_assert!(id < 255, "the broadcast, or out of reach of the I/O APIC");
                let package = find(&entries, 0xb, 1);
                prop_assert_eq!(package.ebx, topology.cores_per_socket);
                sockets.insert(id >> package.eax);
                // Exactly the package shares the last level's cache. The other caches are not
                // shared.
                let shared_by = |level: u32| find(&entries, 4, level).eax >> 14 & 0xfff;
                prop_assert_eq!(shared_by(3) + 1, 1 << package.eax);
                prop_assert_eq!(shared_by(0) + shared_by(2), 0);
                let amd = find(&entries, 0x8000_001e, 0);
                prop_assert_eq!((amd.eax, amd.ecx), (id, id >> package.eax));
            }
            prop_assert_eq!(sockets.len(), topology.sockets as usize);
        }
    }
}
