//! Layers of OCI images.

use std::fs;

use serde_json::Value;

use crate::{
    Images, allocated,
    import::{IMPORT, IMPORT_FILES, disk, packed, qcow2},
};

/// A header of tar, and the content filled up to whole blocks (POSIX.1-2024, "ustar Interchange Format").
pub fn entry(kind: u8, name: &str, content: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_ustar();
    header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
    header.set_entry_type(tar::EntryType::new(kind));
    header.set_mode(0o644);
    header.set_size(content.len() as u64);
    header.set_cksum();
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend(content);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

/// An archive with these entries and its end.
pub fn archive(entries: &[Vec<u8>]) -> Vec<u8> {
    [entries.concat(), vec![0; 1024]].concat()
}

/// The answer of `vmm-image import` for these layers.
fn of_layers(images: &Images, layers: &[Vec<u8>], max_size: u64) -> Result<Value, String> {
    fs::write(images.path("source"), layers.concat()).unwrap();
    for name in ["target", "scratch"] {
        let _ = fs::remove_file(images.path(name));
    }
    let lengths: String = layers
        .iter()
        .map(|layer| format!(" --layer {}", layer.len()))
        .collect();
    let output = images.run(&format!("{IMPORT} {max_size}{lengths}"), &IMPORT_FILES);
    if !output.status.success() {
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(error.lines().count(), 1, "{error}");
        return Err(error);
    }
    let said = String::from_utf8(output.stdout).unwrap();
    Ok(serde_json::from_str(said.lines().last().unwrap()).unwrap())
}

#[test]
fn the_file_below_disk_in_a_layer_becomes_the_image() {
    let images = Images::new();
    let disk = disk();
    let length = format!("{}", disk.len());
    let long = format!("./disk/{}.img", "x".repeat(120));
    // Records of an extended header: the size may be in it alone (in Go's archives, of files from 8 GiB on).
    let record = |text: &str| format!("{} {text}\n", text.len() + 4).into_bytes();
    let mut sized = entry(b'0', "disk/a", &disk);
    let mut header = tar::Header::from_byte_slice(&sized[..512]).clone();
    header.set_size(0);
    header.set_cksum();
    sized[..512].copy_from_slice(header.as_bytes());
    let others = archive(&[
        entry(b'5', "boot/", b""),
        entry(b'0', "boot/vmlinuz", &[1; 700]),
        entry(b'0', "disk", b"no folder"),
    ]);
    let plain = [entry(b'5', "./disk/", b""), entry(b'0', "./disk/a.img", &disk)];
    for (name, entries) in [
        ("a name", plain.to_vec()),
        ("a qcow2 image", vec![entry(b'0', "disk/a.qcow2", &qcow2(&disk))]),
        (
            "a long name of GNU's",
            vec![
                entry(b'L', "././@LongLink", format!("{long}\0").as_bytes()),
                entry(b'0', "disk/xxx", &disk),
            ],
        ),
        (
            "a long name of pax",
            vec![
                entry(b'x', "h", format!("141 path={long}\n").as_bytes()),
                entry(b'0', "xxx", &disk),
            ],
        ),
        (
            "a size of pax",
            vec![entry(b'x', "h", &record(&format!("size={length}"))), sized],
        ),
    ] {
        for compression in ["none", "gzip", "zstd"] {
            let layer = packed(compression, &archive(&entries));
            let layers = [packed("gzip", &others), layer, others.clone()];
            let found = of_layers(&images, &layers, 1 << 30);
            let found = found.unwrap_or_else(|error| panic!("{name} {compression}: {error}"));
            assert_eq!(found["compression"].as_str().unwrap_or("none"), compression);
            assert_eq!(found["virtual_size"].as_u64(), Some(8 << 20), "{name}");
            assert!(
                fs::read(images.path("target")).unwrap() == disk,
                "{name} {compression}"
            );
            assert!(allocated(&images.path("target")) < 1 << 20);
        }
    }
}

#[test]
fn a_hostile_layer_is_refused_with_the_entry_and_leaves_no_file() {
    let images = Images::new();
    let disk = [7; 2048];
    let good = || entry(b'0', "disk/a.img", &disk);
    let pax = |record: &str| entry(b'x', "h", format!("{} {record}\n", record.len() + 4).as_bytes());
    let enormous = |name: &str| {
        let mut header = tar::Header::new_ustar();
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.set_size(1 << 33);
        header.set_cksum();
        header.as_bytes().to_vec()
    };
    let whole = archive(&[good()]);
    let many: Vec<_> = (0..100_001).flat_map(|_| entry(b'5', "a/", b"")).collect();
    let mut damaged = whole.clone();
    damaged[0] = b'x';
    for (layer, reason) in [
        (
            archive(&[good(), entry(b'0', "../../etc/passwd", b"x")]),
            "\"../../etc/passwd\" is refused: its name leads out",
        ),
        (
            archive(&[entry(b'0', "disk/../a", b"x")]),
            "\"disk/../a\" is refused",
        ),
        (
            archive(&[entry(b'0', "/disk/a.img", &disk)]),
            "\"/disk/a.img\" is refused: its name is absolute",
        ),
        (archive(&[pax("path=/disk/x"), good()]), "\"/disk/x\" is refused"),
        (archive(&[entry(b'0', "disk/a\nb", &disk)]), "control characters"),
        (
            archive(&[entry(b'3', "disk/null", b"")]),
            "\"disk/null\" is a device node",
        ),
        (
            archive(&[entry(b'2', "disk/a.img", b"")]),
            "\"disk/a.img\" is a symbolic link",
        ),
        (
            archive(&[entry(b'1', "disk/a.img", b"")]),
            "\"disk/a.img\" is a link",
        ),
        (
            archive(&[entry(b'6', "disk/pipe", b"")]),
            "\"disk/pipe\" is a FIFO",
        ),
        (
            archive(&[entry(b'S', "disk/a.img", b"")]),
            "\"disk/a.img\": the list of its holes is damaged",
        ),
        (archive(&[pax("GNU.sparse.major=1"), good()]), "sparse"),
        (
            archive(&[entry(b'g', "all", b"16 path=disk/ab\n"), good()]),
            "header for all entries",
        ),
        (archive(&[entry(b'Z', "disk/a.img", b"")]), "unknown type"),
        (
            archive(&[good(), entry(b'0', "disk/.wh.a.img", b"")]),
            "no layer has a file below",
        ),
        (
            archive(&[good(), entry(b'0', "disk/b.img", &disk)]),
            "\"disk/b.img\" is a second file",
        ),
        (
            archive(&[entry(b'0', "boot/vmlinuz", &disk)]),
            "no layer has a file below",
        ),
        (
            archive(&[entry(b'x', "h", b"999 path=a\n"), good()]),
            "extended header is damaged",
        ),
        (
            archive(&[pax("size=99999999999999999999"), good()]),
            "extended header is damaged",
        ),
        (
            archive(&[pax("size=18446744073709551615"), good()]),
            "longer than it may be",
        ),
        (
            archive(&[entry(b'L', "l", &vec![b'x'; 2 << 20]), good()]),
            "a header has 2097152 bytes",
        ),
        (enormous("disk/a.img"), "longer than it may be"),
        (enormous("beside"), "\"beside\" has 8589934592 bytes"),
        (
            archive(&[entry(b'0', "disk/a.img", &vec![0; 33 << 20])]),
            "more than the 33554432",
        ),
        (archive(&[many]), "more than 100000 entries"),
        (whole[..1000].to_vec(), "can't be read to its end"),
        (whole[..200].to_vec(), "middle of a header"),
        (damaged, "no archive of tar"),
        (vec![7; 4096], "no archive of tar"),
        (
            archive(&[entry(b'0', "disk/a.xz", &packed("xz", &disk))]),
            "neither a partition table nor a file system",
        ),
        (archive(&[entry(b'0', "disk/a.img", b"")]), "the image is empty"),
    ] {
        // Packing so many takes a build that is not optimized seconds.
        let compressions: &[_] = match reason.contains("entries") {
            true => &["none"],
            false => &["none", "gzip"],
        };
        for compression in compressions {
            let error = of_layers(&images, &[packed(compression, &layer)], 32 << 20).expect_err(reason);
            assert!(error.contains(reason), "{reason} {compression}: {error}");
        }
    }
    let cut = packed("gzip", &whole);
    let cut = of_layers(&images, &[cut[..cut.len() / 2].to_vec()], 32 << 20).unwrap_err();
    assert!(cut.contains("layer 1 of 1"), "{cut}");
    let other = archive(&[entry(b'0', "disk/b.img", &disk)]);
    let both = of_layers(&images, &[archive(&[good()]), other], 32 << 20).unwrap_err();
    assert!(
        both.contains("layer 2 of 2") && both.contains("second file"),
        "{both}"
    );
    // All that a layer was unpacked to is in the two files that the caller gave.
    let mut names: Vec<_> = fs::read_dir(images.path(""))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["scratch", "source", "target"]);
}

