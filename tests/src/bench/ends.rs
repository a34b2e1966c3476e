//! Delay until clients learn about the end of a run or about a guest's panic. It lasts from the
//! event until the line reaches a client that watches the VM, and a client that watches the events.
//! All times come from the node's clock.

use anyhow::{Context, Result, ensure};

use super::median;
use crate::Case;
use crate::node::{Kernel, Stream};
use crate::vm::{Console, Vm, VmSpec};
use crate::wait::Deadline;

/// Within how many milliseconds it is to be told.
const BUDGET: f64 = 1000.0;

/// Prefixes each incoming line with the time in seconds. A process per line would take longer than
/// the measured delay.
const STAMP: &str = "while IFS= read -r line; do echo \"$EPOCHREALTIME $line\"; done";

/// One way to end.
struct End {
    name: &'static str,
    how: How,
    /// Text that completes the wait in a watch of the VM, and text that must precede it in the same
    /// line.
    status: [&'static str; 2],
    /// and the reason of the event.
    event: &'static str,
}

/// Method to end the VM, with the start of the measurement.
enum How {
    /// The node's shell does this; `$pid` is the `vmm`, `$group` its control group.
    Node(&'static str),
    /// Command for the guest's shell. The measurement starts with the line that contains the second
    /// text.
    Guest(&'static str, &'static str),
}

const FAILED: &str = "\"phase\":\"VM_PHASE_FAILED\"";
const STOPPED: &str = "\"phase\":\"VM_PHASE_STOPPED\"";

const ENDS: [End; 5] = [
    End {
        name: "`kill -9` of the vmm",
        how: How::Node("kill -9 $pid"),
        status: [FAILED, "EXIT_REASON_LOST"],
        event: "Lost",
    },
    End {
        name: "out of memory in its control group",
        how: How::Node("echo 16M >$group/memory.max"),
        status: [FAILED, "EXIT_REASON_OUT_OF_MEMORY"],
        event: "OutOfMemory",
    },
    End {
        name: "guest power-off, from the command on",
        how: How::Guest("printf 'is-%s\\n' over; poweroff -f", "is-over"),
        status: [STOPPED, "EXIT_REASON_GUEST_SHUTDOWN"],
        event: "GuestShutdown",
    },
    End {
        name: "guest triple fault, from the command on",
        how: How::Guest("printf 'is-%s\\n' over; reboot -f", "is-over"),
        status: [FAILED, "EXIT_REASON_GUEST_CRASH"],
        event: "GuestCrash",
    },
    End {
        name: "guest panic, from its first words on",
        how: How::Guest("echo c >/proc/sysrq-trigger", "Kernel panic"),
        status: ["GuestPanicked", ""],
        event: "GuestPanicked",
    },
];

/// Ends a VM `runs` times in each way and renders.
pub fn run(runs: u32) -> Result<String> {
    let case = Case::new("bench-ends");
    let spec = VmSpec::busybox(Kernel::Cloud612)
        .memory_mib(128)
        .set("/onCrash", "CRASH_POLICY_STOP".into())
        .set("/onPanic", "PANIC_POLICY_IGNORE".into())
        .cmdline("panic=0 reboot=triple");
    let vm = Vm::create(&case, "", &spec);
    let mut rows = Vec::new();
    for end in &ENDS {
        let mut told = Vec::new();
        for _ in 0..runs {
            told.push(measure(&case, &vm, end).context(end.name)?);
        }
        rows.push((end.name, told));
    }
    Ok(render(runs, &rows))
}

/// Milliseconds until the VM's watch and the events have told of it.
fn measure(case: &Case, vm: &Vm<'_>, end: &End) -> Result<[f64; 2]> {
    let (node, name) = (case.node(), vm.name());
    vm.ctl("start");
    let mut console = Console::open(case, &format!("vmmctl console {name} 2>/dev/null | {STAMP}"));
    console.booted();
    let mut status = node.stream(&format!("vmmctl get vm {name} -w -o json | {STAMP}"));
    let mut events = node.stream(&format!(
        "vmmctl events -w --limit 1 --vm {name} -o json | {STAMP}"
    ));
    status.until("\n", Deadline::seconds(30));
    events.until("\n", Deadline::seconds(30));
    let began = match end.how {
        How::Node(script) => {
            let pid = vm.pid();
            let group = "/sys/fs/cgroup$(cut -d: -f3 /proc/$pid/cgroup)";
            let script = format!("pid={pid}; group={group}; echo \"$EPOCHREALTIME\"; {script}");
            time(&node.ssh(&script)?.stdout)?
        }
        How::Guest(command, words) => {
            console.type_line(command);
            time(&console.until(words, 60))?
        }
    };
    let [wanted, before] = end.status;
    let line = told(&mut status, wanted);
    ensure!(line.contains(before), "no {before} in {line}");
    let status = time(&line)?;
    let event = time(&told(&mut events, &format!("\"reason\":\"{}\"", end.event)))?;
    ensure!(status >= began && event >= began, "told before it happened");
    if vm.phase() == "RUNNING" {
        vm.ctl("stop --force");
    }
    Ok([status, event].map(|told| (told - began) * 1000.0))
}

/// The line with `wanted`, up to there.
fn told(stream: &mut Stream, wanted: &str) -> String {
    stream.until(wanted, Deadline::seconds(60))
}

/// The time before the last line, in seconds.
fn time(text: &str) -> Result<f64> {
    let line = text.trim_end().rsplit('\n').next().unwrap_or(text);
    let stamp = line.split(' ').next().unwrap_or(line);
    stamp.parse().with_context(|| format!("no time in {line:?}"))
}

fn render(runs: u32, rows: &[(&str, Vec<[f64; 2]>)]) -> String {
    let mut text = format!(
        "### The end of a run\n\nUntil clients have been told, in milliseconds of this node: of its phase and reason (`vmmctl get \
         vm -w`), and by an event (`vmmctl events -w`); median and longest of {runs}.\n\n\
         | | status | longest | event | longest | budget |\n|---|---:|---:|---:|---:|---:|\n"
    );
    for (name, told) in rows {
        text += &format!("| {name} |");
        for which in 0..2 {
            let values = told.iter().filter_map(|told| told.get(which)).copied();
            let longest = values.clone().fold(0.0, f64::max);
            text += &format!(" {:.0} | {longest:.0} |", median(values));
        }
        text += &format!(" {BUDGET:.0} |\n");
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_that_of_the_last_line() {
        let text = "1.5 one\n1795303357.694093 {\"phase\":\"X\"";
        assert!((time(text).expect("a time") - 1_795_303_357.694_093).abs() < 1e-6);
        assert!((time("2.25\n").expect("a time") - 2.25).abs() < f64::EPSILON);
        time("no time").expect_err("words are none");
    }

    #[test]
    fn a_row_has_medians_and_the_longest() {
        let told = vec![[10.0, 40.0], [30.0, 60.0], [20.0, 50.0]];
        let text = render(3, &[("a way", told)]);
        assert!(
            text.ends_with("| a way | 20 | 30 | 50 | 60 | 1000 |\n\n"),
            "{text}"
        );
    }
}
