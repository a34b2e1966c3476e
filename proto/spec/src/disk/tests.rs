use rstest::rstest;
use vmmd_api::v1::{
    DiskBus, DiskCache, DiskErrorPolicy, DiskFormat, DiskPreallocation, volume_spec::Source as New,
};

use super::*;

fn spec() -> v1::DiskSpec {
    v1::DiskSpec {
        name: "data".into(),
        source: Some(WireSource::Path("/srv/data.raw".into())),
        format: DiskFormat::Raw.into(),
        ..Default::default()
    }
}

fn named() -> v1::DiskSpec {
    v1::DiskSpec {
        source: Some(WireSource::Disk("data-1".into())),
        format: 0,
        ..spec()
    }
}

fn new(spec: &v1::DiskSpec) -> Result<Disk, Violations> {
    let mut found = Violations::default();
    match Disk::new(&mut found, "disk", spec) {
        Some(disk) => found.or(disk),
        None => Err(found),
    }
}

#[test]
fn a_disk_without_options_has_the_documented_ones() {
    let disk = new(&spec()).unwrap();
    assert_eq!(disk.serial, "data");
    assert_eq!((disk.queues, disk.logical_block), (0, 512));
    assert_eq!((disk.cache, disk.on_error), (Cache::Auto, OnError::Report));
    assert_eq!(disk.limit, Limit::None);
}

#[test]
fn an_iso_image_is_read_only_whatever_is_said() {
    let disk = new(&v1::DiskSpec {
        format: DiskFormat::Iso.into(),
        read_only: false,
        ..spec()
    });
    assert!(disk.unwrap().read_only);
}

#[test]
fn cdrom_is_a_read_only_drive_on_sata() {
    let bus = |bus: DiskBus, cdrom| {
        let spec = v1::DiskSpec {
            bus: bus.into(),
            cdrom,
            ..spec()
        };
        let disk = new(&spec).unwrap();
        (disk.bus, disk.read_only)
    };
    assert_eq!(bus(DiskBus::Unspecified, false), (Bus::Virtio, false));
    assert_eq!(bus(DiskBus::Virtio, false), (Bus::Virtio, false));
    let sata = |cdrom| (Bus::Sata { cdrom }, cdrom);
    assert_eq!(bus(DiskBus::Sata, false), sata(false));
    assert_eq!(bus(DiskBus::Unspecified, true), sata(true));
    assert_eq!(bus(DiskBus::Sata, true), sata(true));
}

#[test]
fn every_option_is_read() {
    let limit = v1::RateLimit {
        bytes_per_second: 1 << 20,
        operations_per_second: 100,
        burst_bytes: 1 << 16,
        burst_operations: 7,
    };
    let full = v1::DiskSpec {
        read_only: true,
        serial: "S 1".into(),
        cache: DiskCache::None.into(),
        queues: 16,
        logical_block_bytes: 4096,
        on_error: DiskErrorPolicy::Pause.into(),
        rate_limit: Some(limit),
        ..spec()
    };
    let disk = new(&full).unwrap();
    assert_eq!(disk.cache, Cache::None);
    assert_eq!(
        (disk.queues, disk.logical_block, disk.read_only),
        (16, 4096, true)
    );
    assert_eq!((disk.on_error, disk.serial.as_str()), (OnError::Pause, "S 1"));
    let Limit::Own(limit) = disk.limit else {
        panic!("{:?}", disk.limit)
    };
    assert_eq!((limit.bytes_per_second, limit.burst_operations), (1 << 20, 7));
}

