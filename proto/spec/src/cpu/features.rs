//! Features of x86 processors that a guest can have, by name and place in CPUID.
//!
//! Names are those of `/proc/cpuinfo`. Linux has other names there for features against side channels, so these have
//! QEMU's names (`target/i386/cpu.c`) with underscores. Places are those of the Intel SDM (vol. 2, CPUID), the AMD64 APM
//! (vol. 3, appendix E) and of KVM (the kernel's `Documentation/virt/kvm/x86/cpuid.rst`).
//!
//! The list lacks features that no guest gets: nested virtualization, performance counters, AMX, SGX and others whose
//! state belongs to the host.

/// Register of an answer of CPUID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Register {
    /// EAX.
    Eax,
    /// EBX.
    Ebx,
    /// ECX.
    Ecx,
    /// EDX.
    Edx,
}

use Register::{Eax, Ebx, Ecx, Edx};

impl Register {
    /// In the order of an answer.
    pub const ALL: [Self; 4] = [Eax, Ebx, Ecx, Edx];

    /// Name of the register.
    pub const fn name(self) -> &'static str {
        match self {
            Eax => "EAX",
            Ebx => "EBX",
            Ecx => "ECX",
            Edx => "EDX",
        }
    }
}

/// A register of CPUID with feature bits: leaf, subleaf, register.
pub type Place = (u32, u32, Register);

/// A feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feature {
    /// Name.
    pub name: &'static str,
    /// Register that has its bit.
    pub place: Place,
    /// The bit: a mask.
    pub mask: u32,
}

/// Features that a guest has by the machine and the number of its vCPUs, regardless of its model.
pub const PLATFORM: [&str; 6] = [
    "arat",
    "cmp_legacy",
    "ht",
    "hypervisor",
    "tsc_deadline_timer",
    "x2apic",
];

/// Leaf of KVM's paravirtual features.
pub const KVM_FEATURES: u32 = 0x4000_0001;

