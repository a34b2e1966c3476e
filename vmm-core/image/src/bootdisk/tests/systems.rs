//! XFS and Btrfs, as their tools make them.

use rstest::rstest;

use super::{super::*, GRUB_CFG, Workshop, content};

fn files() -> Vec<(&'static str, &'static str)> {
    vec![
        ("boot/grub2/grub.cfg", GRUB_CFG),
        ("boot/vmlinuz-6.1", "kernel 6.1"),
        ("boot/vmlinuz-6.0", "kernel 6.0"),
        ("boot/vmlinuz", "->vmlinuz-6.1"),
        ("boot/initrd.img-6.1", "->../usr/lib/initrd"),
        ("usr/lib/initrd", "ramdisk 6.1"),
        ("etc/os-release", "->../usr/lib/os-release"),
        ("usr/lib/os-release", "ID=sample\n"),
    ]
}

fn made(system: &str, files: &[(&str, &str)]) -> Vec<u8> {
    let workshop = Workshop::new();
    match system {
        "xfs" => workshop.xfs(files),
        _ => workshop.btrfs(files),
    }
}

#[rstest]
#[case("xfs")]
#[case("btrfs")]
fn a_kernel_is_found_by_uuid_with_what_links_lead_to(#[case] system: &str) {
    let found = find(Rc::new(made(system, &files()))).unwrap();
    assert_eq!(found.by, "the entry \"Debian\" of /boot/grub2/grub.cfg");
    assert_eq!(content(&found), ("kernel 6.1".into(), "ramdisk 6.1".into()));
    // By label.
    let by_label = GRUB_CFG.replace("--fs-uuid", "--label").replace(
        "--set=root 11111111-2222-4333-8444-555555555555",
        "--set=root system",
    );
    let mut changed = files();
    changed[0].1 = &by_label;
    assert_eq!(
        content(&find(Rc::new(made(system, &changed))).unwrap()).0,
        "kernel 6.1"
    );
}

#[rstest]
#[case("xfs")]
#[case("btrfs")]
fn long_files_and_many_names_are_read_whole(#[case] system: &str) {
    let kernel: String = (0..400_000).map(|number| format!("{number:07}\n")).collect();
    let mut many: Vec<_> = (0..500)
        .map(|number| format!("boot/some-longer-name-of-a-file-{number}"))
        .collect();
    many.extend(["boot/vmlinuz-6.1", "boot/grub/grub.cfg"].map(str::to_owned));
    let entry = "menuentry 'Many' { linux /boot/vmlinuz-6.1 }\n";
    let many: Vec<_> = many
        .iter()
        .map(|path| {
            (
                path.as_str(),
                match path.as_str() {
                    "boot/vmlinuz-6.1" => kernel.as_str(),
                    "boot/grub/grub.cfg" => entry,
                    _ => "",
                },
            )
        })
        .collect();
    let found = find(Rc::new(made(system, &many))).unwrap();
    let mut copied = Vec::new();
    assert_eq!(found.copy_kernel(&mut copied).unwrap(), kernel.len() as u64);
    assert!(copied == kernel.as_bytes());
    let names = found.volume.names("/boot");
    assert_eq!(names.len(), 502);
}

#[rstest]
#[case("xfs")]
#[case("btrfs")]
fn what_is_damaged_is_refused_with_the_reason(#[case] system: &str) {
    let mut spoiled = made(system, &files());
    let at = if system == "xfs" { 100 } else { 0x10000 + 200 };
    spoiled[at] ^= 0xff;
    let refused = find(Rc::new(spoiled)).unwrap_err().to_string();
    assert!(refused.contains("file system that can't be read ("), "{refused}");
    // A link to itself, and one that leads out.
    let looped = made(
        system,
        &[
            ("boot/grub/grub.cfg", "->grub.cfg"),
            ("boot/grub2/grub.cfg", "->../../../../../etc/shadow"),
        ],
    );
    let refused = find(Rc::new(looped)).unwrap_err().to_string();
    assert!(refused.contains("no grub.cfg"), "{refused}");
}

/// A log whose first block belongs to no record, with the cycle numbers of a log in use. A log that
/// cannot be interpreted is ignored.
#[test]
fn an_xfs_whose_log_makes_no_sense_is_read_without_it() {
    let mut disk = made("xfs", &files());
    let number = |at: usize| u64::from(u32::from_be_bytes(disk[at..at + 4].try_into().unwrap()));
    // There is one group, so a block's number is its place.
    let log = usize::try_from(number(52) * number(4)).unwrap();
    let last = log + usize::try_from(number(96) * number(4)).unwrap() - 512;
    disk[log..log + 4].copy_from_slice(&9_u32.to_be_bytes());
    disk[last..last + 4].copy_from_slice(&5_u32.to_be_bytes());
    let found = find(Rc::new(disk)).unwrap();
    assert_eq!(content(&found).0, "kernel 6.1");
}

