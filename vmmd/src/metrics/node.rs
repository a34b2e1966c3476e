//! Node metrics: its resources, and the share of the VMs.

use vmmd_api::v1::{ConditionStatus, NodeStatus};

use super::families::{Families, as_f64};

/// Adds it.
pub fn add(families: &mut Families, node: &NodeStatus) {
    for (of, resources) in [
        ("capacity", &node.capacity),
        ("allocatable", &node.allocatable),
        ("committed", &node.committed),
    ] {
        let Some(has) = resources else { continue };
        let labels = [("of", of)];
        let cores = |millis| as_f64(millis) / 1000.0;
        families.gauge("vmmd_node_vcpus", "Cores of VMs", &labels, cores(has.vcpu_millis));
        families.gauge(
            "vmmd_node_guaranteed_cpus",
            "Processors that VMs are guaranteed",
            &labels,
            cores(has.cpu_millis),
        );
        families.gauge(
            "vmmd_node_memory_bytes",
            "Memory for VMs",
            &labels,
            as_f64(has.memory_bytes),
        );
        families.gauge(
            "vmmd_node_disk_bytes",
            "Space for disks",
            &labels,
            as_f64(has.disk_bytes),
        );
        for (size, bytes) in [("2m", has.huge_pages_2m_bytes), ("1g", has.huge_pages_1g_bytes)] {
            families.gauge(
                "vmmd_node_huge_pages_bytes",
                "Huge pages for VMs",
                &[("of", of), ("size", size)],
                as_f64(bytes),
            );
        }
    }
    families.gauge(
        "vmmd_node_memory_available_bytes",
        "Memory that the kernel could give to new programs",
        &[],
        as_f64(node.memory_available_bytes),
    );
    for condition in &node.conditions {
        let value = match condition.status() {
            ConditionStatus::True => 1.0,
            ConditionStatus::False => 0.0,
            _ => continue,
        };
        families.gauge(
            "vmmd_node_condition",
            "Whether the node's condition holds; missing when that is unknown",
            &[("condition", &condition.r#type)],
            value,
        );
    }
}
