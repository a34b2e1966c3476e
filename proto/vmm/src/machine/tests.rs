use vmmd_spec::{
    disk::{Format, OnError},
    topology::Topology,
};

use super::{self as machine, DiskLimit, DiskPlace, Machine};
use crate::vmm;

fn machine() -> vmm::MachineSpec {
    vmm::MachineSpec {
        uuid: vec![1; 16],
        vcpus: 1,
        memory_bytes: 256 << 20,
        kvm_fd: 0,
        kernel: Some(vmm::Kernel {
            kernel_fd: 1,
            ..Default::default()
        }),
        rng_pci_slot: 1,
        rng_fd: 2,
        disks: vec![vmm::Disk {
            name: "root".into(),
            fd: 3,
            pci_slot: 2,
            ..Default::default()
        }],
        ..Default::default()
    }
}

#[test]
fn descriptors_and_slots_are_named_once_and_exist() {
    assert!(Machine::new(&machine(), 4).is_ok());
    assert!(Machine::new(&machine(), 3).is_err());
    let mut spec = machine();
    spec.disks[0].fd = 1;
    assert!(
        Machine::new(&spec, 4)
            .unwrap_err()
            .to_string()
            .contains("same descriptor")
    );
    for slot in [0, 1, 32, 64, 96, u32::MAX] {
        let mut spec = machine();
        spec.disks[0].pci_slot = slot;
        assert!(Machine::new(&spec, 4).is_err(), "{slot}");
    }
}

#[test]
fn a_machine_has_a_kernel_or_firmware() {
    let firmware = vmm::MachineSpec {
        kernel: None,
        firmware: Some(vmm::Firmware {
            menu_seconds: 0,
            code_fd: 1,
            variables_fd: Some(4),
        }),
        ..machine()
    };
    let valid = Machine::new(&firmware, 5).unwrap();
    let (code, variables) = (machine::FdIndex(1), Some(machine::FdIndex(4)));
    let menu_seconds = 0;
    let expected = machine::Boot::Firmware {
        code,
        variables,
        menu_seconds,
    };
    assert_eq!(valid.boot, expected);
    assert!(Machine::new(&firmware, 4).is_err());
    let both = vmm::MachineSpec {
        kernel: machine().kernel,
        firmware: Some(vmm::Firmware {
            menu_seconds: 0,
            code_fd: 4,
            variables_fd: Some(5),
        }),
        ..machine()
    };
    let neither = vmm::MachineSpec {
        kernel: None,
        ..machine()
    };
    for spec in [both, neither] {
        assert!(Machine::new(&spec, 6).is_err());
    }
}

#[test]
fn balloon_needs_whole_pages_and_no_huge_pages() {
    let with = |slot: u32, target: u64, huge_page_bytes: u64| {
        let spec = vmm::MachineSpec {
            balloon: Some(vmm::Balloon {
                pci_slot: slot,
                target_bytes: target,
                free_page_reporting: true,
            }),
            huge_page_bytes,
            ..machine()
        };
        Machine::new(&spec, 4).map(|machine| machine.balloon.map(|balloon| balloon.target_bytes))
    };
    assert_eq!(Machine::new(&machine(), 4).unwrap().balloon, None);
    for target in [0, 4096, 256 << 20] {
        assert_eq!(with(26, target, 0).unwrap(), Some(target));
    }
    for (slot, target, huge) in [
        (26, 4095, 0),
        (26, (256 << 20) + 4096, 0),
        (26, 0, 2 << 20),
        (1, 0, 0),
        (32, 0, 0),
    ] {
        assert!(with(slot, target, huge).is_err(), "{slot} {target} {huge}");
    }
}

fn with_disk(change: impl FnOnce(&mut vmm::Disk)) -> vmm::MachineSpec {
    let mut disk = vmm::Disk {
        name: "data".into(),
        fd: 4,
        pci_slot: 2,
        ..vmm::Disk::default()
    };
    change(&mut disk);
    vmm::MachineSpec {
        disks: vec![disk],
        rate_groups: vec![vmm::RateGroup {
            name: "slow".into(),
            limit: Some(vmm::RateLimit {
                bytes_per_second: 1 << 20,
                ..vmm::RateLimit::default()
            }),
        }],
        ..machine()
    }
}

#[test]
fn a_disk_of_a_machine_has_defaults_and_takes_what_it_is_given() {
    let plain = Machine::new(&with_disk(|_| ()), 5).unwrap();
    let disk = &plain.disks[0];
    assert_eq!((disk.format, disk.logical_block), (Format::Raw, 512));
    assert_eq!((disk.on_error, &disk.limit), (OnError::Report, &DiskLimit::None));
    assert_eq!(u32::from(disk.queues), plain.topology.cores().min(4));
    assert_eq!(plain.rate_groups["slow"].bytes_per_second, 1 << 20);

    let spec = with_disk(|disk| {
        disk.format = vmm::ImageFormat::Qcow2.into();
        disk.queues = 16;
        disk.logical_block_bytes = 4096;
        disk.on_error = vmm::OnError::Pause.into();
        disk.rate_group = "slow".into();
        disk.backing = vec![vmm::BackingImage {
            fd: 5,
            format: vmm::ImageFormat::Raw.into(),
        }];
    });
    let disk = Machine::new(&spec, 6).unwrap().disks.remove(0);
    assert_eq!((disk.format, disk.queues), (Format::Qcow2, 16));
    assert_eq!((disk.logical_block, disk.on_error), (4096, OnError::Pause));
    assert_eq!(disk.limit, DiskLimit::Group("slow".into()));
    assert_eq!(disk.backing[0].format, Format::Raw);

    let iso = with_disk(|disk| disk.format = vmm::ImageFormat::Iso.into());
    assert!(Machine::new(&iso, 5).unwrap().disks[0].read_only);
}