#[rstest]
#[case::neither(v1::DiskSpec { source: None, ..spec() }, "disk.path", "must be given")]
#[case::relative(v1::DiskSpec { source: Some(WireSource::Path("a".into())), ..spec() }, "disk.path", "absolute")]
#[case::no_format(v1::DiskSpec { format: 0, ..spec() }, "disk.format", "DISK_FORMAT_ISO")]
#[case::odd_format(v1::DiskSpec { format: 9, ..named() }, "disk.format", "unknown value 9")]
#[case::iso_of_the_service(v1::DiskSpec { format: 3, ..named() }, "disk.format", "left out")]
#[case::service_name(v1::DiskSpec { source: Some(WireSource::Disk("A".into())), ..named() }, "disk.disk", "is \"A\"")]
#[case::cache(v1::DiskSpec { cache: 7, ..spec() }, "disk.cache", "unknown value 7")]
#[case::beneath_of_nothing(v1::DiskSpec { beneath: "/srv".into(), ..named() }, "disk.beneath", "for a `path` only")]
#[case::beneath_elsewhere(v1::DiskSpec { beneath: "/srv/a".into(), ..spec() }, "disk.beneath", "a folder above `path`")]
#[case::beneath_itself(v1::DiskSpec { beneath: "/srv/data.raw".into(), ..spec() }, "disk.beneath", "a folder above `path`")]
#[case::beneath_relative(v1::DiskSpec { beneath: "srv".into(), ..spec() }, "disk.beneath", "absolute")]
#[case::any_content(v1::DiskSpec { any_content: true, format: DiskFormat::Qcow2.into(), ..spec() }, "disk.anyContent", "DISK_FORMAT_RAW only")]
#[case::on_error(v1::DiskSpec { on_error: -1, ..spec() }, "disk.onError", "unknown value -1")]
#[case::queues(v1::DiskSpec { queues: 17, ..spec() }, "disk.queues", "1 to 16")]
#[case::block(v1::DiskSpec { logical_block_bytes: 1024, ..spec() }, "disk.logicalBlockBytes", "512")]
#[case::serial(v1::DiskSpec { serial: "x".repeat(21), ..spec() }, "disk.serial", "at most 20")]
#[case::two_limits(
    v1::DiskSpec { rate_limit: Some(v1::RateLimit::default()), rate_group: "g".into(), ..spec() },
    "disk",
    "not both"
)]
#[case::bus(v1::DiskSpec { bus: 7, ..spec() }, "disk.bus", "unknown value 7")]
#[case::cdrom_on_virtio(
    v1::DiskSpec { bus: DiskBus::Virtio.into(), cdrom: true, ..spec() },
    "disk.bus",
    "must be DISK_BUS_SATA"
)]
#[case::sata_queues(v1::DiskSpec { bus: DiskBus::Sata.into(), queues: 2, ..spec() }, "disk.queues", "one queue")]
#[case::sata_block(
    v1::DiskSpec { cdrom: true, logical_block_bytes: 4096, ..spec() },
    "disk.logicalBlockBytes",
    "must be 512"
)]
#[case::sata_read_only(
    v1::DiskSpec { bus: DiskBus::Sata.into(), read_only: true, ..spec() },
    "disk.readOnly",
    "set `cdrom`"
)]
#[case::sata_iso(
    v1::DiskSpec { bus: DiskBus::Sata.into(), format: DiskFormat::Iso.into(), ..spec() },
    "disk.format",
    "set `cdrom`"
)]
#[case::group_name(v1::DiskSpec { rate_group: "G".into(), ..spec() }, "disk.rateGroup", "is \"G\"")]
fn what_cannot_be_is_refused_with_the_field_and_what_is_allowed(
    #[case] spec: v1::DiskSpec,
    #[case] field: &str,
    #[case] words: &str,
) {
    let problems = new(&spec).unwrap_err().0;
    let [problem] = problems.as_slice() else {
        panic!("{problems:?}");
    };
    assert_eq!(problem.field, field);
    assert!(problem.description.contains(words), "{problem}");
}

#[rstest]
#[case::slow(v1::RateLimit { bytes_per_second: 4095, ..Default::default() }, &["l.bytesPerSecond"])]
#[case::huge(v1::RateLimit { operations_per_second: u64::MAX, ..Default::default() }, &["l.operationsPerSecond"])]
#[case::bursts_alone(
    v1::RateLimit { burst_bytes: 1, burst_operations: 1, ..Default::default() },
    &["l.burstBytes", "l.burstOperations"]
)]
#[case::none(v1::RateLimit::default(), &[])]
#[case::full(
    v1::RateLimit { bytes_per_second: 4096, operations_per_second: 1, burst_bytes: 1, burst_operations: 1 },
    &[]
)]
fn limits_are_sane(#[case] limit: v1::RateLimit, #[case] fields: &[&str]) {
    let mut found = Violations::default();
    RateLimit::new(&mut found, "l", &limit);
    let refused: Vec<_> = found.0.iter().map(|problem| problem.field.as_str()).collect();
    assert_eq!(refused, fields);
}

fn request(mut spec: v1::VolumeSpec, source: Option<New>) -> v1::CreateDiskRequest {
    spec.source = source;
    v1::CreateDiskRequest {
        disk: Some(v1::Disk {
            metadata: Some(v1::ObjectMetadata {
                name: "data".into(),
                ..Default::default()
            }),
            spec: Some(spec),
            status: None,
        }),
        ..Default::default()
    }
}

fn sized(size_bytes: u64) -> v1::VolumeSpec {
    v1::VolumeSpec {
        size_bytes,
        ..Default::default()
    }
}

