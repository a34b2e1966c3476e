//! Sizing policies: which sizes VMs may have on this node.

use serde::{Deserialize, Serialize};
use vmmd_api::v1;
use vmmd_spec::{
    Violations,
    topology::Topology,
    vm::{self, VmSpec},
};

/// `[[sizing]]`: VMs of these many cores may have this much memory and these core fractions. A VM must fit one policy,
/// when there are any.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// Least number of cores, from 1.
    pub min_cores: u32,
    /// Greatest number of cores, up to 254.
    pub max_cores: u32,
    /// Least memory in MiB. Default 64, the least that a VM can have.
    #[serde(default = "min_memory")]
    pub min_memory_mib: u64,
    /// Greatest memory in MiB. Default 4,194,304, the most that a VM can have.
    #[serde(default = "max_memory")]
    pub max_memory_mib: u64,
    /// The memory is a multiple of this number of MiB; with 0 it is any that a VM can have. Default 0.
    #[serde(default)]
    pub memory_step_mib: u64,
    /// Core fractions in percent; any when the list is empty. Default `[]`.
    #[serde(default)]
    pub core_fractions_percent: Vec<u32>,
}

fn min_memory() -> u64 {
    vm::MIN_MEMORY >> 20
}

fn max_memory() -> u64 {
    vm::MAX_MEMORY >> 20
}

impl Policy {
    /// Checks the value ranges.
    pub fn check(&self) -> Result<(), String> {
        let within = |key: &str, value: u64, least: u64, most: u64| {
            if (least..=most).contains(&value) {
                return Ok(());
            }
            Err(format!("`{key}` must be {least} to {most}, is {value}"))
        };
        within("min_cores", self.min_cores.into(), 1, Topology::MAX_CORES.into())?;
        let cores = (u64::from(self.min_cores), u64::from(Topology::MAX_CORES));
        within("max_cores", self.max_cores.into(), cores.0, cores.1)?;
        within("min_memory_mib", self.min_memory_mib, min_memory(), max_memory())?;
        let least = self.min_memory_mib;
        within("max_memory_mib", self.max_memory_mib, least, max_memory())?;
        within("memory_step_mib", self.memory_step_mib, 0, max_memory())?;
        for fraction in &self.core_fractions_percent {
            within("core_fractions_percent", u64::from(*fraction), 1, 100)?;
        }
        Ok(())
    }

    fn has_cores(&self, cores: u32) -> bool {
        (self.min_cores..=self.max_cores).contains(&cores)
    }

    fn has_memory(&self, bytes: u64) -> bool {
        let range = self.min_memory_mib << 20..=self.max_memory_mib << 20;
        range.contains(&bytes) && bytes.is_multiple_of((self.memory_step_mib << 20).max(1))
    }

    fn has_fraction(&self, percent: u32) -> bool {
        self.core_fractions_percent.is_empty() || self.core_fractions_percent.contains(&percent)
    }

    /// The memory sizes it allows, in words.
    fn memory(&self) -> String {
        let range = format!("{} to {} MiB", self.min_memory_mib, self.max_memory_mib);
        match self.memory_step_mib {
            0 => range,
            step => format!("{range} in steps of {step} MiB"),
        }
    }
}

impl From<&Policy> for v1::SizingPolicy {
    fn from(policy: &Policy) -> Self {
        Self {
            min_cores: policy.min_cores,
            max_cores: policy.max_cores,
            min_memory_bytes: policy.min_memory_mib << 20,
            max_memory_bytes: policy.max_memory_mib << 20,
            memory_step_bytes: policy.memory_step_mib << 20,
            core_fractions_percent: policy.core_fractions_percent.clone(),
        }
    }
}

