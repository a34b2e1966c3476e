use proto::model::Violations;

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

fn with(disks: &[&str]) -> Registry {
    let registry = Registry::default();
    for name in disks {
        registry.settle(record(name));
    }
    registry
}

fn overlay(registry: &Registry, name: &str, below: &str, size: u64) -> Result<DiskRecord, Failure> {
    let new = DiskRecord {
        size_bytes: size,
        ..record(name)
    };
    let mut made = registry.reserve(new, Some(below))?;
    made.stage = DiskStage::Ready.into();
    registry.settle(made.clone());
    Ok(made)
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

fn take(registry: &Registry, vm: &str, disk: &str, read_only: bool) -> Result<(), Failure> {
    registry.take(vm, &[named(disk, read_only)], |_| "disk.disk".to_owned())
}

#[test]
fn the_format_is_filled_in_where_it_is_known_and_left_out() {
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
        registry.fill_format(&mut spec);
        spec.format()
    };
    let (unsaid, raw) = (v1::DiskFormat::Unspecified, v1::DiskFormat::Raw);
    assert_eq!(filled("a", "", unsaid), v1::DiskFormat::Qcow2);
    assert_eq!(filled("a", "", raw), raw);
    assert_eq!(filled("b", "", unsaid), unsaid);
    assert_eq!(filled("", "/a", unsaid), unsaid);
    assert_eq!(filled("a", "/a", unsaid), unsaid);
}

#[test]
fn a_name_is_taken_from_the_beginning_of_a_create_and_usable_after_its_end() {
    let registry = Registry::default();
    let made = registry.reserve(record("a"), None).unwrap();
    assert_eq!(
        registry.reserve(record("a"), None).unwrap_err().reason,
        "DISK_EXISTS"
    );
    assert_eq!(registry.get("a").unwrap_err().reason, "DISK_NOT_FOUND");
    assert_eq!(
        take(&registry, "vm", "a", true).unwrap_err().kind,
        Kind::Precondition
    );
    registry.settle(DiskRecord {
        stage: DiskStage::Ready.into(),
        ..made
    });
    assert_eq!(registry.list().len(), 1);
    registry.forget("a");
    assert!(registry.reserve(record("a"), None).is_ok());
}

#[test]
fn a_disk_in_a_spec_cannot_be_deleted_and_its_vms_are_named() {
    let registry = with(&["a"]);
    take(&registry, "web", "a", true).unwrap();
    take(&registry, "db", "a", true).unwrap();
    let refused = registry.begin_delete("a").unwrap_err();
    assert_eq!(refused.reason, "DISK_IN_USE");
    assert!(refused.message.contains("VM \"db\", VM \"web\""), "{refused}");
    registry.give_back("web", Some("other"));
    registry.give_back("web", Some("data"));
    registry.give_back("db", None);
    registry.begin_delete("a").unwrap();
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
        registry.begin_delete("base").unwrap_err(),
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
    registry.forget("d0");
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
