use std::collections::BTreeMap;

use proptest::prelude::*;
use vmmd_api::v1::{
    BalloonSpec, BootSpec, CpuSpec, DiskSpec, LinuxBoot, MemorySpec, NicSpec, RateGroup, RateLimit,
    ShareSpec, boot_spec, nic_spec,
};
use vmmd_store::{InstanceRecord, NicHardware};

use super::*;

fn disk(name: &str) -> DiskSpec {
    DiskSpec {
        name: name.into(),
        source: Some(v1::disk_spec::Source::Path(format!("/{name}"))),
        format: 1,
        ..Default::default()
    }
}

fn nic(name: &str) -> NicSpec {
    NicSpec {
        name: name.into(),
        attachment: Some(nic_spec::Attachment::Bridge("br0".into())),
        ..Default::default()
    }
}

fn share(name: &str) -> ShareSpec {
    ShareSpec {
        name: name.into(),
        path: format!("/srv/{name}"),
        ..Default::default()
    }
}

fn group(name: &str, bytes_per_second: u64) -> RateGroup {
    RateGroup {
        name: name.into(),
        limit: Some(limit(bytes_per_second)),
    }
}

fn limit(bytes_per_second: u64) -> RateLimit {
    RateLimit {
        bytes_per_second,
        ..Default::default()
    }
}

fn spec() -> VmSpec {
    let linux = LinuxBoot {
        kernel: "/k".into(),
        ..Default::default()
    };
    VmSpec {
        cpu: Some(CpuSpec {
            cores: 2,
            ..Default::default()
        }),
        memory: Some(MemorySpec {
            size_bytes: 256 << 20,
            ..Default::default()
        }),
        boot: Some(BootSpec {
            source: Some(boot_spec::Source::Linux(linux)),
        }),
        disks: vec![
            disk("root"),
            DiskSpec {
                rate_group: "slow".into(),
                ..disk("data")
            },
        ],
        nics: vec![nic("eth0")],
        shares: vec![share("data")],
        rate_groups: vec![group("slow", 4096), group("idle", 4096)],
        balloon: Some(BalloonSpec::default()),
        ..Default::default()
    }
}

/// Differences after `change` to the spec, as `path verdict`.
fn found(change: impl FnOnce(&mut VmSpec)) -> Vec<String> {
    let (running, mut desired) = (spec(), spec());
    change(&mut desired);
    let hardware = Hardware::default();
    let changes = compare(&effective(&running, &hardware), &effective(&desired, &hardware));
    changes
        .into_iter()
        .map(|change| match change.verdict {
            Verdict::Live(live) => format!("{} {live:?}", change.path),
            Verdict::Restart => format!("{} restart", change.path),
        })
        .collect()
}

