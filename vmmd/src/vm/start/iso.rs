//! ISO 9660 images with a few files (ECMA-119), and a second tree of directories (Joliet) that has the names as they are: the volume
//! identifier is the label, and readers without Joliet get the names in capital letters.

use std::collections::BTreeSet;

/// Bytes of a logical sector and block.
const SECTOR: usize = 2048;
/// Sector of the end of the descriptors.
const TERMINATOR: usize = 18;
/// The first sector of the directories of both trees, a sector for each. The files follow.
const DIRECTORIES: usize = 23;
/// Begin of each volume descriptor behind its type: identifier and version (8.1).
const STANDARD: &[u8] = b"CD001\x01";
/// UCS-2 level 3 (Joliet Specification, "Escape Sequences").
const JOLIET: &[u8] = b"%/E";
/// File flags of a directory record: it is a directory (9.1.6).
const DIRECTORY: u8 = 2;
/// Identifiers of a directory itself and its parent (7.6.2).
const SELF: &[u8] = &[0];
const PARENT: &[u8] = &[1];

/// A directory, as the path tables number them: by level, then by path (6.9.1). The first one is the root.
struct Directory<'a> {
    /// Without slashes at its ends; empty for the root.
    path: &'a str,
    /// Number of its parent, from 0; the root is its own.
    parent: usize,
}

impl Directory<'_> {
    /// Identifier in its parent.
    fn name(&self) -> &str {
        split(self.path).1
    }
}

/// A file.
struct Extent<'a> {
    path: &'a str,
    sector: usize,
    length: usize,
}

/// One of the two trees of directories, with the sectors of its parts.
struct Tree<'a> {
    joliet: bool,
    descriptor: usize,
    /// Path tables in both byte orders.
    tables: [usize; 2],
    /// The first directory, which is the root.
    root: usize,
    directories: &'a [Directory<'a>],
}

/// The directory of a path, and its name there.
fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

/// All directories of files with these paths.
fn directories<'a>(paths: impl Iterator<Item = &'a str>) -> Vec<Directory<'a>> {
    let level = |path: &str| match path {
        "" => 0,
        path => 1 + path.matches('/').count(),
    };
    let mut found = BTreeSet::from([(0, "")]);
    for path in paths {
        let mut directory = split(path).0;
        while !directory.is_empty() {
            found.insert((level(directory), directory));
            directory = split(directory).0;
        }
    }
    let found: Vec<_> = found.into_iter().map(|(_, path)| path).collect();
    let number = |path: &str| found.iter().position(|other| *other == path);
    let directory = |path: &&'a str| Directory {
        path,
        parent: number(split(path).0).unwrap_or(0),
    };
    found.iter().map(directory).collect()
}

/// An image with this label and these files, by their paths; each directory, and all their names, fit a sector. It is at least
/// `length` bytes long. The same input gives the same image.
pub fn image(label: &str, files: &[(&str, Vec<u8>)], length: usize) -> Vec<u8> {
    let directories = directories(files.iter().map(|(path, _)| *path));
    let trees = [(false, 16, [19, 20], 0), (true, 17, [21, 22], 1)];
    let trees = trees.map(|(joliet, descriptor, tables, number)| Tree {
        joliet,
        descriptor,
        tables,
        root: DIRECTORIES + number * directories.len(),
        directories: &directories,
    });
    let mut extents = Vec::new();
    let mut next = DIRECTORIES + trees.len() * directories.len();
    for (path, content) in files {
        extents.push(Extent {
            path,
            sector: next,
            length: content.len(),
        });
        next += content.len().div_ceil(SECTOR);
    }
    extents.sort_by_key(|extent| extent.path);
    let sectors = next.max(length.div_ceil(SECTOR));
    let mut image = vec![0; sectors * SECTOR];
    let mut put = |sector: usize, bytes: &[u8]| {
        let place = image.get_mut(sector * SECTOR..).unwrap_or_default();
        for (to, from) in place.iter_mut().zip(bytes) {
            *to = *from;
        }
    };
    for tree in &trees {
        put(tree.descriptor, &descriptor(tree, label, sectors));
        let [little, big] = tree.tables;
        put(little, &path_table(tree, u32::to_le_bytes, u16::to_le_bytes));
        put(big, &path_table(tree, u32::to_be_bytes, u16::to_be_bytes));
        for number in 0..directories.len() {
            put(tree.root + number, &directory(tree, number, &extents));
        }
    }
    put(TERMINATOR, &[&[255][..], STANDARD].concat());
    for extent in &extents {
        let content = files.iter().find(|(path, _)| *path == extent.path);
        put(extent.sector, content.map_or(&[], |(_, content)| content));
    }
    image
}