const WORDS: &[(Place, &[(u32, &str)])] = &[
    (
        (0x1, 0, Ecx),
        &[
            (0, "pni"),
            (1, "pclmulqdq"),
            (9, "ssse3"),
            (12, "fma"),
            (13, "cx16"),
            (17, "pcid"),
            (19, "sse4_1"),
            (20, "sse4_2"),
            (21, "x2apic"),
            (22, "movbe"),
            (23, "popcnt"),
            (24, "tsc_deadline_timer"),
            (25, "aes"),
            (26, "xsave"),
            (28, "avx"),
            (29, "f16c"),
            (30, "rdrand"),
            (31, "hypervisor"),
        ],
    ),
    (
        (0x1, 0, Edx),
        &[
            (0, "fpu"),
            (1, "vme"),
            (2, "de"),
            (3, "pse"),
            (4, "tsc"),
            (5, "msr"),
            (6, "pae"),
            (7, "mce"),
            (8, "cx8"),
            (9, "apic"),
            (11, "sep"),
            (12, "mtrr"),
            (13, "pge"),
            (14, "mca"),
            (15, "cmov"),
            (16, "pat"),
            (17, "pse36"),
            (19, "clflush"),
            (23, "mmx"),
            (24, "fxsr"),
            (25, "sse"),
            (26, "sse2"),
            (27, "ss"),
            (28, "ht"),
        ],
    ),
    ((0x6, 0, Eax), &[(2, "arat")]),
    (
        (0x7, 0, Ebx),
        &[
            (0, "fsgsbase"),
            (1, "tsc_adjust"),
            (3, "bmi1"),
            (4, "hle"),
            (5, "avx2"),
            (6, "fdp_excptn_only"),
            (7, "smep"),
            (8, "bmi2"),
            (9, "erms"),
            (10, "invpcid"),
            (11, "rtm"),
            (13, "zero_fcs_fds"),
            (14, "mpx"),
            (16, "avx512f"),
            (17, "avx512dq"),
            (18, "rdseed"),
            (19, "adx"),
            (20, "smap"),
            (21, "avx512ifma"),
            (23, "clflushopt"),
            (24, "clwb"),
            (26, "avx512pf"),
            (27, "avx512er"),
            (28, "avx512cd"),
            (29, "sha_ni"),
            (30, "avx512bw"),
            (31, "avx512vl"),
        ],
    ),
    (
        (0x7, 0, Ecx),
        &[
            (1, "avx512vbmi"),
            (2, "umip"),
            (3, "pku"),
            (5, "waitpkg"),
            (6, "avx512_vbmi2"),
            (7, "shstk"),
            (8, "gfni"),
            (9, "vaes"),
            (10, "vpclmulqdq"),
            (11, "avx512_vnni"),
            (12, "avx512_bitalg"),
            (14, "avx512_vpopcntdq"),
            (16, "la57"),
            (22, "rdpid"),
            (24, "bus_lock_detect"),
            (25, "cldemote"),
            (27, "movdiri"),
            (28, "movdir64b"),
        ],
    ),
    (
        (0x7, 0, Edx),
        &[
            (2, "avx512_4vnniw"),
            (3, "avx512_4fmaps"),
            (4, "fsrm"),
            (8, "avx512_vp2intersect"),
            (10, "md_clear"),
            (11, "rtm_always_abort"),
            (14, "serialize"),
            (16, "tsxldtrk"),
            (20, "ibt"),
            (23, "avx512_fp16"),
            (26, "spec_ctrl"),
            (27, "stibp"),
            (28, "flush_l1d"),
            (29, "arch_capabilities"),
            (30, "core_capability"),
            (31, "ssbd"),
        ],
    ),
    (
        (0x7, 1, Eax),
        &[
            (0, "sha512"),
            (1, "sm3"),
            (2, "sm4"),
            (4, "avx_vnni"),
            (5, "avx512_bf16"),
            (7, "cmpccxadd"),
            (10, "fzrm"),
            (11, "fsrs"),
            (12, "fsrc"),
            (17, "fred"),
            (18, "lkgs"),
            (19, "wrmsrns"),
            (23, "avx_ifma"),
            (26, "lam"),
        ],
    ),
    (
        (0x7, 1, Edx),
        &[
            (4, "avx_vnni_int8"),
            (5, "avx_ne_convert"),
            (10, "avx_vnni_int16"),
            (14, "prefetchiti"),
            (19, "avx10"),
        ],
    ),
    (
        (0x7, 2, Edx),
        &[
            (0, "intel_psfd"),
            (1, "ipred_ctrl"),
            (2, "rrsba_ctrl"),
            (3, "ddpd_u"),
            (4, "bhi_ctrl"),
            (5, "mcdt_no"),
        ],
    ),
    (
        (0xd, 1, Eax),
        &[(0, "xsaveopt"), (1, "xsavec"), (2, "xgetbv1"), (3, "xsaves")],
    ),
    (
        (KVM_FEATURES, 0, Eax),
        &[
            (0, "kvmclock"),
            (1, "kvm_nopiodelay"),
            (3, "kvmclock2"),
            (4, "kvm_asyncpf"),
            (5, "kvm_steal_time"),
            (6, "kvm_pv_eoi"),
            (7, "kvm_pv_unhalt"),
            (9, "kvm_pv_tlb_flush"),
            (10, "kvm_asyncpf_vmexit"),
            (11, "kvm_pv_ipi"),
            (12, "kvm_poll_control"),
            (13, "kvm_pv_sched_yield"),
            (14, "kvm_asyncpf_int"),
            (24, "kvmclock_stable_bit"),
        ],
    ),
    (
        (0x8000_0001, 0, Ecx),
        &[
            (0, "lahf_lm"),
            (1, "cmp_legacy"),
            (4, "cr8_legacy"),
            (5, "abm"),
            (6, "sse4a"),
            (7, "misalignsse"),
            (8, "3dnowprefetch"),
            (9, "osvw"),
            (11, "xop"),
            (16, "fma4"),
            (21, "tbm"),
            (22, "topoext"),
        ],
    ),
    (
        (0x8000_0001, 0, Edx),
        &[
            (11, "syscall"),
            (20, "nx"),
            (22, "mmxext"),
            (25, "fxsr_opt"),
            (26, "pdpe1gb"),
            (27, "rdtscp"),
            (29, "lm"),
            (30, "3dnowext"),
            (31, "3dnow"),
        ],
    ),
    (
        (0x8000_0008, 0, Ebx),
        &[
            (0, "clzero"),
            (2, "xsaveerptr"),
            (9, "wbnoinvd"),
            (12, "ibpb"),
            (14, "ibrs"),
            (15, "amd_stibp"),
            (17, "stibp_always_on"),
            (24, "amd_ssbd"),
            (25, "virt_ssbd"),
            (26, "amd_no_ssb"),
            (28, "amd_psfd"),
            (29, "btc_no"),
            (30, "ibpb_ret"),
        ],
    ),
    (
        (0x8000_0021, 0, Eax),
        &[
            (0, "no_nested_data_bp"),
            (2, "lfence_always_serializing"),
            (6, "null_sel_clr_base"),
            (8, "auto_ibrs"),
            (20, "prefetchi"),
            (27, "sbpb"),
            (28, "ibpb_brtype"),
            (29, "srso_no"),
        ],
    ),
    ((0x8000_0021, 0, Ecx), &[(1, "tsa_sq_no"), (2, "tsa_l1_no")]),
];

