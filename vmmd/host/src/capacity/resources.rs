//! Amounts of what VMs are given of the node.

use vmmd_api::v1;
use vmmd_spec::{overhead, resources::HugePages, vm::VmSpec};

use super::{
    Facts,
    limits::{Overcommit, Reserved},
};

/// Amounts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Cores, in thousandths.
    pub vcpu_millis: u64,
    /// Guaranteed processor time, in thousandths of a logical processor.
    pub cpu_millis: u64,
    /// Bytes of memory other than huge pages that are set aside.
    pub memory: u64,
    /// Bytes in huge pages of 2 MiB.
    pub huge_2m: u64,
    /// Bytes in huge pages of 1 GiB.
    pub huge_1g: u64,
    /// Bytes of the file system with the daemon's state.
    pub disk: u64,
}

/// Demand of one running VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Of the node.
    pub resources: Resources,
    /// Its guest's RAM in bytes.
    pub ram: u64,
}

impl Demand {
    /// Returns the demand of a VM with this spec.
    pub fn of(spec: &VmSpec) -> Self {
        let ram = spec.memory_bytes;
        let cores = spec.topology.cores();
        let mut resources = Resources {
            vcpu_millis: u64::from(cores) * 1000,
            cpu_millis: spec.cpu.millis(cores),
            // The same amount as the limit of the VM's cgroup. The sum of all promises never
            // exceeds the node.
            memory: overhead::memory(spec),
            ..Resources::default()
        };
        let from = match spec.memory.huge_pages {
            None => &mut resources.memory,
            Some(HugePages::Size2M) => &mut resources.huge_2m,
            Some(HugePages::Size1G) => &mut resources.huge_1g,
        };
        *from = from.saturating_add(ram);
        Self { resources, ram }
    }
}

impl Demand {
    /// Returns the demand of an invalid spec, from its RAM and cores only.
    pub fn unchecked(spec: &v1::VmSpec) -> Self {
        let ram = spec.memory.as_ref().map_or(0, |memory| memory.size_bytes);
        let cores = spec.cpu.as_ref().map_or(0, |cpu| cpu.cores);
        let millis = u64::from(cores) * 1000;
        let resources = Resources {
            vcpu_millis: millis,
            cpu_millis: millis,
            memory: ram,
            ..Resources::default()
        };
        Self { resources, ram }
    }
}

impl Demand {
    /// The larger of each amount.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            resources: self.resources.max(other.resources),
            ram: self.ram.max(other.ram),
        }
    }
}

impl Resources {
    /// The smaller amount of each kind.
    pub fn min(self, other: Self) -> Self {
        Self {
            vcpu_millis: self.vcpu_millis.min(other.vcpu_millis),
            cpu_millis: self.cpu_millis.min(other.cpu_millis),
            memory: self.memory.min(other.memory),
            huge_2m: self.huge_2m.min(other.huge_2m),
            huge_1g: self.huge_1g.min(other.huge_1g),
            disk: self.disk.min(other.disk),
        }
    }

    /// The larger of each amount.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            vcpu_millis: self.vcpu_millis.max(other.vcpu_millis),
            cpu_millis: self.cpu_millis.max(other.cpu_millis),
            memory: self.memory.max(other.memory),
            huge_2m: self.huge_2m.max(other.huge_2m),
            huge_1g: self.huge_1g.max(other.huge_1g),
            disk: self.disk.max(other.disk),
        }
    }

    /// Whether no amount is larger than that of `other`.
    pub fn within(self, other: Self) -> bool {
        self.max(other) == other
    }

    /// Both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            vcpu_millis: self.vcpu_millis.saturating_add(other.vcpu_millis),
            cpu_millis: self.cpu_millis.saturating_add(other.cpu_millis),
            memory: self.memory.saturating_add(other.memory),
            huge_2m: self.huge_2m.saturating_add(other.huge_2m),
            huge_1g: self.huge_1g.saturating_add(other.huge_1g),
            disk: self.disk.saturating_add(other.disk),
        }
    }
}

