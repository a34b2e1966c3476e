use std::sync::Arc;

use uuid::Uuid;
use vmmd_spec::Violations;

use super::*;

fn record(name: &str) -> DiskRecord {
    DiskRecord {
        uid: Uuid::new_v4().as_bytes().to_vec(),
        name: name.to_owned(),
        size_bytes: 1024,
        format: v1::DiskFormat::Qcow2.into(),
        stage: DiskStage::Ready.into(),
        ..DiskRecord::default()
    }
}

fn with(disks: &[&str]) -> Disks {
    let registry = Disks::default();
    for name in disks {
        registry.restore(record(name));
    }
    registry
}

fn overlay(registry: &Disks, name: &str, below: &str, size: u64) -> Result<DiskRecord, Failure> {
    let new = DiskRecord {
        size_bytes: size,
        ..record(name)
    };
    let mut made = registry.reserve(new, Some(below))?;
    made.stage = DiskStage::Ready.into();
    registry.registry.settle(made.clone());
    Ok(made)
}

fn forget(registry: &Disks, record: &DiskRecord) {
    let tombstone = registry.registry.bury(record);
    registry.forget(&record.uid, tombstone);
}

fn named(disk: &str, read_only: bool) -> Disk {
    let wire = v1::DiskSpec {
        name: "data".into(),
        source: Some(v1::disk_spec::Source::Disk(disk.into())),
        read_only,
        ..Default::default()
    };
    Disk::new(&mut Violations::default(), "disk", &wire).unwrap()
}

fn take(registry: &Disks, vm: &str, disk: &str, read_only: bool) -> Result<(), Failure> {
    registry.take(vm, &[named(disk, read_only)], |_| "disk.disk".to_owned())
}

#[test]
fn format_and_blocks_are_filled_in_where_known_and_left_out() {
    let registry = with(&["a"]);
    let filled = |disk: &str, path: &str, format: v1::DiskFormat| {
        let source = match path {
            "" => v1::disk_spec::Source::Disk(disk.into()),
            path => v1::disk_spec::Source::Path(path.into()),
        };
        let mut spec = v1::DiskSpec {
            source: Some(source),
            format: format.into(),
            ..Default::default()
        };
        registry.fill_in(&mut spec);
        spec.format()
    };
    let blocks = |disk: &str, said: u32| {
        let mut spec = v1::DiskSpec {
            source: Some(v1::disk_spec::Source::Disk(disk.into())),
            logical_block_bytes: said,
            ..Default::default()
        };
        registry.fill_in(&mut spec);
        spec.logical_block_bytes
    };
    registry.restore(DiskRecord {
        logical_block: 4096,
        ..record("long")
    });
    overlay(&registry, "above", "long", 0).unwrap();
    for (disk, said, filled) in [
        ("a", 0, 0),
        ("long", 0, 4096),
        ("above", 0, 4096),
        ("long", 512, 512),
        ("none", 0, 0),
    ] {
        assert_eq!(blocks(disk, said), filled, "{disk} {said}");
    }
    let (unsaid, raw) = (v1::DiskFormat::Unspecified, v1::DiskFormat::Raw);
    assert_eq!(filled("a", "", unsaid), v1::DiskFormat::Qcow2);
    assert_eq!(filled("a", "", raw), raw);
    assert_eq!(filled("b", "", unsaid), unsaid);
    assert_eq!(filled("", "/a", unsaid), unsaid);
    assert_eq!(filled("a", "/a", unsaid), unsaid);
}

#[test]
fn name_is_taken_during_a_create_and_usable_after_it() {
    let registry = Disks::default();
    let made = registry.reserve(record("a"), None).unwrap();
    assert_eq!(
        registry.reserve(record("a"), None).unwrap_err().reason,
        "DISK_EXISTS"
    );
    assert_eq!(registry.get("a").unwrap_err().reason, "DISK_NOT_READY");
    assert_eq!(
        take(&registry, "vm", "a", true).unwrap_err().kind,
        Kind::Precondition
    );
    registry.registry.settle(DiskRecord {
        stage: DiskStage::Ready.into(),
        ..made.clone()
    });
    registry.get("a").unwrap();
    forget(&registry, &made);
    assert!(registry.reserve(record("a"), None).is_ok());
}

#[test]
fn a_disk_in_a_spec_cannot_be_deleted_and_its_vms_are_named() {
    let registry = with(&["a"]);
    take(&registry, "web", "a", true).unwrap();
    take(&registry, "db", "a", true).unwrap();
    let refused = registry.begin_delete("a", |_| Ok(())).unwrap_err();
    assert_eq!(refused.reason, "DISK_IN_USE");
    assert!(refused.message.contains("VM \"db\", VM \"web\""), "{refused}");
    registry.give_back("web", Some("other"));
    registry.give_back("web", Some("data"));
    registry.give_back("db", None);
    registry.begin_delete("a", |_| Ok(())).unwrap();
    assert_eq!(
        take(&registry, "web", "a", true).unwrap_err().reason,
        "DISK_NOT_FOUND"
    );
}