#[test]
fn all_that_is_wrong_with_a_disk_is_said_at_once() {
    let wire = vmm::Disk {
        fd: 1,
        format: 9,
        queues: 17,
        logical_block_bytes: 1024,
        on_error: 7,
        rate_limit: Some(vmm::RateLimit::default()),
        rate_group: "none".into(),
        serial: "x".repeat(21),
        pci_slot: 96,
        backing: vec![vmm::BackingImage {
            fd: 0,
            format: vmm::ImageFormat::Iso.into(),
        }],
        ..vmm::Disk::default()
    };
    let topology = Topology::for_cores(2).unwrap();
    let refused = machine::Disk::new(&wire, 1, topology, |_| false)
        .unwrap_err()
        .to_string();
    for part in [
        "has no name",
        "serial too long",
        "unknown format 9",
        "descriptor 1 of 1",
        "only a qcow2 image",
        "is no format of a backing image",
        "at most 16 queues, are 17",
        "512 or 4096 bytes, is 1024",
        "unknown on_error 7",
        "a limit of its own and a rate group",
        "there is no rate group none",
        "must be 1 to 95 and no multiple of 32, is 96",
    ] {
        assert!(refused.contains(part), "{part}: {refused}");
    }
}

#[test]
fn an_image_below_an_overlay_is_a_descriptor_of_its_own() {
    let spec = with_disk(|disk| {
        disk.format = vmm::ImageFormat::Qcow2.into();
        disk.backing = vec![vmm::BackingImage {
            fd: 4,
            format: vmm::ImageFormat::Raw.into(),
        }];
    });
    let refused = Machine::new(&spec, 5).unwrap_err().to_string();
    assert!(refused.contains("the same descriptor as disk data"), "{refused}");
}

#[test]
fn two_disks_or_groups_of_one_name_are_refused() {
    let mut spec = with_disk(|_| ());
    let mut second = spec.disks[0].clone();
    (second.fd, second.pci_slot) = (5, 3);
    spec.disks.push(second);
    spec.rate_groups.push(spec.rate_groups[0].clone());
    let refused = Machine::new(&spec, 6).unwrap_err().to_string();
    assert_eq!(refused.matches("two with that name").count(), 2, "{refused}");
}

#[test]
fn memory_of_a_machine_is_checked_with_its_pages() {
    let wrong = |change: fn(&mut vmm::MachineSpec)| {
        let mut spec = machine();
        change(&mut spec);
        let violations = Machine::new(&spec, 4).err().unwrap_or_default();
        violations
            .0
            .into_iter()
            .map(|violation| violation.field)
            .collect::<Vec<_>>()
    };
    let good = wrong(|spec| {
        spec.huge_page_bytes = 2 << 20;
        spec.memory_shared = true;
        spec.prefault = true;
        spec.numa_node = Some(0);
    });
    assert_eq!(good, [""; 0]);
    assert_eq!(wrong(|spec| spec.huge_page_bytes = 4 << 20), ["huge_page_bytes"]);
    // 256 MiB are no multiple of 1 GiB.
    assert_eq!(wrong(|spec| spec.huge_page_bytes = 1 << 30), ["huge_page_bytes"]);
    let both = wrong(|spec| {
        spec.mergeable = true;
        spec.memory_shared = true;
        spec.numa_node = Some(5000);
    });
    assert_eq!(both, ["mergeable", "numa_node"]);
}

#[test]
fn sata_disk_has_a_port_of_its_own_in_a_machine_with_firmware() {
    let sata = |change: &dyn Fn(&mut vmm::MachineSpec)| {
        let mut spec = with_disk(|disk| {
            disk.sata_port = Some(5);
            disk.cdrom = true;
        });
        spec.kernel = None;
        // Instead of the kernel, and one more.
        spec.firmware = Some(vmm::Firmware {
            menu_seconds: 0,
            code_fd: 1,
            variables_fd: Some(5),
        });
        change(&mut spec);
        Machine::new(&spec, 7)
    };
    let disk = sata(&|_| ()).unwrap().disks.remove(0);
    let (port, cdrom) = (5, true);
    assert_eq!(disk.place, DiskPlace::Sata { port, cdrom });
    assert!(disk.read_only);
    let refused: [&dyn Fn(&mut vmm::MachineSpec); 5] = [
        &|spec| spec.disks[0].sata_port = Some(6),
        &|spec| spec.disks[0].sata_port = None,
        &|spec| (spec.disks[0].cdrom, spec.disks[0].read_only) = (false, true),
        &|spec| {
            let other = vmm::Disk {
                name: "other".into(),
                fd: 6,
                ..spec.disks[0].clone()
            };
            spec.disks.push(other);
        },
        &|spec| {
            spec.kernel = machine().kernel;
            spec.firmware = None;
        },
    ];
    for change in refused {
        assert!(sata(change).is_err());
    }
}
