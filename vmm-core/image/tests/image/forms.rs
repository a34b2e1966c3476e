//! Forms in which people have images: behind compression, in archives, as pieces, and files that are no images.

use std::{fs, process::Command};

use crate::{
    Images,
    import::{by_qemu, disk, imported, packed, qcow2},
    layers::{archive, entry},
};

const MOST: u64 = 1 << 30;

/// Imports this content, and compares the image with the disk; returns the answer.
fn becomes(images: &Images, content: &[u8], disk: &[u8]) -> serde_json::Value {
    let found = imported(images, content, MOST).unwrap();
    assert!(fs::read(images.path("target")).unwrap() == disk, "{found}");
    found
}

fn refused(images: &Images, content: &[u8], words: &str) {
    let error = imported(images, content, MOST).expect_err(words);
    assert!(error.contains(words), "{words}: {error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

/// Runs a script of the shell in the folder of the images, which has the disk as `disk.raw`.
fn sh(images: &Images, script: &str) {
    fs::write(images.path("disk.raw"), disk()).unwrap();
    let done = Command::new("sh")
        .args(["-ec", script])
        .current_dir(images.path(""))
        .status();
    assert!(done.unwrap().success(), "{script}");
}

fn read(images: &Images, name: &str) -> Vec<u8> {
    fs::read(images.path(name)).unwrap()
}

#[test]
fn data_behind_compressed_data_is_ignored_or_refused() {
    let images = Images::new();
    let disk = disk();
    let metadata = b"\0\0\0\0{\"metadata_version\":\"1.1\"}FWx0";
    for kind in ["gzip", "bzip2", "xz", "zstd"] {
        let whole = packed(kind, &disk);
        let mut filled = whole.clone();
        filled.resize(filled.len().next_multiple_of(4096) + 4096, 0);
        becomes(&images, &filled, &disk);
        let behind = [whole.as_slice(), metadata].concat();
        match kind {
            "gzip" | "bzip2" => drop(becomes(&images, &behind, &disk)),
            _ => refused(&images, &behind, "other data follows"),
        }
        // Several members are one content; the second one is cut off.
        let (first, second) = disk.split_at(3 << 20);
        let both = [packed(kind, first), packed(kind, second)].concat();
        becomes(&images, &both, &disk);
        refused(
            &images,
            &both[..both.len() - 20],
            &format!("decompressed with {kind}"),
        );
    }
}

#[test]
fn zstd_with_frames_to_skip_is_decompressed() {
    let images = Images::new();
    let disk = disk();
    let skip = |magic: u8, content: &[u8]| {
        let length = u32::try_from(content.len()).unwrap().to_le_bytes();
        [&[magic, 0x2a, 0x4d, 0x18], length.as_slice(), content].concat()
    };
    let (first, second) = disk.split_at(2 << 20);
    let frames = [
        skip(0x50, b"1234"),
        packed("zstd", first),
        skip(0x5f, &[0x28, 0xb5, 0x2f, 0xfd]),
        packed("zstd", second),
        skip(0x5e, &vec![7; 300_000]),
    ];
    let found = becomes(&images, &frames.concat(), &disk);
    assert_eq!(found["compression"], "zstd");
    let lz4 = [skip(0x50, b"1234"), b"\x04\x22\x4d\x18rest of it".to_vec()];
    refused(&images, &lz4.concat(), "compressed with lz4");
    refused(
        &images,
        &[0x50, 0x2a, 0x4d, 0x18, 0xff, 0xff, 0xff, 0xff],
        "decompressed with zstd",
    );
    sh(&images, "pzstd -q -k disk.raw");
    becomes(&images, &read(&images, "disk.raw.zst"), &disk);
}

#[test]
fn the_one_disk_of_an_archive_is_taken() {
    let images = Images::new();
    let disk = disk();
    let stream = by_qemu(&images, "vmdk", "subformat=streamOptimized");
    let others = [
        entry(b'0', "a.ovf", b"<?xml version=\"1.0\"?><Envelope/>"),
        entry(b'0', "a.mf", b"SHA256(a.vmdk)= 00"),
    ];
    let ova = archive(&[others.concat(), entry(b'0', "a.vmdk", &stream)]);
    assert_eq!(becomes(&images, &ova, &disk)["format"], "vmdk");
    for inner in [disk.clone(), qcow2(&disk), packed("gzip", &disk)] {
        for outer in ["none", "gzip", "xz", "zstd"] {
            let whole = archive(&[entry(b'5', "./", b""), entry(b'0', "./disk.raw", &inner)]);
            becomes(&images, &packed(outer, &whole), &disk);
        }
    }
    let two = archive(&[entry(b'0', "a.raw", &disk), entry(b'0', "b.raw", &disk)]);
    refused(&images, &two, "several files that may be a disk");
    refused(
        &images,
        &archive(&[others.concat()]),
        "no file that can be a disk",
    );
    refused(
        &images,
        &archive(&[entry(b'0', "a.tar", &archive(&[entry(b'0', "b.raw", &disk)]))]),
        "further archive",
    );
    refused(&images, &ova[..ova.len() / 2], "can't be read to its end");
}

#[test]
fn sparse_file_of_gnu_tar_becomes_the_disk() {
    let images = Images::new();
    let disk = disk();
    sh(
        &images,
        "cp --sparse=always disk.raw s.raw; tar --format=oldgnu -ScJf s.tar.xz s.raw",
    );
    becomes(&images, &read(&images, "s.tar.xz"), &disk);
    // So many pieces have lists behind the header.
    let mut many = vec![0; 4 << 20];
    for at in (0..many.len()).step_by(32 << 10) {
        many[at + 5] = 9;
    }
    fs::write(images.path("many"), &many).unwrap();
    sh(
        &images,
        "cp --sparse=always many m.raw; tar --format=gnu -Scf m.tar m.raw",
    );
    becomes(&images, &read(&images, "m.tar"), &many);
}

#[test]
fn file_that_is_no_image_is_refused_with_what_it_is() {
    let images = Images::new();
    let filled = |start: &[u8]| [start, &[0; 2 << 20]].concat();
    let mut kernel = vec![0; 2 << 20];
    kernel[510..518].copy_from_slice(b"\x55\xaa\xeb\x66HdrS");
    let mut program = vec![0; 2 << 20];
    program[..2].copy_from_slice(b"MZ");
    program[0x3c] = 0x80;
    program[0x80..0x84].copy_from_slice(b"PE\0\0");
    let mut dmg = vec![7; 2 << 20];
    let trailer = dmg.len() - 512;
    dmg[trailer..trailer + 4].copy_from_slice(b"koly");
    for (content, words) in [
        (b"<html>Please log in</html>".to_vec(), "a web page (HTML)"),
        (
            b"\xef\xbb\xbf \n<!DOCTYPE HTML><p>\xe9".to_vec(),
            "a web page (HTML)",
        ),
        (b"<?xml version=\"1.0\"?><Error/>".to_vec(), "XML text"),
        (b"{\"error\": \"expired\"}".to_vec(), "JSON text"),
        (
            "apiVersion: vmmd/v1 # \u{fc}\n".repeat(9_000).into_bytes(),
            "the file is text",
        ),
        (filled(b"PK\x03\x04"), "an archive (zip)"),
        (filled(b"7z\xbc\xaf\x27\x1c"), "an archive (7z)"),
        (filled(b"Rar!\x1a\x07\x01\0"), "an archive (rar)"),
        (filled(b"070701000000"), "an archive (cpio)"),
        (filled(b"!<arch>\ndebian-binary"), "an archive (ar"),
        (filled(b"\xed\xab\xee\xdb\x03"), "an archive (rpm)"),
        (filled(b"MSWIM\0\0\0"), "an archive (wim)"),
        (filled(b"\x04\x22\x4d\x18"), "compressed with lz4"),
        (filled(b"LZIP\x01"), "compressed with lzip"),
        (filled(b"VMA\0"), "a backup (vma"),
        (filled(b"partclone-image"), "a backup (partclone)"),
        (filled(b"QFI\xfb\0\0\0\x01"), "format qcow (version 1)"),
        (filled(b"WithouFreSpacExt"), "format parallels"),
        (filled(b"COWD"), "format vmdk of ESX"),
        (filled(b"\x7fELF\x02\x01"), "a program (ELF)"),
        (kernel, "a program (Linux kernel)"),
        (program, "a program (EFI)"),
        (dmg, "format dmg"),
        (vec![7; 1000], "neither a partition table nor a file system"),
        (vec![7; (1 << 20) + 100], "in whole sectors"),
    ] {
        refused(&images, &content, words);
        refused(&images, &packed("gzip", &content), words);
    }
}

#[test]
fn disk_with_a_partition_beyond_its_end_is_refused() {
    let images = Images::new();
    let whole = table(0x83, 2048, 14_336);
    becomes(&images, &whole, &whole);
    refused(&images, &table(0x83, 2048, 14_337), "the image is cut off");
    refused(
        &images,
        &packed("gzip", &table(0x83, 2048, 14_337)),
        "the image is cut off",
    );
    // A boot sector of FAT has text instead of a table.
    let mut fat = table(b'i', 0x2073_6920, 0x746f_6e20);
    fat[446] = b'h';
    becomes(&images, &fat, &fat);
    for block in [512, 4096] {
        let gpt = gpt(block);
        let found = becomes(&images, &gpt, &gpt);
        assert_eq!(found["logical_block"], block);
        refused(&images, &gpt[..(8 << 20) - 4096], "the image is cut off");
    }
}

/// The disk with an MBR that has one partition.
fn table(kind: u8, start: u32, sectors: u32) -> Vec<u8> {
    let mut disk = disk();
    disk[446 + 4] = kind;
    disk[446 + 8..446 + 12].copy_from_slice(&start.to_le_bytes());
    disk[446 + 12..446 + 16].copy_from_slice(&sectors.to_le_bytes());
    disk
}

/// The disk with a GPT for logical blocks of this length, whose one partition reaches to the end.
fn gpt(block: usize) -> Vec<u8> {
    let mut gpt = table(0xee, 1, u32::MAX);
    let mut header = [0; 92];
    header[..8].copy_from_slice(b"EFI PART");
    (header[72], header[80], header[84]) = (2, 1, 128);
    gpt[block..block + 92].copy_from_slice(&header);
    let last = ((8 << 20) / block - 1) as u64;
    let at = 2 * block;
    gpt[at..at + 16].fill(7);
    gpt[at + 32..at + 40].copy_from_slice(&40_u64.to_le_bytes());
    gpt[at + 40..at + 48].copy_from_slice(&last.to_le_bytes());
    gpt
}

#[test]
fn gpt_for_other_blocks_than_the_disk_boots_nothing() {
    let images = Images::new();
    let boot = "boot --fd 3 --format raw --kernel-fd 4 --initrd-fd 5 --logical-block";
    for (table, block, words) in [
        (512, 512, "no kernel was found"),
        (4096, 4096, "no kernel was found"),
        (4096, 512, "set logicalBlockBytes of the disk to 4096"),
        (512, 4096, "set logicalBlockBytes of the disk to 512"),
    ] {
        fs::write(images.path("disk"), gpt(table)).unwrap();
        let error = images.error(&format!("{boot} {block}"), &["disk", "kernel", "initrd"]);
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn vhdx_with_sectors_of_4_kib_says_so() {
    // [MS-VHDX], 2.6.1.2 and 2.6.2.4: the entry of the metadata table with this identifier has the offset of the sector size.
    const SECTOR_SIZE: [u8; 16] = [
        0x1d, 0xbf, 0x41, 0x81, 0x6f, 0xa9, 0x09, 0x47, 0xba, 0x47, 0xf2, 0x33, 0xa8, 0xfa, 0xab, 0x5f,
    ];
    let images = Images::new();
    let mut image = by_qemu(&images, "vhdx", "");
    assert_eq!(becomes(&images, &image, &disk())["logical_block"], 512);
    let place = |text: &[u8]| image.windows(text.len()).position(|bytes| bytes == text).unwrap();
    let (table, entry) = (place(b"metadata"), place(&SECTOR_SIZE));
    let offset = u32::from_le_bytes(image[entry + 16..entry + 20].try_into().unwrap());
    let at = table + usize::try_from(offset).unwrap();
    image[at..at + 4].copy_from_slice(&4096_u32.to_le_bytes());
    assert_eq!(becomes(&images, &image, &disk())["logical_block"], 4096);
}

#[test]
fn piece_of_a_vmdk_in_several_files_is_refused() {
    let images = Images::new();
    sh(
        &images,
        "qemu-img create -q -f vmdk -o subformat=twoGbMaxExtentSparse s.vmdk 5G; \
         qemu-img convert -O vmdk disk.raw whole.vmdk",
    );
    refused(&images, &read(&images, "s-s001.vmdk"), "one piece of a disk");
    let whole = read(&images, "whole.vmdk");
    becomes(&images, &whole, &disk());
    let changed = |find: &[u8], put: &[u8]| {
        let mut image = whole.clone();
        let at = image.windows(find.len()).position(|text| text == find).unwrap();
        image[at..at + put.len()].copy_from_slice(put);
        image
    };
    refused(
        &images,
        &changed(b"createType", b"nothing   "),
        "one piece of a disk",
    );
    let line = b"# The Disk Data Base";
    refused(
        &images,
        &changed(line, b"RW 1 SPARSE \"b\"    "),
        "one piece of a disk",
    );
}

/// An image that qemu-img makes of the disk.
fn qcow2_with(images: &Images, options: &str) -> Vec<u8> {
    sh(
        images,
        &format!("qemu-img convert -O qcow2 {options} disk.raw o.qcow2"),
    );
    read(images, "o.qcow2")
}

#[test]
fn every_qcow2_that_qemu_makes_is_read() {
    let images = Images::new();
    let disk = disk();
    for options in [
        "",
        "-c",
        "-o compat=0.10",
        "-o cluster_size=512",
        "-o cluster_size=2M",
        "-c -o cluster_size=512",
        "-c -o cluster_size=2M",
        "-c -o compression_type=zstd",
        "-c -o compression_type=zstd,cluster_size=512",
        "-o extended_l2=on",
        "-o extended_l2=on,cluster_size=16k",
        "-c -o extended_l2=on,compression_type=zstd",
        "-o refcount_bits=1",
        "-o lazy_refcounts=on",
        "-o preallocation=metadata",
    ] {
        let image = qcow2_with(&images, options);
        let found = becomes(&images, &image, &disk);
        assert_eq!(found["format"], "qcow2", "{options}");
    }
}

#[test]
fn qcow2_that_was_not_closed_is_read() {
    let images = Images::new();
    let mut image = qcow2_with(&images, "-o lazy_refcounts=on");
    // "Header": incompatible features, bit 0.
    image[79] |= 1;
    becomes(&images, &image, &disk());
    image[79] |= 2;
    refused(&images, &image, "marked corrupt");
}

#[test]
fn damaged_qcow2_is_refused() {
    let images = Images::new();
    for options in ["", "-c", "-c -o compression_type=zstd", "-o extended_l2=on"] {
        let image = qcow2_with(&images, options);
        refused(&images, &image[..image.len() - (128 << 10)], "damaged");
        let l1 = usize::try_from(u64::from_be_bytes(image[40..48].try_into().unwrap())).unwrap();
        let mut far = image.clone();
        far[l1..l1 + 8].copy_from_slice(&0x8000_0100_0000_0000_u64.to_be_bytes());
        refused(&images, &far, "damaged");
        let l2 = u64::from_be_bytes(image[l1..l1 + 8].try_into().unwrap()) & 0x00ff_ffff_ffff_fe00;
        let mut noise = image.clone();
        // Any table is read to an end or an error.
        let l2 = usize::try_from(l2).unwrap();
        for (number, byte) in noise[l2..l2 + 4096].iter_mut().enumerate() {
            *byte = u8::try_from(number * 31 % 251).unwrap();
        }
        let _ = imported(&images, &noise, MOST);
    }
}
