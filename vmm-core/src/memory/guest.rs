//! Host backing of guest RAM.
//!
//! Each region's host address and guest address are multiples of 2 MiB, so that both sides can map
//! huge pages. The kernel allocates pages on the guest's first access; private memory uses
//! transparent huge pages. With huge pages of the host, or on request, all pages are allocated at
//! the start and stay.

#![allow(unsafe_code)]

use std::{fs::File, io, ops::Range, sync::Arc};

use rustix::{
    fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create},
    io::Errno,
    mm::{Advice, madvise},
};
use tracing::warn;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap, bitmap::Bitmap,
    mmap::MmapRegionBuilder,
};
use vmm_base::{GuestMemory, dirty::DirtyBitmap};
use vmmd_spec::resources::{HugePages, MemoryOptions};

use super::{
    huge::{self, NotEnough},
    layout::{Map, RAM_ALIGNMENT, RAM_MAX, RAM_MIN},
    locate,
    mapping::{Mapping, Source},
    populate,
    replaced::Replaced,
};

/// How RAM is backed on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Private anonymous memory, with transparent huge pages unless it is made of others.
    Private,
    /// A memfd that other processes can map.
    Shared,
}

/// Guest RAM could not be allocated.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// Outside the platform's range, or not a multiple of 2 MiB.
    #[error(
        "a machine can't have {0} bytes of memory: it takes {RAM_MIN} to {RAM_MAX}, a multiple of {RAM_ALIGNMENT}"
    )]
    Size(u64),
    /// There are not enough huge pages, or none of this size.
    #[error(transparent)]
    HugePages(#[from] NotEnough),
    /// The host has no such NUMA node, or the VM may not have memory of it.
    #[error("guest memory from NUMA node {node}: the host has no such node with memory that this VM may use")]
    NumaNode {
        /// Which.
        node: u32,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The host refused.
    #[error("{operation} of {bytes} bytes of guest memory")]
    Host {
        /// What was tried.
        operation: &'static str,
        /// For how much.
        bytes: u64,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The regions don't form an address space (a defect).
    #[error("guest memory regions")]
    Regions(#[from] vm_memory::GuestRegionCollectionError),
}

/// The RAM of a machine.
#[derive(Clone, Debug)]
pub struct GuestRam {
    memory: GuestMemory,
    /// Those of `memory`, for memory slots.
    regions: Vec<Arc<GuestRegionMmap<DirtyBitmap>>>,
    file: Option<Arc<File>>,
    size: u64,
    /// All pages are there and stay; of this size at the least.
    resident: Option<u64>,
    /// It began as the content of a file: the parts that zeroes have replaced.
    of_file: Option<Arc<Replaced>>,
}

impl GuestRam {
    /// `size` bytes of RAM, laid out around the MMIO hole; all zeroes, none of it touched.
    pub fn new(size: u64, backing: Backing) -> Result<Self, RamError> {
        Self::with_options(size, backing, &MemoryOptions::default())
    }

    /// The same, got from the host in a certain way.
    pub fn with_options(size: u64, backing: Backing, options: &MemoryOptions) -> Result<Self, RamError> {
        Self::with_map(Map::Direct, size, backing, options)
    }

    /// The same, laid out as `map` says. Takes long when all of it is touched; nothing but the end of the process ends that
    /// early.
    pub fn with_map(
        map: Map,
        size: u64,
        backing: Backing,
        options: &MemoryOptions,
    ) -> Result<Self, RamError> {
        if !(RAM_MIN..=RAM_MAX).contains(&size) || !size.is_multiple_of(RAM_ALIGNMENT) {
            return Err(RamError::Size(size));
        }
        let page = options.huge_pages.map_or(RAM_ALIGNMENT, HugePages::bytes);
        if !size.is_multiple_of(page) {
            return Err(RamError::Size(size));
        }
        huge::check(size, options)?;
        let file = match backing {
            Backing::Private => None,
            Backing::Shared => Some(Arc::new(memfd(size, options)?)),
        };
        let (low, high) = map.ram_ranges(size);
        let mut regions = Vec::with_capacity(2);
        let mut offset = 0;
        for range in [low, high].into_iter().filter(|range| !range.is_empty()) {
            let content = match &file {
                Some(file) => Content::Shared(file, offset),
                None => Content::Zeroes,
            };
            regions.push(Arc::new(region(&range, content, options)?));
            offset = range.end.saturating_sub(range.start).saturating_add(offset);
        }
        let memory = GuestMemory::from_arc_regions(regions.clone())?;
        // A reservation of huge pages covers the whole host. A shortage on a NUMA node or in a
        // control group shows only here, and would be a SIGBUS later.
        let resident = (options.prefault || options.huge_pages.is_some()).then_some(page);
        if let Some(page) = resident {
            populate::touch(&memory, page).map_err(|error| lacking(size, options, "taking", error))?;
        }
        Ok(Self {
            memory,
            regions,
            file,
            size,
            resident,
            of_file: None,
        })
    }

    /// RAM with the initial content of `file`, a range of guest addresses at each offset: those of
    /// `map`. The kernel reads a page on the first access; writes stay in this process. If another
    /// process truncates the file, a SIGBUS ends this process.
    pub fn of_file(
        file: &File,
        map: Map,
        ranges: &[(Range<u64>, u64)],
        mergeable: bool,
    ) -> Result<Self, RamError> {
        let size = ranges
            .iter()
            .map(|(range, _)| range.end.saturating_sub(range.start))
            .sum();
        let (low, high) = map.ram_ranges(size);
        let wanted = [low, high].into_iter().filter(|range| !range.is_empty());
        if !wanted.eq(ranges.iter().map(|(range, _)| range.clone())) || !size.is_multiple_of(RAM_ALIGNMENT) {
            return Err(RamError::Size(size));
        }
        let options = MemoryOptions {
            mergeable,
            ..MemoryOptions::default()
        };
        let regions = ranges.iter().map(|(range, offset)| {
            let content = Content::Copied(file, *offset);
            Ok(Arc::new(region(range, content, &options)?))
        });
        let regions = regions.collect::<Result<Vec<_>, RamError>>()?;
        Ok(Self {
            memory: GuestMemory::from_arc_regions(regions.clone())?,
            regions,
            file: None,
            size,
            resident: None,
            of_file: Some(Arc::default()),
        })
    }

    /// For devices: cheap to clone, and keeps the mapping alive.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Its regions, in order of addresses.
    pub fn regions(&self) -> &[Arc<GuestRegionMmap<DirtyBitmap>>] {
        &self.regions
    }

    /// Resets all memory to zeroes, for a machine reset. Pages are untouched afterwards, unless
    /// they are resident. All vCPUs and devices are stopped.
    pub fn clear(&self) -> Result<(), RamError> {
        if let Some(page) = self.resident {
            // The host could give released pages to another process before this process needs them
            // again.
            return populate::zero(&self.memory, page).map_err(|source| RamError::Host {
                operation: "clearing",
                bytes: self.size,
                source,
            });
        }
        let host = |operation, source| RamError::Host {
            operation,
            bytes: self.size,
            source,
        };
        for region in self.memory.iter() {
            let length = region.size();
            let dropped = match (&self.of_file, &self.file) {
                // Dropped pages would have the file's content again.
                //
                // SAFETY: the range is a private mapping of this process, alive while the region
                // is, and unmapped as a whole by its owner. No references into guest memory exist.
                (Some(replaced), _) => unsafe { replaced.all(region.as_ptr(), length) },
                (None, Some(_)) => Ok(()),
                (None, None) => drop_pages(region),
            };
            dropped.map_err(|errno| host("dropping", errno.into()))?;
        }
        if let Some(file) = &self.file {
            fallocate(
                file,
                FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                0,
                self.size,
            )
            .map_err(|errno| host("dropping", errno.into()))?;
        }
        // After the change: a capture that takes the marks then reads the pages after the change.
        for region in self.memory.iter() {
            region.bitmap().mark_dirty(0, region.size());
        }
        Ok(())
    }

    /// In bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The memfd, when RAM is shared. Regions follow one another in it without gaps.
    pub fn file(&self) -> Option<&Arc<File>> {
        self.file.as_ref()
    }

    /// The parts of RAM that zeroes have replaced, if it began as the content of a file.
    pub(super) fn replaced(&self) -> Option<&Arc<Replaced>> {
        self.of_file.as_ref()
    }
}

/// Gives all pages of a region of private anonymous memory back to the host: it reads as zeroes from then on.
pub(crate) fn drop_pages(region: &GuestRegionMmap<DirtyBitmap>) -> Result<(), Errno> {
    // SAFETY: the range is a private mapping of ours, alive while the region is. There are no references into guest memory.
    unsafe { madvise(region.as_ptr().cast(), region.size(), Advice::LinuxDontNeed) }
}

/// Memory of `bytes` that is no RAM and has no place of its own yet, of small pages or huge ones as there are.
pub(crate) fn detached_region(bytes: u64) -> Result<GuestRegionMmap<DirtyBitmap>, RamError> {
    region(&(0..bytes), Content::Zeroes, &MemoryOptions::default())
}

/// The first `bytes` bytes of a file that stays as it is, as memory of this process. Processes share the pages that they do
/// not write. If another process truncates the file, a SIGBUS ends this process.
pub(crate) fn file_region(file: &File, bytes: u64) -> Result<GuestRegionMmap<DirtyBitmap>, RamError> {
    region(&(0..bytes), Content::Copied(file, 0), &MemoryOptions::default())
}

/// Initial content of a region.
#[derive(Clone, Copy)]
enum Content<'a> {
    Zeroes,
    /// A memfd from this offset on, shared by all processes that map it.
    Shared(&'a Arc<File>, u64),
    /// A file from this offset on, whose content stays unchanged.
    Copied(&'a File, u64),
}

fn region(
    range: &Range<u64>,
    content: Content<'_>,
    options: &MemoryOptions,
) -> Result<GuestRegionMmap<DirtyBitmap>, RamError> {
    let bytes = range.end.saturating_sub(range.start);
    let host = |operation, source| RamError::Host {
        operation,
        bytes,
        source,
    };
    let length = usize::try_from(bytes).map_err(|_| RamError::Size(bytes))?;
    let source = Source {
        file: match content {
            Content::Zeroes => None,
            Content::Shared(file, offset) => Some((file, offset)),
            Content::Copied(file, offset) => Some((file, offset)),
        },
        copy_on_write: matches!(content, Content::Copied(..)),
        huge_pages: options.huge_pages,
    };
    let mapping =
        Mapping::new(length, source).map_err(|errno| lacking(bytes, options, "mapping", errno.into()))?;
    if let Some(node) = options.numa_node {
        mapping.bind(node).map_err(|errno| RamError::NumaNode {
            node,
            source: errno.into(),
        })?;
    }
    // A core dump of the VMM holds nothing of its guest.
    mapping
        .advise(Advice::LinuxDontDump)
        .map_err(|errno| host("exclusion from core dumps", errno.into()))?;
    if options.huge_pages.is_none() {
        // A kernel without transparent huge pages refuses this; small pages do.
        let _ = mapping.advise(Advice::LinuxHugepage);
    }
    if options.mergeable
        && let Err(errno) = mapping.advise(Advice::LinuxMergeable)
    {
        warn!(error = %errno, "the host's kernel merges no pages: it is built without KSM");
    }

    let address = mapping.address().as_ptr();
    locate::insert(address as usize, length, range.start);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let mut builder =
        MmapRegionBuilder::new_with_bitmap(length, DirtyBitmap::with_owner(length, Box::new(mapping)))
            .with_mmap_prot(protection);
    builder = match content {
        Content::Shared(file, offset) => builder
            .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
            .with_file_offset(FileOffset::from_arc(Arc::clone(file), offset)),
        Content::Copied(..) => builder.with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_NORESERVE),
        Content::Zeroes => {
            builder.with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE)
        }
    };
    // SAFETY: `address` begins a mapping of `length` bytes. Its owner is in the region's bitmap: it is unmapped when
    // the region is dropped, not earlier.
    let builder = unsafe { builder.with_raw_mmap_pointer(address) };
    let region = builder
        .build()
        .map_err(|source| host("description", io::Error::other(source)))?;
    GuestRegionMmap::new(region, GuestAddress(range.start)).ok_or(RamError::Size(bytes))
}

/// Error for a failed allocation of memory.
fn lacking(bytes: u64, options: &MemoryOptions, operation: &'static str, error: io::Error) -> RamError {
    match options.huge_pages {
        Some(size) => NotEnough::new(bytes, size, options, Some(error)).into(),
        None => RamError::Host {
            operation,
            bytes,
            source: error,
        },
    }
}

fn memfd(size: u64, options: &MemoryOptions) -> Result<File, RamError> {
    let host = |operation| move |errno: Errno| lacking(size, options, operation, errno.into());
    let flags = MemfdFlags::CLOEXEC
        | MemfdFlags::ALLOW_SEALING
        | match options.huge_pages {
            None => MemfdFlags::empty(),
            Some(HugePages::Size2M) => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
            Some(HugePages::Size1G) => MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
        };
    let file = memfd_create("guest-ram", flags).map_err(host("memfd_create"))?;
    ftruncate(&file, size).map_err(host("sizing the memfd"))?;
    // Another process's ftruncate must not cause a SIGBUS in a process that maps the memfd.
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(host("sealing the memfd"))?;
    Ok(File::from(file))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use vm_memory::Bytes;

    use super::{super::layout::*, *};

    fn host_addresses(ram: &GuestRam) -> Vec<usize> {
        ram.memory()
            .iter()
            .map(|region| region.as_ptr() as usize)
            .collect()
    }

    #[test]
    fn ram_lies_on_both_sides_of_the_hole_at_huge_page_boundaries() {
        for backing in [Backing::Private, Backing::Shared] {
            let ram = GuestRam::new(5 * GIB, backing).unwrap();
            let regions: Vec<_> = ram
                .memory()
                .iter()
                .map(|region| (region.start_addr().0, region.len()))
                .collect();
            assert_eq!(regions, [(0, 3 * GIB), (4 * GIB, 2 * GIB)]);
            for address in host_addresses(&ram) {
                assert_eq!(address % (2 << 20), 0);
            }
            ram.memory().write_obj(7_u32, GuestAddress(5 * GIB)).unwrap();
            assert_eq!(ram.memory().read_obj::<u32>(GuestAddress(5 * GIB)).unwrap(), 7);
            assert!(ram.memory().write_obj(7_u32, GuestAddress(3 * GIB)).is_err());
        }
    }

    #[test]
    fn shared_ram_is_in_its_file_low_part_first() {
        use std::os::unix::fs::FileExt;
        let ram = GuestRam::new(3 * GIB + 2 * MIB, Backing::Shared).unwrap();
        ram.memory()
            .write_obj(0x1122_3344_u32, GuestAddress(4 * GIB + 8))
            .unwrap();
        let mut bytes = [0; 4];
        let file = ram.file().unwrap();
        file.read_exact_at(&mut bytes, 3 * GIB + 8).unwrap();
        assert_eq!(u32::from_le_bytes(bytes), 0x1122_3344);
        assert!(file.set_len(0).is_err(), "sealed");
    }

    #[test]
    fn the_mapping_outlives_the_ram_while_a_device_holds_the_memory() {
        let ram = GuestRam::new(RAM_MIN, Backing::Private).unwrap();
        let memory = ram.memory().clone();
        drop(ram);
        memory.write_obj(1_u8, GuestAddress(0)).unwrap();
        assert_eq!(memory.read_obj::<u8>(GuestAddress(0)).unwrap(), 1);
    }

    #[test]
    fn a_cleared_ram_is_all_zeroes_and_marked_as_changed() {
        for backing in [Backing::Private, Backing::Shared] {
            let ram = GuestRam::new(RAM_MIN, backing).unwrap();
            ram.memory().write_obj(7_u64, GuestAddress(0x5000)).unwrap();
            ram.memory().iter().next().unwrap().get_mmap().bitmap().start();
            ram.clear().unwrap();
            assert_eq!(ram.memory().read_obj::<u64>(GuestAddress(0x5000)).unwrap(), 0);
            assert!(ram.memory().iter().next().unwrap().bitmap().dirty_at(0x5000));
        }
    }

    #[test]
    fn sizes_outside_the_platform_are_refused() {
        for size in [
            0,
            RAM_MIN - RAM_ALIGNMENT,
            RAM_MIN + 4096,
            RAM_MAX + RAM_ALIGNMENT,
            u64::MAX,
        ] {
            assert!(matches!(GuestRam::new(size, Backing::Private), Err(RamError::Size(s)) if s == size));
        }
    }

    /// Bytes of RAM that the host has given, by the kernel's account of this process's mappings.
    fn resident(ram: &GuestRam) -> u64 {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let starts: Vec<_> = host_addresses(ram)
            .iter()
            .map(|address| format!("{address:x}-"))
            .collect();
        let mut inside = false;
        let mut sum = 0;
        for line in smaps.lines() {
            if line.split(' ').next().is_some_and(|word| word.contains('-')) {
                inside = starts.iter().any(|start| line.starts_with(start));
            } else if let Some(rest) = line.strip_prefix("Rss:").filter(|_| inside) {
                let kib: u64 = rest.trim().trim_end_matches(" kB").parse().unwrap();
                sum += kib << 10;
            }
        }
        sum
    }

    #[test]
    fn prefaulted_ram_is_all_there_and_stays_so_when_it_is_cleared() {
        for backing in [Backing::Private, Backing::Shared] {
            let lazy = GuestRam::new(RAM_MIN, backing).unwrap();
            assert_eq!(resident(&lazy), 0);
            let options = MemoryOptions {
                prefault: true,
                ..MemoryOptions::default()
            };
            let ram = GuestRam::with_options(RAM_MIN, backing, &options).unwrap();
            assert_eq!(resident(&ram), RAM_MIN);
            ram.memory().write_obj(7_u64, GuestAddress(0x5000)).unwrap();
            ram.memory().iter().next().unwrap().get_mmap().bitmap().start();
            ram.clear().unwrap();
            assert_eq!(resident(&ram), RAM_MIN);
            assert_eq!(ram.memory().read_obj::<u64>(GuestAddress(0x5000)).unwrap(), 0);
            assert!(ram.memory().iter().next().unwrap().bitmap().dirty_at(0x5000));
        }
    }

    #[test]
    fn ram_is_bound_to_a_numa_node_that_exists() {
        let on = |node| {
            let options = MemoryOptions {
                numa_node: Some(node),
                ..MemoryOptions::default()
            };
            GuestRam::with_options(RAM_MIN, Backing::Private, &options)
        };
        let ram = on(0).unwrap();
        ram.memory().write_obj(7_u64, GuestAddress(0x5000)).unwrap();
        let start = format!("{:x} bind", host_addresses(&ram)[0]);
        let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
        assert!(maps.lines().any(|line| line.starts_with(&start)), "{maps}");
        let refused = on(1000).unwrap_err();
        assert!(
            matches!(refused, RamError::NumaNode { node: 1000, .. }),
            "{refused}"
        );
    }

    #[test]
    fn mergeable_ram_is_registered_with_ksm() {
        let options = MemoryOptions {
            mergeable: true,
            ..MemoryOptions::default()
        };
        let ram = GuestRam::with_options(RAM_MIN, Backing::Private, &options).unwrap();
        let start = format!("{:x}-", host_addresses(&ram)[0]);
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut of_ram = smaps.lines().skip_while(|line| !line.starts_with(&start));
        let flags = of_ram.find(|line| line.starts_with("VmFlags:")).unwrap();
        // A kernel without KSM only has it said in the log.
        let has_ksm = std::path::Path::new("/sys/kernel/mm/ksm").exists();
        assert_eq!(flags.split(' ').any(|flag| flag == "mg"), has_ksm, "{flags}");
    }

    #[test]
    fn huge_pages_are_all_taken_or_it_is_said_how_many_there_are() {
        for backing in [Backing::Private, Backing::Shared] {
            for size in HugePages::ALL {
                let options = MemoryOptions {
                    huge_pages: Some(size),
                    free_huge_pages: huge::free(size, None),
                    ..MemoryOptions::default()
                };
                match GuestRam::with_options(GIB, backing, &options) {
                    Ok(ram) => {
                        for address in host_addresses(&ram) {
                            assert_eq!(address as u64 % size.bytes(), 0);
                        }
                        ram.memory().write_obj(7_u64, GuestAddress(0x5000)).unwrap();
                        ram.clear().unwrap();
                        assert_eq!(ram.memory().read_obj::<u64>(GuestAddress(0x5000)).unwrap(), 0);
                    }
                    Err(RamError::HugePages(lacking)) => {
                        assert_eq!(lacking.needed, GIB / size.bytes());
                        assert!(lacking.free.is_none_or(|free| free < lacking.needed), "{lacking}");
                    }
                    Err(error) => panic!("{backing:?} {size}: {error}"),
                }
            }
        }
        let options = MemoryOptions {
            huge_pages: Some(HugePages::Size1G),
            ..MemoryOptions::default()
        };
        let odd = GuestRam::with_options(GIB + 2 * MIB, Backing::Private, &options);
        assert!(matches!(odd, Err(RamError::Size(_))));
    }
}
