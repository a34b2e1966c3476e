//! Machines that continue on hosts with other processors.

use std::os::unix::fs::FileExt;

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use vmmd_spec::cpu::{
    Model,
    features::{self, Register},
};

use super::{snapshot::Kit, *};
use crate::{kvm::Host, snapshot::format::MEMORY_OFFSET};

/// CPUID of this host with these features as well, and without those.
fn supported(with: &[&str], without: &[&str]) -> CpuId {
    let host = Host::open().unwrap_or_else(|error| panic!("these tests need KVM: {error}"));
    let mut entries = host.supported_cpuid().unwrap().as_slice().to_vec();
    let mut change = |name: &str, set: bool| {
        let feature = features::find(name).unwrap();
        let (leaf, subleaf, register) = feature.place;
        let found = entries
            .iter_mut()
            .find(|entry| (entry.function, entry.index) == (leaf, subleaf));
        let value = register_of(found.unwrap(), register);
        match set {
            true => *value |= feature.mask,
            false => *value &= !feature.mask,
        }
    };
    with.iter().for_each(|name| change(name, true));
    without.iter().for_each(|name| change(name, false));
    CpuId::from_entries(&entries).unwrap()
}

fn register_of(entry: &mut kvm_cpuid_entry2, register: Register) -> &mut u32 {
    match register {
        Register::Eax => &mut entry.eax,
        Register::Ebx => &mut entry.ebx,
        Register::Ecx => &mut entry.ecx,
        Register::Edx => &mut entry.edx,
    }
}

/// A host that has a model's features, and some that it lacks.
fn fresh() -> CpuId {
    let more = ["aes", "clflushopt", "rdrand", "umip"];
    supported(&[&Model::V2.features()[..], &more].concat(), &[])
}

/// A host that has a model's features, and none of those of [`fresh`].
fn older() -> CpuId {
    supported(
        &Model::V2.features(),
        &["aes", "avx", "clflushopt", "clwb", "hle", "rdrand", "rtm", "umip"],
    )
}

fn v2() -> vmm::Processor {
    vmm::Processor {
        model: Model::V2.name().to_owned(),
        features: Model::V2.features().into_iter().map(str::to_owned).collect(),
        without: Vec::new(),
        hyperv: false,
    }
}

#[test]
fn snapshot_of_a_model_continues_on_an_older_host() {
    let mut kit = Kit::new(&ECHO);
    (kit.supported, kit.spec.processor) = (Some(fresh()), Some(v2()));
    let mut first = kit.started();
    assert_eq!(first.echo(b'a'), b'a');
    let (file, ..) = first.snapshot(false);
    kit.supported = Some(older());
    let mut other = kit.restored(&file, false).unwrap();
    assert_eq!(other.machine.header.cpuid, first.machine.header.cpuid);
    other.machine.resume().unwrap();
    assert_eq!(other.echo(b'a'), b'b');
    // It keeps its processor on a host that has more.
    kit.supported = Some(fresh());
    let (file, ..) = other.snapshot(false);
    let mut third = kit.restored(&file, true).unwrap();
    assert_eq!(third.machine.header.cpuid, first.machine.header.cpuid);
    third.machine.resume().unwrap();
    assert_eq!(third.echo(b'a'), b'c');
}

#[test]
fn snapshot_of_a_larger_host_is_refused_before_memory() {
    let mut kit = Kit::new(&ECHO);
    kit.supported = Some(fresh());
    let mut first = kit.started();
    assert_eq!(first.echo(b'a'), b'a');
    let (file, ..) = first.snapshot(false);
    // A page that would be refused when it is read.
    let code = MEMORY_OFFSET + crate::memory::layout::LOW_RESERVED_END;
    file.write_all_at(&[0x5a; 8], code).unwrap();
    kit.supported = Some(older());
    for on_demand in [false, true] {
        let failure = kit.restored(&file, on_demand).err().unwrap();
        for name in ["aes", "clflushopt", "rdrand", "umip"] {
            assert!(failure.message.contains(name), "{failure:?}");
        }
        assert!(!failure.message.contains("popcnt"), "{failure:?}");
    }
}

#[test]
fn machine_of_a_larger_host_is_refused_at_its_header() {
    let mut kit = Kit::new(&ECHO);
    kit.supported = Some(fresh());
    let mut first = kit.started();
    let first_of_all = vmm_protocol::vmm::Send {
        header_first: true,
        ..Default::default()
    };
    let (whole, ..) = first.send_as(&first_of_all);
    let mut same = kit.received(whole.try_clone().unwrap()).unwrap();
    same.machine.resume().unwrap();
    assert_eq!(same.echo(b'a'), b'a');
    kit.supported = Some(older());
    // The refusal needs only the beginning of the stream.
    whole.set_len(64 << 10).unwrap();
    let failure = kit.received(whole).err().unwrap();
    assert!(failure.message.contains(" lack aes, "), "{failure:?}");
    // An older program does not send the header first.
    first.machine.resume().unwrap();
    let (stream, ..) = first.send_as(&vmm_protocol::vmm::Send::default());
    let failure = kit.received(stream).err().unwrap();
    assert!(failure.message.contains(" lack aes, "), "{failure:?}");
}

#[test]
fn model_is_refused_with_the_features_that_the_host_lacks() {
    let mut kit = Kit::new(&ECHO);
    let lacking = ["popcnt", "sse4_2"];
    let others: Vec<_> = Model::V2
        .features()
        .into_iter()
        .filter(|name| !lacking.contains(name))
        .collect();
    (kit.supported, kit.spec.processor) = (Some(supported(&others, &lacking)), Some(v2()));
    let failure = kit.refused();
    let wanted =
        "this host's processors and KVM lack popcnt, sse4_2, which the processor model x86-64-v2 has";
    assert!(failure.message.starts_with(wanted), "{failure:?}");
}
