//! Many idle guests, and a daemon that is killed again and again without effect on the guests.
//!
//! Each guest counts the seconds on its serial console, with its own uptime beside the count. The
//! reference for a guest's output is its serial log, which its `vmm` writes. The view of a client
//! is the data that its console received.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::Value;
use vmmd_tests::host::Accel;
use vmmd_tests::node::{Kernel, Node, Stream};
use vmmd_tests::vm::{BOOT, VmSpec};
use vmmd_tests::wait::Deadline;
use vmmd_tests::{Case, long};

/// How often the daemon is killed, and in the long form.
const KILLS: usize = 6;
const KILLS_LONG: usize = 20;
/// VMs that have a client at their console all the time.
const FOLLOWED: usize = 2;
/// Lines that each guest prints before the first kill, to see how regular they are in a busy node.
const BUSY: usize = 10;

/// Within how many seconds of its death the daemon's control is back. An emulated node, where
/// the figure says little, has sixty times as long.
const CONTROL: f64 = 2.0;

/// No process is made for a line: the guest is idle in between.
const COUNT: &str = "busybox mkfifo /tmp/tick; exec 3<>/tmp/tick; i=0
while :; do
    i=$((i + 1)); read -r up _ </proc/uptime; echo \"up $i $up.\"
    read -r -t 1 _ <&3
done";

/// How many VMs: as many as boot in some minutes of an emulated node, or as VMMD_FLEET says.
fn size() -> usize {
    let wanted = std::env::var("VMMD_FLEET")
        .ok()
        .map(|text| text.parse().expect("VMMD_FLEET"));
    wanted.unwrap_or(if Accel::detect() == Accel::Kvm { 50 } else { 5 })
}

/// VMs that are deleted, and a configuration that is put back, when this is dropped.
struct Fleet<'case> {
    node: &'case Node,
    names: Vec<String>,
    /// Each VM's serial log in the node.
    logs: BTreeMap<String, String>,
}

impl<'case> Fleet<'case> {
    fn boot(case: &'case Case, size: usize) -> Self {
        let node = case.node();
        // The daemon reserves memory for each guest, so that no guest starves another. The sum
        // exceeds the memory of the node.
        node.sh("cp /etc/vmmd/config.toml /etc/vmmd/config.before-fleet; sed -i '/^\\[overcommit\\]/a memory = 4.0' /etc/vmmd/config.toml; systemctl restart vmmd");
        let names: Vec<_> = (0..size)
            .map(|number| format!("{}-{number:02}", case.name()))
            .collect();
        let mut fleet = Fleet {
            node,
            names,
            logs: BTreeMap::new(),
        };
        let spec = VmSpec::busybox(Kernel::Cloud612)
            .memory_mib(128)
            .cmdline("guest.modules=none")
            .script(COUNT);
        let mut create = String::from("vmmctl create -f - <<'MANIFEST'\n");
        for name in &fleet.names {
            writeln!(create, "---\n{}", spec.manifest(name)).expect("text");
        }
        node.sh(&format!("{create}MANIFEST\n"));
        for vm in fleet.get() {
            let text = |pointer| {
                vm.pointer(pointer)
                    .and_then(Value::as_str)
                    .expect("text")
                    .to_owned()
            };
            let log = format!("/var/log/vmmd/vms/{}/serial.log", text("/metadata/uid"));
            fleet.logs.insert(text("/metadata/name"), log);
        }
        // Two at a time: the node has as many processors. A log's follower ends with the next line after the first.
        let one = "vmmctl start $0 && timeout 300 tail -n +1 -F $1 2>/dev/null | grep -q -m 1 \"^up 2 \" || \
                   { echo \"$0 did not come up:\"; tail -n 20 $1; exit 1; }";
        let boots = fleet.logs.iter().map(|(name, log)| format!("{name} {log}"));
        let boots = boots.collect::<Vec<_>>().join("\n");
        let script = format!("xargs -P 2 -n 2 sh -c '{one}' <<'VMS'\n{boots}\nVMS\n");
        let deadline = Deadline::seconds(BOOT + 20 * size as u64);
        let booted = node.ssh_within(&script, deadline).expect("boot");
        assert!(booted.success(), "{}{}", booted.stdout, booted.stderr);
        fleet
    }

    /// These VMs, as the daemon has them.
    fn get(&self) -> Vec<Value> {
        let text = self.node.sh("vmmctl get vm -o json");
        let vms: Vec<Value> = serde_json::from_str(&text).expect("a list");
        let name = |vm: &Value| vm["metadata"]["name"].as_str().map(str::to_owned);
        let ours = |vm: &Value| name(vm).is_some_and(|name| self.names.contains(&name));
        vms.into_iter().filter(ours).collect()
    }

