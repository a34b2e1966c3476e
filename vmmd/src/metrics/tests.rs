use std::collections::{BTreeMap, BTreeSet};

use super::*;

/// Every kind of series that there can be.
fn everything() -> String {
    let operation = v1::DiskOperationStats {
        requests: 3,
        bytes: 512,
        latency: Some(v1::LatencyHistogram {
            bounds_us: vec![1],
            counts: vec![1, 2],
        }),
        ..Default::default()
    };
    let stats = v1::VmStats {
        cpu: Some(v1::CpuStats {
            vcpus: vec![v1::VcpuStats::default()],
            exits: [("exits".to_owned(), 2), ("io_exits".to_owned(), 1)].into(),
            ..Default::default()
        }),
        memory: Some(v1::MemoryStats {
            limit_bytes: Some(1),
            balloon: Some(v1::BalloonStats::default()),
            ..Default::default()
        }),
        disks: vec![v1::DiskStats {
            name: "root".into(),
            read: Some(operation),
            ..Default::default()
        }],
        nics: vec![v1::NicStats::default()],
        ..Default::default()
    };
    let vm = v1::Vm {
        metadata: Some(v1::ObjectMetadata {
            name: "web".into(),
            ..Default::default()
        }),
        status: Some(v1::VmStatus {
            instance: Some(v1::InstanceStatus::default()),
            phase: v1::VmPhase::Running.into(),
            ..Default::default()
        }),
        ..Default::default()
    };
    let sample = Sample {
        vm: Arc::new(vm),
        stats: Some(stats),
    };
    let mut families = Families::default();
    vm::add(&mut families, &[sample]);
    let node = v1::NodeStatus {
        capacity: Some(v1::Resources::default()),
        conditions: vec![v1::Condition {
            status: v1::ConditionStatus::True.into(),
            ..Default::default()
        }],
        ..Default::default()
    };
    node::add(&mut families, &node);
    certificates(&mut families, &[("certificate", 1_800_000_000)]);
    process::add(&mut families);
    families.text()
}

/// The types of families by name, checked against their series.
fn types(text: &str) -> BTreeMap<String, String> {
    let mut types = BTreeMap::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        let again = types.insert(name.to_owned(), kind.to_owned());
        assert!(again.is_none(), "{name} twice");
    }
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap();
        let base = ["_total", "_bucket", "_sum", "_count"]
            .iter()
            .find_map(|end| name.strip_suffix(end).filter(|base| types.contains_key(*base)))
            .unwrap_or(name);
        let kind = types.get(base).unwrap_or_else(|| panic!("{line} has no type"));
        assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap();
    }
    types
}

/// Name and type of each line of the page's tables: "| `name` | type | …".
fn documented() -> BTreeMap<String, String> {
    let page = include_str!("../../../docs/src/metrics.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    let rows = rows.map(|row| {
        let (name, rest) = row.split_once('`').unwrap();
        let kind = rest.trim_start_matches([' ', '|']).split(' ').next().unwrap();
        let name = if kind == "counter" {
            name.strip_suffix("_total").unwrap()
        } else {
            name
        };
        (name.to_owned(), kind.to_owned())
    });
    rows.collect()
}

#[test]
fn every_family_is_documented_with_its_type() {
    let (told, documented) = (types(&everything()), documented());
    for (name, kind) in &told {
        assert_eq!(documented.get(name), Some(kind), "{name}");
    }
    let of_those = |types: &BTreeMap<String, String>| -> BTreeSet<String> {
        types
            .keys()
            .filter(|name| name.starts_with("vmmd_vm_") || name.starts_with("vmmd_node_"))
            .cloned()
            .collect()
    };
    assert_eq!(of_those(&documented), of_those(&told), "documented but not told");
}

#[test]
fn times_and_sizes_are_in_base_units_and_say_so() {
    let text = everything();
    for (name, unit) in [
        ("vmmd_vm_cpu_seconds", "seconds"),
        ("vmmd_vm_memory_used_bytes", "bytes"),
        ("vmmd_certificate_expiry_timestamp_seconds", "seconds"),
    ] {
        assert!(text.contains(&format!("# UNIT {name} {unit}\n")), "{text}");
    }
    for line in [
        "vmmd_vm_phase{vm=\"web\",phase=\"running\"} 1.0",
        "vmmd_vm_phase{vm=\"web\",phase=\"stopped\"} 0.0",
        "vmmd_vm_exits_total{vm=\"web\",reason=\"io\"} 1.0",
        "vmmd_vm_disk_request_duration_seconds_count{vm=\"web\",disk=\"root\",operation=\"read\"} 3",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    let line = "vmmd_certificate_expiry_timestamp_seconds{certificate=\"certificate\"} 1800000000.0";
    assert!(text.contains(line), "{text}");
    assert!(text.ends_with("# EOF\n"));
}
