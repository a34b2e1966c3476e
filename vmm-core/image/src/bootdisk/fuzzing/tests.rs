use std::{
    fs,
    path::{Path, PathBuf},
};

use proptest::prelude::*;

use super::{
    super::{
        grub::tests::{DEBIAN, FEDORA},
        tests::{ROOT, Workshop, fat},
        uki::tests::{OS_RELEASE, pe},
    },
    *,
};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/boot_disk")
}

/// Content of a disk, in pieces.
fn pieces(disk: &dyn Medium) -> Vec<u8> {
    let mut seed = vec![0];
    let mut piece: Vec<u8> = Vec::new();
    let end = |seed: &mut Vec<u8>, piece: &mut Vec<u8>, number: u64| {
        // A piece ends with its last byte that is no zero.
        let length = piece
            .iter()
            .rposition(|byte| *byte != 0)
            .map_or(0, |last| last + 1);
        if length > 0 {
            let first = number - piece.len() as u64 / SECTOR;
            seed.extend(u16::try_from(first).unwrap().to_le_bytes());
            seed.extend(u16::try_from(length).unwrap().to_le_bytes());
            seed.extend(&piece[..length]);
        }
        piece.clear();
    };
    let sectors = disk.size() / SECTOR;
    for number in 0..sectors {
        let mut bytes = [0; LENGTH];
        disk.read_at(&mut bytes, number * SECTOR).unwrap();
        if bytes == [0; LENGTH] || piece.len() + bytes.len() > usize::from(u16::MAX) {
            end(&mut seed, &mut piece, number);
        }
        if bytes != [0; LENGTH] {
            piece.extend(bytes);
        }
    }
    end(&mut seed, &mut piece, sectors);
    seed
}

/// A text of each part of the kernel finder, as an input.
fn text(kind: u8, parts: &[&str]) -> Vec<u8> {
    [&[kind], parts.join("\0").as_bytes()].concat()
}

#[test]
fn a_disk_is_the_same_in_pieces() {
    let mut disk = vec![0; 3 << 20];
    for (at, length) in [(0, 512), (700, 3), (1 << 20, 200_000), ((3 << 20) - 5, 5)] {
        disk[at..at + length].fill(7);
    }
    let seed = pieces(&disk);
    assert!(seed.len() < 203_000, "{}", seed.len());
    let read = Pieces::new(&seed[1..]);
    for (at, length) in [
        (0, 3 << 20),
        (511, 2),
        (698, 9),
        (1_048_575, 70_000),
        (3_145_000, 728),
    ] {
        let mut bytes = vec![1; length];
        read.read_at(&mut bytes, at as u64).unwrap();
        assert!(bytes == disk[at..at + length], "{at}");
    }
}

#[test]
fn the_seeds_of_boot_disk_do_no_harm() {
    if std::env::var_os("VMMD_WRITE_GOLDEN").is_some() {
        for (name, seed) in seeds() {
            fs::write(folder().join(name), seed).unwrap();
        }
    }
    let mut count = 0;
    for entry in fs::read_dir(folder()).unwrap() {
        boot_disk(&fs::read(entry.unwrap().path()).unwrap());
        count += 1;
    }
    assert!(count > 0, "no seeds in {}", folder().display());
}

#[test]
fn the_seeds_with_disks_have_a_kernel() {
    for name in [
        "gpt-fat-entries",
        "mbr-ext4-grub",
        "gpt-boot-partition",
        "gpt-fat-unified",
        "xfs",
        "btrfs",
    ] {
        let seed = fs::read(folder().join(name)).unwrap();
        let found = find_within(Rc::new(Pieces::new(&seed[1..])), LOOKING, COPYING).unwrap();
        let mut kernel = Vec::new();
        found.copy_kernel(&mut kernel).unwrap();
        assert!(kernel.starts_with(b"kernel"), "{name}: {found:?}");
    }
}

