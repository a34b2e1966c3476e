//! Units of systemd in the node that are killed.

use anyhow::Context as _;

use super::Node;
use crate::must;

/// Killed main process of a unit.
#[derive(Debug)]
#[must_use = "systemd starts the unit again"]
pub struct Killed {
    unit: String,
    pid: u32,
}

impl Node {
    /// Kills the main process of a unit with SIGKILL, once the unit is active. The process's end is not waited for.
    #[track_caller]
    pub fn kill_unit(&self, unit: &str) -> Killed {
        let pid = self.sh(&format!(
            "until systemctl is-active -q {unit}; do sleep 0.1; done; pid=$(systemctl show -P MainPID {unit}) && kill -9 $pid && echo $pid"
        ));
        Killed {
            unit: unit.to_owned(),
            pid: must(pid.trim().parse().context("a process id")),
        }
    }

    /// Waits until systemd has another process for the unit, and calls it active.
    #[track_caller]
    pub fn wait_restarted(&self, killed: &Killed) {
        let Killed { unit, pid } = killed;
        self.sh(&format!(
            "while [ \"$(systemctl show -P MainPID {unit})\" = {pid} ] || ! systemctl is-active -q {unit}; do sleep 0.1; done"
        ));
    }
}
