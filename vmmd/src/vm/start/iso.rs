//! ISO 9660 images with a few files in the root directory (ECMA-119), and a Joliet directory that has the names as they are: the volume
//! identifier is the label, and readers without Joliet get the names in capital letters.

/// Bytes of a logical sector and block.
const SECTOR: usize = 2048;
/// Sectors behind the two trees: the end of the descriptors, and the first file.
const TERMINATOR: usize = 18;
const FILES: usize = 25;
/// Begin of each volume descriptor behind its type: identifier and version (8.1).
const STANDARD: &[u8] = b"CD001\x01";
/// UCS-2 level 3 (Joliet Specification, "Escape Sequences").
const JOLIET: &[u8] = b"%/E";
/// File flags of a directory record: it is a directory (9.1.6).
const DIRECTORY: u8 = 2;
/// Identifiers of a directory itself and its parent (7.6.2).
const SELF: &[u8] = &[0];
const PARENT: &[u8] = &[1];

/// One of the two directory trees, with the sectors of its parts.
struct Tree {
    joliet: bool,
    descriptor: usize,
    /// Path tables in both byte orders.
    tables: [usize; 2],
    /// The root directory.
    root: usize,
}

const TREES: [Tree; 2] = [
    Tree {
        joliet: false,
        descriptor: 16,
        tables: [19, 20],
        root: 23,
    },
    Tree {
        joliet: true,
        descriptor: 17,
        tables: [21, 22],
        root: 24,
    },
];

/// An image with this label and these files, whose directory fits a sector. It is at least `length` bytes long. The same input gives the
/// same image.
pub fn image(label: &str, files: &[(&str, Vec<u8>)], length: usize) -> Vec<u8> {
    let mut extents = Vec::new();
    let mut next = FILES;
    for (name, content) in files {
        extents.push((*name, next, content.len()));
        next += content.len().div_ceil(SECTOR);
    }
    extents.sort_by_key(|(name, ..)| *name);
    let sectors = next.max(length.div_ceil(SECTOR));
    let mut image = vec![0; sectors * SECTOR];
    let mut put = |sector: usize, bytes: &[u8]| {
        let place = image.get_mut(sector * SECTOR..).unwrap_or_default();
        for (to, from) in place.iter_mut().zip(bytes) {
            *to = *from;
        }
    };
    for tree in &TREES {
        put(tree.descriptor, &descriptor(tree, label, sectors));
        let [little, big] = tree.tables;
        let root = u32::try_from(tree.root).unwrap_or(0);
        // The only record: that of the root directory (9.4).
        put(
            little,
            &[&[1, 0][..], &root.to_le_bytes(), &1_u16.to_le_bytes(), &[0, 0]].concat(),
        );
        put(
            big,
            &[&[1, 0][..], &root.to_be_bytes(), &1_u16.to_be_bytes(), &[0, 0]].concat(),
        );
        put(tree.root, &directory(tree, &extents));
    }
    put(TERMINATOR, &[&[255][..], STANDARD].concat());
    for (name, at, _) in &extents {
        let content = files.iter().find(|(file, _)| file == name);
        put(*at, content.map_or(&[], |(_, content)| content));
    }
    image
}

/// A volume descriptor (8.4, 8.5).
fn descriptor(tree: &Tree, label: &str, sectors: usize) -> Vec<u8> {
    let text = |text: &str, length: usize| match tree.joliet {
        false => padded(text.as_bytes(), length, b" "),
        true => padded(&ucs2(text), length, &[0, b' ']),
    };
    // Types of a primary and a supplementary descriptor.
    let (kind, escapes, blank) = match tree.joliet {
        false => (1, &[][..], b' '),
        true => (2, JOLIET, 0),
    };
    let [little, big] = tree.tables;
    let location = |sector: usize| u32::try_from(sector).unwrap_or(0);
    let mut bytes = vec![kind];
    bytes.extend(STANDARD);
    bytes.push(0);
    bytes.extend(text("", 32));
    bytes.extend(text(label, 32));
    bytes.extend([0; 8]);
    bytes.extend(both_32(sectors));
    bytes.extend(padded(escapes, 32, &[0]));
    // Volumes in the set, number of this one, block size.
    for number in [1, 1, SECTOR] {
        bytes.extend(both_16(number));
    }
    // The path table has one record of 10 bytes.
    bytes.extend(both_32(10));
    bytes.extend(location(little).to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(location(big).to_be_bytes());
    bytes.extend([0; 4]);
    bytes.extend(record(SELF, tree.root, SECTOR, DIRECTORY));
    // Volume set, publisher, preparer, application; copyright, abstract and bibliographic file.
    bytes.extend(text("", 4 * 128));
    bytes.extend(padded(&[], 3 * 37, &[blank]));
    // Four dates that are not given (8.4.26.1): sixteen zeroes as digits, and the offset from UTC.
    for _date in 0..4 {
        bytes.extend([b'0'; 16]);
        bytes.push(0);
    }
    // Version of the file structure.
    bytes.push(1);
    bytes
}

/// The root directory (9.1).
fn directory(tree: &Tree, files: &[(&str, usize, usize)]) -> Vec<u8> {
    let own = tree.root;
    let mut bytes = record(SELF, own, SECTOR, DIRECTORY);
    bytes.extend(record(PARENT, own, SECTOR, DIRECTORY));
    for (name, at, length) in files {
        let name = match tree.joliet {
            false => format!("{};1", name.to_uppercase()).into_bytes(),
            true => ucs2(name),
        };
        bytes.extend(record(&name, *at, *length, 0));
    }
    bytes
}

fn record(name: &[u8], at: usize, length: usize, flags: u8) -> Vec<u8> {
    const FIXED: usize = 33;
    let padding = usize::from(name.len().is_multiple_of(2));
    let whole = FIXED + name.len() + padding;
    let mut bytes = vec![u8::try_from(whole).unwrap_or(u8::MAX), 0];
    bytes.extend(both_32(at));
    bytes.extend(both_32(length));
    // The first second of 1970, in UTC (9.1.5).
    bytes.extend([70, 1, 1, 0, 0, 0, 0]);
    bytes.extend([flags, 0, 0]);
    bytes.extend(both_16(1));
    bytes.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
    bytes.extend(name);
    bytes.resize(whole, 0);
    bytes
}

fn ucs2(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_be_bytes).collect()
}