    /// The processes of the VMs, all of which are under control.
    fn processes(&self) -> Vec<Value> {
        let vms = self.get();
        assert_eq!(vms.len(), self.names.len());
        for vm in &vms {
            let mut conditions = vm["status"]["conditions"].as_array().expect("conditions").iter();
            let ready = conditions
                .find(|condition| condition["type"] == "Ready")
                .expect("Ready");
            assert_eq!(
                (&vm["status"]["phase"], &ready["status"]),
                (
                    &Value::from("VM_PHASE_RUNNING"),
                    &Value::from("CONDITION_STATUS_TRUE")
                ),
                "{vm}"
            );
        }
        vms.into_iter()
            .map(|vm| vm["status"]["instance"]["pid"].clone())
            .collect()
    }

    /// Output of each guest so far.
    fn printed(&self) -> BTreeMap<String, Vec<Line>> {
        let show = self
            .logs
            .iter()
            .map(|(name, log)| format!("echo '== {name}'; cat {log}"));
        let text = self.node.sh(&show.collect::<Vec<_>>().join("\n"));
        let logs = by_name(&text).into_iter();
        logs.map(|(name, lines)| (name.to_owned(), lines)).collect()
    }

    /// Clients at the consoles of some VMs. They end when they are dropped.
    fn clients(&self) -> Vec<(&str, Stream)> {
        let open = |name: &String| {
            self.node
                .stream(&format!("vmmctl console {name} </dev/null 2>/dev/null"))
        };
        let names = self.names.iter().take(FOLLOWED);
        names.map(|name| (name.as_str(), open(name))).collect()
    }

    /// Waits until each client shows a line that its guest has not printed yet.
    fn follow(&self, clients: &mut [(&str, Stream)]) {
        let printed = self.printed();
        for (name, client) in clients {
            shows(client, printed[*name].len() + 1);
        }
    }

    /// Opens the console of every VM: earlier output is replayed from the beginning, and further
    /// output follows.
    fn open_consoles(&self, folder: &str, printed: &BTreeMap<String, Vec<Line>>) {
        let open = printed.iter().map(|(name, lines)| {
            let next = lines.len() + 2;
            format!("timeout 240 vmmctl console {name} </dev/null 2>/dev/null | tee {folder}/{name} | grep -q -m 1 '^up {next} ' &")
        });
        let show = printed
            .keys()
            .map(|name| format!("echo '== {name}'; cat {folder}/{name}"));
        let script = open.chain(["wait".to_owned()]).chain(show);
        let text = self.node.sh(&script.collect::<Vec<_>>().join("\n"));
        for (name, seen) in by_name(&text) {
            assert_eq!(seen.first().map(|line| line.count), Some(1), "{name}");
            assert!(
                seen.len() > printed[name].len(),
                "{name} has {} lines",
                seen.len()
            );
            consecutive(name, &seen);
        }
    }

    /// Waits until each guest has printed so many lines more; returns all.
    fn printed_after(&self, more: usize) -> BTreeMap<String, Vec<Line>> {
        let before = self.printed();
        let waits = before.iter().map(|(name, lines)| {
            let (log, count) = (&self.logs[name], lines.len() + more);
            format!("timeout 240 tail -n +1 -F {log} 2>/dev/null | grep -q -m 1 '^up {count} ' &")
        });
        let script = waits.chain(["wait".to_owned()]);
        self.node.sh(&script.collect::<Vec<_>>().join("\n"));
        let after = self.printed();
        for (name, lines) in &after {
            assert!(lines.len() >= before[name].len() + more, "{name} has stopped");
        }
        after
    }
}

impl Drop for Fleet<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // A guest whose kernel has panicked has restarted its count, and its log is deleted
            // with the VM.
            let logs = self.logs.values().cloned().collect::<Vec<_>>().join(" ");
            let shown = self
                .node
                .ssh(&format!("grep -H -A 30 -E 'Kernel panic|BUG:|Oops' {logs}"));
            let _ = shown.map(|output| eprintln!("{}", output.stdout));
        }
        // Each fails only when there is no node any more.
        let names = self.names.join(" ");
        let _ = self
            .node
            .sh(&format!("vmmctl delete --force --ignore-not-found {names}"));
        let _ = self
            .node
            .sh("mv /etc/vmmd/config.before-fleet /etc/vmmd/config.toml; systemctl restart vmmd");
    }
}

/// A line of a guest: its count, and its uptime in seconds.
#[derive(Clone, Copy, Debug)]
struct Line {
    count: u64,
    uptime: f64,
}

/// The lines below each "== NAME".
fn by_name(text: &str) -> Vec<(&str, Vec<Line>)> {
    let logs = text.split("== ").skip(1);
    logs.map(|log| {
        let (name, log) = log.split_once('\n').expect("a name");
        (name, lines(log))
    })
    .collect()
}

/// Whole lines only: a session and a log may begin and end anywhere.
fn lines(text: &str) -> Vec<Line> {
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let parse = |line: &str| {
        let (count, uptime) = line.trim_end().strip_prefix("up ")?.split_once(' ')?;
        Some(Line {
            count: count.parse().ok()?,
            uptime: uptime.strip_suffix('.')?.parse().ok()?,
        })
    };
    whole.filter_map(parse).collect()
}

