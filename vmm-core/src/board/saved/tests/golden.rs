//! The state of a machine that an earlier program saved (`vmm-core/golden`).

use prost::Message;
use vmm_protocol::state::{self, MachineHeader, Section, Vcpu};

use super::{refusals::Saved, *};

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/machine.bin");

/// Writes values other than those after power-on to registers of each part.
fn program(machine: &Machine) {
    let port = |port: u64, data: &[u8]| {
        let _effect = machine.spaces.pio.write(port, data);
    };
    // The divisor of the serial port, its scratch register, an address in CMOS memory and a byte there, a command that waits for its
    // byte.
    for (at, value) in [
        (0x3fb, 0x83),
        (0x3f8, 12),
        (0x3fb, 0x03),
        (0x3ff, 0xa5),
        (0x70, 0x7f),
        (0x71, 0x5a),
        (0x64, 0xd1),
    ] {
        port(at, &[value]);
    }
    machine.hotplug.ask(FURTHER_DISK);
    let config = |slot: u8, register: u64, value: u32| {
        let address = layout::ECAM.start + (u64::from(slot) << 15) + register;
        let _remap = machine.spaces.mmio.write(address, &value.to_le_bytes());
    };
    // Where windows above 4 GiB are depends on the host, so the BAR goes into the one below.
    config(RNG, 0x10, 0xc010_0000);
    config(RNG, 0x14, 0);
    config(RNG, 0x04, 0x2);
    machine.pci.remap(&machine.spaces.mmio);
    // An MSI-X entry, and the status ACKNOWLEDGE and DRIVER.
    for (offset, data) in [(0x4000, 0xfee0_0000_u32), (0x4008, 0x41)] {
        let _none = machine
            .spaces
            .mmio
            .write(0xc010_0000 + offset, &data.to_le_bytes());
    }
    let _none = machine.spaces.mmio.write(0xc010_0014, &[3]);
}

/// The golden sections, with what belongs to the host that saved them replaced by what this host has.
fn moved_here(golden: &state::Machine, here: &state::Machine) -> state::Machine {
    let mut sections = golden.sections.clone();
    sections.retain(|section| !matches!(section.kind.as_str(), "vcpu" | "pit"));
    let own = here
        .sections
        .iter()
        .filter(|section| matches!(section.kind.as_str(), "vcpu" | "pit"));
    sections.extend(own.cloned());
    let cpuid = header(here).cpuid;
    for section in sections.iter_mut().filter(|section| section.kind == "machine") {
        let header = MachineHeader {
            cpuid: cpuid.clone(),
            ..section.open().unwrap()
        };
        *section = Section::new(&section.id, &header);
    }
    state::Machine { sections }
}

fn header(machine: &state::Machine) -> MachineHeader {
    let section = machine.sections.iter().find(|section| section.kind == "machine");
    section.unwrap().open().unwrap()
}

fn golden() -> Vec<u8> {
    if std::env::var_os("VMMD_WRITE_GOLDEN").is_some() {
        let saved = Saved::with(2, program);
        std::fs::write(PATH, saved.state.encode_to_vec()).unwrap();
    }
    std::fs::read(PATH).unwrap_or_else(|error| panic!("{PATH}: {error}"))
}

#[test]
fn a_machine_of_the_first_version_is_still_taken() {
    let bytes = golden();
    let golden = state::Machine::decode(bytes.as_slice()).unwrap();
    assert!(golden.encode_to_vec() == bytes);
    let kinds = [
        "machine",
        "virtio-pci",
        "serial",
        "legacy",
        "pci-root",
        "hot-plug",
        "interrupt-controllers",
        "vcpu",
        "kvmclock",
    ];
    for kind in kinds {
        assert!(
            golden.sections.iter().any(|section| section.kind == kind),
            "{kind}"
        );
    }
    let host = Saved::new(2);
    let moved = moved_here(&golden, &host.state);
    let again = host.restore(moved.clone()).unwrap().save().unwrap();
    for section in &moved.sections {
        let other = again
            .sections
            .iter()
            .find(|other| other.id == section.id)
            .unwrap();
        // A vCPU's counters advance. A section with an older format version is written in the
        // current version.
        if section.kind != "vcpu" && other.version == section.version {
            assert_eq!(other, section);
        }
    }
}

#[test]
fn vcpu_state_of_version_1_is_read_and_written_unchanged() {
    let golden = state::Machine::decode(golden().as_slice()).unwrap();
    let vcpus = golden.sections.iter().filter(|section| section.kind == "vcpu");
    for section in vcpus {
        let vcpu: Vcpu = section.open().unwrap();
        assert_eq!(Section::new(&section.id, &vcpu), *section);
        assert!(vcpu.general.is_some() && vcpu.special.is_some() && vcpu.tsc.is_some());
        assert_eq!((vcpu.local_apic.len(), vcpu.msrs.is_empty()), (1024, false));
    }
}