#[test]
fn each_kind_of_change_has_its_verdict() {
    type Row = (fn(&mut VmSpec), &'static [&'static str]);
    let table: &[Row] = &[
        (|_| {}, &[]),
        (|s| s.cpu.as_mut().unwrap().cores = 4, &["spec.cpu.cores restart"]),
        (
            |s| s.cpu.as_mut().unwrap().core_limit_percent = 50,
            &["spec.cpu.coreLimitPercent Processors"],
        ),
        (
            |s| {
                let cpu = s.cpu.as_mut().unwrap();
                (cpu.core_fraction_percent, cpu.host_cpus) = (20, "0".into());
            },
            &[
                "spec.cpu.coreFractionPercent Processors",
                "spec.cpu.hostCpus Processors",
            ],
        ),
        (
            |s| s.memory.as_mut().unwrap().size_bytes = 512 << 20,
            &["spec.memory.sizeBytes restart"],
        ),
        (
            |s| s.memory.as_mut().unwrap().numa_node = Some(0),
            &["spec.memory.numaNode restart"],
        ),
        (
            |s| {
                let Some(boot_spec::Source::Linux(linux)) = &mut s.boot.as_mut().unwrap().source else {
                    panic!("no kernel")
                };
                linux.cmdline = "quiet".into();
                linux.initrd = "/i".into();
            },
            &[
                "spec.boot.linux.cmdline restart",
                "spec.boot.linux.initrd restart",
            ],
        ),
        (|s| s.run_policy = 4, &["spec.runPolicy RunPolicy"]),
        (|s| s.on_crash = 2, &["spec.onCrash restart"]),
        (
            |s| {
                s.clock = Some(v1::ClockSpec {
                    on_resume: 2,
                    ..Default::default()
                });
            },
            &["spec.clock.onResume restart"],
        ),
        (
            |s| s.balloon.as_mut().unwrap().target_bytes = 128 << 20,
            &["spec.balloon.targetBytes BalloonTarget"],
        ),
        (
            |s| {
                let balloon = s.balloon.as_mut().unwrap();
                (balloon.disabled, balloon.target_bytes) = (true, 128 << 20);
            },
            &[
                "spec.balloon.disabled restart",
                "spec.balloon.targetBytes restart",
            ],
        ),
        (
            |s| s.disks[0].rate_limit = Some(limit(8192)),
            &["spec.disks[root].rateLimit DiskLimit(\"root\")"],
        ),
        (
            |s| {
                s.disks[1].rate_group.clear();
                s.disks[1].rate_limit = Some(limit(8192));
            },
            &[
                "spec.disks[data].rateGroup restart",
                "spec.disks[data].rateLimit restart",
            ],
        ),
        (
            |s| s.rate_groups[0].limit = Some(limit(8192)),
            &["spec.rateGroups[slow].limit GroupLimit(\"slow\")"],
        ),
        (
            |s| s.rate_groups.truncate(1),
            &["spec.rateGroups[idle] DropGroup(\"idle\")"],
        ),
        (
            |s| {
                s.rate_groups.remove(0);
                s.disks.truncate(1);
            },
            &[
                "spec.disks[data] Detach(\"data\")",
                "spec.rateGroups[slow] restart",
            ],
        ),
        (|s| s.disks[0].queues = 2, &["spec.disks[root].queues restart"]),
        (
            |s| s.disks[0].source = Some(v1::disk_spec::Source::Path("/other".into())),
            &["spec.disks[root].path restart"],
        ),
        (
            |s| s.disks.push(disk("new")),
            &["spec.disks[new] Attach(\"new\")"],
        ),
        (
            |s| {
                s.rate_groups.push(group("fast", 8192));
                s.disks.push(DiskSpec {
                    rate_group: "fast".into(),
                    ..disk("new")
                });
            },
            &["spec.disks[new] restart", "spec.rateGroups[fast] restart"],
        ),
        (
            |s| s.nics.push(nic("eth1")),
            &["spec.nics[eth1] AttachNic(\"eth1\")"],
        ),
        (|s| s.nics.clear(), &["spec.nics[eth0] DetachNic(\"eth0\")"]),
        (|s| s.state_dir = "/srv/job".into(), &["spec.stateDir StateDir"]),
        (
            |s| s.shares.push(share("more")),
            &["spec.shares[more] AttachShare(\"more\")"],
        ),
        (|s| s.shares.clear(), &["spec.shares[data] DetachShare(\"data\")"]),
        (
            |s| s.shares[0].read_only = true,
            &["spec.shares[data].readOnly restart"],
        ),
        (
            |s| s.nics[0].attachment = Some(nic_spec::Attachment::Tap("t0".into())),
            &["spec.nics[eth0].bridge restart", "spec.nics[eth0].tap restart"],
        ),
        // No change: daemon defaults, equivalent values and another order of lists.
        (|s| s.disks.reverse(), &[]),
        (|s| s.run_policy = 1, &[]),
        (|s| s.on_crash = 1, &[]),
        (
            |s| {
                s.clock = Some(v1::ClockSpec {
                    on_resume: 1,
                    ..Default::default()
                });
            },
            &[],
        ),
        (|s| s.balloon = None, &[]),
        (|s| s.cpu.as_mut().unwrap().core_fraction_percent = 100, &[]),
        (|s| s.disks[0].serial = "root".into(), &[]),
        (|s| s.disks[0].logical_block_bytes = 512, &[]),
        (|s| s.disks[0].rate_limit = Some(limit(0)), &[]),
        (|s| s.disks[0].on_error = 1, &[]),
        (|s| s.disks[0].any_content = true, &[]),
        (|s| s.disks[0].bus = 1, &[]),
        // Disks on SATA are not hot-plugged.
        (|s| s.disks[0].bus = 2, &["spec.disks[root].bus restart"]),
        (
            |s| {
                let cdrom = true;
                s.disks.push(DiskSpec { cdrom, ..disk("cd") });
            },
            &["spec.disks[cd] restart"],
        ),
    ];
    for (index, (change, expected)) in table.iter().enumerate() {
        assert_eq!(found(change), *expected, "row {index}");
    }
}

