use std::sync::Arc;

use super::{
    super::Below,
    support::{Guest, Recorder, image, open, overlay, report, try_open},
};

/// Why an image is refused that was changed so; its cluster size is 4096.
fn refusal(read_only: bool, changes: &[(u64, &[u8])]) -> String {
    let recorder = image(4 << 20, 4096);
    for (offset, data) in changes {
        recorder.patch(*offset, data);
    }
    try_open(&recorder, read_only, Vec::new())
        .unwrap_err()
        .to_string()
}

#[test]
fn extensions_of_the_header_that_make_no_sense_are_refused() {
    let extension = |kind: u32, length: u32| [kind.to_be_bytes(), length.to_be_bytes()].concat();
    let names = 0x6803_f857;
    for (extensions, reason) in [
        (
            extension(names, 49),
            "the table of feature names has 49 bytes, which are no whole entries",
        ),
        (
            [extension(1, 3), vec![0; 8], extension(names, 1)].concat(),
            "the table of feature names has 1 bytes, which are no whole entries",
        ),
        (
            extension(1, 4096 - 111),
            "its extensions reach beyond the first cluster",
        ),
        (
            extension(0, u32::MAX),
            "its extensions reach beyond the first cluster",
        ),
        (extension(1, 0).repeat(300), "it has more than 256 extensions"),
    ] {
        let reason = format!("the qcow2 header is damaged: {reason}");
        assert_eq!(refusal(false, &[(104, &extensions)]), reason);
        assert_eq!(refusal(true, &[(104, &extensions)]), reason);
    }
    let recorder = image(4 << 20, 4096);
    let sound = [
        extension(names, 48),
        vec![0; 48],
        extension(1, 3),
        vec![0; 8],
        extension(0, 0),
    ];
    recorder.patch(104, &sound.concat());
    try_open(&recorder, false, Vec::new()).unwrap();
}

#[test]
fn a_header_that_can_not_be_used_is_refused_with_the_reason() {
    for (offset, data, reason) in [
        (0, &b"QFI\xfa"[..], "not a qcow2 image"),
        (4, &[0, 0, 0, 4], "qcow2 version 4 is not supported"),
        (
            79,
            &[1],
            "the qcow2 image is dirty: it was not closed; repair it with `qemu-img check -r all`",
        ),
        (
            79,
            &[2],
            "the qcow2 image is marked corrupt; repair it with `qemu-img check -r all`",
        ),
        (79, &[4], "the qcow2 image keeps its data in an external file"),
        (79, &[16], "the qcow2 image has extended L2 entries"),
        (
            78,
            &[4],
            "the qcow2 image has unknown incompatible features 0x400",
        ),
        (35, &[2], "the qcow2 image is encrypted"),
        (
            15,
            &[200],
            "the qcow2 image names a backing file, but no backing file was given: vmmd never follows such a name",
        ),
        (
            20,
            &[0, 0, 0, 8],
            "the qcow2 header is damaged: clusters of 2^8 bytes",
        ),
        (
            20,
            &[0xff; 4],
            "the qcow2 header is damaged: clusters of 2^4294967295 bytes",
        ),
        (
            100,
            &[0, 0, 0, 50],
            "the qcow2 header is damaged: it is 50 bytes long",
        ),
        (
            96,
            &[0, 0, 0, 7],
            "the qcow2 header is damaged: refcounts of 2^7 bits",
        ),
        (
            36,
            &[0xff; 4],
            "the qcow2 header is damaged: the L1 table has 4294967295 entries",
        ),
        (
            36,
            &[0, 0, 0, 1],
            "the qcow2 header is damaged: an L1 table of 1 entries is too small for a disk of 4194304 bytes",
        ),
        (
            40,
            &[0xff; 8],
            "the qcow2 header is damaged: the L1 table is at 0xffffffffffffffff",
        ),
        (
            48,
            &[0xff; 8],
            "the qcow2 header is damaged: the refcount table is at 0xffffffffffffffff",
        ),
        (
            56,
            &[0xff; 4],
            "the qcow2 header is damaged: the refcount table is 17592186040320 bytes long",
        ),
        (
            60,
            &[0xff; 4],
            "the qcow2 header is damaged: 4294967295 snapshots",
        ),
        (
            24,
            &[0xff; 8],
            "the qcow2 image is too large: a disk of 18446744073709551615 bytes, the limit is 70368744177664",
        ),
        (24, &[0; 8], "the image is empty"),
        (31, &[1], "size of 4194305 bytes is not a multiple of 512"),
    ] {
        assert_eq!(refusal(false, &[(offset, data)]), reason);
        assert_eq!(refusal(true, &[(offset, data)]), reason);
    }
    assert_eq!(
        refusal(true, &[(79, &[8]), (103, &[112]), (104, &[1])]),
        "the qcow2 image is compressed with zstd, only deflate is supported"
    );
}

#[test]
fn a_file_that_is_too_short_or_empty_is_no_image() {
    for content in [vec![], b"QFI\xfb".to_vec(), vec![0; 4096]] {
        let error = try_open(&Recorder::new(content), false, Vec::new()).unwrap_err();
        assert_eq!(error.to_string(), "not a qcow2 image");
    }
}

