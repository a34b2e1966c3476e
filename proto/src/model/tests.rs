use super::{
    balloon::Balloon,
    cpu::CpuShare,
    disk::{Format, OnError},
    machine::{self, DiskLimit, Machine},
    name::Name,
    nic::Mac,
    topology::Topology,
    vm::Manifest,
};
use crate::{v1, vmm};

fn manifest() -> v1::Vm {
    let json = serde_json::json!({
        "metadata": {"name": "web-1", "labels": {"tier": "front"}},
        "spec": {
            "cpu": {"cores": 2},
            "memory": {"sizeBytes": 268_435_456},
            "boot": {"linux": {"kernel": "/boot/vmlinuz", "cmdline": "console=ttyS0"}},
            "disks": [{"name": "root", "path": "/var/lib/root.raw", "format": "DISK_FORMAT_RAW"}],
            "nics": [{"name": "eth0", "bridge": "br0", "mac": "52:54:00:12:34:56"}],
        },
    });
    serde_json::from_value(json).unwrap()
}

fn fields_refused(change: impl FnOnce(&mut v1::Vm)) -> Vec<String> {
    let mut vm = manifest();
    change(&mut vm);
    let violations = Manifest::try_from(&vm).unwrap_err();
    violations
        .0
        .into_iter()
        .map(|violation| violation.field)
        .collect()
}

#[test]
fn a_good_manifest_is_taken_as_it_is() {
    let manifest = Manifest::try_from(&manifest()).unwrap();
    assert_eq!(manifest.metadata.name.as_str(), "web-1");
    assert_eq!(manifest.spec.topology.cores(), 2);
    assert_eq!(manifest.spec.disks[0].serial, "root");
    let (_, initrd) = manifest.spec.boot.files();
    assert_eq!(initrd, None);
}

#[test]
fn core_fractions_and_limits_are_percent_of_a_processor_and_the_limit_is_not_below_the_fraction() {
    const FRACTION: &str = "spec.cpu.coreFractionPercent";
    const LIMIT: &str = "spec.cpu.coreLimitPercent";
    for (fraction, limit, expected) in [
        (0, 0, Ok((100, None, 2000))),
        (1, 0, Ok((1, None, 20))),
        (20, 20, Ok((20, Some(20), 400))),
        (20, 100, Ok((20, Some(100), 400))),
        (100, 100, Ok((100, Some(100), 2000))),
        (101, 0, Err(vec![FRACTION])),
        (u32::MAX, u32::MAX, Err(vec![FRACTION, LIMIT])),
        (20, 19, Err(vec![LIMIT])),
        (20, 101, Err(vec![LIMIT])),
        (0, 99, Err(vec![LIMIT])),
    ] {
        let mut vm = manifest();
        let cpu = vm.spec.as_mut().unwrap().cpu.as_mut().unwrap();
        (cpu.core_fraction_percent, cpu.core_limit_percent) = (fraction, limit);
        let found = Manifest::try_from(&vm).map(|manifest| {
            let CpuShare {
                fraction_percent,
                limit_percent,
            } = manifest.spec.cpu;
            (fraction_percent, limit_percent, manifest.spec.cpu.millis(2))
        });
        let found = found.map_err(|found| found.0.into_iter().map(|found| found.field).collect::<Vec<_>>());
        assert_eq!(
            found.as_ref().map_err(|f| f.iter().map(String::as_str).collect()),
            expected.as_ref().map_err(Vec::clone),
            "{fraction} {limit}"
        );
    }
}

#[test]
fn a_vm_has_a_balloon_unless_it_wants_none_or_has_huge_pages() {
    let of = |balloon: Option<v1::BalloonSpec>, huge: v1::HugePages| {
        let mut vm = manifest();
        let spec = vm.spec.as_mut().unwrap();
        spec.balloon = balloon;
        spec.memory.as_mut().unwrap().huge_pages = huge.into();
        Manifest::try_from(&vm)
            .map(|manifest| manifest.spec.balloon)
            .map_err(|found| found.0.into_iter().map(|one| one.field).collect::<Vec<_>>())
    };
    let (none, huge) = (v1::HugePages::Unspecified, v1::HugePages::HugePages2m);
    let spec = |disabled, free_page_reporting, target_bytes| {
        Some(v1::BalloonSpec {
            disabled,
            free_page_reporting,
            target_bytes,
        })
    };
    let balloon = |free_page_reporting, target_bytes| {
        Ok(Some(Balloon {
            free_page_reporting,
            target_bytes,
        }))
    };
    assert_eq!(of(None, none), balloon(false, None));
    assert_eq!(of(None, huge), Ok(None));
    assert_eq!(of(spec(true, false, 0), none), Ok(None));
    assert_eq!(of(spec(true, false, 0), huge), Ok(None));
    assert_eq!(of(spec(false, true, 0), none), balloon(true, None));
    for target in [64 << 20, 66 << 20, 256 << 20] {
        assert_eq!(of(spec(false, false, target), none), balloon(false, Some(target)));
    }
    const TARGET: &str = "spec.balloon.targetBytes";
    for target in [1, (64 << 20) + 4096, 62 << 20, 258 << 20, u64::MAX] {
        assert_eq!(of(spec(false, false, target), none), Err(vec![TARGET.into()]));
    }
    assert_eq!(of(spec(false, false, 0), huge), Err(vec!["spec.balloon".into()]));
    assert_eq!(
        of(spec(true, true, 0), none),
        Err(vec!["spec.balloon.disabled".into()])
    );
    let balloon = Balloon {
        free_page_reporting: true,
        target_bytes: Some(64 << 20),
    };
    assert_eq!(balloon.held_bytes(256 << 20), 192 << 20);
    assert_eq!(Balloon::default().held_bytes(256 << 20), 0);
}

