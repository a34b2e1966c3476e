//! Files of all formats, and hostile ones.

use std::{fs, process::Command};

use serde_json::Value;

use crate::{Images, allocated};

/// A disk of 8 MiB with some data and many zeroes.
pub fn disk() -> Vec<u8> {
    let mut disk = vec![0; 8 << 20];
    let mut word = 1_u32;
    for byte in &mut disk[(1 << 20)..(1 << 20) + 200_000] {
        word = word.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *byte = word.to_le_bytes()[3];
    }
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    disk[(6 << 20) + 17] = 9;
    disk
}

pub fn packed(kind: &str, content: &[u8]) -> Vec<u8> {
    use std::io::Write as _;
    match kind {
        "gzip" => {
            let mut writer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            writer.write_all(content).unwrap();
            writer.finish().unwrap()
        }
        "bzip2" => {
            let mut writer = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
            writer.write_all(content).unwrap();
            writer.finish().unwrap()
        }
        "xz" => {
            let options = lzma_rust2::XzOptions::with_preset(1);
            let mut writer = lzma_rust2::XzWriter::new(Vec::new(), options).unwrap();
            writer.write_all(content).unwrap();
            writer.finish().unwrap()
        }
        "zstd" => ruzstd::encoding::compress_to_vec(content, ruzstd::encoding::CompressionLevel::Fastest),
        _ => content.to_vec(),
    }
}

pub const IMPORT: &str = "import --fd 3 --to-fd 4 --scratch-fd 5 --max-size";
pub const IMPORT_FILES: [&str; 3] = ["source", "target", "scratch"];

/// The answer of `vmm-image import` for a file with this content.
pub fn imported(images: &Images, content: &[u8], max_size: u64) -> Result<Value, String> {
    fs::write(images.path("source"), content).unwrap();
    for name in ["target", "scratch"] {
        let _ = fs::remove_file(images.path(name));
    }
    let output = images.run(&format!("{IMPORT} {max_size}"), &IMPORT_FILES);
    if !output.status.success() {
        return Err(String::from_utf8(output.stderr).unwrap());
    }
    let said = String::from_utf8(output.stdout).unwrap();
    Ok(serde_json::from_str(said.lines().last().unwrap()).unwrap())
}