#[test]
fn snapshots_and_bitmaps_can_only_be_read() {
    for (offset, data, reason) in [
        (
            63,
            [3],
            "the qcow2 image has 3 internal snapshots: such images can be used read-only",
        ),
        (
            95,
            [1],
            "the qcow2 image has persistent bitmaps: such images can be used read-only",
        ),
    ] {
        assert_eq!(refusal(false, &[(offset, &data)]), reason);
        let recorder = image(4 << 20, 4096);
        recorder.patch(offset, &data);
        assert!(try_open(&recorder, true, Vec::new()).is_ok());
    }
}

#[test]
fn a_backing_image_is_given_for_an_overlay_and_for_nothing_else() {
    let overlay = || overlay(1 << 20, 4096, "raw");
    let base = || Recorder::new(vec![7; 1 << 20]);
    let error = |image: &Arc<Recorder>, below| try_open(image, false, below).unwrap_err().to_string();
    let none_wanted = "a backing image was given, but the qcow2 image is not an overlay";
    assert!(try_open(&overlay(), false, vec![Below::Raw(base())]).is_ok());
    assert!(error(&overlay(), vec![]).contains("never follows"));
    assert!(error(&overlay(), vec![Below::Qcow2(overlay())]).contains("never follows"));
    assert_eq!(
        error(&image(1 << 20, 4096), vec![Below::Raw(base())]),
        none_wanted
    );
    assert_eq!(
        error(&overlay(), vec![Below::Raw(base()), Below::Raw(base())]),
        none_wanted
    );
    assert_eq!(
        error(
            &overlay(),
            vec![Below::Qcow2(image(1 << 20, 4096)), Below::Raw(base())]
        ),
        none_wanted
    );
    assert_eq!(error(&overlay(), vec![Below::Qcow2(base())]), "not a qcow2 image");
}

#[test]
fn tables_that_contradict_themselves_are_refused() {
    let written = || {
        let recorder = image(4 << 20, 4096);
        let disk = open(&recorder);
        Guest::new(&disk).write(0, &[1; 8192]).unwrap();
        drop(disk);
        recorder
    };
    let at = |recorder: &Recorder, offset: usize| {
        u64::from_be_bytes(recorder.content()[offset..offset + 8].try_into().unwrap())
    };
    let l1 = |recorder: &Recorder| at(recorder, 40);
    let l2 = |recorder: &Recorder| at(recorder, l1(recorder) as usize) & 0x00ff_ffff_ffff_fe00;
    let reason = |recorder: &Arc<Recorder>| {
        let error = try_open(recorder, false, Vec::new()).unwrap_err().to_string();
        let start = "the qcow2 image is corrupt: ";
        error
            .strip_prefix(start)
            .unwrap_or_else(|| panic!("{error}"))
            .to_owned()
    };
    // Two entries for one cluster.
    let recorder = written();
    let table = l2(&recorder);
    let entry = at(&recorder, table as usize);
    recorder.patch(table + 8, &entry.to_be_bytes());
    assert!(reason(&recorder).ends_with("is used for something else, too"));
    // Data in the L1 table.
    let recorder = written();
    let entry = l1(&recorder) | 1 << 63;
    recorder.patch(l2(&recorder), &entry.to_be_bytes());
    assert!(reason(&recorder).ends_with("is used for something else, too"));
    // Behind the end, not aligned, reserved bits, not the only one.
    for (entry, expected) in [
        (1_u64 << 63 | 1 << 40, "lies behind the end of the file"),
        (1 << 63 | 512, "is not at the beginning of a cluster"),
        (1 << 63 | 2, "is invalid"),
        (1 << 62, "is invalid"),
        (0x00ff_0000_0000_0000, "lies behind the end of the file"),
    ] {
        let recorder = written();
        recorder.patch(l2(&recorder), &entry.to_be_bytes());
        let reason = reason(&recorder);
        assert!(reason.ends_with(expected), "{reason}");
    }
    // A refcount that is too low.
    let recorder = written();
    let block = at(&recorder, at(&recorder, 48) as usize);
    recorder.patch(block, &[0, 0]);
    assert_eq!(reason(&recorder), "cluster 0 is used 1 times, its refcount is 0");
    // No refcounts at all.
    let recorder = written();
    let table = at(&recorder, 48);
    recorder.patch(table, &[0; 8]);
    assert_eq!(reason(&recorder), "cluster 0 is used 1 times, its refcount is 0");
}

#[test]
fn clusters_that_leaked_are_freed_at_the_next_opening() {
    let recorder = image(4 << 20, 4096);
    let content = recorder.content();
    let table = u64::from_be_bytes(content[48..56].try_into().unwrap()) as usize;
    let block = u64::from_be_bytes(content[table..table + 8].try_into().unwrap());
    recorder.patch(block + 200, &[0, 1, 0, 5]);
    assert_eq!(report(&recorder).leaks, 2);
    assert!(try_open(&recorder, true, Vec::new()).is_ok());
    assert_eq!(report(&recorder).leaks, 2);
    drop(open(&recorder));
    assert_eq!(report(&recorder).leaks, 0);
    assert!(recorder.content() == content);
}
