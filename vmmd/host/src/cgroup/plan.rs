//! Settings of a VM's cgroup, computed from the VM's spec and the node facts. A pure function.

use std::{collections::BTreeSet, fmt};

use vmmd_spec::{
    cpu::CpuShare,
    overhead,
    resources::{CpuSet, MemoryOptions},
    vm::VmSpec,
};

use crate::failure::{Failure, Kind};

/// Length of the period of `cpu.max` in microseconds: the kernel's default.
const PERIOD_US: u64 = 100_000;

/// Controllers of cgroup v2 that VMs are limited with (Documentation/admin-guide/cgroup-v2.rst).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Controller {
    /// Shares and caps of processor time.
    Cpu,
    /// Which processors and NUMA nodes.
    Cpuset,
    /// Ordinary memory.
    Memory,
    /// Huge pages that were set aside.
    Hugetlb,
    /// Shares of block devices.
    Io,
    /// Processes and threads.
    Pids,
}

impl Controller {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Cpu,
        Self::Cpuset,
        Self::Memory,
        Self::Hugetlb,
        Self::Io,
        Self::Pids,
    ];

    /// As the kernel calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cpuset => "cpuset",
            Self::Memory => "memory",
            Self::Hugetlb => "hugetlb",
            Self::Io => "io",
            Self::Pids => "pids",
        }
    }
}

impl fmt::Display for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Node facts that affect the limits of one VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Controllers that the groups of VMs have.
    pub controllers: BTreeSet<Controller>,
    /// Processors that VMs can run on.
    pub cpus: CpuSet,
    /// Processors of the NUMA node that the spec names; `None` when there is no such node.
    pub numa_cpus: Option<CpuSet>,
    /// Sizes of huge pages as files of the hugetlb controller have them ("2MB"), and in bytes.
    pub huge_page_sizes: Vec<(String, u64)>,
    /// The memory controller counts huge pages too (mount option `memory_hugetlb_accounting`).
    pub huge_pages_are_memory: bool,
    /// Size in bytes of disks in the node's memory (tmpfs). The kernel charges the VM for its
    /// writes to them.
    pub disks_in_memory: u64,
}

/// A file of the cgroup and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Its name.
    pub file: String,
    /// Without a newline.
    pub value: String,
    /// The spec's field that requires this setting. When the setting fails, the VM does not start.
    pub field: Option<&'static str>,
}

/// All that is to be set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// In the order in which they are written.
    pub settings: Vec<Setting>,
    /// Controllers that the VM has to do without.
    pub missing: Vec<Controller>,
}

/// Limits of processes that work for the daemon, all together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes, the page cache of their files included.
    pub memory: u64,
    /// Processes and threads.
    pub tasks: u64,
}

impl Limits {
    /// What to set. Where processors are short, the group has as much as a VM with one processor.
    pub fn settings(self) -> [Setting; 3] {
        [
            set("memory.max", &self.memory),
            set("pids.max", &self.tasks),
            set("cpu.weight", &100),
        ]
    }
}

/// Computes the settings. Error reasons for a spec that the node cannot fulfil:
/// CGROUP_CONTROLLER_MISSING, HOST_CPUS_UNAVAILABLE, NUMA_NODE_NOT_FOUND.
pub fn plan(spec: &VmSpec, facts: &Facts) -> Result<Plan, Failure> {
    check(spec, facts)?;
    let mut plan = Plan::default();
    for controller in Controller::ALL {
        if facts.controllers.contains(&controller) {
            plan.settings.extend(settings(controller, spec, facts));
        } else if controller != Controller::Hugetlb || spec.memory.huge_pages.is_some() {
            plan.missing.push(controller);
        }
    }
    Ok(plan)
}

fn check(spec: &VmSpec, facts: &Facts) -> Result<(), Failure> {
    if let Some(wanted) = &spec.host_cpus {
        let absent = wanted.without(&facts.cpus);
        if !absent.is_empty() {
            let message = format!(
                "spec.cpu.hostCpus: the node has no processors {absent} for VMs; it has {}",
                facts.cpus
            );
            return Err(Failure::precondition("HOST_CPUS_UNAVAILABLE", message));
        }
    }
    if let (Some(node), None) = (spec.memory.numa_node, &facts.numa_cpus) {
        let message = format!("spec.memory.numaNode: the node has no NUMA node {node} with memory");
        return Err(Failure::precondition("NUMA_NODE_NOT_FOUND", message));
    }
    let needs = [
        (
            spec.cpu.limit_percent.is_some(),
            "spec.cpu.coreLimitPercent",
            Controller::Cpu,
        ),
        (spec.host_cpus.is_some(), "spec.cpu.hostCpus", Controller::Cpuset),
        (
            spec.memory.numa_node.is_some(),
            "spec.memory.numaNode",
            Controller::Cpuset,
        ),
    ];
    for (wanted, field, controller) in needs {
        if wanted && !facts.controllers.contains(&controller) {
            let message = format!(
                "{field} needs the control group controller \"{controller}\", which VMs of this node don't have: run \
                 vmmd-vms.service with a cgroup v2 hierarchy, or take the field out"
            );
            return Err(Failure::precondition("CGROUP_CONTROLLER_MISSING", message));
        }
    }
    Ok(())
}

