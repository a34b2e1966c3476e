//! Counters of a machine, collected from its parts. Only the query of the balloon's statistics
//! involves the guest.

use std::collections::BTreeMap;

use vmm_protocol::vmm::{MachineStats, VcpuStats};

use super::{assemble::balloon, machine::Machine};
use crate::kvm::StatsReader;

/// All counters.
pub(super) fn of(machine: &Machine) -> MachineStats {
    let vcpus = (0..).zip(machine.vcpus.times()).map(|(index, times)| VcpuStats {
        index,
        time_ns: times.map_or(0, |(_, running_ns)| running_ns),
        wait_ns: 0,
        thread: times.map(|(thread, _)| thread),
    });
    let readers = machine.vcpus.stats().flatten().chain(&machine.vm_stats);
    MachineStats {
        vcpus: vcpus.collect(),
        exits: sum(readers).into_iter().collect(),
        nics: machine.nics.stats(),
        balloon: machine.balloon.as_ref().map(balloon::stats),
        disks: machine.disks.stats(),
        shares: machine.shares.stats(),
    }
}

/// KVM's counters since the start, summed by name.
fn sum<'a>(readers: impl Iterator<Item = &'a StatsReader>) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    // A statistics file that fails to read lacks its counters, as on an older kernel.
    for stat in readers.filter_map(|reader| reader.read().ok()).flatten() {
        if stat.cumulative {
            let sum: &mut u64 = sums.entry(stat.name).or_default();
            *sum = sum.saturating_add(stat.value);
        }
    }
    sums
}
