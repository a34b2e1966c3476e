//! Directories of the node that are shared with a guest.

use std::path::{Component, Path, PathBuf};

use vmmd_api::v1;

use super::{
    Violations,
    name::Name,
    pod::{PodUid, PodVolume},
    vm::{Backing, absolute, name},
};

/// Most shares of a VM.
pub const MAX_SHARES: usize = 16;
/// Longest tag in bytes (virtio 1.3, 5.11.4).
pub const MAX_TAG: usize = 36;
/// Most ranges of ids (user_namespaces(7) allows 340 since Linux 4.15).
pub const MAX_RANGES: usize = 32;
/// Longest path in the guest in bytes; the disk of cloud-init has room for all of a VM's.
pub const MAX_MOUNT: usize = 255;
/// Open files of a share that says nothing of them.
const OPEN_FILES: u32 = 65_536;
/// The least and the most that it can say.
const OPEN_FILES_RANGE: std::ops::RangeInclusive<u32> = 256..=1_000_000;

/// A directory of the node that the guest can mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Unique in the VM.
    pub name: Name,
    /// Where the directory is.
    pub source: Source,
    /// Mount tag in the guest: 1 to [`MAX_TAG`] bytes.
    pub tag: String,
    /// The guest can't write to it.
    pub read_only: bool,
    /// Caching in the guest.
    pub cache: Cache,
    /// The guest collects writes.
    pub writeback: bool,
    /// There are extended attributes.
    pub xattr: bool,
    /// There are access control lists.
    pub posix_acl: bool,
    /// Users of the guest that are users of the node; the directory's owner alone when empty.
    pub uids: Vec<IdRange>,
    /// Groups of the guest that are groups of the node; the directory's alone when empty.
    pub gids: Vec<IdRange>,
    /// Files that may be open or remembered at once.
    pub open_files: u32,
    /// Where the guest's cloud-init mounts it: absolute, without `.` and `..`, not the root.
    pub mount: Option<PathBuf>,
}

/// Where the directory of a share is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A path of the node; absolute, without `..`.
    Path(PathBuf),
    /// A volume of the VM's pod.
    Pod(PodVolume),
}

/// How long a guest may cache files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// For a second.
    #[default]
    Auto,
    /// For good.
    Always,
    /// Nothing.
    Never,
}

/// `count` consecutive ids, from `guest` on in the guest and from `node` on at the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdRange {
    /// The first in the guest.
    pub guest: u32,
    /// The first on the node; not 0.
    pub node: u32,
    /// How many; neither end is beyond 2³² - 2.
    pub count: u32,
}

impl Share {
    /// Validates `wire`; `field` is its path: `spec.shares[1]`.
    pub fn new(found: &mut Violations, field: &str, wire: &v1::ShareSpec) -> Option<Self> {
        let name = name(found, &format!("{field}.name"), &wire.name);
        let source = source(found, field, wire);
        let tag = match wire.tag.as_str() {
            "" => wire.name.chars().take(MAX_TAG).collect(),
            tag => tag.to_owned(),
        };
        if tag.len() > MAX_TAG || tag.chars().any(char::is_control) {
            let wrong = format_args!("must be 1 to {MAX_TAG} bytes without control characters");
            found.add(format_args!("{field}.tag"), wrong);
        }
        let cache = match v1::ShareCache::try_from(wire.cache) {
            Ok(v1::ShareCache::Unspecified | v1::ShareCache::Auto) => Cache::Auto,
            Ok(v1::ShareCache::Always) => Cache::Always,
            Ok(v1::ShareCache::Never) => Cache::Never,
            Err(_) => {
                found.add(
                    format_args!("{field}.cache"),
                    format_args!("unknown value {}", wire.cache),
                );
                Cache::Auto
            }
        };
        let open_files = match wire.max_open_files {
            0 => OPEN_FILES,
            number => number,
        };
        if !OPEN_FILES_RANGE.contains(&open_files) {
            let wrong = format_args!("must be 256 to 1,000,000, or 0 for {OPEN_FILES}, is {open_files}");
            found.add(format_args!("{field}.maxOpenFiles"), wrong);
        }
        let mount = mount_point(found, &format!("{field}.mount"), &wire.mount);
        let uids = ranges(found, &format!("{field}.uidMap"), &wire.uid_map);
        let gids = ranges(found, &format!("{field}.gidMap"), &wire.gid_map);
        if uids.is_empty() != gids.is_empty() {
            found.add(
                format_args!("{field}.uidMap"),
                "goes with gidMap: give both or none",
            );
        }
        if wire.posix_acl && uids.is_empty() {
            let wrong = "needs uidMap and gidMap: lists name users, and without maps the guest has one only";
            found.add(format_args!("{field}.posixAcl"), wrong);
        }
        Some(Self {
            name: name?,
            source: source?,
            tag,
            read_only: wire.read_only,
            cache,
            writeback: wire.writeback,
            xattr: wire.xattr,
            posix_acl: wire.posix_acl,
            uids,
            gids,
            open_files,
            mount,
        })
    }

