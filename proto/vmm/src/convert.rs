//! Parts of a validated spec in the form that a `vmm` receives.

use vmmd_spec::{
    balloon::Balloon,
    cpu::Processor,
    disk::{Bus, Disk, Format, Limit, OnError, RateGroup, RateLimit, Source},
    display::Display,
    keyboard::Layout,
    pci,
    policy::{OnCrash, WatchdogAction},
    smbios::Smbios,
    vm::Nic,
};

use crate::vmm;

/// A processor whose guest needs these features of the host. `None` is everything that the host has, which each version of
/// the `vmm` knows.
pub fn processor(processor: &Processor, features: Vec<String>) -> Option<vmm::Processor> {
    (processor != &Processor::default()).then(|| vmm::Processor {
        model: processor.model.name().to_owned(),
        features,
        without: processor.remove.iter().map(|name| (*name).to_owned()).collect(),
        hyperv: processor.hyperv,
    })
}

/// The configuration of a NIC without its tap, address and slot.
pub fn nic(nic: &Nic) -> vmm::Nic {
    vmm::Nic {
        name: nic.name.to_string(),
        control_queue: true,
        no_checksum: nic.without.checksum,
        no_tso: nic.without.tso,
        no_uso: nic.without.uso,
        no_merge: nic.without.merge,
        link_down: !nic.link_up,
        receive_limit: nic.receive_limit.map(Into::into),
        transmit_limit: nic.transmit_limit.map(Into::into),
        boot_order: nic.boot_order.map_or(0, Into::into),
        ..vmm::Nic::default()
    }
}

/// The configuration of the balloon of a VM with that memory.
pub fn balloon(balloon: &Balloon, pci_slot: u32, memory_bytes: u64) -> vmm::Balloon {
    vmm::Balloon {
        pci_slot,
        free_page_reporting: balloon.free_page_reporting,
        target_bytes: balloon.held_bytes(memory_bytes),
    }
}

/// The configuration of a disk without its descriptors and its slot. `format` is that of its image.
pub fn disk(disk: &Disk, format: Format) -> vmm::Disk {
    let (rate_limit, rate_group) = match &disk.limit {
        Limit::None => (None, String::new()),
        Limit::Own(limit) => (Some((*limit).into()), String::new()),
        Limit::Group(name) => (None, name.to_string()),
    };
    let on_error = match disk.on_error {
        OnError::Report => vmm::OnError::Report,
        OnError::Pause => vmm::OnError::Pause,
    };
    vmm::Disk {
        name: disk.name.to_string(),
        read_only: disk.read_only,
        serial: disk.serial.clone(),
        format: vmm::ImageFormat::from(format).into(),
        queues: disk.queues,
        logical_block_bytes: disk.logical_block,
        on_error: on_error.into(),
        rate_limit,
        rate_group,
        cdrom: disk.bus == Bus::Sata { cdrom: true },
        empty: disk.source == Source::Empty,
        boot_order: disk.boot_order.map_or(0, Into::into),
        ..Default::default()
    }
}

/// Texts of the SMBIOS tables.
pub fn smbios(smbios: &Smbios) -> vmm::Smbios {
    vmm::Smbios {
        serial: smbios.serial.clone(),
        manufacturer: smbios.manufacturer.clone(),
        product: smbios.product.clone(),
        version: smbios.version.clone(),
        sku: smbios.sku.clone(),
        family: smbios.family.clone(),
        asset_tag: smbios.asset_tag.clone(),
        oem_strings: smbios
            .oem_strings
            .iter()
            .map(|text| text.as_str().to_owned())
            .collect(),
    }
}

/// The PCI slot of a disk, or its port of the SATA controller, from the number of its address.
pub fn disk_address(number: u32) -> (u32, Option<u32>) {
    match pci::sata_port(number) {
        Some(port) => (0, Some(port)),
        None => (number, None),
    }
}

/// The configuration of a display without sockets. `slots` are those of adapter, keyboard and tablet.
pub fn display(display: &Display, slots: [u32; 3]) -> vmm::Display {
    let [gpu_pci_slot, keyboard_pci_slot, tablet_pci_slot] = slots;
    vmm::Display {
        gpu_pci_slot,
        keyboard_pci_slot,
        tablet_pci_slot,
        width: display.width,
        height: display.height,
        layout: vmm::KeyboardLayout::from(display.layout).into(),
        vnc_fd: None,
        vnc_view_fd: None,
    }
}

