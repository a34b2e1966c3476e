use super::*;

/// A PE file with these sections, and what else is in its headers as ukify(1) has it.
pub fn pe(sections: &[(&str, &[u8])]) -> Vec<u8> {
    let mut file = vec![0; 0x80];
    file[..2].copy_from_slice(b"MZ");
    file[0x3c] = 0x80;
    file.extend(b"PE\0\0");
    file.extend(MACHINE.to_le_bytes());
    file.extend(u16::try_from(sections.len()).unwrap().to_le_bytes());
    file.extend([0; 12]);
    file.extend(240_u16.to_le_bytes());
    file.extend([0; 2 + 240]);
    let mut at = (file.len() + sections.len() * 40).next_multiple_of(512);
    for (name, content) in sections {
        let mut entry = [0; 40];
        entry[..name.len()].copy_from_slice(name.as_bytes());
        let padded = content.len().next_multiple_of(512);
        for (place, number) in [(8, content.len()), (12, at), (16, padded), (20, at)] {
            entry[place..place + 4].copy_from_slice(&u32::try_from(number).unwrap().to_le_bytes());
        }
        at += padded;
        file.extend(entry);
    }
    for (_, content) in sections {
        file.resize(file.len().next_multiple_of(512), 0);
        file.extend(*content);
    }
    file.resize(at, 0);
    file
}

pub const OS_RELEASE: &str =
    "ID=fedora\nPRETTY_NAME=\"Fedora Linux 42\"\nVERSION_ID=42\nIMAGE_VERSION='6.14'\n";

fn read(file: &[u8]) -> Option<Image> {
    image(&|range| {
        let range = usize::try_from(range.start).ok()?..usize::try_from(range.end).ok()?;
        file.get(range).map(<[u8]>::to_vec)
    })
}

fn sample() -> Vec<u8> {
    pe(&[
        (".text", b"code"),
        (".osrel", OS_RELEASE.as_bytes()),
        (".cmdline", b"root=LABEL=system\n quiet\0"),
        (".uname", b"6.14.0"),
        (".initrd", b"ramdisk"),
        (".linux", b"kernel"),
    ])
}

#[test]
fn an_image_has_its_parts_without_padding() {
    let file = sample();
    let found = read(&file).unwrap();
    let part = |range: &Range<u64>| {
        let range = usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap();
        file[range].to_vec()
    };
    assert_eq!(part(&found.kernel), b"kernel");
    assert_eq!(part(found.initrd.as_ref().unwrap()), b"ramdisk");
    assert_eq!(found.cmdline, "root=LABEL=system quiet");
    assert_eq!(
        (
            found.title.as_str(),
            found.sort_key.as_str(),
            found.version.as_str()
        ),
        ("Fedora Linux 42", "fedora", "6.14")
    );
}

#[test]
fn of_several_profiles_the_first_is_booted() {
    let file = pe(&[
        (".cmdline", b"common"),
        (".linux", b"kernel"),
        (".profile", b"ID=main"),
        (".cmdline", b"main"),
        (".profile", b"ID=reset"),
        (".cmdline", b"factory-reset"),
    ]);
    assert_eq!(read(&file).unwrap().cmdline, "main");
}

#[test]
fn what_is_no_image_or_lies_about_its_sections_is_none() {
    let file = sample();
    for length in [0, 1, 63, 0x80, 0x90, 0x180, 0x200, file.len() - 512] {
        assert_eq!(read(&file[..length]), None, "{length}");
    }
    let changed = |at: usize, bytes: &[u8]| {
        let mut file = file.clone();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        read(&file)
    };
    // Magic numbers, the machine, the header's place, the number of sections, the length of the optional header.
    assert_eq!(changed(0, b"ZM"), None);
    assert_eq!(changed(0x3c, &u32::MAX.to_le_bytes()), None);
    assert_eq!(changed(0x80, b"NE"), None);
    assert_eq!(changed(0x84, &0xaa64_u16.to_le_bytes()), None);
    assert_eq!(changed(0x86, &0_u16.to_le_bytes()), None);
    assert_eq!(changed(0x86, &u16::MAX.to_le_bytes()), None);
    assert_eq!(changed(0x94, &u16::MAX.to_le_bytes()), None);
    let section = |index: usize, field: usize| 0x80 + 24 + 240 + 40 * index + field;
    for index in [2, 4, 5] {
        // Behind the end of the file, and longer than it.
        assert_eq!(changed(section(index, 20), &u32::MAX.to_le_bytes()), None);
        let mut giant = [0; 12];
        giant[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        giant[8..].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(changed(section(index, 8), &giant), None);
    }
    // A kernel without bytes.
    assert_eq!(changed(section(5, 8), &[0; 4]), None);
    assert_eq!(read(&pe(&[(".initrd", b"ramdisk")])), None);
    // Two sections with the same bytes do no harm: each has the range that it claims.
    let start = u32::try_from(read(&file).unwrap().kernel.start).unwrap();
    let overlapping = changed(section(4, 20), &start.to_le_bytes()).unwrap();
    assert_eq!(overlapping.initrd.unwrap().start, overlapping.kernel.start);
}

proptest::proptest! {
    #[test]
    fn no_change_of_an_image_does_harm(changes in proptest::collection::vec((0..0x280_usize, proptest::num::u8::ANY), 1..8)) {
        let mut file = sample();
        for (at, value) in changes {
            file[at] = value;
        }
        if let Some(image) = read(&file) {
            assert!(image.kernel.end <= file.len() as u64);
        }
    }
}
