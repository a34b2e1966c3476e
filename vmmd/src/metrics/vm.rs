//! The figures of VMs.

use std::time::Duration;

use vmmd_api::{
    v1::{self, DiskOperationStats, VmPhase},
    well_known,
};

use super::{
    Sample,
    families::{Families, Histogram, as_f64},
    name,
};

/// Adds those of all VMs.
pub fn add(families: &mut Families, samples: &[Sample]) {
    for Sample { vm, stats } in samples {
        let name = name(vm);
        let status = vm.status.clone().unwrap_or_default();
        state(families, name, &status);
        if status.instance.is_some() {
            families.gauge(
                "vmmd_vm_stats_up",
                "1 when the VM's vmm has answered this scrape, 0 when it has not and its other series are missing",
                &[("vm", name)],
                if stats.is_some() { 1.0 } else { 0.0 },
            );
        }
        let Some(stats) = stats else { continue };
        if let Some(cpu) = &stats.cpu {
            processors(families, name, cpu);
        }
        if let Some(memory) = &stats.memory {
            memory_of(families, name, memory);
        }
        for disk in &stats.disks {
            disk_of(families, name, disk);
        }
        for nic in &stats.nics {
            nic_of(families, name, nic);
        }
    }
}

fn state(families: &mut Families, vm: &str, status: &v1::VmStatus) {
    // The numbers have gaps.
    let phases = (1..=VmPhase::Terminating.into()).filter_map(|number: i32| VmPhase::try_from(number).ok());
    for phase in phases {
        let label = phase.as_str_name().trim_start_matches("VM_PHASE_").to_lowercase();
        families.gauge(
            "vmmd_vm_phase",
            "1 for the phase that the VM is in, 0 for all others",
            &[("vm", vm), ("phase", &label)],
            if phase == status.phase() { 1.0 } else { 0.0 },
        );
    }
    let counts = status.counts.unwrap_or_default();
    let help = "Starts of the VM since its creation, of which automatic ones by its run policy";
    let automatic = counts.automatic_starts;
    for (kind, count) in [
        ("automatic", automatic),
        ("requested", counts.starts.saturating_sub(automatic)),
    ] {
        families.counter("vmmd_vm_starts", help, &[("vm", vm), ("kind", kind)], count);
    }
    for (reason, count) in [
        ("guest_shutdown", counts.guest_shutdowns),
        ("guest_panic", counts.guest_panics),
        ("guest_crash", counts.guest_crashes),
        ("vmm_error", counts.vmm_errors),
        ("out_of_memory", counts.out_of_memory),
        ("lost", counts.lost),
        ("failed_start", counts.failed_starts),
        ("probe_failed", counts.probe_failures),
    ] {
        families.counter(
            "vmmd_vm_ends",
            "Runs of the VM that have ended without having been asked to, since its creation",
            &[("vm", vm), ("reason", reason)],
            count,
        );
    }
    families.counter(
        "vmmd_vm_guest_resets",
        "Resets by the guest since the VM's creation",
        &[("vm", vm)],
        counts.guest_resets,
    );
    families.counter(
        "vmmd_vm_crash_resets",
        "Resets of the machine after a triple fault since the VM's creation",
        &[("vm", vm)],
        counts.crash_resets,
    );
}

fn processors(families: &mut Families, vm: &str, cpu: &v1::CpuStats) {
    for (mode, time) in [("user", cpu.user_time), ("system", cpu.system_time)] {
        families.counter_f64(
            "vmmd_vm_cpu_seconds",
            "Processor time of the VM with all its threads",
            &[("vm", vm), ("mode", mode)],
            seconds(time),
        );
    }
    families.counter_f64(
        "vmmd_vm_cpu_throttled_seconds",
        "Time in which the limit of its cgroup held the VM back",
        &[("vm", vm)],
        seconds(cpu.throttled_time),
    );
    for vcpu in &cpu.vcpus {
        let index = vcpu.index.to_string();
        let labels = [("vm", vm), ("vcpu", index.as_str())];
        families.counter_f64(
            "vmmd_vm_vcpu_seconds",
            "Processor time of a vCPU",
            &labels,
            seconds(vcpu.time),
        );
        families.counter_f64(
            "vmmd_vm_vcpu_steal_seconds",
            "Time for which a vCPU could have run and the node ran something else",
            &labels,
            seconds(vcpu.steal_time),
        );
    }
    // KVM counts more than exits; "exits" is the sum of all.
    let exits = cpu.exits.iter().filter(|(name, _)| name.ends_with("_exits"));
    for (reason, count) in exits {
        families.counter(
            "vmmd_vm_exits",
            "Exits of the VM's vCPUs by KVM's name for the reason",
            &[("vm", vm), ("reason", reason.trim_end_matches("_exits"))],
            *count,
        );
    }
    if let Some(count) = cpu.exits.get("exits") {
        families.counter(
            "vmmd_vm_exits_all",
            "Exits of the VM's vCPUs for any reason",
            &[("vm", vm)],
            *count,
        );
    }
}