#[test]
fn entries_outside_the_folder_are_skipped() {
    let images = Images::new();
    let disk = disk();
    let long = "x".repeat(200);
    let base = archive(&[
        entry(b'g', "pax_global_header", b"19 comment=0123456\n"),
        entry(b'0', "bin/busybox", &[7; 3000]),
        entry(b'2', "bin/sh", b""),
        entry(b'1', "bin/ash", b""),
        entry(b'3', "dev/null", b""),
        entry(b'6', "run/pipe", b""),
        entry(b'0', "etc/.wh.old", b""),
        entry(b'0', "etc/.wh..wh..opq", b""),
        entry(b'x', "h", b"21 linkpath=/etc/abc\n"),
        entry(b'2', "etc/link", b""),
        entry(b'K', "././@LongLink", format!("{long}\0").as_bytes()),
        entry(b'2', "etc/long", b""),
        entry(b'Z', "etc/vendor", b"x"),
    ]);
    let layer = archive(&[
        entry(b'L', "././@LongLink", b"disk/of-the-long-name.img\0"),
        entry(b'K', "././@LongLink", format!("{long}\0").as_bytes()),
        entry(b'0', "disk/short", &disk),
    ]);
    let found = of_layers(&images, &[base, layer], 1 << 30).unwrap();
    assert_eq!(found["virtual_size"].as_u64(), Some(disk.len() as u64));
    assert!(fs::read(images.path("target")).unwrap() == disk);
}

