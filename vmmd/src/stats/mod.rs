//! Statistics of a VM: the counters of its `vmm`, and the kernel's counters of its processes.
//!
//! The module never waits for the VM's actor. An unresponsive `vmm` costs only its own caller
//! [`TIMEOUT`].

mod usage;

mod disk;

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::task::spawn_blocking;
use uuid::Uuid;
use vmm_protocol::vmm;
use vmmd_api::{
    v1::{self, VmPhase},
    well_known,
};

pub use self::usage::Usage;
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};

use self::disk::public_stats;
use self::usage::waiting_ns;
use crate::{
    control::{self, Client, bounds},
    host::Host,
    registry::vms::{Entry, command::Command},
};

/// How long a `vmm` may take to count.
pub const TIMEOUT: Duration = Duration::from_secs(5);

/// The counters of a running VM, counted once for all clients that ask at the same time.
pub async fn of(host: &Arc<Host>, name: &str, entry: &Entry) -> Result<v1::VmStats, Failure> {
    let vm = Arc::clone(&entry.state.borrow());
    let status = vm.status.clone().unwrap_or_default();
    let pid = status.instance.as_ref().map(|instance| instance.pid);
    let Some((client, counted)) = host.clients.counting(entry.uid) else {
        return Err(match pid {
            Some(_) => unresponsive(name, "it can't be reached"),
            None => not_running(name, status.phase()),
        });
    };
    counted.get(|| count(host, name, &vm, entry, pid, client)).await
}

/// Has the actor of a VM check whether its `vmm` answers. An actor with a full mailbox is busy, and checks at the next time.
pub fn probe(entry: &Entry) {
    entry.mailbox.offer(Command::Probe);
}

async fn count(
    host: &Arc<Host>,
    name: &str,
    vm: &v1::Vm,
    entry: &Entry,
    pid: Option<u32>,
    client: Client,
) -> Result<v1::VmStats, Failure> {
    let uid = entry.uid;
    let counted = tokio::time::timeout(TIMEOUT, client.machine_stats()).await;
    let counted = counted.unwrap_or_else(|_| {
        probe(entry);
        Err(control::Error::Timeout(TIMEOUT))
    });
    let counted = counted.map_err(|error| unresponsive(name, &text::chain(&error)))?;
    let mut counted = bounds::of_vm(counted, vm);
    let (usage, waiting) = usage(host, uid, pid, threads(&counted)).await;
    for (vcpu, waiting) in counted.vcpus.iter_mut().zip(waiting) {
        vcpu.wait_ns = waiting.unwrap_or(vcpu.wait_ns);
    }
    count_taps(host, vm, &mut counted).await;
    Ok(public(name, counted, &usage, memory_of_the_machine(vm)))
}

/// Guest RAM in bytes: that of the spec, unless the machine waits for a restart to get it.
fn memory_of_the_machine(vm: &v1::Vm) -> u64 {
    let mut pending = vm.status.iter().flat_map(|status| &status.pending_changes);
    let change = pending.find(|change| change.path == "spec.memory.sizeBytes");
    let running = change.and_then(|change| {
        // 64-bit numbers are text in the canonical JSON form.
        let json = serde_json::to_value(change.current.as_ref()?).ok()?;
        json.as_str()?.parse().ok()
    });
    let memory = vm.spec.as_ref().and_then(|spec| spec.memory);
    running.unwrap_or_else(|| memory.unwrap_or_default().size_bytes)
}

/// Replaces the `vmm`'s counters of NICs with vhost-net by those of the tap. The `vmm` does not
/// count packets that the kernel carries.
async fn count_taps(host: &Host, vm: &v1::Vm, counted: &mut vmm::MachineStats) {
    let specs = vm.spec.iter().flat_map(|spec| &spec.nics);
    let status = vm.status.iter().flat_map(|status| &status.nics);
    for nic in specs.filter(|nic| nic.backend() == v1::NicBackend::Vhost) {
        let tap = status.clone().find(|status| status.name == nic.name);
        let stats = counted.nics.iter_mut().find(|stats| stats.name == nic.name);
        let (Some(tap), Some(stats)) = (tap, stats) else {
            continue;
        };
        let Ok(Some(link)) = host.links.counters(&tap.tap).await else {
            continue;
        };
        // The node receives on the tap the packets that the guest has sent.
        stats.sent_packets = link.received_packets;
        stats.sent_bytes = link.received_bytes;
        stats.received_packets = link.sent_packets;
        stats.received_bytes = link.sent_bytes;
        stats.received_dropped = stats.received_dropped.saturating_add(link.sent_dropped);
        // A packet with a header that makes no sense is no packet of the tap. Linux 6.12 and 6.18 do not count it as an error either.
        stats.sent_dropped = stats.sent_dropped.saturating_add(link.received_wrong);
        stats.sent_invalid = stats.sent_invalid.saturating_add(link.received_wrong);
    }
}