#[test]
fn what_has_overlays_is_neither_written_to_nor_deleted() {
    let registry = with(&["base"]);
    take(&registry, "web", "base", false).unwrap();
    let refused = overlay(&registry, "top", "base", 0).unwrap_err();
    assert!(refused.message.contains("VM \"web\""), "{refused}");
    registry.give_back("web", None);
    take(&registry, "reader", "base", true).unwrap();
    assert_eq!(overlay(&registry, "top", "base", 0).unwrap().size_bytes, 1024);
    assert_eq!(
        overlay(&registry, "small", "base", 512).unwrap_err().reason,
        "INVALID_FIELDS"
    );
    registry.give_back("reader", None);
    for refused in [
        take(&registry, "web", "base", false).unwrap_err(),
        registry.begin_delete("base", |_| Ok(())).unwrap_err(),
    ] {
        assert_eq!(refused.reason, "DISK_HAS_OVERLAYS");
        assert!(refused.message.contains("\"top\""), "{refused}");
    }
    take(&registry, "web", "base", true).unwrap();
    take(&registry, "web2", "top", false).unwrap();
}

#[test]
fn a_chain_is_resolved_nearest_first_and_is_not_endless() {
    let registry = with(&["d0"]);
    let folder = Folder::of(std::path::Path::new("/s"));
    for depth in 1..=backing_limit() {
        overlay(&registry, &format!("d{depth}"), &format!("d{}", depth - 1), 0).unwrap();
    }
    let last = format!("d{}", backing_limit());
    let refused = overlay(&registry, "more", &last, 0).unwrap_err();
    assert_eq!(refused.reason, "TOO_MANY_OVERLAYS");
    let resolved = registry.resolve(&folder, &last).unwrap();
    assert_eq!(resolved.backing.len(), backing_limit());
    assert_eq!(
        resolved.backing[0].0,
        folder.path(&registry.get(&format!("d{}", backing_limit() - 1)).unwrap())
    );
    forget(&registry, &registry.get("d0").unwrap());
    assert_eq!(
        registry.resolve(&folder, "d2").unwrap_err().reason,
        "BACKING_DISK_MISSING"
    );
}

#[test]
fn all_or_none_of_a_vms_disks_are_taken() {
    let registry = with(&["a"]);
    let both = [named("a", false), named("none", false)];
    assert!(
        registry
            .take("web", &both, |index| format!("spec.disks[{index}].disk"))
            .is_err()
    );
    assert_eq!(registry.uses("a"), []);
}

#[test]
fn another_format_than_the_disks_is_refused() {
    let registry = with(&["a"]);
    let mut disk = named("a", false);
    disk.source = Source::Disk {
        name: "a".try_into().unwrap(),
        format: Some(Format::Raw),
    };
    let refused = registry.take("web", &[disk], |_| "disk".to_owned()).unwrap_err();
    assert_eq!(refused.violations.0[0].field, "disk.format");
    assert!(refused.message.contains("DISK_FORMAT_QCOW2"), "{refused}");
}

#[test]
fn a_disk_has_one_operation_at_a_time() {
    let registry = with(&["a"]);
    let record = registry.get("a").unwrap();
    registry.begin("a", "first").unwrap();
    let phase = || {
        let folder = Folder::of(std::path::Path::new("/s"));
        let seen = registry.registry.see("a").unwrap();
        shown::disk(&folder, &seen).status.unwrap().phase()
    };
    assert_eq!(phase(), v1::DiskPhase::Resizing);
    for refused in [
        registry.begin("a", "second").unwrap_err(),
        registry.begin_delete("a", |_| Ok(())).unwrap_err(),
        overlay(&registry, "top", "a", 0).unwrap_err(),
    ] {
        assert_eq!(refused.reason, "BUSY");
        assert!(refused.message.contains("first"), "{refused}");
    }
    registry.end(&record.uid);
    assert_eq!(phase(), v1::DiskPhase::Ready);
    registry.begin_delete("a", |_| Ok(())).unwrap();
}

#[test]
fn each_change_of_a_disk_and_nothing_else_has_a_revision() {
    let registry = with(&["a", "b"]);
    let mut before = registry.registry.after(None);
    let mut changed = |what: &str| {
        let now = registry.registry.after(None);
        let old = std::mem::replace(&mut before, now.clone());
        let news = now.objects.iter().filter(|seen| !old.objects.contains(seen));
        for seen in &now.objects {
            let known = old
                .objects
                .iter()
                .find(|known| known.record.uid == seen.record.uid);
            let same = known.is_some_and(|known| (&known.record, &known.view) == (&seen.record, &seen.view));
            assert_eq!(
                same,
                known.is_some_and(|known| known.revision == seen.revision),
                "{what}"
            );
        }
        news.map(|seen| seen.record.name.clone()).collect::<Vec<_>>()
    };
    take(&registry, "web", "a", true).unwrap();
    assert_eq!(changed("taken"), ["a"]);
    let wire = v1::DiskSpec {
        name: "data".into(),
        source: Some(v1::disk_spec::Source::Disk("a".into())),
        read_only: true,
        ..Default::default()
    };
    registry.hold("web", [&wire]);
    assert_eq!(changed("held as before"), [""; 0]);
    registry.hold("web", []);
    assert_eq!(changed("held no more"), ["a"]);
    registry.give_back("web", None);
    assert_eq!(changed("given back twice"), [""; 0]);
    let top = overlay(&registry, "top", "b", 0).unwrap();
    assert_eq!(changed("an overlay"), ["b", "top"]);
    forget(&registry, &top);
    assert_eq!(changed("the overlay is gone"), ["b"]);
    registry.begin("a", "operation").unwrap();
    assert_eq!(changed("an operation"), ["a"]);
}

