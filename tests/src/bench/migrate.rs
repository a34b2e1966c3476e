//! Live migration and snapshots, beside QEMU: a guest on a bridge sends a datagram every 5 ms, and what counts is for how long none comes.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{
    median,
    table::{Row, render},
};
use crate::{
    Case, Node, guest,
    initramfs::Extra,
    node::{Kernel, quote},
    programs,
    two_daemons::{self, Daemon},
    vm::{BOOT, VmSpec, base64},
};

/// Memory that the second kind of guest rewrites for ever, in MiB.
const REWRITTEN: u64 = 32;
/// How long the guest may stand still, as far as that can be foreseen, in milliseconds: QEMU's default.
const DOWNTIME_MS: u32 = 300;
/// Tells the two daemons from those of tests.
const NUMBER: u32 = 90;
/// UDP port to which guests tick.
const TICKS: u16 = 9000;
/// Addresses of the node on the bridge, and of the guest.
const NODE: &str = "10.77.0.1";
const GUEST: &str = "10.77.0.2";

/// What a move, or a snapshot, has cost.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    /// For how long no tick came, in milliseconds.
    silent_ms: f64,
    /// For how long the VMM says that the guest stood still.
    paused_ms: f64,
    total_ms: f64,
    sent_mib: f64,
}

/// What was measured of one VMM with one kind of guest.
#[derive(Debug, Default)]
struct Measured {
    /// The longest silence in two seconds without a move.
    undisturbed_ms: Vec<f64>,
    moves: Vec<Cost>,
    /// Silence during a snapshot.
    snapshot_ms: Vec<f64>,
    /// From the command to the first tick.
    restore_ms: Vec<f64>,
    /// The same with memory read on demand.
    on_demand_ms: Vec<f64>,
}

/// The node with what the guests need.
struct Stage<'case> {
    case: &'case Case,
    bridge: String,
    folder: String,
    initrd: String,
}

/// Measures and renders.
pub fn run(runs: u32) -> Result<String> {
    let case = Case::new("bench-migrate")?;
    let stage = Stage::new(&case)?;
    let daemons = two_daemons::pair(&case, NUMBER)?;
    for daemon in &daemons {
        daemon.join_bridge(&stage.bridge)?;
    }
    let mut text = format!(
        "### Live migration and snapshots\n\n1 vCPU, 256 MiB, the same kernel and initramfs, a NIC on a bridge; a datagram every 5 ms, as it comes to \
         the node. Ours between two daemons of the node, over TCP with TLS; QEMU between two processes over a UNIX socket, not encrypted, with its own \
         limits on bandwidth off. {DOWNTIME_MS} ms of downtime allowed. Medians of {runs} moves in turn, of one boot each.\n\n"
    );
    for (title, rewritten) in [
        ("An idle guest", 0),
        ("A guest that rewrites 32 MiB for ever", REWRITTEN),
    ] {
        let ours = stage.ours(&daemons, rewritten, runs).context("ours")?;
        let theirs = stage.qemu(rewritten, runs).context("QEMU")?;
        text += &format!("{title}:\n\n{}\n", table(&ours, &theirs));
    }
    Ok(text)
}

fn table(ours: &Measured, theirs: &Measured) -> String {
    let of = |name: &str, values: &dyn Fn(&Measured) -> Vec<f64>| {
        Row::new(name, [ours, theirs].map(|of| median(values(of))).to_vec())
    };
    let moves = |value: fn(&Cost) -> f64| move |of: &Measured| of.moves.iter().map(value).collect();
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
        of("migration: sent, MiB", &moves(|cost| cost.sent_mib)),
        of("snapshot: silence, ms", &|of| of.snapshot_ms.clone()),
        of("restore to the first tick, memory copied, ms", &|of| {
            of.restore_ms.clone()
        }),
        of("restore to the first tick, on demand, ms", &|of| {
            of.on_demand_ms.clone()
        }),
    ];
    render(&["vmm", "q35"], &rows)
}