/// The threads of the vCPUs, as the `vmm` names them.
fn threads(counted: &vmm::MachineStats) -> Vec<Option<u32>> {
    counted.vcpus.iter().map(|vcpu| vcpu.thread).collect()
}

/// Returns the kernel's counters of a VM's processes, and the time for which each of its `threads`
/// waited for a processor. A number that is no thread of the process gets `None`.
async fn usage(
    host: &Arc<Host>,
    uid: Uuid,
    pid: Option<u32>,
    threads: Vec<Option<u32>>,
) -> (Usage, Vec<Option<u64>>) {
    let host = Arc::clone(host);
    let read = spawn_blocking(move || {
        let group = host.cgroups.as_ref().map(|parent| parent.group(uid));
        let waiting = threads.into_iter().map(|thread| waiting_ns(pid?, thread?));
        (Usage::read(group.as_ref(), pid), waiting.collect())
    });
    read.await.unwrap_or_default()
}

fn unresponsive(name: &str, why: &str) -> Failure {
    let message =
        format!("the vmm of VM \"{name}\" does not answer: {why}; try again, or stop the VM by force");
    Failure::new(Kind::Unavailable, "VMM_UNRESPONSIVE", message)
}

fn not_running(name: &str, phase: VmPhase) -> Failure {
    let phase = phase.as_str_name().trim_start_matches("VM_PHASE_").to_lowercase();
    let message = format!("VM \"{name}\" is {phase} and counts nothing: start it first");
    Failure::precondition("NOT_RUNNING", message)
}

fn public(name: &str, counted: vmm::MachineStats, usage: &Usage, memory: u64) -> v1::VmStats {
    let vcpus = counted.vcpus.into_iter().map(|vcpu| v1::VcpuStats {
        index: vcpu.index,
        time: duration(vcpu.time_ns),
        steal_time: duration(vcpu.wait_ns),
    });
    let nics = counted.nics.into_iter().map(|nic| v1::NicStats {
        name: nic.name,
        received_packets: nic.received_packets,
        received_bytes: nic.received_bytes,
        received_dropped: nic.received_dropped,
        sent_packets: nic.sent_packets,
        sent_bytes: nic.sent_bytes,
        sent_dropped: nic.sent_dropped,
        received_filtered: nic.received_filtered,
        sent_invalid: nic.sent_invalid,
    });
    v1::VmStats {
        name: name.to_owned(),
        time: text::timestamp(text::now_ms()),
        cpu: Some(v1::CpuStats {
            user_time: duration(usage.user_ns),
            system_time: duration(usage.system_ns),
            vcpus: vcpus.collect(),
            throttled_time: duration(usage.throttled_ns),
            exits: counted.exits.into_iter().collect(),
        }),
        memory: Some(v1::MemoryStats {
            size_bytes: memory,
            used_bytes: usage.memory_bytes,
            limit_bytes: (usage.memory_limit_bytes != 0).then_some(usage.memory_limit_bytes),
            balloon: counted.balloon.map(balloon),
        }),
        disks: counted.disks.into_iter().map(public_stats).collect(),
        nics: nics.collect(),
    }
}

/// Tags as in virtio 1.3, 5.5.6.3.
fn balloon(stats: vmm::BalloonStats) -> v1::BalloonStats {
    let guest: HashMap<u32, u64> = stats.guest.into_iter().collect();
    let tag = |tag: u32| guest.get(&tag).copied().unwrap_or_default();
    v1::BalloonStats {
        actual_bytes: stats.actual_bytes,
        target_bytes: stats.target_bytes,
        reported_bytes: stats.reported_bytes,
        guest_swap_in_bytes: tag(0),
        guest_swap_out_bytes: tag(1),
        guest_major_faults: tag(2),
        guest_minor_faults: tag(3),
        guest_free_bytes: tag(4),
        guest_total_bytes: tag(5),
        guest_available_bytes: tag(6),
        guest_disk_caches_bytes: tag(7),
        guest_time: text::timestamp(stats.guest_time_ms),
    }
}

fn duration(nanos: u64) -> Option<well_known::Duration> {
    let time = Duration::from_nanos(nanos);
    Some(well_known::Duration {
        seconds: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(time.subsec_nanos()).unwrap_or(0),
    })
}