fn padded(bytes: &[u8], length: usize, with: &[u8]) -> Vec<u8> {
    let fill = with.iter().cycle().skip(bytes.len());
    bytes.iter().chain(fill).take(length).copied().collect()
}

/// 7.3.3: little-endian, then big-endian.
fn both_32(number: usize) -> Vec<u8> {
    let number = u32::try_from(number).unwrap_or(u32::MAX);
    [number.to_le_bytes(), number.to_be_bytes()].concat()
}

/// 7.2.3: the same in 16 bits.
fn both_16(number: usize) -> Vec<u8> {
    let number = u16::try_from(number).unwrap_or(u16::MAX);
    [number.to_le_bytes(), number.to_be_bytes()].concat()
}

/// A reader of such images, for tests: label and files of the Joliet tree.
#[cfg(test)]
pub fn read(image: &[u8]) -> (String, Vec<(String, Vec<u8>)>) {
    let number = |at: usize| u32::from_le_bytes(image[at..at + 4].try_into().unwrap()) as usize;
    let text = |bytes: &[u8]| {
        let units = bytes
            .chunks_exact(2)
            .map(|pair| u16::from_be_bytes([pair[0], pair[1]]));
        String::from_utf16(&units.collect::<Vec<_>>()).unwrap()
    };
    let descriptor = 17 * SECTOR;
    assert_eq!(image[descriptor..descriptor + 7], *b"\x02CD001\x01");
    let label = text(&image[descriptor + 40..descriptor + 72]).trim().to_owned();
    let (mut at, end) = (number(descriptor + 158) * SECTOR, number(descriptor + 166));
    let end = at + end;
    let mut files = Vec::new();
    while at < end && image[at] != 0 {
        let name = text(&image[at + 33..at + 33 + usize::from(image[at + 32])]);
        let (start, length) = (number(at + 2) * SECTOR, number(at + 10));
        if image[at + 25] & DIRECTORY == 0 {
            files.push((name, image[start..start + length].to_vec()));
        }
        at += usize::from(image[at]);
    }
    (label, files)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn image_has_its_label_and_files_in_both_trees() {
        let files = [
            ("user-data", b"#cloud-config\n".to_vec()),
            ("empty", Vec::new()),
            ("meta-data", vec![7; 5000]),
        ];
        let made = image("cidata", &files, 1 << 20);
        assert_eq!(made.len(), 1 << 20);
        let (label, mut read) = read(&made);
        read.sort();
        let mut expected: Vec<_> = files.map(|(name, content)| (name.to_owned(), content)).into();
        expected.sort();
        assert_eq!((label.as_str(), read), ("cidata", expected));
        // The label where blkid reads it, and the names of the primary tree.
        assert_eq!(made[16 * SECTOR + 40..][..7], *b"cidata ");
        let root = String::from_utf8_lossy(&made[23 * SECTOR..24 * SECTOR]).into_owned();
        for name in ["EMPTY;1", "META-DATA;1", "USER-DATA;1"] {
            assert!(root.contains(name), "{name}");
        }
        assert_eq!(image("a", &[("b", vec![1; 9])], 0).len(), 26 * SECTOR);
    }

    /// Another reader, where the machine has it.
    #[test]
    fn isoinfo_reads_the_files() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let files = [("meta-data", b"instance-id: web\n".to_vec())];
        std::fs::write(file.path(), image("cidata", &files, 0)).unwrap();
        let isoinfo = |more: &[&str]| {
            let run = Command::new("isoinfo")
                .arg("-i")
                .arg(file.path())
                .args(more)
                .output();
            run.ok().map(|output| String::from_utf8(output.stdout).unwrap())
        };
        let Some(described) = isoinfo(&["-d"]) else { return };
        assert!(described.contains("Volume id: cidata"), "{described}");
        let content = isoinfo(&["-J", "-x", "/meta-data"]).unwrap();
        assert_eq!(content, "instance-id: web\n");
    }
}