impl<'case> Stage<'case> {
    fn new(case: &'case Case) -> Result<Self> {
        let node = case.node();
        let measure = programs::build_static("vmmd-measure", "measure")?;
        node.copy_in(&measure, "/root/measure")?;
        let initrd = guest::initrd_with(Kernel::Cloud612, &[Extra::new(measure, "bin/measure")])?;
        let folder = case.folder()?;
        let there = format!("{folder}/initrd");
        node.copy_in(&initrd, &there)?;
        let bridge = case.bridge()?;
        node.sh(&format!("ip addr add {NODE}/24 dev {bridge}"))?;
        node.sh(&format!(
            "systemd-run -q --collect --unit={}-hear /bin/sh -c '/root/measure hear {TICKS} >{folder}/heard'",
            case.name()
        ))?;
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

    fn cmdline(rewritten: u64) -> String {
        let script = format!("measure tick --to {NODE}:{TICKS} --rewrite-mib {rewritten}");
        format!("guest.ip={GUEST}/24 guest.run={}", base64(script.as_bytes()))
    }

    /// The node's time in tenths of a millisecond.
    fn now(&self) -> Result<f64> {
        Ok(self.node().sh("date +%s%4N")?.trim().parse()?)
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
        let text = self.node().sh(&script)?;
        let times = text.lines().map(str::parse);
        times.collect::<Result<_, _>>().context("read when ticks came")
    }

    /// Waits until ticks come and returns when the first since `begin` came.
    fn first_tick(&self, begin: f64, seconds: u64) -> Result<f64> {
        let script = format!(
            "timeout {seconds} sh -c 'until awk \"\\$1 >= {begin:.0} {{ print; exit }}\" {}/heard | grep .; do sleep 0.1; done'",
            self.folder
        );
        Ok(self.node().sh(&script)?.trim().parse()?)
    }

    /// Two seconds in which nothing happens.
    fn undisturbed(&self) -> Result<f64> {
        let begin = self.now()?;
        self.node().sh("sleep 2")?;
        self.silence(begin)
    }

    fn ours(&self, daemons: &[Daemon<'_>; 2], rewritten: u64, runs: u32) -> Result<Measured> {
        let name = self.case.name();
        let spec = VmSpec::new(
            self.node().guests().vmlinuz(Kernel::Cloud612),
            Some(self.initrd.clone()),
        )
        .cmdline(&Self::cmdline(rewritten))
        .nic("eth0", &self.bridge);
        let [first, _] = daemons;
        let begin = self.now()?;
        first.ctl(&format!(
            "create -f - --start <<'MANIFEST'\n{}\nMANIFEST\n",
            spec.manifest(name)
        ))?;
        self.first_tick(begin, BOOT)?;
        let mut measured = Measured::default();
        for turn in 0..usize::try_from(runs)? {
            let (Some(from), Some(to)) = (daemons.get(turn % 2), daemons.get((turn + 1) % 2)) else {
                break;
            };
            measured.undisturbed_ms.push(self.undisturbed()?);
            measured.moves.push(self.migrate(from, to)?);
        }
        let on = daemons.get(usize::try_from(runs)? % 2).context("a daemon")?;
        for turn in 0..runs {
            let snapshot = format!("s{turn}");
            let begin = self.now()?;
            on.ctl(&format!("snapshot create {snapshot} --vm {name}"))?;
            self.node().sh("sleep 0.5")?;
            measured.snapshot_ms.push(self.silence(begin)?);
            for (flag, into) in [
                ("", &mut measured.restore_ms),
                ("--on-demand", &mut measured.on_demand_ms),
            ] {
                on.ctl(&format!("stop --force {name}"))?;
                let begin = self.now()?;
                on.ctl(&format!("restore {snapshot} {flag}"))?;
                into.push((self.first_tick(begin, BOOT)? - begin) / 10.0);
            }
            on.ctl(&format!("snapshot rm {snapshot}"))?;
        }
        on.ctl(&format!("delete --force {name}"))?;
        Ok(measured)
    }

    fn migrate(&self, from: &Daemon<'_>, to: &Daemon<'_>) -> Result<Cost> {
        let name = self.case.name();
        let begin = self.now()?;
        from.ctl(&format!(
            "migrate {name} --to {} --downtime-limit {DOWNTIME_MS}ms 2>&1",
            to.address()
        ))?;
        self.node().sh("sleep 0.5")?;
        let events = from.ctl("events -o json")?;
        let said = events.lines().rfind(|line| line.contains("\"Migrated\""));
        let numbers = numbers(
            said.and_then(|line| line.split("runs on ").nth(1))
                .unwrap_or_default(),
        );
        // "ADDRESS: BYTES bytes were sent in MS ms and ROUNDS rounds, the guest stood still for MS ms".
        let [sent, total, _rounds, paused] = numbers
            .get(5..9)
            .and_then(|four| <[f64; 4]>::try_from(four).ok())
            .with_context(|| format!("the event of the move: {said:?}"))?;
        Ok(Cost {
            silent_ms: self.silence(begin)?,
            paused_ms: paused,
            total_ms: total,
            sent_mib: sent / f64::from(1 << 20),
        })
    }

    fn qemu(&self, rewritten: u64, runs: u32) -> Result<Measured> {
        let mut measured = Measured::default();
        let begin = self.now()?;
        let mut qemu = Qemu::start(self, rewritten, 0, "")?;
        self.first_tick(begin, BOOT)?;
        for turn in 1..=runs {
            measured.undisturbed_ms.push(self.undisturbed()?);
            let socket = format!("unix:{}/migrate", self.folder);
            let next = Qemu::start(self, rewritten, turn, &socket)?;
            let begin = self.now()?;
            let cost = qemu.migrate(&socket)?;
            self.node().sh("sleep 0.5")?;
            measured.moves.push(Cost {
                silent_ms: self.silence(begin)?,
                ..cost
            });
            qemu = next;
        }
        for turn in 0..runs {
            let file = format!("{}/memory", self.folder);
            let begin = self.now()?;
            qemu.ask(
                "migrate-set-capabilities",
                "{\"capabilities\": [{\"capability\": \"background-snapshot\", \"state\": true}]}",
            )?;
            qemu.migrate(&format!("exec:cat >{file}"))?;
            self.node().sh("sleep 0.5")?;
            measured.snapshot_ms.push(self.silence(begin)?);
            drop(qemu);
            let begin = self.now()?;
            qemu = Qemu::start(self, rewritten, runs + 1 + turn, &format!("exec:cat {file}"))?;
            measured
                .restore_ms
                .push((self.first_tick(begin, BOOT)? - begin) / 10.0);
        }
        Ok(measured)
    }
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        // What is left is reported by the test of leftovers.
        let _ = self
            .node()
            .ssh(&format!("systemctl stop {}-hear", self.case.name()));
    }
}

/// A running QEMU.
struct Qemu<'case> {
    node: &'case Node,
    socket: String,
    tap: String,
}