fn settings(controller: Controller, spec: &VmSpec, facts: &Facts) -> Vec<Setting> {
    match controller {
        Controller::Cpu => vec![
            set("cpu.weight", &weight(spec)),
            Setting {
                field: spec.cpu.limit_percent.map(|_| "spec.cpu.coreLimitPercent"),
                ..set("cpu.max", &cpu_max(spec.cpu, spec.topology.cores()))
            },
        ],
        Controller::Cpuset => cpuset(spec, facts),
        Controller::Memory => vec![
            set("memory.max", &memory_max(spec, facts)),
            // Half a VM is none: all of it goes, and nothing else does.
            set("memory.oom.group", &1),
            // The node must not swap guest memory. It would be too slow for a guest, and readable
            // on the node's disk.
            set("memory.swap.max", &0),
        ],
        Controller::Hugetlb => {
            let MemoryOptions { huge_pages, .. } = spec.memory;
            let own = huge_pages.map(|size| size.bytes());
            let sizes = facts.huge_page_sizes.iter();
            let files = sizes.map(|(name, bytes)| {
                let most = if own == Some(*bytes) { spec.memory_bytes } else { 0 };
                set(format!("hugetlb.{name}.max"), &most)
            });
            files.collect()
        }
        // The group has only a share. The devices enforce the spec's limits in bytes or operations
        // per second for each disk, and delay the guest. `io.max` counts per block device of the
        // node, which several disks may share. It also blocks the vmm's threads in the kernel,
        // where the daemon cannot pause or end them.
        Controller::Io => vec![set("io.weight", &format!("default {}", weight(spec)))],
        Controller::Pids => vec![set("pids.max", &overhead::tasks(spec))],
    }
}

fn set(file: impl Into<String>, value: &impl ToString) -> Setting {
    Setting {
        file: file.into(),
        value: value.to_string(),
        field: None,
    }
}

/// 100, the kernel's default, for each guaranteed processor; 1 to 10,000.
fn weight(spec: &VmSpec) -> u64 {
    let percent = u64::from(spec.topology.cores()) * u64::from(spec.cpu.fraction_percent);
    percent.clamp(1, 10_000)
}

/// "QUOTA PERIOD" of all threads together: those of the devices count too.
fn cpu_max(share: CpuShare, cores: u32) -> String {
    match share.limit_percent {
        None => format!("max {PERIOD_US}"),
        Some(limit) => {
            let quota = u64::from(cores) * u64::from(limit) * PERIOD_US / 100;
            format!("{quota} {PERIOD_US}")
        }
    }
}

/// An empty line is "as the parent has it".
fn cpuset(spec: &VmSpec, facts: &Facts) -> Vec<Setting> {
    let node = spec.memory.numa_node;
    // A NUMA node may have memory alone.
    let of_node = facts
        .numa_cpus
        .as_ref()
        .filter(|cpus| node.is_some() && !cpus.is_empty());
    let (cpus, field) = match (&spec.host_cpus, of_node) {
        (Some(cpus), _) => (cpus.to_string(), Some("spec.cpu.hostCpus")),
        (None, Some(cpus)) => (cpus.to_string(), Some("spec.memory.numaNode")),
        (None, None) => (String::new(), None),
    };
    vec![
        Setting {
            field,
            ..set("cpuset.cpus", &cpus)
        },
        Setting {
            field: node.map(|_| "spec.memory.numaNode"),
            ..set(
                "cpuset.mems",
                &node.map(|node| node.to_string()).unwrap_or_default(),
            )
        },
    ]
}

fn memory_max(spec: &VmSpec, facts: &Facts) -> u64 {
    let ram = if spec.memory.huge_pages.is_some() && !facts.huge_pages_are_memory {
        0
    } else {
        spec.memory_bytes
    };
    ram.saturating_add(overhead::memory(spec))
        .saturating_add(facts.disks_in_memory)
}

/// Refuses a VM that the NUMA node or the pool of huge pages has no room for, before anything is made. Without that the
/// kernel would look for memory on that node by ending processes there.
pub fn check_room(spec: &VmSpec, room: &Room) -> Result<(), Failure> {
    let place = spec.memory.numa_node.map(|node| format!("NUMA node {node} of "));
    let place = place.unwrap_or_default();
    match (spec.memory.huge_pages, room) {
        (Some(size), Room::HugePages { free }) => {
            let needed = spec.memory_bytes / size.bytes();
            if *free < needed {
                let message = format!(
                    "not enough huge pages: the VM needs {needed} of {size}, {place}the node has {free} free; set more \
                     aside (vm.nr_hugepages), stop another VM or give this one other memory"
                );
                return Err(Failure::new(Kind::Exhausted, "INSUFFICIENT_HUGE_PAGES", message));
            }
        }
        (None, Room::Numa { free }) if *free < spec.memory_bytes => {
            let message = format!(
                "not enough memory: the VM needs {} MiB, {place}the node has {} MiB free; stop another VM or choose \
                 another NUMA node",
                spec.memory_bytes >> 20,
                free >> 20
            );
            return Err(Failure::new(Kind::Exhausted, "INSUFFICIENT_NUMA_MEMORY", message));
        }
        _ => {}
    }
    Ok(())
}

/// Free amount of the special memory that a spec requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// The spec requests no special memory, or the free amount is unreadable.
    Unknown,
    /// Free and unreserved huge pages of the requested size.
    HugePages {
        /// Their number.
        free: u64,
    },
    /// Ordinary memory of its NUMA node.
    Numa {
        /// Bytes that are free or can be made so without loss.
        free: u64,
    },
}

#[cfg(test)]
pub(crate) mod tests;
