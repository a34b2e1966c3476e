//! QEMU's side: processes with the same guest, which give it to each other.

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::{Cost, DOWNTIME_MS, Kind, MEMORY_MIB, Stage, mib};
use crate::node::{Kernel, Node, quote};

/// Ports of the processes that wait for a guest: this and the number of the process.
const PORT: u32 = 4440;
/// ChaCha20 as ours has it in an emulated node, so that both encrypt with the same: QEMU itself would ask for AES.
const PRIORITY: &str = "NORMAL:-CIPHER-ALL:+CHACHA20-POLY1305:+ECDHE-PSK:+DHE-PSK:+PSK";
/// How often it is asked whether a migration has ended, every tenth of a second.
const LOOKS: u32 = 1200;

/// Where a guest comes from.
pub enum From<'a> {
    /// It boots.
    Boot,
    /// Another process, over TCP.
    Peer,
    /// A file.
    File(&'a str),
}

/// A running QEMU.
pub struct Qemu<'case> {
    node: &'case Node,
    kind: Kind,
    /// With TLS and a key that both ends have.
    encrypted: bool,
    socket: String,
    tap: String,
    port: u32,
}

impl<'case> Qemu<'case> {
    /// Makes the key that both ends of a migration have, in a folder of the node.
    pub fn make_key(node: &Node, folder: &str) {
        let key = "echo vmmd:$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')";
        node.sh(&format!("{key} >{folder}/keys.psk"));
    }

    /// Boots the guest, or waits for an incoming one. `number` distinguishes several instances.
    pub fn start(
        stage: &'case Stage<'_>,
        kind: Kind,
        encrypted: bool,
        number: u32,
        from: &From<'_>,
    ) -> Result<Self> {
        let Stage {
            bridge,
            folder,
            initrd,
            ..
        } = stage;
        let node = stage.node();
        let (tap, socket) = (format!("qt{number}"), format!("{folder}/qmp{number}"));
        let incoming = match from {
            From::Boot => String::new(),
            From::Peer => "-incoming defer".to_owned(),
            From::File(path) => format!("-incoming 'exec:cat {path}'"),
        };
        let tls = format!("dir={folder},priority={PRIORITY}");
        let cmdline = format!("console=ttyS0 quiet panic=-1 {}", Stage::cmdline(kind));
        node.sh(&format!(
            "ip tuntap add {tap} mode tap && ip link set {tap} master {bridge} up && qemu-system-x86_64 -nodefaults -no-user-config -display none \
             -daemonize -enable-kvm -cpu host -smp 1 -m {MEMORY_MIB}M -machine q35 -serial file:{folder}/serial{number} \
             -qmp unix:{socket},server=on,wait=off -netdev tap,id=net,ifname={tap},script=no,downscript=no,vhost=off \
             -device virtio-net-pci,netdev=net,mac=52:54:00:77:00:02 -device virtio-rng-pci \
             -object tls-creds-psk,id=in,endpoint=server,{tls} -object tls-creds-psk,id=out,endpoint=client,username=vmmd,{tls} \
             -kernel {} -initrd {initrd} -append {} {incoming}",
            node.guests().vmlinuz(Kernel::Cloud612),
            quote(&cmdline),
        ));
        let qemu = Self {
            node,
            kind,
            encrypted,
            socket,
            tap,
            port: PORT + number,
        };
        if matches!(from, From::Peer) {
            qemu.set_credentials("in")?;
            qemu.ask("migrate-incoming", &json!({"uri": qemu.address()}))?;
        }
        Ok(qemu)
    }

    fn address(&self) -> String {
        format!("tcp:127.0.0.1:{}", self.port)
    }

    fn ask(&self, command: &str, arguments: &Value) -> Result<Value> {
        let arguments = quote(&arguments.to_string());
        let script = format!("/root/measure qmp {} {command} {arguments}", self.socket);
        serde_json::from_str(&self.node.sh(&script)).context("QEMU's answer")
    }

    fn set_capability(&self, name: &str, state: bool) -> Result<()> {
        let capability = json!({"capability": name, "state": state});
        let arguments = json!({"capabilities": [capability]});
        self.ask("migrate-set-capabilities", &arguments).map(drop)
    }

    fn set_credentials(&self, id: &str) -> Result<()> {
        let id = if self.encrypted { id } else { "" };
        self.ask("migrate-set-parameters", &json!({"tls-creds": id}))
            .map(drop)
    }

    /// Gives the guest to another process.
    pub fn migrate_to(&self, other: &Self) -> Result<Cost> {
        self.set_credentials("out")?;
        self.set_capability("auto-converge", self.kind.throttled)?;
        let sent = || mib(&self.node.sh("cat /sys/class/net/lo/statistics/tx_bytes"));
        let before = sent()?;
        let cost = self.migrate(&other.address())?;
        Ok(Cost {
            wire_mib: sent()? - before,
            ..cost
        })
    }

    /// Writes the running guest to a file. The guest continues.
    pub fn snapshot(&self, file: &str) -> Result<Cost> {
        self.set_capability("auto-converge", false)?;
        self.set_capability("background-snapshot", true)?;
        self.ask("migrate-set-parameters", &json!({"tls-creds": ""}))?;
        self.migrate(&format!("exec:cat >{file}"))
    }

    fn migrate(&self, to: &str) -> Result<Cost> {
        let limits = json!({"downtime-limit": DOWNTIME_MS, "max-bandwidth": 16_u64 << 30});
        self.ask("migrate-set-parameters", &limits)?;
        self.ask("migrate", &json!({"uri": to}))?;
        for _ in 0..LOOKS {
            let state = self.ask("query-migrate", &json!({}))?;
            let number = |pointer: &str| state.pointer(pointer).and_then(Value::as_f64).unwrap_or(0.0);
            match state.pointer("/status").and_then(Value::as_str) {
                Some("completed") => {
                    return Ok(Cost {
                        paused_ms: number("/downtime"),
                        total_ms: number("/total-time"),
                        pages_mib: number("/ram/normal-bytes") / f64::from(1 << 20),
                        ..Cost::default()
                    });
                }
                Some("failed" | "cancelled") => bail!("QEMU's migration: {state}"),
                _ => drop(self.node.sh("sleep 0.1")),
            }
        }
        bail!("QEMU's migration does not end");
    }
}

impl Drop for Qemu<'_> {
    fn drop(&mut self) {
        let Self { socket, tap, .. } = self;
        let _ = self.node.ssh(&format!(
            "/root/measure qmp {socket} quit '{{}}'; until ip link del {tap}; do sleep 0.1; done"
        ));
    }
}
