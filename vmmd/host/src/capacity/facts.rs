//! Node facts from the kernel. The functions block.

use std::{fs, path::Path};

use vmmd_api::v1;
use vmmd_spec::cpu::{Model, features};

use crate::{failure::Failure, sys::supported_cpuid, text};

/// Facts that may change while the daemon runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Logical CPUs on line.
    pub cpus: u32,
    /// Bytes of RAM.
    pub memory: u64,
    /// Bytes that could be given to new programs (MemAvailable).
    pub memory_available: u64,
    /// Bytes set aside as huge pages of 2 MiB, used or not.
    pub huge_2m: u64,
    /// The same of 1 GiB.
    pub huge_1g: u64,
    /// Bytes of the file system with the daemon's state.
    pub disk: u64,
    /// Bytes of that file system available to root.
    pub disk_available: u64,
    /// By id.
    pub numa: Vec<NumaNode>,
}

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// Number.
    pub id: u32,
    /// As in "0-3,8".
    pub cpus: String,
    /// Bytes of RAM.
    pub memory: u64,
}

/// Constant facts about the processors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cpus {
    /// Model name.
    pub model: String,
    /// Features, sorted.
    pub features: Vec<String>,
    /// Features that guests can have, sorted; `None` when KVM does not answer.
    pub of_guests: Option<Vec<String>>,
}

impl Facts {
    /// Reads the facts. `root` is `/`, except in tests. An unreadable value is 0.
    pub fn read(root: &Path, state_dir: &Path) -> Self {
        let text = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
        let meminfo = text("proc/meminfo");
        let pool = |kib: u64| {
            let pages = text(&format!("sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages"));
            pages.trim().parse::<u64>().unwrap_or(0).saturating_mul(kib << 10)
        };
        let online = text("sys/devices/system/cpu/online");
        let disk = rustix::fs::statvfs(state_dir).ok();
        let blocks = |count: u64, size: u64| count.saturating_mul(size);
        Self {
            cpus: cpu_count(&online).unwrap_or_else(|| processors(&text("proc/cpuinfo"))),
            memory: memory(&meminfo, "MemTotal"),
            memory_available: memory(&meminfo, "MemAvailable"),
            huge_2m: pool(2 << 10),
            huge_1g: pool(1 << 20),
            disk: disk
                .as_ref()
                .map_or(0, |disk| blocks(disk.f_blocks, disk.f_frsize)),
            disk_available: disk
                .as_ref()
                .map_or(0, |disk| blocks(disk.f_bfree, disk.f_frsize)),
            numa: numa(&root.join("sys/devices/system/node")),
        }
    }
}

impl Cpus {
    /// Reads them. `kvm` is the path of `/dev/kvm`.
    pub fn read(root: &Path, kvm: &Path) -> Self {
        let answers = fs::File::open(kvm).and_then(supported_cpuid);
        let of_guests = answers.ok().map(|answers| {
            let found = features::of(|leaf, subleaf| {
                let answer = answers.iter().find(|it| (it.leaf, it.subleaf) == (leaf, subleaf));
                answer.map(|it| it.registers)
            });
            found.into_iter().map(str::to_owned).collect()
        });
        Self {
            of_guests,
            ..Self::parse(&fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default())
        }
    }

    /// Models of guests' processors that the node supports.
    pub fn models(&self) -> Vec<Model> {
        Model::supported(self.of_guests.as_deref().unwrap_or_default())
    }

    /// Refused when guests can't have one of these features here. Not checked when KVM does not answer.
    pub fn check<'a>(&self, wanted: impl IntoIterator<Item = &'a str>) -> Result<(), Failure> {
        match &self.of_guests {
            Some(of_guests) => refuse_missing(wanted, |name| of_guests.iter().any(|it| it == name)),
            None => Ok(()),
        }
    }

    /// Those of the first CPU in `/proc/cpuinfo`.
    fn parse(cpuinfo: &str) -> Self {
        let field = |name: &str| {
            let mut found = cpuinfo
                .lines()
                .filter_map(|line| line.strip_prefix(name)?.split_once(':'));
            found.next().map(|(_, value)| value.trim()).unwrap_or_default()
        };
        let mut features: Vec<_> = field("flags").split_whitespace().map(str::to_owned).collect();
        features.sort_unstable();
        features.dedup();
        Self {
            model: field("model name").to_owned(),
            features,
            of_guests: None,
        }
    }
}

/// Refused when `has` is false for one of the features, with the names of these.
pub fn refuse_missing<'a>(
    wanted: impl IntoIterator<Item = &'a str>,
    has: impl Fn(&str) -> bool,
) -> Result<(), Failure> {
    /// Features that a message names; it counts the others.
    const NAMED: usize = 20;
    let mut missing = wanted.into_iter().filter(|name| !has(name));
    let named: Vec<_> = missing
        .by_ref()
        .take(NAMED)
        .map(|name| text::one_line(name, 40))
        .collect();
    if named.is_empty() {
        return Ok(());
    }
    let more = match missing.count() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let message = format!("this node's processors lack {}{more}", named.join(", "));
    Err(Failure::precondition("CPU_FEATURES_MISSING", message))
}

impl From<&NumaNode> for v1::NumaNode {
    fn from(node: &NumaNode) -> Self {
        Self {
            id: node.id,
            cpus: node.cpus.clone(),
            memory_bytes: node.memory,
        }
    }
}

