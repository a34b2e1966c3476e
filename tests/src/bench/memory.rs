//! Memory: cost of guest RAM by its backing, and other memory of a `vmm`.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::Value;

use super::{
    measured, median,
    table::{Row, plain},
    with_measure,
};
use crate::{
    Case, Node, guest,
    node::Kernel,
    programs, run as command,
    storage::{Disk, Format},
    vm::{Vm, VmSpec},
    wait::Deadline,
};

/// `measure`'s names of what backs guest RAM, and the columns' names.
const BACKINGS: [(&str, &str); 5] = [
    ("private", "private, THP"),
    ("shared", "memfd, small pages"),
    ("shared-huge", "memfd, THP allowed"),
    ("hugetlb-private", "private, the host's huge pages"),
    ("hugetlb", "memfd, the host's huge pages"),
];

/// `measure`'s names of what backs the memory of a process, and the columns' names.
const ACCESSES: [(&str, &str); 3] = [
    ("private", "private, THP"),
    ("shared", "memfd, small pages"),
    ("collapsed", "memfd, collapsed"),
];
/// How much memory of this machine is touched, in MiB.
const ACCESS_MIB: u32 = 512;

/// As many VMs are up at once.
const VMS: usize = 50;

#[derive(Deserialize)]
struct Line {
    vmm: String,
    result: Value,
}

#[derive(Deserialize)]
struct Memory {
    guest_kib: f64,
    guest_huge_kib: f64,
    written_kib: f64,
    unshared_files_kib: f64,
    shared_kib: f64,
    pss_kib: f64,
}

#[derive(Deserialize)]
struct Cost {
    init_us: f64,
    to_init: BTreeMap<String, f64>,
    idle: Memory,
    access: Access,
    of_access: BTreeMap<String, f64>,
    touched: Memory,
    given_back: Option<Memory>,
    host_gained_kib: Option<f64>,
}

#[derive(Deserialize)]
struct Access {
    touch_us: f64,
    collapse_us: f64,
    faults: f64,
    huge_kib: f64,
    read_ns: f64,
}

/// Measures and renders.
pub fn run(node: &Node, runs: u32) -> Result<String> {
    Ok(backings(node, runs)? + &here(runs)? + &of_vmms()?)
}

fn backings(node: &Node, runs: u32) -> Result<String> {
    let of_guest = with_measure(node, Kernel::Cloud612, guest::initrd_with)?;
    let arguments = format!("memory {of_guest} --runs {runs}");
    let lines = measured(node, &arguments, Deadline::seconds(u64::from(runs) * 1200))?;
    render_backings(lines, runs)
}

fn render_backings(lines: Vec<Line>, runs: u32) -> Result<String> {
    let mut shmem = String::new();
    let mut costs: Vec<(String, Cost)> = Vec::new();
    for line in lines {
        match line.result.get("shmem_enabled").and_then(Value::as_str) {
            Some(text) => shmem = text.to_owned(),
            None => costs.push((line.vmm, serde_json::from_value(line.result).context("a cost")?)),
        }
    }
    let row = |name: &str, value: &dyn Fn(&Cost) -> f64| {
        let of = |(backing, _): (&str, &str)| {
            let own = costs.iter().filter(|(name, _)| name == backing);
            median(own.map(|(_, cost)| value(cost)))
        };
        Row::new(name, BACKINGS.map(of).to_vec())
    };
    let mib = |kib: f64| kib / 1024.0;
    let counter = |counters: &BTreeMap<String, f64>, name: &str| counters.get(name).copied().unwrap_or(0.0);
    let rows = [
        row("nested page faults to init", &|cost| {
            counter(&cost.to_init, "pf_taken")
        }),
        row("VM exits to init", &|cost| counter(&cost.to_init, "exits")),
        row("process start to init, ms", &|cost| cost.init_us / 1000.0),
        row("guest RAM in use when the guest is up, MiB", &|cost| {
            mib(cost.idle.guest_kib)
        }),
        row("of it in huge pages, MiB", &|cost| mib(cost.idle.guest_huge_kib)),
        row("nested page faults of a program that touches 256 MiB", &|cost| {
            counter(&cost.of_access, "pf_taken")
        }),
        row("its first touch of them, ms", &|cost| {
            cost.access.touch_us / 1000.0
        }),
        row("its read of a word in a random page, ns", &|cost| {
            cost.access.read_ns
        }),
        row("guest RAM in use after it, MiB", &|cost| {
            mib(cost.touched.guest_kib)
        }),
        row("given back when the balloon took 320 MiB, MiB", &|cost| {
            let after = cost.given_back.as_ref().map(|memory| memory.guest_kib);
            after.map_or(f64::NAN, |after| mib(cost.touched.guest_kib - after))
        }),
        row("by which the host's free memory grew, MiB", &|cost| {
            cost.host_gained_kib.map_or(f64::NAN, mib)
        }),
    ];
    Ok(format!(
        "### What backs guest RAM\n\n1 vCPU, 512 MiB, the kernel and initramfs of the start rows, under `vmm` in the node; \
         medians of {runs} runs in turn. Debian's setting of `shmem_enabled` is `{shmem}`; the third column's is `advise`. \
         How long a read takes on an emulated processor tells little of its page tables; the second table has that.\n\n{}\n",
        plain(&BACKINGS.map(|(_, name)| name), &rows),
    ))
}