/// Fails when a number is missing, comes twice or out of order.
fn consecutive(whose: &str, lines: &[Line]) {
    for pair in lines.windows(2) {
        assert_eq!(pair[0].count + 1, pair[1].count, "{whose}: {pair:?}");
    }
}

/// The longest time between two lines, in seconds of the guest's uptime.
fn longest(lines: &[Line]) -> f64 {
    lines
        .windows(2)
        .map(|pair| pair[1].uptime - pair[0].uptime)
        .fold(0.0, f64::max)
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Kills the daemon and waits until systemd has a new one that says it is ready, by then it has found its VMs. Returns
/// the seconds from the kill, and those from the start of the new process, both by systemd's clock: looking often would
/// take the processors that it needs.
fn kill(node: &Node) -> (f64, f64) {
    let text = node.sh(
        "pid=$(systemctl show -P MainPID vmmd); read -r up _ </proc/uptime; kill -9 $pid
         while sleep 1; [ \"$(systemctl show -P MainPID vmmd)\" = $pid ] || ! systemctl is-active -q vmmd; do :; done
         echo $up $(systemctl show -P ExecMainStartTimestampMonotonic vmmd) $(systemctl show -P ActiveEnterTimestampMonotonic vmmd)",
    );
    let numbers: Vec<f64> = text
        .split_whitespace()
        .map(|word| word.parse().expect("a number"))
        .collect();
    let [killed, started, ready] = numbers[..] else {
        panic!("{text}")
    };
    (ready / 1e6 - killed, (ready - started) / 1e6)
}

#[test]
fn no_guest_notices_that_the_daemon_is_killed_again_and_again() {
    let case = Case::new("fleet");
    let node = case.node();
    let began = std::time::Instant::now();
    let fleet = Fleet::boot(&case, size());
    let booted = began.elapsed();
    let mut clients = fleet.clients();
    fleet.follow(&mut clients);
    let processes = fleet.processes();
    let at_first = fleet.printed();
    // The processors are as busy as with a daemon that starts.
    let ask = "while vmmctl get vm -o json >/dev/null; do echo; done";
    let busy = [(); 2].map(|()| node.stream(ask));
    let before = fleet.printed_after(BUSY);
    drop(busy);

    let mut back = Vec::new();
    let kills = if long() { KILLS_LONG } else { KILLS };
    for _ in 0..kills {
        back.push(kill(node));
        assert_eq!(
            fleet.processes(),
            processes,
            "the same processes, all under control"
        );
        fleet.follow(&mut clients);
    }
    let after = fleet.printed_after(2);

    let (mut busy, mut killed) = (Vec::new(), Vec::new());
    for (name, lines) in &after {
        assert_eq!(lines.first().map(|line| line.count), Some(1), "{name}");
        consecutive(name, lines);
        // A count is a line's number.
        let (first, middle) = (at_first[name].len(), before[name].len());
        busy.push(longest(&lines[first - 1..middle]));
        killed.push(longest(&lines[middle - 1..]));
    }
    let worst = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
    let (since_kill, since_start): (Vec<f64>, Vec<f64>) = back.into_iter().unzip();
    eprintln!(
        "{} VMs booted in {booted:.0?}. Longest time between two lines of a guest, median and worst: {:.2} s, {:.2} s before; \
         {:.2} s, {:.2} s while the daemon was killed {kills} times. Control was back {:.2} s, {:.2} s after the kill, {:.2} s, \
         {:.2} s after the start of the daemon.",
        after.len(),
        median(&busy),
        worst(&busy),
        median(&killed),
        worst(&killed),
        median(&since_kill),
        worst(&since_kill),
        median(&since_start),
        worst(&since_start),
    );
    // A daemon that holds up its guests does so to all of them, each time.
    assert!(
        median(&killed) <= 3.0 * median(&busy) + 1.0,
        "guests were held up"
    );
    let slow = if Accel::detect() == Accel::Kvm { 1.0 } else { 60.0 };
    assert!(
        worst(&since_kill) <= CONTROL * slow,
        "control was not back in time"
    );
    for (name, client) in &mut clients {
        saw_all(name, client, after[*name].len());
    }
    fleet.open_consoles(&case.folder(), &after);
}

/// Waits until a client's console shows a guest's line of this count.
fn shows(client: &mut Stream, count: usize) {
    client.until(&format!("\nup {count} "), Deadline::seconds(60));
}

/// Checks the output that a permanently connected client received: each line once, from the first
/// to the current one.
fn saw_all(name: &str, client: &mut Stream, printed: usize) {
    // When the beginning of a line has arrived, the line before it is complete.
    shows(client, printed + 2);
    let seen = lines(&client.text());
    assert_eq!(seen.first().map(|line| line.count), Some(1), "{name}");
    assert!(seen.len() > printed, "{name}: {} lines of {printed}", seen.len());
    consecutive(name, &seen);
}
