//! The node for people.

use proto::v1;

use super::describe::{Lines, conditions};
use crate::manifest::quantity;

/// Everything about the node.
pub fn node(node: &v1::Node, now: jiff::Timestamp) -> String {
    let mut text = Lines::default();
    text.put("Name", &node.name);
    text.put("vmmd", &node.version);
    text.put("Kernel", &node.kernel_version);
    text.put("CPU", &node.cpu_model);
    text.put("CPUs", &node.cpus.to_string());
    text.put("Memory", &quantity::show(node.memory_bytes));
    text.put("  available", &quantity::show(node.memory_available_bytes));
    text.put("  committed", &quantity::show(node.memory_committed_bytes));
    text.put("VMs", &format!("{} ({} running)", node.vms, node.vms_running));
    conditions(&mut text, &node.conditions, now);
    text.0
}
