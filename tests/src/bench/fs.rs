//! Cost of an operation on a share. The same guest runs in turn under our daemon and under QEMU,
//! with the same virtiofsd in the same node. The same programs also run on the node itself.

use anyhow::{Context, Result, ensure};

use super::table::{Row, render};
use crate::vm::{Console, Vm};
use crate::{Case, Node, node::Kernel, paths};

/// Files of a step of the last three jobs.
const FILES: u32 = 10_000;
/// Guest RAM in MiB.
const MEMORY: u64 = 512;
/// Memory limit of a VM of this size with its overhead, in MiB: the daemon's `memory.max`.
const LIMIT_MIB: u64 = 714;
/// The scope of QEMU and its virtiofsd.
const UNIT: &str = "fsbench";
/// Owner of the directories on the node.
const OWNER: &str = "1234:1235";

/// Job that runs in a directory.
struct Job {
    /// Name in the tables.
    name: &'static str,
    what: What,
}

enum What {
    /// fio's options, and how many operations that is.
    Fio(&'static str, u32),
    /// A step of `fscheck small`.
    Files(&'static str),
}

/// Each job takes at least a few seconds. In a shorter job, the start of fio and first accesses
/// would count.
const JOBS: [Job; 8] = [
    Job {
        name: "1 MiB sequential write",
        what: What::Fio("--rw=write --bs=1M --size=512M", 512),
    },
    Job {
        name: "1 MiB sequential read",
        what: What::Fio("--rw=read --bs=1M --size=512M", 512),
    },
    Job {
        name: "4 KiB random read",
        what: What::Fio(
            "--rw=randread --bs=4k --size=64M --number_ios=4000 --norandommap",
            4000,
        ),
    },
    Job {
        name: "4 KiB random write",
        what: What::Fio(
            "--rw=randwrite --bs=4k --size=64M --number_ios=4000 --norandommap",
            4000,
        ),
    },
    Job {
        name: "4 KiB random write and fsync",
        what: What::Fio(
            "--rw=randwrite --bs=4k --size=64M --number_ios=1000 --norandommap --fsync=1",
            1000,
        ),
    },
    Job {
        name: "a file of one byte is made",
        what: What::Files("create"),
    },
    Job {
        name: "a file is looked up (stat)",
        what: What::Files("stat"),
    },
    Job {
        name: "a file is removed",
        what: What::Files("unlink"),
    },
];

impl Job {
    /// The command in a folder, which prints microseconds as its last word.
    fn command(&self, folder: &str, fscheck: &str) -> String {
        match self.what {
            // Field 9 of version 3 of the terse output is the runtime in ms of reads, field 50 that of writes.
            What::Fio(options, _) => format!(
                "fio --name=j --directory={folder} --direct=1 --ioengine=psync --randrepeat=1 --minimal {options} | \
                 awk -F';' '{{ print ($9 + $50) * 1000 }}'"
            ),
            What::Files(step) => {
                format!("{fscheck} small {folder} {FILES} --step {step} | awk '{{ print $2 }}'")
            }
        }
    }

    fn operations(&self) -> f64 {
        f64::from(match self.what {
            What::Fio(_, operations) => operations,
            What::Files(_) => FILES,
        })
    }
}

/// A guest that has the share at /mnt.
struct Subject {
    console: Console,
    /// The process whose exits KVM counts.
    pid: u32,
}

/// Cost of a job in a turn, per operation.
struct Cost {
    us: f64,
    exits: f64,
}

/// Measures and renders.
pub fn run(node: &Node, runs: u32) -> Result<String> {
    let case = Case::new("bench-fs");
    let fscheck = case.fscheck();
    let srv = format!("/srv/{}", case.name());
    node.sh(&format!(
        "mkdir -p {srv} && cd {srv} && install -m 755 {fscheck} . && for f in ours theirs here; do mkdir -p $f && chown {OWNER} $f; done"
    ));
    let result = measured(&case, node, &srv, runs);
    node.ssh(&format!("rm -rf {srv}"))?;
    result
}

fn measured(case: &Case, node: &Node, srv: &str, runs: u32) -> Result<String> {
    let spec = case.share_guest(Kernel::Cloud612).memory_mib(MEMORY);
    let share = serde_json::json!([{"name": "data", "path": format!("{srv}/ours")}]);
    let vm = Vm::start(case, "", &spec.set("/shares", share));
    let mut ours = Subject {
        console: vm.console(),
        pid: vm.pid(),
    };
    let initrd = case.share_initrd(Kernel::Cloud612);
    let mut theirs = qemu(case, node, srv, &initrd)?;
    for subject in [&mut ours, &mut theirs] {
        subject.console.booted();
        subject.console.run("mount -t virtiofs data /mnt && echo ready");
    }
    // Each subject is first equally often, because the first one takes some percent longer.
    let runs = runs.next_multiple_of(2);
    let mut turns: Vec<Vec<[Cost; 3]>> = Vec::new();
    for turn in 0..runs {
        let mut costs = Vec::new();
        for job in &JOBS {
            let first_ours = turn % 2 == 0;
            let (mut one, mut two) = (None, None);
            for is_ours in [first_ours, !first_ours] {
                if is_ours {
                    one = Some(in_guest(node, &mut ours, job)?);
                } else {
                    two = Some(in_guest(node, &mut theirs, job)?);
                }
            }
            let here = Cost {
                us: microseconds(&node.sh(&as_owner(
                    &job.command(&format!("{srv}/here"), &format!("{srv}/fscheck")),
                )))? / job.operations(),
                exits: 0.0,
            };
            let (Some(one), Some(two)) = (one, two) else {
                continue;
            };
            costs.push([one, two, here]);
        }
        turns.push(costs);
    }
    Ok(report(&turns, runs))
}

/// The guest under QEMU, with a virtiofsd that was started as the daemon starts its own. Both are in a control group with the limits that a VM of the
/// daemon has, as libvirt's are too: the kernel charges a group that has limits for each page and each file that it keeps.
fn qemu(case: &Case, node: &Node, srv: &str, initrd: &str) -> Result<Subject> {
    let socket = format!("{srv}/sock/s");
    let script = format!("{}/in_namespaces.pl", case.folder());
    node.copy_in(&paths::crate_dir().join("measure/in_namespaces.pl"), &script)?;
    node.sh(&format!(
        "cd {srv}/theirs && install -d -o 1234 -g 1235 {srv}/sock && install -m 644 {script} {srv}/in_namespaces.pl && \
         ulimit -n 65536 && (setsid systemd-run -q --scope --collect --unit={UNIT} --slice=machine-{UNIT}.slice -p MemoryMax={LIMIT_MIB}M \
          -p MemorySwapMax=0 -p CPUWeight=100 -p IOWeight=100 -p TasksMax=100 perl {srv}/in_namespaces.pl 1234 1235 /usr/lib/vmmd/virtiofsd --socket-path={srv}/sock/s --shared-dir=. --sandbox=chroot \
          --seccomp=kill --inode-file-handles=never --log-level=warn --cache=auto --rlimit-nofile=0 \
          --translate-uid=squash-guest:0:0:4294967295 --translate-gid=squash-guest:0:0:4294967295 \
          </dev/null >{srv}/theirs.log 2>&1 &) && \
         for i in $(seq 100); do [ -S {socket} ] && break; sleep 0.1; done; cat {srv}/theirs.log"
    ));
    let kernel = node.guests().vmlinux(Kernel::Cloud612);
    let cmdline = "console=ttyS0 quiet panic=-1 cryptomgr.notests";
    let console = Console::open(
        case,
        &format!(
            "echo $$ >{srv}/theirs.pid; echo $$ >/sys/fs/cgroup/machine.slice/machine-{UNIT}.slice/{UNIT}.scope/cgroup.procs; exec qemu-system-x86_64 -M q35,accel=kvm -cpu host -smp 1 -m {MEMORY} -nodefaults -no-user-config \
             -display none -serial stdio -monitor none -object memory-backend-memfd,id=m,size={MEMORY}M,share=on -numa node,memdev=m \
             -chardev socket,id=c,path={socket} -device vhost-user-fs-pci,chardev=c,tag=data,queue-size=1024 \
             -device virtio-rng-pci -kernel {kernel} -initrd {initrd} -append '{cmdline}'"
        ),
    );
    let pid = node.sh(&format!(
        "for i in $(seq 50); do [ -s {srv}/theirs.pid ] && break; sleep 0.1; done; cat {srv}/theirs.pid"
    ));
    Ok(Subject {
        console,
        pid: pid.trim().parse().context("QEMU's process id")?,
    })
}

fn in_guest(node: &Node, subject: &mut Subject, job: &Job) -> Result<Cost> {
    // Neither guest nor node has it in memory from before.
    subject.console.run("sync; echo 3 >/proc/sys/vm/drop_caches");
    node.sh("sync; echo 3 >/proc/sys/vm/drop_caches");
    let before = exits(node, subject.pid)?;
    let text = subject.console.run_within(&job.command("/mnt", "fscheck"), 600);
    let after = exits(node, subject.pid)?;
    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    let exits = after.saturating_sub(before) as f64;
    Ok(Cost {
        us: microseconds(&text)? / job.operations(),
        exits: exits / job.operations(),
    })
}

/// Returns the number of exits of the process's VM from KVM's counters.
fn exits(node: &Node, pid: u32) -> Result<u64> {
    let text = node.sh(&format!("cat /sys/kernel/debug/kvm/{pid}-*/exits"));
    text.trim()
        .parse()
        .with_context(|| format!("KVM's counter says {text}"))
}

fn microseconds(text: &str) -> Result<f64> {
    let value: f64 = text
        .trim()
        .parse()
        .with_context(|| format!("a job printed {text}"))?;
    ensure!(value > 0.0, "a job took no time: {text}");
    Ok(value)
}

fn as_owner(command: &str) -> String {
    let quoted = command.replace('\'', "'\\''");
    format!(
        "sync; echo 3 >/proc/sys/vm/drop_caches; setpriv --reuid=1234 --regid=1235 --clear-groups sh -c '{quoted}'"
    )
}

fn report(turns: &[Vec<[Cost; 3]>], runs: u32) -> String {
    let rows = |value: fn(&Cost) -> f64, subjects: usize| {
        JOBS.iter().enumerate().map(move |(number, job)| {
            let of = |subject: usize| -> Vec<(u32, f64)> {
                let costs = turns.iter().filter_map(|costs| costs.get(number)?.get(subject));
                (0..).zip(costs).map(|(turn, cost)| (turn, value(cost))).collect()
            };
            let figures: Vec<_> = (0..subjects).map(of).collect();
            Row::of_turns(job.name, &figures)
        })
    };
    let time: Vec<_> = rows(|cost| cost.us, 3).collect();
    let exits: Vec<_> = rows(|cost| cost.exits, 2).collect();
    format!(
        "### Shares\n\n1 vCPU, {MEMORY} MiB, one share with `cache: auto`; QEMU (q35) with the same virtiofsd, options, namespaces and limits of its control group, and the same \
         programs on the node's directory. fio with O_DIRECT and one request at a time, on a file of 512 MiB in sequence and of 64 MiB at random; {FILES} files in 100 folders. Caches of guest and \
         node are dropped before each job; {runs} turns, in each ours and QEMU one after the other, and in the next the other way round. Figures are medians, ratios are medians of each turn's ratio, \
         with their quartiles.\n\nTime for each operation in microseconds of this node:\n\n{}\nVM exits for each operation:\n\n{}\n",
        render(&["vmm", "qemu", "node"], &time),
        render(&["vmm", "qemu"], &exits)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_job_has_a_row_in_both_tables() {
        let cost = |us, exits| Cost { us, exits };
        let turn = || {
            JOBS.iter()
                .map(|_| [cost(1.0, 3.0), cost(2.0, 4.0), cost(0.5, 0.0)])
                .collect()
        };
        let text = report(&[turn(), turn()], 2);
        for job in &JOBS {
            let row = format!("| {} |", job.name);
            assert_eq!(text.matches(&row).count(), 2, "{text}");
        }
        assert!(
            text.contains("0.50 (0.50–0.50)") && text.contains("0.75 (0.75–0.75)"),
            "{text}"
        );
    }
}
