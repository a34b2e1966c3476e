//! Node facts for the limits of VMs, from sysfs and the parent's cgroup.

use std::{collections::BTreeSet, fs, path::Path};

use vmmd_spec::{
    resources::{CpuSet, HugePages, MemoryOptions},
    vm::VmSpec,
};

use super::plan::{Controller, Facts, Room};
use crate::capacity::facts;

/// Where the kernel describes the node.
pub const SYSFS: &str = "/sys";

/// For the VM `spec`, whose group is below `parent`; `sysfs` is [`SYSFS`].
pub fn read(sysfs: &Path, parent: Option<&Path>, spec: &VmSpec) -> Facts {
    let of_parent = |name: &str| text(&parent?.join(name));
    let controllers = of_parent("cgroup.subtree_control").unwrap_or_default();
    let names: BTreeSet<_> = controllers.split_whitespace().collect();
    let effective = of_parent("cpuset.cpus.effective").and_then(|list| cpus(&list));
    let online = || cpus(&text(&sysfs.join("devices/system/cpu/online"))?);
    Facts {
        controllers: Controller::ALL
            .into_iter()
            .filter(|controller| names.contains(controller.name()))
            .collect(),
        cpus: effective.or_else(online).unwrap_or_default(),
        numa_cpus: spec.memory.numa_node.and_then(|node| numa_cpus(sysfs, node)),
        huge_page_sizes: huge_page_sizes(sysfs),
        huge_pages_are_memory: false,
        disks_in_memory: 0,
    }
}

/// Returns the free memory of the kind that `spec` requests: huge pages or a NUMA node.
pub fn room(sysfs: &Path, spec: &VmSpec) -> Room {
    let room = match (spec.memory.huge_pages, spec.memory.numa_node) {
        (Some(size), node) => free_huge_pages(sysfs, size, node).map(|free| Room::HugePages { free }),
        (None, Some(node)) => {
            let path = format!("devices/system/node/node{node}/meminfo");
            text(&sysfs.join(path)).map(|meminfo| Room::Numa {
                free: numa_memory(&meminfo),
            })
        }
        (None, None) => None,
    };
    room.unwrap_or(Room::Unknown)
}

fn text(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned())
}

/// An empty list is no processor.
fn cpus(list: &str) -> Option<CpuSet> {
    if list.is_empty() {
        return Some(CpuSet::default());
    }
    list.parse().ok()
}

/// `None` when there is no such node, or it has no memory.
fn numa_cpus(sysfs: &Path, node: u32) -> Option<CpuSet> {
    let nodes = sysfs.join("devices/system/node");
    let with_memory = cpus(&text(&nodes.join("has_memory"))?)?;
    if !with_memory.iter().any(|number| number == node) {
        return None;
    }
    cpus(&text(&nodes.join(format!("node{node}/cpulist")))?)
}

/// Names as the hugetlb controller makes them (`mem_fmt` in mm/hugetlb_cgroup.c): "64KB", "2MB", "1GB".
fn huge_page_sizes(sysfs: &Path) -> Vec<(String, u64)> {
    let pools = fs::read_dir(sysfs.join("kernel/mm/hugepages"));
    let names = pools
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name());
    let mut sizes: Vec<_> = names
        .filter_map(|name| {
            let kib = name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?;
            let kib: u64 = kib.parse().ok()?;
            let name = match kib {
                kib if kib >= 1 << 20 => format!("{}GB", kib >> 20),
                kib if kib >= 1 << 10 => format!("{}MB", kib >> 10),
                kib => format!("{kib}KB"),
            };
            Some((name, kib.checked_mul(1024)?))
        })
        .collect();
    sizes.sort_by_key(|(_, bytes)| *bytes);
    sizes
}

/// Free huge pages of the size and node in `memory`. `None` when `memory` requests no huge pages,
/// or the number is unreadable.
pub fn free_huge_pages_for(memory: MemoryOptions) -> Option<u64> {
    free_huge_pages(Path::new(SYSFS), memory.huge_pages?, memory.numa_node)
}