#[test]
fn memory_is_shared_when_it_is_asked_for_or_costs_nothing() {
    use v1::{HugePages, MemoryBacking};
    for (backing, huge_pages, shared) in [
        (MemoryBacking::Unspecified, HugePages::Unspecified, false),
        (MemoryBacking::Unspecified, HugePages::HugePages2m, true),
        (MemoryBacking::Private, HugePages::HugePages2m, false),
        (MemoryBacking::Private, HugePages::Unspecified, false),
        (MemoryBacking::Shared, HugePages::Unspecified, true),
    ] {
        let mut vm = manifest();
        let memory = vm.spec.as_mut().unwrap().memory.as_mut().unwrap();
        memory.backing = backing.into();
        memory.huge_pages = huge_pages.into();
        let manifest = Manifest::try_from(&vm).unwrap();
        assert_eq!(
            manifest.spec.shares_memory(),
            shared,
            "{backing:?} {huge_pages:?}"
        );
    }
}

#[test]
fn shares_are_mounted_by_cloud_init_at_one_place_each() {
    let share = |name: &str, mount: &str| v1::ShareSpec {
        name: name.into(),
        path: "/srv/data".into(),
        mount: mount.into(),
        ..Default::default()
    };
    let with = |init: Option<v1::CloudInit>, shares: &[v1::ShareSpec]| {
        let mut vm = manifest();
        let spec = vm.spec.as_mut().unwrap();
        spec.cloud_init = init;
        spec.shares = shares.to_vec();
        let violations = Manifest::try_from(&vm).err().unwrap_or_default();
        violations
            .0
            .into_iter()
            .map(|violation| violation.field)
            .collect::<Vec<_>>()
    };
    let init = Some(v1::CloudInit::default());
    let own = Some(v1::CloudInit {
        vendor_data: "#cloud-config".into(),
        ..Default::default()
    });
    let two = [share("a", ""), share("b", "/data")];
    assert_eq!(with(init.clone(), &two), [""; 0]);
    assert_eq!(with(None, &two), ["spec.shares[1].mount"]);
    assert_eq!(with(own.clone(), &two), ["spec.cloudInit.vendorData"]);
    assert_eq!(with(own, &two[..1]), [""; 0]);
    let same = [share("a", "/data"), share("b", "/data/")];
    assert_eq!(with(init, &same), ["spec.shares"]);
}

#[test]
fn json_with_an_unknown_field_is_refused_by_name() {
    let json = r#"{"spec": {"cpus": 3}}"#;
    let error = serde_json::from_str::<v1::Vm>(json).unwrap_err().to_string();
    assert!(error.contains("cpus"), "{error}");
}

#[test]
fn all_problems_are_reported_at_once_with_their_paths() {
    let refused = fields_refused(|vm| {
        vm.metadata.as_mut().unwrap().name = "a/b".into();
        let spec = vm.spec.as_mut().unwrap();
        spec.cpu.as_mut().unwrap().cores = 0;
        spec.memory.as_mut().unwrap().size_bytes = 1 << 20;
        spec.disks[0].source = Some(v1::disk_spec::Source::Path("relative".into()));
        spec.nics[0].attachment = None;
    });
    let expected = [
        "metadata.name",
        "spec.cpu.cores",
        "spec.memory.sizeBytes",
        "spec.disks[0].path",
        "spec.nics[0]",
    ];
    assert_eq!(refused, expected);
}

#[test]
fn a_message_without_anything_is_refused_and_nothing_panics() {
    let violations = Manifest::try_from(&v1::Vm::default()).unwrap_err();
    assert!(
        violations.0.iter().any(|violation| violation.field == "spec"),
        "{violations}"
    );
    let vm = v1::Vm {
        spec: Some(v1::VmSpec::default()),
        ..v1::Vm::default()
    };
    assert!(Manifest::try_from(&vm).is_err());
}

#[test]
fn memory_is_128_mib_to_16_gib_in_steps_of_2_mib() {
    let refused = |bytes| {
        let mut vm = manifest();
        vm.spec.as_mut().unwrap().memory.as_mut().unwrap().size_bytes = bytes;
        Manifest::try_from(&vm).is_err()
    };
    for bytes in [
        0,
        127 << 20,
        (128 << 20) + 4096,
        (256 << 20) + (1 << 20),
        (4 << 40) + (2 << 20),
        u64::MAX,
    ] {
        assert!(refused(bytes), "{bytes}");
    }
    for bytes in [128 << 20, 130 << 20, 3 << 30, 5 << 30, 16 << 30, 4 << 40] {
        assert!(!refused(bytes), "{bytes}");
    }
}