/// The records of all directories (9.4), in one byte order.
fn path_table(tree: &Tree<'_>, long: fn(u32) -> [u8; 4], short: fn(u16) -> [u8; 2]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (number, directory) in tree.directories.iter().enumerate() {
        let name = match number {
            0 => SELF.to_vec(),
            _ => tree.identifier(directory.name()),
        };
        bytes.extend([u8::try_from(name.len()).unwrap_or(u8::MAX), 0]);
        bytes.extend(long(u32::try_from(tree.root + number).unwrap_or(0)));
        bytes.extend(short(u16::try_from(directory.parent + 1).unwrap_or(0)));
        bytes.extend(&name);
        bytes.extend([0][..name.len() % 2].iter());
    }
    bytes
}

impl Tree<'_> {
    /// A name as directories have it.
    fn identifier(&self, name: &str) -> Vec<u8> {
        match self.joliet {
            false => name.to_uppercase().into_bytes(),
            true => ucs2(name),
        }
    }
}

/// A volume descriptor (8.4, 8.5).
fn descriptor(tree: &Tree<'_>, label: &str, sectors: usize) -> Vec<u8> {
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
    bytes.extend(both_32(
        path_table(tree, u32::to_le_bytes, u16::to_le_bytes).len(),
    ));
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

/// The directory with this number (9.1).
fn directory(tree: &Tree<'_>, number: usize, files: &[Extent<'_>]) -> Vec<u8> {
    let Some(own) = tree.directories.get(number) else {
        return Vec::new();
    };
    let mut bytes = record(SELF, tree.root + number, SECTOR, DIRECTORY);
    bytes.extend(record(PARENT, tree.root + own.parent, SECTOR, DIRECTORY));
    let mut entries = Vec::new();
    for (index, directory) in tree.directories.iter().enumerate().skip(1) {
        if directory.parent == number {
            let name = tree.identifier(directory.name());
            entries.push((name.clone(), record(&name, tree.root + index, SECTOR, DIRECTORY)));
        }
    }
    for file in files.iter().filter(|file| split(file.path).0 == own.path) {
        let mut name = tree.identifier(split(file.path).1);
        if !tree.joliet {
            name.extend(b";1");
        }
        entries.push((name.clone(), record(&name, file.sector, file.length, 0)));
    }
    entries.sort();
    bytes.extend(entries.into_iter().flat_map(|(_, record)| record));
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
    let mut files = Vec::new();
    let mut directories = vec![(String::new(), number(descriptor + 158))];
    while let Some((path, sector)) = directories.pop() {
        let mut at = sector * SECTOR;
        let end = at + SECTOR;
        while at < end && image[at] != 0 {
            let name = &image[at + 33..at + 33 + usize::from(image[at + 32])];
            let (start, length) = (number(at + 2), number(at + 10));
            let full = || format!("{path}{}", text(name));
            match (image[at + 25] & DIRECTORY, name) {
                (0, _) => files.push((full(), image[start * SECTOR..][..length].to_vec())),
                (_, SELF | PARENT) => {}
                _ => directories.push((full() + "/", start)),
            }
            at += usize::from(image[at]);
        }
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

    /// Another reader.
    #[test]
    fn isoinfo_reads_the_files() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let files = [
            ("meta-data", b"instance-id: web\n".to_vec()),
            ("openstack/latest/user_data", b"#!/bin/sh\n".to_vec()),
            ("openstack/content/0000", b"0".to_vec()),
        ];
        std::fs::write(file.path(), image("cidata", &files, 0)).unwrap();
        let isoinfo = |more: &[&str]| {
            let run = Command::new("isoinfo")
                .arg("-i")
                .arg(file.path())
                .args(more)
                .output();
            let output = run.expect("isoinfo is missing: .ci/setup installs genisoimage");
            String::from_utf8(output.stdout).unwrap()
        };
        let described = isoinfo(&["-d"]);
        assert!(described.contains("Volume id: cidata"), "{described}");
        let content = isoinfo(&["-J", "-x", "/meta-data"]);
        assert_eq!(content, "instance-id: web\n");
        for (tree, path) in [
            (&["-J"][..], "/openstack/latest/user_data"),
            (&[], "/OPENSTACK/LATEST/USER_DATA;1"),
        ] {
            let content = isoinfo(&[tree, &["-x", path]].concat());
            assert_eq!(content, "#!/bin/sh\n", "{path}");
        }
        let paths = isoinfo(&["-p"]);
        for name in ["OPENSTACK", "CONTENT", "LATEST"] {
            assert!(paths.contains(name), "{paths}");
        }
    }
}
