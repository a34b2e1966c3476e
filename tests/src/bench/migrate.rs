//! Live migration and snapshots, beside QEMU: a guest on a bridge sends a datagram every 5 ms, and what counts is for how long none comes.

mod qemu;

use anyhow::{Context, Result};

use super::{
    median,
    table::{Row, render},
};
use crate::{
    Case, Node, guest,
    initramfs::Extra,
    node::Kernel,
    programs,
    two_daemons::{self, Daemon},
    vm::{BOOT, VmSpec, base64},
};
use qemu::{From, Qemu};

/// Memory of each guest.
const MEMORY_MIB: u64 = 256;
/// How long a guest may stand still, as far as that can be foreseen: QEMU's default, and ours.
const DOWNTIME_MS: u32 = 300;
/// Number of the pair of daemons, distinct from those of tests.
const NUMBER: u32 = 90;
/// UDP port to which guests tick.
const TICKS: u16 = 9000;
/// Addresses of the node on the bridge, and of the guest.
const NODE: &str = "10.77.0.1";
const GUEST: &str = "10.77.0.2";

/// A kind of guest.
#[derive(Clone, Copy, Debug)]
struct Kind {
    title: &'static str,
    /// Memory that the guest rewrites continuously.
    rewritten_mib: u64,
    /// Whether the guest's vCPUs may be throttled. Without throttling, a move within the downtime
    /// limit would need 110 MiB/s if the guest rewrites its memory continuously. No encrypting VMM
    /// reaches this rate in an emulated node: the move fails or never ends.
    throttled: bool,
}

const KINDS: [Kind; 2] = [
    Kind {
        title: "An idle guest",
        rewritten_mib: 0,
        throttled: false,
    },
    Kind {
        title: "A guest that rewrites 32 MiB for ever",
        rewritten_mib: 32,
        throttled: true,
    },
];

/// Cost of a move or a snapshot.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    /// For how long no tick came.
    silent_ms: f64,
    /// For how long the VMM says that the guest stood still.
    paused_ms: f64,
    total_ms: f64,
    /// Bytes that left an interface, with all that is around them.
    wire_mib: f64,
    /// Sent pages, including repeated ones. Pages of zeroes do not count.
    pages_mib: f64,
}

/// Results of one VMM with one kind of guest.
#[derive(Debug, Default)]
struct Measured {
    /// The longest silence in two seconds without a move.
    undisturbed_ms: Vec<f64>,
    moves: Vec<Cost>,
    /// Silence, and the VMM's own account.
    snapshots: Vec<Cost>,
    /// From the command to the first tick.
    restore_ms: Vec<f64>,
    /// The same with memory read on demand.
    on_demand_ms: Vec<f64>,
}

/// Prepared node for the guests.
struct Stage<'case> {
    case: &'case Case,
    bridge: String,
    folder: String,
    initrd: String,
}

/// Measures and renders.
pub fn run(runs: u32) -> Result<String> {
    let case = Case::new("bench-migrate");
    let stage = Stage::new(&case)?;
    let daemons = two_daemons::pair(&case, NUMBER);
    for daemon in &daemons {
        daemon.join_bridge(&stage.bridge);
    }
    let mut text = format!(
        "### Live migration and snapshots\n\n1 vCPU, {MEMORY_MIB} MiB, the same kernel and initramfs, a NIC on a bridge; a datagram every 5 ms, as it comes \
         to the node. Ours between two daemons of the node, over TCP with TLS. QEMU between two processes over TCP, with TLS and the same cipher \
         (ChaCha20-Poly1305), and without encryption, which ours never is; its own limit on bandwidth is off. What is sent is counted at the interface; \
         {DOWNTIME_MS} ms of downtime are allowed. The guest that rewrites its memory is throttled by each (`--force`; `auto-converge`), \
         in pieces of at most 99 ms by ours and of up to a second by QEMU, which are silence too. Pages are those of the guest's memory that were not zero, and those that were changed meanwhile. Snapshots are taken of the running guest, and \
         of QEMU's with `background-snapshot`; its restore has no form on demand, so that of ours stands beside the copied one of QEMU. Medians of {runs} \
         moves in turn, of one boot each.\n\n"
    );
    for kind in KINDS {
        let ours = stage.ours(&daemons, kind, runs).context("ours")?;
        let encrypted = stage.qemu(kind, true, runs).context("QEMU with TLS")?;
        let plain = stage.qemu(kind, false, runs).context("QEMU without TLS")?;
        let table = table(&[ours, encrypted, plain]);
        text += &format!("{}:\n\n{table}\n", kind.title);
    }
    Ok(text)
}