#[test]
fn a_disk_of_the_name_of_a_deleted_one_has_a_higher_generation() {
    let registry = Disks::default();
    let first = registry.reserve(record("a"), None).unwrap();
    assert_eq!(first.generation, 1);
    let changed = DiskRecord {
        generation: 9,
        ..first
    };
    registry.registry.settle(changed.clone());
    forget(&registry, &changed);
    assert_eq!(registry.reserve(record("a"), None).unwrap().generation, 10);
}

#[test]
fn a_file_is_one_disk_and_what_is_below_it_must_be_there() {
    let registry = with(&["base"]);
    let base = registry.get("base").unwrap();
    let twin = DiskRecord {
        uid: base.uid.clone(),
        ..record("twin")
    };
    let refused = registry.adopt(twin).unwrap_err();
    assert_eq!((refused.reason, refused.kind), ("DISK_EXISTS", Kind::Exists));
    assert!(refused.message.contains("\"base\""), "{refused}");
    let lost = DiskRecord {
        backing: Uuid::new_v4().as_bytes().to_vec(),
        ..record("lost")
    };
    assert_eq!(registry.adopt(lost).unwrap_err().reason, "BACKING_DISK_MISSING");
    let top = DiskRecord {
        backing: base.uid,
        ..record("top")
    };
    registry.adopt(top).unwrap();
}

#[test]
fn change_of_one_disk_of_2000_makes_one_new_state() {
    let registry = Disks::default();
    let base = record("base");
    registry.restore(base.clone());
    for number in 0..2000 {
        registry.restore(DiskRecord {
            backing: base.uid.clone(),
            ..record(&format!("d{number}"))
        });
    }
    let before = registry.registry.after(None).objects;
    take(&registry, "a", "d7", false).unwrap();
    let now = registry.registry.after(None).objects;
    let changed = before
        .iter()
        .zip(&now)
        .filter(|(old, new)| !Arc::ptr_eq(old, new));
    let changed: Vec<_> = changed.map(|(_, new)| new.record.name.as_str()).collect();
    assert_eq!(changed, ["d7"]);
    let overlays = || registry.registry.see("base").unwrap().view.overlays.len();
    assert_eq!(overlays(), 2000);
    forget(&registry, &now[1].record);
    assert_eq!(overlays(), 1999);
}

#[test]
fn uses_of_a_vm_are_found_by_the_vm_and_by_the_disk() {
    let registry = with(&["a", "b", "c"]);
    let spec = |disk: &str, name: &str| v1::DiskSpec {
        name: name.into(),
        source: Some(v1::disk_spec::Source::Disk(disk.into())),
        ..Default::default()
    };
    // The index by VM agrees with the uses of all disks. It has no VM without a disk.
    let check = |expected: &[(&str, &[&str])]| {
        let disks = registry.registry.lock();
        let mut by_vm: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (disk, uses) in &disks.index.uses {
            for user in uses {
                by_vm.entry(user.vm.clone()).or_default().insert(disk.clone());
            }
        }
        assert_eq!(disks.index.used, by_vm);
        let used: Vec<_> = by_vm
            .iter()
            .map(|(vm, disks)| (vm.as_str(), disks.iter().map(String::as_str).collect::<Vec<_>>()))
            .collect();
        let expected: Vec<_> = expected.iter().map(|(vm, disks)| (*vm, disks.to_vec())).collect();
        assert_eq!(used, expected);
    };
    take(&registry, "one", "a", false).unwrap();
    take(&registry, "two", "a", true).unwrap();
    check(&[("one", &["a"]), ("two", &["a"])]);
    registry.hold(
        "one",
        &[spec("a", "data"), spec("a", "again"), spec("b", "other")],
    );
    check(&[("one", &["a", "b"]), ("two", &["a"])]);
    registry.give_back("one", Some("again"));
    check(&[("one", &["a", "b"]), ("two", &["a"])]);
    registry.give_back("one", Some("data"));
    check(&[("one", &["b"]), ("two", &["a"])]);
    registry.hold("two", &[spec("c", "data"), spec("gone", "late")]);
    check(&[("one", &["b"]), ("two", &["c", "gone"])]);
    registry.give_back("two", None);
    registry.give_back("nobody", None);
    registry.hold("one", &[]);
    check(&[]);
}
