//! A VirtualMachine as a VM of vmmd: validated before a node is asked for it, and what it takes of one.

use proto::{
    manifest::{self, yaml},
    model::cpu::CpuShare,
    v1::{self, RunPolicy},
};
use serde_json::{Map, Value, json};

/// What is wrong with a spec, one sentence with the paths of the fields.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(pub String);

/// The VM of vmmd with this name.
///
/// # Errors
///
/// All that is wrong with it.
pub fn vm(name: &str, spec: &Map<String, Value>) -> Result<v1::Vm, Invalid> {
    let document = manifest::with_head(manifest::VM, json!({"metadata": {"name": name}, "spec": spec}));
    // JSON is YAML.
    let roots = yaml::documents(&document.to_string()).map_err(|error| Invalid(error.message))?;
    let [root] = roots.as_slice() else {
        return Err(Invalid("spec.vm: is no single object".to_owned()));
    };
    match manifest::vm(root) {
        Ok((vm, _)) => Ok(vm),
        Err(problems) => {
            let texts = problems.iter().map(|problem| {
                let path = problem
                    .path
                    .strip_prefix("spec")
                    .map_or_else(|| problem.path.clone(), |rest| format!("spec.vm{rest}"));
                format!("{path}: {}", problem.text)
            });
            Err(Invalid(texts.collect::<Vec<_>>().join("; ")))
        }
    }
}

/// When a run is followed by another one.
pub fn run_policy(vm: &v1::Vm) -> RunPolicy {
    match vm.spec.as_ref().map(v1::VmSpec::run_policy).unwrap_or_default() {
        RunPolicy::Unspecified => RunPolicy::AlwaysOnUnlessStopped,
        policy => policy,
    }
}

/// What a VM takes of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requests {
    /// Guaranteed processor time, in thousandths of a processor.
    pub cpu_millis: u64,
    /// Memory, huge pages not included.
    pub memory_bytes: u64,
    /// Huge pages of 2 MiB.
    pub huge_pages_2m_bytes: u64,
    /// Huge pages of 1 GiB.
    pub huge_pages_1g_bytes: u64,
}

/// Of a valid VM, with `overhead` bytes of memory for what runs it.
pub fn requests(vm: &v1::Vm, overhead: u64) -> Requests {
    let spec = vm.spec.clone().unwrap_or_default();
    let cpu = spec.cpu.unwrap_or_default();
    let memory = spec.memory.unwrap_or_default();
    let fraction_percent = match cpu.core_fraction_percent {
        0 => CpuShare::WHOLE.fraction_percent,
        fraction => fraction,
    };
    let share = CpuShare {
        fraction_percent,
        limit_percent: None,
    };
    let size = memory.size_bytes;
    let (small, large, huge) = match memory.huge_pages() {
        v1::HugePages::Unspecified => (size, 0, 0),
        v1::HugePages::HugePages2m => (0, size, 0),
        v1::HugePages::HugePages1g => (0, 0, size),
    };
    Requests {
        cpu_millis: share.millis(cpu.cores),
        memory_bytes: small.saturating_add(overhead),
        huge_pages_2m_bytes: large,
        huge_pages_1g_bytes: huge,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(value: &Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    fn small() -> Value {
        json!({
            "cpu": {"cores": 2, "coreFractionPercent": 50},
            "memory": {"sizeBytes": "256Mi"},
            "boot": {"linux": {"kernel": "/srv/vmlinuz"}},
            "runPolicy": "manual",
        })
    }

    #[test]
    fn a_spec_is_a_manifest() {
        let vm = vm("demo", &spec(&small())).unwrap();
        assert_eq!(vm.metadata.as_ref().unwrap().name, "demo");
        assert_eq!(run_policy(&vm), RunPolicy::Manual);
        let wanted = Requests {
            cpu_millis: 1000,
            memory_bytes: (256 << 20) + 5,
            huge_pages_2m_bytes: 0,
            huge_pages_1g_bytes: 0,
        };
        assert_eq!(requests(&vm, 5), wanted);
    }

    #[test]
    fn huge_pages_are_no_memory() {
        let mut value = small();
        value["memory"]["hugePages"] = "HUGE_PAGES_2M".into();
        let vm = vm("demo", &spec(&value)).unwrap();
        let requests = requests(&vm, 5);
        assert_eq!(
            (requests.memory_bytes, requests.huge_pages_2m_bytes),
            (5, 256 << 20)
        );
    }

    #[test]
    fn all_that_is_wrong_is_said_with_the_path_of_the_field() {
        let mut value = small();
        value["memory"]["sizeBytes"] = 5.into();
        value["disks"] = json!([{"name": "root", "path": "relative"}]);
        let Invalid(text) = vm("demo", &spec(&value)).unwrap_err();
        assert!(text.contains("spec.vm.memory.sizeBytes: "), "{text}");
        assert!(text.contains("spec.vm.disks[0].path: "), "{text}");
    }
}