fn memory_of(families: &mut Families, vm: &str, memory: &v1::MemoryStats) {
    let mut gauge = |name, help, value: u64| families.gauge(name, help, &[("vm", vm)], as_f64(value));
    gauge(
        "vmmd_vm_memory_size_bytes",
        "RAM of the VM as in its spec",
        memory.size_bytes,
    );
    gauge(
        "vmmd_vm_memory_used_bytes",
        "Memory of the node that the VM holds",
        memory.used_bytes,
    );
    if let Some(limit) = memory.limit_bytes {
        gauge("vmmd_vm_memory_limit_bytes", "The most that it may hold", limit);
    }
    if let Some(balloon) = &memory.balloon {
        gauge(
            "vmmd_vm_balloon_actual_bytes",
            "What the balloon holds",
            balloon.actual_bytes,
        );
        gauge(
            "vmmd_vm_balloon_target_bytes",
            "What it was asked to hold",
            balloon.target_bytes,
        );
        gauge(
            "vmmd_vm_balloon_guest_available_bytes",
            "What the guest says that its programs could still get",
            balloon.guest_available_bytes,
        );
        families.counter(
            "vmmd_vm_balloon_reported_bytes",
            "Given back through free page reporting",
            &[("vm", vm)],
            balloon.reported_bytes,
        );
    }
}

fn disk_of(families: &mut Families, vm: &str, disk: &v1::DiskStats) {
    for (operation, stats) in [
        ("read", &disk.read),
        ("write", &disk.write),
        ("flush", &disk.flush),
        ("discard", &disk.discard),
    ] {
        let Some(stats) = stats else { continue };
        let labels = [("vm", vm), ("disk", disk.name.as_str()), ("operation", operation)];
        families.counter(
            "vmmd_vm_disk_bytes",
            "Bytes of the requests of a disk",
            &labels,
            stats.bytes,
        );
        families.counter(
            "vmmd_vm_disk_errors",
            "Requests of a disk that the node could not carry out",
            &labels,
            stats.errors,
        );
        families.histogram(
            "vmmd_vm_disk_request_duration_seconds",
            "Requests of a disk that were answered, by the time that took",
            &labels,
            latencies(stats),
        );
    }
    let labels = [("vm", vm), ("disk", disk.name.as_str())];
    for (name, help, value) in [
        (
            "vmmd_vm_disk_in_flight",
            "Requests of a disk that are not answered yet",
            disk.in_flight,
        ),
        (
            "vmmd_vm_disk_throttled",
            "Of those, requests that wait because of a rate limit",
            disk.throttled,
        ),
        (
            "vmmd_vm_disk_held",
            "Of those, requests that wait for a resume after an error",
            disk.held,
        ),
        (
            "vmmd_vm_disk_waiting",
            "Requests that the guest made available and that were not taken from it yet",
            disk.waiting,
        ),
        (
            "vmmd_vm_disk_capacity_bytes",
            "Size of a disk",
            disk.capacity_bytes,
        ),
    ] {
        families.gauge(name, help, &labels, as_f64(value));
    }
}

fn latencies(stats: &DiskOperationStats) -> Histogram {
    let latency = stats.latency.clone().unwrap_or_default();
    let bounds = latency.bounds_us.iter().map(|bound| as_f64(*bound) / 1e6);
    let bounds = bounds.chain([f64::INFINITY]);
    let mut buckets: Vec<_> = bounds.zip(latency.counts).collect();
    if buckets.is_empty() {
        buckets.push((f64::INFINITY, stats.requests));
    }
    Histogram {
        sum: seconds(stats.total_time),
        buckets,
    }
}

fn nic_of(families: &mut Families, vm: &str, nic: &v1::NicStats) {
    for (direction, packets, bytes, dropped) in [
        (
            "receive",
            nic.received_packets,
            nic.received_bytes,
            nic.received_dropped,
        ),
        ("transmit", nic.sent_packets, nic.sent_bytes, nic.sent_dropped),
    ] {
        let labels = [("vm", vm), ("nic", nic.name.as_str()), ("direction", direction)];
        families.counter(
            "vmmd_vm_nic_packets",
            "Packets, as the guest sees it",
            &labels,
            packets,
        );
        families.counter("vmmd_vm_nic_bytes", "Bytes of those", &labels, bytes);
        families.counter(
            "vmmd_vm_nic_dropped_packets",
            "Packets that were lost between the guest and the node",
            &labels,
            dropped,
        );
    }
}

fn seconds(time: Option<well_known::Duration>) -> f64 {
    let time = time.unwrap_or_default();
    Duration::try_from(time).unwrap_or_default().as_secs_f64()
}
