//! The node for people.

use vmmd_api::v1;
use vmmd_spec::cpu::Model;

use super::{
    describe::{Lines, conditions},
    disk::pairs,
};
use crate::manifest::quantity;

/// Everything about the node.
pub fn node(node: &v1::Node, now: jiff::Timestamp) -> String {
    let mut text = Lines::default();
    let metadata = node.metadata.clone().unwrap_or_default();
    let spec = node.spec.clone().unwrap_or_default();
    let node = node.status.clone().unwrap_or_default();
    text.put("Name", &metadata.name);
    text.put("vmmd", &node.version);
    text.put("Kernel", &node.kernel_version);
    text.put("CPU", &node.cpu_model);
    text.put("CPUs", &node.cpus.to_string());
    text.put("Memory", &quantity::show(node.memory_bytes));
    text.put("  available", &quantity::show(node.memory_available_bytes));
    text.put("  committed", &quantity::show(node.memory_committed_bytes));
    text.put("VMs", &format!("{} ({} running)", node.vms, node.vms_running));
    if spec.cordoned {
        let why = match spec.cordon_reason.as_str() {
            "" => "yes".to_owned(),
            reason => format!("yes ({reason})"),
        };
        text.put("Cordoned", &why);
    }
    text.put("Labels", &pairs(&metadata.labels, ", "));
    text.put("CPU features", &node.cpu_features.join(" "));
    text.put("CPU models", &node.cpu_models.join(" "));
    text.put("CPU of guests", &node.guest_cpu_features.join(" "));
    text.put("Features", &node.features.join(" "));
    resources(&mut text, &node);
    policies(&mut text, &spec);
    let numa = node.numa_nodes.iter();
    let numa: Vec<_> = numa
        .map(|numa| {
            vec![
                numa.id.to_string(),
                numa.cpus.clone(),
                quantity::show(numa.memory_bytes),
            ]
        })
        .collect();
    if !numa.is_empty() {
        text.list("NUMA nodes", vec!["ID", "CPUS", "MEMORY"], &numa);
    }
    conditions(&mut text, &node.conditions, now);
    text.0
}

/// `spec.cpu` of VMs that run on all of some nodes.
pub fn baseline(model: Model, further: &[String]) -> String {
    let mut text = format!("cpu:\n  model: {model}\n");
    if !further.is_empty() {
        text.push_str(&format!("  features:\n    add: [{}]\n", further.join(", ")));
    }
    text
}

/// Capacity of the node, resources allocatable to VMs, and committed resources.
fn resources(text: &mut Lines, node: &v1::NodeStatus) {
    let (Some(capacity), Some(allocatable), Some(committed)) =
        (node.capacity, node.allocatable, node.committed)
    else {
        return;
    };
    let cores = |millis: u64| format!("{}.{:03}", millis / 1000, millis % 1000);
    let row = |name: &str, show: &dyn Fn(u64) -> String, of: &dyn Fn(&v1::Resources) -> u64| {
        let amounts = [&capacity, &allocatable, &committed].map(|amounts| show(of(amounts)));
        std::iter::once(name.to_owned())
            .chain(amounts)
            .collect::<Vec<_>>()
    };
    let rows = [
        row("cores", &cores, &|amounts| amounts.vcpu_millis),
        row("processor time", &cores, &|amounts| amounts.cpu_millis),
        row("memory", &quantity::show, &|amounts| amounts.memory_bytes),
        row("huge pages 2Mi", &quantity::show, &|amounts| {
            amounts.huge_pages_2m_bytes
        }),
        row("huge pages 1Gi", &quantity::show, &|amounts| {
            amounts.huge_pages_1g_bytes
        }),
        row("disk", &quantity::show, &|amounts| amounts.disk_bytes),
    ];
    text.list(
        "Resources",
        vec!["NAME", "CAPACITY", "FOR VMS", "COMMITTED"],
        &rows,
    );
}

/// Adds the sizes that VMs may have; no table without a restriction.
fn policies(text: &mut Lines, node: &v1::NodeSpec) {
    let range = |least: String, most: String| {
        if least == most {
            least
        } else {
            format!("{least}-{most}")
        }
    };
    let rows: Vec<_> = node
        .sizing_policies
        .iter()
        .map(|policy| {
            let step = match policy.memory_step_bytes {
                0 => "any".to_owned(),
                step => quantity::show(step),
            };
            let fractions: Vec<_> = policy.core_fractions_percent.iter().map(u32::to_string).collect();
            vec![
                range(policy.min_cores.to_string(), policy.max_cores.to_string()),
                range(
                    quantity::show(policy.min_memory_bytes),
                    quantity::show(policy.max_memory_bytes),
                ),
                step,
                if fractions.is_empty() {
                    "any".to_owned()
                } else {
                    fractions.join(",")
                },
            ]
        })
        .collect();
    if !rows.is_empty() {
        text.list(
            "Sizes",
            vec!["CORES", "MEMORY", "STEP", "CORE FRACTIONS %"],
            &rows,
        );
    }
}