#[test]
fn the_format_of_a_new_disk_follows_its_source() {
    let make = |spec, source| NewDisk::try_from(&request(spec, source)).unwrap();
    let empty = make(sized(512), None);
    assert_eq!(
        (empty.format, empty.size, empty.content),
        (Some(Format::Raw), Some(512), Content::Empty)
    );
    let copy = make(sized(0), Some(New::RawFile("/a".into())));
    assert_eq!((copy.format, copy.size), (Some(Format::Raw), None));
    let overlay = make(sized(0), Some(New::OverlayOf("base".into())));
    assert_eq!((overlay.format, overlay.size), (Some(Format::Qcow2), None));
    let adopted = make(sized(0), Some(New::Adopt("/a".into())));
    assert_eq!((adopted.format, adopted.size), (None, None));
}

#[test]
fn only_an_adopted_disk_may_have_its_name_from_what_is_beside_it() {
    let mut nameless = request(sized(0), Some(New::Adopt("/a".into())));
    nameless.disk.as_mut().unwrap().metadata = None;
    assert_eq!(NewDisk::try_from(&nameless).unwrap().name, None);
    let named = request(sized(0), Some(New::Adopt("/a".into())));
    assert_eq!(NewDisk::try_from(&named).unwrap().name.unwrap().as_str(), "data");
}

#[rstest]
#[case::no_size(sized(0), None, "disk.spec.sizeBytes")]
#[case::odd_size(sized(513), None, "disk.spec.sizeBytes")]
#[case::huge_size(sized(MAX_SIZE + 512), None, "disk.spec.sizeBytes")]
#[case::size_of_adopted(sized(512), Some(New::Adopt("/a".into())), "disk.spec.sizeBytes")]
#[case::iso(v1::VolumeSpec { format: 3, ..sized(512) }, None, "disk.spec.format")]
#[case::qcow2_copy(v1::VolumeSpec { format: 2, ..sized(0) }, Some(New::RawFile("/a".into())), "disk.spec.format")]
#[case::raw_overlay(v1::VolumeSpec { format: 1, ..sized(0) }, Some(New::OverlayOf("a".into())), "disk.spec.format")]
#[case::relative(sized(0), Some(New::RawFile("a".into())), "disk.spec.rawFile")]
#[case::relative_adopted(sized(0), Some(New::Adopt("a".into())), "disk.spec.adopt")]
#[case::no_name(sized(0), Some(New::OverlayOf(String::new())), "disk.spec.overlayOf")]
#[case::any_content_of_nothing(v1::VolumeSpec { any_content: true, ..sized(512) }, None, "disk.spec.anyContent")]
#[case::tables_of_raw(
    v1::VolumeSpec { preallocation: DiskPreallocation::Metadata.into(), ..sized(512) },
    None,
    "disk.spec.preallocation"
)]
#[case::reserved_overlay(
    v1::VolumeSpec { preallocation: DiskPreallocation::Full.into(), ..sized(0) },
    Some(New::OverlayOf("a".into())),
    "disk.spec.preallocation"
)]
fn a_disk_that_cannot_be_made_is_refused_by_field(
    #[case] spec: v1::VolumeSpec,
    #[case] source: Option<New>,
    #[case] field: &str,
) {
    let problems = NewDisk::try_from(&request(spec, source)).unwrap_err().0;
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert_eq!(problems[0].field, field);
}

#[test]
fn what_only_the_daemon_sets_is_refused_and_labels_are_checked() {
    let mut request = request(sized(512), None);
    let disk = request.disk.as_mut().unwrap();
    disk.status = Some(v1::VolumeStatus::default());
    let metadata = disk.metadata.as_mut().unwrap();
    metadata.uid = "x".into();
    metadata.labels = [("a=b".to_owned(), String::new())].into();
    let problems = NewDisk::try_from(&request).unwrap_err().0;
    let fields: Vec<_> = problems.iter().map(|problem| problem.field.as_str()).collect();
    let expected = [
        "disk.status",
        "disk.metadata.uid",
        "disk.metadata.labels[\"a=b\"]",
    ];
    assert_eq!(fields, expected);
}

#[test]
fn a_request_without_anything_is_refused() {
    let problems = NewDisk::try_from(&v1::CreateDiskRequest::default()).unwrap_err();
    assert_eq!(problems.to_string(), "disk: must be given");
    let nameless = v1::CreateDiskRequest {
        disk: Some(v1::Disk::default()),
        ..Default::default()
    };
    let problems = NewDisk::try_from(&nameless).unwrap_err().0;
    assert_eq!(problems.len(), 2, "name and size: {problems:?}");
}
