use vmmd_api::v1;
use vmmd_spec::{Violations, resources::HugePages, share::Share, topology::Topology};

use super::*;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// 2 vCPUs, 1 GiB, no disk.
pub fn spec() -> VmSpec {
    with_disks(&[])
}

fn with_disks(disks: &[(v1::DiskFormat, u32)]) -> VmSpec {
    let disks = disks
        .iter()
        .enumerate()
        .map(|(index, (format, queues))| v1::DiskSpec {
            name: format!("disk{index}"),
            source: Some(v1::disk_spec::Source::Path(format!("/d{index}"))),
            format: (*format).into(),
            queues: *queues,
            ..Default::default()
        });
    let linux = v1::LinuxBoot {
        kernel: "/k".into(),
        ..Default::default()
    };
    let wire = v1::VmSpec {
        cpu: Some(v1::CpuSpec {
            cores: 2,
            ..Default::default()
        }),
        memory: Some(v1::MemorySpec {
            size_bytes: GIB,
            ..Default::default()
        }),
        boot: Some(v1::BootSpec {
            source: Some(v1::boot_spec::Source::Linux(linux)),
        }),
        disks: disks.collect(),
        ..Default::default()
    };
    VmSpec::try_from(&wire).unwrap()
}

fn facts() -> Facts {
    Facts {
        controllers: Controller::ALL.into(),
        cpus: "0-7".parse().unwrap(),
        numa_cpus: None,
        huge_page_sizes: vec![("2MB".into(), 2 << 20), ("1GB".into(), 1 << 30)],
        huge_pages_are_memory: false,
        disks_in_memory: 0,
    }
}

/// As "file=value".
fn lines(spec: &VmSpec, facts: &Facts) -> Vec<String> {
    let settings = plan(spec, facts).unwrap().settings.into_iter();
    settings
        .map(|setting| format!("{}={}", setting.file, setting.value))
        .collect()
}

fn value(spec: &VmSpec, facts: &Facts, file: &str) -> String {
    let settings = plan(spec, facts).unwrap().settings;
    let found = settings.into_iter().find(|setting| setting.file == file);
    found.unwrap().value
}

#[test]
fn a_plain_vm_has_all_limits() {
    // 64 MiB, 1/64 of 1 GiB, 2 MiB for each vCPU.
    let memory = GIB + (64 + 16 + 4) * MIB;
    let expected = [
        "cpu.weight=200".to_owned(),
        "cpu.max=max 100000".to_owned(),
        "cpuset.cpus=".to_owned(),
        "cpuset.mems=".to_owned(),
        format!("memory.max={memory}"),
        "memory.oom.group=1".to_owned(),
        "memory.swap.max=0".to_owned(),
        "hugetlb.2MB.max=0".to_owned(),
        "hugetlb.1GB.max=0".to_owned(),
        "io.weight=default 200".to_owned(),
        "pids.max=66".to_owned(),
    ];
    assert_eq!(lines(&spec(), &facts()), expected);
    assert_eq!(plan(&spec(), &facts()).unwrap().missing, []);
}

#[test]
fn processor_time_follows_cores_fraction_and_limit() {
    for (cores, fraction, limit, weight, max) in [
        (1, 100, None, "100", "max 100000"),
        (1, 1, Some(1), "1", "1000 100000"),
        (4, 20, Some(50), "80", "200000 100000"),
        (32, 100, Some(100), "3200", "3200000 100000"),
    ] {
        let mut spec = spec();
        spec.topology = Topology::for_cores(cores).unwrap();
        spec.cpu = CpuShare {
            fraction_percent: fraction,
            limit_percent: limit,
        };
        assert_eq!(value(&spec, &facts(), "cpu.weight"), weight);
        assert_eq!(value(&spec, &facts(), "cpu.max"), max);
        assert_eq!(value(&spec, &facts(), "io.weight"), format!("default {weight}"));
    }
}

#[test]
fn processors_are_those_of_the_spec_or_of_its_numa_node() {
    let node = Facts {
        numa_cpus: Some("4-7".parse().unwrap()),
        ..facts()
    };
    let memory_only = Facts {
        numa_cpus: Some(CpuSet::default()),
        ..facts()
    };
    for (cpus, numa, facts, expected) in [
        (None, None, facts(), ("", "")),
        (Some("0,2-3"), None, facts(), ("0,2-3", "")),
        (None, Some(1), node.clone(), ("4-7", "1")),
        (Some("1"), Some(1), node, ("1", "1")),
        (None, Some(1), memory_only, ("", "1")),
    ] {
        let mut spec = spec();
        spec.host_cpus = cpus.map(|cpus| cpus.parse().unwrap());
        spec.memory.numa_node = numa;
        let found = ["cpuset.cpus", "cpuset.mems"].map(|file| value(&spec, &facts, file));
        assert_eq!(found, [expected.0, expected.1]);
    }
}

