//! What fuzzers and tests feed with bytes of their own (`vmm-core/fuzz`).

use std::{collections::BTreeMap, io, rc::Rc};

use super::{find, grub, medium::Medium};

/// Size of a disk in bytes. What is not in the input are zeroes.
const SIZE: u64 = 32 << 20;
const SECTOR: usize = 512;
/// First byte of an input that is a grub.cfg, and not a disk.
const GRUB: u8 = b'g';

/// Looks for a kernel. An input is the text of a grub.cfg behind the letter `g`, or else, behind any other byte, sectors of a disk: the
/// number of each in four bytes (little-endian), and its content.
pub fn disk(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else {
        return;
    };
    if *kind == GRUB {
        let text = String::from_utf8_lossy(rest);
        let _entries = grub::entries(&text, &grub::environment(&text));
        return;
    }
    let Ok(found) = find(Rc::new(Sparse::of(rest))) else {
        return;
    };
    let _kernel = found.copy_kernel(&mut io::sink());
    let _initrd = found.copy_initrd(&mut io::sink());
}

/// The sectors of a disk that are not zero.
struct Sparse(BTreeMap<u64, [u8; SECTOR]>);

impl Sparse {
    fn of(mut input: &[u8]) -> Self {
        let mut sectors = BTreeMap::new();
        while let Some((number, rest)) = input.split_first_chunk() {
            let number = u64::from(u32::from_le_bytes(*number)) % (SIZE / SECTOR as u64);
            let length = rest.len().min(SECTOR);
            let (content, rest) = rest.split_at(length);
            let mut sector = [0; SECTOR];
            for (to, from) in sector.iter_mut().zip(content) {
                *to = *from;
            }
            sectors.insert(number, sector);
            input = rest;
        }
        Self(sectors)
    }
}

impl Medium for Sparse {
    fn size(&self) -> u64 {
        SIZE
    }

    fn read_at(&self, data: &mut [u8], offset: u64) -> io::Result<()> {
        for (at, byte) in (offset..).zip(data) {
            let sector = self.0.get(&(at / SECTOR as u64));
            let within = usize::try_from(at % SECTOR as u64).unwrap_or_default();
            *byte = sector
                .and_then(|sector| sector.get(within).copied())
                .unwrap_or_default();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use proptest::prelude::*;

    use super::*;
    use crate::bootdisk::tests::{GRUB_CFG, debian};

    /// A disk as an input.
    fn input(disk: &dyn Medium) -> Vec<u8> {
        let mut input = vec![0];
        let mut sector = [0; SECTOR];
        for number in 0..disk.size() / SECTOR as u64 {
            disk.read_at(&mut sector, number * SECTOR as u64).unwrap();
            if sector != [0; SECTOR] {
                input.extend(u32::try_from(number).unwrap().to_le_bytes());
                input.extend(sector);
            }
        }
        input
    }

    fn seeds() -> Vec<Vec<u8>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/boot_disk");
        if std::env::var_os("VMMD_WRITE_GOLDEN").is_some() {
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("debian"), input(&*debian())).unwrap();
            fs::write(folder.join("grub"), [&[GRUB], GRUB_CFG.as_bytes()].concat()).unwrap();
        }
        let seeds = fs::read_dir(folder).unwrap();
        seeds
            .map(|entry| fs::read(entry.unwrap().path()).unwrap())
            .collect()
    }

    #[test]
    fn the_seeds_of_boot_disks_do_no_harm() {
        let seeds = seeds();
        assert!(seeds.len() > 1);
        seeds.iter().for_each(|seed| disk(seed));
        let whole = seeds.iter().find(|seed| seed.first() == Some(&0)).unwrap();
        let found = find(Rc::new(Sparse::of(&whole[1..]))).unwrap();
        assert_eq!(found.kernel, "/boot/vmlinuz-6.1");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_boot_disk_does_harm(which in any::<usize>(), changes in proptest::collection::vec((any::<usize>(), any::<u8>()), 0..6)) {
            let seeds = seeds();
            let mut data = seeds[which % seeds.len()].clone();
            for (place, value) in changes {
                let place = place % data.len();
                data[place] = value;
            }
            disk(&data);
        }
    }
}
