//! `measure memory`: the same guest under our `vmm` with different RAM backings. Measures the cost
//! of the boot, the cost of touched memory, and the memory that the balloon returns to the host.

use std::fs;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    kvm_stats::{self, Counters},
    memory::{self, Memory},
    run::Running,
    trace,
    vmm::{self, Programs, Subject},
};

/// Guest RAM in bytes.
const RAM: u64 = 512 << 20;
/// Memory that a program in the guest touches, in MiB.
const TOUCHED: u64 = 256;
/// Memory that the balloon leaves to the guest, in bytes, and the resulting upper limit of the
/// guest's free memory, in KiB.
const TARGET: u64 = 192 << 20;
const FREE_KIB: u64 = 170 << 10;

const SHMEM_ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// A way to back guest RAM.
struct Backing {
    name: &'static str,
    /// More of `spec.memory`.
    memory: fn(&mut Value),
    /// Temporary setting of the host: a file of /sys and its value.
    setting: (&'static str, &'static str),
    /// Whether the spec can have a balloon that gives memory back.
    balloon: bool,
}

const BACKINGS: [Backing; 5] = [
    Backing {
        name: "private",
        memory: |memory| memory["backing"] = json!("MEMORY_BACKING_PRIVATE"),
        setting: (SHMEM_ENABLED, "never"),
        balloon: true,
    },
    Backing {
        name: "shared",
        memory: |memory| memory["backing"] = json!("MEMORY_BACKING_SHARED"),
        setting: (SHMEM_ENABLED, "never"),
        balloon: true,
    },
    Backing {
        name: "shared-huge",
        memory: |memory| memory["backing"] = json!("MEMORY_BACKING_SHARED"),
        setting: (SHMEM_ENABLED, "advise"),
        balloon: true,
    },
    Backing {
        name: "hugetlb-private",
        memory: |memory| {
            memory["backing"] = json!("MEMORY_BACKING_PRIVATE");
            memory["hugePages"] = json!("HUGE_PAGES_2M");
        },
        // Number of 2 MiB pages of the RAM.
        setting: (HUGE_PAGES, "256"),
        balloon: false,
    },
    Backing {
        name: "hugetlb",
        memory: |memory| {
            memory["backing"] = json!("MEMORY_BACKING_SHARED");
            memory["hugePages"] = json!("HUGE_PAGES_2M");
        },
        setting: (HUGE_PAGES, "256"),
        balloon: false,
    },
];

/// Results of one run. Times are in microseconds.
#[derive(Serialize)]
struct Cost {
    /// From just before the process is started.
    init_us: u128,
    /// KVM's counters until then.
    to_init: Counters,
    idle: Memory,
    /// Output of `measure access` in the guest.
    access: Value,
    /// KVM's counters of that program's run.
    of_access: Counters,
    touched: Memory,
    /// Memory after the balloon has reached its target.
    given_back: Option<Memory>,
    /// By how much the host's free memory grew then, in KiB; less when others needed some.
    host_gained_kib: Option<i64>,
}

/// A setting of the host. Dropping it restores the previous value.
struct Setting {
    path: &'static str,
    before: String,
}

impl Setting {
    fn new((path, value): (&'static str, &str)) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("read {path}"))?;
        // A file with several words has the active one in brackets.
        let chosen = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
        let before = chosen.map_or(text.trim(), |(chosen, _)| chosen).to_owned();
        fs::write(path, value).with_context(|| format!("write {value} to {path}"))?;
        Ok(Self { path, before })
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        // Best effort: the node is disposable.
        fs::write(self.path, &self.before).ok();
    }
}

/// Runs all backings in turn, `runs` times, and passes each cost to `each`.
pub fn run(programs: &Programs, runs: u32, each: impl Fn(&str, u32, &Value)) -> Result<()> {
    each(
        "host",
        0,
        &json!({ "shmem_enabled": fs::read_to_string(SHMEM_ENABLED)?.trim() }),
    );
    for number in 0..runs {
        for backing in &BACKINGS {
            let cost = measure(programs, backing).with_context(|| backing.name.to_owned())?;
            each(backing.name, number, &serde_json::to_value(cost)?);
        }
    }
    Ok(())
}

fn measure(programs: &Programs, backing: &Backing) -> Result<Cost> {
    let _setting = Setting::new(backing.setting)?;
    let mut memory = json!({"sizeBytes": RAM});
    (backing.memory)(&mut memory);
    let balloon = backing.balloon.then(|| json!({"targetBytes": TARGET}));
    let subject: Subject = vmm::with_memory("memory", programs, &memory, balloon)?;

    let begin = trace::now();
    let mut running = Running::new(&subject)?;
    running.wait_for("GUEST-INIT")?;
    let init_us = trace::now().saturating_sub(begin).as_micros();
    let pid = running.pid();
    let to_init = kvm_stats::read(pid)?;
    running.wait_for("GUEST-READY")?;
    let idle = memory::of(pid)?;

    let before = kvm_stats::read(pid)?;
    running.type_line(&format!("measure access --mib {TOUCHED}"))?;
    let line = running.wait_for("read_ns")?;
    let access = serde_json::from_str(line.trim()).with_context(|| format!("read {line:?}"))?;
    let of_access = since(&before, &kvm_stats::read(pid)?);
    let touched = memory::of(pid)?;
    let mut given_back = (None, None);
    if backing.balloon {
        let free = host_free_kib()?;
        // The driver inflates as soon as it is loaded. The marker does not occur in the echo of the
        // command.
        running.type_line(&format!(
            "while read -r m; do insmod $m; done </lib/modules/order; \
             until [ $(sed -n 's/^MemFree: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo) -lt {FREE_KIB} ]; do sleep 1; done; \
             sleep 3; printf 'BALLOON-%s\\n' FULL"
        ))?;
        running.wait_for("BALLOON-FULL")?;
        given_back = (Some(memory::of(pid)?), Some(host_free_kib()? - free));
    }
    Ok(Cost {
        init_us,
        to_init,
        idle,
        access,
        of_access,
        touched,
        given_back: given_back.0,
        host_gained_kib: given_back.1,
    })
}

fn since(before: &Counters, after: &Counters) -> Counters {
    let grown = |(name, value): (&String, &u64)| {
        let before = before.get(name).copied().unwrap_or(0);
        (name.clone(), value.saturating_sub(before))
    };
    after.iter().map(grown).collect()
}

fn host_free_kib() -> Result<i64> {
    let text = fs::read_to_string("/proc/meminfo").context("read meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemFree:"));
    let value = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    value.context("MemFree in meminfo")
}