/// Renders three columns: ours, QEMU with TLS, and QEMU without TLS.
fn table(measured: &[Measured; 3]) -> String {
    let of = |name: &str, values: &dyn Fn(&Measured) -> Vec<f64>| {
        Row::new(name, measured.iter().map(|of| median(values(of))).collect())
    };
    let moves = |value: fn(&Cost) -> f64| move |of: &Measured| of.moves.iter().map(value).collect();
    let snapshots = |value: fn(&Cost) -> f64| move |of: &Measured| of.snapshots.iter().map(value).collect();
    let rows = [
        of("longest silence in 2 s without a move, ms", &|of| {
            of.undisturbed_ms.clone()
        }),
        of("migration: silence, ms", &moves(|cost| cost.silent_ms)),
        of(
            "migration: the guest stood still, by the VMM's own account, ms",
            &moves(|cost| cost.paused_ms),
        ),
        of("migration: all, ms", &moves(|cost| cost.total_ms)),
        of("migration: sent, MiB", &moves(|cost| cost.wire_mib)),
        of(
            "migration: bytes sent for each byte of pages",
            &moves(|cost| cost.wire_mib / cost.pages_mib),
        ),
        of("snapshot: silence, ms", &snapshots(|cost| cost.silent_ms)),
        of(
            "snapshot: the guest stood still, by the VMM's own account, ms",
            &snapshots(|cost| cost.paused_ms),
        ),
        of("restore to the first tick, memory copied, ms", &|of| {
            of.restore_ms.clone()
        }),
        of("restore to the first tick, on demand, ms", &|of| {
            of.on_demand_ms.clone()
        }),
    ];
    render(&["vmm", "q35 with TLS", "q35 without"], &rows)
}

impl<'case> Stage<'case> {
    fn new(case: &'case Case) -> Result<Self> {
        let node = case.node();
        let measure = programs::build_static("vmmd-measure", "measure")?;
        node.copy_in(&measure, "/root/measure")?;
        let initrd = guest::initrd_with(Kernel::Cloud612, &[Extra::new(measure, "bin/measure")])?;
        let folder = case.folder();
        let there = format!("{folder}/initrd");
        node.copy_in(&initrd, &there)?;
        let bridge = case.bridge();
        node.sh(&format!("ip addr add {NODE}/24 dev {bridge}"));
        node.sh(&format!(
            "systemd-run -q --collect --unit={}-hear /bin/sh -c '/root/measure hear {TICKS} >{folder}/heard'",
            case.name()
        ));
        Qemu::make_key(node, &folder);
        Ok(Self {
            case,
            bridge,
            folder,
            initrd: there,
        })
    }

    fn node(&self) -> &Node {
        self.case.node()
    }

    fn cmdline(kind: Kind) -> String {
        let script = format!(
            "measure tick --to {NODE}:{TICKS} --rewrite-mib {}",
            kind.rewritten_mib
        );
        format!("guest.ip={GUEST}/24 guest.run={}", base64(script.as_bytes()))
    }

    /// The node's time in tenths of a millisecond.
    fn now(&self) -> Result<f64> {
        Ok(self.node().sh("date +%s%4N").trim().parse()?)
    }

    /// The longest time without a tick since `begin`, or between two ticks, in milliseconds.
    fn silence(&self, begin: f64) -> Result<f64> {
        let heard = self.heard(begin)?;
        let gaps = heard.windows(2).filter_map(|pair| match pair {
            [one, next] => Some(next - one),
            _ => None,
        });
        Ok(gaps.fold(0.0, f64::max) / 10.0)
    }