#[test]
fn memory_grows_with_what_the_vm_has_and_huge_pages_are_not_in_it() {
    let plain = GIB + 84 * MIB;
    let max = |spec: &VmSpec, facts: &Facts| value(spec, facts, "memory.max").parse::<u64>().unwrap();
    // As many queues as vCPUs when the spec does not say.
    let raw = with_disks(&[(v1::DiskFormat::Raw, 0), (v1::DiskFormat::Raw, 16)]);
    assert_eq!(max(&raw, &facts()), plain + 18 * 12 * MIB);
    assert_eq!(value(&raw, &facts(), "pids.max"), (66 + 18 * 128).to_string());
    let qcow2 = with_disks(&[(v1::DiskFormat::Qcow2, 1)]);
    assert_eq!(max(&qcow2, &facts()), plain + (12 + 384) * MIB);
    let on_tmpfs = Facts {
        disks_in_memory: 5 * GIB,
        ..facts()
    };
    assert_eq!(max(&spec(), &on_tmpfs), plain + 5 * GIB);

    let mut huge = spec();
    huge.memory.huge_pages = Some(HugePages::Size2M);
    assert_eq!(max(&huge, &facts()), 84 * MIB);
    assert_eq!(value(&huge, &facts(), "hugetlb.2MB.max"), GIB.to_string());
    assert_eq!(value(&huge, &facts(), "hugetlb.1GB.max"), "0");
    let counted = Facts {
        huge_pages_are_memory: true,
        ..facts()
    };
    assert_eq!(max(&huge, &counted), plain);
}

#[test]
fn memory_grows_with_the_files_that_a_share_may_have() {
    for (files, more) in [(0, 128 * MIB), (256, 128 * MIB), (200_000, 400_000 << 10)] {
        let share = v1::ShareSpec {
            name: "data".into(),
            path: "/srv/data".into(),
            max_open_files: files,
            ..Default::default()
        };
        let mut shared = spec();
        shared
            .shares
            .extend(Share::new(&mut Violations::default(), "", &share));
        assert_eq!(shared.shares.len(), 1);
        let max = value(&shared, &facts(), "memory.max").parse::<u64>().unwrap();
        assert_eq!(max, GIB + 84 * MIB + more, "{files}");
    }
}

#[test]
fn what_the_node_does_not_have_is_left_out_unless_the_spec_needs_it() {
    use Controller as C;
    let bare = Facts {
        controllers: [C::Pids].into(),
        ..facts()
    };
    let degraded = plan(&spec(), &bare).unwrap();
    assert_eq!(degraded.settings.len(), 1);
    // Hugetlb is not missing, because the spec has no huge pages.
    assert_eq!(degraded.missing, [C::Cpu, C::Cpuset, C::Memory, C::Io]);
    let reason = |change: fn(&mut VmSpec), facts: &Facts| {
        let mut spec = spec();
        change(&mut spec);
        plan(&spec, facts).err().map(|failure| failure.reason)
    };
    let numa = Facts {
        numa_cpus: Some(CpuSet::default()),
        ..bare.clone()
    };
    let missing = Some("CGROUP_CONTROLLER_MISSING");
    let limit = |spec: &mut VmSpec| spec.cpu.limit_percent = Some(100);
    assert_eq!(reason(limit, &bare), missing);
    assert_eq!(reason(|spec| spec.host_cpus = "1".parse().ok(), &bare), missing);
    assert_eq!(reason(|spec| spec.memory.numa_node = Some(0), &numa), missing);
    let unknown = reason(|spec| spec.memory.numa_node = Some(0), &facts());
    assert_eq!(unknown, Some("NUMA_NODE_NOT_FOUND"));
    let absent = reason(|spec| spec.host_cpus = "7-8".parse().ok(), &facts());
    assert_eq!(absent, Some("HOST_CPUS_UNAVAILABLE"));
    assert_eq!(reason(|spec| spec.cpu.fraction_percent = 5, &bare), None);
}

#[test]
fn only_what_the_spec_asks_for_must_be_set() {
    let mut spec = spec();
    spec.host_cpus = "1".parse().ok();
    spec.cpu.limit_percent = Some(100);
    let settings = plan(&spec, &facts()).unwrap().settings;
    let needed: Vec<_> = settings
        .iter()
        .filter_map(|setting| Some((setting.file.as_str(), setting.field?)))
        .collect();
    let expected = [
        ("cpu.max", "spec.cpu.coreLimitPercent"),
        ("cpuset.cpus", "spec.cpu.hostCpus"),
    ];
    assert_eq!(needed, expected);
}

#[test]
fn a_vm_without_room_is_refused_with_numbers() {
    let plain = spec();
    let mut huge = spec();
    huge.memory.huge_pages = Some(HugePages::Size2M);
    let mut bound = spec();
    bound.memory.numa_node = Some(1);
    let (pages, numa) = (Some("INSUFFICIENT_HUGE_PAGES"), Some("INSUFFICIENT_NUMA_MEMORY"));
    for (spec, room, reason) in [
        (&plain, Room::Unknown, None),
        (&huge, Room::HugePages { free: 512 }, None),
        (&huge, Room::HugePages { free: 511 }, pages),
        (&huge, Room::Unknown, None),
        (&bound, Room::Numa { free: GIB }, None),
        (&bound, Room::Numa { free: GIB - 1 }, numa),
    ] {
        let failure = check_room(spec, &room).err();
        assert_eq!(failure.as_ref().map(|failure| failure.reason), reason);
    }
    let failure = check_room(&huge, &Room::HugePages { free: 3 }).unwrap_err();
    assert!(failure.message.contains("512 of 2 MiB") && failure.message.contains("3 free"));
}
