mod hyperv;

use std::collections::HashSet;

use proptest::prelude::*;
use vmmd_spec::cpu::Model;

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

fn only(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
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
        let one = only(&entries, 1, 0);
        assert_eq!(one.ecx & bit::VMX, 0);
        assert_eq!(one.ecx & bit::HYPERVISOR, bit::HYPERVISOR);
        assert_eq!(only(&entries, 7, 0).edx & bit::AMX_7D, 0);
        assert_eq!(only(&entries, 7, 0).ebx & (1 << 1), 1 << 1, "TSC_ADJUST");
        assert_eq!(only(&entries, 0x8000_0001, 0).ecx & (1 << 2), 0, "SVM");
        assert_eq!(only(&entries, 6, 0).eax, bit::ARAT);
        for leaf in [0xa, 0x14, 0x15, 0x1f, 0x8000_0007, 0x8000_000a, 0x8000_0022] {
            assert!(!entries.iter().any(|entry| entry.function == leaf), "{leaf:#x}");
        }
    }
    let amd = common(&greedy(b"AuthenticAMD"), topology(4), true);
    assert_eq!(only(&amd, 7, 0).edx & bit::ARCH_CAPABILITIES, 0);
}

#[test]
fn the_size_of_the_extended_state_is_without_amx() {
    let entries = common(&greedy(b"GenuineIntel"), topology(1), true);
    let leaf = only(&entries, 0xd, 0);
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
            .map(|leaf| only(&entries, leaf, 0))
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
    assert_eq!(only(&without, 1, 0).ecx & bit::TSC_DEADLINE, 0);
    // KVM's supported CPUID lacks the bit; KVM reports the feature through a capability.
    let mut modest = greedy(b"GenuineIntel");
    modest
        .iter_mut()
        .filter(|entry| entry.function == 1)
        .for_each(|entry| entry.ecx = 0);
    let with = common(&modest, topology(1), true);
    assert_eq!(only(&with, 1, 0).ecx & bit::TSC_DEADLINE, bit::TSC_DEADLINE);
    assert_eq!(only(&with, 1, 0).ecx & bit::X2APIC, bit::X2APIC);
}

#[test]
fn kvm_says_its_name() {
    let entries = common(&greedy(b"GenuineIntel"), topology(1), true);
    let leaf = only(&entries, 0x4000_0000, 0);
    let name: Vec<u8> = [leaf.ebx, leaf.ecx, leaf.edx]
        .into_iter()
        .flat_map(u32::to_le_bytes)
        .collect();
    assert_eq!(name, b"KVMKVMKVM\0\0\0");
}

/// A host whose processors have these features and no others, and AMD's or Intel's places of XSAVE components.
fn host(vendor: &[u8; 12], names: &[&str]) -> Vec<kvm_cpuid_entry2> {
    let word = |at: usize| u32::from_le_bytes(*vendor[at..].first_chunk().unwrap());
    let is_amd = vendor == b"AuthenticAMD";
    let mut entries = vec![
        entry(0, 0, [0x1f, word(0), word(8), word(4)]),
        entry(1, 0, [0x000c_06f2, 0x0800, 0, 0]),
        entry(4, 0, [0x121, 0x02c0_003f, 0x3f, 0]),
        entry(6, 0, [4, 0, 0, 0]),
        entry(7, 0, [2, 0, 0, 0]),
        entry(7, 1, [0; 4]),
        entry(7, 2, [0; 4]),
        entry(0xd, 1, [0; 4]),
        entry(0x4000_0001, 0, [0x0100_7efb, 0, 0, 0]),
        entry(0x8000_0000, 0, [0x8000_0021, 0, 0, 0]),
        entry(0x8000_0001, 0, [0; 4]),
        entry(0x8000_0008, 0, [0x3930, 0, 0, 0]),
        entry(0x8000_0021, 0, [0; 4]),
    ];
    for name in names {
        let feature = vmmd_spec::cpu::features::find(name).unwrap();
        let (leaf, subleaf, register) = feature.place;
        let found = entries
            .iter_mut()
            .find(|entry| (entry.function, entry.index) == (leaf, subleaf));
        *value_mut(found.unwrap(), register) |= feature.mask;
    }
    let has = |name: &str| names.contains(&name);
    let pkru = if is_amd { 832 } else { 2688 };
    let mut states = 3;
    for (name, component, size, offset) in [
        ("avx", 2, 256, 576),
        ("avx512f", 5, 64, 1088),
        ("avx512f", 6, 512, 1152),
        ("avx512f", 7, 1024, 1664),
        ("pku", 9, 8, pkru),
    ] {
        if has(name) {
            states |= 1 << component;
            entries.push(entry(0xd, component, [size, offset, 0, 0]));
        }
    }
    if has("xsave") {
        entries.push(entry(0xd, 0, [states, 2696, 2696, 0]));
    }
    entries
}