/// A qcow2 image with `content`, of version 3 with clusters of 64 KiB; clusters of zeroes are left out (qcow2 specification, "Header",
/// "Cluster mapping").
pub fn qcow2(content: &[u8]) -> Vec<u8> {
    const CLUSTER: usize = 64 << 10;
    let mut image = vec![0; 3 * CLUSTER];
    let fields: [(usize, &[u8]); 9] = [
        (0, b"QFI\xfb"),
        (4, &3_u32.to_be_bytes()),
        (20, &16_u32.to_be_bytes()),
        (24, &(content.len() as u64).to_be_bytes()),
        (36, &1_u32.to_be_bytes()),
        (40, &(CLUSTER as u64).to_be_bytes()),
        // Refcounts: a reader ignores them.
        (48, &(CLUSTER as u64).to_be_bytes()),
        (56, &1_u32.to_be_bytes()),
        (96, &[0, 0, 0, 4, 0, 0, 0, 104]),
    ];
    for (offset, bytes) in fields {
        image[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
    const COPIED: u64 = 1 << 63;
    image[CLUSTER..CLUSTER + 8].copy_from_slice(&((2 * CLUSTER as u64) | COPIED).to_be_bytes());
    for (number, cluster) in content.chunks(CLUSTER).enumerate() {
        if cluster.iter().any(|byte| *byte != 0) {
            let entry = 2 * CLUSTER + 8 * number;
            let place = image.len() as u64 | COPIED;
            image[entry..entry + 8].copy_from_slice(&place.to_be_bytes());
            image.extend(cluster);
        }
    }
    image
}

#[test]
fn a_file_of_any_known_format_becomes_the_same_sparse_raw_image() {
    let images = Images::new();
    let disk = disk();
    let image = qcow2(&disk);
    for (format, content) in [("raw", &disk), ("qcow2", &image)] {
        for compression in ["none", "gzip", "bzip2", "xz", "zstd"] {
            let found = imported(&images, &packed(compression, content), 1 << 30).unwrap();
            assert_eq!(
                (found["format"].as_str(), found["virtual_size"].as_u64()),
                (Some(format), Some(8 << 20))
            );
            assert_eq!(found["compression"].as_str().unwrap_or("none"), compression);
            assert!(
                fs::read(images.path("target")).unwrap() == disk,
                "{format} {compression}"
            );
            assert!(
                allocated(&images.path("target")) < 1 << 20,
                "{format} {compression}: holes are kept"
            );
        }
    }
}

#[test]
fn disk_that_is_not_whole_sectors_is_filled_up_with_zeroes() {
    let images = Images::new();
    const LENGTH: usize = (1 << 20) + 700;
    let mut image = vec![7; LENGTH];
    image[510..512].copy_from_slice(&[0x55, 0xaa]);
    let found = imported(&images, &image, 2 << 20).unwrap();
    assert_eq!(found["virtual_size"].as_u64(), Some((1 << 20) + 1024));
    let target = fs::read(images.path("target")).unwrap();
    assert_eq!(target[LENGTH - 1..LENGTH + 2], [7, 0, 0]);
}

#[test]
fn a_hostile_file_is_refused_with_the_reason() {
    let images = Images::new();
    let image = qcow2(&disk());
    let changed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut image = image.clone();
        change(&mut image);
        image
    };
    // qcow2 specification, "Header": backing file name at 8 (offset) and 16 (length), size at 24, features at 72.
    let backing = changed(&|image| {
        image[8..16].copy_from_slice(&400_u64.to_be_bytes());
        image[16..20].copy_from_slice(&11_u32.to_be_bytes());
        image[400..411].copy_from_slice(b"/etc/shadow");
    });
    let data_file = changed(&|image| image[79] |= 4);
    let enormous = changed(&|image| image[24..32].copy_from_slice(&(u64::MAX / 2).to_be_bytes()));
    let large = changed(&|image| image[24..32].copy_from_slice(&(1_u64 << 40).to_be_bytes()));
    let bomb = packed("gzip", &vec![0; 64 << 20]);
    let cut = packed("xz", &disk());
    for (content, reason) in [
        (&backing, "backing file"),
        (&data_file, "external file"),
        (&enormous, "qcow2"),
        (&large, "qcow2"),
        (&image[..image.len() / 2].to_vec(), "damaged"),
        (&image[..50].to_vec(), "qcow2"),
        (&bomb, "longer than the 33554432 bytes"),
        (&cut[..cut.len() / 2].to_vec(), "can't be decompressed with xz"),
        (
            &packed("gzip", &packed("xz", &disk())),
            "compressed with xz again",
        ),
        (&b"QED\0....".to_vec(), "format qed"),
        (
            &b"# Disk DescriptorFile\nRW 1 FLAT \"/etc/shadow\" 0".to_vec(),
            "names other files",
        ),
        (&Vec::new(), "empty"),
    ] {
        let error = imported(&images, content, 32 << 20).unwrap_err();
        assert!(error.contains(reason), "{reason}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

#[test]
fn an_import_ends_when_the_file_system_has_too_little_room_left() {
    let images = Images::new();
    fs::write(images.path("source"), vec![1; 8 << 20]).unwrap();
    let arguments = format!("{IMPORT} 33554432 --keep-free {}", u64::MAX);
    let output = images.run(&arguments, &IMPORT_FILES);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && error.contains("No space left"),
        "{error}"
    );
}

/// An image that qemu-img makes from the disk.
pub fn by_qemu(images: &Images, format: &str, options: &str) -> Vec<u8> {
    let (from, to) = (images.path("disk"), images.path("foreign"));
    fs::write(&from, disk()).unwrap();
    let _ = fs::remove_file(&to);
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-f", "raw", "-O", format]);
    if !options.is_empty() {
        command.args(["-o", options]);
    }
    let done = command.args([&from, &to]).status();
    assert!(done.expect("install qemu-utils").success(), "{format} {options}");
    fs::read(to).unwrap()
}

#[test]
fn images_of_other_hypervisors_become_the_same_raw_image() {
    let images = Images::new();
    let disk = disk();
    for (name, format, options) in [
        ("vdi", "vdi", ""),
        ("vdi", "vdi", "static=on"),
        ("vhdx", "vhdx", ""),
        ("vhdx", "vhdx", "subformat=fixed"),
        ("vhd", "vpc", "force_size=on"),
        ("vhd", "vpc", "force_size=on,subformat=fixed"),
        ("vmdk", "vmdk", ""),
        ("vmdk", "vmdk", "subformat=streamOptimized"),
    ] {
        let image = by_qemu(&images, format, options);
        for compression in ["none", "gzip"] {
            let found = imported(&images, &packed(compression, &image), 1 << 30);
            let found = found.unwrap_or_else(|error| panic!("{format} {options}: {error}"));
            assert_eq!(found["format"].as_str(), Some(name));
            assert_eq!(found["virtual_size"].as_u64(), Some(disk.len() as u64));
            assert!(
                fs::read(images.path("target")).unwrap() == disk,
                "{format} {options} {compression}"
            );
        }
    }
    // Without that option qemu-img makes the disk as large as a geometry can say.
    let found = imported(&images, &by_qemu(&images, "vpc", ""), 1 << 30).unwrap();
    let size = usize::try_from(found["virtual_size"].as_u64().unwrap()).unwrap();
    assert!(size >= disk.len() && size < disk.len() + (1 << 20));
    assert!(fs::read(images.path("target")).unwrap()[..disk.len()] == disk);
}

#[test]
fn hostile_foreign_images_are_refused_with_the_reason() {
    let images = Images::new();
    let changed = |image: &[u8], at: usize, bytes: &[u8]| {
        let mut image = image.to_vec();
        image[at..at + bytes.len()].copy_from_slice(bytes);
        image
    };
    let (vdi, vhd) = (
        by_qemu(&images, "vdi", ""),
        by_qemu(&images, "vpc", "force_size=on"),
    );
    let (vhdx, vmdk) = (by_qemu(&images, "vhdx", ""), by_qemu(&images, "vmdk", ""));
    let packed = by_qemu(&images, "vmdk", "subformat=streamOptimized");
    let parent = vmdk.windows(9).position(|text| text == b"parentCID").unwrap();
    for (content, reason) in [
        (changed(&vdi, 0x170, &u64::MAX.to_le_bytes()), "damaged"),
        (changed(&vdi, 0x170, &(1_u64 << 40).to_le_bytes()), "damaged"),
        (changed(&vdi, 0x1a8, &[1; 16]), "needs another image"),
        (changed(&vdi, 0x178, &[0; 4]), "damaged"),
        (vdi[..vdi.len() - (1 << 20)].to_vec(), "cut off"),
        (vdi[..100].to_vec(), "cut off"),
        (vhd[..1000].to_vec(), "cut off"),
        (changed(&vhd, vhd.len() - 500, &[7; 4]), "not whole"),
        (changed(&vhd, 512 + 32, &[0; 4]), "damaged"),
        (changed(&vhd, 512 + 28, &[0; 4]), "entries for"),
        (vhdx[..(192 << 10)].to_vec(), "region is missing"),
        (vhdx[..vhdx.len() - (1 << 20)].to_vec(), "cut off"),
        (
            changed(
                &changed(&vhdx, (64 << 10) + 48, &[1; 16]),
                (128 << 10) + 48,
                &[1; 16],
            ),
            "not closed",
        ),
        (changed(&vmdk, 20, &[0; 8]), "damaged"),
        (changed(&vmdk, 12, &[0xff; 8]), "damaged"),
        (changed(&vmdk, 12, &(1_u64 << 31).to_le_bytes()), "more than the"),
        (changed(&vmdk, parent + 10, b"00000001"), "needs another image"),
        (packed[..packed.len() / 2].to_vec(), "cut off"),
    ] {
        let error = imported(&images, &content, 32 << 20).expect_err(reason);
        assert!(error.contains(reason), "{reason}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}