/// AMD's copies of the features of leaf 1, EDX, in leaf 0x8000_0001, EDX (AMD64 APM vol. 3, E.4.2).
pub const AMD_COPIES: u32 = 0x0183_f3ff;

/// All features, in the order of their places.
pub fn all() -> impl Iterator<Item = Feature> {
    WORDS.iter().flat_map(|(place, bits)| {
        bits.iter().map(|(bit, name)| Feature {
            name,
            place: *place,
            mask: 1 << bit,
        })
    })
}

/// The feature with this name.
pub fn find(name: &str) -> Option<Feature> {
    all().find(|feature| feature.name == name)
}

/// Bits of a register that the features with these names have.
pub fn mask(place: Place, names: &[&str]) -> u32 {
    let there = all().filter(|feature| feature.place == place && names.contains(&feature.name));
    there.fold(0, |mask, feature| mask | feature.mask)
}

/// Names of the set bits of a register. A bit without a name is described by its place.
pub fn names(place: Place, bits: u32) -> Vec<String> {
    let set = (0..u32::BITS).filter(|bit| bits & 1 << bit != 0);
    let name = |bit: u32| match all().find(|feature| feature.place == place && feature.mask == 1 << bit) {
        Some(feature) => feature.name.to_owned(),
        None => {
            let (leaf, subleaf, register) = place;
            format!("CPUID {leaf:#x}.{subleaf:#x} {} bit {bit}", register.name())
        }
    };
    set.map(name).collect()
}

/// Features in the answers of CPUID, sorted. `answer` has the registers of a leaf and a subleaf.
pub fn of(answer: impl Fn(u32, u32) -> Option<[u32; 4]>) -> Vec<&'static str> {
    let mut found: Vec<_> = all()
        .filter(|feature| {
            let (leaf, subleaf, register) = feature.place;
            answer(leaf, subleaf).is_some_and(|[eax, ebx, ecx, edx]| {
                let value = match register {
                    Eax => eax,
                    Ebx => ebx,
                    Ecx => ecx,
                    Edx => edx,
                };
                value & feature.mask != 0
            })
        })
        .map(|feature| feature.name)
        .collect();
    found.sort_unstable();
    found
}

/// Pairs of a feature and one that it needs (Intel SDM vol. 1, 13 to 16; as QEMU's `feature_dependencies`).
const NEEDS: &[(&str, &str)] = &[
    ("avx", "xsave"),
    ("avx2", "avx"),
    ("avx512f", "avx2"),
    ("avx_ifma", "avx2"),
    ("avx_ne_convert", "avx2"),
    ("avx_vnni", "avx2"),
    ("avx_vnni_int16", "avx2"),
    ("avx_vnni_int8", "avx2"),
    ("avx10", "avx512f"),
    ("f16c", "avx"),
    ("fma", "avx"),
    ("fma4", "avx"),
    ("invpcid", "pcid"),
    ("mpx", "xsave"),
    ("pku", "xsave"),
    ("shstk", "xsaves"),
    ("vaes", "avx"),
    ("vpclmulqdq", "avx"),
    ("xgetbv1", "xsave"),
    ("xop", "avx"),
    ("xsavec", "xsave"),
    ("xsaveopt", "xsave"),
    ("xsaves", "xsavec"),
];

/// The feature that this one needs.
pub fn needed_by(name: &str) -> Option<&'static str> {
    if name.starts_with("avx512") && name != "avx512f" {
        return Some("avx512f");
    }
    NEEDS
        .iter()
        .find(|(one, _)| *one == name)
        .map(|(_, other)| *other)
}

/// Whether a feature is, or needs, one of `names`.
pub fn needs_any(name: &str, names: &[&str]) -> bool {
    let mut next = Some(name);
    while let Some(name) = next {
        if names.contains(&name) {
            return true;
        }
        next = needed_by(name);
    }
    false
}