/// Disks and texts as distributions have them.
fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let workshop = Workshop::new();
    // Without checksums, so that changes of a fuzzer are read.
    let ext4 = |files: &[(&str, &str)]| {
        let options = [
            "-O",
            "^metadata_csum,^has_journal",
            "-b",
            "1024",
            "-N",
            "64",
            "-I",
            "128",
        ];
        workshop.ext4_with(ROOT, files, &options)
    };
    let entry =
        "title Linux\nversion 6.1\nlinux /m/6.1/linux\ninitrd /m/6.1/initrd\noptions root=LABEL=system\n";
    let esp = fat(&[
        ("loader/loader.conf", "timeout 3\ndefault m-6*\n"),
        ("loader/entries/m-6.1.conf", entry),
        ("m/6.1/linux", "kernel"),
        ("m/6.1/initrd", "ramdisk"),
    ]);
    let system = ext4(&[
        ("boot/grub/grub.cfg", DEBIAN),
        ("boot/grub/grubenv", "# GRUB Environment Block\nsaved_entry=0\n"),
        ("boot/vmlinuz-6.1.0-27-cloud-amd64", &"kernel ".repeat(700)),
        ("boot/initrd.img-6.1.0-27-cloud-amd64", &"ramdisk ".repeat(700)),
        ("boot/vmlinuz", "->vmlinuz-6.1.0-27-cloud-amd64"),
        ("vmlinuz", "->boot/vmlinuz"),
        ("etc/os-release", "ID=debian\n"),
        ("etc/default/grub", "GRUB_CMDLINE_LINUX=\"quiet\"\n"),
    ]);
    let links = ext4(&[
        ("boot/vmlinuz-6.9", "kernel"),
        ("boot/vmlinuz-6.11", "kernel"),
        ("boot/initrd.img-6.11", "ramdisk"),
        ("usr/lib/os-release", "ID=debian\n"),
        ("etc/os-release", "->../usr/lib/os-release"),
        ("etc/kernel/cmdline", "root=LABEL=system quiet\n"),
    ]);
    let boot = ext4(&[
        ("loader/entries/m-6.9.conf", FEDORA_ENTRY),
        ("vmlinuz-6.9", "kernel"),
        ("initramfs-6.9.img", "ramdisk"),
        ("grub2/grubenv", FEDORA_ENVIRONMENT),
        ("grub2/grub.cfg", FEDORA),
    ]);
    let unified = pe(&[
        (".osrel", OS_RELEASE.as_bytes()),
        (".cmdline", b"root=LABEL=system quiet"),
        (".uname", b"6.14.0"),
        (".initrd", b"ramdisk"),
        (".linux", b"kernel"),
    ]);
    let esp_unified = super::super::tests::fat_of(&[
        ("loader/loader.conf", b"default *-6.1?.efi\n"),
        ("EFI/Linux/m-6.14.efi", &unified),
    ]);
    let files = [
        ("boot/grub2/grub.cfg", GRUB),
        ("boot/vmlinuz-6.9", "kernel"),
        ("boot/initrd-6.9", "ramdisk"),
        ("boot/vmlinuz", "->vmlinuz-6.9"),
    ];
    vec![
        ("unified", [&[3], unified.as_slice()].concat()),
        (
            "gpt-fat-unified",
            pieces(workshop.disk("gpt", &["U"], &[esp_unified]).as_ref()),
        ),
        ("xfs", pieces(&workshop.xfs(&files))),
        ("btrfs", pieces(&workshop.btrfs(&files))),
        (
            "gpt-fat-entries",
            pieces(workshop.disk("gpt", &["U"], &[esp]).as_ref()),
        ),
        (
            "mbr-ext4-grub",
            pieces(workshop.disk("dos", &["E", "L"], &[system]).as_ref()),
        ),
        (
            "gpt-boot-partition",
            pieces(workshop.disk("gpt", &["L", "L"], &[boot, links]).as_ref()),
        ),
        ("grub-debian", text(1, &["saved_entry=0\n", DEBIAN])),
        ("grub-fedora", text(1, &[FEDORA_ENVIRONMENT, FEDORA])),
        (
            "entries-fedora",
            text(
                2,
                &[
                    FEDORA_ENVIRONMENT,
                    "timeout 3\ndefault m-*\n",
                    &format!("m-6.9\n{FEDORA_ENTRY}"),
                    "m-0-rescue\nversion 0-rescue\nlinux /vmlinuz-0\n",
                ],
            ),
        ),
    ]
}

const GRUB: &str =
    "menuentry Linux --id linux {\n linux /boot/vmlinuz root=/dev/vda\n initrd /boot/initrd-6.9\n}\n";
const FEDORA_ENTRY: &str = "title Fedora Linux (6.9) 40\nversion 6.9\nsort-key fedora\nlinux /vmlinuz-6.9\n\
    initrd /initramfs-6.9.img $tuned_initrd\noptions $kernelopts $tuned_params\ngrub_users $grub_users\ngrub_class fedora\n";
const FEDORA_ENVIRONMENT: &str =
    "# GRUB Environment Block\nsaved_entry=m-6.9\nkernelopts=root=UUID=1 ro\nboot_success=1\n";

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_change_of_a_seed_does_harm(
        name in prop::sample::select(vec!["gpt-fat-entries", "mbr-ext4-grub", "gpt-fat-unified", "xfs", "btrfs", "grub-debian", "grub-fedora", "entries-fedora"]),
        changes in proptest::collection::vec((any::<usize>(), any::<u8>()), 1..6),
    ) {
        let mut data = fs::read(folder().join(name)).unwrap();
        for (place, value) in changes {
            let place = place % data.len();
            data[place] = value;
        }
        boot_disk(&data);
    }
}