    /// The path of the node, if it has one.
    pub fn path(&self) -> Option<&Path> {
        match &self.source {
            Source::Path(path) => Some(path),
            Source::Pod(_) => None,
        }
    }

    /// Notes the VM's pod, which has the volume of the share.
    pub fn set_pod(&mut self, pod: Option<&PodUid>) {
        if let Source::Pod(volume) = &mut self.source {
            volume.pod = pod.cloned();
        }
    }
}

fn source(found: &mut Violations, field: &str, wire: &v1::ShareSpec) -> Option<Source> {
    match (wire.path.as_str(), wire.pod_volume.as_str()) {
        (path, "") => absolute(found, format_args!("{field}.path"), path).map(Source::Path),
        ("", volume) => PodVolume::new(found, &format!("{field}.podVolume"), volume).map(Source::Pod),
        _ => {
            found.add(format_args!("{field}.podVolume"), "must be left out with `path`");
            None
        }
    }
}

/// Validates a path in the guest, and gives it in the one form that it has.
fn mount_point(found: &mut Violations, field: &str, text: &str) -> Option<PathBuf> {
    if text.is_empty() {
        return None;
    }
    let path: PathBuf = Path::new(text).components().collect();
    let wrong = if text.len() > MAX_MOUNT || text.chars().any(char::is_control) {
        "must be at most 255 bytes without control characters"
    } else if !text.starts_with('/') {
        "must be an absolute path in the guest"
    } else if path.components().any(|part| part == Component::ParentDir) {
        "must not contain '..'"
    } else if path == Path::new("/") {
        "must be another directory of the guest than its root"
    } else {
        return Some(path);
    };
    found.add(field, format_args!("{wrong}, is \"{text}\""));
    None
}

/// Validates a map: no id twice on either side, the guest's root in it, the node's not.
fn ranges(found: &mut Violations, field: &str, wire: &[v1::IdRange]) -> Vec<IdRange> {
    if wire.len() > MAX_RANGES {
        found.add(
            field,
            format_args!("at most {MAX_RANGES} ranges, are {}", wire.len()),
        );
        return Vec::new();
    }
    let mut wrong = Vec::new();
    let ranges: Vec<IdRange> = wire
        .iter()
        .map(|range| IdRange {
            guest: range.guest,
            node: range.node,
            count: range.count,
        })
        .collect();
    // The last id means "none".
    let beyond = |first: u32, count: u32| u64::from(first) + u64::from(count) > u64::from(u32::MAX);
    if ranges
        .iter()
        .any(|range| range.count == 0 || beyond(range.guest, range.count) || beyond(range.node, range.count))
    {
        wrong.push("a range has at least one id and ends below 4294967295");
    }
    if ranges.iter().any(|range| range.node == 0) {
        wrong.push("the node's root can't be in a range: choose a `node` above 0");
    }
    let overlap = |first: fn(&IdRange) -> u32| {
        let mut ends: Vec<(u64, u64)> = ranges
            .iter()
            .map(|range| {
                (
                    first(range).into(),
                    u64::from(first(range)) + u64::from(range.count),
                )
            })
            .collect();
        ends.sort_unstable();
        ends.windows(2).any(|pair| matches!(pair, [a, b] if a.1 > b.0))
    };
    if overlap(|range| range.guest) || overlap(|range| range.node) {
        wrong.push("no id can be in two ranges");
    }
    if !ranges.is_empty() && ranges.iter().all(|range| range.guest != 0) {
        wrong.push("the guest's root has to be in a range: give one with `guest: 0`");
    }
    for problem in wrong {
        found.add(field, problem);
    }
    ranges
}