#[test]
fn the_same_name_path_or_mac_twice_is_refused() {
    let refused = fields_refused(|vm| {
        let spec = vm.spec.as_mut().unwrap();
        spec.disks.push(spec.disks[0].clone());
        spec.nics.push(spec.nics[0].clone());
    });
    assert_eq!(refused, ["spec.disks", "spec.nics", "spec.disks", "spec.nics"]);
}

#[test]
fn several_disks_may_read_the_same_but_none_may_write_to_it_then() {
    let both = |first: bool, second: bool| {
        fields_refused(|vm| {
            let spec = vm.spec.as_mut().unwrap();
            spec.cpu = None;
            let mut other = spec.disks[0].clone();
            other.name = "other".into();
            spec.disks[0].read_only = first;
            other.read_only = second;
            spec.disks.push(other);
        })
    };
    assert_eq!(both(true, true), ["spec.cpu.cores"]);
    for (first, second) in [(false, false), (true, false), (false, true)] {
        assert_eq!(both(first, second), ["spec.cpu.cores", "spec.disks"]);
    }
}

#[test]
fn disks_are_in_groups_that_there_are() {
    let group = |name: &str| v1::RateGroup {
        name: name.into(),
        limit: None,
    };
    let disk = |name: &str, group: &str| v1::DiskSpec {
        name: name.into(),
        source: Some(v1::disk_spec::Source::Path(format!("/srv/{name}"))),
        format: v1::DiskFormat::Raw.into(),
        rate_group: group.into(),
        ..Default::default()
    };
    let refused = fields_refused(|vm| {
        let spec = vm.spec.as_mut().unwrap();
        spec.rate_groups = vec![group("slow"), group("slow"), group("")];
        spec.disks = vec![disk("a", "slow"), disk("b", "fast"), disk("c", ""), disk("d", "")];
    });
    assert_eq!(
        refused,
        [
            "spec.rateGroups[2].name",
            "spec.rateGroups",
            "spec.disks[1].rateGroup"
        ]
    );
    let mut vm = manifest();
    let spec = vm.spec.as_mut().unwrap();
    spec.rate_groups = vec![group("slow")];
    spec.disks = vec![disk("a", "slow"), disk("b", "slow")];
    assert_eq!(Manifest::try_from(&vm).unwrap().spec.rate_groups.len(), 1);
}

#[test]
fn topology_follows_the_rule_of_platform_v1() {
    for (cores, sockets) in [
        (1, 1),
        (3, 1),
        (16, 1),
        (17, 1),
        (18, 2),
        (32, 2),
        (33, 1),
        (34, 2),
        (36, 4),
        (64, 4),
        (66, 2),
        (68, 4),
        (72, 8),
        (248, 8),
        (249, 1),
        (250, 2),
        (252, 4),
        (254, 2),
    ] {
        assert_eq!(Topology::for_cores(cores).unwrap().sockets, sockets, "{cores}");
    }
    for cores in 1..=254 {
        assert_eq!(Topology::for_cores(cores).unwrap().cores(), cores);
    }
    for cores in [0, 255, 256, 10_000, u32::MAX] {
        assert!(Topology::for_cores(cores).is_err(), "{cores}");
    }
}

#[test]
fn names_are_dns_labels() {
    for good in ["a", "0", "web-1", &"x".repeat(63)] {
        assert!(Name::try_from(good).is_ok(), "{good}");
    }
    for bad in ["", "-a", "a-", "A", "a/b", "a b", "..", "ä", &"x".repeat(64)] {
        assert!(Name::try_from(bad).is_err(), "{bad}");
    }
}

#[test]
fn macs_are_unicast_and_written_with_colons() {
    let mac: Mac = "52:54:00:AB:cd:ef".parse().unwrap();
    assert_eq!(mac.to_string(), "52:54:00:ab:cd:ef");
    for bad in [
        "",
        "52:54:00:12:34",
        "52:54:00:12:34:56:78",
        "01:00:5e:00:00:01",
        "00:00:00:00:00:00",
        "52-54-00-12-34-56",
        "+2:54:00:12:34:56",
    ] {
        assert!(bad.parse::<Mac>().is_err(), "{bad}");
    }
}

#[test]
fn a_mac_that_is_made_is_local_unicast_and_none_of_a_tap() {
    for random in 0..=0xff {
        let [first, ..] = Mac::local([random; 6]).octets();
        assert_eq!(first & 3, 2, "{first:x}");
        assert_ne!(first, 0xfe);
    }
}

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
fn a_machine_names_each_descriptor_and_slot_once_and_only_what_came() {
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
fn a_balloon_holds_whole_pages_of_the_machines_memory_and_not_huge_ones() {
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