/// Names of a level and more.
fn level(model: Model, more: &[&'static str]) -> Vec<&'static str> {
    model.features().into_iter().chain(more.iter().copied()).collect()
}

/// CPUID of a guest of the host.
fn guest(host: &[kvm_cpuid_entry2], model: Model) -> Result<Vec<kvm_cpuid_entry2>, Vec<String>> {
    let mut entries = common(host, topology(2), true);
    personalise(&mut entries, topology(2), 0);
    let processor = Processor {
        model,
        features: model.features(),
        without: Vec::new(),
        hyperv: false,
    };
    model::apply(&mut entries, &processor)?;
    entries.sort_by_key(|entry| (entry.function, entry.index));
    Ok(entries)
}

const VENDORS: [&[u8; 12]; 2] = [b"GenuineIntel", b"AuthenticAMD"];
const LEVELS: [Model; 3] = [Model::V2, Model::V3, Model::V4];

#[test]
fn host_has_the_models_up_to_its_level() {
    for vendor in VENDORS {
        for own in LEVELS {
            let host = host(vendor, &level(own, &["aes"]));
            for wanted in LEVELS {
                let made = guest(&host, wanted);
                assert_eq!(made.is_ok(), wanted <= own, "{wanted} on {own}");
            }
        }
    }
    let missing = guest(&host(VENDORS[0], &level(Model::V2, &[])), Model::V4).unwrap_err();
    for name in ["avx2", "avx512f", "smap"] {
        assert!(missing.iter().any(|it| it == name), "{missing:?}");
    }
    assert!(!missing.iter().any(|it| it == "popcnt"), "{missing:?}");
}

#[test]
fn guests_of_a_model_are_the_same_on_all_hosts() {
    let more = [
        "aes",
        "avx_vnni",
        "md_clear",
        "pku",
        "rtm",
        "sha_ni",
        "spec_ctrl",
        "xsaveopt",
        "xsaves",
        "xsavec",
    ];
    for vendor in VENDORS {
        let fresh = host(vendor, &level(Model::V4, &more));
        for model in LEVELS {
            let plain = host(vendor, &level(model, &[]));
            let (one, other) = (guest(&fresh, model).unwrap(), guest(&plain, model).unwrap());
            // The size of the extended state in use, which KVM keeps up to date, has the host's as a limit.
            assert_eq!(one, other, "{model}");
        }
    }
}

#[test]
fn removed_feature_takes_its_state_component() {
    let all = level(Model::V4, &["pku", "vaes"]);
    let mut entries = common(&host(VENDORS[0], &all), topology(1), true);
    let processor = Processor {
        model: Model::Host,
        features: Vec::new(),
        without: vec!["avx512f"],
        hyperv: false,
    };
    model::apply(&mut entries, &processor).unwrap();
    assert_eq!(only(&entries, 0xd, 0).eax, 0x207);
    assert_eq!(only(&entries, 7, 0).ebx & (1 << 16 | 1 << 30 | 1 << 31), 0);
    assert_ne!(only(&entries, 7, 0).ecx & 1 << 9, 0, "vaes");
    assert!(
        !entries
            .iter()
            .any(|entry| entry.function == 0xd && (5..8).contains(&entry.index))
    );
}

#[test]
fn saved_features_have_to_be_a_subset() {
    for vendor in VENDORS {
        let small = common(&host(vendor, &level(Model::V3, &[])), topology(2), true);
        let large = common(
            &host(vendor, &level(Model::V4, &["md_clear", "pku"])),
            topology(2),
            true,
        );
        assert_eq!(rules::check(&large, &small), Ok(()));
        let refused = rules::check(&small, &large).unwrap_err();
        for name in ["avx512f", "avx512vl", "md_clear", "smap"] {
            assert!(refused.contains(name), "{refused}");
        }
    }
}

#[test]
fn parts_that_are_no_features_have_rules_of_their_own() {
    let names = level(Model::V3, &["pku"]);
    let of = |vendor| common(&host(vendor, &names), topology(2), true);
    let own = of(VENDORS[0]);
    let refused = |change: &dyn Fn(&mut Vec<kvm_cpuid_entry2>)| {
        let mut saved = own.clone();
        change(&mut saved);
        rules::check(&own, &saved).err()
    };
    let set = |leaf, index, register, new: u32| {
        refused(&|entries| {
            let found = entries
                .iter_mut()
                .find(|it| (it.function, it.index) == (leaf, index));
            *value_mut(found.unwrap(), register) = new;
        })
    };
    // Another generation, caches, brand, largest leaves.
    assert_eq!(set(1, 0, Register::Eax, 0x0005_0654), None);
    assert_eq!(set(4, 0, Register::Ecx, 0xfff), None);
    assert_eq!(set(0, 0, Register::Eax, 0x20), None);
    assert_eq!(set(0x8000_0008, 0, Register::Eax, 0x3027), None);
    let says = |refused: Option<String>, text: &str| {
        let refused = refused.unwrap();
        assert!(refused.contains(text), "{refused}");
    };
    says(
        set(0x8000_0008, 0, Register::Eax, 0x3934),
        "physical addresses of 52 bits, and this host of 48",
    );
    says(set(1, 0, Register::Ebx, 0x4000), "CPUID 0x1.0x0 EBX");
    says(
        set(0xd, 9, Register::Ebx, 832),
        "XSAVE component 9 of 8 bytes at 832",
    );
    says(set(7, 0, Register::Edx, 1 << 9), "CPUID 0x7.0x0 EDX bit 9");
    says(
        set(0x4000_0001, 0, Register::Eax, 1 << 17),
        "lack CPUID 0x40000001.0x0 EAX bit 17",
    );
    says(
        refused(&|entries| entries.push(entry(0x29, 0, [1, 0, 0, 0]))),
        "CPUID 0x29.0x0 EAX = 0x1, and this host 0x0",
    );
    says(rules::check(&own, &of(VENDORS[1])).err(), "CPUID 0x0.0x0 EBX");
}

#[test]
fn immunities_are_kept_and_weaknesses_known() {
    assert_eq!(rules::check_arch_capabilities(0b11, 0b01), Ok(()));
    assert_eq!(
        rules::check_arch_capabilities(1 << 2, 0),
        Ok(()),
        "an older state"
    );
    assert_eq!(rules::check_arch_capabilities(0, 1 << 2), Ok(()));
    let lacks = rules::check_arch_capabilities(0b01, 0b10_0011).unwrap_err();
    assert_eq!(lacks, "this host's processors lack ibrs_all, mds_no");
    let weak = rules::check_arch_capabilities(1 << 19 | 1, 1).unwrap_err();
    assert!(weak.contains("the weakness rrsba"), "{weak}");
}

#[test]
fn hostile_leaves_are_refused() {
    let leaf = |function| CpuidEntry {
        function,
        ..CpuidEntry::default()
    };
    assert!(decode(&[leaf(0), leaf(1)]).is_ok());
    assert!(decode(&[leaf(1), leaf(1)]).is_err());
    assert!(decode(&[leaf(1), leaf(0)]).is_err());
    assert!(decode(&(0..300).map(leaf).collect::<Vec<_>>()).is_err());
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
                let id = only(&entries, 0xb, 0).edx;
                prop_assert_eq!(id, apic_id(topology, index));
                let one = only(&entries, 1, 0).ebx;
                prop_assert_eq!(one >> 24, id);
                // Rounded up to a power of two it counts the package's ids (Intel SDM vol. 3, 9.9.3).
                prop_assert_eq!((one >> 16 & 0xff).next_power_of_two(), topology.cores_per_socket.next_power_of_two());
                prop_assert!(seen.insert(id));
                prop_assert!(id < 255, "the broadcast, or out of reach of the I/O APIC");
                let package = only(&entries, 0xb, 1);
                prop_assert_eq!(package.ebx, topology.cores_per_socket);
                sockets.insert(id >> package.eax);
                // Exactly the package shares the last level's cache. The other caches are not
                // shared.
                let shared_by = |level: u32| only(&entries, 4, level).eax >> 14 & 0xfff;
                prop_assert_eq!(shared_by(3) + 1, 1 << package.eax);
                prop_assert_eq!(shared_by(0) + shared_by(2), 0);
                let amd = only(&entries, 0x8000_001e, 0);
                prop_assert_eq!((amd.eax, amd.ecx), (id, id >> package.eax));
            }
            prop_assert_eq!(sockets.len(), topology.sockets as usize);
        }
    }
}