/// The only leaf of the root tree of a small Btrfs, which is changed and gets its checksum again.
fn change_roots(disk: &mut [u8], change: impl Fn(&mut [u8])) {
    const NODE: usize = 4096;
    let leaves: Vec<usize> = (0..disk.len() / NODE)
        .map(|number| number * NODE)
        // Owner is tree 1, level is 0, and there is something in it.
        .filter(|at| {
            disk[at + 88..at + 96] == 1_u64.to_le_bytes() && disk[at + 100] == 0 && disk[at + 96] > 3
        })
        .collect();
    assert!(!leaves.is_empty());
    for at in leaves {
        let leaf = &mut disk[at..at + NODE];
        change(leaf);
        let checksum = crc32c::crc32c(&leaf[32..]);
        leaf[..4].copy_from_slice(&checksum.to_le_bytes());
    }
}

/// Where an item and its data are in a leaf.
fn item(leaf: &[u8], objectid: u64, kind: u8) -> Option<(usize, usize)> {
    let count = usize::from(leaf[96]);
    (0..count).map(|number| 101 + 25 * number).find_map(|at| {
        let is_it = leaf[at..at + 8] == objectid.to_le_bytes() && leaf[at + 8] == kind;
        let data = u32::from_le_bytes(leaf[at + 17..at + 21].try_into().unwrap());
        is_it.then(|| (at, 101 + data as usize))
    })
}

const TOP: u64 = 5;
const RELOCATION: u64 = 0_u64.wrapping_sub(9);
const ROOT_ITEM: u8 = 132;

/// The tree of the relocation, which is an empty subvolume, gets the number of the first real one, and the root of the top level.
fn add_subvolume(leaf: &mut [u8], top_stays: bool) {
    let (Some((_, top)), Some((key, other))) =
        (item(leaf, TOP, ROOT_ITEM), item(leaf, RELOCATION, ROOT_ITEM))
    else {
        return;
    };
    leaf[key..key + 8].copy_from_slice(&256_u64.to_le_bytes());
    // Where the root node is.
    let (full, empty) = (
        leaf[top + 176..top + 184].to_vec(),
        leaf[other + 176..other + 184].to_vec(),
    );
    leaf[other + 176..other + 184].copy_from_slice(&full);
    if !top_stays {
        leaf[top + 176..top + 184].copy_from_slice(&empty);
    }
}

#[test]
fn the_default_subvolume_of_a_btrfs_goes_before_its_top_level() {
    let mut disk = made("btrfs", &files());
    change_roots(&mut disk, |leaf| {
        add_subvolume(leaf, false);
        // The entry "default" of the tree's own folder.
        let (_, default) = item(leaf, 6, 84).unwrap();
        leaf[default..default + 8].copy_from_slice(&256_u64.to_le_bytes());
    });
    let found = find(Rc::new(disk.clone())).unwrap();
    assert_eq!(found.by, "the entry \"Debian\" of /boot/grub2/grub.cfg");
    assert_eq!(content(&found).0, "kernel 6.1");
    // The other way round.
    change_roots(&mut disk, |leaf| {
        let (top, other) = (
            item(leaf, TOP, ROOT_ITEM).unwrap().1,
            item(leaf, 256, ROOT_ITEM).unwrap().1,
        );
        for at in 176..184 {
            leaf.swap(top + at, other + at);
        }
    });
    let found = find(Rc::new(disk)).unwrap();
    assert_eq!(
        found.by,
        "the entry \"Debian\" of /boot/grub2/grub.cfg, subvolume /"
    );
}

#[test]
fn a_path_leads_into_a_subvolume_as_grub_has_it() {
    let configuration = GRUB_CFG.replace(" /boot/", " /@/boot/");
    let mut files = files();
    files[0].1 = &configuration;
    files.push(("@", ""));
    let mut disk = made("btrfs", &files);
    change_roots(&mut disk, |leaf| {
        add_subvolume(leaf, true);
        // What links it: the inode of the tree's own folder is not needed.
        let (key, data) = item(leaf, 6, 1).unwrap();
        leaf[key..key + 8].copy_from_slice(&TOP.to_le_bytes());
        leaf[key + 8] = 156;
        leaf[key + 9..key + 17].copy_from_slice(&256_u64.to_le_bytes());
        let mut link = [0; 19];
        link[..8].copy_from_slice(&256_u64.to_le_bytes());
        link[16] = 1;
        link[18] = b'@';
        leaf[data..data + 19].copy_from_slice(&link);
    });
    // The file `@` becomes the subvolume.
    let places: Vec<_> = disk
        .windows(31)
        .enumerate()
        .filter(|(_, bytes)| bytes[8] == 1 && bytes[25..31] == [0, 0, 1, 0, 1, b'@'])
        .map(|(at, _)| at)
        .collect();
    assert!(places.len() >= 2, "an entry by name and one by number");
    for at in places {
        disk[at..at + 8].copy_from_slice(&256_u64.to_le_bytes());
        disk[at + 8] = ROOT_ITEM;
        let node = at / 4096 * 4096;
        let checksum = crc32c::crc32c(&disk[node + 32..node + 4096]);
        disk[node..node + 4].copy_from_slice(&checksum.to_le_bytes());
    }
    let found = find(Rc::new(disk)).unwrap();
    assert_eq!(found.kernel, "/@/boot/vmlinuz-6.1");
    assert_eq!(content(&found), ("kernel 6.1".into(), "ramdisk 6.1".into()));
}
