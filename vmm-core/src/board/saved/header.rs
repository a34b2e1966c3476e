//! Header of a saved machine: its configuration, and the comparison with another machine's
//! configuration.

use vmm_protocol::state::{MachineHeader, PciDevice, StateError};

use crate::{board::cpuid::Cpuid, vcpu::Identity};

/// The virtual platform that this program builds (the SMBIOS version and the memory map are part of it).
const PLATFORM: &str = "v1";

/// Properties that stay constant during the machine's life: all except the devices.
pub(in crate::board) fn header(memory_bytes: u64, vcpus: &[Identity], cpuid: &Cpuid) -> MachineHeader {
    MachineHeader {
        platform: PLATFORM.to_owned(),
        memory_bytes,
        apic_ids: vcpus.iter().map(|vcpu| vcpu.apic_id).collect(),
        cpuid: cpuid.saved(),
        devices: Vec::new(),
        panicked: false,
        arch_capabilities: cpuid.arch_capabilities(),
    }
}

/// Refuses a state of a machine that was built in another way than `own`. CPUID is not compared: a restored machine has that
/// of its state.
pub(super) fn compare(own: &MachineHeader, saved: &MachineHeader) -> Result<(), StateError> {
    let differ = |field, own: String, saved: String| {
        let why = format!("the state is of a machine with {saved}, this one has {own}");
        Err(StateError::invalid(field, why))
    };
    if saved.platform != own.platform {
        let platform = |header: &MachineHeader| format!("platform {:?}", header.platform);
        return differ("platform", platform(own), platform(saved));
    }
    if saved.memory_bytes != own.memory_bytes {
        let bytes = |header: &MachineHeader| format!("{} bytes of memory", header.memory_bytes);
        return differ("memory_bytes", bytes(own), bytes(saved));
    }
    if saved.apic_ids != own.apic_ids {
        let ids = |header: &MachineHeader| {
            let count = header.apic_ids.len();
            format!("{count} vCPUs with the local APIC ids {:?}", header.apic_ids)
        };
        return differ("apic_ids", ids(own), ids(saved));
    }
    if let Some((own, saved)) = first_difference(&own.devices, &saved.devices) {
        return differ("devices", device(own), device(saved));
    }
    Ok(())
}

/// The first pair of entries that differ between two lists.
fn first_difference<'a, T: PartialEq>(
    own: &'a [T],
    saved: &'a [T],
) -> Option<(Option<&'a T>, Option<&'a T>)> {
    let places = 0..own.len().max(saved.len());
    let mut pairs = places.map(|at| (own.get(at), saved.get(at)));
    pairs.find(|(own, saved)| own != saved)
}

fn device(device: Option<&PciDevice>) -> String {
    device.map_or("no more devices".to_owned(), |PciDevice { slot, name }| {
        format!("{name:?} in PCI slot {slot}")
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn sample() -> MachineHeader {
        let device = |slot, name: &str| PciDevice {
            slot,
            name: name.to_owned(),
        };
        MachineHeader {
            platform: PLATFORM.to_owned(),
            memory_bytes: 1 << 30,
            apic_ids: vec![0, 1],
            devices: vec![device(1, "rng"), device(10, "disk root")],
            ..MachineHeader::default()
        }
    }

    #[test]
    fn a_machine_that_was_built_the_same_is_taken() {
        compare(&sample(), &sample()).unwrap();
    }

    #[rstest]
    #[case::platform("platform", |it: &mut MachineHeader| it.platform = "v2".to_owned(), "platform \"v2\"")]
    #[case::memory("memory_bytes", |it: &mut MachineHeader| it.memory_bytes += 1, "1073741825 bytes")]
    #[case::vcpus("apic_ids", |it: &mut MachineHeader| it.apic_ids.push(2), "3 vCPUs")]
    #[case::apic_id("apic_ids", |it: &mut MachineHeader| it.apic_ids[1] = 2, "[0, 2]")]
    #[case::slot("devices", |it: &mut MachineHeader| it.devices[1].slot = 11, "\"disk root\" in PCI slot 11")]
    #[case::fewer("devices", |it: &mut MachineHeader| it.devices.truncate(1), "no more devices")]
    fn another_machine_is_refused_with_the_field_and_both_values(
        #[case] wanted: &str,
        #[case] change: fn(&mut MachineHeader),
        #[case] says: &str,
    ) {
        let mut saved = sample();
        change(&mut saved);
        let error = compare(&sample(), &saved).unwrap_err();
        let StateError::Invalid { field, why } = error else {
            panic!("{error}");
        };
        assert_eq!(field, wanted);
        assert!(
            why.starts_with("the state is of a machine with ") && why.contains(says),
            "{why}"
        );
    }
}