    fn heard(&self, begin: f64) -> Result<Vec<f64>> {
        let script = format!("awk '$1 >= {begin:.0}' {}/heard", self.folder);
        let text = self.node().sh(&script);
        let times = text.lines().map(str::parse);
        times.collect::<Result<_, _>>().context("read when ticks came")
    }

    /// Waits until ticks come and returns when the first since `begin` came.
    fn first_tick(&self, begin: f64, seconds: u64) -> Result<f64> {
        let script = format!(
            "timeout {seconds} sh -c 'until awk \"\\$1 >= {begin:.0} {{ print; exit }}\" {}/heard | grep .; do sleep 0.1; done'",
            self.folder
        );
        Ok(self.node().sh(&script).trim().parse()?)
    }

    /// Two seconds in which nothing happens.
    fn undisturbed(&self) -> Result<f64> {
        let begin = self.now()?;
        self.node().sh("sleep 2");
        self.silence(begin)
    }

    fn ours(&self, daemons: &[Daemon<'_>; 2], kind: Kind, runs: u32) -> Result<Measured> {
        let name = self.case.name();
        let spec = VmSpec::new(
            self.node().guests().vmlinuz(Kernel::Cloud612),
            Some(self.initrd.clone()),
        )
        .memory_mib(MEMORY_MIB)
        .cmdline(&Self::cmdline(kind))
        .nic("eth0", &self.bridge);
        let [first, _] = daemons;
        let begin = self.now()?;
        first.ctl(&format!(
            "create -f - --start <<'MANIFEST'\n{}\nMANIFEST\n",
            spec.manifest(name)
        ));
        self.first_tick(begin, BOOT)?;
        let mut measured = Measured::default();
        for turn in 0..usize::try_from(runs)? {
            let (Some(from), Some(to)) = (daemons.get(turn % 2), daemons.get((turn + 1) % 2)) else {
                break;
            };
            measured.undisturbed_ms.push(self.undisturbed()?);
            measured.moves.push(self.migrate(kind, from, to)?);
        }
        let on = daemons.get(usize::try_from(runs)? % 2).context("a daemon")?;
        for turn in 0..runs {
            let snapshot = format!("s{turn}");
            let begin = self.now()?;
            on.ctl(&format!("snapshot create {snapshot} --vm {name}"));
            self.node().sh("sleep 0.5");
            measured.snapshots.push(Cost {
                silent_ms: self.silence(begin)?,
                paused_ms: pause_of_snapshot(&on.ctl("snapshot ls -o json"))?,
                ..Cost::default()
            });
            for (flag, into) in [
                ("", &mut measured.restore_ms),
                ("--on-demand", &mut measured.on_demand_ms),
            ] {
                on.ctl(&format!("stop --force {name}"));
                let begin = self.now()?;
                on.ctl(&format!("restore {snapshot} {flag}"));
                into.push((self.first_tick(begin, BOOT)? - begin) / 10.0);
            }
            on.ctl(&format!("snapshot rm {snapshot}"));
        }
        on.ctl(&format!("delete --force {name}"));
        Ok(measured)
    }

    fn migrate(&self, kind: Kind, from: &Daemon<'_>, to: &Daemon<'_>) -> Result<Cost> {
        let name = self.case.name();
        let sent = || mib(&from.within("cat /sys/class/net/peer/statistics/tx_bytes"));
        let (before, begin) = (sent()?, self.now()?);
        let force = if kind.throttled { "--force" } else { "" };
        let told = from.migrate(name, to, &format!("--downtime-limit {DOWNTIME_MS}ms {force}"));
        eprintln!("{told}");
        let wire_mib = sent()? - before;
        self.node().sh("sleep 0.5");
        let events = from.ctl("events -o json");
        let said = events.lines().rfind(|line| line.contains("\"Migrated\""));
        let numbers = numbers(
            said.and_then(|line| line.split("runs on ").nth(1))
                .unwrap_or_default(),
        );
        // "ADDRESS: BYTES bytes were sent, BYTES of them memory, in MS ms and ROUNDS rounds; the guest stood still for MS ms and …".
        let [_sent, memory, total, _rounds, paused] = numbers
            .get(5..10)
            .and_then(|five| <[f64; 5]>::try_from(five).ok())
            .with_context(|| format!("the event of the move: {said:?}"))?;
        Ok(Cost {
            silent_ms: self.silence(begin)?,
            paused_ms: paused,
            total_ms: total,
            wire_mib,
            pages_mib: memory / f64::from(1 << 20),
        })
    }

    fn qemu(&self, kind: Kind, encrypted: bool, runs: u32) -> Result<Measured> {
        let mut measured = Measured::default();
        let begin = self.now()?;
        let mut qemu = Qemu::start(self, kind, encrypted, 0, &From::Boot)?;
        self.first_tick(begin, BOOT)?;
        for turn in 1..=runs {
            measured.undisturbed_ms.push(self.undisturbed()?);
            let next = Qemu::start(self, kind, encrypted, turn, &From::Peer)?;
            let begin = self.now()?;
            let cost = qemu.migrate_to(&next)?;
            self.node().sh("sleep 0.5");
            measured.moves.push(Cost {
                silent_ms: self.silence(begin)?,
                ..cost
            });
            qemu = next;
        }
        for turn in 0..runs {
            let file = format!("{}/memory", self.folder);
            let begin = self.now()?;
            let cost = qemu.snapshot(&file)?;
            self.node().sh("sleep 0.5");
            measured.snapshots.push(Cost {
                silent_ms: self.silence(begin)?,
                ..cost
            });
            drop(qemu);
            let begin = self.now()?;
            qemu = Qemu::start(self, kind, encrypted, runs + 1 + turn, &From::File(&file))?;
            let restored = (self.first_tick(begin, BOOT)? - begin) / 10.0;
            measured.restore_ms.push(restored);
            measured.on_demand_ms.push(restored);
        }
        Ok(measured)
    }
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        // The test of leftovers reports a failure.
        let _ = self
            .node()
            .ssh(&format!("systemctl stop {}-hear", self.case.name()));
    }
}

