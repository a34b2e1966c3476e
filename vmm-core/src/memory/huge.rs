//! Huge pages that the host has set aside (Documentation/admin-guide/mm/hugetlbpage.rst).

use std::{fs, io};

use vmmd_spec::resources::{HugePages, MemoryOptions};

/// Guest RAM can't have the huge pages that it asks for.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.describe())]
pub struct NotEnough {
    /// As many are needed.
    pub needed: u64,
    /// Of this size.
    pub size: HugePages,
    /// Number of free pages; `None` if unknown.
    pub free: Option<u64>,
    /// On this NUMA node only.
    pub numa_node: Option<u32>,
    /// Error of the kernel, if the allocation was tried.
    #[source]
    pub source: Option<io::Error>,
}

impl NotEnough {
    /// For `ram` bytes of RAM in pages of `size`.
    pub(super) fn new(ram: u64, size: HugePages, options: &MemoryOptions, source: Option<io::Error>) -> Self {
        Self {
            needed: ram.checked_div(size.bytes()).unwrap_or(0),
            size,
            free: options.free_huge_pages,
            numa_node: options.numa_node,
            source,
        }
    }

    fn describe(&self) -> String {
        let Self { needed, size, .. } = self;
        let place = match self.numa_node {
            Some(node) => format!("NUMA node {node} of the host"),
            None => "the host".to_owned(),
        };
        let free = match self.free {
            Some(free) => format!("has {free} free"),
            None => "has not enough free".to_owned(),
        };
        format!(
            "the guest's memory takes {needed} huge pages of {size} and {place} {free}: set more aside (nr_hugepages), or \
             give the VM other memory"
        )
    }
}

/// Refuses `ram` bytes of RAM for which there are not enough pages, as far as is known beforehand.
pub(super) fn check(ram: u64, options: &MemoryOptions) -> Result<(), NotEnough> {
    let Some(size) = options.huge_pages else {
        return Ok(());
    };
    let lacking = NotEnough::new(ram, size, options, None);
    match lacking.free {
        Some(free) if free < lacking.needed => Err(lacking),
        _ => Ok(()),
    }
}

/// Number of pages that are free and not reserved. Opens files of /sys, which a sandboxed `vmm`
/// cannot open.
pub fn free(size: HugePages, numa_node: Option<u32>) -> Option<u64> {
    let pool = format!("hugepages-{}kB", size.bytes() >> 10);
    let read = |path: String| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let all = format!("/sys/kernel/mm/hugepages/{pool}");
    let promised = read(format!("{all}/resv_hugepages"))?;
    let free = read(format!("{all}/free_hugepages"))?.saturating_sub(promised);
    match numa_node {
        // A reservation is host-wide: its pages may come from any node.
        Some(node) => {
            let on_node = read(format!(
                "/sys/devices/system/node/node{node}/hugepages/{pool}/free_hugepages"
            ))?;
            Some(on_node.min(free))
        }
        None => Some(free),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_said_with_numbers() {
        let mut lacking = NotEnough {
            needed: 128,
            size: HugePages::Size2M,
            free: Some(3),
            numa_node: None,
            source: None,
        };
        let text = lacking.to_string();
        assert!(
            text.contains("128 huge pages of 2 MiB and the host has 3 free"),
            "{text}"
        );
        (lacking.free, lacking.numa_node) = (None, Some(1));
        assert!(
            lacking
                .to_string()
                .contains("NUMA node 1 of the host has not enough free")
        );
    }
}