/// Measures the cost of memory on this machine, without a guest.
fn here(runs: u32) -> Result<String> {
    let measure = programs::build_static("vmmd-measure", "measure")?;
    let mut costs: Vec<(&str, Access)> = Vec::new();
    for _ in 0..runs {
        for (backing, _) in ACCESSES {
            let mut measure = std::process::Command::new(&measure);
            measure.args(["access", "--mib", &ACCESS_MIB.to_string(), "--backing", backing]);
            let text = command::check(&mut measure, Deadline::seconds(300))?;
            costs.push((
                backing,
                serde_json::from_str(&text).context("read what measure printed")?,
            ));
        }
    }
    let row = |name: &str, value: &dyn Fn(&Access) -> f64| {
        let of = |(backing, _): (&str, &str)| {
            let own = costs.iter().filter(|(name, _)| *name == backing);
            median(own.map(|(_, access)| value(access)))
        };
        Row::new(name, ACCESSES.map(of).to_vec())
    };
    let rows = [
        row("page faults", &|access| access.faults),
        row("first touch, ms", &|access| access.touch_us / 1000.0),
        row("in huge pages then, MiB", &|access| access.huge_kib / 1024.0),
        row("MADV_COLLAPSE, ms", &|access| access.collapse_us / 1000.0),
        row("read of a word in a random page, ns", &|access| access.read_ns),
    ];
    Ok(format!(
        "A process that touches {ACCESS_MIB} MiB on the machine that runs the node, without a guest; CPU time, medians of \
         {runs} runs in turn. The machine is a guest itself, so each of its page walks goes through two page tables, as a \
         guest's does.\n\n{}\n",
        plain(&ACCESSES.map(|(_, name)| name), &rows),
    ))
}

/// Measures the memory of `vmm` processes other than guest RAM.
fn of_vmms() -> Result<String> {
    let case = Case::new("bench-memory");
    let bridge = case.bridge();
    let one = {
        let spec = with_all_devices(&case, "one", &bridge, VmSpec::busybox(Kernel::Cloud612));
        let (vm, mut console) = Vm::boot(&case, "-one", &spec);
        // Every device does something.
        let use_all = "ip link set eth0 up; dd if=/dev/vda of=/dev/null bs=64k; dd if=/dev/zero of=/dev/vda bs=64k count=64; \
                       head -c 64 /dev/hwrng >/dev/null; sync";
        console.run(use_all);
        look(case.node(), &[vm.pid()])?
    };
    let kernel = format!("{}/tiny", case.folder());
    case.node().sh(&format!("/root/measure tiny {kernel}"));
    let _overcommit = Overcommit::new(case.node());
    let mut vms = Vec::new();
    let mut first = None;
    for number in 0..VMS {
        let spec = VmSpec::new(&kernel, None).memory_mib(128);
        let spec = with_all_devices(&case, &format!("n{number}"), &bridge, spec);
        vms.push(Vm::start(&case, &format!("-{number}"), &spec));
        if let [vm] = vms.as_slice() {
            first = Some(look(case.node(), &[vm.pid()])?);
        }
    }
    let pids: Vec<u32> = vms.iter().map(Vm::pid).collect();
    let many = look(case.node(), &pids)?;
    Ok(render_vmms(&[one, first.unwrap_or_default(), many]))
}

/// Adds a disk and a NIC to the devices that each VM has.
fn with_all_devices(case: &Case, name: &str, bridge: &str, spec: VmSpec) -> VmSpec {
    let image = case.image(name, Format::Raw, 16);
    let disk = Disk::new("data", Format::Raw, &image);
    spec.with_disk(disk).nic("eth0", bridge)
}

fn look(node: &Node, pids: &[u32]) -> Result<Vec<Memory>> {
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    let text = node.sh(&format!("/root/measure look {}", pids.join(" ")));
    let lines = text.lines().map(serde_json::from_str);
    lines
        .collect::<Result<_, _>>()
        .context("read what measure printed")
}

