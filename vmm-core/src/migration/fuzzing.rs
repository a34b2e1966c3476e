//! Entry points for fuzzers and tests with data of their own (`vmm-core/fuzz`).

use std::fs::File;

use block::{Content, Image as _, RawImage};
use prost::Message as _;
use vm_memory::GuestAddress;
use vmm_base::GuestMemory;

use super::{
    ReceivedBoot, ReceivedDisk,
    format::{Kind, MAGIC, VERSION, frame},
    receive,
};
use crate::snapshot::format::Layout;

/// Where a small machine has memory, as on both sides of a hole: (address, pages).
const RANGES: [(u64, u8); 2] = [(0, 16), (1 << 32, 8)];

/// Bytes of the machine's disk.
const DISK: u64 = 64 << 10;

/// Receives a machine with a disk "root". `data` says which frames come after the first; their checksums are right, since no fuzzer finds those.
///
/// Each frame is its kind in a byte, the length of its body in two bytes (little-endian), and the body.
pub fn stream(data: &[u8]) {
    let ranges = RANGES.map(|(address, pages)| (address, u64::from(pages) * 4096));
    let regions = RANGES.map(|(address, pages)| (GuestAddress(address), usize::from(pages) * 4096));
    let Ok(memory) = GuestMemory::from_ranges(&regions) else {
        return;
    };
    let mut bytes = [&MAGIC[..], &VERSION.to_le_bytes()].concat();
    let mut push = |kind: Kind, body: &[u8]| {
        bytes.extend(frame(kind, &[body]));
        bytes.extend(body);
    };
    push(Kind::Memory, &Layout::new(ranges).message(0).encode_to_vec());
    let mut rest = data;
    while let Some(([kind, low, high], behind)) = rest.split_first_chunk() {
        let length = usize::from(u16::from_le_bytes([*low, *high])).min(behind.len());
        let (body, behind) = behind.split_at(length);
        push(Kind::of((*kind).into()).unwrap_or(Kind::End), body);
        rest = behind;
    }
    let Some(disk) = disk() else {
        return;
    };
    let (Some(kernel), Some(initrd)) = (memory_file("kernel"), memory_file("initrd")) else {
        return;
    };
    let mut boot = ReceivedBoot::new(kernel, initrd);
    let _taken_or_refused = receive(
        bytes.as_slice(),
        &memory,
        &mut [disk],
        Some(&mut boot),
        &mut |_| Ok(()),
    );
}

fn memory_file(name: &str) -> Option<File> {
    let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).ok()?;
    Some(file.into())
}

/// Of memory.
fn disk() -> Option<ReceivedDisk> {
    let file = memory_file("disk")?;
    file.set_len(DISK).ok()?;
    let image = RawImage::open_unlocked(file.into(), false).ok()?;
    let content = Content::new(image.access().ok()?, DISK).ok()?;
    Some(ReceivedDisk::new("root", content))
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use proptest::prelude::*;
    use vmm_protocol::state::{Clock, Section, SnapshotInfo};

    use super::*;

    /// Boot files, a disk and a part of it, a page, a page of zeroes, and the sections of a machine in two parts each.
    fn seed() -> Vec<u8> {
        let mut seed = Vec::new();
        let mut push = |kind: u8, body: &[u8]| {
            seed.push(kind);
            seed.extend(u16::try_from(body.len()).unwrap().to_le_bytes());
            seed.extend(body);
        };
        let of_disk = |rest: &[&[u8]]| [&0_u32.to_le_bytes()[..], &rest.concat()].concat();
        for body in [&[0, 7, 7][..], &[1, 7], b"\x02quiet"] {
            push(10, body);
        }
        push(6, &of_disk(&[&DISK.to_le_bytes(), b"root"]));
        push(7, &of_disk(&[&4096_u64.to_le_bytes(), &[7; 1024]]));
        push(8, &of_disk(&[&4096_u64.to_le_bytes(), &512_u64.to_le_bytes()]));
        push(2, &[&0x1000_u64.to_le_bytes()[..], &[7; 4096]].concat());
        push(3, &[0x2000_u64.to_le_bytes(), 4096_u64.to_le_bytes()].concat());
        for section in [
            Section::new("snapshot", &SnapshotInfo::default()),
            Section::new("kvmclock", &Clock::default()),
        ] {
            let message = section.encode_to_vec();
            let (part, rest) = message.split_at(message.len() / 2);
            push(9, part);
            push(4, rest);
        }
        push(5, &13_u64.to_le_bytes());
        seed
    }

    #[test]
    fn the_seeds_of_migration_do_no_harm() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/migration");
        if std::env::var_os("VMMD_WRITE_GOLDEN").is_some() {
            fs::write(folder.join("frames"), seed()).unwrap();
        }
        let mut count = 0;
        for entry in fs::read_dir(&folder).unwrap() {
            super::stream(&fs::read(entry.unwrap().path()).unwrap());
            count += 1;
        }
        assert!(count > 0, "no seeds in {}", folder.display());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_frames_do_harm(changes in proptest::collection::vec((any::<usize>(), any::<u8>()), 0..6)) {
            let mut data = seed();
            for (place, value) in changes {
                let place = place % data.len();
                data[place] = value;
            }
            super::stream(&data);
        }

        #[test]
        fn no_bytes_do_harm(data in proptest::collection::vec(any::<u8>(), 0..600)) {
            super::stream(&data);
        }
    }
}
