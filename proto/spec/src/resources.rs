//! Resources of the node that a VM may use, beside the number of vCPUs and the amount of RAM.

use std::{collections::BTreeSet, fmt, str::FromStr};

use vmmd_api::v1;

use super::{Violations, vm::Backing};

/// Highest number of a processor in a list: one below the most that Linux can be built for on x86-64
/// (`CONFIG_NR_CPUS`, 8,192 with `CONFIG_MAXSMP`).
pub const MAX_CPU: u32 = 8191;
/// Highest number of a NUMA node: one below the most that Linux can be built for (`CONFIG_NODES_SHIFT` is at most 10).
pub const MAX_NUMA_NODE: u32 = 1023;

/// How guest RAM is got from the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryOptions {
    /// Pages that the node has set aside; ordinary and transparent huge pages when `None`.
    pub huge_pages: Option<HugePages>,
    /// All RAM is allocated before the guest starts.
    pub prefault: bool,
    /// KSM may merge its pages.
    pub mergeable: bool,
    /// The NUMA node that all of it comes from.
    pub numa_node: Option<u32>,
    /// Number of free huge pages of that kind on the node; `None` if not read. Not part of a
    /// manifest.
    pub free_huge_pages: Option<u64>,
}

/// Sizes of huge pages that RAM can be made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HugePages {
    /// 2 MiB.
    Size2M,
    /// 1 GiB.
    Size1G,
}

impl HugePages {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Size2M, Self::Size1G];

    /// Of one page.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Size2M => 2 << 20,
            Self::Size1G => 1 << 30,
        }
    }

    /// The one with pages of this size.
    pub fn of_bytes(bytes: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|size| size.bytes() == bytes)
    }
}

impl fmt::Display for HugePages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Size2M => "2 MiB",
            Self::Size1G => "1 GiB",
        })
    }
}

/// A set of processors, written as the kernel writes it: `0-3,8` (cpuset(7), "List format").
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuSet(BTreeSet<u32>);

impl CpuSet {
    /// Their numbers, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// True when there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the processors that are not in `other`.
    pub fn without(&self, other: &Self) -> Self {
        Self(self.0.difference(&other.0).copied().collect())
    }
}

/// Why a text is no list of processors.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be a list of processors such as \"0-3,8\", with numbers up to {MAX_CPU}")]
pub struct NoCpuSet;

impl FromStr for CpuSet {
    type Err = NoCpuSet;

    fn from_str(text: &str) -> Result<Self, NoCpuSet> {
        let number = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            let number = text.parse::<u32>().ok().filter(|number| *number <= MAX_CPU);
            number.filter(|_| digits).ok_or(NoCpuSet)
        };
        let mut cpus = BTreeSet::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(NoCpuSet);
            }
            cpus.extend(first..=last);
        }
        Ok(Self(cpus))
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for cpu in self.iter() {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == cpu => *last = cpu,
                _ => ranges.push((cpu, cpu)),
            }
        }
        for (index, (first, last)) in ranges.into_iter().enumerate() {
            let separator = if index == 0 { "" } else { "," };
            if first == last {
                write!(f, "{separator}{first}")?;
            } else {
                write!(f, "{separator}{first}-{last}")?;
            }
        }
        Ok(())
    }
}

/// Reads `spec.cpu.hostCpus`; `None` when it is empty.
pub(super) fn host_cpus(found: &mut Violations, text: &str) -> Option<CpuSet> {
    if text.is_empty() {
        return None;
    }
    let cpus = text.parse();
    cpus.map_err(|error| {
        let brief = text.chars().take(200).collect::<String>();
        found.add("spec.cpu.hostCpus", format_args!("{error}, is \"{brief}\""));
    })
    .ok()
}

