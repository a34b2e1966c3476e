//! A cable between two nodes: a NIC more in each, which lead to each other and nowhere else.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::json;

use super::Node;
use super::machine::Machine;

/// The NIC's name in each node.
pub const CABLE: &str = "cable";

/// QEMU's name for the port for such a NIC, which each node has. A NIC cannot be added to q35's
/// root bus while the machine runs.
pub const PORT: &str = "cable-port";

/// Pulled out when it is dropped.
#[derive(Debug)]
pub struct Cable {
    ends: [Machine; 2],
    socket: PathBuf,
}

impl Cable {
    /// Joins two nodes, whose addresses there are `addresses`, with the length of the network's prefix behind a slash.
    pub fn between(nodes: [&Node; 2], addresses: [&str; 2]) -> Result<Self> {
        let [first, second] = nodes.map(|node| node.machine.clone());
        let cable = Self {
            socket: first.sockets.join("cable.sock"),
            ends: [first, second],
        };
        for (end, (node, address)) in nodes.into_iter().zip(addresses).enumerate() {
            let mac = format!("52:54:00:76:6d:1{end}");
            plug(&node.machine, &cable.socket, end == 0, &mac)?;
            node.try_sh(&format!(
                "timeout 20 sh -c 'until grep -l {mac} /sys/class/net/*/address; do sleep 0.1; done' >/run/cable && \
                 there=$(cut -d/ -f5 /run/cable) && ip link set dev $there name {CABLE} && \
                 ip addr add {address} dev {CABLE} && ip link set dev {CABLE} up"
            ))
            .context("the NIC of the cable")?;
        }
        Ok(cable)
    }
}

/// The first end waits for the second one.
fn plug(machine: &Machine, socket: &Path, first: bool, mac: &str) -> Result<()> {
    let mut monitor = machine.monitor()?;
    let address = json!({"type": "unix", "path": socket});
    monitor.ask(
        "netdev_add",
        &json!({"type": "stream", "id": CABLE, "server": first, "addr": address}),
    )?;
    let nic = json!({"driver": "virtio-net-pci", "id": CABLE, "netdev": CABLE, "bus": PORT, "mac": mac});
    monitor.ask("device_add", &nic).map(drop)
}

fn unplug(machine: &Machine) -> Result<()> {
    let mut monitor = machine.monitor()?;
    monitor.delete(CABLE)?;
    monitor.ask("netdev_del", &json!({"id": CABLE})).map(drop)
}

impl Drop for Cable {
    fn drop(&mut self) {
        for end in &self.ends {
            // A node that has ended has no NIC any more.
            if let (Err(error), Ok(Some(_))) = (unplug(end), end.process()) {
                eprintln!("node: the cable stays in {}: {error:#}", end.name);
            }
        }
        // QEMU leaves it.
        let _ = fs::remove_file(&self.socket);
    }
}