/// 0 when the node has no pages of this size; `None` when the number is unreadable.
fn free_huge_pages(sysfs: &Path, size: HugePages, node: Option<u32>) -> Option<u64> {
    let pool = format!("hugepages-{}kB", size.bytes() >> 10);
    let all = sysfs.join("kernel/mm/hugepages").join(&pool);
    if !all.exists() {
        return Some(0);
    }
    let number = |path: &Path| text(path)?.parse::<u64>().ok();
    let promised = number(&all.join("resv_hugepages"))?;
    let free = number(&all.join("free_hugepages"))?.saturating_sub(promised);
    match node {
        Some(node) => {
            let pool = format!("devices/system/node/node{node}/hugepages/{pool}/free_hugepages");
            Some(number(&sysfs.join(pool))?.min(free))
        }
        None => Some(free),
    }
}

/// Free and reclaimable memory, from lines such as "Node 0 MemFree: 16 kB".
fn numa_memory(meminfo: &str) -> u64 {
    let plain: String = meminfo
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("Node ")?.split_once(' '))
        .map(|(_, line)| format!("{line}\n"))
        .collect();
    ["MemFree", "Active(file)", "Inactive(file)", "SReclaimable"]
        .into_iter()
        .map(|field| facts::memory(&plain, field))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::plan::tests::spec;

    fn write(root: &Path, files: &[(&str, &str)]) {
        for (name, content) in files {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
    }

    #[test]
    fn a_node_with_everything_is_described() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        write(
            root,
            &[
                (
                    "cgroup/cgroup.subtree_control",
                    "cpuset cpu io memory hugetlb pids misc\n",
                ),
                ("cgroup/cpuset.cpus.effective", "0-2\n"),
                ("devices/system/cpu/online", "0-3\n"),
                ("devices/system/node/has_memory", "0-1\n"),
                ("devices/system/node/node1/cpulist", "2-3\n"),
                (
                    "devices/system/node/node1/meminfo",
                    "Node 1 MemTotal: 100 kB\nNode 1 MemFree: 10 kB\nNode 1 Inactive(file): 3 kB\n",
                ),
                ("kernel/mm/hugepages/hugepages-1048576kB/free_hugepages", "0\n"),
                ("kernel/mm/hugepages/hugepages-1048576kB/resv_hugepages", "0\n"),
                ("kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "10\n"),
                ("kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "3\n"),
                (
                    "devices/system/node/node1/hugepages/hugepages-2048kB/free_hugepages",
                    "5\n",
                ),
            ],
        );
        let parent = root.join("cgroup");
        let mut spec = spec();
        let facts = read(root, Some(&parent), &spec);
        assert_eq!(facts.controllers, Controller::ALL.into());
        assert_eq!(
            (facts.cpus.to_string().as_str(), &facts.numa_cpus),
            ("0-2", &None)
        );
        let sizes = [("2MB".to_owned(), 2 << 20), ("1GB".to_owned(), 1 << 30)];
        assert_eq!(facts.huge_page_sizes, sizes);
        assert_eq!(room(root, &spec), Room::Unknown);

        spec.memory.numa_node = Some(1);
        let facts = read(root, None, &spec);
        assert_eq!(facts.numa_cpus.unwrap().to_string(), "2-3");
        assert_eq!(
            (facts.controllers.len(), facts.cpus.to_string().as_str()),
            (0, "0-3")
        );
        assert_eq!(room(root, &spec), Room::Numa { free: 13 << 10 });
        spec.memory.huge_pages = Some(HugePages::Size2M);
        assert_eq!(room(root, &spec), Room::HugePages { free: 5 });
        spec.memory.numa_node = None;
        assert_eq!(room(root, &spec), Room::HugePages { free: 7 });
        spec.memory.huge_pages = Some(HugePages::Size1G);
        assert_eq!(room(root, &spec), Room::HugePages { free: 0 });
        spec.memory.numa_node = Some(2);
        assert_eq!(read(root, None, &spec).numa_cpus, None);
    }

    #[test]
    fn a_node_that_says_nothing_has_nothing() {
        let root = tempfile::tempdir().unwrap();
        let mut spec = spec();
        assert_eq!(read(root.path(), None, &spec), Facts::default());
        spec.memory.huge_pages = Some(HugePages::Size2M);
        assert_eq!(room(root.path(), &spec), Room::HugePages { free: 0 });
    }
}