#[test]
fn values_are_those_of_both_sides() {
    let mut desired = spec();
    desired.cpu.as_mut().unwrap().cores = 4;
    desired.memory.as_mut().unwrap().size_bytes = 1 << 30;
    let changes = compare(&spec(), &desired);
    let values: Vec<_> = changes
        .iter()
        .map(|change| (change.current.to_string(), change.desired.to_string()))
        .collect();
    let expected = [("2", "4"), ("\"268435456\"", "\"1073741824\"")];
    assert_eq!(values, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
}

#[test]
fn empty_message_of_a_device_is_a_change() {
    let desired = VmSpec {
        display: Some(v1::DisplaySpec::default()),
        guest_agent: Some(v1::GuestAgentSpec {}),
        tpm: Some(v1::TpmSpec {}),
        virtio_console: Some(v1::VirtioConsoleSpec {}),
        vsock: Some(v1::VsockSpec::default()),
        ..VmSpec::default()
    };
    let none = VmSpec::default();
    for (running, desired) in [(&none, &desired), (&desired, &none)] {
        let changes = compare(running, desired);
        let paths: Vec<_> = changes.iter().map(|change| change.path.as_str()).collect();
        assert_eq!(paths, PRESENT);
        assert!(changes.iter().all(|change| change.verdict == Verdict::Restart));
    }
    assert_eq!(compare(&desired, &desired), []);
}

#[test]
fn nic_in_the_network_of_a_pod_is_not_plugged() {
    let mut in_pod = spec();
    in_pod.nics[0].attachment = Some(nic_spec::Attachment::PodNetwork(v1::PodNetwork::default()));
    let mut without = spec();
    without.nics.clear();
    for (running, desired) in [(&in_pod, &without), (&without, &in_pod)] {
        let changes = compare(running, desired);
        let [change] = &changes[..] else {
            panic!("{changes:?}");
        };
        assert_eq!(
            (change.path.as_str(), &change.verdict),
            ("spec.nics[eth0]", &Verdict::Restart)
        );
        assert!(change.why_restart().is_some());
    }
}

#[test]
fn ports_and_rules_of_a_nic_change_at_once_in_its_network() {
    let lan = |name: &str| {
        let mut spec = spec();
        spec.nics[0].attachment = Some(nic_spec::Attachment::Network(name.into()));
        spec
    };
    let mut desired = lan("lan");
    desired.nics[0].published_ports = vec![v1::PublishedPort {
        node_port: 8080,
        ..Default::default()
    }];
    desired.nics[0].firewall = Some(v1::NicFirewall {
        egress: Some(v1::NicRules::default()),
        ..Default::default()
    });
    let verdicts = |running: &VmSpec| {
        let changes = compare(running, &desired);
        let changes = changes.into_iter().map(|change| (change.path, change.verdict));
        changes.collect::<Vec<_>>()
    };
    let (firewall, ports) = ("spec.nics[eth0].firewall", "spec.nics[eth0].publishedPorts");
    let live = [
        (firewall.to_owned(), Verdict::Live(Live::NicAccess("eth0".into()))),
        (ports.to_owned(), Verdict::Live(Live::NicAccess("eth0".into()))),
    ];
    assert_eq!(verdicts(&lan("lan")), live);
    let restart =
        [firewall, "spec.nics[eth0].network", ports].map(|path| (path.to_owned(), Verdict::Restart));
    assert_eq!(verdicts(&lan("other")), restart);
}

#[test]
fn a_mac_is_what_the_hardware_has() {
    let with = |mac: [u8; 6]| Hardware {
        nics: BTreeMap::from([(
            "eth0".to_owned(),
            NicHardware {
                slot: 2,
                mac: mac.to_vec(),
                pod_address: 0,
            },
        )]),
        ..Default::default()
    };
    let mut said = spec();
    said.nics[0].mac = "02:00:00:00:00:0A".into();
    let (same, other) = (with([2, 0, 0, 0, 0, 10]), with([2, 0, 0, 0, 0, 11]));
    assert_eq!(compare(&effective(&spec(), &same), &effective(&said, &same)), []);
    let changes = compare(&effective(&spec(), &other), &effective(&said, &same));
    assert_eq!(changes[0].path, "spec.nics[eth0].mac");
    assert_eq!(changes[0].verdict, Verdict::Restart);
}

/// A control group made for the next start would starve the machine that runs.
#[test]
fn limits_of_a_machine_follow_its_present_and_next_parts() {
    let mut desired = spec();
    desired.memory.as_mut().unwrap().size_bytes = 128 << 20;
    desired.cpu.as_mut().unwrap().cores = 1;
    desired.disks = vec![disk("new")];
    let running = spec();
    let validated = vmmd_spec::vm::VmSpec::try_from(&desired).unwrap();
    let mut record = VmRecord {
        spec: Some(desired),
        instance: Some(InstanceRecord {
            spec: Some(running),
            ..Default::default()
        }),
        ..Default::default()
    };
    let machine = machine(&record, &validated);
    assert_eq!((machine.memory_bytes, machine.topology.cores()), (256 << 20, 2));
    let names: Vec<_> = machine.disks.iter().map(|disk| disk.name.to_string()).collect();
    assert_eq!(names, ["root", "data", "new"]);
    record.instance = None;
    assert_eq!(super::machine(&record, &validated), validated);
}

/// Every leaf of a message with its path; items of lists by name. Limits are leaves.
fn leaves(path: &str, json: &Json, found: &mut BTreeMap<String, Json>) {
    match json {
        Json::Object(fields) if !whole(path) => {
            for (key, json) in fields {
                leaves(&format!("{path}.{key}"), json, found);
            }
        }
        Json::Array(items) => {
            for item in items {
                let name = item["name"].as_str().unwrap();
                leaves(&format!("{path}[{name}]"), item, found);
            }
        }
        json => drop(found.insert(path.to_owned(), json.clone())),
    }
}

fn any_disk(name: &'static str) -> impl Strategy<Value = Option<DiskSpec>> {
    let numbers = (0..3_u32, 0..3_i32, 0..3_i32, 0..2_u32);
    let rest = (any::<bool>(), 1..4_i32, 0..3_u64, 0..3_u32);
    proptest::option::of((numbers, rest)).prop_map(move |disk| {
        let ((queues, cache, on_error, block), (read_only, format, rate, order)) = disk?;
        Some(DiskSpec {
            name: name.into(),
            source: Some(v1::disk_spec::Source::Path(format!("/{name}{order}"))),
            format,
            read_only,
            cache,
            queues,
            on_error,
            logical_block_bytes: block * 512,
            rate_limit: (rate < 2).then(|| limit(rate * 4096)),
            rate_group: if rate == 2 { "slow".into() } else { String::new() },
            ..Default::default()
        })
    })
}

fn any_spec() -> impl Strategy<Value = VmSpec> {
    let machine = (
        1..4_u32,
        0..3_u32,
        1..4_u64,
        0..3_i32,
        proptest::option::of(0..2_u32),
    );
    let disks = (any_disk("a"), any_disk("b"), any_disk("c"));
    let nics = (any::<bool>(), any::<bool>(), any::<bool>());
    let rest = (0..6_i32, any::<bool>(), 0..3_u64, 0..3_u64, any::<bool>());
    (machine, disks, nics, rest).prop_map(|(machine, disks, nics, rest)| {
        let (cores, fraction, memory, backing, numa_node) = machine;
        let (run_policy, disabled, target, rate, flip) = rest;
        let mut disks: Vec<_> = [disks.0, disks.1, disks.2].into_iter().flatten().collect();
        if flip {
            disks.reverse();
        }
        let mut spec = VmSpec {
            disks,
            // They go with few kinds of memory.
            shares: Vec::new(),
            rate_groups: vec![group("slow", rate * 4096)],
            run_policy,
            balloon: (target > 0).then(|| BalloonSpec {
                disabled,
                target_bytes: (target - 1) << 21,
                ..Default::default()
            }),
            nics: [(nics.0, "eth0"), (nics.1, "eth1")]
                .into_iter()
                .filter(|(there, _)| *there)
                .map(|(_, name)| nic(name))
                .collect(),
            ..spec()
        };
        spec.cpu = Some(CpuSpec {
            cores,
            core_fraction_percent: fraction * 50,
            ..Default::default()
        });
        spec.memory = Some(MemorySpec {
            size_bytes: memory << 28,
            backing,
            numa_node,
            ..Default::default()
        });
        if nics.2 {
            spec.rate_groups.push(group("idle", 0));
        }
        spec
    })
}

proptest! {
    /// Coverage is exact: each leaf that differs is below exactly one path, and each path has such
    /// a leaf.
    #[test]
    fn every_leaf_that_differs_is_covered_once(running in any_spec(), desired in any_spec()) {
        let hardware = Hardware::default();
        let (running, desired) = (effective(&running, &hardware), effective(&desired, &hardware));
        let mut sides = [BTreeMap::new(), BTreeMap::new()];
        for (side, spec) in sides.iter_mut().zip([&running, &desired]) {
            leaves("spec", &serde_json::to_value(spec).unwrap(), side);
        }
        let changes = compare(&running, &desired);
        let below = |leaf: &str, path: &str| {
            leaf.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let differing: Vec<_> = sides[0]
            .keys()
            .chain(sides[1].keys())
            .filter(|path| sides[0].get(*path) != sides[1].get(*path))
            .collect();
        for leaf in &differing {
            let covering = changes.iter().filter(|change| below(leaf, &change.path)).count();
            prop_assert_eq!(covering, 1, "{}", leaf);
        }
        for change in &changes {
            prop_assert!(differing.iter().any(|leaf| below(leaf, &change.path)), "{}", change.path);
        }
    }

    /// The list is empty if and only if a rebuilt machine would be the same, according to the
    /// validated form.
    #[test]
    fn nothing_is_pending_when_a_restart_changes_nothing(running in any_spec(), desired in any_spec()) {
        let hardware = Hardware::default();
        let machine = |spec: &VmSpec| {
            let mut spec = effective(spec, &hardware);
            spec.disks.sort_by(|a, b| a.name.cmp(&b.name));
            // Not yet in the validated form, or nothing to a machine: by the messages.
            let rest = (spec.run_policy, spec.balloon.unwrap_or_default(), spec.cpu.clone(), spec.memory);
            (vmmd_spec::vm::VmSpec::try_from(&spec), rest)
        };
        let (a, b) = (running, desired);
        let (built, wanted) = (machine(&a), machine(&b));
        prop_assume!(built.0.is_ok() && wanted.0.is_ok());
        let same = built == wanted;
        prop_assert_eq!(compare(&effective(&a, &hardware), &effective(&b, &hardware)).is_empty(), same);
    }

    /// After all live changes, only changes that need a restart are pending.
    #[test]
    fn live_changes_that_are_taken_over_are_no_longer_pending(running in any_spec(), desired in any_spec()) {
        let mut record = VmRecord {
            generation: 2,
            spec: Some(desired),
            hardware: Some(Hardware::default()),
            instance: Some(InstanceRecord {
                generation: 1,
                spec: Some(running),
                hardware: Some(Hardware::default()),
                ..Default::default()
            }),
            ..Default::default()
        };
        let before = pending(&record);
        for change in &before {
            if let Verdict::Live(live) = &change.verdict {
                take_over(&mut record, live);
            }
        }
        let after = pending(&record);
        // The remaining changes are exactly the ones that needed a restart. Their verdict may differ
        // now, if they depended on a change that is done.
        for change in &after {
            prop_assert!(before.iter().any(|old| old.path == change.path && old.verdict == Verdict::Restart));
        }
        for change in before.iter().filter(|change| change.verdict == Verdict::Restart) {
            prop_assert!(after.iter().any(|new| new.path == change.path), "{}", change.path);
        }
        settle(&mut record);
        let run = record.instance.clone().unwrap();
        prop_assert_eq!(run.generation == 2, after.is_empty());
    }
}
