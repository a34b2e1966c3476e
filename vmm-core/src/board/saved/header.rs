//! Header of a saved machine: its configuration, and the comparison with another machine's
//! configuration.

use kvm_bindings::CpuId;
use vmm_protocol::state::{CpuidEntry, MachineHeader, PciDevice, StateError};

/// The virtual platform that this program builds (the SMBIOS version and the memory map are part of it).
const PLATFORM: &str = "v1";

/// Properties that stay constant during the machine's life: all except the devices.
pub(in crate::board) fn header(memory_bytes: u64, cpuids: &[(u32, CpuId)]) -> MachineHeader {
    let first = cpuids.first().map(|(_, cpuid)| cpuid.as_slice());
    let mut cpuid: Vec<CpuidEntry> = first
        .unwrap_or_default()
        .iter()
        .map(|entry| CpuidEntry {
            function: entry.function,
            index: entry.index,
            eax: entry.eax,
            ebx: entry.ebx,
            ecx: entry.ecx,
            edx: entry.edx,
        })
        .collect();
    cpuid.sort_by_key(|entry| (entry.function, entry.index));
    MachineHeader {
        platform: PLATFORM.to_owned(),
        memory_bytes,
        apic_ids: cpuids.iter().map(|(id, _)| *id).collect(),
        cpuid,
        devices: Vec::new(),
        panicked: false,
    }
}

/// Refuses a state of a machine that was built in another way than `own`.
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
    if let Some((own, saved)) = first_difference(&own.cpuid, &saved.cpuid) {
        return differ("cpuid", leaf(own), leaf(saved));
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

fn leaf(entry: Option<&CpuidEntry>) -> String {
    entry.map_or("no more CPUID leaves".to_owned(), |entry| {
        let CpuidEntry {
            function,
            index,
            eax,
            ebx,
            ecx,
            edx,
        } = entry;
        format!("CPUID leaf {function:#x}.{index:#x} = {eax:#x} {ebx:#x} {ecx:#x} {edx:#x}")
    })
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
            cpuid: vec![CpuidEntry {
                function: 1,
                ecx: 0x80,
                ..CpuidEntry::default()
            }],
            devices: vec![device(1, "rng"), device(10, "disk root")],
            panicked: false,
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
    #[case::cpuid("cpuid", |it: &mut MachineHeader| it.cpuid[0].ecx = 0x81, "0x1.0x0 = 0x0 0x0 0x81 0x0")]
    #[case::no_cpuid("cpuid", |it: &mut MachineHeader| it.cpuid.clear(), "no more CPUID leaves")]
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
