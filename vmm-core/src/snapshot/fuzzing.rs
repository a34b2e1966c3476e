//! Entry points for fuzzers and tests with data of their own (`vmm-core/fuzz`).

use super::{
    Snapshot,
    format::{CHECKSUM, HEADER, Header, MEMORY_OFFSET, PAGE},
};

/// Reads a snapshot and all of its memory. `data` determines the content. The checksums of header
/// and sections are correct, since a fuzzer cannot find them.
///
/// Byte 0 is the number of pages of memory; then come sections, each with its length in two bytes
/// (little-endian).
pub fn snapshot(data: &[u8]) {
    let Some((pages, rest)) = data.split_first() else {
        return;
    };
    let sections_offset = MEMORY_OFFSET + u64::from(*pages) * (PAGE + CHECKSUM);
    let mut file = vec![0; usize::try_from(sections_offset).unwrap_or(0)];
    let (mut rest, mut sections) = (rest, 0_u32);
    while let Some((length, behind)) = rest.split_first_chunk() {
        let length = usize::from(u16::from_le_bytes(*length)).min(behind.len());
        let (message, behind) = behind.split_at(length);
        let length = u32::try_from(message.len()).unwrap_or(0).to_le_bytes();
        let checksum = crc32c::crc32c_append(crc32c::crc32c(&length), message);
        file.extend(length);
        file.extend(checksum.to_le_bytes());
        file.extend(message);
        rest = behind;
        sections += 1;
    }
    let header = Header {
        file_length: file.len() as u64,
        sections_offset,
        sections_length: file.len() as u64 - sections_offset,
        sections,
    };
    if let Some(block) = file.get_mut(..HEADER) {
        block.copy_from_slice(&header.encode());
    }
    if let Ok(snapshot) = Snapshot::open(file.as_slice()) {
        let _damaged = snapshot.check_memory();
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use proptest::prelude::*;
    use prost::Message as _;
    use vmm_protocol::state::{Clock, Section, SnapshotInfo};

    use crate::snapshot::format::Layout;

    /// Two pages of zeroes and the sections of a snapshot.
    fn seed() -> Vec<u8> {
        let table = [super::super::memory::CHECKSUM_OF_ZEROES.to_le_bytes(); 2].concat();
        let memory = Layout::new([(0, 4096), (1 << 32, 4096)]).message(crc32c::crc32c(&table));
        let sections = [
            Section::new("snapshot", &SnapshotInfo::default()),
            Section::new("snapshot", &memory),
            Section::new("kvmclock", &Clock::default()),
        ];
        let mut seed = vec![2];
        for section in sections {
            let message = section.encode_to_vec();
            seed.extend(u16::try_from(message.len()).unwrap().to_le_bytes());
            seed.extend(message);
        }
        seed
    }

    #[test]
    fn the_seeds_of_snapshot_do_no_harm() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/snapshot");
        if std::env::var_os("VMMD_WRITE_GOLDEN").is_some() {
            fs::write(folder.join("sections"), seed()).unwrap();
        }
        let mut count = 0;
        for entry in fs::read_dir(&folder).unwrap() {
            super::snapshot(&fs::read(entry.unwrap().path()).unwrap());
            count += 1;
        }
        assert!(count > 0, "no seeds in {}", folder.display());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_sections_do_harm(changes in proptest::collection::vec((any::<usize>(), any::<u8>()), 0..6)) {
            let mut data = seed();
            for (place, value) in changes {
                let place = place % data.len();
                data[place] = value;
            }
            super::snapshot(&data);
        }

        #[test]
        fn no_bytes_do_harm(data in proptest::collection::vec(any::<u8>(), 0..600)) {
            super::snapshot(&data);
        }
    }
}