/// Checks memory options against shares: the server of a share maps the guest's memory, so the
/// memory must be neither private nor merged with other memory.
pub(super) fn shared_memory(found: &mut Violations, shares: &[Share], backing: Backing, spec: &v1::VmSpec) {
    if shares.is_empty() {
        return;
    }
    if backing == Backing::Private {
        found.add(
            "spec.memory.backing",
            "must be MEMORY_BACKING_SHARED or left out: spec.shares need shared memory",
        );
    }
    if spec.memory.is_some_and(|memory| memory.mergeable) {
        let wrong = "must be left out: spec.shares need shared memory, which is never merged";
        found.add("spec.memory.mergeable", wrong);
    }
}

/// It is cloud-init that mounts shares in the guest, by vendor data of the daemon's.
pub(super) fn mounts(found: &mut Violations, shares: &[Share], spec: &v1::VmSpec) {
    let mounts = shares.iter().filter_map(|share| share.mount.as_ref());
    super::vm::unique(
        found,
        "spec.shares",
        "mount",
        mounts.map(|mount| mount.display().to_string()),
    );
    let mounted = spec.shares.iter().enumerate();
    for (index, _) in mounted.filter(|(_, share)| !share.mount.is_empty()) {
        match &spec.cloud_init {
            None => found.add(
                format_args!("spec.shares[{index}].mount"),
                "needs spec.cloudInit, by which the guest mounts the share: give `cloudInit: {}`, or leave it out and mount the share in \
                 the guest (`mount -t virtiofs TAG DIRECTORY`)",
            ),
            Some(init) if !init.vendor_data.is_empty() => {
                found.add(
                    "spec.cloudInit.vendorData",
                    "must be left out with `mount` of shares, which is put there",
                );
                return;
            }
            Some(init) if [v1::SeedType::Sysprep, v1::SeedType::Ignition].contains(&init.r#type()) => {
                found.add(
                    format_args!("spec.shares[{index}].mount"),
                    "needs cloud-init: leave it out with SYSPREP or IGNITION as the type of spec.cloudInit",
                );
            }
            Some(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(wire: &v1::ShareSpec) -> Vec<String> {
        let mut found = Violations::default();
        Share::new(&mut found, "spec.shares[0]", wire);
        found
            .0
            .iter()
            .map(|one| one.field.trim_start_matches("spec.shares[0].").to_owned())
            .collect()
    }

    fn data() -> v1::ShareSpec {
        v1::ShareSpec {
            name: "data".into(),
            path: "/srv/data".into(),
            ..Default::default()
        }
    }

    fn map(ranges: &[(u32, u32, u32)]) -> Vec<v1::IdRange> {
        let range = |&(guest, node, count): &(u32, u32, u32)| v1::IdRange { guest, node, count };
        ranges.iter().map(range).collect()
    }

    #[test]
    fn a_share_is_mounted_by_its_name_unless_it_has_a_tag() {
        let mut found = Violations::default();
        let share = Share::new(&mut found, "", &data()).unwrap();
        assert_eq!((share.tag.as_str(), share.open_files), ("data", OPEN_FILES));
        let tagged = v1::ShareSpec {
            tag: "my data".into(),
            ..data()
        };
        assert_eq!(Share::new(&mut found, "", &tagged).unwrap().tag, "my data");
        assert!(found.0.is_empty());
    }

    #[test]
    fn what_can_not_be_shared_is_refused_field_by_field() {
        let cases = [
            (
                v1::ShareSpec {
                    name: "No".into(),
                    ..data()
                },
                vec!["name"],
            ),
            (
                v1::ShareSpec {
                    path: "srv".into(),
                    ..data()
                },
                vec!["path"],
            ),
            (
                v1::ShareSpec {
                    path: "/srv/../etc".into(),
                    ..data()
                },
                vec!["path"],
            ),
            (
                v1::ShareSpec {
                    tag: "x".repeat(37),
                    ..data()
                },
                vec!["tag"],
            ),
            (
                v1::ShareSpec {
                    tag: "a\n".into(),
                    ..data()
                },
                vec!["tag"],
            ),
            (v1::ShareSpec { cache: 9, ..data() }, vec!["cache"]),
            (
                v1::ShareSpec {
                    pod_volume: "data".into(),
                    ..data()
                },
                vec!["podVolume"],
            ),
            (
                v1::ShareSpec {
                    path: String::new(),
                    pod_volume: "../data".into(),
                    ..data()
                },
                vec!["podVolume"],
            ),
            (
                v1::ShareSpec {
                    max_open_files: 10,
                    ..data()
                },
                vec!["maxOpenFiles"],
            ),
            (
                v1::ShareSpec {
                    posix_acl: true,
                    ..data()
                },
                vec!["posixAcl"],
            ),
            (
                v1::ShareSpec {
                    uid_map: map(&[(0, 1000, 1)]),
                    ..data()
                },
                vec!["uidMap"],
            ),
        ];
        for (wire, expected) in cases {
            assert_eq!(problems(&wire), expected, "{wire:?}");
        }
    }

    #[test]
    fn a_mount_point_has_one_form_and_is_no_place_that_a_guest_needs() {
        let mount = |text: &str| {
            let wire = v1::ShareSpec {
                mount: text.into(),
                ..data()
            };
            let mut found = Violations::default();
            let share = Share::new(&mut found, "s", &wire).unwrap();
            (share.mount, found.0.len())
        };
        assert_eq!(mount(""), (None, 0));
        for text in ["/srv/my data", "/srv//my data/", "/srv/./my data"] {
            assert_eq!(mount(text), (Some("/srv/my data".into()), 0), "{text}");
        }
        let long = format!("/{}", "x".repeat(MAX_MOUNT));
        for text in ["srv", "/", "//.", "/srv/../etc", "/srv/a\nb", &long] {
            assert_eq!(mount(text), (None, 1), "{text}");
        }
    }

    #[test]
    fn a_map_has_the_guests_root_and_never_the_nodes_and_no_id_twice() {
        let with = |ranges: &[(u32, u32, u32)]| {
            problems(&v1::ShareSpec {
                uid_map: map(ranges),
                gid_map: map(&[(0, 1000, 1)]),
                ..data()
            })
        };
        let fine: Vec<String> = Vec::new();
        assert_eq!(with(&[(0, 100_000, 65_536)]), fine);
        assert_eq!(with(&[(1, 2, 10), (0, 1, 1)]), fine);
        for ranges in [
            &[(0, 0, 1)][..],
            &[(1, 1000, 1)],
            &[(0, 1000, 0)],
            &[(0, 1000, 5), (4, 2000, 1)],
            &[(0, 1000, 5), (9, 1004, 1)],
            &[(0, 1000, u32::MAX)],
        ] {
            assert_eq!(with(ranges), ["uidMap"], "{ranges:?}");
        }
    }
}