/// Checks the VM's size against the policies. The error names the allowed sizes by field.
pub fn check(policies: &[Policy], spec: &VmSpec) -> Result<(), Violations> {
    let (cores, memory) = (spec.topology.cores(), spec.memory_bytes);
    let fraction = spec.cpu.fraction_percent;
    let fits = |policy: &&Policy| {
        policy.has_cores(cores) && policy.has_memory(memory) && policy.has_fraction(fraction)
    };
    if policies.is_empty() || policies.iter().any(|policy| fits(&policy)) {
        return Ok(());
    }
    let or = |words: Vec<String>| words.join(" or ");
    let mut found = Violations::default();
    let of_cores: Vec<_> = policies.iter().filter(|policy| policy.has_cores(cores)).collect();
    if of_cores.is_empty() {
        let ranges = policies
            .iter()
            .map(|policy| match (policy.min_cores, policy.max_cores) {
                (least, most) if least == most => least.to_string(),
                (least, most) => format!("{least} to {most}"),
            });
        let allowed = or(ranges.collect());
        found.add(
            "spec.cpu.cores",
            format_args!("must be {allowed} on this node, is {cores}"),
        );
        return Err(found);
    }
    // Several policies may cover this number of cores. The policies that match the fraction give
    // the allowed memory, and the reverse.
    let by_fraction: Vec<_> = of_cores
        .iter()
        .filter(|policy| policy.has_fraction(fraction))
        .collect();
    let by_memory: Vec<_> = of_cores
        .iter()
        .filter(|policy| policy.has_memory(memory))
        .collect();
    if by_memory.is_empty() || !by_fraction.is_empty() {
        let of = if by_fraction.is_empty() {
            of_cores.iter().collect()
        } else {
            by_fraction.clone()
        };
        let allowed = or(of.iter().map(|policy| policy.memory()).collect());
        let problem = format_args!(
            "must be {allowed} with {cores} cores on this node, is {} MiB",
            memory >> 20
        );
        found.add("spec.memory.sizeBytes", problem);
    }
    if by_fraction.is_empty() {
        let of = if by_memory.is_empty() {
            of_cores.iter().collect()
        } else {
            by_memory
        };
        let mut allowed: Vec<_> = of
            .iter()
            .flat_map(|policy| policy.core_fractions_percent.clone())
            .collect();
        allowed.sort_unstable();
        allowed.dedup();
        let allowed = or(allowed.iter().map(u32::to_string).collect());
        let problem = format_args!("must be {allowed} with {cores} cores on this node, is {fraction}");
        found.add("spec.cpu.coreFractionPercent", problem);
    }
    Err(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capacity::placement::tests::spec;

    fn policy(cores: (u32, u32), memory: (u64, u64, u64), fractions: &[u32]) -> Policy {
        Policy {
            min_cores: cores.0,
            max_cores: cores.1,
            min_memory_mib: memory.0,
            max_memory_mib: memory.1,
            memory_step_mib: memory.2,
            core_fractions_percent: fractions.to_vec(),
        }
    }

    /// Refused fields, each with a part of its message.
    type Refused = &'static [(&'static str, &'static str)];

    #[test]
    fn a_size_fits_one_policy_or_is_refused_with_what_is_allowed() {
        let policies = [
            policy((1, 2), (512, 2048, 512), &[5, 20, 100]),
            policy((4, 4), (2048, 8192, 0), &[]),
            policy((2, 2), (4096, 4096, 0), &[100]),
        ];
        // Cores, MiB, core fraction, refused fields.
        let table: &[(u32, u64, u32, Refused)] = &[
            (1, 512, 5, &[]),
            (2, 2048, 100, &[]),
            (2, 4096, 100, &[]),
            (4, 2050, 37, &[]),
            (3, 512, 5, &[("spec.cpu.cores", "1 to 2 or 4 or 2")]),
            (
                1,
                768,
                5,
                &[("spec.memory.sizeBytes", "512 to 2048 MiB in steps of 512 MiB")],
            ),
            (1, 512, 50, &[("spec.cpu.coreFractionPercent", "5 or 20 or 100")]),
            (2, 4096, 20, &[("spec.memory.sizeBytes", "512 to 2048 MiB")]),
            (2, 4096, 50, &[("spec.cpu.coreFractionPercent", "be 100 with")]),
            (
                1,
                4096,
                50,
                &[
                    ("spec.memory.sizeBytes", "512"),
                    ("spec.cpu.coreFractionPercent", "5 or 20"),
                ],
            ),
        ];
        for (cores, mib, fraction, expected) in table {
            let found = check(&policies, &spec(*cores, *mib, *fraction))
                .err()
                .unwrap_or_default()
                .0;
            let fields: Vec<_> = found.iter().map(|violation| violation.field.as_str()).collect();
            let wanted: Vec<_> = expected.iter().map(|(field, _)| *field).collect();
            assert_eq!(fields, wanted, "{cores} {mib} {fraction}");
            for (violation, (_, words)) in found.iter().zip(*expected) {
                assert!(violation.description.contains(words), "{violation}");
            }
        }
        assert!(check(&[], &spec(3, 768, 50)).is_ok());
    }

    #[test]
    fn a_policy_that_no_vm_could_fit_is_refused_by_key() {
        let good = policy((1, 2), (512, 2048, 512), &[5]);
        assert_eq!(good.check(), Ok(()));
        for (wrong, key) in [
            (policy((0, 2), (512, 2048, 512), &[5]), "min_cores"),
            (policy((3, 2), (512, 2048, 512), &[5]), "max_cores"),
            (policy((1, 255), (512, 2048, 512), &[5]), "max_cores"),
            (policy((1, 2), (1, 2048, 512), &[5]), "min_memory_mib"),
            (policy((1, 2), (512, 511, 512), &[5]), "max_memory_mib"),
            (policy((1, 2), (512, 1 << 60, 512), &[5]), "max_memory_mib"),
            (policy((1, 2), (512, 512, u64::MAX), &[5]), "memory_step_mib"),
            (policy((1, 2), (512, 512, 0), &[0]), "core_fractions_percent"),
            (policy((1, 2), (512, 512, 0), &[5, 101]), "core_fractions_percent"),
        ] {
            let problem = wrong.check().unwrap_err();
            assert!(problem.contains(key), "{key}: {problem}");
        }
    }
}