#[test]
fn later_layer_replaces_or_removes_the_disk() {
    let images = Images::new();
    let (old, new) = (vec![9; 12 << 20], disk());
    let first = archive(&[entry(b'0', "disk/old.img", &old)]);
    let other = entry(b'0', "./disk/new.img", &new);
    for second in [
        vec![entry(b'0', "./disk/old.img", &qcow2(&new))],
        vec![entry(b'0', "disk/.wh.old.img", b""), other.clone()],
        vec![entry(b'0', "disk/.wh..wh..opq", b""), other.clone()],
        vec![entry(b'0', ".wh.disk", b""), other.clone()],
        vec![entry(b'0', ".wh..wh..opq", b""), other],
    ] {
        let found = of_layers(&images, &[first.clone(), archive(&second)], 1 << 30).unwrap();
        assert_eq!(found["virtual_size"].as_u64(), Some(new.len() as u64));
        assert!(fs::read(images.path("target")).unwrap() == new);
    }
}

#[test]
fn compressed_disk_in_a_layer_is_unpacked() {
    let images = Images::new();
    let disk = disk();
    for kind in ["xz", "gzip"] {
        let inner = packed(kind, &qcow2(&disk));
        let layer = archive(&[entry(b'0', "disk/disk.img.xz", &inner)]);
        let found = of_layers(&images, &[layer], 1 << 30).unwrap();
        assert_eq!(
            (&found["format"], &found["compression"]),
            (&"qcow2".into(), &kind.into())
        );
        assert!(fs::read(images.path("target")).unwrap() == disk, "{kind}");
    }
    let twice = packed("gzip", &packed("xz", &disk));
    let layer = archive(&[entry(b'0', "disk/disk.img.xz.gz", &twice)]);
    let error = of_layers(&images, &[layer], 1 << 30).unwrap_err();
    assert!(error.contains("compressed with xz again"), "{error}");
}
