//! `describe vm`: the resources of the node that a VM may use.

use vmmd_api::v1;

use super::describe::Lines;

/// Prints the set resources of the spec, besides the number of vCPUs and the size of the RAM.
pub fn of_vm(text: &mut Lines, spec: &v1::VmSpec) {
    let cpu = spec.cpu.clone().unwrap_or_default();
    for (key, percent) in [
        ("Core fraction", cpu.core_fraction_percent),
        ("Core limit", cpu.core_limit_percent),
    ] {
        if percent != 0 {
            text.put(key, &format!("{percent} %"));
        }
    }
    text.put("Host CPUs", &cpu.host_cpus);
    let memory = spec.memory.unwrap_or_default();
    text.put(
        "Huge pages",
        match memory.huge_pages() {
            v1::HugePages::Unspecified => "",
            v1::HugePages::HugePages2m => "2Mi",
            v1::HugePages::HugePages1g => "1Gi",
        },
    );
    for (key, wanted) in [("Prefault", memory.prefault), ("Mergeable", memory.mergeable)] {
        if wanted {
            text.put(key, "yes");
        }
    }
    let node = memory.numa_node.map(|node| node.to_string());
    text.put("NUMA node", &node.unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_spec_says_is_described() {
        let mut text = Lines::default();
        of_vm(&mut text, &v1::VmSpec::default());
        assert_eq!(text.0, "");
        let spec = v1::VmSpec {
            cpu: Some(v1::CpuSpec {
                cores: 1,
                core_fraction_percent: 20,
                core_limit_percent: 50,
                host_cpus: "0-3".into(),
            }),
            memory: Some(v1::MemorySpec {
                huge_pages: v1::HugePages::HugePages1g.into(),
                prefault: true,
                numa_node: Some(0),
                ..Default::default()
            }),
            ..Default::default()
        };
        of_vm(&mut text, &spec);
        insta::assert_snapshot!(text.0, @r"
        Core fraction:   20 %
        Core limit:      50 %
        Host CPUs:       0-3
        Huge pages:      1Gi
        Prefault:        yes
        NUMA node:       0
        ");
    }
}