/// Reads and checks `spec.memory` except its size and backing; the checks between fields use both.
pub(super) fn memory(found: &mut Violations, memory: &v1::MemorySpec, backing: Backing) -> MemoryOptions {
    let huge_pages = match v1::HugePages::try_from(memory.huge_pages) {
        Ok(v1::HugePages::Unspecified) => None,
        Ok(v1::HugePages::HugePages2m) => Some(HugePages::Size2M),
        Ok(v1::HugePages::HugePages1g) => Some(HugePages::Size1G),
        Err(_) => {
            let problem = format_args!("unknown value {}", memory.huge_pages);
            found.add("spec.memory.hugePages", problem);
            None
        }
    };
    if let Some(size) = huge_pages
        && !memory.size_bytes.is_multiple_of(size.bytes())
    {
        let problem = format_args!(
            "spec.memory.sizeBytes must be a multiple of these pages, {size} each, is {}",
            memory.size_bytes
        );
        found.add("spec.memory.hugePages", problem);
    }
    if memory.mergeable {
        let other = [
            (huge_pages.is_some(), "huge pages"),
            (backing == Backing::Shared, "shared memory"),
        ];
        for (_, what) in other.iter().filter(|(is, _)| *is) {
            found.add("spec.memory.mergeable", format_args!("can't be with {what}"));
        }
    }
    if memory.numa_node.is_some_and(|node| node > MAX_NUMA_NODE) {
        let node = memory.numa_node.unwrap_or_default();
        let problem = format_args!("must be at most {MAX_NUMA_NODE}, is {node}");
        found.add("spec.memory.numaNode", problem);
    }
    MemoryOptions {
        huge_pages,
        prefault: memory.prefault,
        mergeable: memory.mergeable,
        numa_node: memory.numa_node,
        free_huge_pages: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_processors_is_read_and_written_as_the_kernel_does() {
        for (text, written) in [
            ("0", "0"),
            ("0-3,8", "0-3,8"),
            ("8,3,2,1,0,3", "0-3,8"),
            ("0-1,2-3", "0-3"),
            ("8191", "8191"),
        ] {
            assert_eq!(text.parse::<CpuSet>().unwrap().to_string(), written);
        }
        for text in [
            "",
            ",",
            "0,",
            "3-1",
            "-1",
            "1-",
            "a",
            "+1",
            "0-8192",
            "1 ",
            "0x1",
            "1-2-3",
            "99999999999",
        ] {
            assert_eq!(text.parse::<CpuSet>(), Err(NoCpuSet), "{text:?}");
        }
    }

    #[test]
    fn what_is_missing_of_a_set_is_told() {
        let set = |text: &str| text.parse::<CpuSet>().unwrap();
        assert_eq!(set("0-9").without(&set("2-4")).to_string(), "0-1,5-9");
        assert!(set("1").without(&set("0-3")).is_empty());
    }

    #[test]
    fn processors_of_a_spec_are_optional_and_a_wrong_list_is_told() {
        let mut found = Violations::default();
        assert_eq!(host_cpus(&mut found, ""), None);
        assert_eq!(host_cpus(&mut found, "4-5").unwrap().to_string(), "4-5");
        assert!(found.0.is_empty());
        assert_eq!(host_cpus(&mut found, "5-4"), None);
        assert_eq!(found.0[0].field, "spec.cpu.hostCpus");
    }

    #[test]
    fn options_of_memory_that_exclude_each_other_are_all_told() {
        let read = |wire: v1::MemorySpec, backing| {
            let mut found = Violations::default();
            let options = memory(&mut found, &wire, backing);
            let fields: Vec<_> = found.0.into_iter().map(|violation| violation.field).collect();
            (options, fields)
        };
        let wire = v1::MemorySpec {
            size_bytes: 2 << 30,
            huge_pages: v1::HugePages::HugePages1g.into(),
            prefault: true,
            numa_node: Some(0),
            ..Default::default()
        };
        let (options, wrong) = read(wire, Backing::Shared);
        assert!(wrong.is_empty(), "{wrong:?}");
        assert_eq!(options.huge_pages, Some(HugePages::Size1G));
        assert_eq!(
            (options.prefault, options.mergeable, options.numa_node),
            (true, false, Some(0))
        );
        let wire = v1::MemorySpec {
            size_bytes: 512 << 20,
            huge_pages: v1::HugePages::HugePages1g.into(),
            mergeable: true,
            numa_node: Some(1024),
            ..Default::default()
        };
        let expected = [
            "spec.memory.hugePages",
            "spec.memory.mergeable",
            "spec.memory.mergeable",
            "spec.memory.numaNode",
        ];
        assert_eq!(read(wire, Backing::Shared).1, expected);
        let wire = v1::MemorySpec {
            huge_pages: 3,
            ..Default::default()
        };
        assert_eq!(read(wire, Backing::Auto).1, ["spec.memory.hugePages"]);
    }
}
