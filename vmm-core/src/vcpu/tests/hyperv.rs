//! Hyper-V's interface, where KVM has it.

use super::*;

/// Reads leaves and the reference counter, then reports a crash with the parameters 1 to 5.
fn guest() -> Vec<u8> {
    let msr = |number: u32, low: u32, high: u32| {
        code(&[
            &[0xb9][..],
            &number.to_le_bytes(), // mov ecx, number
            &[0xb8],
            &low.to_le_bytes(), // mov eax, low
            &[0xba],
            &high.to_le_bytes(), // mov edx, high
            &[0x0f, 0x30],       // wrmsr
        ])
    };
    // mov ecx, HV_X64_MSR_TIME_REF_COUNT; rdmsr
    let counter = [0xb9, 0x20, 0x00, 0x00, 0x40, 0x0f, 0x32];
    let mut guest = code(&[
        &[0xb8, 0x00, 0x00, 0x00, 0x40, 0x0f, 0xa2], // mov eax, 0x40000000; cpuid
        &[0x89, 0x1d, 0x00, 0x00, 0x20, 0x00],       // mov [0x200000], ebx
        &[0xb8, 0x03, 0x00, 0x00, 0x40, 0x0f, 0xa2], // mov eax, 0x40000003; cpuid
        &[0xa3, 0x04, 0x00, 0x20, 0x00],             // mov [0x200004], eax
        &[0xb8, 0x00, 0x01, 0x00, 0x40, 0x0f, 0xa2], // mov eax, 0x40000100; cpuid
        &[0x89, 0x1d, 0x08, 0x00, 0x20, 0x00],       // mov [0x200008], ebx
        &msr(0x4000_0000, 1, 0),
        &counter,
        &[0xa3, 0x0c, 0x00, 0x20, 0x00], // mov [0x20000c], eax
        &counter,
        &[0x2b, 0x05, 0x0c, 0x00, 0x20, 0x00], // sub eax, [0x20000c]
        &[0xa3, 0x0c, 0x00, 0x20, 0x00],       // mov [0x20000c], eax
    ]);
    for parameter in 1..=5 {
        guest.extend(msr(0x4000_00ff + parameter, parameter, 0));
    }
    guest.extend(msr(0x4000_0105, 0, 1 << 31));
    guest.extend(END);
    guest
}

#[test]
fn guest_of_hyperv_finds_it_and_reports_its_crash() {
    let host = Host::open().unwrap_or_else(|error| panic!("these tests need KVM: {error}"));
    if host.supported_hyperv_cpuid().unwrap().is_none() {
        let missing = "no KVM_CAP_SYS_HYPERV_CPUID";
        match Host::has_hardware_virtualization() {
            true => vmm_base::lacking("Hyper-V interface in KVM", missing),
            false => eprintln!("not tested, this host's KVM is a paravirtual backend: {missing}"),
        }
        return;
    }
    let processor = Processor {
        hyperv: true,
        ..Processor::default()
    };
    let mut rig = rig_with(1, &guest(), &processor);
    let _end = rig.probe(&rig.spaces.pio, 0x80, 1, Effect::PowerOff);
    rig.vcpus.run().unwrap();
    let report = rig.reports.recv_timeout(PATIENCE).unwrap();
    let ReportKind::GuestPanicked(Some(parameters)) = report.kind else {
        panic!("{:?}", report.kind);
    };
    assert_eq!(parameters, [1, 2, 3, 4, 5]);
    let report = rig.reports.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(report.kind, ReportKind::PowerOff), "{:?}", report.kind);
    rig.vcpus.stop().unwrap();
    assert_eq!(rig.word(0x20_0000).to_le_bytes(), *b"Micr");
    // Reference counter, hypercalls, index of the vCPU, reference page.
    assert_eq!(rig.word(0x20_0004) & 0x262, 0x262);
    assert_eq!(rig.word(0x20_0008).to_le_bytes(), *b"KVMK");
    assert!(rig.word(0x20_000c) < 1 << 31, "the counter went back");
    // The registers are state.
    let saved = rig.vcpus.save().unwrap();
    let value = |index| {
        saved[0]
            .msrs
            .iter()
            .find(|msr| msr.index == index)
            .map(|msr| msr.value)
    };
    assert_eq!((value(0x4000_0000), value(0x4000_0104)), (Some(1), Some(5)));
    let again = rig_with(1, &SPIN, &processor);
    let mut vcpus = again.vcpus;
    vcpus.restore(saved.clone()).unwrap();
    assert_eq!(vcpus.save().unwrap()[0].msrs, saved[0].msrs);
    // A reset clears them.
    rig.vcpus.reset().unwrap();
    let reset = rig.vcpus.save().unwrap();
    let identity = reset[0].msrs.iter().find(|msr| msr.index == 0x4000_0000);
    assert_eq!(identity.map(|msr| msr.value), Some(0));
}

#[test]
fn guest_of_hyperv_is_refused_without_the_interface() {
    let host = Host::open().unwrap_or_else(|error| panic!("these tests need KVM: {error}"));
    if host.supported_hyperv_cpuid().unwrap().is_some() {
        return;
    }
    let processor = Processor {
        hyperv: true,
        ..Processor::default()
    };
    let topology = Topology::for_cores(1).unwrap();
    let failure = Cpuid::new(&host, topology, &processor).unwrap_err();
    assert!(
        failure
            .message
            .contains("KVM_CAP_SYS_HYPERV_CPUID, which spec.cpu.hyperv needs"),
        "{failure:?}"
    );
}