impl From<Resources> for v1::Resources {
    fn from(amounts: Resources) -> Self {
        Self {
            vcpu_millis: amounts.vcpu_millis,
            cpu_millis: amounts.cpu_millis,
            memory_bytes: amounts.memory,
            huge_pages_2m_bytes: amounts.huge_2m,
            huge_pages_1g_bytes: amounts.huge_1g,
            disk_bytes: amounts.disk,
        }
    }
}

/// Returns the total resources of the node.
pub fn capacity(facts: &Facts) -> Resources {
    let millis = u64::from(facts.cpus) * 1000;
    Resources {
        vcpu_millis: millis,
        cpu_millis: millis,
        memory: facts.memory,
        huge_2m: facts.huge_2m,
        huge_1g: facts.huge_1g,
        disk: facts.disk,
    }
}

/// Returns the resources that VMs may have. Huge pages are reserved memory and are never
/// overcommitted.
pub fn allocatable(facts: &Facts, overcommit: &Overcommit, reserved: &Reserved) -> Resources {
    let has = capacity(facts);
    let small = has.memory.saturating_sub(has.huge_2m.saturating_add(has.huge_1g));
    Resources {
        vcpu_millis: overcommit
            .vcpu
            .of(has.vcpu_millis.saturating_sub(reserved.cpu_millis)),
        cpu_millis: overcommit
            .cpu
            .of(has.cpu_millis.saturating_sub(reserved.cpu_millis)),
        memory: overcommit
            .memory
            .of(small.saturating_sub(reserved.memory_bytes())),
        disk: has.disk.saturating_sub(reserved.disk_bytes()),
        ..has
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capacity::{limits::Ratio, placement::tests::spec};

    #[test]
    fn what_vms_may_have_is_the_rest_after_the_reserve_times_the_ratio() {
        let facts = Facts {
            cpus: 4,
            memory: 16 << 30,
            huge_2m: 2 << 30,
            huge_1g: 4 << 30,
            disk: 100 << 30,
            ..Facts::default()
        };
        let overcommit = Overcommit {
            cpu: Ratio::try_from(2.0).unwrap(),
            vcpu: Ratio::try_from(10.0).unwrap(),
            memory: Ratio::try_from(1.5).unwrap(),
        };
        let reserved = Reserved {
            cpu_millis: 500,
            memory_mib: 2048,
            disk_gib: 20,
        };
        let expected = Resources {
            vcpu_millis: 35_000,
            cpu_millis: 7_000,
            memory: 12 << 30,
            huge_2m: 2 << 30,
            huge_1g: 4 << 30,
            disk: 80 << 30,
        };
        assert_eq!(allocatable(&facts, &overcommit, &reserved), expected);
        let all = Reserved {
            cpu_millis: u64::MAX,
            memory_mib: u64::MAX,
            disk_gib: u64::MAX,
        };
        let nothing = Resources {
            huge_2m: 2 << 30,
            huge_1g: 4 << 30,
            ..Resources::default()
        };
        assert_eq!(allocatable(&facts, &overcommit, &all), nothing);
    }

    #[test]
    fn a_vm_needs_its_cores_their_fraction_and_its_ram_with_what_the_vmm_takes() {
        let small = spec(2, 512, 20);
        let (demand, overhead) = (Demand::of(&small), overhead::memory(&small));
        let expected = Resources {
            vcpu_millis: 2000,
            cpu_millis: 400,
            memory: (512 << 20) + overhead,
            ..Resources::default()
        };
        assert_eq!((demand.resources, demand.ram), (expected, 512 << 20));
        let mut huge = spec(2, 512, 20);
        huge.memory.huge_pages = Some(HugePages::Size2M);
        let expected = Resources {
            memory: overhead,
            huge_2m: 512 << 20,
            ..expected
        };
        assert_eq!(Demand::of(&huge).resources, expected);
    }
}