/// Bytes as MiB.
fn mib(bytes: &str) -> Result<f64> {
    Ok(bytes.trim().parse::<f64>()? / f64::from(1 << 20))
}

/// For how long the guest stood still while the one snapshot that there is was taken, in milliseconds.
fn pause_of_snapshot(json: &str) -> Result<f64> {
    let rest = json.split_once("\"pauseDuration\"").map(|(_, rest)| rest);
    let seconds = rest.and_then(|rest| rest.split('"').nth(1)?.strip_suffix('s')?.parse::<f64>().ok());
    Ok(seconds.with_context(|| format!("no pause in {json}"))? * 1000.0)
}

/// All whole numbers in a text, in their order.
fn numbers(text: &str) -> Vec<f64> {
    let words = text.split(|letter: char| !letter.is_ascii_digit());
    words.filter_map(|word| word.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_ours_and_qemus_and_their_ratio() {
        let measured = |silent_ms| Measured {
            moves: vec![Cost {
                silent_ms,
                ..Cost::default()
            }],
            ..Measured::default()
        };
        let text = table(&[measured(50.0), measured(100.0), measured(25.0)]);
        assert!(
            text.contains("| migration: silence, ms | 50.0 | 100 | 25.0 | 0.50 | 2.00 |"),
            "{text}"
        );
    }

    #[test]
    fn a_snapshots_pause_is_read_in_milliseconds() {
        let json = "{\"items\": [{\"status\": {\"pauseDuration\": \"0.004500s\"}}]}";
        assert!((pause_of_snapshot(json).expect("a pause") - 4.5).abs() < 1e-9);
        pause_of_snapshot("{}").expect_err("there is none");
    }

    #[test]
    fn an_events_numbers_come_in_their_order() {
        let text = "127.0.0.1:7661: 90000 bytes were sent, 80000 of them memory, in 1200 ms and 3 rounds; the guest stood still for 35 ms and until the hand-over was done";
        let found = numbers(text);
        assert_eq!(
            found.get(5..10),
            Some(&[90_000.0, 80_000.0, 1200.0, 3.0, 35.0][..])
        );
    }
}
