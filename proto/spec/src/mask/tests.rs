use vmmd_api::v1::{BalloonSpec, DiskSpec, ObjectMetadata, RateLimit, VmSpec, disk_spec::Source};

use super::*;

fn disk(name: &str) -> DiskSpec {
    DiskSpec {
        name: name.into(),
        source: Some(Source::Path(format!("/{name}"))),
        queues: 3,
        ..Default::default()
    }
}

fn vm() -> v1::Vm {
    let text = |pairs: &[(&str, &str)]| {
        let pairs = pairs
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        pairs.collect()
    };
    v1::Vm {
        metadata: Some(ObjectMetadata {
            name: "web".into(),
            labels: text(&[("a", "1"), ("b.c/d]", "2")]),
            ..Default::default()
        }),
        spec: Some(VmSpec {
            disks: vec![disk("root"), disk("data")],
            rate_groups: vec![v1::RateGroup {
                name: "slow".into(),
                limit: None,
            }],
            cpu: Some(v1::CpuSpec {
                cores: 2,
                host_cpus: "0-3".into(),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn mask(paths: &[&str]) -> UpdateMask {
    let paths: Vec<_> = paths.iter().map(|path| (*path).to_owned()).collect();
    UpdateMask::new("updateMask", &paths).unwrap()
}

fn apply(paths: &[&str], change: impl FnOnce(&mut v1::Vm)) -> v1::Vm {
    let mut wanted = v1::Vm {
        metadata: Some(ObjectMetadata::default()),
        spec: Some(VmSpec::default()),
        ..Default::default()
    };
    change(&mut wanted);
    mask(paths).apply(&vm(), &wanted).unwrap()
}

fn with(change: impl FnOnce(&mut VmSpec)) -> v1::Vm {
    let mut vm = vm();
    change(vm.spec.as_mut().unwrap());
    vm
}

#[test]
fn only_what_is_named_changes() {
    let cores = |vm: &mut v1::Vm| {
        vm.spec.as_mut().unwrap().cpu = Some(v1::CpuSpec {
            cores: 4,
            ..Default::default()
        });
    };
    assert_eq!(
        apply(&["spec.cpu.cores"], cores),
        with(|spec| spec.cpu.as_mut().unwrap().cores = 4)
    );
    let host_cpus = with(|spec| spec.cpu.as_mut().unwrap().host_cpus.clear());
    assert_eq!(
        apply(&["spec.cpu.hostCpus"], |_| {}),
        host_cpus,
        "the name in JSON, and nothing given"
    );
    assert_eq!(apply(&["spec.cpu"], |_| {}), with(|spec| spec.cpu = None));
    let owner = apply(&["metadata.owner"], |vm| {
        vm.metadata.as_mut().unwrap().owner = "me".into();
    });
    assert_eq!(owner.metadata.unwrap().owner, "me");
}

#[test]
fn labels_are_changed_one_by_one() {
    let label = |vm: &mut v1::Vm| {
        let labels = &mut vm.metadata.as_mut().unwrap().labels;
        labels.insert("b.c/d]".into(), "3".into());
        labels.insert("other".into(), "not named".into());
    };
    let changed = apply(&["metadata.labels[b.c/d]]", "metadata.labels[a]"], label);
    let labels = changed.metadata.unwrap().labels;
    assert_eq!(labels, [("b.c/d]".to_owned(), "3".to_owned())].into());
    assert_eq!(
        apply(&["metadata.labels"], |_| {}).metadata.unwrap().labels,
        Default::default()
    );
}

#[test]
fn items_of_lists_go_by_their_names() {
    let limit = Some(RateLimit {
        bytes_per_second: 5,
        ..Default::default()
    });
    let limited = |vm: &mut v1::Vm| {
        let disk = DiskSpec {
            rate_limit: limit,
            ..disk("data")
        };
        vm.spec.as_mut().unwrap().disks = vec![DiskSpec { queues: 9, ..disk }];
    };
    let expected = with(|spec| spec.disks[1].rate_limit = limit);
    assert_eq!(apply(&["spec.disks[data].rate_limit"], limited), expected);
    assert_eq!(
        apply(&["spec.disks[data].rateLimit.bytes_per_second"], limited),
        expected
    );
    assert_eq!(
        apply(&["spec.disks[root]"], limited),
        with(|spec| drop(spec.disks.remove(0)))
    );
    let more = |vm: &mut v1::Vm| vm.spec.as_mut().unwrap().disks = vec![disk("more")];
    assert_eq!(
        apply(&["spec.disks[more]"], more),
        with(|spec| spec.disks.push(disk("more")))
    );
    assert_eq!(
        apply(&["spec.disks[none]"], |_| {}),
        vm(),
        "it is not there already"
    );
    // One of a oneof takes the place of the other.
    let named = |vm: &mut v1::Vm| {
        let source = Some(Source::Disk("kept".into()));
        vm.spec.as_mut().unwrap().disks = vec![DiskSpec {
            source,
            ..disk("data")
        }];
    };
    let expected = with(|spec| spec.disks[1].source = Some(Source::Disk("kept".into())));
    assert_eq!(apply(&["spec.disks[data].disk"], named), expected);
}

#[test]
fn what_was_not_said_is_not_said_by_taking_a_part_of_it_away() {
    assert_eq!(apply(&["spec.balloon.target_bytes"], |_| {}), vm());
    let other = |vm: &mut v1::Vm| {
        vm.spec.as_mut().unwrap().balloon = Some(BalloonSpec {
            disabled: true,
            ..Default::default()
        });
    };
    assert_eq!(apply(&["spec.balloon.target_bytes"], other), vm());
    let target = |vm: &mut v1::Vm| {
        vm.spec.as_mut().unwrap().balloon = Some(BalloonSpec {
            target_bytes: 7,
            ..Default::default()
        });
    };
    let balloon = apply(&["spec.balloon.target_bytes"], target)
        .spec
        .unwrap()
        .balloon;
    assert_eq!(balloon.unwrap().target_bytes, 7);
}

#[test]
fn an_item_that_is_not_there_is_named_with_those_that_are() {
    let limited = mask(&["spec.disks[none].rate_limit"]);
    let error = limited.apply(&vm(), &vm()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the VM has no disk \"none\": it has root, data"
    );
    let error = mask(&["spec.rate_groups[none].limit"])
        .apply(&vm(), &vm())
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "the VM has no rate group \"none\": it has slow"
    );
    let error = mask(&["spec.disks[data].rate_limit"]).apply(&vm(), &v1::Vm::default());
    let text = error.unwrap_err().to_string();
    assert_eq!(
        text,
        "has no item \"data\", which the mask names in \"spec.disks[data].rate_limit\""
    );
}

#[test]
fn paths_that_lead_nowhere_are_all_named() {
    let wrong = [
        "",
        ".",
        "spec.",
        "spec..cpu",
        "spec.nothing",
        "spec.cpu.cores.more",
        "spec.cpu[a]",
        "spec.disks.rate_limit",
        "spec.disks[]",
        "spec.disks[data",
        "spec.disks[data]x",
        "spec.disks[data].nothing",
        "metadata.labels.a",
        "metadata.labels[]",
        "metadata.name",
        "metadata.generation",
        "metadata",
        "status.phase",
        "kind",
    ];
    let paths: Vec<_> = wrong.iter().map(|path| (*path).to_owned()).collect();
    let found = UpdateMask::new("updateMask", &paths).unwrap_err();
    let fields: Vec<_> = found.0.iter().map(|violation| violation.field.as_str()).collect();
    let expected: Vec<_> = (0..wrong.len())
        .map(|index| format!("updateMask.paths[{index}]"))
        .collect();
    assert_eq!(fields, expected);
    assert!(
        UpdateMask::new("updateMask", &[])
            .unwrap_err()
            .to_string()
            .contains("names no field")
    );
    let many = vec!["spec".to_owned(); MAX_PATHS + 1];
    assert!(UpdateMask::new("updateMask", &many).is_err());
}

#[test]
fn an_operator_changes_limits_and_the_memory_target_and_nothing_else() {
    for path in [
        "spec.disks[data].rate_limit",
        "spec.disks[data].rate_limit.burst_bytes",
        "spec.rate_groups[slow].limit",
        "spec.balloon.target_bytes",
    ] {
        assert_eq!(mask(&[path]).role(), Role::Operator, "{path}");
    }
    for path in [
        "spec",
        "spec.disks",
        "spec.disks[data]",
        "spec.disks[data].path",
        "spec.balloon",
        "spec.rate_groups",
        "spec.rate_groups[slow]",
        "metadata.labels",
        "metadata.labels[a]",
        "spec.cpu.cores",
    ] {
        assert_eq!(mask(&[path]).role(), Role::Admin, "{path}");
        assert_eq!(
            mask(&["spec.balloon.target_bytes", path]).role(),
            Role::Admin,
            "{path}"
        );
    }
}

proptest::proptest! {
    #[test]
    fn any_path_is_refused_or_applied(path: String) {
        if let Ok(mask) = UpdateMask::new("updateMask", &[path]) {
            let _ = mask.apply(&vm(), &vm());
        }
    }

    #[test]
    fn a_mask_of_what_is_there_changes_nothing(path in "(spec|metadata)(\\.(cpu|cores|disks|labels|owner|balloon)){0,3}(\\[(root|data|a)\\])?(\\.queues)?") {
        let mask = UpdateMask::new("updateMask", &[path]);
        if let Ok(Ok(applied)) = mask.map(|mask| mask.apply(&vm(), &vm())) {
            proptest::prop_assert_eq!(applied, vm());
        }
    }
}