/// A layout of the private protocol; `None` for an unknown one.
pub fn layout(wire: i32) -> Option<Layout> {
    Some(match vmm::KeyboardLayout::try_from(wire).ok()? {
        vmm::KeyboardLayout::Unspecified => Layout::default(),
        vmm::KeyboardLayout::Us => Layout::Us,
        vmm::KeyboardLayout::De => Layout::De,
        vmm::KeyboardLayout::Dk => Layout::Dk,
        vmm::KeyboardLayout::Fr => Layout::Fr,
        vmm::KeyboardLayout::Gb => Layout::Gb,
        vmm::KeyboardLayout::Es => Layout::Es,
        vmm::KeyboardLayout::Jp => Layout::Jp,
    })
}

impl From<Layout> for vmm::KeyboardLayout {
    fn from(layout: Layout) -> Self {
        match layout {
            Layout::Us => Self::Us,
            Layout::De => Self::De,
            Layout::Dk => Self::Dk,
            Layout::Fr => Self::Fr,
            Layout::Gb => Self::Gb,
            Layout::Es => Self::Es,
            Layout::Jp => Self::Jp,
        }
    }
}

impl From<OnCrash> for vmm::OnCrash {
    fn from(policy: OnCrash) -> Self {
        match policy {
            OnCrash::Restart => Self::Restart,
            OnCrash::Stop => Self::Stop,
        }
    }
}

impl From<WatchdogAction> for vmm::WatchdogAction {
    fn from(action: WatchdogAction) -> Self {
        match action {
            WatchdogAction::Reset => Self::Reset,
            WatchdogAction::PowerOff => Self::Poweroff,
            WatchdogAction::Pause => Self::Pause,
            WatchdogAction::None => Self::None,
        }
    }
}

impl From<Format> for vmm::ImageFormat {
    fn from(format: Format) -> Self {
        match format {
            Format::Raw => Self::Raw,
            Format::Qcow2 => Self::Qcow2,
            Format::Iso => Self::Iso,
        }
    }
}

impl From<RateLimit> for vmm::RateLimit {
    fn from(limit: RateLimit) -> Self {
        Self {
            bytes_per_second: limit.bytes_per_second,
            operations_per_second: limit.operations_per_second,
            burst_bytes: limit.burst_bytes,
            burst_operations: limit.burst_operations,
        }
    }
}

impl From<&vmm::RateLimit> for RateLimit {
    fn from(limit: &vmm::RateLimit) -> Self {
        Self {
            bytes_per_second: limit.bytes_per_second,
            operations_per_second: limit.operations_per_second,
            burst_bytes: limit.burst_bytes,
            burst_operations: limit.burst_operations,
        }
    }
}

impl From<&RateGroup> for vmm::RateGroup {
    fn from(group: &RateGroup) -> Self {
        Self {
            name: group.name.to_string(),
            limit: Some(group.limit.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use vmmd_api::v1::{DiskErrorPolicy, DiskSpec, RateLimit, disk_spec::Source};
    use vmmd_spec::Violations;

    use super::*;

    #[test]
    fn layouts_are_the_same_in_both_directions() {
        for wire in (0..)
            .map_while(|wire| vmm::KeyboardLayout::try_from(wire).ok())
            .skip(1)
        {
            assert_eq!(layout(wire.into()).map(vmm::KeyboardLayout::from), Some(wire));
        }
        assert_eq!((layout(0), layout(99)), (Some(Layout::Us), None));
    }

    #[test]
    fn options_of_a_disk_reach_the_machine() {
        let plain = DiskSpec {
            name: "data".into(),
            source: Some(Source::Disk("data-1".into())),
            ..Default::default()
        };
        let converted = |spec, format| {
            let mut found = Violations::default();
            super::disk(&Disk::new(&mut found, "disk", &spec).unwrap(), format)
        };
        let wire = converted(plain.clone(), Format::Qcow2);
        assert_eq!(
            (wire.format(), wire.on_error(), wire.rate_limit.is_none()),
            (vmm::ImageFormat::Qcow2, vmm::OnError::Report, true)
        );
        let full = DiskSpec {
            read_only: true,
            serial: "S 1".into(),
            queues: 16,
            logical_block_bytes: 4096,
            on_error: DiskErrorPolicy::Pause.into(),
            rate_limit: Some(RateLimit {
                bytes_per_second: 1 << 20,
                operations_per_second: 100,
                burst_bytes: 1 << 16,
                burst_operations: 7,
            }),
            ..plain
        };
        let wire = converted(full, Format::Raw);
        assert_eq!(
            (wire.queues, wire.logical_block_bytes, wire.read_only),
            (16, 4096, true)
        );
        assert_eq!(
            (wire.on_error(), wire.serial.as_str()),
            (vmm::OnError::Pause, "S 1")
        );
        let limit = wire.rate_limit.unwrap();
        assert_eq!((limit.bytes_per_second, limit.burst_operations), (1 << 20, 7));
    }
}
