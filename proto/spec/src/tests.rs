use vmmd_api::v1;

use super::{balloon::Balloon, cpu::CpuShare, name::Name, nic::Mac, topology::Topology, vm::Manifest};

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
fn memory_is_64_mib_to_4_tib_in_steps_of_2_mib() {
    let refused = |bytes| {
        let mut vm = manifest();
        vm.spec.as_mut().unwrap().memory.as_mut().unwrap().size_bytes = bytes;
        Manifest::try_from(&vm).is_err()
    };
    for bytes in [
        0,
        63 << 20,
        (128 << 20) + 4096,
        (256 << 20) + (1 << 20),
        (4 << 40) + (2 << 20),
        u64::MAX,
    ] {
        assert!(refused(bytes), "{bytes}");
    }
    for bytes in [64 << 20, 130 << 20, 3 << 30, 5 << 30, 16 << 30, 4 << 40] {
        assert!(!refused(bytes), "{bytes}");
    }
    let with_firmware = |kind: v1::FirmwareType| {
        fields_refused(|vm| {
            let spec = vm.spec.as_mut().unwrap();
            spec.cpu = None;
            spec.memory.as_mut().unwrap().size_bytes = 126 << 20;
            let firmware = v1::FirmwareBoot {
                r#type: kind.into(),
                ..Default::default()
            };
            let source = Some(v1::boot_spec::Source::Firmware(firmware));
            spec.boot = Some(v1::BootSpec { source });
        })
    };
    assert_eq!(with_firmware(v1::FirmwareType::Bios), ["spec.cpu.cores"]);
    for kind in [v1::FirmwareType::Uefi, v1::FirmwareType::Auto] {
        assert_eq!(with_firmware(kind), ["spec.cpu.cores", "spec.memory.sizeBytes"]);
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
fn vm_has_one_nic_in_the_network_of_its_pod() {
    let refused = |interface: &str, count: usize, change: fn(&mut v1::NicSpec)| {
        fields_refused(|vm| {
            let spec = vm.spec.as_mut().unwrap();
            spec.cpu = None;
            spec.pod = Some(v1::PodSpec {
                uid: "6fd1bd2c-8a4e-4c39-9a6f-2c4f9c7a1b10".to_owned(),
            });
            spec.nics = (0..count)
                .map(|index| v1::NicSpec {
                    name: format!("eth{index}"),
                    attachment: Some(v1::nic_spec::Attachment::PodNetwork(v1::PodNetwork {
                        interface: interface.to_owned(),
                    })),
                    ..Default::default()
                })
                .collect();
            change(&mut spec.nics[0]);
        })
    };
    let cpu = "spec.cpu.cores";
    for interface in ["", "net1"] {
        assert_eq!(refused(interface, 1, |_| {}), [cpu], "{interface}");
    }
    assert_eq!(
        refused("a name that is too long", 1, |_| {}),
        [cpu, "spec.nics[0].podNetwork.interface"]
    );
    assert_eq!(refused("", 2, |_| {}), [cpu, "spec.nics[1].podNetwork"]);
    let network_only = |nic: &mut v1::NicSpec| {
        nic.address = "10.0.2.9".into();
        nic.published_ports = vec![v1::PublishedPort::default()];
        nic.firewall = Some(v1::NicFirewall::default());
        nic.routed_subnets = vec!["10.90.0.0/24".into()];
        nic.floating_addresses = vec!["192.0.2.7".into()];
        nic.security_groups = vec!["web".into()];
    };
    let fields = [
        "address",
        "publishedPorts",
        "firewall",
        "routedSubnets",
        "floatingAddresses",
        "securityGroups",
    ]
    .map(|field| format!("spec.nics[0].{field}"));
    assert_eq!(refused("", 1, network_only)[1..], fields);
    let without_pod = fields_refused(|vm| {
        let attachment = v1::nic_spec::Attachment::PodNetwork(v1::PodNetwork::default());
        vm.spec.as_mut().unwrap().nics[0].attachment = Some(attachment);
    });
    assert_eq!(without_pod, ["spec.nics[0].podNetwork"]);
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
fn sata_disks_are_in_vms_with_firmware_six_at_most() {
    let refused = |firmware: bool, count: usize| {
        fields_refused(|vm| {
            let spec = vm.spec.as_mut().unwrap();
            spec.cpu = None;
            let disk = |index| v1::DiskSpec {
                name: format!("cd{index}"),
                source: Some(v1::disk_spec::Source::Path(format!("/srv/{index}.iso"))),
                format: v1::DiskFormat::Iso.into(),
                cdrom: true,
                ..Default::default()
            };
            spec.disks.extend((0..count).map(disk));
            if firmware {
                let source = v1::boot_spec::Source::Firmware(v1::FirmwareBoot::default());
                spec.boot = Some(v1::BootSpec { source: Some(source) });
            }
        })
    };
    assert_eq!(refused(true, 6), ["spec.cpu.cores"]);
    assert_eq!(refused(true, 7), ["spec.cpu.cores", "spec.disks"]);
    assert_eq!(refused(false, 1), ["spec.cpu.cores", "spec.disks[1].bus"]);
}

#[test]
fn boot_order_is_of_firmware_with_different_positions() {
    let firmware = |kind: v1::FirmwareType, menu_seconds| {
        let firmware = v1::FirmwareBoot {
            r#type: kind.into(),
            menu_seconds,
        };
        let source = Some(v1::boot_spec::Source::Firmware(firmware));
        Some(v1::BootSpec { source })
    };
    let refused = |boot: Option<v1::BootSpec>, disk: u32, nic: u32| {
        fields_refused(|vm| {
            let spec = vm.spec.as_mut().unwrap();
            spec.cpu = None;
            spec.boot = boot.or(spec.boot.take());
            (spec.disks[0].boot_order, spec.nics[0].boot_order) = (disk, nic);
        })
    };
    let (disk, nic, cpu) = (
        "spec.disks[0].bootOrder",
        "spec.nics[0].bootOrder",
        "spec.cpu.cores",
    );
    let uefi = firmware(v1::FirmwareType::Uefi, 60);
    assert_eq!(refused(uefi.clone(), 16, 1), [cpu]);
    assert_eq!(refused(uefi.clone(), 17, 0), [cpu, disk]);
    assert_eq!(refused(uefi, 2, 2), [cpu, nic]);
    let bios = firmware(v1::FirmwareType::Bios, 0);
    assert_eq!(refused(bios.clone(), 1, 0), [cpu]);
    assert_eq!(refused(bios, 0, 1), [cpu, nic]);
    assert_eq!(refused(None, 1, 0), [cpu, disk]);
    let menu = firmware(v1::FirmwareType::Auto, 61);
    assert_eq!(refused(menu, 0, 0), [cpu, "spec.boot.firmware.menuSeconds"]);
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
