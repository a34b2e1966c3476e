//! Entry point of the fuzz target for archives (`vmmd/fuzz`). It accepts any bytes as an archive,
//! or as parts to which it adds valid checksums. It panics when the reader accepts an invalid part.
//! The tests here run it over the seeds and over generated input.

use super::archive::{Damaged, MAX_DATA, MAX_RECORD, Part, Reader, Writer};

/// Reads an archive and checks the parts. With an even first byte the rest is an archive. Otherwise
/// the rest is a list of parts, each with a byte for its kind, its length in two bytes
/// (little-endian) and its content.
pub fn snapshot_archive(data: &[u8]) {
    let Some((how, rest)) = data.split_first() else {
        return;
    };
    let archive = match how % 2 {
        0 => rest.to_vec(),
        _ => sealed(rest),
    };
    let whole = read(&archive, archive.len().max(1));
    assert_eq!(
        whole,
        read(&archive, usize::from(how / 2).max(1)),
        "pieces matter"
    );
    if let Ok(parts) = whole {
        let (mut writer, mut again) = Writer::begin();
        for part in &parts {
            again.extend(writer.part(part));
        }
        assert_eq!(again, archive, "something was not read");
    }
}

fn sealed(mut rest: &[u8]) -> Vec<u8> {
    let (mut writer, mut archive) = Writer::begin();
    while let Some(([kind, length @ ..], behind)) = rest.split_first_chunk::<3>() {
        let length = usize::from(u16::from_le_bytes(*length)).min(behind.len());
        let (content, behind) = behind.split_at(length);
        archive.extend(writer.bytes(u32::from(*kind), &[content]));
        rest = behind;
    }
    archive
}

/// Reads the parts of an archive in pieces of this length. Asserts the properties on which an
/// import relies.
fn read(archive: &[u8], piece: usize) -> Result<Vec<Part>, Damaged> {
    let (mut reader, mut parts) = (Reader::new(), Vec::new());
    for mut piece in archive.chunks(piece) {
        while let Some(part) = reader.next(&mut piece)? {
            parts.push(part);
        }
        assert!(piece.is_empty(), "something is left");
    }
    assert_eq!(reader.position(), archive.len() as u64);
    reader.finish()?;
    let (mut files, mut from, mut within) = (0, 0, 0);
    for (number, part) in parts.iter().enumerate() {
        match part {
            Part::Record(record) => assert!(number == 0 && (1..=MAX_RECORD).contains(&record.len())),
            Part::File { number, length } => {
                assert_eq!(*number, files);
                (files, from, within) = (files + 1, 0, *length);
            }
            Part::Data { offset, bytes } => {
                assert!(*offset >= from && (1..=MAX_DATA).contains(&bytes.len()) && files > 0);
                from = offset.saturating_add(bytes.len() as u64);
                assert!(from <= within);
            }
            Part::End => assert!(number == parts.len() - 1 && files > 0),
        }
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use proptest::prelude::*;

    use super::*;

    fn said(kind: u8, content: &[u8]) -> Vec<u8> {
        let length = u16::try_from(content.len()).unwrap().to_le_bytes();
        [&[kind][..], &length, content].concat()
    }

    fn file(number: u32, length: u64) -> Vec<u8> {
        said(
            2,
            &[number.to_le_bytes().as_slice(), &length.to_le_bytes()].concat(),
        )
    }

    fn data(offset: u64, bytes: &[u8]) -> Vec<u8> {
        said(3, &[offset.to_le_bytes().as_slice(), bytes].concat())
    }

    fn parts() -> Vec<Vec<u8>> {
        vec![
            said(1, b"record"),
            file(0, 1 << 40),
            data(0, b"first"),
            data((1 << 40) - 4, b"last"),
            file(1, 5),
            data(0, b"whole"),
            said(4, b""),
        ]
    }

    fn seeds() -> Vec<(&'static str, Vec<u8>)> {
        let parts = parts().concat();
        vec![
            ("parts", [&[7], parts.as_slice()].concat()),
            ("archive", [&[8], sealed(&parts).as_slice()].concat()),
            ("no_record", [&[1][..], &file(0, 1), &said(4, b"")].concat()),
            (
                "data_beyond_the_file",
                [&[1][..], &said(1, b"r"), &file(0, 1), &data(u64::MAX, b"xx")].concat(),
            ),
            ("unknown", [&[1][..], &said(1, b"r"), &said(9, b"?")].concat()),
        ]
    }

    #[test]
    fn the_seeds_of_archives_do_no_harm() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/snapshot_archive");
        if std::env::var_os("VMMD_WRITE_GOLDEN").is_some() {
            for (name, seed) in seeds() {
                fs::write(folder.join(name), seed).unwrap();
            }
        }
        let mut count = 0;
        for entry in fs::read_dir(&folder).unwrap() {
            snapshot_archive(&fs::read(entry.unwrap().path()).unwrap());
            count += 1;
        }
        assert!(count >= seeds().len(), "{count} seeds in {}", folder.display());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn parts_in_any_order_and_changed_anywhere_do_no_harm(
            order in prop::collection::vec(0..parts().len(), 0..9),
            changes in prop::collection::vec((any::<usize>(), any::<u8>()), 0..4),
            how in any::<u8>(),
        ) {
            let parts = parts();
            let order = order.iter().flat_map(|which| parts[*which].clone());
            let mut data: Vec<u8> = [how].into_iter().chain(parts[..2].concat()).chain(order).collect();
            for (place, value) in changes {
                let place = place % data.len();
                data[place] = value;
            }
            snapshot_archive(&data);
        }

        #[test]
        fn no_bytes_do_harm(data in prop::collection::vec(any::<u8>(), 0..600)) {
            snapshot_archive(&data);
        }
    }
}