/// Lets the node have more VMs than its memory is for, until dropped.
struct Overcommit<'a>(&'a Node);

impl<'a> Overcommit<'a> {
    fn new(node: &'a Node) -> Self {
        node.sh("cp /etc/vmmd/config.toml /etc/vmmd/config.before-bench; \
             sed -i '/^\\[overcommit\\]/a memory = 4.0' /etc/vmmd/config.toml; systemctl restart vmmd");
        Self(node)
    }
}

impl Drop for Overcommit<'_> {
    fn drop(&mut self) {
        // If this fails, the end of the node discards the change.
        let back = "mv /etc/vmmd/config.before-bench /etc/vmmd/config.toml; systemctl restart vmmd";
        let _ = self.0.ssh(back);
    }
}

fn render_vmms(columns: &[Vec<Memory>; 3]) -> String {
    let row = |name: &str, value: fn(&Memory) -> f64| {
        let of = |memories: &Vec<Memory>| median(memories.iter().map(value));
        Row::new(name, columns.iter().map(of).collect())
    };
    let rows = [
        row("written by it (Private_Dirty)", |memory| memory.written_kib),
        row("of files, nobody else has it (Private_Clean)", |memory| {
            memory.unshared_files_kib
        }),
        row("shared with other processes, mostly program text", |memory| {
            memory.shared_kib
        }),
        row("PSS", |memory| memory.pss_kib),
    ];
    let many = format!("{VMS} VMs, halted, each");
    format!(
        "### Memory of a vmm beside guest RAM\n\nIn KiB, by `/proc/PID/smaps` without guest RAM, of VMs of the daemon with a disk, a NIC on a \
         bridge, entropy device, balloon and serial port. The guest that is up has used all of them; the halted one is a \
         kernel of some bytes, so its devices' threads wait for a driver. What of the program nobody else has is shared as soon \
         as there is a second VM.\n\n{}\n",
        plain(&["1 VM, guest up", "1 VM, halted", &many], &rows),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn memory(kib: u64) -> Value {
        json!({
            "guest_kib": kib, "guest_huge_kib": 1024, "written_kib": 600, "unshared_files_kib": 20, "shared_kib": 6000,
            "pss_kib": 700,
        })
    }

    #[test]
    fn backing_without_a_balloon_has_a_dash() {
        let line = |vmm: &str, given_back: Option<u64>| {
            let result = json!({
                "init_us": 8_000_000, "to_init": {"exits": 6000, "pf_taken": 90}, "idle": memory(102_400),
                "access": {"touch_us": 5000, "collapse_us": 0, "faults": 128, "huge_kib": 0, "read_ns": 40.0},
                "of_access": {"pf_taken": 128}, "touched": memory(409_600),
                "given_back": given_back.map(memory), "host_gained_kib": given_back.map(|_| 204_800),
            });
            let vmm = vmm.to_owned();
            Line { vmm, result }
        };
        let host = Line {
            vmm: "host".to_owned(),
            result: json!({"shmem_enabled": "always [never] deny"}),
        };
        let lines = BACKINGS.map(|(name, _)| line(name, (!name.starts_with("hugetlb")).then_some(204_800)));
        let text = render_backings([host].into_iter().chain(lines).collect(), 1).expect("a table");
        for row in [
            "is `always [never] deny`",
            "| VM exits to init | 6,000 | 6,000 | 6,000 | 6,000 | 6,000 |",
            "| process start to init, ms | 8,000 | 8,000 | 8,000 | 8,000 | 8,000 |",
            "| guest RAM in use when the guest is up, MiB | 100 | 100 | 100 | 100 | 100 |",
            "| given back when the balloon took 320 MiB, MiB | 200 | 200 | 200 | – | – |",
        ] {
            assert!(text.contains(row), "no {row:?} in {text}");
        }
    }

    #[test]
    fn what_a_vmm_has_written_is_told_from_what_it_shares() {
        let of = |count: usize| {
            let memories = (0..count).map(|_| serde_json::from_value(memory(4096)).expect("memory"));
            memories.collect::<Vec<Memory>>()
        };
        let text = render_vmms(&[of(1), of(1), of(VMS)]);
        assert!(
            text.contains("| 1 VM, guest up | 1 VM, halted | 50 VMs, halted, each |"),
            "{text}"
        );
        assert!(
            text.contains("| written by it (Private_Dirty) | 600 | 600 | 600 |"),
            "{text}"
        );
        assert!(
            text.contains("| shared with other processes, mostly program text | 6,000 | 6,000 | 6,000 |"),
            "{text}"
        );
    }
}