fn numa(dir: &Path) -> Vec<NumaNode> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut nodes: Vec<_> = entries
        .filter_map(|entry| {
            let id = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let text = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
            let meminfo = text("meminfo");
            // "Node 0 MemTotal:       21981396 kB".
            let lines = meminfo.lines().filter_map(|line| line.splitn(3, ' ').nth(2));
            Some(NumaNode {
                id,
                cpus: text("cpulist").trim().to_owned(),
                memory: memory(&lines.collect::<Vec<_>>().join("\n"), "MemTotal"),
            })
        })
        .collect();
    nodes.sort_unstable_by_key(|node| node.id);
    nodes
}

/// How many CPUs a list as in "0-3,8" names; `None` when it is none.
fn cpu_count(list: &str) -> Option<u32> {
    let ranges = list.trim().split(',').map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        last.checked_sub(first)?.checked_add(1)
    });
    ranges.sum()
}

/// Logical CPUs in `/proc/cpuinfo`.
fn processors(cpuinfo: &str) -> u32 {
    let count = cpuinfo
        .lines()
        .filter(|line| line.starts_with("processor"))
        .count();
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// A field of `/proc/meminfo` in bytes; 0 when it isn't there.
pub fn memory(meminfo: &str, field: &str) -> u64 {
    let value = meminfo
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kib = value.and_then(|value| value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpus_are_counted_and_named() {
        let text = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: sse fpu sse\n\nprocessor\t: 1\nmodel name\t: Other\n";
        let cpus = Cpus::parse(text);
        assert_eq!((processors(text), cpus.model.as_str()), (2, "Some CPU @ 2 GHz"));
        assert_eq!(cpus.features, ["fpu", "sse"]);
        assert_eq!((processors(""), Cpus::parse("")), (0, Cpus::default()));
    }

    #[test]
    fn refusal_names_some_missing_features_and_counts_others() {
        let wanted: Vec<_> = (0..500).map(|number| format!("f{number:03}\n")).collect();
        let names = || wanted.iter().map(String::as_str);
        let refused = refuse_missing(names(), |name| name == "f000\n").unwrap_err();
        assert!(
            refused
                .message
                .starts_with("this node's processors lack f001 , f002 ,"),
            "{refused}"
        );
        assert!(refused.message.ends_with("and 479 more"), "{refused}");
        assert!(refuse_missing([], |_| false).is_ok());
    }

    #[test]
    fn features_of_guests_are_unknown_without_kvm() {
        let cpus = Cpus::read(Path::new("/"), Path::new("/dev/null"));
        assert_eq!(
            (cpus.of_guests.as_ref(), cpus.models()),
            (None, vec![Model::Host])
        );
        assert!(cpus.check(["avx512f"]).is_ok());
        let cpus = Cpus {
            of_guests: Some(Model::V2.features().into_iter().map(str::to_owned).collect()),
            ..cpus
        };
        assert_eq!(cpus.models(), [Model::Host, Model::V2]);
        let refused = cpus.check(Model::V3.features()).unwrap_err();
        assert!(refused.message.contains("lack abm, avx, avx2,"), "{refused}");
    }

    #[test]
    fn a_list_of_cpus_is_counted() {
        for (list, count) in [
            ("0\n", Some(1)),
            ("0-3,8\n", Some(5)),
            ("", None),
            ("3-1", None),
            ("0-x", None),
            ("0-4294967295", None),
        ] {
            assert_eq!(cpu_count(list), count, "{list:?}");
        }
    }

    #[test]
    fn memory_is_read_by_its_whole_name() {
        let text = "MemTotal:       16 kB\nMemTotalOther: 5 kB\nMemAvailable:    8 kB\n";
        assert_eq!(memory(text, "MemTotal"), 16 << 10);
        assert_eq!(memory(text, "MemAvailable"), 8 << 10);
        assert_eq!(memory(text, "Mem"), 0);
    }

    #[test]
    fn all_of_a_node_is_read_and_what_is_not_there_is_0() {
        let root = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let none = Facts::read(root.path(), &root.path().join("none"));
        assert_eq!(none, Facts::default());
        put("proc/meminfo", "MemTotal: 4096 kB\nMemAvailable: 1024 kB\n");
        put("sys/devices/system/cpu/online", "0-3\n");
        put("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "3\n");
        put("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "1\n");
        for id in [1, 0] {
            let dir = format!("sys/devices/system/node/node{id}");
            put(&format!("{dir}/cpulist"), &format!("{}-{}\n", id * 2, id * 2 + 1));
            put(
                &format!("{dir}/meminfo"),
                &format!("Node {id} MemTotal:       2048 kB\n"),
            );
        }
        put("sys/devices/system/node/online", "0-1\n");
        let facts = Facts::read(root.path(), root.path());
        assert!(facts.disk >= facts.disk_available && facts.disk_available > 0);
        let node = |id, cpus: &str| NumaNode {
            id,
            cpus: cpus.into(),
            memory: 2 << 20,
        };
        let expected = Facts {
            cpus: 4,
            memory: 4 << 20,
            memory_available: 1 << 20,
            huge_2m: 6 << 20,
            huge_1g: 1 << 30,
            disk: facts.disk,
            disk_available: facts.disk_available,
            numa: vec![node(0, "0-1"), node(1, "2-3")],
        };
        assert_eq!(facts, expected);
    }
}