impl<'case> Qemu<'case> {
    /// Boots the guest, or waits for one that comes from `incoming`. `number` tells several apart.
    fn start(stage: &'case Stage<'_>, rewritten: u64, number: u32, incoming: &str) -> Result<Self> {
        let Stage {
            bridge,
            folder,
            initrd,
            ..
        } = stage;
        let node = stage.node();
        let (tap, socket) = (format!("qt{number}"), format!("{folder}/qmp{number}"));
        let incoming = match incoming {
            "" => String::new(),
            from => format!("-incoming '{from}'"),
        };
        let cmdline = format!("console=ttyS0 quiet panic=-1 {}", Stage::cmdline(rewritten));
        node.sh(&format!(
            "ip tuntap add {tap} mode tap && ip link set {tap} master {bridge} up && qemu-system-x86_64 -nodefaults -no-user-config -display none \
             -daemonize -enable-kvm -cpu host -smp 1 -m 256M -machine q35 -serial file:{folder}/serial{number} -qmp unix:{socket},server=on,wait=off \
             -netdev tap,id=net,ifname={tap},script=no,downscript=no,vhost=off -device virtio-net-pci,netdev=net,mac=52:54:00:77:00:02 \
             -device virtio-rng-pci -kernel {} -initrd {initrd} -append {} {incoming}",
            node.guests().vmlinuz(Kernel::Cloud612),
            quote(&cmdline),
        ))?;
        Ok(Self { node, socket, tap })
    }

    fn ask(&self, command: &str, arguments: &str) -> Result<Value> {
        let script = format!("/root/measure qmp {} {command} {}", self.socket, quote(arguments));
        serde_json::from_str(&self.node.sh(&script)?).context("QEMU's answer")
    }

    fn migrate(&self, to: &str) -> Result<Cost> {
        let limits = format!("{{\"downtime-limit\": {DOWNTIME_MS}, \"max-bandwidth\": 17179869184}}");
        self.ask("migrate-set-parameters", &limits)?;
        self.ask("migrate", &format!("{{\"uri\": \"{to}\"}}"))?;
        for _ in 0..600 {
            let state = self.ask("query-migrate", "{}")?;
            let number = |pointer: &str| state.pointer(pointer).and_then(Value::as_f64).unwrap_or(0.0);
            match state.pointer("/status").and_then(Value::as_str) {
                Some("completed") => {
                    return Ok(Cost {
                        silent_ms: 0.0,
                        paused_ms: number("/downtime"),
                        total_ms: number("/total-time"),
                        sent_mib: number("/ram/transferred") / f64::from(1 << 20),
                    });
                }
                Some("failed" | "cancelled") => anyhow::bail!("QEMU's migration: {state}"),
                _ => self.node.sh("sleep 0.1").map(drop)?,
            }
        }
        ensure!(false, "QEMU's migration does not end");
        Ok(Cost::default())
    }
}

impl Drop for Qemu<'_> {
    fn drop(&mut self) {
        let Self { socket, tap, .. } = self;
        let _ = self.node.ssh(&format!(
            "/root/measure qmp {socket} quit '{{}}'; sleep 0.3; ip link del {tap}"
        ));
    }
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
        let text = table(&measured(50.0), &measured(100.0));
        assert!(
            text.contains("| migration: silence, ms | 50.0 | 100 | 0.50 |"),
            "{text}"
        );
    }

    #[test]
    fn an_events_numbers_come_in_their_order() {
        let text =
            "127.0.0.1:7661: 90000 bytes were sent in 1200 ms and 3 rounds, the guest stood still for 35 ms";
        let found = numbers(text);
        assert_eq!(found.get(5..9), Some(&[90000.0, 1200.0, 3.0, 35.0][..]));
    }
}
